//! The offload of a layout from a GPU to host memory.

use std::fmt;

use hpctrain_config::Config;

/// The keys of the section `[offload]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OffloadKeys {
    /// `offload.optimizer`: fp32 master weights and optimizer state.
    pub optimizer: bool,
    /// `offload.params`: parameters and reduced gradients as well.
    pub params: bool,
    /// `offload.activations`: inputs from which blocks are recomputed.
    pub activations: bool,
}

impl OffloadKeys {
    /// Returns the keys of a configuration.
    pub fn from_config(config: &Config) -> Self {
        Self {
            optimizer: config.offload.optimizer,
            params: config.offload.params,
            activations: config.offload.activations,
        }
    }

    /// Returns the number of keys that are set.
    pub fn count(&self) -> usize {
        [self.optimizer, self.params, self.activations].into_iter().filter(|on| *on).count()
    }

    /// Returns true if any key is set.
    pub fn any(&self) -> bool {
        self.count() > 0
    }

    /// Sets the keys in a configuration.
    pub fn set(&self, config: &mut Config) {
        config.offload.optimizer = self.optimizer;
        config.offload.params = self.params;
        config.offload.activations = self.activations;
    }
}

impl fmt::Display for OffloadKeys {
    /// Writes `, optimizer + activations on the host`, or nothing if no key is set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("optimizer", self.optimizer),
            ("params", self.params),
            ("activations", self.activations),
        ];
        let parts: Vec<&str> =
            parts.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
        if parts.is_empty() { Ok(()) } else { write!(f, ", {} on the host", parts.join(" + ")) }
    }
}
