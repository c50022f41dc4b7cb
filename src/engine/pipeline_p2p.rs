//! Point-to-point messages between neighbouring pipeline stages: activations go to the next stage,
//! and their gradients come back.

use hpctrain_base::error::Result;
use hpctrain_comm::{Group, Pending};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_parallel::Flow;

/// The connections to the previous and the next stage.
pub struct PipelineP2p<B: Kernels> {
    /// The ranks of all stages that compute the same data.
    group: Group<B>,
    /// Elements per row of this stage's input, and of its output.
    input: usize,
    output: usize,
}

impl<B: Kernels> PipelineP2p<B> {
    /// Creates the connections of a stage with `input` elements per row of its input, and `output`
    /// per row of its output.
    pub fn new(group: Group<B>, input: usize, output: usize) -> Self {
        Self { group, input, output }
    }

    /// Starts to receive a message of `rows` rows: `rows` × `input` elements for activations,
    /// `rows` × `output` for gradients. `about` describes it in messages.
    ///
    /// # Errors
    /// Returns an error if memory runs out.
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

    /// Starts to send a message. The communication thread returns the buffer to the pool; if the
    /// send fails, so does the next request.
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
