//! One FSDP unit in memory: its full buffers, its shard, and the gradients of its virtual ranks.

use std::collections::VecDeque;
use std::ops::Range;

use super::Lifetime;
use super::cpu_offload::HostUpdater;
use super::optimizer_shard::{OptimizerShard, Updates};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{Init, UnitLayout};
use hpctrain_base::random;
use hpctrain_base::tree_sum::Tree;
use hpctrain_comm::{Group, Pending};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::optim::GroupRun;

/// A full buffer: in memory, in flight, or freed.
pub enum BufferState<T> {
    InMemory(T),
    InFlight(Pending<T>),
    Freed,
}

impl<T: Send + 'static> BufferState<T> {
    /// Waits until the buffer is in memory and returns it, or none if it was freed.
    pub fn wait(&mut self) -> Result<Option<&mut T>> {
        *self = match std::mem::replace(self, BufferState::Freed) {
            BufferState::InFlight(pending) => BufferState::InMemory(pending.wait()?),
            settled => settled,
        };
        Ok(match self {
            BufferState::InMemory(buf) => Some(buf),
            _ => None,
        })
    }

    /// Returns the buffer, if it is in memory.
    pub fn get(&self) -> Option<&T> {
        match self {
            BufferState::InMemory(buf) => Some(buf),
            _ => None,
        }
    }
}

/// The sum of a unit's gradients: over the rank's virtual ranks, then over all ranks.
pub enum Reduction<B: Kernels> {
    /// A full gradient whose reduction has not started: of the last virtual rank, or the sum over
    /// the virtual ranks of this rank.
    Ready(B::Buf),
    /// The reduction over the shard axis, then the replica axis, is in flight, or the one of a
    /// virtual rank over the shard axis alone.
    InFlight {
        sum: Pending<B::Buf>,
        /// The buffer that receives the owned part in f32, if `sum` is in bf16 and full gradients
        /// stay in memory.
        full: Option<B::Buf>,
    },
    /// The reduction has finished.
    Done(ReducedGradient<B>),
}

/// A reduced gradient.
pub struct ReducedGradient<B: Kernels> {
    pub grad: B::Buf,
    /// The range of the owned part in the buffer.
    pub window: Range<usize>,
    /// The squared norms of this rank's virtual shards.
    pub squares: Vec<B::Scalar>,
}

/// A unit's shard and parameters of a replica that is not being trained at the moment.
pub struct InactiveReplica<B: Kernels> {
    pub shard: OptimizerShard<B>,
    pub params: BufferState<B::Buf>,
}

impl<B: Kernels> InactiveReplica<B> {
    /// Creates a replica with the initial parameters `full`, of which this rank updates `owned`.
    pub fn new(
        backend: &B,
        (host, updates): (Option<&HostUpdater>, Option<&Updates>),
        layout: &UnitLayout,
        owned: Range<usize>,
        full: &[f32],
        lifetime: Lifetime,
    ) -> Result<Self> {
        let params = match lifetime {
            Lifetime::Step => BufferState::InMemory(backend.upload(MemoryKind::Parameters, full)?),
            Lifetime::Use => BufferState::Freed,
        };
        let values = &full[owned.clone()];
        let are_full_here = lifetime == Lifetime::Step;
        let shard =
            OptimizerShard::new(backend, host, updates, layout, owned, values, are_full_here)?;
        Ok(Self { shard, params })
    }
}

/// A unit of a rank's pipeline stage.
pub struct Unit<B: Kernels> {
    pub layout: UnitLayout,
    /// The update settings of each tensor.
    pub tensors: Vec<GroupRun>,
    /// The shard of this rank.
    pub owner: OptimizerShard<B>,
    /// The full parameters.
    pub params: BufferState<B::Buf>,
    /// The shards and full parameters of the other replicas that this rank trains in turn.
    pub inactive: VecDeque<InactiveReplica<B>>,
    /// The full gradient of the current virtual rank.
    pub grads: Option<B::Buf>,
    /// Whether `grads` has a sum of this virtual rank; if not, `zeroed` must be zeroed before use.
    pub grads_open: bool,
    /// The ranges that no backward overwrites.
    pub zeroed: Vec<Range<usize>>,
    /// The gradient of tied parameters that the block uses, for the current virtual rank.
    pub tied_grads: Option<B::Buf>,
    /// The gradients of the unit's first elements from blocks that are tied to it, for the current
    /// virtual rank.
    pub grads_from_tied: Vec<B::Buf>,
    /// The partial sums of finished virtual ranks: full ones, or owned parts if gradients are
    /// reduced after each micro-batch.
    pub virtual_ranks: Tree<B::Buf>,
    /// The virtual ranks in these partial sums.
    pub summed: usize,
    /// The sums of finished blocks of virtual ranks.
    pub blocks: Vec<B::Buf>,
    pub reduction: Option<Reduction<B>>,
}

