//! Tests of the operations in `hpctrain_device::ops::checksum`.

use crate::common::{Results, down, random, up, up_f32};
use hpctrain_device::ops::checksum::{CHUNK, weight};
use hpctrain_device::{AdamW, Elementwise, ElementwiseUpdate, Kernels, Sgd, UpdateChecksums};

fn digest_of(x: &[f32]) -> f64 {
    let digests = x.chunks(CHUNK).enumerate().map(|(number, chunk)| {
        let term =
            |(i, x): (usize, &f32)| x.to_bits().wrapping_mul(weight((number * CHUNK + i) as u32));
        f64::from(chunk.iter().enumerate().map(term).fold(0, u32::wrapping_add))
    });
    digests.sum()
}

pub fn digests<B: Kernels>(b: &B) -> Results {
    for len in [0, 1, 31, CHUNK, CHUNK + 33, 3 * CHUNK - 1] {
        let x = random(b, 7, len);
        let found = b.read(b.digest(B::all(&up_f32(b, &x))).unwrap()).unwrap();
        assert_eq!(found, digest_of(&x), "{len} elements");
        for (at, bit) in [(0, 0), (len / 2, 13), (len.saturating_sub(1), 31)] {
            let mut changed = x.clone();
            let Some(one) = changed.get_mut(at) else { continue };
            *one = f32::from_bits(one.to_bits() ^ 1 << bit);
            let other = b.read(b.digest(B::all(&up_f32(b, &changed))).unwrap()).unwrap();
            assert_ne!(other, found, "bit {bit} of element {at} of {len}");
        }
        let swapped: Vec<f32> = x.iter().rev().copied().collect();
        assert!(
            len < 2 || digest_of(&swapped) != digest_of(&x),
            "{len} elements the other way round"
        );
    }
    updates(b)
}

/// Updates give the same elements with checksums, which are those of the buffers before and after.
fn updates<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    let len = CHUNK + 77;
    let g = up_f32(b, &random(b, 1, len));
    let p = random(b, 2, len);
    let state: Vec<f32> = random(b, 3, len).iter().map(|x| x * x).collect();
    for rule in 0..5 {
        let plain = update(b, rule, &g, &p, &state, None);
        let mut checksums = UpdateChecksums::default();
        let checked = update(b, rule, &g, &p, &state, Some(&mut checksums));
        assert_eq!(plain, checked, "rule {rule}");
        let changed: &[usize] = match rule {
            0 | 2 => &[0, 1, 2],
            4 => &[2],
            _ => &[0, 2],
        };
        let before = [&state[..], &state, &p];
        let sum = |digests: Vec<B::Scalar>| {
            digests.into_iter().map(|one| b.read(one).unwrap()).sum::<f64>()
        };
        let found: f64 = changed.iter().map(|&i| digest_of(before[i])).sum();
        let left: f64 = changed.iter().map(|&i| digest_of(&checked[i])).sum();
        assert_eq!((sum(checksums.before), sum(checksums.after)), (found, left), "rule {rule}");
        results.extend(checked);
    }
    results
}

/// Returns the buffers after an update by one of five rules. `state` is the value of both state
/// buffers.
fn update<B: Kernels>(
    b: &B,
    rule: usize,
    g: &B::Buf,
    p: &[f32],
    state: &[f32],
    checksums: Option<&mut UpdateChecksums<B::Scalar>>,
) -> [Vec<f32>; 3] {
    let adamw = AdamW {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.2,
        step: 3,
        grad_scale: 0.5,
    };
    let sgd = Sgd { lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.2, grad_scale: 0.5 };
    let elementwise =
        |rule| ElementwiseUpdate { rule, lr: 0.1, weight_decay: 0.2, step: 3, grad_scale: 0.5 };
    let two = elementwise(Elementwise::Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 });
    let one = elementwise(Elementwise::Lion { beta1: 0.9, beta2: 0.99 });
    let second = if rule == 3 { &[][..] } else { state };
    let mut bufs = [state, second, p].map(|values| up_f32(b, values));
    let mut copy = up(b, p);
    {
        let [first, second, to] = &mut bufs;
        let first = B::all_mut(first);
        let second = B::all_mut(second);
        let to = B::all_mut(to);
        let g = B::all(g);
        let copy = Some(B::all_mut(&mut copy));
        match rule {
            0 => b.adamw(adamw, g, first, second, to, copy, checksums),
            1 => b.sgd(sgd, g, first, to, copy, checksums),
            2 => b.elementwise_update(two, g, first, second, to, copy, checksums),
            3 => b.elementwise_update(one, g, first, second, to, copy, checksums),
            _ => b.update_average(0.3, g, to, copy, checksums),
        }
        .unwrap();
    }
    bufs.map(|buf| down(b, &buf))
}
