//! Embedding tables on the host, whose rows are the input of a device (`model.place.tables`), which
//! may be the host itself (`optimizer.tables = sparse`).
//!
//! The network's first block consists of embedding tables only. The host computes it: it looks up
//! the rows of a micro-batch and copies them to the device, and later adds the gradient of these
//! rows to that of the tables. So the device stores the rows of a micro-batch instead of the
//! tables, their gradients and their optimizer state, and the host's work, apart from the update,
//! is proportional to the number of ids. Gradients are summed over ranks by the same collectives,
//! in host memory.
//!
//! Rows are copied through one pinned buffer, in which they are rounded to the device's type as
//! tables on the device would be, so results are bitwise the same. The device orders copies and
//! compute; the host waits only for gradients.

use std::sync::Arc;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_cpu::{Cpu, CpuBuf};
use hpctrain_data::SampleFields;
use hpctrain_device::{Backend, CommBuffer, ComputeOrderedCopies, Kernels, MemoryKind, Slot};
use hpctrain_nn::{Block, Context, MicroBatch};
use hpctrain_parallel::HostUnits;

/// A block of embedding tables on the host, with the copies of rows to the device and back.
pub struct HostEmbedding<B: Kernels> {
    backend: B,
    cpu: Cpu,
    block: Box<dyn Block<Cpu>>,
    /// `None` if the device's buffers are host memory.
    copies: Option<Arc<dyn ComputeOrderedCopies>>,
    /// The pinned buffer, allocated with the first rows, and again when there are more.
    slot: Option<Slot>,
    /// Size of the slot in words.
    words: usize,
    /// Bytes entered in the memory statistics.
    bytes: usize,
}

