//! Automatic differentiation in reverse mode (Linnainmaa, 1970): a forward is written once, on a
//! [`Tape`], and the backward follows from it.
//!
//! A [`Module`] is a block by its forward alone: [`block`] makes a [`Block`](super::Block) of it.
//! Custom losses and metrics are forwards as well ([`LossFunction`](super::loss::LossFunction)).
//! Every operation of the autograd tape is one of the device's kernels, so a module that composes
//! the same kernels as a block written by hand has the same bits.
//!
//! # How it works
//!
//! The forward of a block runs on a autograd tape that computes, and keeps the values that
//! backwards of its operations read. Values that none reads are freed when the forward drops its
//! last [`Var`] of them. Between forward and backward only these buffers exist, as for any block;
//! with recomputation not even they. The backward runs the same forward again on a autograd tape
//! that records shapes and computes nothing, and goes through its operations in reverse. A forward
//! must therefore be a function of shapes alone, never of values, which a autograd tape does not
//! show.
//!
//! The memory of a block is known from a run on shapes: forward and backward allocate and free what
//! they would on a device, and a meter counts.
//!
//! ```
//! use hpctrain_base::error::Result;
//! use hpctrain_base::layout::{Init, Tensor};
//! use hpctrain_device::{Activation, Kernels};
//! use hpctrain_nn::autograd::{self, Module, Tape, Var};
//! use hpctrain_nn::gradcheck;
//!
//! /// `y = x + silu(x·Wᵀ)`.
//! struct Residual(usize);
//!
//! impl Module for Residual {
//!     fn name(&self) -> String {
//!         "residual".into()
//!     }
//!
//!     fn tensors(&self) -> Vec<Tensor> {
//!         vec![Tensor::new("residual.weight", &[self.0, self.0], Init::Normal(0.02))]
//!     }
//!
//!     fn input_per_row(&self) -> usize {
//!         self.0
//!     }
//!
//!     fn forward<B: Kernels>(
//!         &self,
//!         tape: &mut Tape<'_, B>,
//!         params: &[Var<B>],
//!         x: &Var<B>,
//!     ) -> Result<Var<B>> {
//!         let h = tape.linear(x, &params[0], None)?;
//!         let h = tape.activation(&h, Activation::Silu)?;
//!         tape.add(x, &h)
//!     }
//! }
//!
//! let checked = gradcheck::block(&*autograd::block(Residual(6)), 4, 5)?;
//! assert_eq!(checked[0].tensor, "residual.weight");
//! # Ok::<(), hpctrain_base::error::Error>(())
//! ```

mod backward;
mod block;
mod forward;
mod operation;
pub(crate) mod rows;
mod tape;
#[cfg(test)]
mod tests;
mod tracked;

pub use block::{Module, block};
pub use operation::Targets;
pub use tape::{Tape, Var};
