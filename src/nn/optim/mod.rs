//! Optimizers: fused updates of a contiguous range, and learning-rate schedules.

mod group;
mod schedule;
mod trust;

use hpctrain_base::error::Result;
use hpctrain_device::{AdamW, Elementwise, ElementwiseUpdate, Kernels, Sgd, UpdateChecksums};

pub use group::{Group, GroupRun, group_runs};
pub use schedule::{LrDecay, Schedule};
pub use trust::SquaredNorms;

/// The name of the exponential moving average of the parameters among the state buffers, if there
/// is one.
pub const EMA: &str = "ema";

/// The name of the momentum of the outer optimizer among the state buffers, with local SGD.
pub const OUTER_MOMENTUM: &str = "outer_momentum";

/// An optimizer with its constants.
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
        /// Whether to use Nesterov momentum.
        nesterov: bool,
    },
    /// An optimizer that updates each element independently.
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
    /// whose gradient of each matrix is scaled to a fraction of the matrix's own norm.
    Lars {
        /// Decay of the momentum buffer.
        momentum: f32,
        /// Whether to use Nesterov momentum.
        nesterov: bool,
        /// The trust coefficient: the fraction of the matrix's norm to which the gradient is
        /// scaled.
        trust_ratio: f32,
    },
}

impl UpdateRule {
    /// Returns the names of the state buffers, each as long as the parameters.
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
    /// The learning rate.
    pub lr: f32,
    /// The weight decay of this range.
    pub weight_decay: f32,
    /// The number of the update, from 1.
    pub step: u64,
    /// The factor on the gradient, from gradient clipping.
    pub grad_scale: f32,
    /// The trust ratio of the tensor in LAMB and LARS, from [`UpdateRule::trust_ratio`].
    pub trust: f32,
}

impl UpdateRule {
    /// Updates the range `params` and the same range of every state buffer from the gradient. The
    /// new parameters are also written to `copy`, and checksums for the silent-data-corruption
    /// (SDC) check to the last argument, where these are given.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    #[expect(clippy::too_many_arguments, reason = "windows of an update")]
    pub fn update<B: Kernels>(
        &self,
        backend: &B,
        update: Update,
        grad: B::View<'_>,
        state: Vec<B::ViewMut<'_>>,
        params: B::ViewMut<'_>,
        copy: Option<B::ViewMut<'_>>,
        audit: Option<&mut UpdateChecksums<B::Scalar>>,
    ) -> Result<()> {
        let Update { lr, weight_decay, step, grad_scale, trust } = update;
        let mut state = state.into_iter();
        let mut next = || state.next().expect("one buffer for each name in `UpdateRule::state`");
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
                    return backend.elementwise_update(
                        update,
                        grad,
                        first,
                        next(),
                        params,
                        copy,
                        audit,
                    );
                }
                let (none, first) = B::split_at_mut(B::reborrow(&mut first), 0);
                backend.elementwise_update(update, grad, first, none, params, copy, audit)
            }
        }
    }
}
