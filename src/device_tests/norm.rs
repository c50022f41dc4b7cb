//! Tests of the operations in `hpctrain_device::ops::norm`.

use crate::common::{Results, close, down, random, rounded, to_f64, up, up_f32};
use hpctrain_device::{Kernels, Norm};

pub fn norms<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    let few = [(1, 1), (1, 31), (33, 33), (70, 130), (3, 1023), (131, 64), (259, 512), (7, 1536)];
    // Rows that several warps share, and one that is read twice; more than one chunk of rows.
    let more = [(5, 1025), (130, 1032), (3, 2051), (3, 4096), (2, 8192), (1, 8195)];
    let sizes = few.into_iter().chain(more);
    for (rows, width, centred) in
        sizes.flat_map(|(rows, width)| [true, false].map(|c| (rows, width, c)))
    {
        let shape = Norm { rows, width, epsilon: 1e-3, centred };
        let x: Vec<f32> = random(b, 14, rows * width).iter().map(|x| 3.0 * x + 2.0).collect();
        let x = rounded(b, &x);
        let w = random(b, 15, width);
        let dy = random(b, 16, rows * width);
        for bias in [random(b, 17, width), vec![]] {
            let xb = up(b, &x);
            let wb = up(b, &w);
            let bb = up(b, &bias);
            let dyb = up(b, &dy);
            let mut y = up(b, &vec![0.0; rows * width]);
            let mut stats = up_f32(b, &vec![0.0; rows * 2]);
            b.norm(
                shape,
                B::all(&xb),
                B::all(&wb),
                B::all(&bb),
                B::all_mut(&mut y),
                B::all_mut(&mut stats),
            )
            .unwrap();

            let branch = up(b, &random(b, 36, rows * width));
            let mut stream = up(b, &x);
            b.add(B::all(&branch), B::all_mut(&mut stream)).unwrap();
            let [mut want, mut got] =
                [0.0, 0.0].map(|x| (up(b, &vec![x; rows * width]), up_f32(b, &vec![x; rows * 2])));
            let y_view = B::all_mut(&mut want.0);
            let stats_view = B::all_mut(&mut want.1);
            b.norm(shape, B::all(&stream), B::all(&wb), B::all(&bb), y_view, stats_view).unwrap();
            let mut fused = up(b, &x);
            let y_view = B::all_mut(&mut got.0);
            let stats_view = B::all_mut(&mut got.1);
            let stream_view = B::all_mut(&mut fused);
            let wv = B::all(&wb);
            let bv = B::all(&bb);
            b.add_norm(shape, B::all(&branch), stream_view, wv, bv, y_view, stats_view).unwrap();
            assert_eq!(down(b, &fused), down(b, &stream));
            close(b, &got.0, &to_f64(&down(b, &want.0)), "sum and norm");
            close(b, &got.1, &to_f64(&down(b, &want.1)), "statistics of sum and norm");

            let dx0 = random(b, 18, rows * width);
            let dw0 = random(b, 19, width);
            let db0 = random(b, 20, bias.len());
            let mut dx = up(b, &dx0);
            let mut dw = up_f32(b, &dw0);
            let mut db = up_f32(b, &db0);
            b.norm_backward(
                shape,
                B::all(&dyb),
                B::all(&xb),
                B::all(&wb),
                B::all(&stats),
                B::all_mut(&mut dx),
                B::all_mut(&mut dw),
                B::all_mut(&mut db),
            )
            .unwrap();

            let mut want_y = vec![];
            let mut want_dx = to_f64(&dx0);
            let mut want_dw = to_f64(&dw0);
            let mut want_db = to_f64(&db0);
            for row in 0..rows {
                let at = row * width;
                let x = to_f64(&x[at..at + width]);
                let n = width as f64;
                let mean = if centred { x.iter().sum::<f64>() / n } else { 0.0 };
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
                let rstd = 1.0 / (variance + f64::from(shape.epsilon)).sqrt();
                let hat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
                let g: Vec<f64> =
                    (0..width).map(|i| f64::from(dy[at + i]) * f64::from(w[i])).collect();
                let g_mean = if centred { g.iter().sum::<f64>() / n } else { 0.0 };
                let gh_mean = g.iter().zip(&hat).map(|(g, h)| g * h).sum::<f64>() / n;
                for i in 0..width {
                    want_y.push(
                        hat[i] * f64::from(w[i]) + bias.get(i).map_or(0.0, |&b| f64::from(b)),
                    );
                    want_dx[at + i] += rstd * (g[i] - g_mean - hat[i] * gh_mean);
                    want_dw[i] += f64::from(dy[at + i]) * hat[i];
                    if let Some(db) = want_db.get_mut(i) {
                        *db += f64::from(dy[at + i]);
                    }
                }
            }
            let what = if centred { "layer norm" } else { "RMS norm" };
            close(b, &y, &want_y, what);
            if width > 1 {
                close(b, &dx, &want_dx, &format!("{what} dx"));
            }
            close(b, &dw, &want_dw, &format!("{what} dweight"));
            close(b, &db, &want_db, &format!("{what} dbias"));
            results.extend([down(b, &y), down(b, &dx), down(b, &dw), down(b, &db)]);
        }
    }
    results
}
