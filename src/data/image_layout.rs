//! The shapes of rows in files and in networks, and the order of the axes of images.

use serde::{Deserialize, Serialize};

use super::h5::shape;
use hpctrain_base::error::{Error, Result};

/// The order of the axes of images in files; networks take their channels last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axes {
    /// Height × width × channels.
    #[default]
    Nhwc,
    /// Channels × height × width; converted to height × width × channels when read.
    Nchw,
}

/// Images whose channels come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Planes {
    pub channels: usize,
    /// Elements of a channel.
    pub pixels: usize,
}

/// The hint for a shape that does not match in any order.
const SHAPE: &str = "set model.input to the shape of a row; rows without axes fit any shape";

impl Planes {
    /// Checks rows of shape `stored` of the dataset `name` for a network that takes `wanted`.
    /// Returns the layout of images whose channels come first, or `None` if no axis is to be moved.
    /// Singleton dimensions are ignored, and rows without axes are in the order of `axes`.
    ///
    /// # Errors
    /// Returns an error if the shapes differ.
    pub(super) fn check(
        name: &str,
        stored: &[usize],
        wanted: &[usize],
        axes: Axes,
    ) -> Result<Option<Self>> {
        let significant =
            |axes: &[usize]| axes.iter().copied().filter(|extent| *extent != 1).collect::<Vec<_>>();
        let fits = |wanted: &[usize]| {
            let stored = significant(stored);
            let wanted = significant(wanted);
            stored == wanted || stored.len() <= 1 || wanted.len() <= 1
        };
        let first = match wanted {
            &[height, width, channels] => Some([channels, height, width]),
            _ => None,
        };
        let has = format!("{name} has rows of {}, but", shape(stored));
        let refused = |hint: &str| {
            Err(Error::input(format!("{has} model.input is {}", shape(wanted))).hint(hint))
        };
        match (axes, first) {
            (Axes::Nhwc, _) if fits(wanted) => Ok(None),
            (Axes::Nhwc, Some(first)) if fits(&first) => refused(
                "their channels come first: set data.image_layout = \"nchw\", which moves them to the end when rows are read",
            ),
            (Axes::Nhwc, _) => refused(SHAPE),
            (Axes::Nchw, None) => {
                let message = format!(
                    "data.image_layout = \"nchw\" is for images, but model.input is {}",
                    shape(wanted)
                );
                Err(Error::input(message)
                    .hint("omit it, or set model.input to height, width and channels"))
            }
            (Axes::Nchw, Some(first)) if fits(&first) => {
                let [channels, height, width] = first;
                let planes = Self { channels, pixels: height * width };
                Ok(Some(planes).filter(|planes| planes.channels > 1 && planes.pixels > 1))
            }
            (Axes::Nchw, Some(first)) => {
                let hint = if fits(wanted) {
                    "their channels come last: data.image_layout = \"nhwc\""
                } else {
                    SHAPE
                };
                let wanted = shape(wanted);
                let first = shape(&first);
                let message = format!(
                    "{has} with data.image_layout = \"nchw\" those of model.input {wanted} are {first}"
                );
                Err(Error::input(message).hint(hint))
            }
        }
    }

    /// Moves the channels of rows, stored one after the other in `rows`, from the front to the end.
    pub(super) fn to_last(self, rows: &mut [f32]) {
        let Self { channels, pixels } = self;
        let mut first = vec![0.0; channels * pixels];
        for row in rows.chunks_exact_mut(channels * pixels) {
            first.copy_from_slice(row);
            for (pixel, values) in row.chunks_exact_mut(channels).enumerate() {
                for (channel, value) in values.iter_mut().enumerate() {
                    *value = first[channel * pixels + pixel];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(stored: &[usize], wanted: &[usize], axes: Axes) -> Result<Option<Planes>, String> {
        Planes::check("/x", stored, wanted, axes).map_err(|e| e.to_string())
    }

    #[test]
    fn only_rows_of_the_network_s_shape_fit() {
        use Axes::{Nchw, Nhwc};
        for (stored, wanted) in [
            (&[8, 8, 3][..], &[8, 8, 3][..]),
            (&[192], &[8, 8, 3]),
            (&[1, 192], &[8, 8, 3]),
            (&[8, 8, 3], &[192]),
            (&[28, 28], &[28, 28, 1]),
            (&[28, 28, 1], &[28, 28]),
            (&[], &[1]),
        ] {
            assert_eq!(checked(stored, wanted, Nhwc), Ok(None), "{stored:?} {wanted:?}");
        }
        let planes = Some(Planes { channels: 3, pixels: 48 });
        assert_eq!(checked(&[3, 6, 8], &[6, 8, 3], Nchw), Ok(planes));
        assert_eq!(checked(&[144], &[6, 8, 3], Nchw), Ok(planes));
        assert_eq!(checked(&[1, 28, 28], &[28, 28, 1], Nchw), Ok(None));
        for (stored, wanted, axes, expected) in [
            (&[3, 8, 8][..], &[8, 8, 3][..], Nhwc, "data.image_layout = \"nchw\""),
            (&[8, 6, 3], &[6, 8, 3], Nhwc, "set model.input to the shape"),
            (&[8, 24], &[8, 8, 3], Nhwc, "set model.input to the shape"),
            (&[8, 8, 3], &[8, 8, 3], Nchw, "data.image_layout = \"nhwc\""),
            (&[3, 8, 6], &[6, 8, 3], Nchw, "are 3 x 6 x 8"),
            (&[64], &[64], Nchw, "is for images, but model.input is 64"),
        ] {
            let e = checked(stored, wanted, axes).unwrap_err();
            assert!(e.contains(expected) && e.contains(&shape(wanted)), "{e}");
        }
    }

    #[test]
    fn channels_move_to_the_end() {
        let mut rows = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 5.0, 6.0, 7.0, 15.0, 16.0, 17.0];
        Planes { channels: 2, pixels: 3 }.to_last(&mut rows);
        assert_eq!(rows, [0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 5.0, 15.0, 6.0, 16.0, 7.0, 17.0]);
    }
}
