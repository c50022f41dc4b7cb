//! Updates of parameters.

use super::checksum::Audit;
use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// One AdamW update (Loshchilov and Hutter, 2019): decoupled weight decay, bias-corrected moments.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Number of this update, from 1: for the bias correction.
    pub step: u64,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

/// One SGD update with momentum, optionally Nesterov's, and coupled (L2) weight decay.
#[derive(Debug, Clone, Copy)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the momentum buffer; 0 is plain SGD.
    pub momentum: f32,
    /// Look ahead along the momentum.
    pub nesterov: bool,
    /// L2 weight decay, added to the gradient.
    pub weight_decay: f32,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

/// Update rules that look at one element at a time, with one state buffer or two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Elementwise {
    /// Adam (Kingma and Ba, 2015) with coupled (L2) weight decay; both moments are its state.
    Adam {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
    },
    /// Adagrad (Duchi, Hazan and Singer, 2011); the sum of squares is its state.
    Adagrad {
        /// Added to the root of the sum.
        eps: f32,
    },
    /// RMSProp (Tieleman and Hinton, 2012) with momentum; mean square and momentum are its state.
    RmsProp {
        /// Decay of the mean square.
        alpha: f32,
        /// Added to its root.
        eps: f32,
        /// Decay of the momentum; 0 is none.
        momentum: f32,
    },
    /// Lion (Chen et al., 2023) with decoupled weight decay; the moment is its state.
    Lion {
        /// Weight of the moment in the step.
        beta1: f32,
        /// Decay of the moment.
        beta2: f32,
    },
}

impl Elementwise {
    /// State buffers.
    pub fn states(self) -> usize {
        match self {
            Elementwise::Adam { .. } | Elementwise::RmsProp { .. } => 2,
            Elementwise::Adagrad { .. } | Elementwise::Lion { .. } => 1,
        }
    }
}

/// One update by such a rule.
#[derive(Debug, Clone, Copy)]
pub struct ElementwiseUpdate {
    /// The rule.
    pub rule: Elementwise,
    /// Learning rate of this step.
    pub lr: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Number of this update, from 1: for Adam's bias correction.
    pub step: u64,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

/// Updates of parameters.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait OptimizerOps: Backend {
    /// Updates `p`, `m` and `v` of a contiguous range from its gradient; writes the new `p` to
    /// `copy` as well, if given, rounded to its type. With an audit the digests of all buffers that
    /// change go there.
    #[expect(clippy::too_many_arguments, reason = "one for each buffer")]
    fn adamw(
        &self,
        update: AdamW,
        grad: Self::View<'_>,
        m: Self::ViewMut<'_>,
        v: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        audit: Option<&mut Audit<Self::Scalar>>,
    ) -> Result<()>;
    /// `Σ u²` in f64, summed in fixed chunks, where `u` is the step that [`OptimizerOps::adamw`]
    /// would subtract from every parameter at a learning rate of one. Changes nothing.
    fn adamw_step_squares(
        &self,
        update: AdamW,
        grad: Self::View<'_>,
        m: Self::View<'_>,
        v: Self::View<'_>,
        p: Self::View<'_>,
    ) -> Result<Self::Scalar>;
    /// Updates `p` and `m` of a contiguous range from its gradient; `copy` and `audit` as in
    /// [`OptimizerOps::adamw`].
    fn sgd(
        &self,
        update: Sgd,
        grad: Self::View<'_>,
        m: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        audit: Option<&mut Audit<Self::Scalar>>,
    ) -> Result<()>;
    /// Moves every element of `y` by `rate` of the way to that of `x`: `y += rate·(x - y)`, both
    /// f32; `copy` as in [`OptimizerOps::adamw`].
    fn approach(
        &self,
        rate: f32,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        audit: Option<&mut Audit<Self::Scalar>>,
    ) -> Result<()>;
    /// Updates `p` and the state of a contiguous range from its gradient; `second` is empty where
    /// the rule has one state buffer. `copy` as in [`OptimizerOps::adamw`].
    #[expect(clippy::too_many_arguments, reason = "one for each buffer")]
    fn elements(
        &self,
        update: ElementwiseUpdate,
        grad: Self::View<'_>,
        first: Self::ViewMut<'_>,
        second: Self::ViewMut<'_>,
        p: Self::ViewMut<'_>,
        copy: Option<Self::ViewMut<'_>>,
        audit: Option<&mut Audit<Self::Scalar>>,
    ) -> Result<()>;
}

impl KernelCost {
    /// `AdamW`'s update; `copy` elements are written besides.
    pub fn adamw(len: usize, copy: usize) -> Self {
        Self::moves("adamw", copy).on([len]).exactly(7 * len)
    }

    /// SGD's update; `copy` elements are written besides.
    pub fn sgd(len: usize, copy: usize) -> Self {
        Self::moves("sgd", copy).on([len]).exactly(5 * len)
    }

    /// The squares of `AdamW`'s step.
    pub fn adamw_step_squares(len: usize) -> Self {
        Self::moves("adamw, step's norm", 0).on([len]).exactly(4 * len)
    }

    /// A running average; `copy` elements are written besides.
    pub fn approach(len: usize, copy: usize) -> Self {
        Self::moves("average", copy).on([len]).exactly(3 * len)
    }

    /// Another rule's update; `copy` elements are written besides.
    pub fn elements(update: ElementwiseUpdate, len: usize, copy: usize) -> Self {
        Self::moves("update", copy).on([len]).exactly((3 + 2 * update.rule.states()) * len)
    }
}
