//! Tests of the operations in `hpctrain_device::ops::contrastive`.

use crate::common::{Results, close, down, ids, random, to_f64, up, up_f32};
use hpctrain_device::{Contrastive, Kernels};

pub fn contrastive_losses<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    // Few classes with several samples each, and as many classes as samples: some are alone.
    for (rows, columns, first, classes) in
        [(1, 1, 0, 1), (1, 2, 1, 1), (7, 33, 26, 4), (33, 33, 0, 33), (3, 700, 130, 5)]
    {
        let x = random(b, 80, rows * columns);
        let of_columns = ids(81, columns, classes);
        let weights: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 * 0.5).collect();
        for weights in [&weights[..], &[]] {
            let scale = 0.25;
            let mut want_losses = vec![];
            let mut want_d = vec![];
            for row in 0..rows {
                let x = to_f64(&x[row * columns..][..columns]);
                let own = first + row;
                let others: Vec<usize> = (0..columns).filter(|j| *j != own).collect();
                let positives: Vec<usize> =
                    others.iter().copied().filter(|&j| of_columns[j] == of_columns[own]).collect();
                let total: f64 = others.iter().map(|&j| x[j].exp()).sum();
                let weight = weights.get(row).map_or(1.0, |weight| f64::from(*weight));
                let count = positives.len() as f64;
                let mean = positives.iter().map(|&j| total.ln() - x[j]).sum::<f64>() / count;
                let is_alone = positives.is_empty();
                want_losses.push(if is_alone { 0.0 } else { mean * weight });
                want_d.extend((0..columns).map(|j| match j == own || is_alone {
                    true => 0.0,
                    false => {
                        let share = if positives.contains(&j) { 1.0 / count } else { 0.0 };
                        f64::from(scale) * weight * (x[j].exp() / total - share)
                    }
                }));
            }
            let classes = b.upload_indices(&of_columns).unwrap();
            let weights = up_f32(b, weights);
            for is_exact in [false, true] {
                for gradient in [false, true] {
                    let mut d = if is_exact { up_f32(b, &x) } else { up(b, &x) };
                    let mut losses = up_f32(b, &vec![f32::NAN; rows]);
                    let shape = Contrastive { rows, columns, first, scale, gradient };
                    let (to, losses_view) = (B::all_mut(&mut d), B::all_mut(&mut losses));
                    b.contrastive(shape, to, &classes, B::all(&weights), losses_view).unwrap();
                    close(b, &losses, &want_losses, "contrastive");
                    match gradient {
                        true => close(b, &d, &want_d, "contrastive gradient"),
                        false => assert_eq!(down(b, &d), x),
                    }
                    results.extend([down(b, &losses), down(b, &d)]);
                }
            }
        }
    }
    results
}
