//! The KV cache of a language model: keys and values of earlier positions, so that generation
//! computes only new positions.
//!
//! On CPUs attention has the same bits for a position with and without the cache; the GEMMs around
//! it do not promise that. On GPUs attention with a cache still computes all positions and discards
//! the earlier ones.

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Attention, AttentionOps, Backend, MemoryKind};

/// The KV cache of one block, for one sequence.
pub struct KvCache<B: Backend> {
    seen: usize,
    capacity: usize,
    /// For each virtual tensor rank, the queries, keys and values of every position, packed as
    /// attention expects them. Allocated on first use.
    virtual_ranks: Vec<B::Buf>,
}

impl<B: Backend> KvCache<B> {
    /// Creates an empty cache with a capacity of `capacity` positions.
    pub fn new(capacity: usize) -> Self {
        Self { seen: 0, capacity, virtual_ranks: Vec::new() }
    }

    /// Returns the number of positions in the cache.
    pub fn positions(&self) -> usize {
        self.seen
    }

    /// Records that `positions` more positions are in the cache.
    ///
    /// # Errors
    /// Returns an internal error if the capacity is exceeded.
    pub fn advance(&mut self, positions: usize) -> Result<()> {
        self.seen += positions;
        match self.seen <= self.capacity {
            true => Ok(()),
            false => Err(Error::internal(format!(
                "KV cache: {} positions exceed its capacity of {}",
                self.seen, self.capacity
            ))),
        }
    }

    /// Returns the rows of virtual rank number `k`, each of `packed` elements.
    fn virtual_rank(&mut self, b: &B, k: usize, packed: usize) -> Result<&mut B::Buf> {
        if k == self.virtual_ranks.len() {
            self.virtual_ranks.push(b.alloc(MemoryKind::Activations, self.capacity * packed)?);
        }
        self.virtual_ranks
            .get_mut(k)
            .ok_or_else(|| Error::internal("virtual tensor ranks out of order"))
    }
}

/// Computes attention for the rows of a micro-batch, in virtual rank number `k`. `project(first,
/// to)` writes their packed queries, keys and values, of which the first row is position `first`.
/// With a KV cache `past` these are added to it, and attend to all positions before them; without
/// one they are returned.
///
/// # Errors
/// Returns an error if the device or `project` fails, or if the cache is given several sequences or
/// more positions than its capacity.
pub fn attend<B: AttentionOps>(
    b: &B,
    past: Option<&mut KvCache<B>>,
    k: usize,
    shape: Attention,
    project: impl FnOnce(usize, B::ViewMut<'_>) -> Result<()>,
    [y, lse]: [&mut B::Buf; 2],
) -> Result<Option<B::Buf>> {
    let packed = shape.packed_width();
    let Some(past) = past else {
        let mut qkv = b.alloc(MemoryKind::Activations, shape.batch * shape.time * packed)?;
        project(0, B::all_mut(&mut qkv))?;
        b.attention(shape, B::all(&qkv), B::all_mut(y), B::all_mut(lse))?;
        return Ok(Some(qkv));
    };
    let first = past.seen;
    let last = past.seen + shape.time;
    if shape.batch != 1 || last > past.capacity {
        return Err(Error::internal(format!(
            "KV cache: {} sequences up to position {last}, but it holds 1 sequence of {} positions",
            shape.batch, past.capacity
        )));
    }
    let rows = past.virtual_rank(b, k, packed)?;
    project(first, B::view_mut(rows, first * packed..last * packed))?;
    let seen = B::view(rows, 0..last * packed);
    b.attention_from(
        Attention { time: last, ..shape },
        first,
        seen,
        B::all_mut(y),
        B::all_mut(lse),
    )?;
    Ok(None)
}