impl<B: Kernels> HostEmbedding<B> {
    /// Creates an embedding of `block`, computed by `cpu` for the device `backend`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn new(backend: &B, cpu: Cpu, block: Box<dyn Block<Cpu>>) -> Result<Self> {
        let (backend, copies) = (backend.clone(), backend.copy_streams()?);
        Ok(Self { backend, cpu, block, copies, slot: None, words: 0, bytes: 0 })
    }

    /// Looks up the rows of a micro-batch and starts to copy them to the device. Work that is
    /// submitted to the compute stream afterwards sees them. Takes the turn of `tables`.
    ///
    /// # Errors
    /// Returns an error if memory runs out, or if the device or an all-gather of parameters fails.
    pub fn forward(&mut self, tables: &mut HostUnits, micro: &MicroBatch<B>) -> Result<B::Buf> {
        let _span = span(ActivityKind::Forward, Some(&tables.name()));
        let rows = match tables {
            HostUnits::Sparse(tables) => tables.rows(&micro.host_ids)?,
            HostUnits::Dense(units) => {
                let micro = self.micro(micro)?;
                let cx =
                    Context { backend: &self.cpu, micro: &micro, training: None, tensor: None };
                let none = self.cpu.alloc(MemoryKind::Activations, 0)?;
                let rows = self.block.forward(&cx, units.params(0)?, &none)?.0;
                units.release();
                rows
            }
        };
        let mut input = self.backend.alloc(MemoryKind::Activations, rows.len())?;
        self.send(&rows, &mut input)?;
        self.count();
        Ok(input)
    }

    /// Adds the gradient of the rows of a micro-batch to that of the tables. `virtual_rank_end` is
    /// set at the end of a virtual rank, and true for the last one; the gradient is then final.
    ///
    /// # Errors
    /// Returns an error if [`HostEmbedding::forward`] does, or if a reduction cannot be started.
    pub fn backward(
        &mut self,
        tables: &mut HostUnits,
        micro: &MicroBatch<B>,
        gradient: B::Buf,
        virtual_rank_end: Option<bool>,
    ) -> Result<()> {
        let span = span(ActivityKind::Backward, Some(&tables.name()));
        let gradient = self.receive(gradient)?;
        match tables {
            HostUnits::Sparse(tables) => {
                tables.add_gradient(&micro.host_ids, gradient.as_slice(), virtual_rank_end);
            }
            HostUnits::Dense(units) => {
                let micro = self.micro(micro)?;
                let cx =
                    Context { backend: &self.cpu, micro: &micro, training: None, tensor: None };
                let (params, grads) = units.params_and_grads(0)?;
                let none = self.cpu.alloc(MemoryKind::Activations, 0)?;
                self.block.backward(&cx, params, grads, &none, vec![], gradient)?;
                drop(span);
                units.release();
                if let Some(last) = virtual_rank_end {
                    units.virtual_rank_done(0, last)?;
                    units.start_reductions()?;
                }
            }
        }
        self.count();
        Ok(())
    }

    /// Returns a micro-batch of the host's ids only.
    fn micro(&self, micro: &MicroBatch<B>) -> Result<MicroBatch<Cpu>> {
        let parts = SampleFields { ids: &micro.host_ids[..], ..SampleFields::default() };
        MicroBatch::upload(&self.cpu, parts, micro.samples, micro.time, micro.first)
    }

    fn copies(&self) -> Result<Arc<dyn ComputeOrderedCopies>> {
        self.copies.clone().ok_or_else(|| Error::internal("the device has no copies"))
    }

    /// Returns a slot of at least `words` words.
    fn slot(&mut self, words: usize) -> Result<&mut Slot> {
        if words > self.words || self.slot.is_none() {
            // The old slot is freed first.
            self.slot = None;
            self.slot = Some(match &self.copies {
                Some(copies) => Slot::new(&**copies, words)?,
                None => Slot::from_pinned(Box::new(vec![0.0; words])),
            });
            self.words = words;
        }
        self.slot.as_mut().ok_or_else(|| Error::internal("no slot was allocated"))
    }

    /// Starts to copy rows to the device, converted to its type.
    fn send(&mut self, rows: &CpuBuf, to: &mut B::Buf) -> Result<()> {
        let cpu = self.cpu.clone();
        let is_narrow = self.backend.has_master_weights();
        match B::comm_buffer(to, 0..rows.len())? {
            CommBuffer::Host(to) => to.copy_from_slice(rows.as_slice()),
            CommBuffer::Device(memory, _) => {
                // Waits for the previous rows, which were sent long ago.
                let words = self.slot(memory.words())?.memory()?;
                match is_narrow {
                    true => cpu.round_to_bf16(rows.as_slice(), words),
                    false => words[..rows.len()].copy_from_slice(rows.as_slice()),
                }
                let copies = self.copies()?;
                // The buffer may reuse memory that earlier kernels still read.
                copies.after_compute()?;
                self.slot(memory.words())?.upload(&*copies, &[(memory, 0)])?;
                copies.before_compute()?;
            }
        }
        Ok(())
    }

    /// Copies the gradient of rows to the host, after compute has written it.
    fn receive(&mut self, mut gradient: B::Buf) -> Result<CpuBuf> {
        let len = B::len(&gradient);
        let mut rows = self.cpu.alloc(MemoryKind::Activations, len)?;
        let is_narrow = self.backend.has_master_weights();
        match B::comm_buffer(&mut gradient, 0..len)? {
            CommBuffer::Host(from) => rows.as_mut_slice().copy_from_slice(from),
            CommBuffer::Device(memory, _) => {
                let copies = self.copies()?;
                copies.after_compute()?;
                let slot = self.slot(memory.words())?;
                slot.download(&*copies, &[(memory, 0)])?;
                let words = slot.memory()?;
                match is_narrow {
                    true => widen(&bytemuck::cast_slice(words)[..len], rows.as_mut_slice()),
                    false => rows.as_mut_slice().copy_from_slice(&words[..len]),
                }
            }
        }
        Ok(rows)
    }

    /// Enters the host's memory in the device's memory statistics. The host's pool never shrinks.
    fn count(&mut self) {
        let now = self.cpu.memory_stats().total_peak() + self.words * size_of::<f32>();
        self.backend.memory_stats().record_resize(MemoryKind::Offloaded, self.bytes, now);
        self.bytes = now;
    }
}

impl<B: Kernels> Drop for HostEmbedding<B> {
    fn drop(&mut self) {
        self.backend.memory_stats().record_free(MemoryKind::Offloaded, self.bytes);
    }
}

