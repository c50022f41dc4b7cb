//! A copy of another stage's unit, whose parameters a block of this stage borrows.
//!
//! The stage that trains the unit updates it; each of its ranks then sends the range that it owns
//! to the rank of this stage at the same place among shards and replicas. A guest has no gradient
//! to reduce, no optimizer state and no place in norms and checkpoints. The block's own gradient
//! goes the other way, once a virtual rank.

use std::collections::VecDeque;
use std::ops::Range;

use super::Lifetime;
use super::fsdp_unit::BufferState;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_device::{Kernels, MemoryKind};

/// Parameters of a borrowed unit on a rank.
pub struct TiedReplica<B: Kernels> {
    pub layout: UnitLayout,
    /// The stage that trains it.
    pub from: usize,
    /// Range of this rank's part.
    range: Range<usize>,
    /// That part, where full parameters do not live always.
    part: Option<B::Buf>,
    /// Full parameters.
    pub params: BufferState<B::Buf>,
    /// Parameters of the other replicas that this rank trains, in the order of their turns.
    resting: VecDeque<Resting<B>>,
}

/// Parameters of a replica that waits for its turn.
struct Resting<B: Kernels> {
    part: Option<B::Buf>,
    params: BufferState<B::Buf>,
}

impl<B: Kernels> TiedReplica<B> {
    /// A guest with these parameters.
    pub fn new(
        backend: &B,
        layout: UnitLayout,
        from: usize,
        range: Range<usize>,
        params: Lifetime,
        full: &[f32],
    ) -> Result<Self> {
        let mut guest = Self {
            layout,
            from,
            range,
            part: None,
            params: BufferState::Gone,
            resting: VecDeque::new(),
        };
        guest.set(backend, params, full)?;
        Ok(guest)
    }

    /// Replaces the parameters.
    ///
    /// # Errors
    /// Out of memory.
    pub fn set(&mut self, backend: &B, params: Lifetime, full: &[f32]) -> Result<()> {
        (self.part, self.params) = match params {
            Lifetime::Step => {
                (None, BufferState::Here(backend.upload(MemoryKind::Parameters, full)?))
            }
            Lifetime::Use => (
                Some(backend.upload(MemoryKind::Parameters, &full[self.range()])?),
                BufferState::Gone,
            ),
        };
        Ok(())
    }

    /// Another replica of this rank, with these parameters.
    ///
    /// # Errors
    /// Out of memory.
    pub fn add_replica(&mut self, backend: &B, params: Lifetime, full: &[f32]) -> Result<()> {
        let had = Resting {
            part: self.part.take(),
            params: std::mem::replace(&mut self.params, BufferState::Gone),
        };
        self.resting.push_back(had);
        self.set(backend, params, full)
    }

    /// The next replica takes its turn.
    pub fn next_replica(&mut self) {
        if let Some(mut other) = self.resting.pop_front() {
            std::mem::swap(&mut self.part, &mut other.part);
            std::mem::swap(&mut self.params, &mut other.params);
            self.resting.push_back(other);
        }
    }

    /// Range of this rank's part.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Takes this rank's part of new parameters. Returns the full buffer to be gathered, where it
    /// lives always.
    pub fn renew(&mut self, backend: &B, part: B::Buf) -> Result<Option<B::Buf>> {
        self.params.wait()?;
        match (std::mem::replace(&mut self.params, BufferState::Gone), &mut self.part) {
            (_, Some(old)) => {
                *old = part;
                Ok(None)
            }
            (BufferState::Here(mut full), None) => {
                backend.copy(B::all(&part), B::view_mut(&mut full, self.range.clone()))?;
                Ok(Some(full))
            }
            _ => Err(Error::internal("a guest without parameters")),
        }
    }

    /// As [`Unit::contribution`](super::fsdp_unit::Unit::contribution).
    pub fn contribution(&mut self, backend: &B) -> Result<Option<B::Buf>> {
        let (BufferState::Gone, Some(part)) = (&self.params, &self.part) else { return Ok(None) };
        let mut full = backend.alloc(MemoryKind::Parameters, self.layout.padded)?;
        backend.copy(B::all(part), B::view_mut(&mut full, self.range.clone()))?;
        Ok(Some(full))
    }
}
