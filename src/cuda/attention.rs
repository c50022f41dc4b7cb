//! Attention: launches of `attention.cu` and `attention_backward.cu`, whose comments have the
//! formulas used here.

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{Element, View, ViewMut};
use super::nvrtc::Variant;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Attention, AttentionOps, Backend, ElementwiseOps, KernelCost, MemoryKind};

/// The widest head that the kernels support.
const WIDEST_HEAD: usize = 256;

/// The tiles of a kernel: rows of a block, the number of blocks that each sum one gradient for the
/// same rows, and bytes of shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiles {
    rows: usize,
    parts: usize,
    shared: usize,
}

/// The tiles of the kernels for one head width and element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cuts {
    forward: Tiles,
    backward_kv: Tiles,
    backward_q: Tiles,
}

impl Cuts {
    /// Returns the tiles: bf16 uses the tensor-core kernels, f32 the plain ones.
    fn new(element: Element, head: usize) -> Self {
        if element == Element::Bf16 {
            let row = head.next_power_of_two().max(32);
            let tiles =
                |rows, step, parts| Tiles { rows, parts, shared: 2 * row * (2 * rows + 4 * step) };
            let (forward, step) = match row {
                ..=64 => (tiles(128, 64, 1), 32),
                128 => (tiles(128, 32, 1), 32),
                _ => (tiles(64, 32, 1), 16),
            };
            // The forward has one tile of its own rows, the backward two.
            let forward = Tiles { shared: forward.shared - 2 * row * forward.rows, ..forward };
            let backward_q = tiles(if row <= 64 { 128 } else { 64 }, step, 1);
            let parts = if row <= 128 { 1 } else { 2 };
            let backward_kv = Tiles { parts, shared: backward_q.shared + 16 * step, ..backward_q };
            return Self { forward, backward_kv, backward_q };
        }
        let tile = if head <= 128 { 32 } else { 16 };
        let stride = 4 * (head.div_ceil(4) | 1);
        let rows = tile * stride;
        let scores = tile * (tile + 4);
        let tiles = |floats: usize| Tiles { rows: tile, parts: 1, shared: 4 * floats };
        Self {
            forward: tiles(3 * rows + scores),
            backward_kv: tiles(4 * rows + 2 * scores + 2 * tile),
            backward_q: tiles(4 * rows + scores),
        }
    }
}

/// Creates a grid of tiles over `heads` heads of every sequence.
fn grid(shape: Attention, heads: usize, tiles: Tiles) -> Grid {
    let blocks =
        ((shape.time.div_ceil(tiles.rows) * tiles.parts) as u32, heads as u32, shape.batch as u32);
    Grid { blocks, threads: (128, 1, 1), shared: tiles.shared as u32 }
}

fn sizes(shape: Attention) -> [Arg; 4] {
    [shape.batch.into(), shape.time.into(), shape.heads.into(), shape.kv_heads.into()]
}

impl Cuda {
    fn attention_variant(&self, source: &'static str, shape: Attention) -> Result<Variant> {
        if shape.head_width > WIDEST_HEAD {
            let message = format!(
                "model.width / model.heads = {}, but GPUs support at most {WIDEST_HEAD}",
                shape.head_width
            );
            return Err(Error::input(message).hint("set model.heads higher, or run.device=cpu"));
        }
        Ok(Variant { head: Some(shape.head_width), ..self.variant(source) })
    }

    pub(super) fn attend(
        &self,
        shape: Attention,
        qkv: View<'_>,
        y: &ViewMut<'_>,
        lse: &ViewMut<'_>,
    ) -> Result<()> {
        let variant = self.attention_variant("attention.cu", shape)?;
        let aligned = qkv.pointer.is_multiple_of(16) && y.pointer.is_multiple_of(16);
        assert!(aligned || self.element() != Element::Bf16, "attention of a window in a buffer");
        let tiles = Cuts::new(self.element(), shape.head_width).forward;
        let args = [&[qkv.into(), y.into(), lse.into()], &sizes(shape)[..]].concat();
        self.launch_variant(variant, "attention_forward", grid(shape, shape.heads, tiles), &args)
    }

