//! Tests that every device passes: each kernel is compared with f64 arithmetic at awkward sizes.
//! They return their results, so that a device can compare the bits of two runs.
//!
//! Only the tests of device crates use this crate.

#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "tests: their names say what they show, and a failure is the test's failure"
)]

pub mod activation;
pub mod attention;
pub mod channel_norm;
pub mod checksum;
pub mod common;
pub mod contrastive;
pub mod convolution;
pub mod cross_entropy;
pub mod dot_interaction;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod exact;
pub mod im2col_pool;
pub mod linear;
pub mod norm;
pub mod optimizer;
pub mod regression_loss;
pub mod rotary;
pub mod softmax;
pub mod strided_copy;
pub mod swiglu;

/// Instantiates the tests of all operations on one device: `$stamp!` is called with the given pairs
/// of name and test, followed by those of all operations except matmuls, whose tests depend on the
/// precision.
#[macro_export]
macro_rules! each_operation {
    ($stamp:ident! { $($of:tt)* }) => {
        $stamp! {
            $($of)*
            elementwise: $crate::elementwise::elementwise,
            norms: $crate::norm::norms,
            embeddings: $crate::embedding::embeddings,
            embedding_parts: $crate::embedding::embedding_parts,
            attention: $crate::attention::attentions,
            rotary: $crate::rotary::rotations,
            gates: $crate::swiglu::gates,
            optimizers: $crate::optimizer::optimizers,
            digests: $crate::checksum::digests,
            dropout: $crate::dropout::dropouts,
            activations: $crate::activation::activations,
            softmax: $crate::softmax::softmaxes,
            windows: $crate::im2col_pool::windows,
            columns: $crate::strided_copy::columns,
            pairs: $crate::dot_interaction::pairs,
            channels: $crate::channel_norm::channels,
            classifiers: $crate::cross_entropy::classifiers,
            classifier_parts: $crate::cross_entropy::classifier_parts,
            contrastive_losses: $crate::contrastive::contrastive_losses,
            regressions: $crate::regression_loss::regressions,
            exact_losses: $crate::exact::exact_losses,
        }
    };
}
