//! Networks: sequences of stateless blocks and a loss.
//!
//! A block knows shapes, never parameters: those live in the unit of the same index
//! ([`hpctrain_base::layout::UnitLayout`]) and are handed in.

#![forbid(unsafe_code)]

mod custom;
mod dropout;
mod embedding;
pub mod gpt;
pub mod gradcheck;
mod kv_cache;
pub mod layers;
pub mod llama;
mod lm_head;
pub mod loss;
mod network;
pub mod optim;
mod rope;
mod tensor_parallel;
mod wgrad;

use std::ops::Range;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_comm::Group;
use hpctrain_data::SampleFields;
use hpctrain_device::{Backend, Kernels, MemoryKind};

pub use custom::{CustomModel, Input, ModelBuilder};
pub use kv_cache::KvCache;
pub use network::{LayerSummary, Network};
pub use rope::FrequencyScaling;
pub use wgrad::{DeferredWgrad, Grads};

/// Standard deviation of the initial weights of language models; GPT-2's and Llama's.
const INIT: f32 = 0.02;

/// One micro-batch on the device.
pub struct MicroBatch<B: Backend> {
    /// Each part, sample after sample: classes and numbers to predict `samples`·`time` times,
    /// numbers to predict and weights in f32.
    pub parts: SampleFields<B::IndexBuf, B::Buf>,
    /// Samples; of language models, sequences.
    pub samples: usize,
    /// Predictions a sample; of language models, positions.
    pub time: usize,
    /// Index of the first sample in the global batch: dropout masks are named by it.
    pub first: u64,
    /// The ids, where the host has the tables that they are rows of; the device has none then.
    pub host_ids: Vec<u32>,
}

impl<B: Backend> MicroBatch<B> {
    /// Rows of every activation.
    pub fn rows(&self) -> usize {
        self.samples * self.time
    }

    /// A micro-batch on the device, of samples of `time` predictions; `first` is the index of its
    /// first sample in the global batch.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn upload(
        backend: &B,
        parts: SampleFields<&[u32], &[f32]>,
        samples: usize,
        time: usize,
        first: u64,
    ) -> Result<Self> {
        let exact = |numbers| backend.upload_f32(MemoryKind::Activations, numbers);
        let parts = SampleFields {
            ids: backend.upload_ints(parts.ids)?,
            features: backend.upload(MemoryKind::Activations, parts.features)?,
            classes: backend.upload_ints(parts.classes)?,
            values: exact(parts.values)?,
            weights: exact(parts.weights)?,
        };
        Ok(Self { parts, samples, time, first, host_ids: Vec::new() })
    }

    /// Rows `rows` alone, each as a sample of one prediction, without ids and features: for what
    /// works row by row.
    ///
    /// # Errors
    /// The device failed.
    pub fn of_rows(&self, backend: &B, rows: Range<usize>) -> Result<Self>
    where
        B: Kernels,
    {
        let all = self.rows();
        let of_rows = |per_row: usize| rows.start * per_row..rows.end * per_row;
        let numbers = |all_rows: &B::Buf| {
            let at = of_rows(B::len(all_rows) / all.max(1));
            let mut part = backend.alloc_f32(MemoryKind::Activations, at.len())?;
            backend.copy(B::view(all_rows, at), B::all_mut(&mut part))?;
            Ok(part)
        };
        let SampleFields { ids, features: _, classes, values, weights } = &self.parts;
        let of_classes = of_rows(B::ints_len(classes) / all.max(1));
        let parts = SampleFields {
            ids: B::slice_indices(ids, 0..0),
            features: backend.alloc(MemoryKind::Activations, 0)?,
            classes: B::slice_indices(classes, of_classes),
            values: numbers(values)?,
            weights: numbers(weights)?,
        };
        Ok(Self { parts, samples: rows.len(), time: 1, first: self.first, host_ids: Vec::new() })
    }

    /// A micro-batch of text: `ids` of sequences, and the `targets` to predict.
    ///
    /// # Errors
    /// As [`MicroBatch::upload`].
    pub fn of_text(
        backend: &B,
        ids: &[u32],
        targets: &[u32],
        time: usize,
        first: u64,
    ) -> Result<Self> {
        let parts = SampleFields { ids, classes: targets, ..SampleFields::default() };
        Self::upload(backend, parts, ids.len() / time.max(1), time, first)
    }
}

