//! Tests of the operations in `hpctrain_device::ops::activation`.

use crate::common::{Results, close, down, random, rounded, to_f64, up};
use hpctrain_device::{Activation, Kernels};

pub fn activations<B: Kernels>(b: &B) -> Results {
    let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
    let gelu = |x: f64| {
        0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
    };
    type Function<'a> = (Activation, &'a dyn Fn(f64) -> f64);
    let all: [Function<'_>; 12] = [
        (Activation::Relu, &|x| x.max(0.0)),
        (Activation::LeakyRelu(0.125), &|x| x.max(0.125 * x)),
        (Activation::Gelu, &gelu),
        (Activation::Silu, &|x| x * logistic(x)),
        (Activation::Tanh, &f64::tanh),
        (Activation::Sigmoid, &logistic),
        (Activation::Exp, &f64::exp),
        (Activation::Ln, &f64::ln),
        (Activation::Square, &|x| x * x),
        (Activation::Abs, &f64::abs),
        (Activation::Scale(-1.5), &|x| -1.5 * x),
        (Activation::Shift(0.75), &|x| x + 0.75),
    ];
    let mut results = Vec::new();
    for ((f, want), len) in
        all.into_iter().flat_map(|one| [0, 1, 31, 1023, 40_001].map(|len| (one, len)))
    {
        // Small numbers too, where functions that are nearly linear lose digits if they are
        // computed badly.
        let mut x: Vec<f32> =
            random(b, 1, len).iter().enumerate().map(|(i, x)| x * [3.0, 0.01][i % 2]).collect();
        if f == Activation::Ln {
            x.iter_mut().for_each(|x| *x = x.abs() + 0.05);
        }
        let x = rounded(b, &x);
        let g = random(b, 2, len);
        let xb = up(b, &x);
        let mut y = up(b, &g);
        let mut dy = up(b, &g);
        b.activation(f, B::all(&xb), B::all_mut(&mut y)).unwrap();
        let values: Vec<f64> = to_f64(&x).into_iter().map(want).collect();
        close(b, &y, &values, &format!("{f:?}"));
        b.activation_backward(f, B::all(&xb), B::all_mut(&mut dy)).unwrap();
        let slopes: Vec<f64> =
            to_f64(&x).into_iter().zip(to_f64(&g)).map(|(x, g)| slope_at(f, want, x) * g).collect();
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
        let mut y = up(b, &[0.0; 4]);
        let mut dy = up(b, &[1.0; 4]);
        b.activation(f, B::all(&far), B::all_mut(&mut y)).unwrap();
        let y = down(b, &y);
        assert!((y[0] - low).abs() < 1e-30 && (y[1] - low).abs() < 1e-30, "{f:?}: {y:?}");
        assert_eq!(y[2..], rounded(b, &high), "{f:?}");
        b.activation_backward(f, B::all(&far), B::all_mut(&mut dy)).unwrap();
        assert!(down(b, &dy).iter().all(|slope| slope.is_finite()), "{f:?}");
    }
    results
}

/// Returns the derivative of an activation whose values are `value`. Rectifiers have no slope at
/// zero to take the difference over.
fn slope_at(f: Activation, value: &dyn Fn(f64) -> f64, x: f64) -> f64 {
    match f {
        Activation::Relu => f64::from(x > 0.0),
        Activation::LeakyRelu(_) if x > 0.0 => 1.0,
        Activation::LeakyRelu(slope) => f64::from(slope),
        Activation::Abs => f64::from(u8::from(x > 0.0)) - f64::from(u8::from(x < 0.0)),
        _ => (value(x + 1e-5) - value(x - 1e-5)) / 2e-5,
    }
}
