//! Normalisation of rows.

use super::grid::Grid;
use super::launch::Arg;
use super::memory::{View, ViewMut};
use super::sums::CHUNK_ROWS;
use super::{Cuda, CudaBuf};
use crate::backend::{Backend, MemoryKind, Norm, NormOps, Work};
use crate::error::Result;

/// The kernels that take a norm back in one pass, with the packs of a row that a lane has in each.
const IN_ONE: [(usize, &str); 4] =
    [(1, "norm_backward_1"), (2, "norm_backward_2"), (3, "norm_backward_3"), (4, "norm_backward_4")];

impl NormOps for Cuda {
    fn norm(
        &self,
        shape: Norm,
        x: View<'_>,
        weight: View<'_>,
        bias: View<'_>,
        y: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::norm(shape, bias.len));
        let args = [x.into(), weight.into(), bias.into(), (&y).into(), (&stats).into()];
        let sizes = [shape.rows.into(), shape.width.into(), shape.epsilon.into()];
        let grid = Grid::new(shape.rows.div_ceil(4), 128);
        let name = if shape.centred { "layer_norm" } else { "rms_norm" };
        self.launch("norm.cu", name, grid, &[&args[..], &sizes].concat())
    }

    fn add_norm(
        &self,
        shape: Norm,
        x: View<'_>,
        stream: ViewMut<'_>,
        weight: View<'_>,
        bias: View<'_>,
        y: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::add_norm(shape, bias.len));
        let args = [x.into(), (&stream).into(), weight.into(), bias.into(), (&y).into(), (&stats).into()];
        let sizes = [shape.rows.into(), shape.width.into(), shape.epsilon.into()];
        let grid = Grid::new(shape.rows.div_ceil(4), 128);
        let name = if shape.centred { "add_layer_norm" } else { "add_rms_norm" };
        self.launch("norm.cu", name, grid, &[&args[..], &sizes].concat())
    }

    fn norm_backward(
        &self,
        shape: Norm,
        dy: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        stats: View<'_>,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
        dbias: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.launched(Work::norm_backward(shape, dbias.len));
        let Norm { rows, width, centred, .. } = shape;
        let chunks = rows.div_ceil(CHUNK_ROWS);
        let partial: CudaBuf = self.alloc_f32(MemoryKind::Activations, chunks * 2 * width)?;
        let partial = Self::all(&partial);
        let aligned = [dy.pointer, x.pointer, weight.pointer, dx.pointer].iter().all(|at| at.is_multiple_of(16));
        let in_one = IN_ONE.iter().find(|(packs, _)| aligned && packs * 32 * self.pack() == width);
        if let Some((_, name)) = in_one {
            let args = [dy.into(), x.into(), weight.into(), stats.into(), (&dx).into(), partial.into(), rows.into()];
            let centred = Arg::Int(i32::from(centred));
            let grid = Grid::plane(chunks, 1, (32, 8, 1));
            self.launch("norm_backward.cu", name, grid, &[&args[..], &[centred]].concat())?;
        } else {
            let args = [dy.into(), x.into(), weight.into(), stats.into(), (&dx).into(), rows.into(), width.into()];
            let grid = Grid::new(rows.div_ceil(4), 128);
            let name = if centred { "layer_norm_backward" } else { "rms_norm_backward" };
            self.launch("norm_backward.cu", name, grid, &args)?;
            let args = [dy.into(), x.into(), stats.into(), partial.into(), rows.into(), width.into()];
            self.launch("norm_backward.cu", "norm_partial", self.row_chunks(chunks, width), &args)?;
        }
        let second = (dbias.len > 0).then_some(&dbias);
        self.finish_columns(partial, &dweight, second, chunks, 2 * width)
    }
}
