//! The messages between a stage of the pipeline and its neighbours: activations go to the next
//! stage, gradients of them come back.

use hpctrain_base::error::Result;
use hpctrain_comm::{Group, Pending};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_parallel::Flow;

/// The stages before and behind this one.
pub struct PipelineP2p<B: Kernels> {
    /// The stages that compute the same data.
    group: Group<B>,
    /// Elements of a row of this stage's input, and of its output.
    input: usize,
    output: usize,
}

impl<B: Kernels> PipelineP2p<B> {
    /// Of a stage with so many elements in a row of its input, and of its output.
    pub fn new(group: Group<B>, input: usize, output: usize) -> Self {
        Self { group, input, output }
    }

    /// Gets ready to receive a message of so many rows: shape rows × input for activations, rows ×
    /// output for gradients. `about` says for people which it is.
    ///
    /// # Errors
    /// Out of memory.
    pub fn receive(
        &self,
        backend: &B,
        flow: Flow,
        rows: usize,
        about: &str,
    ) -> Result<Pending<B::Buf>> {
        let (from, width) = match flow {
            Flow::Activations => (self.group.rank() - 1, self.input),
            Flow::Gradients => (self.group.rank() + 1, self.output),
        };
        let buf = backend.alloc(MemoryKind::Activations, rows * width)?;
        Ok(self
            .group
            .with_label(&format!("{} {about} from stage {from}", name(flow)).into())
            .recv(from, buf))
    }

    /// Starts to send a message. The communication thread gives its buffer back to the pool; if it
    /// fails, so does the next request.
    pub fn send(&self, flow: Flow, buf: B::Buf) {
        let to = match flow {
            Flow::Activations => self.group.rank() + 1,
            Flow::Gradients => self.group.rank() - 1,
        };
        drop(self.group.send(to, buf));
    }
}

fn name(flow: Flow) -> &'static str {
    match flow {
        Flow::Activations => "the activations of",
        Flow::Gradients => "the gradients of",
    }
}
