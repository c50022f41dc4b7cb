//! The vendor collectives of MPI. They block, and their order of additions is unspecified.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::ffi;

use super::calls::{check, count};
use crate::transport::{DeviceCollective, GroupRanks};
use hpctrain_base::error::Result;
use hpctrain_device::DeviceSpan;

/// The most elements of one call: MPI's counts have 31 bits.
const LONGEST: usize = 1 << 30;

/// Runs a collective on the communicator of `group`. Operands that are longer than MPI's counts
/// allow use `staging`.
pub fn run(
    comm: ffi::MPI_Comm,
    in_place: *const c_void,
    group: &GroupRanks,
    call: DeviceCollective,
    memory: &mut [f32],
    staging: &mut Vec<f32>,
) -> Result<()> {
    let once = |memory: &mut [f32]| {
        // SAFETY: the slice is exclusive, and the call blocks.
        unsafe { run_once(comm, in_place, group, call, memory.as_mut_ptr(), memory.len()) }
    };
    match call {
        DeviceCollective::AllReduce
        | DeviceCollective::Reduce
        | DeviceCollective::Broadcast { .. } => memory.chunks_mut(LONGEST).try_for_each(once),
        DeviceCollective::AllGather => by_parts(group, memory, staging, LONGEST, false, once),
        DeviceCollective::ReduceScatter => {
            by_parts(group, memory, staging, LONGEST, true, |memory| {
                once(memory)?;
                let part = memory.len() / group.size();
                memory.copy_within(0..part, group.rank * part);
                Ok(())
            })
        }
    }
}

/// Runs a collective on device memory. The sum of a reduce-scatter ends up where part 0 was.
pub fn run_on_device(
    comm: ffi::MPI_Comm,
    in_place: *const c_void,
    group: &GroupRanks,
    call: DeviceCollective,
    memory: DeviceSpan<'_>,
) -> Result<()> {
    let whole = matches!(
        call,
        DeviceCollective::AllReduce | DeviceCollective::Reduce | DeviceCollective::Broadcast { .. }
    );
    let longest = if whole { LONGEST } else { memory.words() };
    for start in (0..memory.words()).step_by(longest.max(1)) {
        let part = memory.part(start..memory.words().min(start + longest));
        let at = std::ptr::with_exposed_provenance_mut(part.address());
        // SAFETY: the span lives for longer than this blocking call, and MPI may be given its
        // address.
        unsafe { run_once(comm, in_place, group, call, at, part.words())? };
    }
    Ok(())
}

/// Makes one MPI call, in place. The sum of a reduce-scatter ends up where part 0 was.
///
/// # Safety
/// MPI can read and write `len` elements at `at`, and nothing else accesses them before this
/// returns.
unsafe fn run_once(
    comm: ffi::MPI_Comm,
    in_place: *const c_void,
    group: &GroupRanks,
    call: DeviceCollective,
    at: *mut f32,
    len: usize,
) -> Result<()> {
    let (float, sum) = (ffi::float(), ffi::sum());
    let to = at.cast();
    let part = len / group.size();
    match call {
        DeviceCollective::AllReduce => {
            // SAFETY: the call blocks, and `len` elements are read and written, as the caller
            // allows.
            check(
                unsafe { ffi::MPI_Allreduce(in_place, to, count(len)?, float, sum, comm) },
                "MPI_Allreduce",
            )
        }
        DeviceCollective::Reduce => {
            let (from, to) =
                if group.rank == 0 { (in_place, to) } else { (to.cast_const(), null_mut()) };
            // SAFETY: the call blocks, and `len` elements are read, on the first rank written, as
            // the caller allows.
            check(
                unsafe { ffi::MPI_Reduce(from, to, count(len)?, float, sum, 0, comm) },
                "MPI_Reduce",
            )
        }
        DeviceCollective::Broadcast { root } => {
            // SAFETY: the call blocks, and `len` elements are read or written, as the caller
            // allows.
            check(
                unsafe { ffi::MPI_Bcast(to, count(len)?, float, count(root)?, comm) },
                "MPI_Bcast",
            )
        }
        DeviceCollective::ReduceScatter => {
            // SAFETY: the call blocks; `size` parts are read, the first is written, as the caller
            // allows.
            let code = unsafe {
                ffi::MPI_Reduce_scatter_block(in_place, to, count(part)?, float, sum, comm)
            };
            check(code, "MPI_Reduce_scatter_block")
        }
        DeviceCollective::AllGather => {
            let part = count(part)?;
            // SAFETY: the call blocks; this rank's part is read, the others are written, as the
            // caller allows.
            check(
                unsafe { ffi::MPI_Allgather(in_place, 0, float, to, part, float, comm) },
                "MPI_Allgather",
            )
        }
    }
}

/// Runs `call` on all of `memory` if its equal parts have at most `longest` elements, and otherwise
/// on copies of `longest` elements of every part at a time. Of the results, this rank's part is
/// copied back if `scattered` is set, and all parts otherwise.
fn by_parts(
    group: &GroupRanks,
    memory: &mut [f32],
    staging: &mut Vec<f32>,
    longest: usize,
    scattered: bool,
    mut call: impl FnMut(&mut [f32]) -> Result<()>,
) -> Result<()> {
    let part = memory.len() / group.size();
    if part <= longest {
        return call(memory);
    }
    for start in (0..part).step_by(longest) {
        let len = longest.min(part - start);
        staging.clear();
        (0..group.size())
            .for_each(|owner| staging.extend_from_slice(&memory[owner * part + start..][..len]));
        call(staging)?;
        for owner in (0..group.size()).filter(|owner| !scattered || *owner == group.rank) {
            memory[owner * part + start..][..len].copy_from_slice(&staging[owner * len..][..len]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_parts_are_done_bit_by_bit() {
        let group = GroupRanks::new(0, 1, vec![0, 1, 2], [0; 3].into());
        for longest in [2, 3, 7, 8] {
            let before: Vec<f32> = (0..21).map(|i| i as f32).collect();
            let mut memory = before.clone();
            let mut staging = Vec::new();
            let mut calls = 0;
            // Stands for a sum: every part that is handed in must hold the same elements of all
            // owners.
            by_parts(&group, &mut memory, &mut staging, longest, true, |x| {
                let part = x.len() / 3;
                (0..part).for_each(|i| {
                    assert_eq!((x[part + i], x[2 * part + i]), (x[i] + 7.0, x[i] + 14.0))
                });
                x.iter_mut().for_each(|x| *x += 100.0);
                calls += 1;
                Ok(())
            })
            .unwrap();
            assert_eq!(calls, 7usize.div_ceil(longest));
            assert!((7..14).all(|i| memory[i] == before[i] + 100.0), "{longest}: {memory:?}");
            assert!(longest >= 7 || memory[..7] == before[..7]);
        }
    }
}
