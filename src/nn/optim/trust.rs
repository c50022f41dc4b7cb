//! Scaling of a tensor's step in LAMB and LARS: by norms of the whole tensor, whose parts ranks may
//! share.

use super::{Update, UpdateRule};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{AdamW, Kernels};

/// Two numbers of a tensor, or of a part of it: the square of the norm of its parameters, and of
/// the norm that is compared with: LAMB's of the step, LARS' of the gradient.
pub type Pair<T> = [T; 2];

impl UpdateRule {
    /// Whether the step of each matrix is scaled by norms of the whole matrix.
    pub fn is_layerwise(&self) -> bool {
        matches!(self, UpdateRule::Lamb { .. } | UpdateRule::Lars { .. })
    }

    /// The squares of a part of a tensor, from the same windows as [`UpdateRule::update`] has,
    /// which stay as they are.
    ///
    /// # Errors
    /// The device failed, or the rule is none of these two.
    pub fn squares<'a, B: Kernels>(
        &self,
        backend: &B,
        update: Update,
        grad: B::View<'a>,
        state: &[B::View<'a>],
        params: B::View<'a>,
    ) -> Result<Pair<B::Scalar>> {
        let Update { lr, weight_decay, step, grad_scale, .. } = update;
        let compared = match (*self, state) {
            (UpdateRule::Lamb { beta1, beta2, eps }, &[m, v]) => {
                let constants = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
                backend.adamw_step_squares(constants, grad, m, v, params)?
            }
            (UpdateRule::Lars { .. }, _) => backend.sum_squares(grad)?,
            _ => return Err(Error::internal("a rule that scales no steps")),
        };
        Ok([backend.sum_squares(params)?, compared])
    }

    /// The factor on the step of a tensor with these squares; 1 where one of its norms is zero.
    pub fn trust(&self, squares: Pair<f64>, weight_decay: f32, grad_scale: f32) -> f32 {
        let [norm, compared] = squares.map(f64::sqrt);
        if norm == 0.0 || compared == 0.0 {
            return 1.0;
        }
        let factor = match *self {
            UpdateRule::Lars { trust, .. } => {
                f64::from(trust) * norm
                    / (compared * f64::from(grad_scale) + f64::from(weight_decay) * norm)
            }
            _ => norm / compared,
        };
        factor as f32
    }
}
