//! Initial weights.

use hpctrain_base::layout::Init;

/// Normal with a variance of 2 / inputs, which keeps the size of signals through rectifiers (He et
/// al., "Delving deep into rectifiers", 2015).
pub fn he(inputs: usize) -> Init {
    Init::Normal((2.0 / inputs as f32).sqrt())
}
