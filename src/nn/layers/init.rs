//! Weight initialisation.

use hpctrain_base::layout::Init;

/// Returns a normal initialisation with variance 2 / inputs, which preserves the variance of
/// activations through ReLU (He et al., "Delving deep into rectifiers", 2015).
pub fn he(inputs: usize) -> Init {
    Init::Normal((2.0 / inputs as f32).sqrt())
}
