//! The scale of inputs that a file records: means and standard deviations.

use hdf5::File;
use serde::{Deserialize, Serialize};

use super::h5;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::simd::simd;

/// The mean and standard deviation of inputs, one for each index of their last axis or of a whole
/// row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct MeanStd {
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
}

/// Names of the attributes of inputs that hold a [`MeanStd`].
pub(super) const MEAN: &str = "mean";
pub(super) const STD: &str = "std";

impl MeanStd {
    /// Reads the scale of a dataset, if it has one.
    pub(super) fn read(file: &File, name: &str, row_len: usize) -> Result<Option<Self>> {
        let unreadable = |e| {
            Error::input(format!("attributes {MEAN} and {STD} of {name}: {}", h5::one_line(&e)))
        };
        let dataset = file.dataset(name).map_err(unreadable)?;
        let has = |attribute: &str| {
            dataset.attr_names().map(|names| names.iter().any(|name| name == attribute))
        };
        if !has(MEAN).map_err(unreadable)? {
            return Ok(None);
        }
        let numbers = |attribute: &str| dataset.attr(attribute)?.read_raw::<f32>();
        let standard = Self {
            mean: numbers(MEAN).map_err(unreadable)?,
            std: numbers(STD).map_err(unreadable)?,
        };
        let places = standard.mean.len();
        if places == 0 || places != standard.std.len() || !row_len.is_multiple_of(places) {
            let stds = standard.std.len();
            return Err(Error::input(format!(
                "{name} has rows of {row_len}, {places} means and {stds} deviations"
            ))
            .hint("give one of each for every channel or column, or none"));
        }
        if let Some(mean) = standard.mean.iter().find(|mean| !mean.is_finite()) {
            return Err(
                Error::input(format!("{name} has a mean of {mean}")).hint("import it again")
            );
        }
        if let Some(std) = standard.std.iter().find(|std| !(**std > 0.0 && std.is_finite())) {
            return Err(Error::input(format!("{name} has a standard deviation of {std}"))
                .hint("import it again"));
        }
        Ok(Some(standard))
    }

    /// Normalises rows: subtracts the mean and divides by the standard deviation.
    pub(super) fn apply(&self, rows: &mut [f32]) {
        simd(
            #[inline(always)]
            || {
                if let ([mean], [std]) = (&self.mean[..], &self.std[..]) {
                    // The same computation, in a form that the compiler vectorises.
                    return rows.iter_mut().for_each(|x| *x = (*x - mean) / std);
                }
                for row in rows.chunks_exact_mut(self.mean.len()) {
                    for ((x, mean), std) in row.iter_mut().zip(&self.mean).zip(&self.std) {
                        *x = (*x - mean) / std;
                    }
                }
            },
        );
    }
}
