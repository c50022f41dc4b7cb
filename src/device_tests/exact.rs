//! Tests of the operations of which losses are composed, on tensors in f32: a device that computes
//! in bf16 has them in f32 as well.

use crate::common::{Results, down, random, to_f64, up_f32};
use hpctrain_device::{
    Activation, CrossEntropy, Kernels, Linear, LossWeights, Norm, Regression, RegressionLoss,
    StridedCopy,
};

/// Rows, and elements of a row, at awkward sizes.
const SHAPES: [(usize, usize); 4] = [(1, 1), (7, 33), (130, 65), (3, 1030)];

/// Panics unless the values have the precision of f32, or of TF32 if a matmul computed them.
fn exact<B: Kernels>(b: &B, got: &B::Buf, want: &[f64], what: &str, allowed: f64) -> Vec<f32> {
    let got = down(b, got);
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-6, |a: f64, b| a.max(b.abs()));
    for (i, (&g, w)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(g) - w).abs() <= allowed * largest, "{what}[{i}]: {g}, in f64 {w}");
    }
    got
}

/// Numbers that bf16 cannot hold.
fn numbers<B: Kernels>(b: &B, seed: u64, len: usize) -> Vec<f32> {
    random(b, seed, len).into_iter().map(|x| x * 1.001).collect()
}

pub fn exact_losses<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, width) in SHAPES {
        let x = numbers(b, 90, rows * width);
        let dy = numbers(b, 91, rows * width);
        let (x64, dy64) = (to_f64(&x), to_f64(&dy));
        let xb = up_f32(b, &x);

        let mut y = up_f32(b, &dy);
        b.activation(Activation::Exp, B::all(&xb), B::all_mut(&mut y)).unwrap();
        let want: Vec<f64> = x64.iter().map(|x| x.exp()).collect();
        results.push(exact(b, &y, &want, "exp", 1e-6));
        let mut d = up_f32(b, &dy);
        b.activation_backward(Activation::Square, B::all(&xb), B::all_mut(&mut d)).unwrap();
        let want: Vec<f64> = x64.iter().zip(&dy64).map(|(x, dy)| 2.0 * x * dy).collect();
        results.push(exact(b, &d, &want, "square backward", 1e-6));

        let mut y = up_f32(b, &dy);
        b.softmax(width, B::all(&xb), B::all_mut(&mut y)).unwrap();
        let softmax: Vec<f64> = x64
            .chunks(width)
            .flat_map(|row| {
                let total: f64 = row.iter().map(|x| x.exp()).sum();
                row.iter().map(move |x| x.exp() / total)
            })
            .collect();
        results.push(exact(b, &y, &softmax, "softmax", 1e-6));
        let mut d = up_f32(b, &dy);
        b.softmax_backward(width, B::all(&y), B::all_mut(&mut d)).unwrap();
        let want: Vec<f64> = softmax
            .chunks(width)
            .zip(dy64.chunks(width))
            .flat_map(|(y, dy)| {
                let dot: f64 = y.iter().zip(dy).map(|(y, dy)| y * dy).sum();
                y.iter().zip(dy).map(move |(y, dy)| y * (dy - dot))
            })
            .collect();
        if width > 1 {
            results.push(exact(b, &d, &want, "softmax backward", 2e-6));
        }
        results.extend(classes(b, rows, width, &x64, &softmax));
        results.extend(norms(b, rows, width, [&x, &dy]));

        let mut losses = up_f32(b, &vec![0.0; rows]);
        let mut p = up_f32(b, &x);
        let targets = up_f32(b, &dy);
        let none = up_f32(b, &[]);
        let loss = RegressionLoss::Squared;
        let shape = Regression { rows, width, loss, scale: 0.5, gradient: true };
        let (to, losses_view) = (B::all_mut(&mut p), B::all_mut(&mut losses));
        b.regression(shape, to, B::all(&targets), B::all(&none), losses_view).unwrap();
        let want: Vec<f64> = x64.iter().zip(&dy64).map(|(x, t)| (x - t) / width as f64).collect();
        results.push(exact(b, &p, &want, "regression gradient", 1e-6));

        let to = [width + 3, 2];
        let mut wide = up_f32(b, &vec![0.0; rows * to[0]]);
        let copy = StridedCopy { rows, count: width, from: [width, 0], to };
        b.copy_columns(copy, B::all(&xb), B::all_mut(&mut wide)).unwrap();
        let copied = down(b, &wide);
        let cut = copied.chunks(to[0]).flat_map(|row| &row[2..2 + width]).copied();
        assert_eq!(cut.collect::<Vec<_>>(), x);

        let ones = up_f32(b, &vec![1.0; width]);
        let mut sums = up_f32(b, &vec![0.0; rows]);
        let shape = Linear::new(rows, width, 1);
        b.linear(shape, B::all(&xb), B::all(&ones), B::all(&none), B::all_mut(&mut sums)).unwrap();
        let want: Vec<f64> = x64.chunks(width).map(|row| row.iter().sum()).collect();
        results.push(exact(b, &sums, &want, "sums of rows", 2e-3));
    }
    results
}

