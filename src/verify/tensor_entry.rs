//! The tensors that are compared.

use serde::{Deserialize, Serialize};

/// A tensor of the parameters or of the optimizer's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// The unit it belongs to.
    pub unit: String,
    /// The parameter's name.
    pub tensor: String,
    /// Empty for the parameters, else the name of a buffer of the optimizer.
    pub state: String,
    /// Elements.
    pub len: usize,
}

impl TensorRecord {
    /// Whether it is a parameter.
    pub fn is_parameter(&self) -> bool {
        self.state.is_empty()
    }
}
