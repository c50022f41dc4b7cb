//! The angles of rotary position embeddings (Su et al., "RoFormer", 2021), shared by the blocks of
//! a network.

use std::f64::consts::TAU;
use std::sync::OnceLock;

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, MemoryKind};

/// Scaling of the frequencies of rotary position embeddings (RoPE), for contexts that are longer
/// than those of pre-training.
///
/// The names are those of `rope_scaling` in Hugging Face transformers (`modeling_rope_utils`).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum FrequencyScaling {
    /// Leaves frequencies as they are.
    #[default]
    Unscaled,
    /// Divides all frequencies by `factor` (position interpolation: Chen et al., "Extending context
    /// window of large language models via positional interpolation", 2023).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Divides low frequencies by `factor`, keeps high ones, and interpolates between the two: that
    /// of Llama 3.1 to 3.3 (Grattafiori et al., "The Llama 3 herd of models", 2024; `apply_scaling`
    /// in Meta's `llama-models`).
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Pairs that turn at most this many times within the original context are divided by
        /// `factor`.
        low_freq_factor: f64,
        /// Pairs that turn at least this many times within the original context are kept; more than
        /// `low_freq_factor`.
        high_freq_factor: f64,
        /// Positions of a sequence in pre-training.
        original_max_position_embeddings: usize,
    },
}

impl FrequencyScaling {
    /// Returns the scaled frequency of a pair, in radians per position.
    pub fn scaled(self, frequency: f64) -> f64 {
        match self {
            Self::Unscaled => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let turns = original_max_position_embeddings as f64 * frequency / TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor))
                    .clamp(0.0, 1.0);
                kept * frequency + (1.0 - kept) * frequency / factor
            }
        }
    }
}

/// The cosines and sines of every position, uploaded to the device on first use.
pub struct RopeTable<B: Backend> {
    base: f64,
    scaling: FrequencyScaling,
    head_width: usize,
    context: usize,
    table: OnceLock<B::Buf>,
}

impl<B: Backend> RopeTable<B> {
    /// Creates the table of `context` positions for heads of `head_width` elements: pair i has the
    /// frequency `base`^(-2i / `head_width`), scaled by `scaling`, and position t turns it by t
    /// times that.
    pub fn new(base: f64, scaling: FrequencyScaling, head_width: usize, context: usize) -> Self {
        Self { base, scaling, head_width, context, table: OnceLock::new() }
    }

    /// Returns the number of elements of the table.
    pub fn len(&self) -> usize {
        self.context * self.head_width
    }

    /// Returns the table, context × head width: a row has the cosines of a position's angles, then
    /// the sines.
    ///
    /// # Errors
    /// Returns an error if the device is out of memory.
    pub fn table(&self, backend: &B) -> Result<B::View<'_>> {
        if self.table.get().is_none() {
            // If another thread was faster, its table is the same.
            let _ = self.table.set(backend.upload_f32(MemoryKind::Activations, &self.values())?);
        }
        self.table
            .get()
            .map(B::all)
            .ok_or_else(|| Error::internal("the RoPE table was set, but is missing"))
    }

    /// Computes the table in f64 and rounds once, since far positions have large angles.
    fn values(&self) -> Vec<f32> {
        let half = self.head_width / 2;
        let frequency = |i: usize| self.base.powf(-2.0 * i as f64 / self.head_width as f64);
        let frequencies: Vec<f64> = (0..half).map(|i| self.scaling.scaled(frequency(i))).collect();
        (0..self.context)
            .flat_map(|t| {
                let angles = frequencies.iter().map(move |frequency| t as f64 * frequency);
                angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|x| x as f32)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Llama 3.1: at 8192 positions pairs keep their frequency up to a wavelength of 2048 and are
    /// slowed down to an eighth from 8192 on.
    #[test]
    fn llama3_slows_long_waves_and_keeps_short_ones() {
        let factor = 8.0;
        let low_freq_factor = 1.0;
        let high_freq_factor = 4.0;
        let llama3 = FrequencyScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: 8192,
        };
        for (wavelength, kept) in
            [(7.0, 1.0), (2048.0, 1.0), (4096.0, 1.0 / 3.0), (8192.0, 0.0), (1e6, 0.0)]
        {
            let frequency = TAU / wavelength;
            let expected = frequency * (kept + (1.0 - kept) / factor);
            let scaled = llama3.scaled(frequency);
            assert!(
                (scaled / expected - 1.0).abs() < 1e-12,
                "{wavelength}: {scaled}, not {expected}"
            );
        }
        assert_eq!(FrequencyScaling::Linear { factor }.scaled(0.5), 0.0625);
        assert_eq!(FrequencyScaling::Unscaled.scaled(0.5), 0.5);
    }
}
