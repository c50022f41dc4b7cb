//! Tests of the operations in `hpctrain_device::ops::convolution`.

use crate::common::{Results, close, down, to_f64, up, up_f32};
use crate::im2col_pool::each_seen;
use hpctrain_device::{Convolution, Im2colShape, Kernels};

/// Tests convolutions; `random` draws the operands of their matmuls.
pub fn convolutions<B: Kernels>(b: &B, random: fn(&B, u64, usize) -> Vec<f32>) -> Results {
    let mut results = Vec::new();
    for (batch, [height, width, all], size, stride, padding, [first, channels, filters]) in [
        (1, [1, 1, 1], [1, 1], [1, 1], [0, 0], [0, 1, 1]),
        (2, [5, 7, 3], [3, 3], [1, 1], [1, 1], [0, 3, 17]),
        (3, [9, 8, 5], [3, 2], [2, 3], [1, 0], [2, 3, 4]),
        // Several tiles per image, and several parts of the filters' gradient.
        (2, [40, 41, 1], [3, 3], [1, 1], [0, 0], [0, 1, 3]),
        (5, [12, 12, 16], [5, 3], [1, 1], [2, 1], [0, 16, 8]),
        // More filters than tiles are worth it for.
        (1, [4, 3, 128], [3, 3], [1, 1], [1, 1], [0, 128, 60]),
    ] {
        let window = Im2colShape { batch, height, width, channels: all, size, stride, padding };
        let s = Convolution { window, first_channel: first, channels, filters };
        let rows = window.rows();
        let seen = s.filter_len();
        let x = random(b, 70, window.elements());
        let weight = random(b, 71, filters * seen);
        let bias = random(b, 72, filters);
        let dy = random(b, 73, rows * filters);
        let dx = random(b, 74, window.elements());
        let mut want_y: Vec<f64> = (0..rows).flat_map(|_| to_f64(&bias)).collect();
        let mut want_dw = vec![0.0; filters * seen];
        let mut want_db = vec![0.0; filters];
        let mut want_dx = to_f64(&dx);
        for channel in 0..channels {
            each_seen(window, first + channel, |place, [i, j], element| {
                let Some(element) = element else { return };
                for filter in 0..filters {
                    let at = filter * seen + (i * size[1] + j) * channels + channel;
                    let y = place * filters + filter;
                    let w = f64::from(weight[at]);
                    let x = f64::from(x[element]);
                    want_y[y] += w * x;
                    want_dw[at] += f64::from(dy[y]) * x;
                    want_dx[element] += f64::from(dy[y]) * w;
                }
            });
        }
        (0..rows * filters).for_each(|i| want_db[i % filters] += f64::from(dy[i]));
        let [xb, wb, bb, dyb, mut dxb] = [&x, &weight, &bias, &dy, &dx].map(|values| up(b, values));
        let mut y = up(b, &vec![0.0; rows * filters]);
        b.convolve(s, B::all(&xb), B::all(&wb), B::all(&bb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &want_y, "convolution");
        let mut dw = up_f32(b, &vec![0.0; filters * seen]);
        let mut db = up_f32(b, &vec![0.0; filters]);
        let to_weight = B::all_mut(&mut dw);
        let to_bias = B::all_mut(&mut db);
        b.convolve_backward_weight(s, B::all(&dyb), B::all(&xb), to_weight, to_bias).unwrap();
        close(b, &dw, &want_dw, "convolution, weight's gradient");
        close(b, &db, &want_db, "convolution, bias's gradient");
        b.convolve_backward_input(s, B::all(&dyb), B::all(&wb), B::all_mut(&mut dxb)).unwrap();
        close(b, &dxb, &want_dx, "convolution, input's gradient");
        results.extend([down(b, &y), down(b, &dw), down(b, &db), down(b, &dxb)]);
    }
    results
}
