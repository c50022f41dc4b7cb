//! The operations that a device implements, one file each, with shape, contract and cost. A device
//! implements the trait of an operation in its file of the same name; `hpctrain-device-tests` has a
//! test of each that every device must pass.
//!
//! Shape letters: b batch, t time (context), h heads, d width, v vocabulary; *rows* are b·t.
//! "Adds" means the result is accumulated into the output, "overwrites" that it replaces it.

pub mod activation;
pub mod attention;
pub mod channel_norm;
pub mod checksum;
pub mod contrastive;
pub mod convolution;
pub mod cross_entropy;
pub mod dot_interaction;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod im2col_pool;
pub mod linear;
pub mod norm;
pub mod optimizer;
pub mod regression_loss;
pub mod rotary;
pub mod softmax;
pub mod strided_copy;
pub mod swiglu;

pub use activation::{Activation, ActivationOps};
pub use attention::{Attention, AttentionOps};
pub use channel_norm::{ChannelNormShape, ChannelOps};
pub use checksum::{DigestOps, UpdateChecksums};
pub use contrastive::{Contrastive, ContrastiveOps};
pub use convolution::{Convolution, ConvolutionOps};
pub use cross_entropy::{ClassifierOps, CrossEntropy, CrossEntropyPart, LogitsPart, LossWeights};
pub use dot_interaction::{DotInteraction, DotInteractionOps};
pub use dropout::{Dropout, DropoutOps};
pub use elementwise::ElementwiseOps;
pub use embedding::EmbeddingOps;
pub use im2col_pool::{Im2colShape, WindowOps};
pub use linear::{Gemm, Linear, LinearOps};
pub use norm::{Norm, NormOps};
pub use optimizer::{AdamW, Elementwise, ElementwiseUpdate, OptimizerOps, Sgd};
pub use regression_loss::{Regression, RegressionLoss, RegressionOps};
pub use rotary::{Rotary, RotaryOps};
pub use softmax::SoftmaxOps;
pub use strided_copy::{ColumnsOps, StridedCopy};
pub use swiglu::SwigluOps;

/// Arithmetic on a device's buffers: all operations. A device that implements all of them declares
/// so by an empty implementation.
///
/// All results are a function of shapes and values alone: never of the number of threads or of
/// launch order. Lengths of windows must match the shapes; a mismatch is a bug and panics. An empty
/// bias window means no bias.
///
/// # Errors
/// Operations return an error if the device fails, or has no memory for their temporary buffers.
pub trait Kernels:
    ActivationOps
    + AttentionOps
    + ChannelOps
    + ClassifierOps
    + ColumnsOps
    + ContrastiveOps
    + ConvolutionOps
    + DigestOps
    + DropoutOps
    + ElementwiseOps
    + EmbeddingOps
    + LinearOps
    + NormOps
    + OptimizerOps
    + DotInteractionOps
    + RegressionOps
    + RotaryOps
    + SoftmaxOps
    + SwigluOps
    + WindowOps
{
}
