//! Sliding windows over images: im2col and pooling.

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{Im2colShape, KernelCost, WindowOps};

/// Returns the window as kernel arguments.
fn numbers(w: Im2colShape) -> [Arg; 12] {
    let [high, wide] = w.output_size();
    let Im2colShape { batch, height, width, channels, size, stride, padding } = w;
    let pairs = [size, stride, padding].concat();
    let all = [
        batch, height, width, channels, pairs[0], pairs[1], pairs[2], pairs[3], pairs[4], pairs[5],
        high, wide,
    ];
    all.map(Arg::from)
}

impl WindowOps for Cuda {
    fn unfold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        x: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::unfold(window, channels));
        let args = [&[x.into(), (&y).into(), first.into(), channels.into()], &numbers(window)[..]]
            .concat();
        self.launch("im2col_pool.cu", "unfold", Grid::over(y.len), &args)
    }

    fn fold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        dy: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::fold(window, channels));
        let args =
            [&[dy.into(), (&dx).into(), first.into(), channels.into()], &numbers(window)[..]]
                .concat();
        self.launch(
            "im2col_pool.cu",
            "fold",
            Grid::over(dx.len / window.channels * channels),
            &args,
        )
    }

    fn max_pool(&self, window: Im2colShape, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::pool("max pool", window));
        let args = [&[x.into(), (&y).into()], &numbers(window)[..]].concat();
        self.launch("im2col_pool.cu", "max_pool", Grid::over(y.len), &args)
    }

    fn max_pool_backward(
        &self,
        window: Im2colShape,
        x: View<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::max_pool_backward(window));
        let args = [&[x.into(), dy.into(), (&dx).into()], &numbers(window)[..]].concat();
        self.launch("im2col_pool.cu", "max_pool_backward", Grid::over(dx.len), &args)
    }

    fn average_pool(&self, window: Im2colShape, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::pool("average pool", window));
        let args = [&[x.into(), (&y).into()], &numbers(window)[..]].concat();
        self.launch("im2col_pool.cu", "average_pool", Grid::over(y.len), &args)
    }

    fn average_pool_backward(
        &self,
        window: Im2colShape,
        dy: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::pool("average pool, backward", window));
        let args = [&[dy.into(), (&dx).into()], &numbers(window)[..]].concat();
        self.launch("im2col_pool.cu", "average_pool_backward", Grid::over(dx.len), &args)
    }
}