/// Cross-entropy with its gradient, and hits.
fn classes<B: Kernels>(
    b: &B,
    rows: usize,
    classes: usize,
    logits: &[f64],
    softmax: &[f64],
) -> Results {
    let targets: Vec<u32> = (0..rows).map(|row| (row * 7 % classes) as u32).collect();
    let of_rows: Vec<f32> = (0..rows).map(|row| 0.5 + row as f32).collect();
    let none = up_f32(b, &[]);
    let weights = up_f32(b, &of_rows);
    let targets_on_device = b.upload_indices(&targets).unwrap();
    let exact_logits: Vec<f32> = logits.iter().map(|x| *x as f32).collect();
    let mut d = up_f32(b, &exact_logits);
    let mut losses = up_f32(b, &vec![0.0; rows]);
    let mut hits = up_f32(b, &vec![0.0; rows]);
    let (to, view) = (B::all(&d), B::all_mut(&mut hits));
    b.hits(classes, classes, 1, to, &targets_on_device, view).unwrap();
    let first_is_best = |row: usize| {
        let row_logits = &logits[row * classes..][..classes];
        let target = row_logits[targets[row] as usize];
        f32::from(row_logits.iter().all(|x| *x <= target))
    };
    assert_eq!(down(b, &hits), (0..rows).map(first_is_best).collect::<Vec<_>>());
    let shape =
        CrossEntropy { rows, classes, stride: classes, scale: 1.0, gradient: true, smoothing: 0.0 };
    let weights = LossWeights { classes: B::all(&none), rows: B::all(&weights) };
    let (to, view) = (B::all_mut(&mut d), B::all_mut(&mut losses));
    b.cross_entropy(shape, to, &targets_on_device, weights, view).unwrap();
    let at = |row: usize| row * classes + targets[row] as usize;
    let want: Vec<f64> =
        (0..rows).map(|row| -softmax[at(row)].ln() * f64::from(of_rows[row])).collect();
    let losses = exact(b, &losses, &want, "cross-entropy", 2e-6);
    let want: Vec<f64> = (0..rows * classes)
        .map(|i| {
            let row = i / classes;
            (softmax[i] - f64::from(u8::from(i == at(row)))) * f64::from(of_rows[row])
        })
        .collect();
    vec![losses, exact(b, &d, &want, "cross-entropy gradient", 2e-6)]
}

/// RMS normalisation with its gradient.
fn norms<B: Kernels>(b: &B, rows: usize, width: usize, [x, dy]: [&[f32]; 2]) -> Results {
    let shape = Norm { rows, width, epsilon: 1e-3, centred: false };
    let [xb, dyb] = [x, dy].map(|host| up_f32(b, host));
    let weight = up_f32(b, &vec![0.5; width]);
    let none = up_f32(b, &[]);
    let mut y = up_f32(b, &vec![0.0; rows * width]);
    let mut stats = up_f32(b, &vec![0.0; 2 * rows]);
    let (y_view, stats_view) = (B::all_mut(&mut y), B::all_mut(&mut stats));
    b.norm(shape, B::all(&xb), B::all(&weight), B::all(&none), y_view, stats_view).unwrap();
    let mut dx = up_f32(b, &vec![0.0; rows * width]);
    let mut dweight = up_f32(b, &vec![0.0; width]);
    let mut dbias = up_f32(b, &[]);
    b.norm_backward(
        shape,
        B::all(&dyb),
        B::all(&xb),
        B::all(&weight),
        B::all(&stats),
        B::all_mut(&mut dx),
        B::all_mut(&mut dweight),
        B::all_mut(&mut dbias),
    )
    .unwrap();
    let mut want_y = vec![];
    let mut want_dx = vec![];
    for (x, dy) in to_f64(x).chunks(width).zip(to_f64(dy).chunks(width)) {
        let n = width as f64;
        let rstd =
            1.0 / (x.iter().map(|x| x * x).sum::<f64>() / n + f64::from(shape.epsilon)).sqrt();
        let dot: f64 = x.iter().zip(dy).map(|(x, dy)| 0.5 * x * dy).sum::<f64>() / n;
        want_y.extend(x.iter().map(|x| 0.5 * x * rstd));
        want_dx.extend(x.iter().zip(dy).map(|(x, dy)| rstd * (0.5 * dy - x * rstd * rstd * dot)));
    }
    let y = exact(b, &y, &want_y, "norm", 2e-6);
    // A row of one element always has the same norm: its gradient is a difference of equal numbers.
    match width {
        1 => vec![y],
        _ => vec![y, exact(b, &dx, &want_dx, "norm backward", 1e-5)],
    }
}
