//! Comparisons with reference numbers from PyTorch and with finite differences: kernels, layers,
//! networks, optimizers, Hugging Face files.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod chunked_loss;
mod gradients;
mod huggingface;
mod layers;
mod losses;
mod networks;
mod optimizers;
