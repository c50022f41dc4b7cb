//! The scaling of rotary position embeddings (RoPE) that `[model.rope_scaling]` describes.

use super::range::out_of_range;
use super::{RopeScaling, RopeType};
use hpctrain_base::error::{Error, Result};
use hpctrain_nn::FrequencyScaling;

/// The keys of each type.
const HINT: &str = "rope_type = \"linear\" has factor; rope_type = \"llama3\" has factor, low_freq_factor, high_freq_factor and \
                    original_max_position_embeddings; rope_type = \"default\" has none of them";

/// Returns the scaling that a section describes.
///
/// # Errors
/// Returns an error if a key of the type is missing or out of range, or if a key of another type is
/// given.
pub fn scaling(section: &RopeScaling) -> Result<FrequencyScaling> {
    let RopeScaling {
        rope_type,
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings,
    } = *section;
    let of_llama3 = [
        ("low_freq_factor", low_freq_factor.is_some()),
        ("high_freq_factor", high_freq_factor.is_some()),
        ("original_max_position_embeddings", original_max_position_embeddings.is_some()),
    ];
    let unused = match rope_type {
        RopeType::Default => {
            [("factor", factor.is_some())].into_iter().chain(of_llama3).find(|(_, given)| *given)
        }
        RopeType::Linear => of_llama3.into_iter().find(|(_, given)| *given),
        RopeType::Llama3 => None,
    };
    if let Some((key, _)) = unused {
        let name = rope_type.name();
        let message = format!(
            "model.rope_scaling.{key} is given, but model.rope_scaling.rope_type = {name} does not use it"
        );
        return Err(Error::input(message).hint(HINT));
    }
    let missing = |key: &str| missing_key(rope_type, key);
    match rope_type {
        RopeType::Default => Ok(FrequencyScaling::Unscaled),
        RopeType::Linear => {
            let factor = factor.ok_or_else(|| missing("factor"))?;
            check(factor >= 1.0, "factor", factor, "at least 1")?;
            Ok(FrequencyScaling::Linear { factor })
        }
        RopeType::Llama3 => {
            let factor = factor.ok_or_else(|| missing("factor"))?;
            let low_freq_factor = low_freq_factor.ok_or_else(|| missing("low_freq_factor"))?;
            let high_freq_factor = high_freq_factor.ok_or_else(|| missing("high_freq_factor"))?;
            let original_max_position_embeddings = original_max_position_embeddings
                .ok_or_else(|| missing("original_max_position_embeddings"))?;
            check(factor >= 1.0, "factor", factor, "at least 1")?;
            check(low_freq_factor > 0.0, "low_freq_factor", low_freq_factor, "greater than 0")?;
            let greater =
                format!("greater than model.rope_scaling.low_freq_factor = {low_freq_factor}");
            check(
                high_freq_factor > low_freq_factor,
                "high_freq_factor",
                high_freq_factor,
                &greater,
            )?;
            if original_max_position_embeddings == 0 {
                return Err(out_of_range(
                    "model.rope_scaling.original_max_position_embeddings",
                    0,
                    "at least 1",
                ));
            }
            Ok(FrequencyScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            })
        }
    }
}

/// Returns the error for a key that the type requires.
fn missing_key(rope_type: RopeType, key: &str) -> Error {
    let name = rope_type.name();
    Error::input(format!(
        "model.rope_scaling.rope_type = {name}, but model.rope_scaling.{key} is missing"
    ))
    .hint(HINT)
}

/// Returns an error if a number is not in its range, or not finite.
fn check(is_in_range: bool, key: &str, value: f64, range: &str) -> Result<()> {
    match is_in_range && value.is_finite() {
        true => Ok(()),
        false => Err(out_of_range(&format!("model.rope_scaling.{key}"), value, range)),
    }
}
