//! Collectives on small byte messages, for metadata, errors and synchronisation.

use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::{Error, Result};

/// The most bytes that one rank may contribute, far more than traces have. A longer length was not
/// sent by this program.
const LONGEST: u64 = 1 << 30;

/// Returns every rank's bytes, in rank order, on every rank. Takes 2⌈log₂ n⌉ rounds: before step k
/// each rank has the bytes of the 2^k ranks from itself on, and it receives those of the next
/// ranks, their lengths first (Bruck et al., "Efficient algorithms for all-to-all communications in
/// multiport message-passing systems", 1997).
pub fn gather(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    mine: Vec<u8>,
) -> Result<Vec<Vec<u8>>> {
    let size = group.size();
    // From this rank on around the ring.
    let mut all = Vec::with_capacity(size);
    all.push(mine);
    while all.len() < size {
        let distance = all.len();
        let count = distance.min(size - distance);
        let behind = (group.rank + size - distance) % size;
        let ahead = (group.rank + distance) % size;
        let mut theirs = vec![0; count * size_of::<u64>()];
        transport.exchange_bytes(
            group,
            Some((behind, &lengths(&all[..count]))),
            Some((ahead, &mut theirs)),
        )?;
        let theirs = decode_lengths(group, ahead, &theirs)?;
        let mut bytes = vec![0; theirs.iter().sum()];
        transport.exchange_bytes(
            group,
            Some((behind, &all[..count].concat())),
            Some((ahead, &mut bytes)),
        )?;
        all.extend(split_by_lengths(&bytes, &theirs));
    }
    // From rank 0 on.
    all.rotate_right(group.rank);
    Ok(all)
}

/// Returns every rank's bytes, in rank order, on rank 0, and an empty vector on the other ranks.
/// Takes 2⌈log₂ n⌉ rounds of a binomial tree: in step k each rank that is a multiple of 2^(k+1)
/// receives the bytes of the 2^k ranks that begin at distance 2^k.
pub fn gather_to_root(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    mine: Vec<u8>,
) -> Result<Vec<Vec<u8>>> {
    let size = group.size();
    let mut all = vec![mine];
    let mut distance = 1;
    while distance < size {
        if !group.rank.is_multiple_of(2 * distance) {
            send(transport, group, group.rank - distance, &all)?;
            return Ok(Vec::new());
        }
        let from = group.rank + distance;
        if from < size {
            all.extend(receive(transport, group, from, distance.min(size - from))?);
        }
        distance *= 2;
    }
    Ok(all)
}

/// Returns the bytes of rank 0 on every rank, in 2⌈log₂ n⌉ rounds of a binomial tree: the reverse
/// of [`gather_to_root`].
pub fn broadcast(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    bytes: Vec<u8>,
) -> Result<Vec<u8>> {
    let span = span(group);
    let bytes = match group.rank {
        0 => bytes,
        rank => receive(transport, group, rank - span, 1)?.concat(),
    };
    for distance in halves(span) {
        if group.rank + distance < group.size() {
            send(transport, group, group.rank + distance, std::slice::from_ref(&bytes))?;
        }
    }
    Ok(bytes)
}

/// Returns on each rank the bytes that rank 0 has for it; `all` is in rank order. Takes 2⌈log₂ n⌉
/// rounds of a binomial tree: in each step a rank passes on the bytes of the second half of the
/// ranks that it has bytes for.
pub fn scatter(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    all: Vec<Vec<u8>>,
) -> Result<Vec<u8>> {
    let size = group.size();
    let span = span(group);
    let mut all = match group.rank {
        0 if all.len() == size => all,
        0 => {
            return Err(Error::internal(format!(
                "scatter has bytes for {} ranks of {size}",
                all.len()
            )));
        }
        rank => receive(transport, group, rank - span, span.min(size - rank))?,
    };
    for distance in halves(span) {
        if distance < all.len() {
            send(transport, group, group.rank + distance, &all.split_off(distance))?;
        }
    }
    Ok(all.concat())
}

