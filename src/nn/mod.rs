//! Networks: sequences of stateless blocks and a loss.
//!
//! A block holds shapes but no parameters: these live in the unit of the same index
//! ([`hpctrain_base::layout::UnitLayout`]) and are passed in.

#![forbid(unsafe_code)]

pub mod autograd;
mod contrastive;
mod custom;
mod custom_loss;
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

/// The standard deviation of the initial weights of language models, as in GPT-2 and Llama.
const INIT: f32 = 0.02;

/// One micro-batch on the device.
pub struct MicroBatch<B: Backend> {
    /// The fields of the samples, sample after sample: `samples`·`time` classes or values to
    /// predict; values and weights are f32.
    pub fields: SampleFields<B::IndexBuf, B::Buf>,
    /// The number of samples (sequences of language models).
    pub samples: usize,
    /// The number of predictions per sample (positions of language models).
    pub time: usize,
    /// The index of the first sample in the global batch. Dropout masks are derived from it.
    pub first: u64,
    /// The ids, if the embedding tables are on the host. The device has no ids then.
    pub host_ids: Vec<u32>,
}

impl<B: Backend> MicroBatch<B> {
    /// Returns the number of rows of every activation.
    pub fn rows(&self) -> usize {
        self.samples * self.time
    }

    /// Copies a micro-batch to the device. Each sample has `time` predictions, and `first` is the
    /// index of the first sample in the global batch.
    ///
    /// # Errors
    /// Returns an error if the device is out of memory.
    pub fn upload(
        backend: &B,
        parts: SampleFields<&[u32], &[f32]>,
        samples: usize,
        time: usize,
        first: u64,
    ) -> Result<Self> {
        let exact = |numbers| backend.upload_f32(MemoryKind::Activations, numbers);
        let parts = SampleFields {
            ids: backend.upload_indices(parts.ids)?,
            features: backend.upload(MemoryKind::Activations, parts.features)?,
            classes: backend.upload_indices(parts.classes)?,
            values: exact(parts.values)?,
            weights: exact(parts.weights)?,
        };
        Ok(Self { fields: parts, samples, time, first, host_ids: Vec::new() })
    }

    /// Returns only the rows `rows`, each as a sample with one prediction, without ids and
    /// features. This is for losses and blocks that work row by row.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn slice_rows(&self, backend: &B, rows: Range<usize>) -> Result<Self>
    where
        B: Kernels,
    {
        let all = self.rows();
        let of_rows = |len: usize| {
            let per_row = len / all.max(1);
            rows.start * per_row..rows.end * per_row
        };
        let SampleFields { ids, features: _, classes, values, weights } = &self.fields;
        let parts = SampleFields {
            ids: B::slice_indices(ids, 0..0),
            features: backend.alloc(MemoryKind::Activations, 0)?,
            classes: B::slice_indices(classes, of_rows(B::indices_len(classes))),
            values: copy_range(backend, values, of_rows(B::len(values)))?,
            weights: copy_range(backend, weights, of_rows(B::len(weights)))?,
        };
        Ok(Self {
            fields: parts,
            samples: rows.len(),
            time: 1,
            first: self.first,
            host_ids: Vec::new(),
        })
    }

    /// Creates a micro-batch of text from the `ids` of sequences and the `targets` to predict.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`MicroBatch::upload`].
    pub fn from_text(
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

/// Copies the elements `range` of an f32 buffer to a new one.
fn copy_range<B: Kernels>(backend: &B, from: &B::Buf, range: Range<usize>) -> Result<B::Buf> {
    let mut part = backend.alloc_f32(MemoryKind::Activations, range.len())?;
    backend.copy(B::view(from, range), B::all_mut(&mut part))?;
    Ok(part)
}

/// The context of a block's computation, besides its input and parameters.
pub struct Context<'a, B: Backend> {
    /// The device.
    pub backend: &'a B,
    /// The current micro-batch.
    pub micro: &'a MicroBatch<B>,
    /// The training step, or `None` outside training.
    pub training: Option<Training<'a, B>>,
    /// The tensor-parallel group, or `None` if this rank computes whole blocks.
    pub tensor: Option<&'a Group<B>>,
}

impl<B: Backend> Context<'_, B> {
    /// Returns the same context with another micro-batch.
    pub fn with_micro_batch<'a>(&'a self, micro: &'a MicroBatch<B>) -> Context<'a, B> {
        Context { backend: self.backend, micro, training: self.training, tensor: self.tensor }
    }
}

/// A training step as a block sees it.
pub struct Training<'a, B: Backend> {
    /// The key from which the step's dropout masks are derived.
    pub dropout: u64,
    /// The ranks that compute other micro-batches of the same step at the same time, or `None` if
    /// there is one rank.
    pub ranks: Option<&'a Group<B>>,
    /// The fraction of the global batch in this micro-batch.
    pub batch_fraction: f32,
}

impl<B: Backend> Copy for Training<'_, B> {}

impl<B: Backend> Clone for Training<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

/// The parameters of a block: those of its own unit and, with tied weights, those of another unit.
pub struct Params<'a, B: Backend> {
    /// The block's unit, with one section for each virtual tensor rank of this rank.
    pub own: B::View<'a>,
    /// The number of elements of a section.
    pub section: usize,
    /// The parameters of [`Block::tied_to`], followed by the other elements of that unit.
    pub tied: Option<B::View<'a>>,
    /// The number of elements of a section of the tied unit.
    pub tied_section: usize,
}

