//! The tests that every device passes: each kernel against f64 arithmetic at awkward sizes. They return their results, so that a
//! device can compare the bits of two runs.
//!
//! Only tests of the crates of devices use it.

#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "tests: their names say what they show, and a failure is the test's failure"
)]

pub mod activation;
pub mod attention;
pub mod channel;
pub mod classifier;
pub mod columns;
pub mod common;
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

/// A test of each operation on one device: `$stamp!` makes them, of the pairs of name and test that it is given, and of those
/// of all operations but products, whose tests differ with the precision.
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
            digests: $crate::digest::digests,
            dropout: $crate::dropout::dropouts,
            activations: $crate::activation::activations,
            softmax: $crate::softmax::softmaxes,
            windows: $crate::window::windows,
            columns: $crate::columns::columns,
            pairs: $crate::pairs::pairs,
            channels: $crate::channel::channels,
            classifiers: $crate::classifier::classifiers,
            classifier_parts: $crate::classifier::classifier_parts,
            regressions: $crate::regression::regressions,
        }
    };
}
