//! The parts of a layout that wait in the memory of the host while a GPU computes.

use std::fmt;

use super::layouts::Keys;
use crate::config::Config;
use crate::parallel::Zero;

/// The keys that move something from a GPU to its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OnHost {
    /// `optimizer.offload`: masters and optimizer state.
    pub optimizer: bool,
    /// `parallel.offload_shards`: parameters and reduced gradients as well.
    pub shards: bool,
    /// `parallel.offload_activations`: inputs that blocks are computed again from.
    pub activations: bool,
}

impl OnHost {
    /// As a configuration has it.
    pub fn of(config: &Config) -> Self {
        Self {
            optimizer: config.optimizer.offload,
            shards: config.parallel.offload_shards,
            activations: config.parallel.offload_activations,
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
        config.optimizer.offload = self.optimizer;
        config.parallel.offload_shards = self.shards;
        config.parallel.offload_activations = self.activations;
    }

    /// The same layout on GPUs with more on the host than `keys` have, the fewest keys first, then the one that keeps most on the
    /// GPU. Keys that `base` gives stay. Of one rank parameters leave with ZeRO 3, which divides nothing there. The configuration may
    /// still refuse some.
    pub(super) fn more_than(keys: &Keys, base: &Config, may_recompute: bool) -> Vec<Keys> {
        let is_given = |key: &str| base.parallel.given.contains(key);
        let whole = keys.shard * keys.replica == 1 && !is_given("zero");
        let again = if may_recompute && !keys.recompute { vec![false, true] } else { vec![keys.recompute] };
        let now = keys.host;
        let mut all = Vec::new();
        for [optimizer, shards, activations] in (1..8).map(|bits| [1, 2, 4].map(|bit| bits & bit != 0)) {
            // Nothing that the configuration moves comes back.
            let changes = [
                (now.optimizer, optimizer, "offload"),
                (now.shards, shards, "offload_shards"),
                (now.activations, activations, "offload_activations"),
            ];
            let may_change = changes.iter().all(|(before, after, key)| before == after || (*after && !is_given(key)));
            let host = Self { optimizer, shards, activations };
            if !may_change || host == now {
                continue;
            }
            let zero = if shards && whole { Zero::Three } else { keys.zero };
            let has_owners = !shards || (zero == Zero::Three && optimizer);
            let all_of_host = again.iter().filter(|recompute| has_owners && (**recompute || !activations));
            all.extend(all_of_host.map(|&recompute| Keys { zero, recompute, host, ..*keys }));
        }
        all.sort_by_key(|keys| (keys.host.count(), keys.host.shards, keys.recompute));
        all
    }
}

impl fmt::Display for OnHost {
    /// `, optimizer + activations on the host`; nothing where nothing is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [("optimizer", self.optimizer), ("shards", self.shards), ("activations", self.activations)];
        let parts: Vec<&str> = parts.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
        if parts.is_empty() { Ok(()) } else { write!(f, ", {} on the host", parts.join(" + ")) }
    }
}
