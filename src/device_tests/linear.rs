//! Tests of the operations in `hpctrain_device::ops::linear`.

use crate::common::{
    Results, TF32_BITS, close, down, matmul_f64, pad_rows, random, random_tf32, rounded, strides,
    to_f64, unpad_rows, up, up_f32,
};
use hpctrain_device::{Activation, Gemm, Kernels, Linear};

/// Computes a long sum whose halves and thirds are large and cancel: partial sums in bf16 would
/// lose the remainder.
fn cancelling_sum<B: Kernels>(b: &B) -> Vec<f32> {
    let m = 8;
    let n = 8;
    let k = 1536;
    let signs: Vec<f32> = (0..m * k).map(|at| if at % k < k / 2 { 1.0 } else { -1.0 }).collect();
    let near_one: Vec<f32> = random(b, 14, k * n).iter().map(|x| 1.0 + 0.25 * x).collect();
    let near_one = rounded(b, &near_one);
    let x = up(b, &signs);
    let y = up(b, &near_one);
    let mut z = up(b, &vec![0.0; m * n]);
    b.gemm(
        Gemm { m, n, k, ta: false, tb: false, acc: false },
        B::all(&x),
        B::all(&y),
        B::all_mut(&mut z),
    )
    .unwrap();
    let want = matmul_f64(
        m,
        n,
        k,
        |i, l| f64::from(signs[i * k + l]),
        |l, j| f64::from(near_one[l * n + j]),
    );
    close(b, &z, &want, "a sum that cancels");
    down(b, &z)
}

/// Tests a linear layer without a bias and both its gradients, on outputs whose rows are padded as
/// the device prefers, and on unpadded ones.
fn padded<B: Kernels>(b: &B, random: fn(&B, u64, usize) -> Vec<f32>) -> Results {
    let mut results = Vec::new();
    for (rows, inputs, outputs) in [(1, 8, 1), (33, 31, 65), (7, 24, 257), (300, 16, 127)] {
        let at = |v: &[f32], i: usize| f64::from(v[i]);
        let x = random(b, 6, rows * inputs);
        let w = random(b, 7, outputs * inputs);
        let dy = random(b, 9, rows * outputs);
        let xb = up(b, &x);
        let wb = up(b, &w);
        let none = up(b, &[]);
        for stride in strides::<B>(outputs) {
            let shape = Linear { stride, ..Linear::new(rows, inputs, outputs) };
            let mut y = up(b, &vec![f32::NAN; rows * stride]);
            b.linear(shape, B::all(&xb), B::all(&wb), B::all(&none), B::all_mut(&mut y)).unwrap();
            let want = matmul_f64(
                rows,
                outputs,
                inputs,
                |r, i| at(&x, r * inputs + i),
                |i, o| at(&w, o * inputs + i),
            );
            let y = up(b, &unpad_rows(b, &y, outputs, stride));
            close(b, &y, &want, "padded linear");
            let dyb = up(b, &pad_rows(&dy, outputs, stride));
            let mut dx = up(b, &vec![f32::NAN; rows * inputs]);
            b.linear_backward_input(shape, B::all(&dyb), B::all(&wb), B::all_mut(&mut dx)).unwrap();
            let want = matmul_f64(
                rows,
                inputs,
                outputs,
                |r, o| at(&dy, r * outputs + o),
                |o, i| at(&w, o * inputs + i),
            );
            close(b, &dx, &want, "padded linear dx");
            let sums = matmul_f64(
                outputs,
                inputs,
                rows,
                |o, r| at(&dy, r * outputs + o),
                |r, i| at(&x, r * inputs + i),
            );
            for add in [false, true] {
                let before = if add {
                    random(b, 11, outputs * inputs)
                } else {
                    vec![f32::NAN; outputs * inputs]
                };
                let mut dw = up_f32(b, &before);
                let mut db = up_f32(b, &[]);
                let to = B::all_mut(&mut dw);
                let bias = B::all_mut(&mut db);
                b.linear_backward_weight(shape, B::all(&dyb), B::all(&xb), to, bias, add).unwrap();
                let sum =
                    |(sum, before): (&f64, &f32)| sum + if add { f64::from(*before) } else { 0.0 };
                close(
                    b,
                    &dw,
                    &sums.iter().zip(&before).map(sum).collect::<Vec<_>>(),
                    "padded linear dW",
                );
                results.push(down(b, &dw));
            }
            results.extend([down(b, &y), down(b, &dx)]);
        }
    }
    results
}

