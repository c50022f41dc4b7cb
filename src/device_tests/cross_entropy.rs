//! Tests of the operations in `hpctrain_device::ops::cross_entropy`.

use crate::common::{
    Results, close, down, ids, pad_rows, random, rounded, strides, to_f64, tolerance, unpad_rows,
    up, up_f32,
};
use hpctrain_device::{CrossEntropy, CrossEntropyPart, Kernels, LogitsPart, LossWeights};

/// Computes losses and gradients of logits in f64.
fn in_f64(
    s: CrossEntropy,
    logits: &[f32],
    targets: &[u32],
    weights: LossWeights<&[f32]>,
) -> (Vec<f64>, Vec<f64>) {
    let mut losses = vec![];
    let mut gradients = vec![];
    let smoothing = f64::from(s.smoothing);
    for (row, &target) in targets.iter().enumerate() {
        let x = to_f64(&logits[row * s.classes..][..s.classes]);
        let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_total = x.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top;
        let factor =
            |weights: &[f32], at: usize| weights.get(at).map_or(1.0, |weight| f64::from(*weight));
        let weight = factor(weights.classes, target as usize) * factor(weights.rows, row);
        let wanted = |class: usize| {
            smoothing / s.classes as f64
                + if class == target as usize { 1.0 - smoothing } else { 0.0 }
        };
        // A class that is masked by -∞ adds no loss where its target is zero.
        let counted = x.iter().enumerate().filter(|(class, _)| wanted(*class) > 0.0);
        losses
            .push(weight * counted.map(|(class, x)| wanted(class) * (log_total - x)).sum::<f64>());
        gradients.extend(x.iter().enumerate().map(|(class, x)| {
            f64::from(s.scale) * weight * ((x - log_total).exp() - wanted(class))
        }));
    }
    (losses, gradients)
}

pub fn classifiers<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, classes) in [(1, 1), (31, 65), (3, 50_257), (600, 33)] {
        let logits: Vec<f32> =
            random(b, 29, rows * classes).iter().map(|x| 4.0 * x + 100.0).collect();
        let logits = rounded(b, &logits);
        let targets = ids(30, rows, classes);
        let tb = b.upload_indices(&targets).unwrap();
        let scale = 0.25;
        let some: Vec<f32> = (0..classes).map(|class| 0.5 + (class % 3) as f32).collect();
        // Includes a row with weight zero.
        let of_rows: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 * 0.7).collect();
        for (smoothing, weights, of_rows) in
            [(0.0, &[][..], &[][..]), (0.2, &some, &of_rows), (0.0, &[], &of_rows)]
        {
            let wb = up_f32(b, weights);
            let rb = up_f32(b, of_rows);
            let shape =
                CrossEntropy { rows, classes, stride: classes, scale, gradient: true, smoothing };
            let (want_loss, want_d) =
                in_f64(shape, &logits, &targets, LossWeights { classes: weights, rows: of_rows });
            for (stride, gradient) in
                strides::<B>(classes).into_iter().flat_map(|s| [(s, false), (s, true)])
            {
                let mut lb = up(b, &pad_rows(&logits, classes, stride));
                let mut losses = up_f32(b, &vec![0.0; rows]);
                let shape = CrossEntropy { stride, gradient, ..shape };
                let weights = LossWeights { classes: B::all(&wb), rows: B::all(&rb) };
                b.cross_entropy(shape, B::all_mut(&mut lb), &tb, weights, B::all_mut(&mut losses))
                    .unwrap();
                close(b, &losses, &want_loss, "cross-entropy");
                let after = unpad_rows(b, &lb, classes, stride);
                if gradient {
                    close(b, &up(b, &after), &want_d, "cross-entropy gradient");
                } else {
                    assert_eq!(after, logits);
                }
                results.extend([down(b, &losses), after]);
            }
        }

        // Few distinct values, so that some logits are equal.
        let few: Vec<f32> = ids(31, rows * classes, 7).into_iter().map(|id| id as f32).collect();
        for (stride, k) in strides::<B>(classes).into_iter().flat_map(|s| [(s, 1), (s, 5)]) {
            let fb = up(b, &pad_rows(&few, classes, stride));
            let mut hits = up_f32(b, &vec![0.5; rows]);
            b.hits(classes, stride, k, B::all(&fb), &tb, B::all_mut(&mut hits)).unwrap();
            let expected: Vec<f32> = few
                .chunks(classes)
                .zip(&targets)
                .map(|(row, target)| hit(row, *target as usize, k))
                .collect();
            assert_eq!(down(b, &hits), expected, "top {k}");
        }
    }
    let broken = up(b, &[f32::NAN, 1.0]);
    let tb = b.upload_indices(&[1]).unwrap();
    let mut hits = up_f32(b, &[1.0]);
    b.hits(2, 2, 1, B::all(&broken), &tb, B::all_mut(&mut hits)).unwrap();
    assert_eq!(down(b, &hits), [0.0]);
    results
}

