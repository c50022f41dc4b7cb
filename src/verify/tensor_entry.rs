//! The tensors that are compared.

use serde::{Deserialize, Serialize};

/// A tensor of the parameters or of the optimizer's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// The unit of the parameter.
    pub unit: String,
    /// The name of the parameter.
    pub tensor: String,
    /// The name of the state buffer; empty for the parameter itself.
    pub state: String,
    /// The number of elements.
    pub len: usize,
}

impl TensorRecord {
    /// Returns true if it is a parameter.
    pub fn is_parameter(&self) -> bool {
        self.state.is_empty()
    }
}
