//! Elementwise functions of one tensor: activations, and those of which losses are composed.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// An elementwise function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// max(x, 0).
    Relu,
    /// x where it is positive, else x times this slope (Maas, Hannun and Ng, 2013).
    LeakyRelu(f32),
    /// x·Φ(x) in its tanh form (Hendrycks and Gimpel, 2016).
    Gelu,
    /// x·σ(x).
    Silu,
    /// The hyperbolic tangent.
    Tanh,
    /// σ(x) = 1 / (1 + e⁻ˣ).
    Sigmoid,
    /// eˣ.
    Exp,
    /// The natural logarithm.
    Ln,
    /// x².
    Square,
    /// |x|, with slope 0 at 0.
    Abs,
    /// x times this number.
    Scale(f32),
    /// x plus this number.
    Shift(f32),
}

/// Names of a function in profiles, and of its kernels on a device that has one for each.
pub struct KernelNames {
    /// The name of the function in profiles.
    pub forward: &'static str,
    /// The name of its gradient in profiles.
    pub backward: &'static str,
    /// The name of its kernel.
    pub map: &'static str,
    /// The name of the kernel of its gradient.
    pub scale: &'static str,
}

macro_rules! names {
    ($name:literal) => {
        KernelNames {
            forward: $name,
            backward: concat!($name, ", backward"),
            map: concat!("map_", $name),
            scale: concat!("scale_", $name),
        }
    };
}

impl Activation {
    /// Returns the constant of a function that has one, for kernels that take it; zero for the
    /// others.
    pub fn parameter(self) -> f32 {
        match self {
            Activation::LeakyRelu(slope) => slope,
            Activation::Scale(number) | Activation::Shift(number) => number,
            _ => 0.0,
        }
    }

    /// Returns its names.
    pub fn names(self) -> KernelNames {
        match self {
            Activation::Relu => names!("relu"),
            Activation::LeakyRelu(_) => names!("leaky_relu"),
            Activation::Gelu => names!("gelu"),
            Activation::Silu => names!("silu"),
            Activation::Tanh => names!("tanh"),
            Activation::Sigmoid => names!("sigmoid"),
            Activation::Exp => names!("exp"),
            Activation::Ln => names!("ln"),
            Activation::Square => names!("square"),
            Activation::Abs => names!("abs"),
            Activation::Scale(_) => names!("scaled"),
            Activation::Shift(_) => names!("shifted"),
        }
    }
}

/// Elementwise activation functions.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ActivationOps: Backend {
    /// Computes `y = f(x)`; overwrites.
    fn activation(&self, f: Activation, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Computes `dy *= f'(x)` in place.
    fn activation_backward(
        &self,
        f: Activation,
        x: Self::View<'_>,
        dy: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of an activation function.
    pub fn activation(f: Activation, len: usize) -> Self {
        Self::new(f.names().forward, 2 * len).with_shape([len])
    }

    /// Returns the cost of its gradient in place.
    pub fn activation_backward(f: Activation, len: usize) -> Self {
        Self::new(f.names().backward, 3 * len).with_shape([len])
    }
}
