//! The computations of layers, with known shapes.

use super::{
    activation::ActivationLayer, channel_norm::ChannelNorm, conv::Conv, dense::Dense,
    dense_features::DenseFeatures, dot_interaction::Interaction, dropout::DropoutLayer,
    embedding::Embedding, norm::LayerNorm,
};
use super::{
    embedding_tables::EmbeddingTables, pool::PoolLayer, residual::Residual, softmax::Softmax,
};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::Tensor;
use hpctrain_device::Kernels;

/// Numbers of elements per sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Elements of the input.
    pub input: usize,
    /// Elements of the output.
    pub output: usize,
    /// Elements saved for the backward, without the input.
    pub kept: usize,
    /// Saved elements that are f32 with any compute type, which `kept` does not count.
    pub saved_f32: usize,
    /// Peak of temporary elements, without input, output and saved elements.
    pub scratch: usize,
}

/// A slice of a unit: the order of its tensors ([`Tensor::order`]) and its number of elements.
pub type Slice = (u8, usize);

/// The computation of a layer. It is given its parameters and their gradients as one view for each
/// of its [`Op::slices`].
pub trait Op {
    /// Returns the parameters.
    fn tensors(&self) -> Vec<Tensor> {
        vec![]
    }

    /// Returns the slices of its parameters: one for each tensor, unless consecutive tensors are
    /// used as one.
    fn slices(&self) -> Vec<Slice> {
        self.tensors().iter().map(|tensor| (tensor.order(), tensor.len())).collect()
    }

    /// Returns the number of buffers that a forward saves for its backward.
    fn saved_buffers(&self) -> usize {
        0
    }

    /// Returns its numbers of elements per sample.
    fn sizes(&self) -> LayerSizes;

    /// Returns the FLOPs of the forward's matmuls per sample.
    fn flops(&self) -> u64 {
        0
    }

    /// Returns the output and [`Op::kept`] saved buffers.
    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)>;

    /// Accumulates the gradients of the parameters. Returns the gradient of the input, or an
    /// arbitrary buffer unless `wants_input`.
    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf>;
}

/// Arguments of a backward.
pub struct BackwardArgs<'a, 'p, 'g, B: Kernels> {
    /// The parameters.
    pub params: &'a [B::View<'p>],
    /// The gradients of the parameters.
    pub grads: &'a mut [B::ViewMut<'g>],
    /// Whether this is the first backward, see [`crate::Grads::first`].
    pub first: bool,
    /// The input of the forward.
    pub x: &'a B::Buf,
    /// The buffers that the forward saved.
    pub kept: Vec<B::Buf>,
    /// The gradient of the output.
    pub dy: B::Buf,
    /// Whether the gradient of the input is needed.
    pub needs_input_grad: bool,
}

/// Any layer.
#[derive(Debug, Clone, PartialEq)]
pub enum LayerOp {
    Dense(Dense),
    Conv(Conv),
    Pool(PoolLayer),
    Norm(LayerNorm),
    Channels(ChannelNorm),
    Drop(DropoutLayer),
    Function(ActivationLayer),
    Softmax(Softmax),
    Embedding(Embedding),
    Tables(EmbeddingTables),
    DenseFeatures(DenseFeatures),
    Interaction(Interaction),
    Residual(Residual),
}

macro_rules! each {
    ($step:expr, $op:ident => $call:expr) => {
        match $step {
            LayerOp::Dense($op) => $call,
            LayerOp::Conv($op) => $call,
            LayerOp::Pool($op) => $call,
            LayerOp::Norm($op) => $call,
            LayerOp::Channels($op) => $call,
            LayerOp::Drop($op) => $call,
            LayerOp::Function($op) => $call,
            LayerOp::Softmax($op) => $call,
            LayerOp::Embedding($op) => $call,
            LayerOp::Tables($op) => $call,
            LayerOp::DenseFeatures($op) => $call,
            LayerOp::Interaction($op) => $call,
            LayerOp::Residual($op) => $call,
        }
    };
}

impl Op for LayerOp {
    fn tensors(&self) -> Vec<Tensor> {
        each!(self, op => op.tensors())
    }

    fn slices(&self) -> Vec<Slice> {
        each!(self, op => op.slices())
    }

    fn saved_buffers(&self) -> usize {
        each!(self, op => op.saved_buffers())
    }

    fn sizes(&self) -> LayerSizes {
        each!(self, op => op.sizes())
    }

    fn flops(&self) -> u64 {
        each!(self, op => op.flops())
    }

    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)> {
        each!(self, op => op.forward(cx, params, x))
    }

    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf> {
        each!(self, op => op.backward(cx, back))
    }
}
