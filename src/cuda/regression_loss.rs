//! Losses of predicted values.

use super::Cuda;
use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{Element, View, ViewMut};
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, Regression, RegressionLoss, RegressionOps};

impl RegressionOps for Cuda {
    fn regression(
        &self,
        shape: Regression,
        predictions: ViewMut<'_>,
        targets: View<'_>,
        weights: View<'_>,
        losses: ViewMut<'_>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::regression(shape, weights.len));
        let Regression { rows, width, loss: by, scale, gradient } = shape;
        assert!(
            targets.element == Element::F32
                && targets.len == rows * width
                && predictions.len == rows * width
        );
        assert!(
            weights.len == 0 || weights.len == rows && weights.element == Element::F32,
            "{rows} weights"
        );
        // In the order of the kernel's enum.
        let (by, reach) = match by {
            RegressionLoss::Squared => (0, 0.0),
            RegressionLoss::Absolute => (1, 0.0),
            RegressionLoss::Huber(reach) => (2, reach),
            RegressionLoss::BinaryCrossEntropy => (3, 0.0),
            RegressionLoss::BinaryAccuracy => (4, 0.0),
        };
        let args = [(&predictions).into(), targets.into(), weights.into(), (&losses).into()];
        let rest = [
            rows.into(),
            width.into(),
            Arg::Int(by),
            reach.into(),
            scale.into(),
            Arg::Int(i32::from(gradient)),
        ];
        self.launch_for(
            predictions.element,
            "regression.cu",
            "regression",
            Grid::new(rows.div_ceil(4), 128),
            &[&args[..], &rest].concat(),
        )
    }
}
