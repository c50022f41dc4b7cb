//! The constants of an update, and the names of the optimizer state.

use super::local_sgd::OuterOptimizer;
use hpctrain_base::error::Error;
use hpctrain_nn::optim::{EMA, GroupRun, OUTER_MOMENTUM, Update, UpdateRule};

/// The constants of one update.
#[derive(Debug, Clone, Copy)]
pub struct Hyper {
    /// The learning rate.
    pub lr: f32,
    /// The weight decay of tensors that decay, decoupled or coupled depending on the rule.
    pub weight_decay: f32,
    /// The number of the update, from 1.
    pub step: u64,
    /// The factor on the gradient, from clipping.
    pub grad_scale: f32,
}

impl Hyper {
    /// Returns the update of a part, with this trust ratio.
    pub fn update_of(self, part: &GroupRun, trust: f32) -> Update {
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

/// Returns the names of the buffers of optimizer state: those of the rule, then the EMA if there is
/// one, then the momentum of the outer optimizer if it has momentum.
pub fn state_names(
    rule: Option<UpdateRule>,
    average: Option<f32>,
    outer: Option<OuterOptimizer>,
) -> Vec<&'static str> {
    let of_rule = rule.map_or(&[][..], |rule| rule.state()).iter().copied();
    let outer = outer.filter(|outer| outer.momentum > 0.0);
    of_rule.chain(average.map(|_| EMA)).chain(outer.map(|_| OUTER_MOMENTUM)).collect()
}

/// Returns the error for parameters that no buffer holds.
pub fn missing_parameters() -> Error {
    Error::internal("no buffer holds the parameters")
}
