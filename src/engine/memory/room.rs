//! Memory that a rank may take.

use hpctrain_config::telemetry::banner::Estimate;

/// Most bytes that a rank may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Of the host, with those that it has already.
    pub host: usize,
    /// Of its GPU.
    pub gpu: usize,
}

impl Room {
    /// Whether it is enough.
    pub fn holds(&self, need: &Estimate) -> bool {
        need.host() <= self.host && need.gpu() <= self.gpu
    }

    /// For other ranks.
    pub fn numbers(self) -> [u64; 2] {
        [self.host, self.gpu].map(|bytes| bytes as u64)
    }

    /// The least of the rooms of all ranks, each given by its [numbers](Room::numbers).
    pub fn least(all: &[Vec<u64>]) -> Self {
        let least = |at: usize| all.iter().filter_map(|room| room.get(at)).min().map_or(0, |bytes| *bytes as usize);
        Self { host: least(0), gpu: least(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_all_counts() {
        let rooms = [Room { host: 7, gpu: usize::MAX }, Room { host: usize::MAX, gpu: 5 }, Room { host: 9, gpu: 6 }];
        let told = rooms.map(|room| room.numbers().to_vec());
        assert_eq!(Room::least(&told), Room { host: 7, gpu: 5 });
    }
}
