//! The parts of a layout that wait in the memory of the host while a GPU computes.

use std::fmt;

use hpctrain_config::Config;

/// The keys that move something from a GPU to its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OnHost {
    /// `offload.optimizer`: masters and optimizer state.
    pub optimizer: bool,
    /// `offload.params`: parameters and reduced gradients as well.
    pub shards: bool,
    /// `offload.activations`: inputs that blocks are computed again from.
    pub activations: bool,
}

impl OnHost {
    /// As a configuration has it.
    pub fn of(config: &Config) -> Self {
        Self {
            optimizer: config.offload.optimizer,
            shards: config.offload.params,
            activations: config.offload.activations,
        }
    }

    /// Keys that are set.
    pub fn count(&self) -> usize {
        [self.optimizer, self.shards, self.activations].into_iter().filter(|on| *on).count()
    }

    /// Whether anything is there.
    pub fn any(&self) -> bool {
        self.count() > 0
    }

    /// Sets the keys of a configuration.
    pub fn set(&self, config: &mut Config) {
        config.offload.optimizer = self.optimizer;
        config.offload.params = self.shards;
        config.offload.activations = self.activations;
    }
}

impl fmt::Display for OnHost {
    /// `, optimizer + activations on the host`; nothing where nothing is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("optimizer", self.optimizer),
            ("params", self.shards),
            ("activations", self.activations),
        ];
        let parts: Vec<&str> =
            parts.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
        if parts.is_empty() { Ok(()) } else { write!(f, ", {} on the host", parts.join(" + ")) }
    }
}
