//! Collectives of small messages: metadata, errors, synchronisation.

use crate::comm::wire::{Members, Wire};
use crate::error::Result;

/// Every rank's bytes, in rank order, on every rank, in 2⌈log₂ n⌉ rounds: in step k each rank has those of the 2^k ranks from itself
/// on, and takes those of the next ones, their lengths first (Bruck et al., "Efficient algorithms for all-to-all communications in
/// multiport message-passing systems", 1997).
pub fn gather(wire: &mut dyn Wire, group: &Members, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let size = group.size();
    // From this rank on around the ring.
    let mut all = Vec::with_capacity(size);
    all.push(mine);
    while all.len() < size {
        let distance = all.len();
        let count = distance.min(size - distance);
        let (behind, ahead) = ((group.rank + size - distance) % size, (group.rank + distance) % size);
        let lengths: Vec<u8> = all[..count].iter().flat_map(|one| (one.len() as u64).to_le_bytes()).collect();
        let mut theirs = vec![0; lengths.len()];
        wire.exchange_bytes(group, Some((behind, &lengths)), Some((ahead, &mut theirs)))?;
        let theirs: Vec<usize> = theirs.as_chunks().0.iter().map(|one| u64::from_le_bytes(*one) as usize).collect();
        let mut bytes = vec![0; theirs.iter().sum()];
        wire.exchange_bytes(group, Some((behind, &all[..count].concat())), Some((ahead, &mut bytes)))?;
        let mut rest = &bytes[..];
        for length in theirs {
            let (one, after) = rest.split_at(length);
            all.push(one.to_vec());
            rest = after;
        }
    }
    // From rank 0 on.
    all.rotate_right(group.rank);
    Ok(all)
}

/// Returns when every rank has entered: in step k each rank signals to the one 2^k ahead (dissemination).
pub fn barrier(wire: &mut dyn Wire, group: &Members) -> Result<()> {
    let size = group.size();
    let mut distance = 1;
    while distance < size {
        let (ahead, behind) = ((group.rank + distance) % size, (group.rank + size - distance) % size);
        wire.exchange_bytes(group, Some((ahead, &[0])), Some((behind, &mut [0])))?;
        distance *= 2;
    }
    Ok(())
}
