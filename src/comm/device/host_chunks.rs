//! Collectives on host memory in a job in which other ranks have device memory: in the chunks of
//! host-staged communication (`host_staged.rs`), so that all ranks exchange the same messages.

use super::host_staged::{Chunk, cut};
use crate::algorithms::{self, Call, UnequalCollective};
use crate::reduce_buffer::{HostBuffer, Scratch};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// The chunks of collectives on host memory.
pub struct HostChunks {
    /// Words of a chunk.
    pub words: usize,
}

impl HostChunks {
    /// Runs a collective, chunk by chunk.
    pub fn collective(
        &self,
        call: Call,
        memory: &mut [f32],
        transport: &mut dyn Transport,
        scratch: &mut Scratch,
        group: &GroupRanks,
    ) -> Result<()> {
        let chunks = cut(call, memory.len(), group.size(), self.words.max(group.size()));
        chunks.iter().try_for_each(|chunk| {
            in_one_piece(chunk, memory, |memory| {
                algorithms::run(call, &mut HostBuffer { memory, scratch }, transport, group)
            })
        })
    }

    /// Runs a collective of unequal parts, chunk by chunk.
    pub fn unequal(
        &self,
        collective: &UnequalCollective,
        memory: &mut [f32],
        transport: &mut dyn Transport,
        scratch: &mut Scratch,
        group: &GroupRanks,
    ) -> Result<()> {
        let windows = collective.windows(group.rank, self.words);
        windows.into_iter().try_for_each(|(ranges, window)| {
            in_one_piece(&Chunk(ranges), memory, |memory| {
                window.run(&mut HostBuffer { memory, scratch }, transport, group)
            })
        })
    }
}

/// Calls `run` with the words of a chunk one behind the other: in place if they are already, else in
/// a copy that is written back.
fn in_one_piece(
    chunk: &Chunk,
    memory: &mut [f32],
    run: impl FnOnce(&mut [f32]) -> Result<()>,
) -> Result<()> {
    let Chunk(ranges) = chunk;
    let first = ranges.iter().find(|range| !range.is_empty()).map_or(0, |range| range.start);
    let mut end = first;
    let is_one_piece = ranges.iter().filter(|range| !range.is_empty()).all(|range| {
        let follows = range.start == end;
        end = range.end;
        follows
    });
    if is_one_piece {
        return run(&mut memory[first..end]);
    }
    let mut copy = Vec::with_capacity(chunk.words());
    ranges.iter().for_each(|range| copy.extend_from_slice(&memory[range.clone()]));
    run(&mut copy)?;
    let mut from = 0;
    for range in ranges {
        memory[range.clone()].copy_from_slice(&copy[from..from + range.len()]);
        from += range.len();
    }
    Ok(())
}
