//! Memory that a rank may take.

use crate::telemetry::banner::Estimate;

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

    /// As bytes, for other ranks.
    pub fn encode(&self) -> Vec<u8> {
        [self.host, self.gpu].into_iter().flat_map(|bytes| (bytes as u64).to_le_bytes()).collect()
    }

    /// The least of the rooms of all ranks, as [encoded](Room::encode).
    pub fn least(all: &[Vec<u8>]) -> Self {
        let number = |bytes: &Vec<u8>, at: usize| {
            let bytes = bytes.chunks_exact(8).nth(at).and_then(|bytes| bytes.first_chunk());
            bytes.map_or(0, |bytes| usize::try_from(u64::from_le_bytes(*bytes)).unwrap_or(usize::MAX))
        };
        let least = |at| all.iter().map(|bytes| number(bytes, at)).min().unwrap_or(0);
        Self { host: least(0), gpu: least(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_all_counts() {
        let rooms = [Room { host: 7, gpu: usize::MAX }, Room { host: usize::MAX, gpu: 5 }, Room { host: 9, gpu: 6 }];
        let told: Vec<Vec<u8>> = rooms.iter().map(Room::encode).collect();
        assert_eq!(Room::least(&told), Room { host: 7, gpu: 5 });
    }
}