/// Context of a block besides its input and parameters.
pub struct Context<'a, B: Backend> {
    /// The device.
    pub backend: &'a B,
    /// The data at hand.
    pub micro: &'a MicroBatch<B>,
    /// The training step; none outside training.
    pub training: Option<Training<'a, B>>,
    /// The ranks that compute slices of the same blocks; none where this one computes whole ones.
    pub tensor: Option<&'a Group<B>>,
}

impl<B: Backend> Context<'_, B> {
    /// The same, with other data.
    pub fn of<'a>(&'a self, micro: &'a MicroBatch<B>) -> Context<'a, B> {
        Context { backend: self.backend, micro, training: self.training, tensor: self.tensor }
    }
}

/// A training step as a block sees it.
pub struct Training<'a, B: Backend> {
    /// Names the step's dropout masks.
    pub dropout: u64,
    /// The ranks that compute micro-batches of the same step at the same time, each its own; none
    /// alone.
    pub ranks: Option<&'a Group<B>>,
    /// The part of the global batch that this micro-batch is.
    pub share: f32,
}

impl<B: Backend> Copy for Training<'_, B> {}

impl<B: Backend> Clone for Training<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

/// Parameters of a block: its own unit's and, when it borrows, another unit's.
pub struct Params<'a, B: Backend> {
    /// The block's unit: a section for each virtual tensor rank of this rank.
    pub own: B::View<'a>,
    /// Elements of a section.
    pub section: usize,
    /// Those of [`Block::tied_to`], with the unit's other elements behind them.
    pub lent: Option<B::View<'a>>,
    /// Elements of a section of the borrowed unit.
    pub lent_section: usize,
}

impl<B: Backend> Copy for Params<'_, B> {}

impl<B: Backend> Clone for Params<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<'a, B: Backend> Params<'a, B> {
    /// Those of a block with one virtual rank that borrows none.
    pub fn of(unit: &'a B::Buf) -> Self {
        Self { own: B::all(unit), section: B::len(unit), lent: None, lent_section: 0 }
    }

    /// The block's unit from section `k` on.
    pub fn virtual_rank(&self, k: usize) -> B::View<'a> {
        B::split_at(self.own, k * self.section).1
    }

    /// As [`Params::virtual_rank`], of the borrowed unit.
    ///
    /// # Errors
    /// Nothing is lent.
    pub fn lent_virtual_rank(&self, k: usize) -> Result<B::View<'a>> {
        let lent = self
            .lent
            .ok_or_else(|| Error::internal("a block that borrows parameters was handed none"))?;
        Ok(B::split_at(lent, k * self.lent_section).1)
    }
}

/// Parameters that a block borrows from another block's unit: its first tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedParam {
    /// The unit, of an earlier block.
    pub unit: usize,
    /// Elements of its gradient: equally many for each virtual tensor rank of this rank, as many as the
    /// first virtual rank of all has.
    pub len: usize,
}

/// A layer, or a few that belong together. Its tensors form one unit.
pub trait Block<B: Kernels>: Send + Sync {
    /// The unit's name.
    fn name(&self) -> String;

    /// Parameters in storage order, with their whole shapes: those that are cut among virtual tensor ranks
    /// first, and of each kind decayed ones first.
    fn tensors(&self) -> Vec<Tensor>;

    /// Parameters of an earlier block's unit that this one uses as well. The gradients of both
    /// blocks are summed apart, and added when a virtual rank ends.
    fn tied_to(&self) -> Option<TiedParam> {
        None
    }

