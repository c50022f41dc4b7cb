//! Tests of the operations in `hpctrain_device::ops::regression_loss`.

use crate::common::{Results, close, down, random, to_f64, up, up_f32};
use hpctrain_device::{Kernels, Regression, RegressionLoss};

pub fn regressions<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    let all = [
        RegressionLoss::Squared,
        RegressionLoss::Absolute,
        RegressionLoss::Huber(0.7),
        RegressionLoss::BinaryCrossEntropy,
        RegressionLoss::BinaryAccuracy,
    ];
    let shapes = [(1, 1, false), (33, 1, true), (33, 1, false), (7, 65, true), (600, 33, true)];
    for (by, (rows, width, is_weighted)) in
        all.into_iter().flat_map(|by| shapes.map(|shape| (by, shape)))
    {
        let weights: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 * 0.7).collect();
        let weights = if is_weighted { &weights[..] } else { &[] };
        let p = random(b, 69, rows * width);
        let t = random(b, 70, rows * width);
        let of_logits =
            matches!(by, RegressionLoss::BinaryCrossEntropy | RegressionLoss::BinaryAccuracy);
        let t: Vec<f32> =
            if of_logits { t.iter().map(|t| f32::from(*t > 0.0)).collect() } else { t };
        let scale = 0.25;
        let mut want_loss = vec![0.0; rows];
        let mut want_d = vec![];
        for (i, (p, t)) in to_f64(&p).into_iter().zip(to_f64(&t)).enumerate() {
            let error: f64 = p - t;
            let delta = f64::from(0.7f32);
            let (value, slope) = match by {
                RegressionLoss::Squared => (error * error, 2.0 * error),
                RegressionLoss::Absolute => {
                    (error.abs(), if error == 0.0 { 0.0 } else { error.signum() })
                }
                RegressionLoss::Huber(_) if error.abs() <= delta => (0.5 * error * error, error),
                RegressionLoss::Huber(_) => {
                    (delta * (error.abs() - 0.5 * delta), delta * error.signum())
                }
                RegressionLoss::BinaryCrossEntropy => {
                    ((1.0 + p.exp()).ln() - p * t, 1.0 / (1.0 + (-p).exp()) - t)
                }
                RegressionLoss::BinaryAccuracy => (f64::from((p > 0.0) == (t > 0.5)), 0.0),
            };
            let weight =
                weights.get(i / width).map_or(1.0, |weight| f64::from(*weight)) / width as f64;
            want_loss[i / width] += value * weight;
            want_d.push(f64::from(scale) * slope * weight);
        }
        let tb = up_f32(b, &t);
        let wb = up_f32(b, weights);
        for gradient in [false, true] {
            let mut pb = up(b, &p);
            let mut losses = up_f32(b, &vec![0.0; rows]);
            let shape = Regression { rows, width, loss: by, scale, gradient };
            b.regression(
                shape,
                B::all_mut(&mut pb),
                B::all(&tb),
                B::all(&wb),
                B::all_mut(&mut losses),
            )
            .unwrap();
            close(b, &losses, &want_loss, &format!("{by:?}"));
            if gradient {
                close(b, &pb, &want_d, &format!("{by:?} gradient"));
            } else {
                assert_eq!(down(b, &pb), p);
            }
            results.extend([down(b, &losses), down(b, &pb)]);
        }
    }
    // Far off nothing overflows.
    let mut p = up(b, &[1000.0, -1000.0]);
    let t = up_f32(b, &[1.0, 1.0]);
    let mut losses = up_f32(b, &[0.0; 2]);
    let none = up_f32(b, &[]);
    let shape = Regression {
        rows: 2,
        width: 1,
        loss: RegressionLoss::BinaryCrossEntropy,
        scale: 1.0,
        gradient: true,
    };
    b.regression(shape, B::all_mut(&mut p), B::all(&t), B::all(&none), B::all_mut(&mut losses))
        .unwrap();
    assert_eq!((down(b, &losses), down(b, &p)), (vec![0.0, 1000.0], vec![0.0, -1.0]));
    results
}
