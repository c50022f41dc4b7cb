//! Tests of the operations in `hpctrain_device::ops::strided_copy`.

use crate::common::{Results, down, random, up};
use hpctrain_device::{Kernels, StridedCopy};

pub fn columns<B: Kernels>(b: &B) -> Results {
    for (rows, count, from, to) in
        [(1, 1, [1, 0], [1, 0]), (33, 3, [7, 2], [5, 1]), (700, 31, [31, 0], [65, 34])]
    {
        let x = random(b, 67, rows * from[0]);
        let y = random(b, 68, rows * to[0]);
        let xb = up(b, &x);
        let mut yb = up(b, &y);
        let mut want = y;
        for (row, column) in (0..rows).flat_map(|row| (0..count).map(move |column| (row, column))) {
            want[row * to[0] + to[1] + column] = x[row * from[0] + from[1] + column];
        }
        b.copy_columns(StridedCopy { rows, count, from, to }, B::all(&xb), B::all_mut(&mut yb))
            .unwrap();
        assert_eq!(down(b, &yb), want);
    }
    vec![]
}