    /// Elements of one row of the input.
    fn input_per_row(&self) -> usize;

    /// Elements that one row keeps between forward and backward, besides the input.
    fn saved_elems_per_row(&self) -> usize;

    /// As [`Block::saved_elems_per_row`], of elements that are f32 with any compute type, and not
    /// counted there.
    fn saved_f32_per_row(&self) -> usize;

    /// Elements a row that live at once in this block's forward, besides the saved ones and the
    /// output.
    fn forward_scratch_per_row(&self) -> usize {
        0
    }

    /// Elements a row that live at once while this block works, besides the saved ones.
    fn scratch_per_row(&self) -> usize;

    /// Elements of one row that wait after a backward for the gradients of weights, which it [puts
    /// off](Grads::later); none if it makes all at once.
    fn deferred_per_row(&self) -> usize {
        0
    }

    /// As [`Block::scratch_per_row`], in a backward that puts gradients off: elements besides the
    /// saved ones, with those that wait.
    fn deferred_scratch_per_row(&self) -> usize {
        self.scratch_per_row()
    }

    /// Whether from a row of its output to the next it is [`Backend::row_stride`] elements, which
    /// kernels of classes alone can read: of a network's last block. Otherwise rows lie one behind
    /// the other.
    fn pads_output(&self) -> bool {
        false
    }

    /// Whether each row of its output follows from the same row of its input alone, and from no
    /// [data](Context::micro): so a network's last block may be computed some rows at a time.
    fn is_row_by_row(&self) -> bool {
        false
    }

    /// Elements of f32 that it keeps from its first use on, with any batch; elements that blocks
    /// share are counted by one of them.
    fn constants(&self) -> usize {
        0
    }

    /// Output, and the buffers that the backward needs.
    ///
    /// # Errors
    /// The device failed.
    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)>;

    /// Whether [`Block::forward_cached`] gives an output: of a network whose blocks all do, a
    /// sequence is continued by the computation of its new positions alone.
    fn supports_kv_cache(&self) -> bool {
        false
    }

    /// The output as [`Block::forward`] has it outside training, of one sequence whose earlier
    /// positions `past` knows: those of `x` follow them, and join them.
    ///
    /// # Errors
    /// The device failed, there is no room for more positions, or the block does not continue
    /// sequences.
    fn forward_cached(
        &self,
        _cx: &Context<'_, B>,
        _params: Params<'_, B>,
        _x: &B::Buf,
        _past: &mut KvCache<B>,
    ) -> Result<B::Buf> {
        Err(Error::internal(format!("block {} does not continue sequences", self.name())))
    }

    /// Adds to the gradients of the parameters, or overwrites them as [`Grads`] tells, and returns
    /// that of `x` (empty for the first block). Products of [`Grads::linear`] may be put off; all
    /// else is done when it returns. Takes the buffers that the forward saved, and the gradient of
    /// the output.
    ///
    /// # Errors
    /// The device failed.
    fn backward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        grads: Grads<'_, B>,
        x: &B::Buf,
        saved: Vec<B::Buf>,
        dy: B::Buf,
    ) -> Result<B::Buf>;
}

/// The blocks of a network in order.
pub type Blocks<B> = Vec<Box<dyn Block<B>>>;

/// The loan of each block.
pub fn loans<B: Kernels>(blocks: &Blocks<B>) -> Vec<Option<TiedParam>> {
    blocks.iter().map(|block| block.tied_to()).collect()
}

/// The saved buffers as an array, in the order the forward listed them.
fn unpack<T, const N: usize>(saved: Vec<T>) -> Result<[T; N]> {
    take(&mut saved.into_iter())
}

/// The next saved buffers.
fn take<T, const N: usize>(saved: &mut impl Iterator<Item = T>) -> Result<[T; N]> {
    let next: Vec<T> = saved.take(N).collect();
    let found = next.len();
    next.try_into()
        .map_err(|_| Error::internal(format!("{found} saved buffers where the backward wants {N}")))
}