/// Returns 1 if the target is among the `k` largest logits of a row, and 0 otherwise.
fn hit(row: &[f32], target: usize, k: usize) -> f32 {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|one, other| row[*other].total_cmp(&row[*one]));
    f32::from(order[..k.min(row.len())].contains(&target))
}

/// Computes the cross-entropy of logits whose columns are split into parts at `bounds`. Returns the
/// statistics of all parts, the losses, and the columns of all parts side by side afterwards. The
/// rows of each part are padded if `is_padded`.
fn in_parts<B: Kernels>(
    b: &B,
    s: CrossEntropy,
    is_padded: bool,
    bounds: &[usize],
    logits: &[f32],
    targets: &B::IndexBuf,
    weights: LossWeights<B::View<'_>>,
) -> [Vec<f32>; 3] {
    let CrossEntropy { rows, classes, scale, gradient, smoothing, .. } = s;
    let parts = bounds.len() - 1;
    let of_part = |part: LogitsPart| {
        let columns =
            logits.chunks(classes).flat_map(|row| &row[part.first_class..][..part.classes]);
        up(b, &pad_rows(&columns.copied().collect::<Vec<_>>(), part.classes, part.stride))
    };
    let mut stats = up_f32(b, &vec![f32::NAN; parts * rows * LogitsPart::STATS]);
    for number in 0..parts {
        let part = logits_part::<B>(rows, bounds, number, is_padded);
        let count = rows * LogitsPart::STATS;
        let to = B::view_mut(&mut stats, number * count..(number + 1) * count);
        b.softmax_part(part, B::all(&of_part(part)), targets, to).unwrap();
    }
    let mut after = vec![0.0; rows * classes];
    let mut all_losses = vec![];
    for number in 0..parts {
        let part = logits_part::<B>(rows, bounds, number, is_padded);
        let mut columns = of_part(part);
        let mut losses = up_f32(b, &vec![f32::NAN; rows]);
        let shape = CrossEntropyPart { part, parts, classes, scale, gradient, smoothing };
        let to = B::all_mut(&mut losses);
        let stats = B::all(&stats);
        b.cross_entropy_part(shape, stats, B::all_mut(&mut columns), targets, weights, to).unwrap();
        for (row, columns) in
            unpad_rows(b, &columns, part.classes, part.stride).chunks(part.classes).enumerate()
        {
            after[row * classes + part.first_class..][..part.classes].copy_from_slice(columns);
        }
        all_losses.push(down(b, &losses));
    }
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert!(
        all_losses.iter().all(|losses| bits(losses) == bits(&all_losses[0])),
        "parts have other losses"
    );
    [down(b, &stats), all_losses.swap_remove(0), after]
}

/// Returns part `number` of the columns that are split at `bounds`.
fn logits_part<B: Kernels>(
    rows: usize,
    bounds: &[usize],
    number: usize,
    is_padded: bool,
) -> LogitsPart {
    let first_class = bounds[number];
    let classes = bounds[number + 1] - first_class;
    let stride = if is_padded { B::row_stride(classes) } else { classes };
    LogitsPart { rows, classes, stride, first_class }
}