    pub(super) fn attend_backward(
        &self,
        shape: Attention,
        qkv: View<'_>,
        y: View<'_>,
        lse: View<'_>,
        dy: View<'_>,
        dqkv: &ViewMut<'_>,
    ) -> Result<()> {
        let variant = self.attention_variant("attention_backward.cu", shape)?;
        let cuts = Cuts::new(self.element(), shape.head_width);
        let delta = self.alloc_f32(MemoryKind::Activations, lse.len)?;
        let delta = Self::all(&delta);
        let args = [&[y.into(), dy.into(), delta.into()], &sizes(shape)[..]].concat();
        self.launch_variant(
            variant,
            "attention_delta",
            grid(shape, shape.heads, Tiles { rows: 16, parts: 1, shared: 0 }),
            &args,
        )?;
        let args =
            [&[qkv.into(), dy.into(), lse.into(), delta.into(), dqkv.into()], &sizes(shape)[..]]
                .concat();
        self.launch_variant(
            variant,
            "attention_backward_kv",
            grid(shape, shape.kv_heads, cuts.backward_kv),
            &args,
        )?;
        self.launch_variant(
            variant,
            "attention_backward_q",
            grid(shape, shape.heads, cuts.backward_q),
            &args,
        )
    }
}

impl AttentionOps for Cuda {
    fn attention(
        &self,
        shape: Attention,
        qkv: View<'_>,
        y: ViewMut<'_>,
        lse: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::attention(shape));
        self.attend(shape, qkv, &y, &lse)
    }

    /// The kernel computes all positions, and those before `first` are discarded.
    fn attention_from(
        &self,
        shape: Attention,
        first: usize,
        qkv: View<'_>,
        y: ViewMut<'_>,
        lse: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::attention_from(shape, first));
        let Attention { time, heads, head_width, .. } = shape;
        let mut all = self.alloc(MemoryKind::Activations, time * heads * head_width)?;
        let mut of_all = self.alloc_f32(MemoryKind::Activations, heads * time)?;
        self.attend(shape, qkv, &Self::all_mut(&mut all), &Self::all_mut(&mut of_all))?;
        self.copy(Self::view(&all, first * heads * head_width..time * heads * head_width), y)?;
        let mut rest = lse;
        for head in 0..heads {
            let (own, others) = Self::split_at_mut(rest, time - first);
            self.copy(Self::view(&of_all, head * time + first..(head + 1) * time), own)?;
            rest = others;
        }
        Ok(())
    }

    fn attention_backward(
        &self,
        shape: Attention,
        qkv: View<'_>,
        y: View<'_>,
        lse: View<'_>,
        dy: View<'_>,
        dqkv: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::attention_backward(shape));
        self.attend_backward(shape, qkv, y, lse, dy, &dqkv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_kernels_say() {
        let shared = |element, head| {
            let cuts = Cuts::new(element, head);
            [cuts.forward, cuts.backward_kv, cuts.backward_q].map(|tiles| tiles.shared)
        };
        for (heads, bytes) in [
            (1..=32, [24_576, 25_088, 24_576]),
            (33..=64, [49_152, 49_664, 49_152]),
            (65..=128, [65_536, 66_048, 65_536]),
            (129..=WIDEST_HEAD, [98_304, 98_560, 98_304]),
        ] {
            heads
                .for_each(|head| assert_eq!(shared(Element::Bf16, head), bytes, "heads of {head}"));
        }
        let most = (1..=WIDEST_HEAD)
            .map(|head| shared(Element::F32, head))
            .reduce(|a, b| [0, 1, 2].map(|i| a[i].max(b[i])));
        assert_eq!(most, Some([55_296, 77_056, 72_192]));
    }
}
