//! Tests of the operations in `hpctrain_device::ops::elementwise`.

use crate::common::{Results, close, down, random, to_f64, up, up_f32};
use hpctrain_device::{Kernels, MemoryKind};

pub fn elementwise<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for len in [0, 1, 31, 33, 1023, 40_001] {
        let x = random(b, 1, len);
        let y = random(b, 2, len);
        let xb = up(b, &x);
        let mut yb = up(b, &y);
        b.add(B::all(&xb), B::all_mut(&mut yb)).unwrap();
        let sums: Vec<f64> = x.iter().zip(&y).map(|(x, y)| f64::from(*x) + f64::from(*y)).collect();
        close(b, &yb, &sums, "add");
        b.copy(B::all(&xb), B::all_mut(&mut yb)).unwrap();
        assert_eq!(down(b, &yb), x);
        // Between types: values that a window can hold are copied exactly.
        let mut copy = up_f32(b, &y);
        b.copy(B::all(&xb), B::all_mut(&mut copy)).unwrap();
        assert_eq!(down(b, &copy), x);
        b.copy(B::all(&copy), B::all_mut(&mut yb)).unwrap();
        assert_eq!(down(b, &yb), x);
        let mut sum = up_f32(b, &y);
        b.add(B::all(&copy), B::all_mut(&mut sum)).unwrap();
        close(b, &sum, &sums, "add in f32");

        let products: Vec<f64> =
            x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y)).collect();
        let mut product = up(b, &y);
        b.multiply(B::all(&xb), B::all_mut(&mut product)).unwrap();
        close(b, &product, &products, "multiply");
        results.push(down(b, &product));
        let mut product = up_f32(b, &y);
        b.multiply(B::all(&copy), B::all_mut(&mut product)).unwrap();
        close(b, &product, &products, "multiply in f32");

        let squares: f64 = to_f64(&x).iter().map(|x| x * x).sum();
        let exact = b.upload_f32(MemoryKind::Activations, &x).unwrap();
        let got = b.read(b.sum_squares(B::all(&exact)).unwrap()).unwrap();
        assert!((got - squares).abs() <= 1e-12 * squares, "{got} is not {squares}");
        results.push(vec![got as f32]);
        let total: f64 = to_f64(&x).iter().sum();
        let got = b.read(b.sum(B::all(&exact)).unwrap()).unwrap();
        assert!((got - total).abs() <= 1e-12 * squares.max(1.0), "{got} is not {total}");
        results.push(vec![got as f32]);

        let mut dy = up(b, &y);
        b.zero(B::all_mut(&mut dy)).unwrap();
        assert!(down(b, &dy).iter().all(|&x| x == 0.0));
    }
    results
}
