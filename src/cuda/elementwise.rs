//! Fills, copies and sums.

use super::launch::Arg;
use super::launch_dims::Grid;
use super::memory::{Element, View, ViewMut};
use super::{Cuda, Scalar};
use hpctrain_base::error::Result;
use hpctrain_device::{ElementwiseOps, KernelCost};

impl Cuda {
    fn sum_of(&self, x: View<'_>, squares: bool) -> Result<Scalar> {
        assert_eq!(x.element, Element::F32, "sums are of f32");
        self.sum_chunks(x.len, |grid, partial| {
            let args = [x.into(), partial, Arg::long(x.len), Arg::Int(i32::from(squares))];
            self.launch("sum.cu", "sum_partial", grid, &args)
        })
    }

    /// Copies with conversion between the element types.
    fn convert(&self, x: View<'_>, y: &ViewMut<'_>) -> Result<()> {
        assert_eq!(x.len, y.len, "a copy");
        let name = match (x.element, y.element) {
            (from, to) if from == to => return self.copy_within(x, y),
            (Element::F32, _) => "narrow",
            (Element::Bf16, _) => "widen",
        };
        self.launch(
            "convert.cu",
            name,
            Grid::over(x.len.div_ceil(8)),
            &[x.into(), y.into(), Arg::long(x.len)],
        )
    }
}

impl ElementwiseOps for Cuda {
    fn zero(&self, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::zero(y.len));
        self.zero_view(&y)
    }

    fn copy(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::copy(x.len));
        self.convert(x, &y)
    }

    fn add(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::add(x.len));
        assert!(x.len == y.len && x.element == y.element, "a sum");
        let name = if x.element == Element::F32 { "add_f32" } else { "add" };
        self.launch(
            "add.cu",
            name,
            Grid::over(x.len.div_ceil(8)),
            &[x.into(), (&y).into(), Arg::long(x.len)],
        )
    }

    fn multiply(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let _launch = self.profile_launch(KernelCost::multiply(x.len));
        assert!(x.len == y.len && x.element == y.element, "a multiplication");
        let name = if x.element == Element::F32 { "multiply_f32" } else { "multiply" };
        self.launch(
            "multiply.cu",
            name,
            Grid::over(x.len.div_ceil(8)),
            &[x.into(), (&y).into(), Arg::long(x.len)],
        )
    }

    fn sum(&self, x: View<'_>) -> Result<Scalar> {
        let _launch = self.profile_launch(KernelCost::sum(x.len));
        self.sum_of(x, false)
    }

    fn sum_squares(&self, x: View<'_>) -> Result<Scalar> {
        let _launch = self.profile_launch(KernelCost::sum(x.len));
        self.sum_of(x, true)
    }
}