/// Converts bf16 to f32.
fn widen(from: &[u16], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, bits)| *to = f32::from_bits(u32::from(*bits) << 16));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine, micro_batches, on_threads, train_round};
    use hpctrain_comm::Comm;
    use hpctrain_config::{Environment, ResolvedConfig, Sources, load, resolve};
    use hpctrain_data::Batch;
    use hpctrain_parallel::ControlFlags;
    use hpctrain_parallel::Progress;

    const TABLES: &str = "{kind='embedding_tables', ids=[5, 3, 9], width=4";
    const BEHIND: &str =
        "{kind='dot_interaction'}, {kind='dense', units=3}, {kind='tanh'}, {kind='dense', units=1}";

    fn plan(ranks: usize, settings: &[&str]) -> ResolvedConfig {
        let common = "model.kind=layers loss.kind=mse precision.dtype=f32 batch.global=16 run.steps=3 lr_schedule.warmup=0 \
                      parallel.virtual_ranks=4 optimizer.lr=0.05 optimizer.ema=0.5 comm.algorithm=halving-doubling";
        let overrides: Vec<String> =
            common.split(' ').chain(settings.iter().copied()).map(String::from).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        resolve(config, &Environment { ranks, threads: 1, vocabulary: None, on_gpu: true }).unwrap()
    }

    /// Parameters and state of every tensor after three steps, by name and buffer, and the loss of
    /// each step.
    type Outcome = (Vec<(String, usize, Vec<u32>)>, Vec<u64>);

    fn outcome(ranks: usize, settings: &[&str]) -> Outcome {
        let plan = plan(ranks, settings);
        let outcomes = on_threads(ranks, |comm| outcome_of_rank(comm, &plan)).unwrap();
        let losses = outcomes[0].1.clone();
        let mut all = std::collections::BTreeMap::<(String, usize), Vec<(usize, Vec<u32>)>>::new();
        for (name, part, start, bits) in outcomes.into_iter().flat_map(|(tensors, _)| tensors) {
            all.entry((name, part)).or_default().push((start, bits));
        }
        let mut tensors = vec![];
        for ((name, part), mut pieces) in all {
            pieces.sort();
            tensors.push((name, part, pieces.into_iter().flat_map(|(_, bits)| bits).collect()));
        }
        (tensors, losses)
    }

    /// Pieces of parameters and state of a rank: the tensor's name, the buffer, the first element
    /// and the values as bits.
    type Pieces = Vec<(String, usize, usize, Vec<u32>)>;

    /// Returns the pieces that a rank has after three steps, and the loss of each step.
    fn outcome_of_rank(comm: &Comm<Cpu>, plan: &ResolvedConfig) -> Result<(Pieces, Vec<u64>)> {
        let backend = Cpu::new(1);
        let (mut engine, _) = engine(comm, plan, backend.clone(), None)?;
        let stage = engine.model.sharded.stage().clone();
        let mut progress = Progress::default();
        let mut losses = vec![];
        let virtual_ranks =
            plan.virtual_ranks_of_rank(engine.model.sharded.data().rank())[0].clone();
        for step in 0..3 {
            let of_virtual_rank = |virtual_rank: &usize| {
                let first = *virtual_rank as u64 * plan.virtual_rank_samples;
                (first..first + plan.virtual_rank_samples).step_by(plan.micro as usize)
            };
            let mut samples = virtual_ranks.iter().flat_map(of_virtual_rank);
            let round = train_round(
                plan,
                &mut engine,
                || {
                    let batch = batch(plan, samples.next().unwrap_or_default(), step);
                    micro_batches::upload(&backend, &batch, 1, 0, &stage)
                },
                &mut progress,
                ControlFlags::empty,
            )?;
            losses.push(round.steps[0].loss.to_bits());
        }
        let mut tensors = vec![];
        for unit in engine.model.sharded.owned()? {
            for (part, values) in std::iter::once(unit.params).chain(unit.state).enumerate() {
                let mut host = vec![0.0; unit.range.len()];
                values.read(&mut host)?;
                for piece in unit.layout.pieces(unit.range.clone()) {
                    let bits = host[piece.of_owned.clone()].iter().map(|x| x.to_bits()).collect();
                    tensors.push((piece.tensor.name.clone(), part, piece.of_tensor.start, bits));
                }
            }
        }
        Ok((tensors, losses))
    }

    /// Returns the micro-batch of step `step` that starts at sample `first`.
    fn batch(plan: &ResolvedConfig, first: u64, step: u64) -> Batch {
        let features = plan.samples.sizes(1).features as u64;
        let positions = first..first + plan.micro;
        let number = |i: u64| (i * 2_654_435_761 + step * 97) % 1009;
        let ids = positions
            .clone()
            .flat_map(|i| [number(i) % 5, 5 + number(i + 50) % 3, 8 + number(i + 90) % 9]);
        let features = positions.clone().flat_map(|i| (0..features).map(move |k| i * 7 + k));
        let parts = SampleFields {
            ids: ids.map(|id| id as u32).collect(),
            features: features.map(|i| number(i) as f32 / 1009.0).collect(),
            values: positions.clone().map(|i| (i % 3) as f32).collect(),
            ..SampleFields::default()
        };
        Batch { positions, parts }
    }

    /// Embeddings on the host give the same bits as on the device, which is a CPU here.
    #[test]
    fn a_host_has_the_bits_of_its_device() {
        let numbers = format!(
            "model.layers=[{TABLES}, dense=[{{kind='dense', units=4}}, {{kind='relu'}}]}}, {BEHIND}]"
        );
        let without = format!("model.layers=[{TABLES}}}, {BEHIND}]");
        for (layers, input, clip) in [
            (&without, "model.input=[0]", "optimizer.grad_clip=0.01"),
            // Next to numeric inputs the tables are a separate unit, so the norm differs in its
            // last bits.
            (&numbers, "model.input=[2]", "optimizer.grad_clip=0"),
        ] {
            let network = [layers.as_str(), input, clip];
            let here = outcome(1, &network);
            assert_eq!(here.0.iter().filter(|(name, ..)| name.contains(".tables.")).count(), 3 * 4);
            for (ranks, layout) in [
                (1, &["batch.micro=2"][..]),
                (1, &["batch.micro=4", "parallel.recompute=true"]),
                (2, &["parallel.zero=0"]),
                (2, &["parallel.zero=1"]),
                (4, &["parallel.zero=2"]),
                (4, &["parallel.zero=3", "batch.micro=1"]),
                (4, &["parallel.zero=3", "parallel.shard=2", "parallel.prefetch=0"]),
            ] {
                let micro = layout.iter().copied().filter(|setting| setting.starts_with("batch."));
                let want = match micro.collect::<Vec<_>>()[..] {
                    [] => here.clone(),
                    [micro] => outcome(1, &[&network[..], &[micro]].concat()),
                    _ => unreachable!("one size of micro-batches"),
                };
                let got =
                    outcome(ranks, &[&network[..], layout, &["model.place.tables=host"]].concat());
                assert!(
                    got == want,
                    "{layers} on {ranks} ranks with {layout:?}: {:?} and {:?}",
                    got.1,
                    want.1
                );
            }
        }
    }

    /// The layouts in which tables with sparse updates must have the same bits.
    const SPARSE_LAYOUTS: [(usize, &[&str]); 10] = [
        (1, &[]),
        (2, &["parallel.zero=0"]),
        (2, &["parallel.zero=0", "parallel.tables=table-wise"]),
        (2, &["parallel.zero=1"]),
        (3, &["parallel.zero=0"]),
        (3, &["parallel.zero=3", "parallel.tables=replicated"]),
        (4, &["parallel.zero=2"]),
        (4, &["parallel.zero=3"]),
        (4, &["parallel.zero=3", "parallel.shard=2", "parallel.tables=row-wise"]),
        (4, &["parallel.zero=1", "parallel.tables=table-wise"]),
    ];

    /// Tables of which the batches contain a part of the rows.
    const LARGE: &str = "model.layers=[{kind='embedding_tables', ids=[5, 3, 40], width=4}, {kind='dot_interaction'},          {kind='dense', units=3}, {kind='tanh'}, {kind='dense', units=1}]";

    fn sparse_outcome(ranks: usize, settings: &[&str]) -> Outcome {
        let network = [LARGE, "model.input=[0]", "optimizer.ema=0", "model.place.tables=host"];
        outcome(ranks, &[&network[..], settings].concat())
    }

    #[test]
    fn sparse_updates_have_the_bits_of_dense_ones() {
        for rule in [
            &["optimizer.kind=adagrad", "optimizer.weight_decay=0"][..],
            &["optimizer.kind=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0"],
        ] {
            let settings = [rule, &["optimizer.grad_clip=0", "batch.micro=2"]].concat();
            // The buffer of a momentum of 0 contains the last gradient, which no update reads.
            let used = |(mut tensors, losses): Outcome| {
                tensors.retain(|(_, part, _)| *part == 0 || rule[0] == "optimizer.kind=adagrad");
                (tensors, losses)
            };
            let settings = &settings[..];
            let dense = used(sparse_outcome(1, &[settings, &["optimizer.tables=dense"]].concat()));
            for (ranks, layout) in SPARSE_LAYOUTS {
                let got = used(sparse_outcome(ranks, &[settings, layout].concat()));
                assert!(got == dense, "{rule:?} on {ranks} ranks with {layout:?}");
            }
        }
    }

    /// The norm of the whole gradient and lazy updates do not depend on the ranks either.
    #[test]
    fn lazy_updates_and_clipping_have_the_same_bits_on_all_ranks() {
        // After each micro-batch, gradients of other units are reduced in another order.
        let by_micro_batches: (usize, &[&str]) =
            (4, &["parallel.zero=3", "parallel.reduce=micro", "parallel.tables=table-wise"]);
        for rule in [
            &["optimizer.tables=sparse", "optimizer.kind=adamw"],
            &["optimizer.tables=sparse", "optimizer.kind=sgd"],
        ] {
            let settings = [&rule[..], &["optimizer.grad_clip=0.01", "batch.micro=4"]].concat();
            let alone = sparse_outcome(1, &settings);
            for (ranks, layout) in SPARSE_LAYOUTS.into_iter().chain([by_micro_batches]) {
                let got = sparse_outcome(ranks, &[&settings[..], layout].concat());
                assert!(got == alone, "{rule:?} on {ranks} ranks with {layout:?}");
            }
            let dense = sparse_outcome(1, &[&settings[..], &["optimizer.tables=dense"]].concat());
            assert!(dense != alone, "decay changes rows that the batch does not contain");
        }
    }
}
