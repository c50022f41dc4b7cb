//! Optimizers: fused updates of a contiguous range, and the learning rate's schedule.

mod group;
mod schedule;
mod trust;

use hpctrain_base::error::Result;
use hpctrain_device::{AdamW, Audit, Elementwise, ElementwiseUpdate, Kernels, Sgd};

pub use group::{Group, GroupRun, parts};
pub use schedule::{LrDecay, Schedule};
pub use trust::Pair;

/// Name of the running average of the parameters, where one is kept, among the buffers of state.
pub const AVERAGE: &str = "ema";

/// Name of the momentum of the outer step, where replicas train apart and have one, among the
/// buffers of state.
pub const OUTER_MOMENTUM: &str = "outer_momentum";

/// The update rule with its constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpdateRule {
    /// Adam with decoupled weight decay.
    AdamW {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
    },
    /// Stochastic gradient descent.
    Sgd {
        /// Decay of the momentum buffer.
        momentum: f32,
        /// Look ahead along the momentum.
        nesterov: bool,
    },
    /// One that looks at an element at a time.
    Elementwise(Elementwise),
    /// LAMB (You et al., "Large batch optimization for deep learning", 2020): AdamW whose step of
    /// each matrix is scaled to the matrix's own norm.
    Lamb {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
    },
    /// LARS (You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017): SGD
    /// whose gradient of each matrix is scaled to a part of the matrix's own norm.
    Lars {
        /// Decay of the momentum buffer.
        momentum: f32,
        /// Look ahead along the momentum.
        nesterov: bool,
        /// The part of the matrix's norm that the gradient is scaled to.
        trust: f32,
    },
}

impl UpdateRule {
    /// Names of the state buffers, each as long as the parameters.
    pub fn state(&self) -> &'static [&'static str] {
        match self {
            UpdateRule::AdamW { .. }
            | UpdateRule::Lamb { .. }
            | UpdateRule::Elementwise(Elementwise::Adam { .. }) => &["m", "v"],
            UpdateRule::Sgd { .. } | UpdateRule::Lars { .. } => &["momentum"],
            UpdateRule::Elementwise(Elementwise::Adagrad { .. }) => &["sum"],
            UpdateRule::Elementwise(Elementwise::RmsProp { .. }) => &["v", "momentum"],
            UpdateRule::Elementwise(Elementwise::Lion { .. }) => &["m"],
        }
    }
}

/// The values that change from step to step or from range to range.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// Learning rate.
    pub lr: f32,
    /// Weight decay of this range.
    pub weight_decay: f32,
    /// Number of the update, from 1.
    pub step: u64,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
    /// LAMB and LARS: the factor that [`UpdateRule::trust`] gives for the tensor.
    pub trust: f32,
}

impl UpdateRule {
    /// Updates the window `params` and the same window of every state buffer from the gradient. The
    /// new parameters go to `copy` as well, if there is one; digests of all that changes go to
    /// `audit`, if there is one.
    ///
    /// # Errors
    /// The device failed.
    #[expect(clippy::too_many_arguments, reason = "windows of an update")]
    pub fn update<B: Kernels>(
        &self,
        backend: &B,
        update: Update,
        grad: B::View<'_>,
        state: Vec<B::ViewMut<'_>>,
        params: B::ViewMut<'_>,
        copy: Option<B::ViewMut<'_>>,
        audit: Option<&mut Audit<B::Scalar>>,
    ) -> Result<()> {
        let Update { lr, weight_decay, step, grad_scale, trust } = update;
        let mut state = state.into_iter();
        let mut next = || state.next().expect("one window for each name in `Rule::state`");
        match *self {
            UpdateRule::AdamW { beta1, beta2, eps } => {
                let constants = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
                backend.adamw(constants, grad, next(), next(), params, copy, audit)
            }
            UpdateRule::Lamb { beta1, beta2, eps } => {
                let constants =
                    AdamW { lr: lr * trust, beta1, beta2, eps, weight_decay, step, grad_scale };
                backend.adamw(constants, grad, next(), next(), params, copy, audit)
            }
            UpdateRule::Sgd { momentum, nesterov } => backend.sgd(
                Sgd { lr, momentum, nesterov, weight_decay, grad_scale },
                grad,
                next(),
                params,
                copy,
                audit,
            ),
            UpdateRule::Lars { momentum, nesterov, .. } => {
                let weight_decay = trust * weight_decay;
                let grad_scale = trust * grad_scale;
                backend.sgd(
                    Sgd { lr, momentum, nesterov, weight_decay, grad_scale },
                    grad,
                    next(),
                    params,
                    copy,
                    audit,
                )
            }
            UpdateRule::Elementwise(rule) => {
                let update = ElementwiseUpdate { rule, lr, weight_decay, step, grad_scale };
                let mut first = next();
                if rule.states() == 2 {
                    return backend.elements(update, grad, first, next(), params, copy, audit);
                }
                let (none, first) = B::cut_mut(B::reborrow(&mut first), 0);
                backend.elements(update, grad, first, none, params, copy, audit)
            }
        }
    }
}
