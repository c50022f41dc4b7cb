//! Keys and values of the positions that a language model has seen, so that a continuation computes
//! its new positions alone.

use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Attention, AttentionOps, Backend, MemoryKind};

/// Memory of one block for the positions of one sequence so far.
pub struct KvCache<B: Backend> {
    seen: usize,
    room: usize,
    /// Of each virtual tensor rank, the queries, keys and values of every position, packed as attention
    /// takes them; made on first use.
    virtual_ranks: Vec<B::Buf>,
}

impl<B: Backend> KvCache<B> {
    /// Of a sequence that has not begun, with room for so many positions.
    pub fn new(room: usize) -> Self {
        Self { seen: 0, room, virtual_ranks: Vec::new() }
    }

    /// Positions seen.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// So many more have been seen.
    ///
    /// # Errors
    /// There is no room for them: a bug.
    pub fn pass(&mut self, positions: usize) -> Result<()> {
        self.seen += positions;
        match self.seen <= self.room {
            true => Ok(()),
            false => Err(Error::internal(format!(
                "{} positions where there is room for {}",
                self.seen, self.room
            ))),
        }
    }

    /// The rows of virtual rank number `k`, each of so many elements.
    fn virtual_rank(&mut self, b: &B, k: usize, packed: usize) -> Result<&mut B::Buf> {
        if k == self.virtual_ranks.len() {
            self.virtual_ranks.push(b.alloc(MemoryKind::Activations, self.room * packed)?);
        }
        self.virtual_ranks
            .get_mut(k)
            .ok_or_else(|| Error::internal("virtual tensor ranks out of order"))
    }
}

/// Attention of the rows of a micro-batch, of virtual rank number `k`. `project(first, to)` writes their
/// queries, keys and values, the first of which is position `first`; with a `past` they join it,
/// and see all positions before them. Returns them without one.
///
/// # Errors
/// The device failed, or of `project`.
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
    if shape.batch != 1 || last > past.room {
        return Err(Error::internal(format!(
            "{} sequences up to position {last} of {}",
            shape.batch, past.room
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
