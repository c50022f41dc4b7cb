//! Normalisation of rows.

use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use super::reduce::{CHUNK_ROWS, pack, row_chunks};
use super::{Cuda, CudaBuf};
use hpctrain_base::error::Result;
use hpctrain_device::{Backend, KernelCost, MemoryKind, Norm, NormOps};

/// The one-pass kernels of the norm backward, with the number of packs of a row per warp lane.
const IN_ONE: [(usize, &str); 4] = [
    (1, "norm_backward_1"),
    (2, "norm_backward_2"),
    (3, "norm_backward_3"),
    (4, "norm_backward_4"),
];

/// The one-pass kernels for wider rows, with the number of column runs per thread; four only in
/// f32.
const WIDE: [(usize, &str); 3] =
    [(1, "norm_backward_wide_1"), (2, "norm_backward_wide_2"), (4, "norm_backward_wide_4")];

/// The most threads of their blocks: `WIDE` of `norm_backward.cu`.
const WIDE_THREADS: usize = 512;

/// The widest rows that they keep in registers, in f32 and in bf16.
const WIDEST: usize = 8192;

/// Returns the one-pass kernel of the norm backward for rows of `width` elements with any
/// alignment, where `pack` elements have 16 bytes, and the threads of its blocks: threads per row,
/// and rows at a time. Returns `None` for narrower rows and for the widest ones.
fn wide(width: usize, pack: usize) -> Option<(&'static str, (u32, u32, u32))> {
    let narrower = IN_ONE.map(|(packs, _)| packs * 32 * pack).into_iter().max()?;
    if width <= narrower || width > WIDEST {
        return None;
    }
    let threads = |packs: usize| width.div_ceil(packs * pack).next_multiple_of(32);
    let (packs, name) = WIDE.into_iter().find(|&(packs, _)| threads(packs) <= WIDE_THREADS)?;
    let of_row = threads(packs);
    Some((name, (of_row as u32, (WIDE_THREADS / of_row) as u32, 1)))
}

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
        let _launch = self.profile_launch(KernelCost::norm(shape, bias.len));
        let args = [x.into(), weight.into(), bias.into(), (&y).into(), (&stats).into()];
        let sizes = [shape.rows.into(), shape.width.into(), shape.epsilon.into()];
        let grid = Grid::new(shape.rows.div_ceil(4), 128);
        let name = if shape.centred { "layer_norm" } else { "rms_norm" };
        self.launch_for(x.element, "norm.cu", name, grid, &[&args[..], &sizes].concat())
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
        let _launch = self.profile_launch(KernelCost::add_norm(shape, bias.len));
        let args =
            [x.into(), (&stream).into(), weight.into(), bias.into(), (&y).into(), (&stats).into()];
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
        let _launch = self.profile_launch(KernelCost::norm_backward(shape, dbias.len));
        let Norm { rows, width, centred, .. } = shape;
        let element = x.element;
        let chunks = rows.div_ceil(CHUNK_ROWS);
        let partial: CudaBuf = self.alloc_f32(MemoryKind::Activations, chunks * 2 * width)?;
        let partial = Self::all(&partial);
        let aligned = [dy.pointer, x.pointer, weight.pointer, dx.pointer]
            .iter()
            .all(|at| at.is_multiple_of(16));
        let in_one =
            IN_ONE.iter().find(|(packs, _)| aligned && packs * 32 * pack(element) == width);
        if let Some((_, name)) = in_one {
            let args = [
                dy.into(),
                x.into(),
                weight.into(),
                stats.into(),
                (&dx).into(),
                partial.into(),
                rows.into(),
            ];
            let centred = Arg::Int(i32::from(centred));
            let grid = Grid::plane(chunks, 1, (32, 8, 1));
            self.launch_for(
                element,
                "norm_backward.cu",
                name,
                grid,
                &[&args[..], &[centred]].concat(),
            )?;
        } else if let Some((name, threads)) = wide(width, pack(element)) {
            let args = [
                dy.into(),
                x.into(),
                weight.into(),
                stats.into(),
                (&dx).into(),
                partial.into(),
                rows.into(),
            ];
            let sizes = [width.into(), Arg::Int(i32::from(centred))];
            self.launch_for(
                element,
                "norm_backward.cu",
                name,
                Grid::plane(chunks, 1, threads),
                &[&args[..], &sizes].concat(),
            )?;
        } else {
            let args = [
                dy.into(),
                x.into(),
                weight.into(),
                stats.into(),
                (&dx).into(),
                rows.into(),
                width.into(),
            ];
            let grid = Grid::new(rows.div_ceil(4), 128);
            let name = if centred { "layer_norm_backward" } else { "rms_norm_backward" };
            self.launch_for(element, "norm_backward.cu", name, grid, &args)?;
            let args =
                [dy.into(), x.into(), stats.into(), partial.into(), rows.into(), width.into()];
            self.launch_for(
                element,
                "norm_backward.cu",
                "norm_partial",
                row_chunks(element, chunks, width),
                &args,
            )?;
        }
        let second = (dbias.len > 0).then_some(&dbias);
        self.finish_columns(partial, &dweight, second, chunks, 2 * width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_cover_wide_rows_and_no_more_than_fit() {
        for (pack, narrower) in [(8, 1024), (4, 512)] {
            assert!(wide(narrower, pack).is_none() && wide(WIDEST + 1, pack).is_none());
            for width in narrower + 1..=WIDEST {
                let (name, (x, y, _)) = wide(width, pack).unwrap();
                let packs: usize = name.rsplit('_').next().unwrap().parse().unwrap();
                assert!(
                    x as usize * packs * pack >= width && x % 32 == 0,
                    "{width}: {name} on {x}"
                );
                assert!(y >= 1 && (x * y) as usize <= WIDE_THREADS, "{width}: {x}×{y}");
                // bf16 kernels have up to two packs.
                assert!(packs * pack <= 16, "{width}: {name}");
            }
        }
    }
}
