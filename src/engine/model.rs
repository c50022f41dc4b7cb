//! A network with its parameters, and its output outside training.

use std::ops::Range;

use super::chunked_loss::{RowChunk, pieces};
use super::host_embedding::HostEmbedding;
use super::pipeline_p2p::PipelineP2p;
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::loss::Objective;
use hpctrain_nn::{Blocks, Context, KvCache, MicroBatch};
use hpctrain_parallel::{Flow, Sharded};

/// A network with its parameters, ready to compute: of a pipeline, this rank's stage.
pub struct Model<B: Kernels> {
    /// The device.
    pub backend: B,
    /// The blocks of the stage.
    pub blocks: Blocks<B>,
    /// The network's loss and metrics.
    pub objective: Objective<B>,
    /// The stage's parameters; in training, gradients and optimizer state as well.
    pub sharded: Sharded<B>,
    /// Whether every block of the network, of all stages, continues sequences.
    continues: bool,
    /// The network's first block, if the host computes it.
    pub(super) tables: Option<HostEmbedding<B>>,
    /// Rows of the last block that are computed at once; 0 are all.
    pub(super) rows_at_once: usize,
    pub(super) neighbours: PipelineP2p<B>,
}

impl<B: Kernels> Model<B> {
    /// The stage of `sharded` of a network of `blocks`.
    pub fn new(
        backend: B,
        mut blocks: Blocks<B>,
        objective: Objective<B>,
        sharded: Sharded<B>,
    ) -> Self {
        let units = sharded.stage().units.clone();
        let width = |block: usize| blocks.get(block).map_or(0, |block| block.input_per_row());
        let neighbours =
            PipelineP2p::new(sharded.pipeline().clone(), width(units.start), width(units.end));
        let continues = blocks.iter().all(|block| block.supports_kv_cache());
        let objective = objective.of_output(&blocks);
        blocks.truncate(units.end);
        blocks.drain(..units.start);
        Self {
            backend,
            blocks,
            objective,
            sharded,
            continues,
            tables: None,
            rows_at_once: 0,
            neighbours,
        }
    }

    /// The same behind tables that the host has, and their parameters.
    #[must_use]
    pub(super) fn with_tables(self, tables: HostEmbedding<B>, parameters: Sharded<Cpu>) -> Self {
        Self { tables: Some(tables), sharded: self.sharded.with_tables(parameters), ..self }
    }

    /// The input of the first block of the first stage: nothing, as it takes the data, or the rows
    /// of tables that the host has.
    pub(super) fn input(&mut self, micro: &MicroBatch<B>) -> Result<B::Buf> {
        match &mut self.tables {
            Some(tables) => tables.forward(self.sharded.tables()?, micro),
            None => self.backend.alloc(MemoryKind::Activations, 0),
        }
    }

    /// The same, which computes the last block and the loss of so many rows at a time, if it is one
    /// that works [row by row](hpctrain_nn::Block::is_row_by_row); 0 are all.
    #[must_use]
    pub fn with_logit_rows(mut self, rows: usize) -> Self {
        let is_by_rows = self.sharded.stage().is_last()
            && self.blocks.last().is_some_and(|last| last.is_row_by_row());
        self.rows_at_once = if is_by_rows { rows } else { 0 };
        self
    }

    /// The rows of a micro-batch that the last block takes first, unless it takes all at once.
    pub(super) fn first_piece(&self, rows: usize) -> Option<Range<usize>> {
        pieces(rows, self.rows_at_once).next().filter(|piece| piece.len() < rows)
    }

    /// The output for a micro-batch, outside training: numbers, or logits of classes, those of one
    /// virtual tensor rank of this rank after the other. Collective over the stages of the pipeline, of
    /// which the last has it.
    ///
    /// # Errors
    /// The device, or a message between ranks, failed.
    pub fn output(&mut self, micro: &MicroBatch<B>) -> Result<Option<B::Buf>> {
        self.pass(micro, None, self.blocks.len())
    }

    /// Memory for a sequence of so many positions at most, for [`Model::output_after`]; none if a
    /// block of the network does not continue sequences.
    pub fn past(&self, positions: usize) -> Option<Vec<KvCache<B>>> {
        self.continues.then(|| self.blocks.iter().map(|_| KvCache::new(positions)).collect())
    }

    /// As [`Model::output`] of a language model, of positions of one sequence that follow those
    /// that `past` knows: the logits that the whole sequence would give them, and the computation
    /// of its new positions alone.
    ///
    /// # Errors
    /// As [`Model::output`], or there is no room for more positions.
    pub fn output_after(
        &mut self,
        micro: &MicroBatch<B>,
        past: &mut [KvCache<B>],
    ) -> Result<Option<B::Buf>> {
        self.pass(micro, Some(past), self.blocks.len())
    }

