//! Runs one layout for some steps and records loss, norm and a digest of every tensor in each.
//!
//! After each step every rank hashes the index and the bits of each element that it owns, and adds
//! the hashes. The sum over ranks is a digest of each tensor that does not depend on the
//! distribution of its elements, and needs no memory.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::snapshot::{Snapshot, TensorDifference};
use super::tensor_entry::TensorRecord;
use crate::backend::Kernels;
use crate::checkpoint::Progress;
use crate::comm::{self, Comm, Group};
use crate::config::{Config, ResolvedConfig};
use crate::engine::memory::{BaselineMemory, check as check_memory};
use crate::engine::micro_batches::{self, MicroBatches};
use crate::engine::{engine, plan, train_round};
use crate::error::{Error, Result};
use crate::parallel::{ControlFlags, Sharded};
use crate::topology::Topology;

/// The task of the ranks of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LayoutTask {
    /// The unresolved configuration.
    pub config: Config,
    /// The number of steps, at most those of the run.
    pub steps: u64,
    /// Handling of the tensors after the last step.
    pub then: AfterRun,
}

/// Handling of the tensors at the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AfterRun {
    /// Nothing.
    Forget,
    /// Write their elements to a file. Only on one rank.
    Write(PathBuf),
    /// Compare the elements of each rank with those in a file.
    Compare(PathBuf),
}

/// The results of one step. Floats are stored as bits, so that equality is bitwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The mean loss.
    pub loss: u64,
    /// The norm of the gradient.
    pub norm: u64,
    /// The learning rate; zero if the update was skipped.
    pub lr: u64,
    /// The digest of every entry after the update; empty for a step between two syncs of local SGD.
    pub digests: Vec<u64>,
}

/// The results of a layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// The tensors, in the order of [`Marks::digests`].
    pub entries: Vec<TensorRecord>,
    /// The results of every step.
    pub steps: Vec<StepRecord>,
    /// The difference of every entry from the file, if compared with one.
    pub differences: Vec<TensorDifference>,
}

/// Runs a task on this rank. Collective over the world of `comm`. `threads` are its compute
/// threads, if the caller knows better than the affinity mask; `backend` creates the device. Every
/// rank returns the whole recording.
///
/// # Errors
/// Returns the error that stopped the run.
pub fn record<B: Kernels>(
    comm: &Comm<B>,
    task: &LayoutTask,
    threads: Option<usize>,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
) -> Result<Recording> {
    let world = comm.world();
    let topology = Topology::gather(&world, comm.node().host)?;
    let (train, _) = micro_batches::open_staged(&task.config, &world, &topology)?;
    let threads = threads.unwrap_or_else(|| topology.threads());
    let mut plan = plan(comm, task.config.clone(), &train, Some(threads))?;
    // The learning-rate schedule stays that of the whole run.
    plan.config.run.steps = task.steps;
    let comm = &comm.select_transport(plan.config.comm.transport, comm::probe_cuda_aware)?;
    let world = comm.world();
    world.all_ok(check_memory::<B>(
        &plan,
        &topology,
        BaselineMemory::now(comm, &[&train]),
        None,
    ))?;
    let (mut engine, _) = engine(comm, &plan, backend(&plan)?, None)?;
    let mut progress = Progress::default();
    let mut feed = world.all_ok(MicroBatches::start(&engine.model, train, &plan, progress))?;

    let entries = entries(&engine.model.sharded);
    let mut steps = Vec::with_capacity(task.steps as usize);
    while progress.step < task.steps {
        let round = train_round(
            &plan,
            &mut engine,
            || feed.next_micro(),
            &mut progress,
            ControlFlags::empty,
        )?;
        let mut digests = vec![0u64; entries.len()];
        visit(&mut engine.model.sharded, |entry, start, values| {
            digests[entry] = digests[entry].wrapping_add(digest(start, values));
            Ok(())
        })?;
        // Between syncs of local SGD each replica has its own tensors.
        let last = round.steps.len() - 1;
        for (index, taken) in round.steps.iter().enumerate() {
            let lr = if taken.skipped() { 0.0 } else { taken.lr };
            let digests = if index == last { std::mem::take(&mut digests) } else { vec![] };
            steps.push(StepRecord {
                loss: taken.loss.to_bits(),
                norm: taken.norm.to_bits(),
                lr: lr.to_bits(),
                digests,
            });
        }
    }

    let mut differences = Vec::new();
    match &task.then {
        AfterRun::Forget => {}
        AfterRun::Write(file) => {
            let mut snapshot = Snapshot::create(file, &entries)?;
            visit(&mut engine.model.sharded, |entry, start, values| {
                snapshot.write(entry, start, values)
            })?;
        }
        AfterRun::Compare(file) => {
            let mine = world.all_ok(Snapshot::open(file, &entries).and_then(|mut snapshot| {
                let mut mine = vec![TensorDifference::default(); entries.len()];
                visit(&mut engine.model.sharded, |entry, start, values| {
                    snapshot.compare(entry, start, values, &mut mine[entry])
                })?;
                Ok(mine)
            }))?;
            differences = merge_ranks(&world, mine, |all, one| {
                all.iter_mut().zip(one).for_each(|(all, one)| all.merge(one))
            })?;
        }
    }
    let steps = merge_ranks(&world, steps, |all, one| {
        for (all, one) in all.iter_mut().zip(one) {
            all.digests
                .iter_mut()
                .zip(one.digests)
                .for_each(|(all, one)| *all = all.wrapping_add(one));
        }
    })?;
    Ok(Recording { entries, steps, differences })
}

