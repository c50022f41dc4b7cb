//! The ranks of a node.

use std::ffi::c_int;

use mpi::ffi;

use super::calls::{check, count, count_up};
use super::shm_window::Segment;
use hpctrain_base::error::{Error, Result};

/// The most ranks of a machine that count as one node; the machine's other ranks count as other
/// nodes. 1 turns shared memory off.
const RANKS_PER_NODE: &str = "HPCTRAIN_RANKS_PER_NODE";

/// Parses the value of [`RANKS_PER_NODE`].
fn ranks_per_node(value: Option<String>) -> Result<usize> {
    let Some(text) = value else { return Ok(usize::MAX) };
    text.parse().ok().filter(|&ranks| ranks > 0).ok_or_else(|| {
        Error::input(format!("{RANKS_PER_NODE}={text} is not a number of ranks"))
            .hint("set it to 1 or more, or unset it to treat every machine as one node")
    })
}

/// Returns this rank's number in a communicator, and the communicator's size.
pub fn place(comm: ffi::MPI_Comm) -> Result<(usize, usize)> {
    let mut rank = 0;
    let mut size = 0;
    // SAFETY: out-parameters are live locals.
    check(unsafe { ffi::MPI_Comm_rank(comm, &mut rank) }, "MPI_Comm_rank")?;
    // SAFETY: as above.
    check(unsafe { ffi::MPI_Comm_size(comm, &mut size) }, "MPI_Comm_size")?;
    Ok((count_up(rank), count_up(size)))
}

/// Returns the smallest of the numbers of all ranks. Collective.
fn smallest(mine: c_int, comm: ffi::MPI_Comm) -> Result<c_int> {
    let mut all = 0;
    // SAFETY: in- and out-parameter are live locals.
    let code = unsafe {
        let from = (&raw const mine).cast();
        let to = (&raw mut all).cast();
        ffi::MPI_Allreduce(from, to, 1, ffi::RSMPI_INT32_T, ffi::RSMPI_MIN, comm)
    };
    check(code, "MPI_Allreduce").map(|()| all)
}

/// The ranks of a node, or of the part of one that [`RANKS_PER_NODE`] makes a separate node.
pub struct Node {
    pub comm: ffi::MPI_Comm,
    pub rank: usize,
    pub size: usize,
    /// This rank's number on the machine, and the machine's number of ranks.
    pub on_machine: (usize, usize),
    /// The first rank of every rank's node, by rank of the world.
    pub of_ranks: Vec<c_int>,
}

impl Node {
    /// Finds the ranks of this rank's node. Collective over the world.
    pub fn find(world: ffi::MPI_Comm, rank: c_int, size: c_int) -> Result<Self> {
        let asked = ranks_per_node(std::env::var(RANKS_PER_NODE).ok());
        let mut first = rank;
        let mut of_ranks = vec![0; count_up(size)];
        // SAFETY: MPI is initialised; out-parameters are live locals, the array has an entry for
        // every rank.
        unsafe {
            let mut comm = ffi::RSMPI_COMM_NULL;
            let kind = ffi::RSMPI_COMM_TYPE_SHARED;
            let code = ffi::MPI_Comm_split_type(world, kind, rank, ffi::RSMPI_INFO_NULL, &mut comm);
            check(code, "MPI_Comm_split_type")?;
            let on_machine = place(comm)?;
            // The ranks of a machine split together or not at all, although their environments may
            // differ.
            let limit =
                asked.as_ref().map_or(0, |&limit| c_int::try_from(limit).unwrap_or(c_int::MAX));
            let limit = match count_up(smallest(limit, comm)?) {
                0 => {
                    return Err(asked.err().unwrap_or_else(|| {
                        Error::comm(format!(
                            "{RANKS_PER_NODE} of another rank is not a number of ranks"
                        ))
                    }));
                }
                limit => limit,
            };
            if limit < on_machine.1 {
                let color = count(on_machine.0 / limit)?;
                check(ffi::MPI_Comm_split(comm, color, rank, &mut comm), "MPI_Comm_split")?;
            }
            let (rank, size) = place(comm)?;
            let int = ffi::RSMPI_INT32_T;
            check(ffi::MPI_Bcast((&raw mut first).cast(), 1, int, 0, comm), "MPI_Bcast")?;
            let from = (&raw const first).cast();
            let to = of_ranks.as_mut_ptr().cast();
            check(ffi::MPI_Allgather(from, 1, int, to, 1, int, world), "MPI_Allgather")?;
            Ok(Self { comm, rank, size, on_machine, of_ranks })
        }
    }

    /// Opens the memory that the node's ranks share. Returns `None` if the node has one rank, or if
    /// a rank could not map it. Collective over the node.
    pub fn share(&self, rank: usize) -> Result<Option<Segment>> {
        if self.size == 1 {
            return Ok(None);
        }
        let mut next = 0..;
        let locals = self
            .of_ranks
            .iter()
            .map(|first| (*first == self.of_ranks[rank]).then(|| next.next()).flatten());
        let segment = Segment::open(self.comm, self.rank, locals.collect())?;
        // This is also the synchronisation that a segment requires before its first use.
        let all = smallest(c_int::from(segment.is_ok()), self.comm)?;
        match segment {
            Ok(segment) if all == 1 => return Ok(Some(segment)),
            Ok(_) => {}
            Err(error) => {
                log::warn!(
                    "the ranks of this node exchange by MPI messages, which is slower than shared memory: {error}"
                )
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_ranks_are_read() {
        assert_eq!(
            (ranks_per_node(None), ranks_per_node(Some("2".into()))),
            (Ok(usize::MAX), Ok(2))
        );
        assert!(ranks_per_node(Some("0".into())).is_err());
    }
}
