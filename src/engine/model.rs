//! A network with its parameters, and its forward pass for inference.

use std::ops::Range;

use super::chunked_loss::{RowChunk, chunks};
use super::host_embedding::HostEmbedding;
use super::pipeline_p2p::PipelineP2p;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_nn::loss::Objective;
use hpctrain_nn::{Blocks, Context, KvCache, MicroBatch};
use hpctrain_parallel::{Flow, HostUnits, Sharded};

/// A network with its parameters, ready to compute. In a pipeline, only this rank's stage.
pub struct Model<B: Kernels> {
    /// The device.
    pub backend: B,
    /// The blocks of the stage.
    pub blocks: Blocks<B>,
    /// The network's loss and metrics.
    pub objective: Objective<B>,
    /// The parameters of the stage; in training, gradients and optimizer state as well.
    pub sharded: Sharded<B>,
    /// Whether every block of the network, in all stages, supports a KV cache.
    supports_kv_cache: bool,
    /// The first block of the network, if it is an embedding on the host.
    pub(super) host_embedding: Option<HostEmbedding<B>>,
    /// Rows that the last block computes at once; 0 means all.
    pub(super) loss_chunk_rows: usize,
    pub(super) p2p: PipelineP2p<B>,
}

impl<B: Kernels> Model<B> {
    /// Creates the model of the stage of `sharded` of a network of `blocks`.
    pub fn new(
        backend: B,
        mut blocks: Blocks<B>,
        objective: Objective<B>,
        sharded: Sharded<B>,
    ) -> Self {
        let units = sharded.stage().units.clone();
        let width = |block: usize| blocks.get(block).map_or(0, |block| block.input_per_row());
        let p2p =
            PipelineP2p::new(sharded.pipeline().clone(), width(units.start), width(units.end));
        let supports_kv_cache = blocks.iter().all(|block| block.supports_kv_cache());
        let objective = objective.with_output_blocks(&blocks);
        blocks.truncate(units.end);
        blocks.drain(..units.start);
        Self {
            backend,
            blocks,
            objective,
            sharded,
            supports_kv_cache,
            host_embedding: None,
            loss_chunk_rows: 0,
            p2p,
        }
    }

    /// Adds an embedding on the host as the first block, with its parameters.
    #[must_use]
    pub(super) fn with_host_embedding(
        self,
        tables: HostEmbedding<B>,
        parameters: HostUnits,
    ) -> Self {
        Self {
            host_embedding: Some(tables),
            sharded: self.sharded.with_host_units(parameters),
            ..self
        }
    }

    /// Returns the input of the first block on the device: the rows of an embedding on the host, or
    /// nothing, if the block reads the data itself.
    pub(super) fn input(&mut self, micro: &MicroBatch<B>) -> Result<B::Buf> {
        match &mut self.host_embedding {
            Some(tables) => tables.forward(self.sharded.host_units()?, micro),
            None => self.backend.alloc(MemoryKind::Activations, 0),
        }
    }

    /// Computes the last block and the loss in chunks of `rows` rows, if the block works
    /// [row by row](hpctrain_nn::Block::is_row_by_row); 0 means all rows at once.
    #[must_use]
    pub fn with_loss_chunk_rows(mut self, rows: usize) -> Self {
        let is_by_rows = self.sharded.stage().is_last()
            && self.blocks.last().is_some_and(|last| last.is_row_by_row());
        self.loss_chunk_rows = if is_by_rows { rows } else { 0 };
        self
    }

    /// Returns the first chunk of rows for the last block, unless it computes all at once.
    pub(super) fn first_chunk(&self, rows: usize) -> Option<Range<usize>> {
        chunks(rows, self.loss_chunk_rows).next().filter(|piece| piece.len() < rows)
    }

