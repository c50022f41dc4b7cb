//! Tests of the operations in `hpctrain_device::ops::rotary`.

use crate::common::{Results, close, down, random, to_f64, up, up_f32};
use hpctrain_device::{Kernels, Rotary};

pub fn rotations<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (batch, time, heads, head_width, others) in
        [(1, 1, 1, 2, 0), (2, 33, 3, 6, 5), (3, 17, 2, 64, 64)]
    {
        let rows = batch * time;
        let half = head_width / 2;
        let width = heads * head_width + others;
        let angle = |t: usize, i: usize| t as f64 * 100f64.powf(-(i as f64) / half as f64);
        // The table may be of more positions than there are.
        let table = (0..time + 1).flat_map(|t| {
            let angles = (0..half).map(move |i| angle(t, i));
            angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|x| x as f32)
        });
        let table = up_f32(b, &table.collect::<Vec<_>>());
        let x = random(b, 37, rows * width);
        for back in [false, true] {
            let mut turned = up(b, &x);
            let shape = Rotary { batch, time, heads, head_width, width, inverse: back };
            b.rotary(shape, B::all(&table), B::all_mut(&mut turned)).unwrap();
            let mut want = to_f64(&x);
            for (row, head, i) in
                (0..rows * heads * half).map(|n| (n / half / heads, n / half % heads, n % half))
            {
                let (sin, cos) = angle(row % time, i).sin_cos();
                let sin = if back { -sin } else { sin };
                let at = row * width + head * head_width + i;
                let [first, second] = [x[at], x[at + half]].map(f64::from);
                (want[at], want[at + half]) =
                    (first * cos - second * sin, second * cos + first * sin);
            }
            close(b, &turned, &want, "rotary positions");
            results.push(down(b, &turned));
        }
    }
    results
}