impl<B: Backend> Copy for Params<'_, B> {}

impl<B: Backend> Clone for Params<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<'a, B: Backend> Params<'a, B> {
    /// Creates the parameters of a block with one virtual rank and no tied weights.
    pub fn with_micro_batch(unit: &'a B::Buf) -> Self {
        Self { own: B::all(unit), section: B::len(unit), tied: None, tied_section: 0 }
    }

    /// Returns the block's unit from section `k` on.
    pub fn virtual_rank(&self, k: usize) -> B::View<'a> {
        B::split_at(self.own, k * self.section).1
    }

    /// Returns the tied unit from section `k` on.
    ///
    /// # Errors
    /// Returns an error if the block was given no tied parameters.
    pub fn tied_virtual_rank(&self, k: usize) -> Result<B::View<'a>> {
        let lent = self
            .tied
            .ok_or_else(|| Error::internal("a block with tied parameters was given none"))?;
        Ok(B::split_at(lent, k * self.tied_section).1)
    }
}

/// A tied parameter: the first tensor of another block's unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedParam {
    /// The index of the unit, which belongs to an earlier block.
    pub unit: usize,
    /// The number of elements of its gradient: for each virtual tensor rank of this rank, as many
    /// as the very first virtual rank has.
    pub len: usize,
}

/// A layer or a few consecutive layers, whose tensors form one unit.
pub trait Block<B: Kernels>: Send + Sync {
    /// Returns the name of the unit.
    fn name(&self) -> String;

    /// Checks the block where its network is made, before anything is allocated.
    ///
    /// # Errors
    /// Returns an error that names the block if it cannot compute.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the parameters in storage order, with their unsharded shapes: first those sharded
    /// among virtual tensor ranks, then the others, and within each kind those with weight decay
    /// first.
    fn tensors(&self) -> Vec<Tensor>;

    /// Returns the parameter of an earlier block that this block uses too. The gradients of the two
    /// blocks are accumulated separately and added at the end of a virtual rank.
    fn tied_to(&self) -> Option<TiedParam> {
        None
    }

    /// Returns the number of elements of one row of the input.
    fn input_per_row(&self) -> usize;

    /// Returns the number of elements per row that are saved for the backward, without the input.
    fn saved_elems_per_row(&self) -> usize;

    /// Returns the number of saved elements per row that are f32 with any compute type. They are
    /// not counted by [`Block::saved_elems_per_row`].
    fn saved_f32_per_row(&self) -> usize;

    /// Returns the peak number of temporary elements per row in the forward, without the saved
    /// elements and the output.
    fn forward_scratch_per_row(&self) -> usize {
        0
    }

    /// Returns the peak number of temporary elements per row in forward and backward, without the
    /// saved elements.
    fn scratch_per_row(&self) -> usize;

    /// Returns the number of elements per row that are kept after a backward with [deferred
    /// wgrad](Grads::deferred), or 0 if the block defers nothing.
    fn deferred_per_row(&self) -> usize {
        0
    }

    /// Returns the peak number of elements per row in a backward with deferred wgrad, without the
    /// saved elements but with those of [`Block::deferred_per_row`].
    fn deferred_scratch_per_row(&self) -> usize {
        self.scratch_per_row()
    }

    /// Returns true if rows of the output are padded to [`Backend::row_stride`] elements. Only the
    /// last block of a network may pad, and only the cross-entropy kernels read padded rows.
    fn pads_output(&self) -> bool {
        false
    }

    /// Returns true if each row of the output depends only on the same row of the input, and not on
    /// the [micro-batch](Context::micro). The last block of a network can then be computed in
    /// chunks of rows.
    fn is_row_by_row(&self) -> bool {
        false
    }

    /// Returns the number of f32 elements of constants that live on the device from the first use
    /// on. Constants that blocks share are counted by one of them.
    fn constants(&self) -> usize {
        0
    }

    /// Returns the output and the buffers saved for the backward.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn forward(
        &self,
        cx: &Context<'_, B>,
        params: Params<'_, B>,
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)>;

    /// Returns true if [`Block::forward_cached`] is implemented. If all blocks of a network
    /// implement it, generation computes only the new positions of a sequence.
    fn supports_kv_cache(&self) -> bool {
        false
    }

    /// Returns the output of [`Block::forward`] outside training, for one sequence whose earlier
    /// positions are in the KV cache `past`. The positions of `x` follow them and are added to the
    /// cache.
    ///
    /// # Errors
    /// Returns an error if the device fails, the cache is full, or the block does not support a KV
    /// cache.
    fn forward_cached(
        &self,
        _cx: &Context<'_, B>,
        _params: Params<'_, B>,
        _x: &B::Buf,
        _past: &mut KvCache<B>,
    ) -> Result<B::Buf> {
        Err(Error::internal(format!("block {} does not support a KV cache", self.name())))
    }

    /// Accumulates the gradients of the parameters, or overwrites them as [`Grads`] says, and
    /// returns the gradient of `x` (empty for the first block). `saved` are the buffers that the
    /// forward saved, `dy` is the gradient of the output. Only the matmuls of [`Grads::linear`] may
    /// be deferred.
    ///
    /// # Errors
    /// Returns an error if the device fails.
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
    next.try_into().map_err(|_| {
        Error::internal(format!("{found} saved buffers where the backward expects {N}"))
    })
}