/// Tests matmuls and linear layers of values drawn by `random`.
pub fn matmuls<B: Kernels>(b: &B, random: fn(&B, u64, usize) -> Vec<f32>) -> Results {
    let mut results = Vec::new();
    if b.has_master_weights() {
        // In f32 the sum itself loses as much.
        results.push(cancelling_sum(b));
    }
    results.extend(padded(b, random));
    for (m, n, k) in [
        (1, 1, 1),
        (1, 33, 7),
        (31, 1, 33),
        (33, 31, 65),
        (130, 257, 100),
        (500, 130, 71),
        (2, 700, 1100),
    ] {
        let a = random(b, 3, m * k);
        let bm = random(b, 4, k * n);
        let c = random(b, 5, m * n);
        for (ta, tb, acc) in
            [(false, false, false), (true, false, true), (false, true, true), (true, true, false)]
        {
            let mut want = matmul_f64(
                m,
                n,
                k,
                |i, l| f64::from(if ta { a[l * m + i] } else { a[i * k + l] }),
                |l, j| f64::from(if tb { bm[j * k + l] } else { bm[l * n + j] }),
            );
            if acc {
                want.iter_mut().zip(&c).for_each(|(w, c)| *w += f64::from(*c));
            }
            let ab = up(b, &a);
            let bb = up(b, &bm);
            let mut cb = up(b, &c);
            b.gemm(Gemm { m, n, k, ta, tb, acc }, B::all(&ab), B::all(&bb), B::all_mut(&mut cb))
                .unwrap();
            close(b, &cb, &want, &format!("gemm {m}×{n}×{k} {ta} {tb} {acc}"));
            results.push(down(b, &cb));
        }
    }
    // More chunks of rows than a block adds up at once.
    for (rows, outputs) in [(4353, 3), (8321, 33)] {
        let dy = random(b, 16, rows * outputs);
        let db0 = random(b, 17, outputs);
        let dyb = up(b, &dy);
        let mut db = up_f32(b, &db0);
        b.linear_backward_bias(rows, B::all(&dyb), B::all_mut(&mut db)).unwrap();
        let column = |o: usize| (0..rows).map(|r| f64::from(dy[r * outputs + o])).sum::<f64>();
        let want: Vec<f64> =
            db0.iter().enumerate().map(|(o, d)| column(o) + f64::from(*d)).collect();
        close(b, &db, &want, "linear dbias of many rows");
        results.push(down(b, &db));
    }
    for (rows, inputs, outputs) in
        [(1, 1, 1), (33, 31, 65), (70, 96, 33), (33, 64, 96), (1100, 32, 300)]
    {
        let shape = Linear::new(rows, inputs, outputs);
        let x = random(b, 6, rows * inputs);
        let w = random(b, 7, outputs * inputs);
        let bias = random(b, 8, outputs);
        let dy = random(b, 9, rows * outputs);
        let xb = up(b, &x);
        let wb = up(b, &w);
        let dyb = up(b, &dy);
        let at = |v: &[f32], i: usize| f64::from(v[i]);
        for bias in [&bias[..], &[]] {
            let mut y = up(b, &random(b, 10, rows * outputs));
            let bb = up(b, bias);
            b.linear(shape, B::all(&xb), B::all(&wb), B::all(&bb), B::all_mut(&mut y)).unwrap();
            let sums = matmul_f64(
                rows,
                outputs,
                inputs,
                |r, i| at(&x, r * inputs + i),
                |i, o| at(&w, o * inputs + i),
            );
            let want: Vec<f64> = sums
                .iter()
                .enumerate()
                .map(|(i, p)| p + bias.get(i % outputs).map_or(0.0, |&b| f64::from(b)))
                .collect();
            close(b, &y, &want, "linear");

            let dw0 = random(b, 11, outputs * inputs);
            let db0 = random(b, 12, bias.len());
            let mut dw = up_f32(b, &dw0);
            let mut db = up_f32(b, &db0);
            let dw_view = B::all_mut(&mut dw);
            let db_view = B::all_mut(&mut db);
            b.linear_backward_weight(shape, B::all(&dyb), B::all(&xb), dw_view, db_view, true)
                .unwrap();
            let sum = matmul_f64(
                outputs,
                inputs,
                rows,
                |o, r| at(&dy, r * outputs + o),
                |r, i| at(&x, r * inputs + i),
            );
            let want: Vec<f64> = sum.iter().zip(&dw0).map(|(s, d)| s + f64::from(*d)).collect();
            close(b, &dw, &want, "linear dW");
            let column = |o: usize| (0..rows).map(|r| at(&dy, r * outputs + o)).sum::<f64>();
            let want: Vec<f64> =
                db0.iter().enumerate().map(|(o, d)| column(o) + f64::from(*d)).collect();
            close(b, &db, &want, "linear dbias");
            // The weight's gradient is overwritten, even NaN; the bias's is still added to.
            let mut dw = up_f32(b, &vec![f32::NAN; outputs * inputs]);
            let mut db = up_f32(b, &db0);
            let dw_view = B::all_mut(&mut dw);
            let db_view = B::all_mut(&mut db);
            b.linear_backward_weight(shape, B::all(&dyb), B::all(&xb), dw_view, db_view, false)
                .unwrap();
            close(b, &dw, &sum, "linear dW, overwritten");
            close(b, &db, &want, "linear dbias, added to");
            if !bias.is_empty() {
                let mut db = up_f32(b, &db0);
                b.linear_backward_bias(rows, B::all(&dyb), B::all_mut(&mut db)).unwrap();
                close(b, &db, &want, "linear dbias alone");
            }
            results.extend([down(b, &y), down(b, &dw), down(b, &db)]);

            // With a residual, including views that begin anywhere.
            let more = random(b, 15, rows * outputs);
            let want: Vec<f64> = sums
                .iter()
                .enumerate()
                .map(|(i, p)| {
                    p + bias.get(i % outputs).map_or(0.0, |&b| f64::from(b)) + f64::from(more[i])
                })
                .collect();
            for from in [0, 1, 3, 8] {
                let mut y = up(b, &vec![f32::NAN; rows * outputs]);
                let mb = up(b, &[&vec![f32::NAN; from][..], &more].concat());
                let more = B::view(&mb, from..from + rows * outputs);
                b.linear_add(
                    shape,
                    B::all(&xb),
                    B::all(&wb),
                    B::all(&bb),
                    more,
                    B::all_mut(&mut y),
                )
                .unwrap();
                close(b, &y, &want, "linear and sum");
                results.push(down(b, &y));
            }
        }
        // Fused with GELU like separate calls, without a bias and with one that begins anywhere.
        let none = up(b, &[]);
        for from in [None, Some(0), Some(1), Some(3), Some(5)] {
            let own = from.map(|from| up(b, &[&vec![9.0; from][..], &bias].concat()));
            let bias = own
                .as_ref()
                .map_or(B::all(&none), |own| B::view(own, B::len(own) - outputs..B::len(own)));
            let [mut h, mut y] = [0.0, 0.0].map(|x| up(b, &vec![x; rows * outputs]));
            b.linear_gelu(
                shape,
                B::all(&xb),
                B::all(&wb),
                bias,
                B::all_mut(&mut h),
                B::all_mut(&mut y),
            )
            .unwrap();
            let mut separate = up(b, &vec![0.0; rows * outputs]);
            b.linear(shape, B::all(&xb), B::all(&wb), bias, B::all_mut(&mut separate)).unwrap();
            close(b, &h, &to_f64(&down(b, &separate)), "linear, of linear and gelu");
            b.activation(Activation::Gelu, B::all(&h), B::all_mut(&mut separate)).unwrap();
            close(b, &y, &to_f64(&down(b, &separate)), "gelu, of linear and gelu");
            results.push(down(b, &y));
        }
        let [mut dh, mut separate] = [0.0, 0.0].map(|x| up(b, &vec![x; rows * inputs]));
        let before = B::all(&xb);
        b.linear_gelu_backward_input(shape, B::all(&dyb), B::all(&wb), before, B::all_mut(&mut dh))
            .unwrap();
        b.linear_backward_input(shape, B::all(&dyb), B::all(&wb), B::all_mut(&mut separate))
            .unwrap();
        b.activation_backward(Activation::Gelu, before, B::all_mut(&mut separate)).unwrap();
        close(b, &dh, &to_f64(&down(b, &separate)), "back through linear and gelu");

        let mut dx = up(b, &random(b, 13, rows * inputs));
        b.linear_backward_input(shape, B::all(&dyb), B::all(&wb), B::all_mut(&mut dx)).unwrap();
        let want = matmul_f64(
            rows,
            inputs,
            outputs,
            |r, o| at(&dy, r * outputs + o),
            |o, i| at(&w, o * inputs + i),
        );
        close(b, &dx, &want, "linear dx");
        results.push(down(b, &dx));
    }
    results
}

