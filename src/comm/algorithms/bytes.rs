//! Collectives of small messages: metadata, errors, synchronisation.

use crate::comm::wire::{Members, Wire};
use crate::error::Result;

/// Every rank's bytes, in rank order, on every rank: around the ring, the length before the bytes.
pub fn gather(wire: &mut dyn Wire, group: &Members, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let size = group.size();
    let mut all = vec![Vec::new(); size];
    all[group.rank] = mine;
    for step in 1..size {
        let send = (group.rank + 1 + size - step) % size;
        let receive = (group.rank + size - step) % size;
        let mut length = [0; 8];
        wire.exchange_bytes(
            group,
            Some((group.next(), &(all[send].len() as u64).to_le_bytes())),
            Some((group.previous(), &mut length)),
        )?;
        let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
        wire.exchange_bytes(group, Some((group.next(), &all[send])), Some((group.previous(), &mut bytes)))?;
        all[receive] = bytes;
    }
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