impl<B: Kernels> Unit<B> {
    /// Prepares the gradient buffer for a backward; returns whether it is the first of the virtual
    /// rank.
    pub fn open_grads(&mut self, backend: &B) -> Result<bool> {
        if self.grads.is_none() {
            self.grads = Some(backend.alloc(MemoryKind::Gradients, self.layout.padded)?);
        }
        let first = !std::mem::replace(&mut self.grads_open, true);
        if let (true, Some(grads)) = (first, &mut self.grads) {
            self.zeroed
                .iter()
                .try_for_each(|range| backend.zero(B::view_mut(grads, range.clone())))?;
        }
        Ok(first)
    }

    /// Prepares the gradient buffer of `len` tied elements for a backward; returns whether it is
    /// the first of the virtual rank.
    pub fn open_borrowed(&mut self, backend: &B, len: usize) -> Result<bool> {
        let first = self.tied_grads.is_none();
        if first {
            self.tied_grads = Some(backend.alloc(MemoryKind::Gradients, len)?);
        }
        Ok(first)
    }

    /// Sums the gradients of replicated tensors over the virtual tensor-parallel ranks, here and on
    /// the other ranks of `tensor`, and writes the sum to all copies.
    pub fn add_copies(&mut self, backend: &B, tensor: &Group<B>) -> Result<()> {
        let copies: Vec<Range<usize>> =
            self.layout.copies().filter(|copy| !copy.is_empty()).collect();
        let Some(len) = copies.first().map(Range::len) else { return Ok(()) };
        let grads = self
            .grads
            .as_mut()
            .ok_or_else(|| Error::internal("a virtual rank ended before it started"))?;
        let add = |into: &mut B::Buf, from: B::Buf| backend.add(B::all(&from), B::all_mut(into));
        let mut tree = Tree::default();
        for copy in &copies {
            let mut part = backend.alloc(MemoryKind::Gradients, len)?;
            backend.copy(B::view(grads, copy.clone()), B::all_mut(&mut part))?;
            tree.push(part, add)?;
        }
        let sum = tree.finish(add)?.ok_or_else(|| Error::internal("the unit has no sections"))?;
        let sum = tensor.with_label(&self.layout.name).all_reduce(sum, 0..len).wait()?;
        copies.into_iter().try_for_each(|copy| backend.copy(B::all(&sum), B::view_mut(grads, copy)))
    }

    /// Takes the final gradient of a virtual rank, including those of tied blocks.
    fn take_grads(&mut self, backend: &B) -> Result<B::Buf> {
        let mut virtual_rank = self
            .grads
            .take()
            .ok_or_else(|| Error::internal("a virtual rank ended before it started"))?;
        self.grads_open = false;
        for part in self.grads_from_tied.drain(..) {
            // Every section has the same number of elements, of which the last ones may use fewer.
            let of_section = B::len(&part) / self.layout.shards().held.len();
            for (k, range) in self.layout.first_tensor().enumerate() {
                let from = k * of_section..k * of_section + range.len();
                backend.add(B::view(&part, from), B::view_mut(&mut virtual_rank, range))?;
            }
        }
        Ok(virtual_rank)
    }

    /// Makes the final gradient of a virtual rank ready to be reduced.
    pub fn micro_batch_done(&mut self, backend: &B) -> Result<()> {
        let gradient = self.take_grads(backend)?;
        if self.reduction.replace(Reduction::Ready(gradient)).is_some() {
            return Err(Error::internal("a gradient replaces one that is being reduced"));
        }
        Ok(())
    }

