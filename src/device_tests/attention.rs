//! Tests of the operations in `hpctrain_device::ops::attention`.

use crate::common::{Results, close, down, random, to_f64, up, up_f32};
use hpctrain_device::{Attention, Kernels};

pub fn attentions<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    let alone = [
        (1, 1, 1, 1),
        (2, 2, 2, 3),
        (2, 31, 2, 20),
        (2, 33, 3, 5),
        (1, 130, 2, 33),
        (3, 64, 1, 32),
        (2, 129, 2, 64),
        (1, 65, 1, 128),
        (1, 257, 1, 1),
        (1, 257, 1, 80),
        (1, 40, 1, 96),
        (1, 33, 1, 256),
    ];
    let alone =
        alone.map(|(batch, time, heads, head_width)| (batch, time, heads, heads, head_width));
    // Key/value heads that several query heads share.
    let shared = [
        (2, 33, 6, 2, 5),
        (1, 130, 3, 1, 33),
        (2, 129, 4, 2, 64),
        (1, 65, 2, 1, 128),
        (1, 257, 2, 1, 20),
    ];
    // Shapes for tensor cores: heads that end within a block of columns, of widths below and above
    // 128.
    let narrow = [(1, 140, 1, 1, 24), (1, 130, 2, 1, 200)];
    let narrow = &narrow[..if b.has_master_weights() { narrow.len() } else { 0 }];
    for (batch, time, heads, kv_heads, head_width) in
        alone.into_iter().chain(shared).chain(narrow.iter().copied())
    {
        let shape = Attention { batch, time, heads, kv_heads, head_width };
        let d = heads * head_width;
        let packed = shape.packed_width();
        let rows = batch * time;
        let qkv = random(b, 27, rows * packed);
        let dy = random(b, 28, rows * d);
        let xb = up(b, &qkv);
        let dyb = up(b, &dy);
        let mut y = up(b, &vec![0.0; rows * d]);
        let mut lse = up_f32(b, &vec![0.0; rows * heads]);
        b.attention(shape, B::all(&xb), B::all_mut(&mut y), B::all_mut(&mut lse)).unwrap();
        let mut dqkv = up(b, &vec![0.0; rows * packed]);
        let views = (B::all(&xb), B::all(&y), B::all(&lse), B::all(&dyb));
        b.attention_backward(shape, views.0, views.1, views.2, views.3, B::all_mut(&mut dqkv))
            .unwrap();

        let mut want_y = vec![0.0; rows * d];
        let mut want_d = vec![0.0; rows * packed];
        let scale = 1.0 / (head_width as f64).sqrt();
        for (sequence, head) in (0..batch * heads).map(|i| (i / heads, i % heads)) {
            let key = heads + head / (heads / kv_heads);
            let places = [head, key, key + kv_heads];
            let at = |part: usize, t: usize, i: usize| {
                (sequence * time + t) * packed + places[part] * head_width + i
            };
            let of_y = |t: usize, i: usize| (sequence * time + t) * d + head * head_width + i;
            for t in 0..time {
                let scores = (0..=t).map(|s| {
                    let terms = (0..head_width)
                        .map(|i| f64::from(qkv[at(0, t, i)]) * f64::from(qkv[at(1, s, i)]));
                    terms.sum::<f64>() * scale
                });
                let scores: Vec<f64> = scores.collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                let p: Vec<f64> = scores.iter().map(|s| (s - top).exp() / total).collect();
                let dp: Vec<f64> = (0..=t)
                    .map(|s| {
                        (0..head_width)
                            .map(|i| f64::from(dy[of_y(t, i)]) * f64::from(qkv[at(2, s, i)]))
                            .sum()
                    })
                    .collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for s in 0..=t {
                    let ds = p[s] * (dp[s] - mean) * scale;
                    for i in 0..head_width {
                        want_y[of_y(t, i)] += p[s] * f64::from(qkv[at(2, s, i)]);
                        want_d[at(0, t, i)] += ds * f64::from(qkv[at(1, s, i)]);
                        want_d[at(1, s, i)] += ds * f64::from(qkv[at(0, t, i)]);
                        want_d[at(2, s, i)] += p[s] * f64::from(dy[of_y(t, i)]);
                    }
                }
            }
        }
        close(b, &y, &want_y, "attention");
        close(b, &dqkv, &want_d, "attention dqkv");
        results.extend([down(b, &y), down(b, &lse), down(b, &dqkv)]);
        if batch == 1 {
            let first = time / 2;
            let rows = time - first;
            let mut y = up(b, &vec![0.0; rows * d]);
            let mut later = up_f32(b, &vec![0.0; rows * heads]);
            b.attention_from(shape, first, B::all(&xb), B::all_mut(&mut y), B::all_mut(&mut later))
                .unwrap();
            close(b, &y, &want_y[first * d..], "attention from a position");
            let want: Vec<f32> =
                down(b, &lse).chunks(time).flat_map(|head| head[first..].to_vec()).collect();
            close(b, &later, &to_f64(&want), "denominators from a position");
            results.extend([down(b, &y), down(b, &later)]);
        }
    }
    results
}
