//! Functions of every element.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// A function of every element.
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
}

/// Names of a function: in profiles, and of its kernels on a device that has one for each.
pub(in crate::backend) struct Names {
    pub forward: &'static str,
    pub backward: &'static str,
    pub map: &'static str,
    pub scale: &'static str,
}

macro_rules! names {
    ($name:literal) => {
        Names {
            forward: $name,
            backward: concat!($name, ", backward"),
            map: concat!("map_", $name),
            scale: concat!("scale_", $name),
        }
    };
}

impl Activation {
    /// The constant of a function that has one, for kernels that take it; zero of the others.
    pub(in crate::backend) fn parameter(self) -> f32 {
        match self {
            Activation::LeakyRelu(slope) => slope,
            _ => 0.0,
        }
    }

    pub(in crate::backend) fn names(self) -> Names {
        match self {
            Activation::Relu => names!("relu"),
            Activation::LeakyRelu(_) => names!("leaky_relu"),
            Activation::Gelu => names!("gelu"),
            Activation::Silu => names!("silu"),
            Activation::Tanh => names!("tanh"),
            Activation::Sigmoid => names!("sigmoid"),
        }
    }
}

/// Functions of every element.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ActivationOps: Backend {
    /// `y = f(x)`; overwrites.
    fn activation(&self, f: Activation, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// `dy *= f'(x)`, in place.
    fn activation_backward(&self, f: Activation, x: Self::View<'_>, dy: Self::ViewMut<'_>) -> Result<()>;
}

impl Work {
    /// A function of every element.
    pub fn activation(f: Activation, len: usize) -> Self {
        Self::moves(f.names().forward, 2 * len).on([len])
    }

    /// Its gradient in place.
    pub fn activation_backward(f: Activation, len: usize) -> Self {
        Self::moves(f.names().backward, 3 * len).on([len])
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, close, down, random, rounded, up, wide};

    pub fn activations<B: Kernels>(b: &B) -> Results {
        let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
        let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
        type Function<'a> = (Activation, &'a dyn Fn(f64) -> f64);
        let all: [Function<'_>; 6] = [
            (Activation::Relu, &|x| x.max(0.0)),
            (Activation::LeakyRelu(0.125), &|x| x.max(0.125 * x)),
            (Activation::Gelu, &gelu),
            (Activation::Silu, &|x| x * logistic(x)),
            (Activation::Tanh, &f64::tanh),
            (Activation::Sigmoid, &logistic),
        ];
        let mut results = Vec::new();
        for ((f, want), len) in all.into_iter().flat_map(|one| [0, 1, 31, 1023, 40_001].map(|len| (one, len))) {
            // Small numbers too, where functions that are nearly linear lose digits if they are computed badly.
            let x: Vec<f32> = random(b, 1, len).iter().enumerate().map(|(i, x)| x * [3.0, 0.01][i % 2]).collect();
            let (x, g) = (rounded(b, &x), random(b, 2, len));
            let (xb, mut y, mut dy) = (up(b, &x), up(b, &g), up(b, &g));
            b.activation(f, B::all(&xb), B::all_mut(&mut y)).unwrap();
            let values: Vec<f64> = wide(&x).into_iter().map(want).collect();
            close(b, &y, &values, &format!("{f:?}"));
            b.activation_backward(f, B::all(&xb), B::all_mut(&mut dy)).unwrap();
            // Rectifiers have no slope at zero to take the difference over.
            let slope = |x: f64| match f {
                Activation::Relu => f64::from(x > 0.0),
                Activation::LeakyRelu(slope) => {
                    if x > 0.0 {
                        1.0
                    } else {
                        f64::from(slope)
                    }
                }
                _ => (want(x + 1e-5) - want(x - 1e-5)) / 2e-5,
            };
            let slopes: Vec<f64> = wide(&x).into_iter().zip(wide(&g)).map(|(x, g)| slope(x) * g).collect();
            close(b, &dy, &slopes, &format!("{f:?} backward"));
            results.extend([down(b, &y), down(b, &dy)]);
        }
        // Far from zero they equal their limits, not NaN.
        for (f, low, high) in [
            (Activation::Relu, 0.0, [100.0, 1e4]),
            (Activation::Gelu, 0.0, [100.0, 1e4]),
            (Activation::Silu, 0.0, [100.0, 1e4]),
            (Activation::Tanh, -1.0, [1.0, 1.0]),
            (Activation::Sigmoid, 0.0, [1.0, 1.0]),
        ] {
            let far = up(b, &[-1e4, -100.0, 100.0, 1e4]);
            let (mut y, mut dy) = (up(b, &[0.0; 4]), up(b, &[1.0; 4]));
            b.activation(f, B::all(&far), B::all_mut(&mut y)).unwrap();
            let y = down(b, &y);
            assert!((y[0] - low).abs() < 1e-30 && (y[1] - low).abs() < 1e-30, "{f:?}: {y:?}");
            assert_eq!(y[2..], rounded(b, &high), "{f:?}");
            b.activation_backward(f, B::all(&far), B::all_mut(&mut dy)).unwrap();
            assert!(down(b, &dy).iter().all(|slope| slope.is_finite()), "{f:?}");
        }
        results
    }
}
