//! The operations a device must know, one file each: shape, contract, work, and a test that any device passes. A device implements
//! the trait of an operation in its file of the same name.
//!
//! Shape letters: b batch, t time (context), h heads, d width, v vocabulary; *rows* are b·t.
//! "Adds" means the result is accumulated into the output, "overwrites" that it replaces it.

pub mod activation;
pub mod attention;
pub mod channel;
pub mod classifier;
pub mod columns;
pub mod convolution;
pub mod digest;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod linear;
pub mod norm;
pub mod optimizer;
pub mod pairs;
pub mod regression;
pub mod rotary;
pub mod softmax;
pub mod swiglu;
pub mod window;

pub use activation::{Activation, ActivationOps};
pub use attention::{Attention, AttentionOps};
pub use channel::{ChannelOps, Channels};
pub use classifier::{ClassifierOps, CrossEntropy, CrossEntropyPart, LogitsPart, LossWeights};
pub use columns::{Columns, ColumnsOps};
pub use convolution::{Convolution, ConvolutionOps};
pub use digest::{Audit, DigestOps};
pub use dropout::{Dropout, DropoutOps};
pub use elementwise::ElementwiseOps;
pub use embedding::EmbeddingOps;
pub use linear::{Gemm, Linear, LinearOps};
pub use norm::{Norm, NormOps};
pub use optimizer::{AdamW, Elements, Elementwise, OptimizerOps, Sgd};
pub use pairs::{Pairs, PairsOps};
pub use regression::{Deviation, Regression, RegressionOps};
pub use rotary::{Rotary, RotaryOps};
pub use softmax::SoftmaxOps;
pub use swiglu::SwigluOps;
pub use window::{Window, WindowOps};

/// Arithmetic on a device's buffers: all operations. A device that has them says so by an empty implementation.
///
/// All results are a function of shapes and values alone: never of the number of threads or of launch order.
/// Lengths of windows must match the shapes; a mismatch is a bug and panics. A bias window of length
/// zero means "no bias".
///
/// # Errors
/// Operations fail if the device does, or has no memory left for their temporary buffers.
pub trait Kernels:
    ActivationOps
    + AttentionOps
    + ChannelOps
    + ClassifierOps
    + ColumnsOps
    + ConvolutionOps
    + DigestOps
    + DropoutOps
    + ElementwiseOps
    + EmbeddingOps
    + LinearOps
    + NormOps
    + OptimizerOps
    + PairsOps
    + RegressionOps
    + RotaryOps
    + SoftmaxOps
    + SwigluOps
    + WindowOps
{
}