/// Tests that matmuls in TF32 round their operands to it and no further: operands that it holds
/// give the results of f32, and the error of others is that of rounding both, relative to the sum
/// of magnitudes.
pub fn matmuls_in_tf32<B: Kernels>(b: &B) -> Results {
    let mut results = matmuls(b, random_tf32);
    // For any rounding mode. Sums in f32 add their own error.
    let operand = 0.5f64.powi(TF32_BITS as i32);
    let mut furthest = 0.0f64;
    let mut beyond_f32 = 0;
    for (m, n, k) in [(1, 1, 1), (1, 33, 7), (33, 31, 65), (130, 257, 100)] {
        let x = random(b, 3, m * k);
        let y = random(b, 4, k * n);
        let xb = up(b, &x);
        let yb = up(b, &y);
        let mut zb = up(b, &vec![0.0; m * n]);
        let shape = Gemm { m, n, k, ta: false, tb: false, acc: false };
        b.gemm(shape, B::all(&xb), B::all(&yb), B::all_mut(&mut zb)).unwrap();
        let xt = |i: usize, l: usize| f64::from(x[i * k + l]);
        let yt = |l: usize, j: usize| f64::from(y[l * n + j]);
        let expected = matmul_f64(m, n, k, xt, yt);
        let magnitudes = matmul_f64(m, n, k, |i, l| xt(i, l).abs(), |l, j| yt(l, j).abs());
        let got = down(b, &zb);
        for (i, ((&got, expected), magnitude)) in
            got.iter().zip(expected).zip(magnitudes).enumerate()
        {
            let off = (f64::from(got) - expected).abs() / magnitude;
            let sum_error = k as f64 * f64::from(f32::EPSILON);
            assert!(
                off <= (1.0 + operand).powi(2) - 1.0 + sum_error,
                "tf32 {m}×{n}×{k}[{i}]: {got}, in f64 {expected}"
            );
            furthest = furthest.max(off);
            beyond_f32 += usize::from(off > sum_error);
        }
        results.push(got);
    }
    assert!(beyond_f32 > 0, "matmuls are at most {furthest:e} off: they are not in TF32");
    results
}