/// Tests cross-entropy over classes that are split into parts.
pub fn classifier_parts<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, classes) in [(0, 17), (1, 17), (23, 65), (2, 9001)] {
        let logits: Vec<f32> =
            random(b, 32, rows * classes).iter().map(|x| 4.0 * x + 100.0).collect();
        let logits = rounded(b, &logits);
        let targets = ids(33, rows, classes);
        let tb = b.upload_indices(&targets).unwrap();
        let some: Vec<f32> = (0..classes).map(|class| 0.5 + (class % 3) as f32).collect();
        let of_rows: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 * 0.7).collect();
        for (smoothing, weights, of_rows) in [(0.0, &[][..], &[][..]), (0.2, &some, &of_rows)] {
            let shape = CrossEntropy {
                rows,
                classes,
                stride: classes,
                scale: 0.25,
                gradient: true,
                smoothing,
            };
            let (want_loss, want_d) =
                in_f64(shape, &logits, &targets, LossWeights { classes: weights, rows: of_rows });
            let wb = up_f32(b, weights);
            let rb = up_f32(b, of_rows);
            let weights = LossWeights { classes: B::all(&wb), rows: B::all(&rb) };
            let mut plain_d = up(b, &logits);
            let mut plain_loss = up_f32(b, &vec![0.0; rows]);
            if rows > 0 {
                let to = B::all_mut(&mut plain_loss);
                b.cross_entropy(shape, B::all_mut(&mut plain_d), &tb, weights, to).unwrap();
            }
            let plain_loss = to_f64(&down(b, &plain_loss));
            let plain_d = to_f64(&down(b, &plain_d));
            for (parts, is_padded) in [(1, true), (2, false), (3, true), (5, false)] {
                // Each part is wider than the one before.
                let bounds: Vec<usize> = (0..=parts)
                    .map(|part| classes * part * (part + 1) / (parts * (parts + 1)))
                    .collect();
                let without = CrossEntropy { gradient: false, ..shape };
                let [stats, losses, after] =
                    in_parts(b, without, is_padded, &bounds, &logits, &tb, weights);
                assert_eq!(after, logits);
                check_stats(b, &stats, &bounds, &logits, &targets);
                let [_, with_gradient, gradient] =
                    in_parts(b, shape, is_padded, &bounds, &logits, &tb, weights);
                assert_eq!(with_gradient, losses);
                for want in [&want_loss, &plain_loss] {
                    close(b, &up_f32(b, &losses), want, "cross-entropy of parts");
                }
                for want in [&want_d, &plain_d] {
                    close(b, &up_f32(b, &gradient), want, "cross-entropy gradient of parts");
                }
                results.extend([stats, losses, gradient]);
            }
        }
    }

    // Masked classes: in one row all classes of two parts.
    let rows = 2;
    let classes = 45;
    let targets = [20, 16];
    let is_out = |at: usize| if at < classes { at < 14 } else { at.is_multiple_of(3) };
    let some = random(b, 34, rows * classes).into_iter().enumerate();
    let logits: Vec<f32> =
        some.map(|(at, x)| if is_out(at) { f32::NEG_INFINITY } else { x }).collect();
    let shape =
        CrossEntropy { rows, classes, stride: classes, scale: 1.0, gradient: true, smoothing: 0.0 };
    let (want_loss, want_d) =
        in_f64(shape, &logits, &targets, LossWeights { classes: &[], rows: &[] });
    let tb = b.upload_indices(&targets).unwrap();
    let none = up_f32(b, &[]);
    let weights = LossWeights { classes: B::all(&none), rows: B::all(&none) };
    let mut plain_d = up(b, &logits);
    let mut plain_loss = up_f32(b, &[0.0; 2]);
    b.cross_entropy(shape, B::all_mut(&mut plain_d), &tb, weights, B::all_mut(&mut plain_loss))
        .unwrap();
    let [stats, losses, gradient] =
        in_parts(b, shape, true, &[0, 13, 14, 45], &logits, &tb, weights);
    assert_eq!(stats[..4], [f32::MIN, 0.0, 0.0, f32::NEG_INFINITY]);
    for losses in [&plain_loss, &up_f32(b, &losses)] {
        close(b, losses, &want_loss, "cross-entropy with classes ruled out");
    }
    for gradient in [&plain_d, &up_f32(b, &gradient)] {
        close(b, gradient, &want_d, "cross-entropy gradient with classes ruled out");
    }
    results.extend([stats, losses, gradient]);
    results
}

/// Panics unless the statistics of parts are those of their logits.
fn check_stats<B: Kernels>(
    b: &B,
    stats: &[f32],
    bounds: &[usize],
    logits: &[f32],
    targets: &[u32],
) {
    let rows = targets.len();
    let classes = bounds[bounds.len() - 1];
    let mut stats = stats.chunks(LogitsPart::STATS);
    for bound in bounds.windows(2) {
        for row in 0..rows {
            let x = &logits[row * classes..][bound[0]..bound[1]];
            let target = targets[row] as usize;
            let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let own =
                if (bound[0]..bound[1]).contains(&target) { x[target - bound[0]] } else { 0.0 };
            let total: f64 = to_f64(x).iter().map(|x| (x - f64::from(top)).exp()).sum();
            let plain: f64 = to_f64(x).iter().sum();
            let got = stats.next().unwrap();
            assert_eq!((got[0], got[2]), (top, own), "{bound:?} of row {row}");
            assert!(
                (f64::from(got[1]) - total).abs() <= tolerance(b) * total,
                "{} is not {total}",
                got[1]
            );
            // At least f32 on every device.
            assert!(
                (f64::from(got[3]) - plain).abs() <= 1e-6 * plain.abs(),
                "{} is not {plain}",
                got[3]
            );
        }
    }
    assert!(stats.next().is_none());
}
