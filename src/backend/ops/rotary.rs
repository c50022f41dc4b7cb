//! Rotary positions.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// Rotary positions (Su et al., "RoFormer", 2021) of the first heads of every row: elements i and i + `head_width`/2 of a
/// head turn by angle i of the position.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// Sequences.
    pub batch: usize,
    /// Positions a sequence.
    pub time: usize,
    /// Heads that turn.
    pub heads: usize,
    /// Width of one head; even.
    pub head_width: usize,
    /// Columns of a row.
    pub width: usize,
    /// Turn back: the backward.
    pub back: bool,
}

/// Rotary positions.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait RotaryOps: Backend {
    /// Turns heads of `x` in place, by angles whose cosines and sines are the rows of `table` (t × head width: one half
    /// each, in f32).
    fn rotary(&self, shape: Rotary, table: Self::View<'_>, x: Self::ViewMut<'_>) -> Result<()>;
}

impl Work {
    /// A turn of so many elements in place.
    pub fn rotary(len: usize) -> Self {
        Self::moves("rotary", 2 * len).on([len])
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, close, down, random, up, up_f32, wide};

    pub fn rotations<B: Kernels>(b: &B) -> Results {
        let mut results = Vec::new();
        for (batch, time, heads, head_width, others) in [(1, 1, 1, 2, 0), (2, 33, 3, 6, 5), (3, 17, 2, 64, 64)] {
            let (rows, half, width) = (batch * time, head_width / 2, heads * head_width + others);
            let angle = |t: usize, i: usize| t as f64 * 100f64.powf(-(i as f64) / half as f64);
            // The table may be of more positions than there are.
            let table = (0..time + 1).flat_map(|t| {
                let angles = (0..half).map(move |i| angle(t, i));
                angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|x| x as f32)
            });
            let table = up_f32(b, &table.collect::<Vec<_>>());
            let x = random(b, 37, rows * width);
            for back in [false, true] {
                let mut turned = up(b, &x);
                let shape = Rotary { batch, time, heads, head_width, width, back };
                b.rotary(shape, B::all(&table), B::all_mut(&mut turned)).unwrap();
                let mut want = wide(&x);
                for (row, head, i) in (0..rows * heads * half).map(|n| (n / half / heads, n / half % heads, n % half)) {
                    let (sin, cos) = angle(row % time, i).sin_cos();
                    let sin = if back { -sin } else { sin };
                    let at = row * width + head * head_width + i;
                    let [first, second] = [x[at], x[at + half]].map(f64::from);
                    (want[at], want[at + half]) = (first * cos - second * sin, second * cos + first * sin);
                }
                close(b, &turned, &want, "rotary positions");
                results.push(down(b, &turned));
            }
        }
        results
    }
}
