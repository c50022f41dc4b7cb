//! A loss of the whole batch: the outputs of all micro-batches of all data-parallel ranks are
//! all-gathered, and every rank computes the loss of all samples. Its bits are therefore the same on
//! any number of ranks, and nothing but outputs and targets is exchanged. All forwards come before
//! all backwards ([`PipelineSchedule::GPipe`](hpctrain_parallel::PipelineSchedule)).

use std::ops::Range;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_comm::Group;
use hpctrain_data::SampleFields;
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::MicroBatch;
use hpctrain_nn::loss::Objective;

/// The loss of a micro-batch, and the gradient of its output.
pub struct MicroBatchLoss<B: Kernels> {
    /// The sum of the losses of its rows.
    pub loss: B::Scalar,
    /// The gradient of its output.
    pub gradient: B::Buf,
}

/// Computes the loss of the batch of all `ranks`, of which this rank has these micro-batches with
/// these outputs, in order. Collective over `ranks`, which have as many micro-batches each.
///
/// # Errors
/// Returns an error if the device or a message between ranks fails.
pub fn batch_loss<B: Kernels>(
    backend: &B,
    objective: &Objective<B>,
    ranks: &Group<B>,
    micros: &[&MicroBatch<B>],
    outputs: Vec<B::Buf>,
    scale: f32,
) -> Result<Vec<MicroBatchLoss<B>>> {
    let _span = span(ActivityKind::Loss, None);
    let first = micros.first().ok_or_else(|| Error::internal("a batch without samples"))?;
    let rows = first.rows();
    let order = Order::by_first_sample(ranks, micros)?;
    let outputs_by_micro: Vec<&B::Buf> = outputs.iter().collect();
    let mut output = order.gather(backend, ranks, &outputs_by_micro)?;
    let values: Vec<&B::Buf> = micros.iter().map(|micro| &micro.fields.values).collect();
    let weights: Vec<&B::Buf> = micros.iter().map(|micro| &micro.fields.weights).collect();
    let fields = SampleFields {
        ids: backend.upload_indices(&[])?,
        features: backend.alloc(MemoryKind::Activations, 0)?,
        classes: order.gather_classes(backend, ranks, micros)?,
        values: order.gather(backend, ranks, &values)?,
        weights: order.gather(backend, ranks, &weights)?,
    };
    let batch = MicroBatch {
        fields,
        samples: order.pieces() * first.samples,
        time: first.time,
        first: 0,
        host_ids: vec![],
    };
    let losses = objective.losses(backend, None, &batch, &mut output, scale)?;
    let width = B::len(&output) / (order.pieces() * rows).max(1);
    let mut results = Vec::with_capacity(outputs.len());
    for (mut gradient, place) in outputs.into_iter().zip(&order.own) {
        let of_rows = place * rows..(place + 1) * rows;
        let elements = of_rows.start * width..of_rows.end * width;
        backend.copy(B::view(&output, elements), B::all_mut(&mut gradient))?;
        let loss = backend.sum(B::view(&losses, of_rows))?;
        results.push(MicroBatchLoss { loss, gradient });
    }
    Ok(results)
}

/// The order of the micro-batches of all ranks in the batch.
struct Order {
    /// For each place in the batch, the micro-batch by rank and then by its number on the rank.
    sources: Vec<usize>,
    /// The places of this rank's micro-batches.
    own: Vec<usize>,
    /// The number of micro-batches of a rank.
    of_rank: usize,
}

impl Order {
    /// Orders micro-batches by their first samples.
    fn by_first_sample<B: Kernels>(ranks: &Group<B>, micros: &[&MicroBatch<B>]) -> Result<Self> {
        let mine: Vec<u64> = micros.iter().map(|micro| micro.first).collect();
        let firsts = ranks.all_gather_u64(&mine)?;
        let of_rank = micros.len();
        if firsts.iter().any(|firsts| firsts.len() != of_rank) {
            return Err(Error::comm("a rank has another number of micro-batches"));
        }
        let firsts = firsts.concat();
        let mut sources: Vec<usize> = (0..firsts.len()).collect();
        sources.sort_by_key(|source| firsts[*source]);
        let own = (0..of_rank).map(|k| {
            let source = ranks.rank() * of_rank + k;
            sources.iter().position(|other| *other == source)
        });
        let own = own.collect::<Option<Vec<_>>>();
        let own = own.ok_or_else(|| Error::internal("a micro-batch without a place"))?;
        Ok(Self { sources, own, of_rank })
    }

    /// Returns the number of micro-batches of all ranks.
    fn pieces(&self) -> usize {
        self.sources.len()
    }

    /// Collects equally long buffers of all ranks by all-gather, in f32 and in the order of the batch.
    fn gather<B: Kernels>(
        &self,
        backend: &B,
        ranks: &Group<B>,
        mine: &[&B::Buf],
    ) -> Result<B::Buf> {
        let len = mine.first().map_or(0, |one| B::len(one));
        if mine.iter().any(|one| B::len(one) != len) {
            return Err(Error::internal("micro-batches of different sizes"));
        }
        let at = |source: usize| source * len..(source + 1) * len;
        let mut all = backend.alloc_f32(MemoryKind::Activations, self.pieces() * len)?;
        for (k, one) in mine.iter().enumerate() {
            let to = B::view_mut(&mut all, at(ranks.rank() * self.of_rank + k));
            backend.copy(B::all(one), to)?;
        }
        if len == 0 {
            return Ok(all);
        }
        let all = ranks.all_gather(all).wait()?;
        let mut ordered = backend.alloc_f32(MemoryKind::Activations, self.pieces() * len)?;
        for (place, source) in self.sources.iter().enumerate() {
            backend.copy(B::view(&all, at(*source)), B::view_mut(&mut ordered, at(place)))?;
        }
        Ok(ordered)
    }

    /// Collects the classes of samples of all ranks.
    fn gather_classes<B: Kernels>(
        &self,
        backend: &B,
        ranks: &Group<B>,
        micros: &[&MicroBatch<B>],
    ) -> Result<B::IndexBuf> {
        let mut mine = vec![];
        for micro in micros {
            let mut classes = vec![0; B::indices_len(&micro.fields.classes)];
            backend.download_indices(&micro.fields.classes, &mut classes)?;
            mine.extend(classes);
        }
        let bytes = mine.iter().flat_map(|class| class.to_le_bytes()).collect();
        let of_ranks = ranks.gather_bytes(bytes).wait()?;
        let all: Vec<u32> = of_ranks
            .iter()
            .flat_map(|bytes| bytes.as_chunks::<4>().0)
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect();
        let len = all.len() / self.pieces().max(1);
        let at = |source: usize| -> Range<usize> { source * len..(source + 1) * len };
        let ordered: Vec<u32> =
            self.sources.iter().flat_map(|source| &all[at(*source)]).copied().collect();
        backend.upload_indices(&ordered)
    }
}
