//! Updates of parameters.

use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{Element, View, ViewMut};
use super::{Cuda, Scalar};
use hpctrain_base::error::Result;
use hpctrain_device::{
    AdamW, Backend, Elementwise, ElementwiseUpdate, KernelCost, OptimizerOps, Sgd, UpdateChecksums,
};

impl OptimizerOps for Cuda {
    fn adamw(
        &self,
        u: AdamW,
        grad: View<'_>,
        m: ViewMut<'_>,
        v: ViewMut<'_>,
        p: ViewMut<'_>,
        copy: Option<ViewMut<'_>>,
        audit: Option<&mut UpdateChecksums<Scalar>>,
    ) -> Result<()> {
        let _launch = self
            .profile_launch(KernelCost::adamw(grad.len, copy.as_ref().map_or(0, |copy| copy.len)));
        let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
        let rate = (f64::from(u.lr) / correct(u.beta1)) as f32;
        let root = (1.0 / correct(u.beta2).sqrt()) as f32;
        let decay = 1.0 - u.lr * u.weight_decay;
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [grad.into(), (&m).into(), (&v).into(), (&p).into(), to, Arg::long(grad.len)];
        let constants = [rate, root, decay, u.beta1, u.beta2, u.eps, u.grad_scale].map(Arg::Float);
        self.with_checksums(
            audit,
            [
                <Self as Backend>::shared(&m),
                <Self as Backend>::shared(&v),
                <Self as Backend>::shared(&p),
            ],
            || {
                self.launch(
                    "adamw.cu",
                    "adamw",
                    Grid::over(grad.len.div_ceil(8)),
                    &[&args[..], &constants].concat(),
                )
            },
        )
    }

    fn adamw_step_squares(
        &self,
        u: AdamW,
        grad: View<'_>,
        m: View<'_>,
        v: View<'_>,
        p: View<'_>,
    ) -> Result<Scalar> {
        let _launch = self.profile_launch(KernelCost::adamw_step_squares(grad.len));
        let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
        let rate = (1.0 / correct(u.beta1)) as f32;
        let root = (1.0 / correct(u.beta2).sqrt()) as f32;
        self.sum_chunks(p.len, |grid, partial| {
            let args = [grad.into(), m.into(), v.into(), p.into(), partial, Arg::long(p.len)];
            let constants =
                [rate, root, u.weight_decay, u.beta1, u.beta2, u.eps, u.grad_scale].map(Arg::Float);
            self.launch("lamb.cu", "step_squares", grid, &[&args[..], &constants].concat())
        })
    }

    fn sgd(
        &self,
        u: Sgd,
        grad: View<'_>,
        m: ViewMut<'_>,
        p: ViewMut<'_>,
        copy: Option<ViewMut<'_>>,
        audit: Option<&mut UpdateChecksums<Scalar>>,
    ) -> Result<()> {
        let _launch = self
            .profile_launch(KernelCost::sgd(grad.len, copy.as_ref().map_or(0, |copy| copy.len)));
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [grad.into(), (&m).into(), (&p).into(), to, Arg::long(grad.len)];
        let nesterov = Arg::Int(i32::from(u.nesterov));
        let constants =
            [u.lr.into(), u.momentum.into(), nesterov, u.weight_decay.into(), u.grad_scale.into()];
        self.with_checksums(
            audit,
            [<Self as Backend>::shared(&m), <Self as Backend>::shared(&p)],
            || {
                self.launch(
                    "sgd.cu",
                    "sgd",
                    Grid::over(grad.len),
                    &[&args[..], &constants].concat(),
                )
            },
        )
    }

    fn update_average(
        &self,
        rate: f32,
        x: View<'_>,
        y: ViewMut<'_>,
        copy: Option<ViewMut<'_>>,
        audit: Option<&mut UpdateChecksums<Scalar>>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::update_average(
            x.len,
            copy.as_ref().map_or(0, |copy| copy.len),
        ));
        assert!(
            x.len == y.len && x.element == Element::F32 && y.element == Element::F32,
            "an average"
        );
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [x.into(), (&y).into(), to, Arg::long(x.len), rate.into()];
        self.with_checksums(audit, [<Self as Backend>::shared(&y)], || {
            self.launch("lerp.cu", "approach", Grid::over(x.len), &args)
        })
    }

    fn elementwise_update(
        &self,
        u: ElementwiseUpdate,
        grad: View<'_>,
        first: ViewMut<'_>,
        second: ViewMut<'_>,
        p: ViewMut<'_>,
        copy: Option<ViewMut<'_>>,
        audit: Option<&mut UpdateChecksums<Scalar>>,
    ) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::elementwise_update(
            u,
            grad.len,
            copy.as_ref().map_or(0, |copy| copy.len),
        ));
        let correct = |beta: f32| 1.0 - f64::from(beta).powf(u.step as f64);
        // In the order of the kernel's arguments: rule, rate, root, decay, a, b, eps.
        let (rule, [rate, root, decay, a, b, eps]) = match u.rule {
            Elementwise::Adam { beta1, beta2, eps } => {
                let rate = (f64::from(u.lr) / correct(beta1)) as f32;
                (0, [rate, (1.0 / correct(beta2).sqrt()) as f32, u.weight_decay, beta1, beta2, eps])
            }
            Elementwise::Adagrad { eps } => (1, [u.lr, 0.0, u.weight_decay, 0.0, 0.0, eps]),
            Elementwise::RmsProp { alpha, eps, momentum } => {
                (2, [u.lr, 0.0, u.weight_decay, alpha, momentum, eps])
            }
            Elementwise::Lion { beta1, beta2 } => {
                (3, [u.lr, 0.0, 1.0 - u.lr * u.weight_decay, beta1, beta2, 0.0])
            }
        };
        let to = copy.as_ref().map_or(Arg::Pointer(0), Arg::from);
        let args = [
            grad.into(),
            (&first).into(),
            (&second).into(),
            (&p).into(),
            to,
            Arg::long(grad.len),
            Arg::Int(rule),
        ];
        let constants = [rate, root, decay, a, b, eps, u.grad_scale].map(Arg::Float);
        self.with_checksums(
            audit,
            [
                <Self as Backend>::shared(&first),
                <Self as Backend>::shared(&second),
                <Self as Backend>::shared(&p),
            ],
            || {
                self.launch(
                    "optimizer_elementwise.cu",
                    "elements",
                    Grid::over(grad.len),
                    &[&args[..], &constants].concat(),
                )
            },
        )
    }
}
