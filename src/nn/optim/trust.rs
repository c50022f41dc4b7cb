//! Trust ratios of LAMB and LARS, from norms of whole tensors that may be sharded over ranks.

use super::{Update, UpdateRule};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{AdamW, Kernels};

/// Two squared norms of a tensor, or of a part of it: of its parameters, and of its step (LAMB) or
/// gradient (LARS).
pub type SquaredNorms<T> = [T; 2];

impl UpdateRule {
    /// Returns true if the step of each matrix is scaled by norms of the whole matrix.
    pub fn is_layerwise(&self) -> bool {
        matches!(self, UpdateRule::Lamb { .. } | UpdateRule::Lars { .. })
    }

    /// Returns the squared norms of a part of a tensor, from the same ranges as
    /// [`UpdateRule::update`] takes. It changes nothing.
    ///
    /// # Errors
    /// Returns an error if the device fails, or if the optimizer is neither LAMB nor LARS.
    pub fn squared_norms<'a, B: Kernels>(
        &self,
        backend: &B,
        update: Update,
        grad: B::View<'a>,
        state: &[B::View<'a>],
        params: B::View<'a>,
    ) -> Result<SquaredNorms<B::Scalar>> {
        let Update { lr, weight_decay, step, grad_scale, .. } = update;
        let compared = match (*self, state) {
            (UpdateRule::Lamb { beta1, beta2, eps }, &[m, v]) => {
                let constants = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
                backend.adamw_step_squares(constants, grad, m, v, params)?
            }
            (UpdateRule::Lars { .. }, _) => backend.sum_squares(grad)?,
            _ => return Err(Error::internal("only LAMB and LARS have trust ratios")),
        };
        Ok([backend.sum_squares(params)?, compared])
    }

    /// Returns the trust ratio of a tensor with these squared norms, or 1 if one of the norms is 0.
    pub fn trust_ratio(
        &self,
        squares: SquaredNorms<f64>,
        weight_decay: f32,
        grad_scale: f32,
    ) -> f32 {
        let [norm, compared] = squares.map(f64::sqrt);
        if norm == 0.0 || compared == 0.0 {
            return 1.0;
        }
        let factor = match *self {
            UpdateRule::Lars { trust_ratio: trust, .. } => {
                f64::from(trust) * norm
                    / (compared * f64::from(grad_scale) + f64::from(weight_decay) * norm)
            }
            _ => norm / compared,
        };
        factor as f32
    }
}
