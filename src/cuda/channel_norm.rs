//! Channel statistics, and normalisation with them.

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use super::reduce::CHUNK_ROWS;
use hpctrain_base::error::Result;
use hpctrain_device::{Backend, ChannelNormShape, ChannelOps, KernelCost, MemoryKind};

/// Returns the shape as kernel arguments.
fn channels(s: ChannelNormShape) -> [Arg; 4] {
    [s.samples, s.places, s.channels, s.groups].map(Arg::from)
}

impl Cuda {
    /// Sums channels over spatial positions. `of_chunks(grid, partial)` writes pairs of sums for
    /// chunks of positions. If `first` is given, the channels of its first position are written
    /// before the sums.
    fn sum_places(
        &self,
        s: ChannelNormShape,
        first: Option<View<'_>>,
        out: &ViewMut<'_>,
        of_chunks: impl FnOnce(Grid, Arg) -> Result<()>,
    ) -> Result<()> {
        let chunks = s.places.div_ceil(CHUNK_ROWS);
        let partial =
            self.alloc_f32(MemoryKind::Activations, s.samples * chunks * 2 * s.channels)?;
        let partial = Arg::from(Self::all(&partial));
        of_chunks(Grid::plane(s.samples * chunks, s.channels.div_ceil(32), (32, 8, 1)), partial)?;
        let first = first.map_or(Arg::Pointer(0), Arg::from);
        let args = [first, partial, out.into(), chunks.into()];
        self.launch(
            "channel_norm.cu",
            "finish",
            Grid::over(out.len),
            &[&args[..], &channels(s)].concat(),
        )
    }
}

impl ChannelOps for Cuda {
    fn channel_moments(
        &self,
        s: ChannelNormShape,
        x: View<'_>,
        moments: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::channel_sums("channels, sums", s, 1));
        self.sum_places(s, Some(x), &moments, |grid, partial| {
            let args = [x.into(), partial, CHUNK_ROWS.into()];
            self.launch(
                "channel_norm.cu",
                "moments_partial",
                grid,
                &[&args[..], &channels(s)].concat(),
            )
        })
    }

    fn channel_norm(
        &self,
        s: ChannelNormShape,
        x: View<'_>,
        stats: View<'_>,
        weight: View<'_>,
        bias: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::channel_norm("channels, norm", s, 2));
        let args = [x.into(), stats.into(), weight.into(), bias.into(), (&y).into()];
        self.launch(
            "channel_norm.cu",
            "channel_norm",
            Grid::over(y.len),
            &[&args[..], &channels(s)].concat(),
        )
    }

    fn channel_norm_sums(
        &self,
        s: ChannelNormShape,
        x: View<'_>,
        dy: View<'_>,
        stats: View<'_>,
        sums: ViewMut<'_>,
    ) -> Result<()> {
        let _launch =
            self.profile_launch(KernelCost::channel_sums("channels, gradient's sums", s, 2));
        self.sum_places(s, None, &sums, |grid, partial| {
            let args = [x.into(), dy.into(), stats.into(), partial, CHUNK_ROWS.into()];
            self.launch(
                "channel_norm.cu",
                "backward_partial",
                grid,
                &[&args[..], &channels(s)].concat(),
            )
        })
    }

    fn channel_norm_backward(
        &self,
        s: ChannelNormShape,
        x: View<'_>,
        dy: View<'_>,
        stats: View<'_>,
        weight: View<'_>,
        means: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _launch =
            self.profile_launch(KernelCost::channel_norm("channels, norm backward", s, 3));
        let args = [x.into(), dy.into(), stats.into(), weight.into(), means.into(), (&dx).into()];
        self.launch(
            "channel_norm.cu",
            "channel_norm_backward",
            Grid::over(dx.len),
            &[&args[..], &channels(s)].concat(),
        )
    }
}
