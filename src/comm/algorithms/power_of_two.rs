//! Recursive halving and doubling on a power of two of ranks, starting with the nearest partner
//! (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
//! 2005).

use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Iterates over the ranks whose lowest `bits` bits equal those of `like`.
fn same_low_bits(size: usize, like: usize, bits: u32) -> impl Iterator<Item = usize> {
    let stride = 1 << bits;
    (like % stride..size).step_by(stride)
}

/// Reduce-scatters in log₂ n steps. In step k partners have a distance of 2^k, and each holds
/// partial sums over 2^k ranks of the shares whose owners equal it in the lowest k bits. Each keeps
/// the half whose owners also equal it in bit k.
pub fn halve(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    for k in 0..size.trailing_zeros() {
        let partner = group.rank ^ (1 << k);
        let theirs = shares.ranges_of(same_low_bits(size, partner, k + 1));
        let mine = shares.ranges_of(same_low_bits(size, group.rank, k + 1));
        x.exchange(
            transport,
            group,
            Combine::Add,
            Some((partner, &theirs)),
            Some((partner, &mine)),
        )?;
    }
    Ok(())
}

/// Brings every rank's share to every rank: the reverse of [`halve`].
pub fn double(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    for k in (0..size.trailing_zeros()).rev() {
        let partner = group.rank ^ (1 << k);
        let mine = shares.ranges_of(same_low_bits(size, group.rank, k + 1));
        let theirs = shares.ranges_of(same_low_bits(size, partner, k + 1));
        x.exchange(
            transport,
            group,
            Combine::Replace,
            Some((partner, &mine)),
            Some((partner, &theirs)),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_chosen_by_the_lowest_bits() {
        assert_eq!(same_low_bits(8, 5, 1).collect::<Vec<_>>(), [1, 3, 5, 7]);
        assert_eq!(same_low_bits(8, 5, 2).collect::<Vec<_>>(), [1, 5]);
    }
}