    /// Computes the output for a micro-batch, without training: numbers or logits, grouped by this
    /// rank's virtual tensor ranks. Collective over the pipeline stages; only the last returns it.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn output(&mut self, micro: &MicroBatch<B>) -> Result<Option<B::Buf>> {
        self.pass(micro, None, self.blocks.len())
    }

    /// Takes part in the messages about parameters of a forward that other data-parallel ranks
    /// compute with [`Model::output`], without computing one. Collective over the pipeline stages.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn skip_output(&mut self) -> Result<()> {
        self.sharded.begin_forward();
        self.skip_forward()
    }

    /// Takes the turns of all blocks in a forward without computing them.
    pub(super) fn skip_forward(&mut self) -> Result<()> {
        if self.host_embedding.is_some() {
            self.sharded.host_units()?.skip_forward()?;
        }
        (0..self.blocks.len()).try_for_each(|unit| self.sharded.skip_turn(unit))
    }

    /// Creates KV caches for a sequence of at most `positions` positions, for
    /// [`Model::output_cached`]. Returns `None` if some block does not support a KV cache.
    pub fn kv_caches(&self, positions: usize) -> Option<Vec<KvCache<B>>> {
        self.supports_kv_cache
            .then(|| self.blocks.iter().map(|_| KvCache::new(positions)).collect())
    }

    /// Computes the output of a language model for positions of one sequence that follow those in
    /// the caches. The logits equal those of the whole sequence, but only the new positions are
    /// computed.
    ///
    /// # Errors
    /// Returns an error if [`Model::output`] does, or if the caches have no room for the positions.
    pub fn output_cached(
        &mut self,
        micro: &MicroBatch<B>,
        caches: &mut [KvCache<B>],
    ) -> Result<Option<B::Buf>> {
        self.pass(micro, Some(caches), self.blocks.len())
    }

    /// Computes the forward of all stages before this one, and of its first `blocks` blocks.
    fn pass(
        &mut self,
        micro: &MicroBatch<B>,
        mut caches: Option<&mut [KvCache<B>]>,
        blocks: usize,
    ) -> Result<Option<B::Buf>> {
        self.sharded.begin_forward();
        let tensor = self.sharded.tensor().cloned();
        let mut x = match self.sharded.stage().is_first() {
            true => self.input(micro)?,
            false => {
                let about = "samples to evaluate";
                let rows = self.sharded.slices().rows(micro.rows()).len();
                self.p2p.receive(&self.backend, Flow::Activations, rows, about)?.wait()?
            }
        };
        let cx = Context { backend: &self.backend, micro, training: None, tensor: tensor.as_ref() };
        for (unit, block) in self.blocks.iter().enumerate().take(blocks) {
            let params = self.sharded.params(unit)?;
            x = match caches.as_deref_mut().map(|caches| caches.get_mut(unit)) {
                None => block.forward(&cx, params, &x)?.0,
                Some(Some(cache)) => block.forward_cached(&cx, params, &x, cache)?,
                Some(None) => {
                    return Err(Error::internal("the KV cache belongs to another network"));
                }
            };
            self.sharded.release();
        }
        if self.sharded.stage().is_last() {
            return Ok(Some(x));
        }
        self.p2p.send(Flow::Activations, x);
        Ok(None)
    }

    /// Returns sums over the predictions of a micro-batch, as [`Objective::measure`] does: the
    /// loss, metrics, and the loss of each of `parts`. Collective over the pipeline stages; only
    /// the last returns them.
    ///
    /// # Errors
    /// Returns an error if [`Model::output`] does.
    pub fn measure(
        &mut self,
        micro: &MicroBatch<B>,
        parts: &[Range<usize>],
    ) -> Result<Option<Vec<f64>>> {
        if self.first_chunk(micro.rows()).is_some() {
            return self.measure_in_chunks(micro, parts);
        }
        let output = self.output(micro)?;
        let tensor = self.sharded.tensor();
        output
            .map(|mut output| {
                self.objective.measure(&self.backend, tensor, micro, &mut output, parts)
            })
            .transpose()
    }

    fn measure_in_chunks(
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
        for rows in chunks(micro.rows(), self.loss_chunk_rows) {
            let within = |at: usize| at.clamp(rows.start, rows.end) - rows.start;
            let parts: Vec<_> =
                parts.iter().map(|part| within(part.start)..within(part.end)).collect();
            let RowChunk { micro, x } = RowChunk::copy_rows(&self.backend, micro, &x, rows)?;
            let (mut output, _) =
                self.blocks[last].forward(&cx.with_micro_batch(&micro), params, &x)?;
            let chunk_sums = self.objective.measure(
                &self.backend,
                tensor.as_ref(),
                &micro,
                &mut output,
                &parts,
            )?;
            sums.resize(chunk_sums.len(), 0.0);
            sums.iter_mut().zip(chunk_sums).for_each(|(sum, more)| *sum += more);
        }
        self.sharded.release();
        Ok(Some(sums))
    }

    /// Copies an output of `rows` rows to the host, without the padding that its rows may have, and
    /// grouped by this rank's virtual tensor ranks.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn download(&self, output: &B::Buf, rows: usize) -> Result<Vec<f32>> {
        self.objective.download(&self.backend, output, rows, 0)
    }

    /// Copies the logits of all classes of the last of `rows` rows to the host. Collective over the
    /// tensor-parallel ranks.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn last_logits(&self, output: &B::Buf, rows: usize) -> Result<Vec<f32>> {
        let mine = self.objective.download(&self.backend, output, rows, rows - 1)?;
        let Some(tensor) = self.sharded.tensor() else { return Ok(mine) };
        let all = tensor.gather_bytes(bytemuck::cast_slice(&mine).to_vec()).wait()?;
        Ok(all
            .iter()
            .flat_map(|bytes| bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)))
            .collect())
    }

    /// Sends a number from the last stage to all stages.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn broadcast_from_last_stage(&self, number: Option<u32>) -> Result<u32> {
        let mine = number.map_or(vec![], |number| number.to_le_bytes().to_vec());
        let all = self.sharded.pipeline().gather_bytes(mine).wait()?;
        let last = all.last().and_then(|bytes| bytes.first_chunk());
        last.map(|bytes| u32::from_le_bytes(*bytes))
            .ok_or_else(|| Error::comm("the last stage sent no number"))
    }
}
