//! Tables of tokens and positions.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// Tables of tokens and positions.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait EmbeddingOps: Backend {
    /// `y[b,t] = token_table[tokens[b,t]] + position_table[t]`; overwrites. Shapes: tokens b·t, y b·t·d,
    /// position table t·d, or empty where there are no positions.
    fn embedding(
        &self,
        tokens: &Self::Ints,
        token_table: Self::View<'_>,
        position_table: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Adds `dy` to the rows of both tables that made it.
    fn embedding_backward(
        &self,
        tokens: &Self::Ints,
        dy: Self::View<'_>,
        dtoken_table: Self::ViewMut<'_>,
        dposition_table: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl Work {
    /// Rows of a table and of positions (of so many elements in all), added.
    pub fn embedding(y: usize, places: usize) -> Self {
        Self::moves("embedding", 2 * y + places).on([y])
    }

    /// The gradients of both tables.
    pub fn embedding_backward(dy: usize, places: usize) -> Self {
        Self::moves("embedding, backward", dy).on([dy]).exactly(2 * (dy + places))
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, close, down, ids, random, up, up_f32, wide};

    pub fn embeddings<B: Kernels>(b: &B) -> Results {
        let mut results = Vec::new();
        for (sequences, time, vocabulary, width) in [(1, 1, 1, 1), (3, 31, 11, 33), (5, 64, 200, 65), (20, 33, 2, 96)] {
            let rows = sequences * time;
            let tokens = ids(21, rows, vocabulary);
            let (words, places) = (random(b, 22, vocabulary * width), random(b, 23, time * width));
            let (tb, wb, pb) = (b.upload_ints(&tokens).unwrap(), up(b, &words), up(b, &places));
            let mut y = up(b, &vec![0.0; rows * width]);
            b.embedding(&tb, B::all(&wb), B::all(&pb), B::all_mut(&mut y)).unwrap();
            let cell = |row: usize, i: usize| {
                f64::from(words[tokens[row] as usize * width + i]) + f64::from(places[row % time * width + i])
            };
            let want: Vec<f64> = (0..rows * width).map(|i| cell(i / width, i % width)).collect();
            close(b, &y, &want, "embedding");

            let (dy, dw0, dp0) = (random(b, 24, rows * width), random(b, 25, words.len()), random(b, 26, places.len()));
            let (dyb, mut dw, mut dp) = (up(b, &dy), up_f32(b, &dw0), up_f32(b, &dp0));
            b.embedding_backward(&tb, B::all(&dyb), B::all_mut(&mut dw), B::all_mut(&mut dp)).unwrap();
            let (mut want_w, mut want_p) = (wide(&dw0), wide(&dp0));
            for (i, &d) in dy.iter().enumerate() {
                let (row, column) = (i / width, i % width);
                want_w[tokens[row] as usize * width + column] += f64::from(d);
                want_p[row % time * width + column] += f64::from(d);
            }
            close(b, &dw, &want_w, "embedding d words");
            close(b, &dp, &want_p, "embedding d places");
            results.extend([down(b, &y), down(b, &dw), down(b, &dp)]);

            // Without positions.
            let (mut none, mut dw) = (up_f32(b, &[]), up_f32(b, &dw0));
            b.embedding(&tb, B::all(&wb), B::all(&none), B::all_mut(&mut y)).unwrap();
            let word = |i: usize| words[tokens[i / width] as usize * width + i % width];
            assert_eq!(down(b, &y), (0..rows * width).map(word).collect::<Vec<_>>());
            b.embedding_backward(&tb, B::all(&dyb), B::all_mut(&mut dw), B::all_mut(&mut none)).unwrap();
            close(b, &dw, &want_w, "embedding d words without places");
        }
        results
    }
}
