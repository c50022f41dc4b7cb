//! Windows that move over images: unfolding and pooling.

use super::Cuda;
use super::grid::Grid;
use super::launch::Arg;
use super::memory::{View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{Window, WindowOps, Work};

/// A window as the kernels take it.
fn numbers(w: Window) -> [Arg; 12] {
    let [high, wide] = w.places();
    let Window { batch, height, width, channels, size, stride, padding } = w;
    let pairs = [size, stride, padding].concat();
    let all = [batch, height, width, channels, pairs[0], pairs[1], pairs[2], pairs[3], pairs[4], pairs[5], high, wide];
    all.map(Arg::from)
}

impl WindowOps for Cuda {
    fn unfold(&self, window: Window, first: usize, channels: usize, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::unfold(window, channels));
        let args = [&[x.into(), (&y).into(), first.into(), channels.into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "unfold", Grid::over(y.len), &args)
    }

    fn fold(&self, window: Window, first: usize, channels: usize, dy: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::fold(window, channels));
        let args = [&[dy.into(), (&dx).into(), first.into(), channels.into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "fold", Grid::over(dx.len / window.channels * channels), &args)
    }

    fn max_pool(&self, window: Window, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pool("max pool", window));
        let args = [&[x.into(), (&y).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "max_pool", Grid::over(y.len), &args)
    }

    fn max_pool_backward(&self, window: Window, x: View<'_>, dy: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::max_pool_backward(window));
        let args = [&[x.into(), dy.into(), (&dx).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "max_pool_backward", Grid::over(dx.len), &args)
    }

    fn average_pool(&self, window: Window, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pool("average pool", window));
        let args = [&[x.into(), (&y).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "average_pool", Grid::over(y.len), &args)
    }

    fn average_pool_backward(&self, window: Window, dy: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let _launch = self.launched(Work::pool("average pool, backward", window));
        let args = [&[dy.into(), (&dx).into()], &numbers(window)[..]].concat();
        self.launch("window.cu", "average_pool_backward", Grid::over(dx.len), &args)
    }
}
