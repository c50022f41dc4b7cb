//! Products of rows in pairs.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// Samples of `rows` × `width` elements, whose rows are multiplied in pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pairs {
    /// Samples.
    pub samples: usize,
    /// Rows of a sample.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl Pairs {
    /// Elements of a sample's output: the first row, then a product for each pair.
    pub fn outputs(&self) -> usize {
        self.width + self.rows * self.rows.saturating_sub(1) / 2
    }
}

/// Products of rows in pairs.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait PairsOps: Backend {
    /// The first row of every sample, then the scalar products of its rows in pairs: of the second with the first, of the third
    /// with the first and the second, and so on (Naumov et al., 2019); overwrites `y` (samples × [`Pairs::outputs`]).
    fn pair_products(&self, shape: Pairs, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Overwrites `dx`.
    fn pair_products_backward(
        &self,
        shape: Pairs,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl Work {
    /// Products of rows in pairs.
    pub fn pair_products(s: Pairs) -> Self {
        let multiplied = (s.samples * (s.outputs() - s.width) * 2 * s.width) as f64;
        let kernel = Self::moves("pairs of rows", s.samples * (s.rows * s.width + s.outputs()));
        kernel.on([s.samples, s.rows, s.width]).computes(multiplied)
    }

    /// The gradient of the rows.
    pub fn pair_products_backward(s: Pairs) -> Self {
        let forward = Self::pair_products(s);
        let kernel = Self::moves("pairs of rows, backward", s.samples * (2 * s.rows * s.width + s.outputs()));
        kernel.on([s.samples, s.rows, s.width]).computes(2.0 * forward.flops)
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, close, down, random, up, wide};

    pub fn pairs<B: Kernels>(b: &B) -> Results {
        let mut results = Vec::new();
        // Pairs counted from 0 where their square root is whole, or not quite.
        for (samples, rows, width) in [(1, 2, 1), (3, 5, 7), (33, 27, 16), (2, 130, 3), (700, 3, 35)] {
            let shape = Pairs { samples, rows, width };
            let (inputs, outputs) = (rows * width, shape.outputs());
            let (x, dy) = (random(b, 71, samples * inputs), random(b, 72, samples * outputs));
            let (wx, wdy) = (wide(&x), wide(&dy));
            let (mut want_y, mut want_dx) = (Vec::new(), vec![0.0; samples * inputs]);
            for sample in 0..samples {
                let (x, dy) = (&wx[sample * inputs..][..inputs], &wdy[sample * outputs..][..outputs]);
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
            let (xb, dyb) = (up(b, &x), up(b, &dy));
            let (mut y, mut dx) = (up(b, &vec![9.0; samples * outputs]), up(b, &vec![9.0; samples * inputs]));
            b.pair_products(shape, B::all(&xb), B::all_mut(&mut y)).unwrap();
            close(b, &y, &want_y, &format!("{shape:?}"));
            b.pair_products_backward(shape, B::all(&xb), B::all(&dyb), B::all_mut(&mut dx)).unwrap();
            close(b, &dx, &want_dx, &format!("{shape:?} backward"));
            results.extend([down(b, &y), down(b, &dx)]);
        }
        results
    }
}
