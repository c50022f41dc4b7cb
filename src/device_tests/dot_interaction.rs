//! Tests of the operations in `hpctrain_device::ops::dot_interaction`.

use crate::common::{Results, close, down, random, to_f64, up};
use hpctrain_device::{DotInteraction, Kernels};

pub fn pairs<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    // Numbers of pairs whose square root, which indexes them, is whole or almost.
    for (samples, rows, width) in [(1, 2, 1), (3, 5, 7), (33, 27, 16), (2, 130, 3), (700, 3, 35)] {
        let shape = DotInteraction { samples, rows, width };
        let inputs = rows * width;
        let outputs = shape.outputs();
        let x = random(b, 71, samples * inputs);
        let dy = random(b, 72, samples * outputs);
        let wx = to_f64(&x);
        let wdy = to_f64(&dy);
        let mut want_y = Vec::new();
        let mut want_dx = vec![0.0; samples * inputs];
        for sample in 0..samples {
            let x = &wx[sample * inputs..][..inputs];
            let dy = &wdy[sample * outputs..][..outputs];
            let dx = &mut want_dx[sample * inputs..][..inputs];
            want_y.extend_from_slice(&x[..width]);
            dx[..width].copy_from_slice(&dy[..width]);
            let pairs = (1..rows).flat_map(|i| (0..i).map(move |j| (i, j)));
            for ((i, j), slope) in pairs.zip(&dy[width..]) {
                want_y.push((0..width).map(|k| x[i * width + k] * x[j * width + k]).sum());
                for k in 0..width {
                    dx[i * width + k] += slope * x[j * width + k];
                    dx[j * width + k] += slope * x[i * width + k];
                }
            }
        }
        let xb = up(b, &x);
        let dyb = up(b, &dy);
        let mut y = up(b, &vec![9.0; samples * outputs]);
        let mut dx = up(b, &vec![9.0; samples * inputs]);
        b.dot_interaction(shape, B::all(&xb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &want_y, &format!("{shape:?}"));
        b.dot_interaction_backward(shape, B::all(&xb), B::all(&dyb), B::all_mut(&mut dx)).unwrap();
        close(b, &dx, &want_dx, &format!("{shape:?} backward"));
        results.extend([down(b, &y), down(b, &dx)]);
    }
    results
}