    /// Adds the final gradient of a virtual rank to the tree of virtual ranks. After the `last`
    /// virtual rank the sum is ready to be reduced, or with `blocks`, which has the virtual ranks of
    /// each, the sums of all of them, one behind the other.
    pub fn virtual_rank_done(
        &mut self,
        backend: &B,
        last: bool,
        blocks: Option<&[usize]>,
    ) -> Result<()> {
        let virtual_rank = self.take_grads(backend)?;
        // A merged buffer is reused for the next virtual rank.
        let mut spare = None;
        let mut add = |into: &mut B::Buf, from: B::Buf| {
            backend.add(B::all(&from), B::all_mut(into))?;
            spare = Some(from);
            Ok::<_, Error>(())
        };
        self.virtual_ranks.push(virtual_rank, &mut add)?;
        self.summed += 1;
        let ends_block = blocks.map(|blocks| blocks.get(self.blocks.len()) == Some(&self.summed));
        if ends_block.unwrap_or(last) {
            let sum = self
                .virtual_ranks
                .finish(&mut add)?
                .ok_or_else(|| Error::internal("there is no virtual rank to reduce"))?;
            self.blocks.push(sum);
            self.summed = 0;
        }
        if last {
            self.reduction = Some(Reduction::Ready(self.take_blocks(backend)?));
        } else {
            self.grads = spare;
        }
        Ok(())
    }

    /// Takes the sums of all blocks of virtual ranks, one behind the other.
    fn take_blocks(&mut self, backend: &B) -> Result<B::Buf> {
        let mut blocks = std::mem::take(&mut self.blocks);
        match blocks.len() {
            0 => Err(Error::internal("there is no virtual rank to reduce")),
            1 => Ok(blocks.swap_remove(0)),
            count => {
                let len = self.layout.padded;
                let mut all = backend.alloc(MemoryKind::Gradients, count * len)?;
                for (k, block) in blocks.into_iter().enumerate() {
                    backend.copy(B::all(&block), B::view_mut(&mut all, k * len..(k + 1) * len))?;
                }
                Ok(all)
            }
        }
    }

    /// Switches to the next replica.
    pub fn next_replica(&mut self) {
        if let Some(mut other) = self.inactive.pop_front() {
            std::mem::swap(&mut self.owner, &mut other.shard);
            std::mem::swap(&mut self.params, &mut other.params);
            self.inactive.push_back(other);
        }
    }

    /// Returns a full buffer with this rank's shard of the parameters, to be all-gathered; none if
    /// they are in memory or in flight; without them on a rank that owns nothing. If there is only
    /// this shard (`alone`), its upload from the
    /// host may still be in flight.
    pub fn contribution(&mut self, backend: &B, alone: bool) -> Result<Option<B::Buf>> {
        let BufferState::Freed = self.params else { return Ok(None) };
        let mut full = backend.alloc(MemoryKind::Parameters, self.layout.padded)?;
        let range = self.owner.range();
        if range.is_empty() {
            // Its parameters come from an owner.
            return Ok(Some(full));
        }
        if alone {
            self.owner.begin_copy_into(&mut full, range)?
        } else {
            self.owner.copy_into(&mut full, range)?
        }
        Ok(Some(full))
    }

    /// Returns whether the reduction has finished.
    pub fn has_arrived(&mut self) -> bool {
        match &mut self.reduction {
            Some(Reduction::InFlight { sum, .. }) => sum.is_done(),
            _ => false,
        }
    }
}

/// Returns the initial values of a unit, which do not depend on the layout: each tensor has a
/// random stream that its name determines. Without a seed the values are zero.
pub fn initial(layout: &UnitLayout, seed: Option<u64>) -> Vec<f32> {
    initial_range(layout, seed, 0..layout.padded)
}

/// Returns the [initial values](initial) of a range of a unit.
pub fn initial_range(layout: &UnitLayout, seed: Option<u64>, range: Range<usize>) -> Vec<f32> {
    let mut values = vec![0.0; range.len()];
    let Some(seed) = seed else { return values };
    for piece in layout.stored(range) {
        match piece.tensor.init {
            Init::Zeros => {}
            Init::Ones => piece.runs().for_each(|(_, to)| values[to].fill(1.0)),
            Init::Normal(std) => {
                let key = random::derive(seed, &[random::name(&piece.tensor.name)]);
                for (start, to) in piece.runs() {
                    let to = &mut values[to];
                    random::Stream::new(key).fill_normal_from(start, to);
                    to.iter_mut().for_each(|x| *x *= std);
                }
            }
        }
    }
    values
}
