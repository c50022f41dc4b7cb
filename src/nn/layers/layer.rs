//! The computations of layers whose shapes are known.

use super::{
    activation::Function, channel_norm::ChannelNorm, conv::Conv, dense::Dense,
    dense_features::Numbers, dot_interaction::Interaction, dropout::DropoutLayer,
    embedding::Embedding, norm::LayerNorm,
};
use super::{embedding_tables::Tables, pool::PoolLayer, residual::Residual, softmax::Softmax};
use crate::Context;
use hpctrain_base::error::Result;
use hpctrain_base::layout::Tensor;
use hpctrain_device::Kernels;

/// Elements a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Of the input.
    pub input: usize,
    /// Of the output.
    pub output: usize,
    /// Kept between forward and backward, besides the input.
    pub kept: usize,
    /// As `kept`, of elements that are f32 with any compute type, and not counted there.
    pub exact: usize,
    /// Alive at once while it works, besides input, output and kept elements.
    pub scratch: usize,
}

/// A window of a unit: its tensors' place among all ([`Tensor::order`]), and its elements.
pub type Slice = (u8, usize);

/// The computation of a layer. Parameters and their gradients come as one window for each of its
/// [`Op::slices`].
pub trait Op {
    /// Parameters.
    fn tensors(&self) -> Vec<Tensor> {
        vec![]
    }

    /// Windows of its parameters: one for each tensor, unless it takes some that stand side by side
    /// as one.
    fn slices(&self) -> Vec<Slice> {
        self.tensors().iter().map(|tensor| (tensor.order(), tensor.len())).collect()
    }

    /// Buffers that a forward keeps for its backward.
    fn kept(&self) -> usize {
        0
    }

    /// Elements a sample.
    fn sizes(&self) -> LayerSizes;

    /// Multiplications and additions of a forward's matrix products, a sample.
    fn flops(&self) -> u64 {
        0
    }

    /// Output, and [`Op::kept`] buffers.
    fn forward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        params: &[B::View<'_>],
        x: &B::Buf,
    ) -> Result<(B::Buf, Vec<B::Buf>)>;

    /// Adds to the gradients of the parameters. Returns that of the input, or anything if nobody
    /// `wants_input`.
    fn backward<B: Kernels>(
        &self,
        cx: &Context<'_, B>,
        back: BackwardArgs<'_, '_, '_, B>,
    ) -> Result<B::Buf>;
}

/// Arguments of a backward.
pub struct BackwardArgs<'a, 'p, 'g, B: Kernels> {
    /// Parameters.
    pub params: &'a [B::View<'p>],
    /// Their gradients.
    pub grads: &'a mut [B::ViewMut<'g>],
    /// As [`crate::Grads::first`].
    pub first: bool,
    /// The input of the forward.
    pub x: &'a B::Buf,
    /// Buffers that the forward kept.
    pub kept: Vec<B::Buf>,
    /// Gradient of the output.
    pub dy: B::Buf,
    /// Whether the gradient of the input is of use.
    pub wants_input: bool,
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
    Function(Function),
    Softmax(Softmax),
    Embedding(Embedding),
    Tables(Tables),
    Numbers(Numbers),
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
            LayerOp::Numbers($op) => $call,
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

    fn kept(&self) -> usize {
        each!(self, op => op.kept())
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