/// Returns the bytes that each rank has for this one, in rank order; `all` has those of this rank
/// for each, itself included. Takes 2·(n−1) rounds: in step k each rank sends to the rank k ahead
/// of it, the length first.
pub fn all_to_all(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    mut all: Vec<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    let size = group.size();
    if all.len() != size {
        return Err(Error::internal(format!("bytes for {} ranks of {size}", all.len())));
    }
    let mut received = vec![Vec::new(); size];
    received[group.rank] = std::mem::take(&mut all[group.rank]);
    for distance in 1..size {
        let ahead = (group.rank + distance) % size;
        let behind = (group.rank + size - distance) % size;
        let mut length = [0; size_of::<u64>()];
        transport.exchange_bytes(
            group,
            Some((ahead, &(all[ahead].len() as u64).to_le_bytes())),
            Some((behind, &mut length)),
        )?;
        let length = check_announced(group.ranks[behind], u64::from_le_bytes(length))?;
        received[behind] = vec![0; length];
        transport.exchange_bytes(
            group,
            Some((ahead, &all[ahead])),
            Some((behind, &mut received[behind])),
        )?;
    }
    Ok(received)
}

/// Returns the number of ranks, itself included, in this rank's subtree of a binomial tree over the
/// next power of two of ranks.
fn span(group: &GroupRanks) -> usize {
    match group.rank {
        0 => group.size().next_power_of_two(),
        rank => 1 << rank.trailing_zeros(),
    }
}

/// Iterates over half of a power of two, half of that, and so on down to 1.
fn halves(span: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(span / 2), |half| Some(half / 2)).take_while(|half| *half > 0)
}

/// Sends the bytes of several ranks, their lengths first.
fn send(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    to: usize,
    all: &[Vec<u8>],
) -> Result<()> {
    transport.exchange_bytes(group, Some((to, &lengths(all))), None)?;
    transport.exchange_bytes(group, Some((to, &all.concat())), None)
}

/// Receives the bytes of `count` ranks.
fn receive(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    from: usize,
    count: usize,
) -> Result<Vec<Vec<u8>>> {
    let mut theirs = vec![0; count * size_of::<u64>()];
    transport.exchange_bytes(group, None, Some((from, &mut theirs)))?;
    let theirs = decode_lengths(group, from, &theirs)?;
    let mut bytes = vec![0; theirs.iter().sum()];
    transport.exchange_bytes(group, None, Some((from, &mut bytes)))?;
    Ok(split_by_lengths(&bytes, &theirs))
}

/// Encodes the lengths of several ranks' bytes as a message.
fn lengths(all: &[Vec<u8>]) -> Vec<u8> {
    all.iter().flat_map(|one| (one.len() as u64).to_le_bytes()).collect()
}

/// Decodes a message of lengths, of the ranks from `first` on around the ring, and checks them.
fn decode_lengths(group: &GroupRanks, first: usize, message: &[u8]) -> Result<Vec<usize>> {
    let lengths = message.as_chunks().0.iter().map(|one| u64::from_le_bytes(*one)).enumerate();
    let checked = lengths.map(|(behind, length)| {
        check_announced(group.ranks[(first + behind) % group.size()], length)
    });
    checked.collect()
}

/// Returns the length of the bytes that a rank announces, or an error if it is beyond the limit.
fn check_announced(from: usize, length: u64) -> Result<usize> {
    if length > LONGEST {
        let message = format!("rank {from} announces {length} bytes; the limit is {LONGEST}");
        return Err(Error::comm(message));
    }
    Ok(length as usize)
}

/// Splits the concatenated bytes of several ranks by their lengths.
fn split_by_lengths(bytes: &[u8], lengths: &[usize]) -> Vec<Vec<u8>> {
    let mut rest = bytes;
    let parts = lengths.iter().map(|length| {
        let (one, after) = rest.split_at(*length);
        rest = after;
        one.to_vec()
    });
    parts.collect()
}

/// Blocks until every rank has entered: in step k each rank signals the rank 2^k ahead
/// (dissemination).
pub fn barrier(transport: &mut dyn Transport, group: &GroupRanks) -> Result<()> {
    let size = group.size();
    let mut distance = 1;
    while distance < size {
        let ahead = (group.rank + distance) % size;
        let behind = (group.rank + size - distance) % size;
        transport.exchange_bytes(group, Some((ahead, &[0])), Some((behind, &mut [0])))?;
        distance *= 2;
    }
    Ok(())
}
