//! Memory that a rank may take.

use hpctrain_config::telemetry::startup_summary::Estimate;

/// Most bytes that a rank may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Of the host, with those that it has already.
    pub host: usize,
    /// Of its GPU.
    pub gpu: usize,
}

impl MemoryBudget {
    /// Whether it is enough.
    pub fn holds(&self, need: &Estimate) -> bool {
        need.host() <= self.host && need.gpu() <= self.gpu
    }

    /// For other ranks.
    pub fn numbers(self) -> [u64; 2] {
        [self.host, self.gpu].map(|bytes| bytes as u64)
    }

    /// The least of the rooms of all ranks, each given by its [numbers](MemoryBudget::numbers).
    pub fn least(all: &[Vec<u64>]) -> Self {
        let least = |at: usize| {
            all.iter().filter_map(|room| room.get(at)).min().map_or(0, |bytes| *bytes as usize)
        };
        Self { host: least(0), gpu: least(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_all_counts() {
        let rooms = [
            MemoryBudget { host: 7, gpu: usize::MAX },
            MemoryBudget { host: usize::MAX, gpu: 5 },
            MemoryBudget { host: 9, gpu: 6 },
        ];
        let told = rooms.map(|room| room.numbers().to_vec());
        assert_eq!(MemoryBudget::least(&told), MemoryBudget { host: 7, gpu: 5 });
    }
}
