//! The ranks of a node.

use std::ffi::c_int;

use super::ffi;

use super::calls::{check, count, count_up};
use super::shm_window::Segment;
use hpctrain_base::error::{Error, Result};

/// The most ranks of a machine that count as one node; the machine's other ranks count as other
/// nodes. 1 turns shared memory off. With `,cyclic` after the number, ranks are dealt to the nodes
/// round robin.
const RANKS_PER_NODE: &str = "HPCTRAIN_RANKS_PER_NODE";

/// How the ranks of a machine are divided into nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Division {
    /// The most ranks of a node.
    limit: c_int,
    /// Whether consecutive ranks are on different nodes.
    cyclic: bool,
}

impl Division {
    /// The largest limit that fits into a [code](Division::code).
    const MOST: c_int = c_int::MAX / 2;

    /// Returns a positive number for this division, by which ranks agree on one.
    fn code(self) -> c_int {
        2 * self.limit + c_int::from(self.cyclic)
    }

    /// Returns the division with a code, or `None` if the code is 0.
    fn from_code(code: c_int) -> Option<Self> {
        (code > 0).then_some(Self { limit: code / 2, cyclic: code % 2 == 1 })
    }

    /// Returns the node of rank `number` of a machine with `size` ranks.
    fn node(self, number: usize, size: usize) -> usize {
        let limit = count_up(self.limit);
        if self.cyclic { number % size.div_ceil(limit) } else { number / limit }
    }
}

/// Parses the value of [`RANKS_PER_NODE`].
fn division(value: Option<String>) -> Result<Division> {
    let Some(text) = value else { return Ok(Division { limit: Division::MOST, cyclic: false }) };
    let (number, cyclic) = match text.strip_suffix(",cyclic") {
        Some(number) => (number, true),
        None => (&text[..], false),
    };
    let limit = number.parse().ok().filter(|limit| (1..=Division::MOST).contains(limit));
    limit.map(|limit| Division { limit, cyclic }).ok_or_else(|| {
        Error::input(format!("{RANKS_PER_NODE}={text} is not a number of ranks")).hint(
            "set it to 1 or more, as in 2 or 2,cyclic, or unset it to treat every machine as one node",
        )
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
        ffi::MPI_Allreduce(from, to, 1, ffi::int32_t(), ffi::min(), comm)
    };
    check(code, "MPI_Allreduce").map(|()| all)
}

/// Returns all ranks in the order of their nodes' first ranks, which `of_ranks` has by rank. Ranks of
/// a node keep their order.
fn by_node(of_ranks: &[c_int]) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..of_ranks.len()).collect();
    ranks.sort_by_key(|&rank| of_ranks[rank]);
    ranks
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
    /// Whether the ranks have other numbers than the launcher's.
    pub is_renumbered: bool,
}

impl Node {
    /// Finds the ranks of this rank's node. Collective over the world.
    pub fn find(world: ffi::MPI_Comm, rank: c_int, size: c_int) -> Result<Self> {
        let asked = division(std::env::var(RANKS_PER_NODE).ok());
        let mut first = rank;
        let mut of_ranks = vec![0; count_up(size)];
        // SAFETY: MPI is initialised; out-parameters are live locals, the array has an entry for
        // every rank.
        unsafe {
            let mut comm = ffi::comm_null();
            let kind = ffi::comm_type_shared();
            let code = ffi::MPI_Comm_split_type(world, kind, rank, ffi::info_null(), &mut comm);
            check(code, "MPI_Comm_split_type")?;
            let on_machine = place(comm)?;
            // The ranks of a machine split together or not at all, although their environments may
            // differ.
            let code = asked.as_ref().map_or(0, |division| division.code());
            let Some(division) = Division::from_code(smallest(code, comm)?) else {
                return Err(asked.err().unwrap_or_else(|| {
                    Error::comm(format!(
                        "{RANKS_PER_NODE} of another rank is not a number of ranks"
                    ))
                }));
            };
            if count_up(division.limit) < on_machine.1 {
                let color = count(division.node(on_machine.0, on_machine.1))?;
                check(ffi::MPI_Comm_split(comm, color, rank, &mut comm), "MPI_Comm_split")?;
            }
            let (rank, size) = place(comm)?;
            let int = ffi::int32_t();
            check(ffi::MPI_Bcast((&raw mut first).cast(), 1, int, 0, comm), "MPI_Bcast")?;
            let from = (&raw const first).cast();
            let to = of_ranks.as_mut_ptr().cast();
            check(ffi::MPI_Allgather(from, 1, int, to, 1, int, world), "MPI_Allgather")?;
            Ok(Self { comm, rank, size, on_machine, of_ranks, is_renumbered: false })
        }
    }

    /// Renumbers the ranks of `world` by node, in the order of the nodes' first ranks, unless the
    /// ranks of each node are consecutive already. Rank 0 stays rank 0. Returns the communicator
    /// with these numbers, and that of this rank, which was `rank`. Collective over the world.
    pub fn renumber(
        &mut self,
        world: ffi::MPI_Comm,
        rank: usize,
    ) -> Result<(ffi::MPI_Comm, usize)> {
        let order = by_node(&self.of_ranks);
        if order.is_sorted() {
            return Ok((world, rank));
        }
        let mut numbers = vec![0; order.len()];
        for (number, &rank) in order.iter().enumerate() {
            numbers[rank] = count(number)?;
        }
        self.of_ranks = order.iter().map(|&rank| numbers[count_up(self.of_ranks[rank])]).collect();
        self.is_renumbered = true;
        // SAFETY: the out-parameter is a live local.
        let (code, renumbered) = unsafe {
            let mut renumbered = ffi::comm_null();
            (ffi::MPI_Comm_split(world, 0, numbers[rank], &mut renumbered), renumbered)
        };
        check(code, "MPI_Comm_split")?;
        Ok((renumbered, count_up(numbers[rank])))
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
        let read = |text: &str| division(Some(text.into()));
        assert_eq!(division(None), Ok(Division { limit: Division::MOST, cyclic: false }));
        assert_eq!(read("2"), Ok(Division { limit: 2, cyclic: false }));
        assert_eq!(read("2,cyclic"), Ok(Division { limit: 2, cyclic: true }));
        for text in ["0", "-1", "", "cyclic", "2,block", "0,cyclic", "2147483647"] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{RANKS_PER_NODE}={text} is not a number")), "{error}");
        }
    }

    #[test]
    fn machines_are_divided_in_blocks_or_round_robin() {
        let nodes = |limit, cyclic, size| {
            let division = Division { limit, cyclic };
            assert_eq!(Division::from_code(division.code()), Some(division));
            (0..size).map(|number| division.node(number, size)).collect::<Vec<_>>()
        };
        assert_eq!(nodes(2, false, 5), [0, 0, 1, 1, 2]);
        assert_eq!(nodes(2, true, 4), [0, 1, 0, 1]);
        assert_eq!(nodes(2, true, 5), [0, 1, 2, 0, 1]);
        assert_eq!(nodes(Division::MOST, true, 3), [0; 3]);
        assert_eq!(Division::from_code(0), None);
    }

    #[test]
    fn ranks_are_ordered_by_the_first_ranks_of_their_nodes() {
        assert_eq!(by_node(&[0, 1, 0, 1]), [0, 2, 1, 3]);
        assert_eq!(by_node(&[0, 0, 2, 2]), [0, 1, 2, 3]);
        assert_eq!(by_node(&[0, 1, 1, 0, 4]), [0, 3, 1, 2, 4]);
    }
}
