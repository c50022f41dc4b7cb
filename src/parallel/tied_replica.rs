//! A tied-weight replica: a copy of another stage's unit that a block of this stage is tied to.
//!
//! The stage that trains the unit updates it; each of its ranks then sends the range that it owns
//! to the rank of this stage with the same shard and replica. A tied-weight replica has no gradient
//! to reduce and no optimizer state, and does not appear in norms and checkpoints. The gradient of
//! the block is sent to the training stage once per virtual rank.

use std::collections::VecDeque;
use std::ops::Range;

use super::Lifetime;
use super::fsdp_unit::BufferState;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_device::{Kernels, MemoryKind};

/// The parameters of a tied-weight replica on a rank.
pub struct TiedReplica<B: Kernels> {
    pub layout: UnitLayout,
    /// The stage that trains it.
    pub from: usize,
    /// The range of this rank's shard.
    range: Range<usize>,
    /// This rank's shard, if full parameters are freed after use.
    shard: Option<B::Buf>,
    /// The full parameters.
    pub params: BufferState<B::Buf>,
    /// The parameters of the other replicas that this rank trains in turn.
    resting: VecDeque<InactiveParams<B>>,
}

/// The parameters of a replica that is not being trained at the moment.
struct InactiveParams<B: Kernels> {
    part: Option<B::Buf>,
    params: BufferState<B::Buf>,
}

impl<B: Kernels> TiedReplica<B> {
    /// Creates a tied-weight replica with these parameters.
    pub fn new(
        backend: &B,
        layout: UnitLayout,
        from: usize,
        range: Range<usize>,
        params: Lifetime,
        full: &[f32],
    ) -> Result<Self> {
        let mut replica = Self {
            layout,
            from,
            range,
            shard: None,
            params: BufferState::Freed,
            resting: VecDeque::new(),
        };
        replica.set(backend, params, full)?;
        Ok(replica)
    }

    /// Replaces the parameters.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice.
    pub fn set(&mut self, backend: &B, params: Lifetime, full: &[f32]) -> Result<()> {
        (self.shard, self.params) = match params {
            Lifetime::Step => {
                (None, BufferState::InMemory(backend.upload(MemoryKind::Parameters, full)?))
            }
            Lifetime::Use => (
                Some(backend.upload(MemoryKind::Parameters, &full[self.range()])?),
                BufferState::Freed,
            ),
        };
        Ok(())
    }

    /// Adds another replica that this rank trains, with these parameters.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice.
    pub fn add_replica(&mut self, backend: &B, params: Lifetime, full: &[f32]) -> Result<()> {
        let inactive = InactiveParams {
            part: self.shard.take(),
            params: std::mem::replace(&mut self.params, BufferState::Freed),
        };
        self.resting.push_back(inactive);
        self.set(backend, params, full)
    }

    /// Switches to the next replica.
    pub fn next_replica(&mut self) {
        if let Some(mut other) = self.resting.pop_front() {
            std::mem::swap(&mut self.shard, &mut other.part);
            std::mem::swap(&mut self.params, &mut other.params);
            self.resting.push_back(other);
        }
    }

    /// Returns the range of this rank's shard.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Replaces this rank's shard of the parameters. Returns the full buffer to be all-gathered, if
    /// full parameters are always in memory.
    pub fn update_shard(&mut self, backend: &B, part: B::Buf) -> Result<Option<B::Buf>> {
        self.params.wait()?;
        match (std::mem::replace(&mut self.params, BufferState::Freed), &mut self.shard) {
            (_, Some(old)) => {
                *old = part;
                Ok(None)
            }
            (BufferState::InMemory(mut full), None) => {
                backend.copy(B::all(&part), B::view_mut(&mut full, self.range.clone()))?;
                Ok(Some(full))
            }
            _ => Err(Error::internal("the tied-weight replica has no parameters")),
        }
    }

    /// Returns a full buffer with this rank's shard of the parameters, to be all-gathered; none if
    /// they are in memory or in flight.
    pub fn contribution(&mut self, backend: &B) -> Result<Option<B::Buf>> {
        let (BufferState::Freed, Some(part)) = (&self.params, &self.shard) else { return Ok(None) };
        let mut full = backend.alloc(MemoryKind::Parameters, self.layout.padded)?;
        backend.copy(B::all(part), B::view_mut(&mut full, self.range.clone()))?;
        Ok(Some(full))
    }
}
