//! The constants of an update, and the names of the state that it changes.

use super::local_sgd::OuterOptimizer;
use hpctrain_base::error::Error;
use hpctrain_nn::optim::{AVERAGE, GroupRun, OUTER_MOMENTUM, Update, UpdateRule};

/// Constants of one update.
#[derive(Debug, Clone, Copy)]
pub struct Hyper {
    /// Learning rate.
    pub lr: f32,
    /// Weight decay of tensors that decay, decoupled or coupled as the rule has it.
    pub weight_decay: f32,
    /// Number of the update, from 1.
    pub step: u64,
    /// Factor on the gradient: the clip.
    pub grad_scale: f32,
}

impl Hyper {
    /// The update of a part, with this factor on its step.
    pub fn of(self, part: &GroupRun, trust: f32) -> Update {
        let Hyper { lr, weight_decay, step, grad_scale } = self;
        Update {
            lr: lr * part.lr_factor,
            weight_decay: part.decay(weight_decay),
            step,
            grad_scale,
            trust,
        }
    }
}

/// Names of the buffers of state: the rule's; after them the average's, if one is kept; then the
/// outer step's, if it has momentum.
pub fn state_names(
    rule: Option<UpdateRule>,
    average: Option<f32>,
    outer: Option<OuterOptimizer>,
) -> Vec<&'static str> {
    let of_rule = rule.map_or(&[][..], |rule| rule.state()).iter().copied();
    let outer = outer.filter(|outer| outer.momentum > 0.0);
    of_rule.chain(average.map(|_| AVERAGE)).chain(outer.map(|_| OUTER_MOMENTUM)).collect()
}

/// The error of parameters that no buffer holds.
pub fn nowhere() -> Error {
    Error::internal("parameters are nowhere")
}