/// Returns every tensor of every unit: its parameters, then each state buffer.
fn entries<B: Kernels>(sharded: &Sharded<B>) -> Vec<TensorRecord> {
    let states: Vec<&str> = std::iter::once("").chain(sharded.state_names()).collect();
    let mut entries = Vec::new();
    for unit in sharded.layouts() {
        for tensor in &unit.tensors {
            entries.extend(states.iter().map(|state| TensorRecord {
                unit: unit.name.to_string(),
                tensor: tensor.name.clone(),
                state: state.to_string(),
                len: tensor.len(),
            }));
        }
    }
    entries
}

/// Calls `show` with every run of elements that only this rank owns: the number of the entry, the
/// index of the first element in it, and the elements.
fn visit<B: Kernels>(
    sharded: &mut Sharded<B>,
    mut show: impl FnMut(usize, usize, &[f32]) -> Result<()>,
) -> Result<()> {
    let parts = 1 + sharded.state_names().len();
    let mut host = Vec::new();
    // Entries of earlier pipeline stages come first.
    let before = &sharded.layouts()[..sharded.first_unit()];
    let mut first = parts * before.iter().map(|unit| unit.tensors.len()).sum::<usize>();
    for unit in sharded.owned()? {
        host.resize(unit.range.len(), 0.0);
        for (part, values) in std::iter::once(unit.params).chain(unit.state).enumerate() {
            values.read(&mut host)?;
            for piece in unit.layout.pieces(unit.range.clone()) {
                let entry = first + piece.index * parts + part;
                piece.runs().try_for_each(|(start, run)| show(entry, start, &host[run]))?;
            }
        }
        first += unit.layout.tensors.len() * parts;
    }
    Ok(())
}

/// Returns the sum over elements of a hash of index and bits, which is independent of their
/// distribution over ranks. Two tensors that differ in exactly one element always have different
/// digests; other tensors collide with a probability of 2⁻⁶⁴.
fn digest(start: usize, values: &[f32]) -> u64 {
    let hashes = values
        .iter()
        .zip(start as u64..)
        .map(|(value, index)| mix(index << 32 ^ u64::from(value.to_bits())));
    hashes.fold(0, u64::wrapping_add)
}

/// The output function of SplitMix64: a bijection in which each bit of the result depends on every
/// bit of `value`.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Gathers the values of all ranks, and merges them in the order of ranks.
fn merge_ranks<B: Kernels, T: Serialize + for<'a> Deserialize<'a>>(
    world: &Group<B>,
    mine: T,
    join: impl Fn(&mut T, T),
) -> Result<T> {
    let message =
        serde_json::to_vec(&mine).map_err(|e| Error::internal(format!("recording: {e}")))?;
    let mut joined: Option<T> = None;
    for message in world.gather_bytes(message).wait()? {
        let one = serde_json::from_slice(&message)
            .map_err(|e| Error::comm(format!("a rank's recording: {e}")))?;
        match &mut joined {
            Some(all) => join(all, one),
            None => joined = Some(one),
        }
    }
    joined.ok_or_else(|| Error::internal("no rank 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_add_up_and_see_one_bit() {
        let values: Vec<f32> = (0..100).map(|i| (i as f32).sin()).collect();
        let whole = digest(0, &values);
        assert_eq!(digest(0, &values[..37]).wrapping_add(digest(37, &values[37..])), whole);
        let mut other = values.clone();
        other[50] = f32::from_bits(other[50].to_bits() ^ 1);
        assert_ne!(digest(0, &other), whole);
        other[50] = values[51];
        other[51] = values[50];
        assert_ne!(digest(0, &other), whole, "two elements are swapped");
    }
}
