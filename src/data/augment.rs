//! Random augmentation of images as they are read for training: flips, shifts and crops.
//!
//! The augmentation of an image is a function of the run's seed, the epoch and the sample's number:
//! it depends neither on the ranks nor on earlier reads.

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::random::{Stream, derive, name};

/// Random augmentation of images, drawn anew each time an image is read; none by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Augment {
    /// Mirrors an image left to right with probability 1/2.
    pub flip: bool,
    /// The largest shift in each direction, in pixels; the border is repeated.
    pub shift: usize,
    /// The width of the border of stored zeros from which an image of the original size is cropped
    /// at random.
    pub crop: usize,
}

/// Applies an [`Augment`] to images of one shape, with random numbers derived from a seed.
#[derive(Debug, Clone)]
pub(super) struct Augmenter {
    by: Augment,
    /// height × width × channels
    shape: [usize; 3],
    key: u64,
    /// The image as it was read.
    original: Vec<f32>,
}

impl Augmenter {
    /// Creates an augmenter of samples of `shape`.
    ///
    /// # Errors
    /// Returns an error if `shape` is not height, width and channels, or if a shift or crop is not
    /// smaller than the image.
    pub(super) fn new(by: Augment, shape: &[usize], seed: u64) -> Result<Self> {
        let &[height, width, channels] = shape else {
            return Err(Error::input(format!(
                "data.augment is for images, but model.input = {shape:?}"
            ))
            .hint("omit it, or set model.input to height, width and channels"));
        };
        let smallest = height.min(width);
        for (key, pixels) in [("shift", by.shift), ("crop", by.crop)] {
            if pixels >= smallest {
                return Err(Error::input(format!(
                    "data.augment.{key} = {pixels} is too large for images of {height} × {width}"
                ))
                .hint(format!("data.augment.{key} must be less than {smallest}")));
            }
        }
        let shape = [height, width, channels];
        Ok(Self { by, shape, key: derive(seed, &[name("augment")]), original: Vec::new() })
    }

