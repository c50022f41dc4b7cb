//! Memory that a rank may use.

use hpctrain_config::telemetry::startup_summary::Estimate;

/// The maximum number of bytes that a rank may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Host memory, including what the rank uses already.
    pub host: usize,
    /// Memory of the rank's GPU.
    pub gpu: usize,
}

impl MemoryBudget {
    /// Returns true if the estimate fits.
    pub fn holds(&self, need: &Estimate) -> bool {
        need.host() <= self.host && need.gpu() <= self.gpu
    }

    /// Returns the budget as numbers, to be sent to other ranks.
    pub fn numbers(self) -> [u64; 2] {
        [self.host, self.gpu].map(|bytes| bytes as u64)
    }

    /// Returns the smallest budget of all ranks, each given by its
    /// [numbers](MemoryBudget::numbers).
    pub fn least(all: &[Vec<u64>]) -> Self {
        let least = |at: usize| {
            all.iter().filter_map(|budget| budget.get(at)).min().map_or(0, |bytes| *bytes as usize)
        };
        Self { host: least(0), gpu: least(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_all_counts() {
        let budgets = [
            MemoryBudget { host: 7, gpu: usize::MAX },
            MemoryBudget { host: usize::MAX, gpu: 5 },
            MemoryBudget { host: 9, gpu: 6 },
        ];
        let numbers = budgets.map(|budget| budget.numbers().to_vec());
        assert_eq!(MemoryBudget::least(&numbers), MemoryBudget { host: 7, gpu: 5 });
    }
}
