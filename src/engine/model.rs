//! A network with its parameters, and its output outside training.

use crate::backend::{Kernels, MemoryKind};
use crate::error::Result;
use crate::nn::loss::Objective;
use crate::nn::{Blocks, Context, Micro};
use crate::parallel::{self, Sharded};

/// A network with its parameters, ready to compute.
pub struct Model<B: Kernels> {
    /// The device.
    pub backend: B,
    /// The network.
    pub blocks: Blocks<B>,
    /// Its loss and metrics.
    pub objective: Objective<B>,
    /// Its parameters; in training, gradients and optimizer state as well.
    pub sharded: Sharded<B>,
}

impl<B: Kernels> Model<B> {
    /// The unit that each block borrows.
    pub(super) fn borrows(&self) -> Vec<Option<usize>> {
        self.blocks.iter().map(|block| block.borrows()).collect()
    }

    /// The output for a micro-batch, outside training: logits of classes, or numbers.
    ///
    /// # Errors
    /// The device or a gather failed.
    pub fn output(&mut self, micro: &Micro<B>) -> Result<B::Buf> {
        self.sharded.begin(parallel::forward(&self.borrows()), false);
        let cx = Context { backend: &self.backend, micro, training: None };
        let mut x = self.backend.alloc(MemoryKind::Activations, 0)?;
        for (unit, block) in self.blocks.iter().enumerate() {
            let params = self.sharded.params(unit, block.borrows())?;
            x = block.forward(&cx, params, &x)?.0;
            self.sharded.release();
        }
        Ok(x)
    }

    /// Sums over a micro-batch's predictions, outside training, as [`Objective::measure`] has them: the loss first.
    ///
    /// # Errors
    /// As [`Model::output`].
    pub fn measure(&mut self, micro: &Micro<B>) -> Result<Vec<f64>> {
        let mut output = self.output(micro)?;
        self.objective.measure(&self.backend, micro, &mut output)
    }
}
