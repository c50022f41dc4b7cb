//! A loss of the whole batch: the outputs of all micro-batches of all data-parallel ranks are
//! all-gathered, and every rank computes the loss of all samples. Its bits are therefore the same on
//! any number of ranks, and nothing but outputs and targets is exchanged. All forwards come before
//! all backwards ([`PipelineSchedule::GPipe`](hpctrain_parallel::PipelineSchedule)).

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
/// these outputs, in order. No rank has more than `most` micro-batches. Collective over `ranks`.
///
/// # Errors
/// Returns an error if the device or a message between ranks fails.
pub fn batch_loss<B: Kernels>(
    backend: &B,
    objective: &Objective<B>,
    ranks: &Group<B>,
    (micros, most): (&[&MicroBatch<B>], usize),
    outputs: Vec<B::Buf>,
    scale: f32,
) -> Result<Vec<MicroBatchLoss<B>>> {
    let _span = span(ActivityKind::Loss, None);
    let first = micros.first().ok_or_else(|| Error::internal("a batch without samples"))?;
    let rows = first.rows();
    let order = Order::by_first_sample(ranks, micros, most)?;
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
    /// For each place in the batch, the rank of its micro-batch and its number on the rank.
    sources: Vec<(usize, usize)>,
    /// The places of this rank's micro-batches.
    own: Vec<usize>,
    /// The most micro-batches of a rank.
    most: usize,
}

impl Order {
    /// Orders micro-batches by their first samples.
    fn by_first_sample<B: Kernels>(
        ranks: &Group<B>,
        micros: &[&MicroBatch<B>],
        most: usize,
    ) -> Result<Self> {
        let mine: Vec<u64> = micros.iter().map(|micro| micro.first).collect();
        let firsts = ranks.all_gather_u64(&mine)?;
        if firsts.iter().any(|firsts| firsts.len() > most) {
            return Err(Error::comm("a rank has another number of micro-batches"));
        }
        let mut sources: Vec<(usize, usize)> = firsts
            .iter()
            .enumerate()
            .flat_map(|(rank, firsts)| (0..firsts.len()).map(move |k| (rank, k)))
            .collect();
        sources.sort_by_key(|&(rank, k)| firsts[rank][k]);
        let own = (0..micros.len())
            .map(|k| sources.iter().position(|source| *source == (ranks.rank(), k)));
        let own = own.collect::<Option<Vec<_>>>();
        let own = own.ok_or_else(|| Error::internal("a micro-batch without a place"))?;
        Ok(Self { sources, own, most })
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
        let at = |piece: usize| piece * len..(piece + 1) * len;
        // A rank with fewer micro-batches than others leaves its last places unused.
        let mut all = backend.alloc_f32(MemoryKind::Activations, ranks.size() * self.most * len)?;
        for (k, one) in mine.iter().enumerate() {
            let to = B::view_mut(&mut all, at(ranks.rank() * self.most + k));
            backend.copy(B::all(one), to)?;
        }
        if len == 0 {
            return Ok(all);
        }
        let all = ranks.all_gather(all).wait()?;
        let mut ordered = backend.alloc_f32(MemoryKind::Activations, self.pieces() * len)?;
        for (place, (rank, k)) in self.sources.iter().enumerate() {
            let from = B::view(&all, at(rank * self.most + k));
            backend.copy(from, B::view_mut(&mut ordered, at(place)))?;
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
        let of_ranks: Vec<Vec<u32>> = of_ranks
            .iter()
            .map(|bytes| bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
            .collect();
        let len = of_ranks.iter().map(Vec::len).sum::<usize>() / self.pieces().max(1);
        let ordered: Vec<u32> = self
            .sources
            .iter()
            .flat_map(|&(rank, k)| &of_ranks[rank][k * len..(k + 1) * len])
            .copied()
            .collect();
        backend.upload_indices(&ordered)
    }
}