    /// Augments image number `sample` in place, as in `epoch`.
    pub(super) fn apply(&mut self, epoch: u64, sample: u64, image: &mut [f32]) {
        let stream = Stream::new(derive(self.key, &[epoch, sample]));
        let ([a, b, c, d], [e, ..]) = (stream.block(0), stream.block(1));
        // Uniform in -reach..=reach, to within 2⁻³².
        let offset = |word: u32, reach: usize| {
            ((u64::from(word) * (2 * reach as u64 + 1)) >> 32) as isize - reach as isize
        };
        let Augment { flip, shift, crop } = self.by;
        let is_flipped = flip && a >> 31 == 1;
        let shift_y = offset(b, shift);
        let shift_x = offset(c, shift);
        let crop_y = offset(d, crop);
        let crop_x = offset(e, crop);
        let [height, width, channels] = self.shape;
        self.original.clear();
        self.original.extend_from_slice(image);
        // Source coordinate of a pixel of the new image: first cropped, then shifted.
        let from = |place: usize, crop: isize, shift: isize, extent: usize| {
            let place = place.checked_add_signed(crop).filter(|place| *place < extent)?;
            Some(place.saturating_add_signed(shift).min(extent - 1))
        };
        for (y, row) in image.chunks_exact_mut(width * channels).enumerate().take(height) {
            let from_y = from(y, crop_y, shift_y, height);
            for (x, pixel) in row.chunks_exact_mut(channels).enumerate() {
                match (from_y, from(x, crop_x, shift_x, width)) {
                    (Some(y), Some(x)) => {
                        let x = if is_flipped { width - 1 - x } else { x };
                        pixel.copy_from_slice(
                            &self.original[(y * width + x) * channels..][..channels],
                        );
                    }
                    _ => pixel.fill(0.0),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Returns a 3 × 4 image of two channels: 1 to 12, and a hundred more.
    fn image() -> Vec<f32> {
        (1..=12).flat_map(|i| [i as f32, i as f32 + 100.0]).collect()
    }

    fn seen(by: Augment, epoch: u64, sample: u64) -> Vec<f32> {
        let mut seen = image();
        Augmenter::new(by, &[3, 4, 2], 5).unwrap().apply(epoch, sample, &mut seen);
        seen
    }

    /// Returns the first channel.
    fn first(image: &[f32]) -> Vec<i32> {
        image.iter().step_by(2).map(|x| *x as i32).collect()
    }

    /// Returns all possible results of an augmentation, computed by hand.
    fn expected(by: Augment) -> HashSet<Vec<i32>> {
        let [shift, crop] = [by.shift as i32, by.crop as i32];
        let mut all = HashSet::new();
        for flipped in [false, true].into_iter().take(1 + usize::from(by.flip)) {
            let flip = |x: i32| if flipped { 3 - x } else { x };
            let square = |reach: i32| {
                (-reach..=reach).flat_map(move |y| (-reach..=reach).map(move |x| (y, x)))
            };
            for (shift_y, shift_x) in square(shift) {
                let shifted = |y: i32, x: i32| {
                    let y = (y + shift_y).clamp(0, 2);
                    let x = (x + shift_x).clamp(0, 3);
                    y * 4 + flip(x) + 1
                };
                for (crop_y, crop_x) in square(crop) {
                    let cropped = (0..12).map(|i: i32| {
                        let y = i / 4 + crop_y;
                        let x = i % 4 + crop_x;
                        if (0..3).contains(&y) && (0..4).contains(&x) { shifted(y, x) } else { 0 }
                    });
                    all.insert(cropped.collect());
                }
            }
        }
        all
    }

    #[test]
    fn everything_that_may_be_is_seen_and_nothing_else() {
        let [flip, shift, crop] = [(true, 0, 0), (false, 1, 0), (false, 0, 2)]
            .map(|(flip, shift, crop)| Augment { flip, shift, crop });
        for by in [Augment::default(), flip, shift, crop, Augment { flip: true, shift: 1, crop: 1 }]
        {
            let got: HashSet<Vec<i32>> =
                (0..3000).map(|sample| first(&seen(by, 1, sample))).collect();
            assert_eq!(got, expected(by), "{by:?}");
        }
        let both = seen(Augment { flip: true, shift: 2, crop: 1 }, 3, 9);
        assert!(
            both.chunks_exact(2).all(|pixel| pixel == [0.0, 0.0] || pixel[1] == pixel[0] + 100.0),
            "{both:?}"
        );
    }

    #[test]
    fn an_image_changes_with_the_epoch_and_not_with_its_neighbours() {
        let by = Augment { flip: true, shift: 2, crop: 2 };
        let mut one = Augmenter::new(by, &[3, 4, 2], 5).unwrap();
        let mut differ = 0;
        for sample in (0..100).rev() {
            let mut again = image();
            one.apply(7, sample, &mut again);
            assert_eq!(again, seen(by, 7, sample));
            differ += usize::from(again != seen(by, 8, sample));
        }
        assert!(differ > 80, "{differ}");
    }

    #[test]
    fn only_images_are_moved_and_stay_in_sight() {
        let refused = |by, shape: &[usize]| Augmenter::new(by, shape, 1).unwrap_err().to_string();
        let flip = Augment { flip: true, ..Augment::default() };
        assert!(
            refused(flip, &[784])
                .contains("data.augment is for images, but model.input = [784]\nhint: ")
        );
        let shift = Augment { shift: 28, ..Augment::default() };
        assert!(
            refused(shift, &[28, 30, 1])
                .contains("data.augment.shift = 28 is too large for images of 28 × 30")
        );
        let crop = Augment { crop: 28, ..Augment::default() };
        assert!(refused(crop, &[28, 30, 1]).contains("data.augment.crop = 28"));
    }
}
