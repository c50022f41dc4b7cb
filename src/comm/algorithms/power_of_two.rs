//! Recursive halving and doubling on a power of two of ranks, nearest partner first (Thakur,
//! Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).

use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// The ranks whose numbers have the lowest `bits` bits of `like`.
fn alike(size: usize, like: usize, bits: u32) -> impl Iterator<Item = usize> {
    let stride = 1 << bits;
    (like % stride..size).step_by(stride)
}

/// log₂ n steps. In step k partners are 2^k apart and hold partial sums of 2^k ranks each, of the
/// shares of ranks whose numbers equal theirs in the k lowest bits. Each keeps the half that equals
/// its own number in bit k, too.
pub fn halve(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    for k in 0..size.trailing_zeros() {
        let partner = group.rank ^ (1 << k);
        let theirs = shares.of_all(alike(size, partner, k + 1));
        let mine = shares.of_all(alike(size, group.rank, k + 1));
        x.exchange(wire, group, Combine::Add, Some((partner, &theirs)), Some((partner, &mine)))?;
    }
    Ok(())
}

/// Every rank's share: the halving backwards.
pub fn double(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    for k in (0..size.trailing_zeros()).rev() {
        let partner = group.rank ^ (1 << k);
        let mine = shares.of_all(alike(size, group.rank, k + 1));
        let theirs = shares.of_all(alike(size, partner, k + 1));
        x.exchange(
            wire,
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
        assert_eq!(alike(8, 5, 1).collect::<Vec<_>>(), [1, 3, 5, 7]);
        assert_eq!(alike(8, 5, 2).collect::<Vec<_>>(), [1, 5]);
    }
}
