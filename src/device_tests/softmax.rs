//! Tests of the operations in `hpctrain_device::ops::softmax`.

use crate::common::{Results, close, down, random, rounded, to_f64, up};
use hpctrain_device::Kernels;

pub fn softmaxes<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, width) in [(1, 1), (7, 33), (70, 10), (3, 5001)] {
        let x: Vec<f32> = random(b, 50, rows * width).iter().map(|x| 3.0 * x + 50.0).collect();
        let x = rounded(b, &x);
        let dy = random(b, 51, rows * width);
        let mut want_y = vec![];
        let mut want_d = vec![];
        for (x, dy) in x.chunks(width).zip(dy.chunks(width)) {
            let x = to_f64(x);
            let dy = to_f64(dy);
            let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = x.iter().map(|x| (x - top).exp()).sum();
            let y: Vec<f64> = x.iter().map(|x| (x - top).exp() / total).collect();
            let dot: f64 = y.iter().zip(&dy).map(|(y, dy)| y * dy).sum();
            want_d.extend(y.iter().zip(&dy).map(|(y, dy)| y * (dy - dot)));
            want_y.extend(y);
        }
        let xb = up(b, &x);
        let mut y = up(b, &vec![0.0; rows * width]);
        let mut d = up(b, &dy);
        b.softmax(width, B::all(&xb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &want_y, "softmax");
        b.softmax_backward(width, B::all(&y), B::all_mut(&mut d)).unwrap();
        if width > 1 {
            close(b, &d, &want_d, "softmax backward");
        }
        results.extend([down(b, &y), down(b, &d)]);
    }
    results
}
