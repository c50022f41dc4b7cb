//! Timing of collectives.

use std::time::Instant;

use crate::backend::{Backend, MemoryKind};
use crate::comm::{Algorithm, AlgorithmTable, Group, Operation, slowest};
use crate::error::Result;

/// The number of bytes copied to measure the memory bandwidth: more than any cache.
const COPY: usize = 256 << 20;

/// The number of bytes after which a batch of collectives is long enough to be timed.
const BATCH: usize = 32 << 20;

/// The maximum number of collectives in a batch.
const LONGEST_BATCH: usize = 500;

/// The duration of a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CollectiveTiming {
    /// The operation.
    pub operation: Operation,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The number of participating ranks.
    pub ranks: usize,
    /// The size of the whole buffer in bytes.
    pub bytes: usize,
    /// The time of one collective on the slowest rank: the median over batches.
    pub seconds: f64,
}

impl CollectiveTiming {
    /// Returns the bytes of the buffer per second.
    pub fn algorithm_bandwidth(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// Returns the load of each rank's link in bytes per second, which is comparable across numbers
    /// of ranks: the algorithm bandwidth times 2(n−1)/n for an all-reduce, (n−1)/n for
    /// reduce-scatter and all-gather, and 1 for a reduce or a broadcast, as NVIDIA's nccl-tests
    /// define it.
    pub fn bus_bandwidth(&self) -> f64 {
        let n = self.ranks as f64;
        let factor = match self.operation {
            Operation::AllReduce => 2.0 * (n - 1.0) / n,
            Operation::ReduceScatter | Operation::AllGather => (n - 1.0) / n,
            Operation::Reduce | Operation::Broadcast => 1.0,
        };
        self.algorithm_bandwidth() * factor
    }
}

/// Times one operation on a buffer of about `bytes` bytes, in `batches` batches. Collective over
/// `world`.
///
/// # Errors
/// Returns an error if a message fails, or memory cannot be allocated.
pub fn time<B: Backend>(
    world: &Group<B>,
    backend: &B,
    operation: Operation,
    algorithm: Algorithm,
    bytes: usize,
    batches: usize,
) -> Result<CollectiveTiming> {
    let group = world.with_algorithms(AlgorithmTable::uniform(algorithm));
    let len = bytes.div_ceil(size_of::<f32>()).next_multiple_of(world.size());
    // Zeros stay zeros, no matter how often they are added.
    let mut buf = backend.upload(MemoryKind::Gradients, &vec![0.0; len])?;
    let batch = (BATCH / bytes.max(1)).clamp(1, LONGEST_BATCH);
    let mut seconds = Vec::with_capacity(batches);
    // The first batch is a warm-up that touches the memory.
    for _ in 0..=batches {
        world.barrier().wait()?;
        let start = Instant::now();
        for _ in 0..batch {
            buf = group.run(operation, buf).synchronize()?;
        }
        seconds.push(start.elapsed().as_secs_f64() / batch as f64);
    }
    let mut seconds = slowest(world, &seconds[1..])?;
    seconds.sort_by(f64::total_cmp);
    let bytes = len * size_of::<f32>();
    Ok(CollectiveTiming {
        operation,
        algorithm,
        ranks: world.size(),
        bytes,
        seconds: seconds[seconds.len() / 2],
    })
}

/// Measures the bytes per second that the slowest rank copies within its memory while all others do
/// the same. Collective over `world`.
///
/// # Errors
/// Returns an error if a message fails.
pub fn copy_limit<B: Backend>(world: &Group<B>, batches: usize) -> Result<f64> {
    let from = vec![1u8; COPY];
    let mut to = vec![0u8; COPY];
    let mut seconds = Vec::with_capacity(batches);
    for _ in 0..=batches {
        world.barrier().wait()?;
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&to);
        seconds.push(start.elapsed().as_secs_f64());
    }
    let mut seconds = slowest(world, &seconds[1..])?;
    seconds.sort_by(f64::total_cmp);
    Ok(COPY as f64 / seconds[seconds.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the timing of an operation on 1000 bytes that took half a second.
    fn timing(operation: Operation, ranks: usize) -> CollectiveTiming {
        let algorithm = Algorithm::Ring;
        CollectiveTiming { operation, algorithm, ranks, bytes: 1000, seconds: 0.5 }
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let bus = |operation, ranks| timing(operation, ranks).bus_bandwidth();
        assert_eq!(timing(Operation::AllReduce, 4).algorithm_bandwidth(), 2000.0);
        assert_eq!((bus(Operation::AllReduce, 4), bus(Operation::AllReduce, 2)), (3000.0, 2000.0));
        assert_eq!(
            (bus(Operation::AllGather, 4), bus(Operation::ReduceScatter, 2)),
            (1500.0, 1000.0)
        );
        assert_eq!(bus(Operation::Broadcast, 4), 2000.0);
    }
}
