//! Tests of the operations in `hpctrain_device::ops::swiglu`.

use crate::common::{Results, close, down, random, rounded, up};
use hpctrain_device::Kernels;

pub fn gates<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, width) in [(1, 1), (7, 33), (70, 64), (3, 20_001)] {
        let x: Vec<f32> = random(b, 38, rows * 2 * width).iter().map(|x| 3.0 * x).collect();
        let x = rounded(b, &x);
        let dy = random(b, 39, rows * width);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let slope = |x: f64| (silu(x + 1e-5) - silu(x - 1e-5)) / 2e-5;
        let mut want_y = vec![0.0; rows * width];
        let mut want_d = vec![0.0; rows * 2 * width];
        for (row, i) in (0..rows * width).map(|n| (n / width, n % width)) {
            let at = row * width + i;
            let of_gate = row * 2 * width + i;
            let [gate, up, dy] = [x[of_gate], x[of_gate + width], dy[at]].map(f64::from);
            want_y[at] = silu(gate) * up;
            (want_d[of_gate], want_d[of_gate + width]) = (dy * up * slope(gate), dy * silu(gate));
        }
        let mut xb = up(b, &x);
        let dyb = up(b, &dy);
        let mut y = up(b, &vec![0.0; rows * width]);
        b.swiglu(width, B::all(&xb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &want_y, "swiglu");
        b.swiglu_backward(width, B::all_mut(&mut xb), B::all(&dyb)).unwrap();
        close(b, &xb, &want_d, "swiglu backward");
        results.extend([down(b, &y), down(b, &xb)]);
    }
    // Far from zero a gate lets all or nothing through, not NaN.
    let far = up(b, &[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]);
    let mut y = up(b, &[0.0; 4]);
    b.swiglu(4, B::all(&far), B::all_mut(&mut y)).unwrap();
    let y = down(b, &y);
    assert!(
        y[0].abs() < 1e-30 && y[1].abs() < 1e-30 && y[2..] == rounded(b, &[100.0, 1e4]),
        "{y:?}"
    );
    results
}
