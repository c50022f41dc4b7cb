//! Optimizer updates of parameters.

use super::checksum::UpdateChecksums;
use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// One AdamW update (Loshchilov and Hutter, 2019): decoupled weight decay, bias-corrected moments.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// The learning rate of this step.
    pub lr: f32,
    /// The decay of the first moment.
    pub beta1: f32,
    /// The decay of the second moment.
    pub beta2: f32,
    /// The constant added to the root of the second moment.
    pub eps: f32,
    /// The decoupled weight decay.
    pub weight_decay: f32,
    /// The number of this update, from 1, for the bias correction.
    pub step: u64,
    /// The factor on the gradient, for clipping.
    pub grad_scale: f32,
}

/// One SGD update with momentum, optionally Nesterov's, and coupled (L2) weight decay.
#[derive(Debug, Clone, Copy)]
pub struct Sgd {
    /// The learning rate of this step.
    pub lr: f32,
    /// The decay of the momentum buffer; 0 is plain SGD.
    pub momentum: f32,
    /// Whether to look ahead along the momentum.
    pub nesterov: bool,
    /// The L2 weight decay, added to the gradient.
    pub weight_decay: f32,
    /// The factor on the gradient, for clipping.
    pub grad_scale: f32,
}

/// Elementwise update rules with one state buffer or two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Elementwise {
    /// Adam (Kingma and Ba, 2015) with coupled (L2) weight decay; both moments are its state.
    Adam {
        /// The decay of the first moment.
        beta1: f32,
        /// The decay of the second moment.
        beta2: f32,
        /// The constant added to the root of the second moment.
        eps: f32,
    },
    /// Adagrad (Duchi, Hazan and Singer, 2011); the sum of squares is its state.
    Adagrad {
        /// The constant added to the root of the sum.
        eps: f32,
    },
    /// RMSProp (Tieleman and Hinton, 2012) with momentum; mean square and momentum are its state.
    RmsProp {
        /// The decay of the mean square.
        alpha: f32,
        /// The constant added to its root.
        eps: f32,
        /// The decay of the momentum; 0 disables it.
        momentum: f32,
    },
    /// Lion (Chen et al., 2023) with decoupled weight decay; the moment is its state.
    Lion {
        /// The weight of the moment in the step.
        beta1: f32,
        /// The decay of the moment.
        beta2: f32,
    },
}

impl Elementwise {
    /// Returns the number of state buffers.
    pub fn states(self) -> usize {
        match self {
            Elementwise::Adam { .. } | Elementwise::RmsProp { .. } => 2,
            Elementwise::Adagrad { .. } | Elementwise::Lion { .. } => 1,
        }
    }
}

/// One update by an elementwise rule.
#[derive(Debug, Clone, Copy)]
pub struct ElementwiseUpdate {
    /// The rule.
    pub rule: Elementwise,
    /// The learning rate of this step.
    pub lr: f32,
    /// The weight decay.
    pub weight_decay: f32,
    /// The number of this update, from 1, for Adam's bias correction.
    pub step: u64,
    /// The factor on the gradient, for clipping.
    pub grad_scale: f32,
}

/// Optimizer updates of parameters.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait OptimizerOps: Backend {
    /// Updates `p`, `m` and `v` of a contiguous range from its gradient; also writes the new `p` to
    /// `copy`, if given, rounded to its type, and the checksums of all buffers that change to
    /// `checksums`, if given.
    #[expect(clippy::too_many_arguments, reason = "one for each buffer")]
    fn adamw(
        &self,
        update: AdamW,
        grad: Self::View<'_>,
        m: Self::ViewMut<'_>,
        v: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        checksums: Option<&mut UpdateChecksums<Self::Scalar>>,
    ) -> Result<()>;
    /// Computes `Σ u²` in f64, summed in fixed chunks, where `u` is the step that
    /// [`OptimizerOps::adamw`] would subtract from every parameter at a learning rate of one.
    /// Changes nothing.
    fn adamw_step_squares(
        &self,
        update: AdamW,
        grad: Self::View<'_>,
        m: Self::View<'_>,
        v: Self::View<'_>,
        p: Self::View<'_>,
    ) -> Result<Self::Scalar>;
    /// Updates `p` and `m` of a contiguous range from its gradient; `copy` and `checksums` as in
    /// [`OptimizerOps::adamw`].
    fn sgd(
        &self,
        update: Sgd,
        grad: Self::View<'_>,
        m: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        checksums: Option<&mut UpdateChecksums<Self::Scalar>>,
    ) -> Result<()>;
    /// Updates the moving average `y += rate·(x - y)`, both f32; `copy` and `checksums` as in
    /// [`OptimizerOps::adamw`].
    fn update_average(
        &self,
        rate: f32,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        checksums: Option<&mut UpdateChecksums<Self::Scalar>>,
    ) -> Result<()>;
    /// Updates `p` and the state of a contiguous range from its gradient; `second` is empty if the
    /// rule has one state buffer. `copy` and `checksums` as in [`OptimizerOps::adamw`].
    #[expect(clippy::too_many_arguments, reason = "one for each buffer")]
    fn elementwise_update(
        &self,
        update: ElementwiseUpdate,
        grad: Self::View<'_>,
        first: Self::ViewMut<'_>,
        second: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        checksums: Option<&mut UpdateChecksums<Self::Scalar>>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of AdamW's update, which also writes `copy` elements.
    pub fn adamw(len: usize, copy: usize) -> Self {
        Self::new("adamw", copy).with_shape([len]).with_f32_elements(7 * len)
    }

    /// Returns the cost of SGD's update, which also writes `copy` elements.
    pub fn sgd(len: usize, copy: usize) -> Self {
        Self::new("sgd", copy).with_shape([len]).with_f32_elements(5 * len)
    }

    /// Returns the cost of the squared norm of AdamW's step.
    pub fn adamw_step_squares(len: usize) -> Self {
        Self::new("adamw, step's norm", 0).with_shape([len]).with_f32_elements(4 * len)
    }

    /// Returns the cost of a moving average, which also writes `copy` elements.
    pub fn update_average(len: usize, copy: usize) -> Self {
        Self::new("average", copy).with_shape([len]).with_f32_elements(3 * len)
    }

    /// Returns the cost of an elementwise rule's update, which also writes `copy` elements.
    pub fn elementwise_update(update: ElementwiseUpdate, len: usize, copy: usize) -> Self {
        Self::new("update", copy)
            .with_shape([len])
            .with_f32_elements((3 + 2 * update.rule.states()) * len)
    }
}