    /// The output of the first `blocks` blocks: those of all stages before, and of this one.
    fn pass(
        &mut self,
        micro: &MicroBatch<B>,
        mut past: Option<&mut [KvCache<B>]>,
        blocks: usize,
    ) -> Result<Option<B::Buf>> {
        self.sharded.begin_forward();
        let tensor = self.sharded.tensor().cloned();
        let mut x = match self.sharded.stage().is_first() {
            true => self.input(micro)?,
            false => {
                let about = "samples to evaluate";
                let rows = self.sharded.slices().rows(micro.rows()).len();
                self.neighbours.receive(&self.backend, Flow::Activations, rows, about)?.wait()?
            }
        };
        let cx = Context { backend: &self.backend, micro, training: None, tensor: tensor.as_ref() };
        for (unit, block) in self.blocks.iter().enumerate().take(blocks) {
            let params = self.sharded.params(unit)?;
            x = match past.as_deref_mut().map(|past| past.get_mut(unit)) {
                None => block.forward(&cx, params, &x)?.0,
                Some(Some(past)) => block.forward_cached(&cx, params, &x, past)?,
                Some(None) => return Err(Error::internal("a past of another network")),
            };
            self.sharded.release();
        }
        if self.sharded.stage().is_last() {
            return Ok(Some(x));
        }
        self.neighbours.send(Flow::Activations, x);
        Ok(None)
    }

    /// Sums over a micro-batch's predictions, outside training, as [`Objective::measure`] has them:
    /// the loss first; that of each of `parts` last. As [`Model::output`], of the last stage.
    ///
    /// # Errors
    /// As [`Model::output`].
    pub fn measure(
        &mut self,
        micro: &MicroBatch<B>,
        parts: &[Range<usize>],
    ) -> Result<Option<Vec<f64>>> {
        if self.first_piece(micro.rows()).is_some() {
            return self.measure_in_pieces(micro, parts);
        }
        let output = self.output(micro)?;
        let tensor = self.sharded.tensor();
        output
            .map(|mut output| {
                self.objective.measure(&self.backend, tensor, micro, &mut output, parts)
            })
            .transpose()
    }

    fn measure_in_pieces(
        &mut self,
        micro: &MicroBatch<B>,
        parts: &[Range<usize>],
    ) -> Result<Option<Vec<f64>>> {
        let last = self.blocks.len() - 1;
        let Some(x) = self.pass(micro, None, last)? else { return Ok(None) };
        let tensor = self.sharded.tensor().cloned();
        let cx = Context { backend: &self.backend, micro, training: None, tensor: tensor.as_ref() };
        let params = self.sharded.params(last)?;
        let mut sums: Vec<f64> = vec![];
        for rows in pieces(micro.rows(), self.rows_at_once) {
            let within = |at: usize| at.clamp(rows.start, rows.end) - rows.start;
            let parts: Vec<_> =
                parts.iter().map(|part| within(part.start)..within(part.end)).collect();
            let RowChunk { micro, x } = RowChunk::cut(&self.backend, micro, &x, rows)?;
            let (mut output, _) = self.blocks[last].forward(&cx.of(&micro), params, &x)?;
            let of_piece = self.objective.measure(
                &self.backend,
                tensor.as_ref(),
                &micro,
                &mut output,
                &parts,
            )?;
            sums.resize(of_piece.len(), 0.0);
            sums.iter_mut().zip(of_piece).for_each(|(sum, more)| *sum += more);
        }
        self.sharded.release();
        Ok(Some(sums))
    }

    /// An output of `rows` rows on the host, without the padding that its rows may have; of tensor
    /// virtual ranks, those of this rank, one after the other.
    ///
    /// # Errors
    /// The device failed.
    pub fn download(&self, output: &B::Buf, rows: usize) -> Result<Vec<f32>> {
        self.objective.download(&self.backend, output, rows, 0)
    }

    /// Logits of the last of `rows` rows of an output, all classes; on the host. Collective over
    /// the ranks that compute slices of the same blocks.
    ///
    /// # Errors
    /// The device, or a message between ranks, failed.
    pub fn last_logits(&self, output: &B::Buf, rows: usize) -> Result<Vec<f32>> {
        let mine = self.objective.download(&self.backend, output, rows, rows - 1)?;
        let Some(tensor) = self.sharded.tensor() else { return Ok(mine) };
        let told = tensor.gather_bytes(bytemuck::cast_slice(&mine).to_vec()).wait()?;
        Ok(told
            .iter()
            .flat_map(|bytes| bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)))
            .collect())
    }

    /// A number that the last stage has, on all stages.
    ///
    /// # Errors
    /// A message between ranks failed.
    pub fn share(&self, number: Option<u32>) -> Result<u32> {
        let mine = number.map_or(vec![], |number| number.to_le_bytes().to_vec());
        let told = self.sharded.pipeline().gather_bytes(mine).wait()?;
        let last = told.last().and_then(|bytes| bytes.first_chunk());
        last.map(|bytes| u32::from_le_bytes(*bytes))
            .ok_or_else(|| Error::comm("the last stage sent no number"))
    }
}
