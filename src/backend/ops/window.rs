//! Windows that move over images: unfolding and pooling.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// A window that moves over images: b × `height` × `width` × `channels`, channels last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Images.
    pub batch: usize,
    /// Rows of an image.
    pub height: usize,
    /// Columns of an image.
    pub width: usize,
    /// Channels of an image.
    pub channels: usize,
    /// Rows and columns of the window.
    pub size: [usize; 2],
    /// Rows and columns from one place to the next.
    pub stride: [usize; 2],
    /// Rows and columns beyond each edge where the window begins; less than its size.
    pub padding: [usize; 2],
}

impl Window {
    /// Rows and columns of places.
    pub fn places(&self) -> [usize; 2] {
        let along = |axis: usize, len: usize| {
            (len + 2 * self.padding[axis]).checked_sub(self.size[axis]).map_or(0, |rest| rest / self.stride[axis] + 1)
        };
        [along(0, self.height), along(1, self.width)]
    }

    /// Places in all images: rows of the output.
    pub fn rows(&self) -> usize {
        let [high, wide] = self.places();
        self.batch * high * wide
    }

    /// Elements of all images.
    pub fn elements(&self) -> usize {
        self.batch * self.height * self.width * self.channels
    }
}

/// Windows that move over images: unfolding and pooling.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait WindowOps: Backend {
    /// The operand of a convolution's product: for each place of the window a row of `y` with the elements that it sees
    /// of `channels` neighbouring channels from `first` on (window rows × window columns × `channels`), zero beyond the
    /// edges; overwrites.
    fn unfold(
        &self,
        window: Window,
        first: usize,
        channels: usize,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The backward of [`WindowOps::unfold`]: adds every element of `dy` to the one of `dx` that it was copied from.
    fn fold(
        &self,
        window: Window,
        first: usize,
        channels: usize,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The largest element that the window sees at each place, channel by channel; overwrites.
    fn max_pool(&self, window: Window, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Gives the gradient of each place to the first of its largest elements; overwrites `dx`.
    fn max_pool_backward(
        &self,
        window: Window,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The mean of the elements that the window sees at each place, channel by channel, edges not counted; overwrites.
    fn average_pool(&self, window: Window, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Overwrites `dx`.
    fn average_pool_backward(&self, window: Window, dy: Self::View<'_>, dx: Self::ViewMut<'_>) -> Result<()>;
}

impl Work {
    /// The unfolding of windows over so many channels.
    pub fn unfold(w: Window, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::moves("unfold", w.elements() / w.channels.max(1) * channels + seen)
            .on([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// Its gradient, added.
    pub fn fold(w: Window, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::moves("fold", 2 * (w.elements() / w.channels.max(1) * channels) + seen)
            .on([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// A pooling of images.
    pub fn pool(kernel: &'static str, w: Window) -> Self {
        Self::moves(kernel, w.elements() + w.rows() * w.channels).on([w.rows(), w.channels])
    }

    /// The gradient of the largest.
    pub fn max_pool_backward(w: Window) -> Self {
        Self::moves("max pool, backward", 2 * w.elements() + w.rows() * w.channels).on([w.rows(), w.channels])
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, close, down, ids, random, up, wide};

    pub fn windows<B: Kernels>(b: &B) -> Results {
        let window = |batch, [height, width, channels]: [usize; 3], size, stride, padding| Window {
            batch,
            height,
            width,
            channels,
            size,
            stride,
            padding,
        };
        let mut results = Vec::new();
        for w in [
            window(1, [1, 1, 1], [1, 1], [1, 1], [0, 0]),
            window(2, [5, 7, 3], [3, 3], [1, 1], [1, 1]),
            window(3, [6, 5, 4], [2, 2], [2, 2], [0, 0]),
            window(1, [9, 8, 5], [3, 2], [2, 3], [1, 0]),
            window(2, [7, 7, 2], [5, 7], [3, 1], [4, 3]),
            window(2, [4, 4, 33], [4, 4], [4, 4], [0, 0]),
        ] {
            let x = random(b, 60, w.elements());
            let xb = up(b, &x);
            for (first, channels) in [(0, w.channels), (w.channels / 2, w.channels - w.channels / 2)] {
                let row = w.size[0] * w.size[1] * channels;
                let dy = random(b, 61, w.rows() * row);
                let (mut want, mut want_d) = (vec![0.0; w.rows() * row], wide(&random(b, 62, w.elements())));
                for channel in 0..channels {
                    each_seen(w, first + channel, |place, [i, j], element| {
                        let at = place * row + (i * w.size[1] + j) * channels + channel;
                        if let Some(element) = element {
                            want[at] = x[element];
                            want_d[element] += f64::from(dy[at]);
                        }
                    });
                }
                let mut y = up(b, &random(b, 63, w.rows() * row));
                b.unfold(w, first, channels, B::all(&xb), B::all_mut(&mut y)).unwrap();
                assert_eq!(down(b, &y), want, "unfold {w:?}");
                let (dyb, mut dx) = (up(b, &dy), up(b, &random(b, 62, w.elements())));
                b.fold(w, first, channels, B::all(&dyb), B::all_mut(&mut dx)).unwrap();
                close(b, &dx, &want_d, "fold");
                results.push(down(b, &dx));
            }

            // Few values, so that some windows have two largest elements.
            let few: Vec<f32> = ids(64, w.elements(), 4).into_iter().map(|id| id as f32 - 2.0).collect();
            let (fb, dy) = (up(b, &few), random(b, 65, w.rows() * w.channels));
            let outputs = w.rows() * w.channels;
            let (mut largest, mut place_of) = (vec![f32::NEG_INFINITY; outputs], vec![0; outputs]);
            let (mut sums, mut counts) = (vec![0.0; outputs], vec![0.0; outputs]);
            for channel in 0..w.channels {
                each_seen(w, channel, |place, _, element| {
                    let (Some(element), at) = (element, place * w.channels + channel) else { return };
                    if few[element] > largest[at] {
                        (largest[at], place_of[at]) = (few[element], element);
                    }
                    sums[at] += f64::from(x[element]);
                    counts[at] += 1.0;
                });
            }
            let (mut want_max, mut want_mean) = (vec![0.0; w.elements()], vec![0.0; w.elements()]);
            for (at, dy) in dy.iter().enumerate() {
                want_max[place_of[at]] += f64::from(*dy);
            }
            for channel in 0..w.channels {
                each_seen(w, channel, |place, _, element| {
                    let at = place * w.channels + channel;
                    if let Some(element) = element {
                        want_mean[element] += f64::from(dy[at]) / counts[at];
                    }
                });
            }
            let (dyb, mut y, mut dx) = (up(b, &dy), up(b, &vec![0.0; outputs]), up(b, &random(b, 66, w.elements())));
            b.max_pool(w, B::all(&fb), B::all_mut(&mut y)).unwrap();
            assert_eq!(down(b, &y), largest, "max pool {w:?}");
            b.max_pool_backward(w, B::all(&fb), B::all(&dyb), B::all_mut(&mut dx)).unwrap();
            close(b, &dx, &want_max, "max pool backward");
            results.push(down(b, &dx));
            b.average_pool(w, B::all(&xb), B::all_mut(&mut y)).unwrap();
            close(b, &y, &sums.iter().zip(&counts).map(|(sum, count)| sum / count).collect::<Vec<_>>(), "average pool");
            b.average_pool_backward(w, B::all(&dyb), B::all_mut(&mut dx)).unwrap();
            close(b, &dx, &want_mean, "average pool backward");
            results.extend([down(b, &y), down(b, &dx)]);
        }
        results
    }

    /// Calls `see` for every element that the window sees: place of the output, row and column in the window, element.
    pub fn each_seen(w: Window, channel: usize, mut see: impl FnMut(usize, [usize; 2], Option<usize>)) {
        let [high, wide] = w.places();
        for place in 0..w.batch * high * wide {
            let (image, row, column) = (place / wide / high, place / wide % high, place % wide);
            for (i, j) in (0..w.size[0]).flat_map(|i| (0..w.size[1]).map(move |j| (i, j))) {
                let line = (row * w.stride[0] + i).checked_sub(w.padding[0]).filter(|line| *line < w.height);
                let at = (column * w.stride[1] + j).checked_sub(w.padding[1]).filter(|at| *at < w.width);
                let element =
                    line.zip(at).map(|(line, at)| ((image * w.height + line) * w.width + at) * w.channels + channel);
                see(place, [i, j], element);
            }
        }
    }
}
