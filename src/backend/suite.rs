//! One suite for every device: each kernel against f64 arithmetic at awkward sizes, and for repeatable bits.

mod layers;

use std::path::Path;
use std::process::Command;

use super::cpu::{Cpu, Products};
use super::cuda;
use super::{
    Activation, AdamW, Attention, Dropout, Elements, Elementwise, Gemm, Kernels, Linear, MemoryKind, Norm, Rotary, Sgd,
};
use crate::random::Stream;

/// Results of kernels, one vector a kernel and shape.
type Results = Vec<Vec<f32>>;

/// Relative error allowed, against the largest value of the result.
fn tolerance<B: Kernels>(b: &B) -> f64 {
    if b.computes_narrow() { 1e-2 } else { 1e-5 }
}

/// Normal numbers that the device's compute type can hold, named by `seed`.
fn random<B: Kernels>(b: &B, seed: u64, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Stream::new(seed).fill_normal(&mut values);
    rounded(b, &values)
}

/// The values as the device's compute type holds them.
fn rounded<B: Kernels>(b: &B, values: &[f32]) -> Vec<f32> {
    down(b, &up(b, values))
}

fn ids(seed: u64, len: usize, below: usize) -> Vec<u32> {
    (0..len).map(|i| (Stream::new(seed).uniform(i as u64) * below as f64) as u32).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

fn close<B: Kernels>(b: &B, got: &B::Buf, want: &[f64], what: &str) {
    let got = down(b, got);
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-6, |a: f64, b| a.max(b.abs()));
    let mut bias = 0.0;
    for (i, (&g, w)) in got.iter().zip(want).enumerate() {
        let error = f64::from(g) - w;
        assert!(error.abs() <= tolerance(b) * largest, "{what}[{i}]: {g}, in f64 {w}");
        bias += error / largest;
    }
    // Rounding goes up as often as down.
    let count = got.len() as f64;
    assert!(bias.abs() <= tolerance(b) * (count.sqrt() + 0.01 * count), "{what} is off by {} on average", bias / count);
}

/// In the compute type: parameters, activations.
fn up<B: Kernels>(b: &B, x: &[f32]) -> B::Buf {
    b.upload(MemoryKind::Activations, x).unwrap()
}

/// In f32: masters, gradients of parameters, statistics, losses.
fn up_f32<B: Kernels>(b: &B, x: &[f32]) -> B::Buf {
    b.upload_f32(MemoryKind::Gradients, x).unwrap()
}

fn down<B: Kernels>(b: &B, x: &B::Buf) -> Vec<f32> {
    let mut host = vec![0.0; B::len(x)];
    b.download(B::all(x), &mut host).unwrap();
    host
}

/// A row-major product in f64, `a` m×k and `b` k×n.
fn product(m: usize, n: usize, k: usize, a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    (0..m * n).map(|i| (0..k).map(|l| a(i / n, l) * b(l, i % n)).sum()).collect()
}

/// A test of each operation on one device: `$stamp!` makes them, of the pairs of name and test that it is given, and of those
/// of all operations but products, whose tests differ with the precision.
macro_rules! each_operation {
    ($stamp:ident! { $($of:tt)* }) => {
        $stamp! {
            $($of)*
            elementwise: super::elementwise,
            norms: super::norms,
            embeddings: super::embeddings,
            attention: super::attentions,
            rotary: super::rotations,
            gates: super::gates,
            optimizers: super::optimizers,
            dropout: super::dropouts,
            activations: super::layers::activations,
            softmax: super::layers::softmaxes,
            windows: super::layers::windows,
            columns: super::layers::columns,
            pairs: super::layers::pairs,
            channels: super::layers::channels,
            classifiers: super::layers::classifiers,
            regressions: super::layers::regressions,
        }
    };
}

fn elementwise<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for len in [0, 1, 31, 33, 1023, 40_001] {
        let (x, y) = (random(b, 1, len), random(b, 2, len));
        let (xb, mut yb) = (up(b, &x), up(b, &y));
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

        let squares: f64 = wide(&x).iter().map(|x| x * x).sum();
        let exact = b.upload_f32(MemoryKind::Activations, &x).unwrap();
        let got = b.read(b.sum_squares(B::all(&exact)).unwrap()).unwrap();
        assert!((got - squares).abs() <= 1e-12 * squares, "{got} is not {squares}");
        results.push(vec![got as f32]);
        let total: f64 = wide(&x).iter().sum();
        let got = b.read(b.sum(B::all(&exact)).unwrap()).unwrap();
        assert!((got - total).abs() <= 1e-12 * squares.max(1.0), "{got} is not {total}");
        results.push(vec![got as f32]);

        let mut dy = up(b, &y);
        b.zero(B::all_mut(&mut dy)).unwrap();
        assert!(down(b, &dy).iter().all(|&x| x == 0.0));
    }
    results
}

/// Products of the values that `random` gives.
fn products<B: Kernels>(b: &B, random: fn(&B, u64, usize) -> Vec<f32>) -> Results {
    let mut results = Vec::new();
    for (m, n, k) in [(1, 1, 1), (1, 33, 7), (31, 1, 33), (33, 31, 65), (130, 257, 100), (500, 130, 71), (2, 700, 1100)]
    {
        let (a, bm, c) = (random(b, 3, m * k), random(b, 4, k * n), random(b, 5, m * n));
        for (ta, tb, acc) in [(false, false, false), (true, false, true), (false, true, true), (true, true, false)] {
            let at = |i: usize, l: usize| f64::from(if ta { a[l * m + i] } else { a[i * k + l] });
            let bt = |l: usize, j: usize| f64::from(if tb { bm[j * k + l] } else { bm[l * n + j] });
            let mut want = product(m, n, k, at, bt);
            if acc {
                want.iter_mut().zip(&c).for_each(|(w, c)| *w += f64::from(*c));
            }
            let (ab, bb, mut cb) = (up(b, &a), up(b, &bm), up(b, &c));
            b.gemm(Gemm { m, n, k, ta, tb, acc }, B::all(&ab), B::all(&bb), B::all_mut(&mut cb)).unwrap();
            close(b, &cb, &want, &format!("gemm {m}×{n}×{k} {ta} {tb} {acc}"));
            results.push(down(b, &cb));
        }
    }
    for (rows, inputs, outputs) in [(1, 1, 1), (33, 31, 65), (70, 96, 33), (33, 64, 96), (1100, 32, 300)] {
        let shape = Linear { rows, inputs, outputs };
        let (x, w, bias) = (random(b, 6, rows * inputs), random(b, 7, outputs * inputs), random(b, 8, outputs));
        let dy = random(b, 9, rows * outputs);
        let (xb, wb, dyb) = (up(b, &x), up(b, &w), up(b, &dy));
        let at = |v: &[f32], i: usize| f64::from(v[i]);
        for bias in [&bias[..], &[]] {
            let mut y = up(b, &random(b, 10, rows * outputs));
            let bb = up(b, bias);
            b.linear(shape, B::all(&xb), B::all(&wb), B::all(&bb), B::all_mut(&mut y)).unwrap();
            let sums = product(rows, outputs, inputs, |r, i| at(&x, r * inputs + i), |i, o| at(&w, o * inputs + i));
            let want: Vec<f64> = sums
                .iter()
                .enumerate()
                .map(|(i, p)| p + bias.get(i % outputs).map_or(0.0, |&b| f64::from(b)))
                .collect();
            close(b, &y, &want, "linear");

            let (dw0, db0) = (random(b, 11, outputs * inputs), random(b, 12, bias.len()));
            let (mut dw, mut db) = (up_f32(b, &dw0), up_f32(b, &db0));
            let (dw_view, db_view) = (B::all_mut(&mut dw), B::all_mut(&mut db));
            b.linear_backward_weight(shape, B::all(&dyb), B::all(&xb), dw_view, db_view, true).unwrap();
            let sum = product(outputs, inputs, rows, |o, r| at(&dy, r * outputs + o), |r, i| at(&x, r * inputs + i));
            let want: Vec<f64> = sum.iter().zip(&dw0).map(|(s, d)| s + f64::from(*d)).collect();
            close(b, &dw, &want, "linear dW");
            let column = |o: usize| (0..rows).map(|r| at(&dy, r * outputs + o)).sum::<f64>();
            let want: Vec<f64> = db0.iter().enumerate().map(|(o, d)| column(o) + f64::from(*d)).collect();
            close(b, &db, &want, "linear dbias");
            // The weight's gradient is overwritten, even NaN; the bias's is still added to.
            let (mut dw, mut db) = (up_f32(b, &vec![f32::NAN; outputs * inputs]), up_f32(b, &db0));
            let (dw_view, db_view) = (B::all_mut(&mut dw), B::all_mut(&mut db));
            b.linear_backward_weight(shape, B::all(&dyb), B::all(&xb), dw_view, db_view, false).unwrap();
            close(b, &dw, &sum, "linear dW, overwritten");
            close(b, &db, &want, "linear dbias, added to");
            results.extend([down(b, &y), down(b, &dw), down(b, &db)]);
        }
        // Fused with GELU as one after the other.
        let none = up(b, &[]);
        let [mut h, mut y] = [0.0, 0.0].map(|x| up(b, &vec![x; rows * outputs]));
        b.linear_gelu(shape, B::all(&xb), B::all(&wb), B::all(&none), B::all_mut(&mut h), B::all_mut(&mut y)).unwrap();
        let mut apart = up(b, &vec![0.0; rows * outputs]);
        b.linear(shape, B::all(&xb), B::all(&wb), B::all(&none), B::all_mut(&mut apart)).unwrap();
        close(b, &h, &wide(&down(b, &apart)), "linear, of linear and gelu");
        b.activation(Activation::Gelu, B::all(&h), B::all_mut(&mut apart)).unwrap();
        close(b, &y, &wide(&down(b, &apart)), "gelu, of linear and gelu");
        let [mut dh, mut apart] = [0.0, 0.0].map(|x| up(b, &vec![x; rows * inputs]));
        let before = B::all(&xb);
        b.linear_gelu_backward_input(shape, B::all(&dyb), B::all(&wb), before, B::all_mut(&mut dh)).unwrap();
        b.linear_backward_input(shape, B::all(&dyb), B::all(&wb), B::all_mut(&mut apart)).unwrap();
        b.activation_backward(Activation::Gelu, before, B::all_mut(&mut apart)).unwrap();
        close(b, &dh, &wide(&down(b, &apart)), "back through linear and gelu");

        let mut dx = up(b, &random(b, 13, rows * inputs));
        b.linear_backward_input(shape, B::all(&dyb), B::all(&wb), B::all_mut(&mut dx)).unwrap();
        let want = product(rows, inputs, outputs, |r, o| at(&dy, r * outputs + o), |o, i| at(&w, o * inputs + i));
        close(b, &dx, &want, "linear dx");
        results.push(down(b, &dx));
    }
    results
}

fn norms<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    let sizes = [(1, 1), (1, 31), (33, 33), (70, 130), (3, 1023), (131, 64), (259, 512), (7, 1536)];
    for (rows, width, centred) in sizes.into_iter().flat_map(|(rows, width)| [true, false].map(|c| (rows, width, c))) {
        let shape = Norm { rows, width, epsilon: 1e-3, centred };
        let x: Vec<f32> = random(b, 14, rows * width).iter().map(|x| 3.0 * x + 2.0).collect();
        let x = rounded(b, &x);
        let (w, dy) = (random(b, 15, width), random(b, 16, rows * width));
        for bias in [random(b, 17, width), vec![]] {
            let (xb, wb, bb, dyb) = (up(b, &x), up(b, &w), up(b, &bias), up(b, &dy));
            let (mut y, mut stats) = (up(b, &vec![0.0; rows * width]), up_f32(b, &vec![0.0; rows * 2]));
            b.norm(shape, B::all(&xb), B::all(&wb), B::all(&bb), B::all_mut(&mut y), B::all_mut(&mut stats)).unwrap();

            let branch = up(b, &random(b, 36, rows * width));
            let mut stream = up(b, &x);
            b.add(B::all(&branch), B::all_mut(&mut stream)).unwrap();
            let [mut want, mut got] =
                [0.0, 0.0].map(|x| (up(b, &vec![x; rows * width]), up_f32(b, &vec![x; rows * 2])));
            let (y_view, stats_view) = (B::all_mut(&mut want.0), B::all_mut(&mut want.1));
            b.norm(shape, B::all(&stream), B::all(&wb), B::all(&bb), y_view, stats_view).unwrap();
            let mut fused = up(b, &x);
            let (y_view, stats_view) = (B::all_mut(&mut got.0), B::all_mut(&mut got.1));
            let (stream_view, wv, bv) = (B::all_mut(&mut fused), B::all(&wb), B::all(&bb));
            b.add_norm(shape, B::all(&branch), stream_view, wv, bv, y_view, stats_view).unwrap();
            assert_eq!(down(b, &fused), down(b, &stream));
            close(b, &got.0, &wide(&down(b, &want.0)), "sum and norm");
            close(b, &got.1, &wide(&down(b, &want.1)), "statistics of sum and norm");

            let (dx0, dw0, db0) = (random(b, 18, rows * width), random(b, 19, width), random(b, 20, bias.len()));
            let (mut dx, mut dw, mut db) = (up(b, &dx0), up_f32(b, &dw0), up_f32(b, &db0));
            b.norm_backward(
                shape,
                B::all(&dyb),
                B::all(&xb),
                B::all(&wb),
                B::all(&stats),
                B::all_mut(&mut dx),
                B::all_mut(&mut dw),
                B::all_mut(&mut db),
            )
            .unwrap();

            let (mut want_y, mut want_dx) = (vec![], wide(&dx0));
            let (mut want_dw, mut want_db) = (wide(&dw0), wide(&db0));
            for row in 0..rows {
                let at = row * width;
                let x = wide(&x[at..at + width]);
                let n = width as f64;
                let mean = if centred { x.iter().sum::<f64>() / n } else { 0.0 };
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
                let rstd = 1.0 / (variance + f64::from(shape.epsilon)).sqrt();
                let hat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
                let g: Vec<f64> = (0..width).map(|i| f64::from(dy[at + i]) * f64::from(w[i])).collect();
                let g_mean = if centred { g.iter().sum::<f64>() / n } else { 0.0 };
                let gh_mean = g.iter().zip(&hat).map(|(g, h)| g * h).sum::<f64>() / n;
                for i in 0..width {
                    want_y.push(hat[i] * f64::from(w[i]) + bias.get(i).map_or(0.0, |&b| f64::from(b)));
                    want_dx[at + i] += rstd * (g[i] - g_mean - hat[i] * gh_mean);
                    want_dw[i] += f64::from(dy[at + i]) * hat[i];
                    if let Some(db) = want_db.get_mut(i) {
                        *db += f64::from(dy[at + i]);
                    }
                }
            }
            let what = if centred { "layer norm" } else { "RMS norm" };
            close(b, &y, &want_y, what);
            if width > 1 {
                close(b, &dx, &want_dx, &format!("{what} dx"));
            }
            close(b, &dw, &want_dw, &format!("{what} dweight"));
            close(b, &db, &want_db, &format!("{what} dbias"));
            results.extend([down(b, &y), down(b, &dx), down(b, &dw), down(b, &db)]);
        }
    }
    results
}

fn embeddings<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (sequences, time, vocabulary, width) in [(1, 1, 1, 1), (3, 31, 11, 33), (5, 64, 200, 65), (20, 33, 2, 96)] {
        let rows = sequences * time;
        let tokens = ids(21, rows, vocabulary);
        let (words, places) = (random(b, 22, vocabulary * width), random(b, 23, time * width));
        let (tb, wb, pb) = (b.upload_ints(&tokens).unwrap(), up(b, &words), up(b, &places));
        let mut y = up(b, &vec![0.0; rows * width]);
        b.embedding(&tb, B::all(&wb), B::all(&pb), B::all_mut(&mut y)).unwrap();
        let cell = |row: usize, i: usize| {
            f64::from(words[tokens[row] as usize * width + i]) + f64::from(places[row % time * width + i])
        };
        let want: Vec<f64> = (0..rows * width).map(|i| cell(i / width, i % width)).collect();
        close(b, &y, &want, "embedding");

        let (dy, dw0, dp0) = (random(b, 24, rows * width), random(b, 25, words.len()), random(b, 26, places.len()));
        let (dyb, mut dw, mut dp) = (up(b, &dy), up_f32(b, &dw0), up_f32(b, &dp0));
        b.embedding_backward(&tb, B::all(&dyb), B::all_mut(&mut dw), B::all_mut(&mut dp)).unwrap();
        let (mut want_w, mut want_p) = (wide(&dw0), wide(&dp0));
        for (i, &d) in dy.iter().enumerate() {
            let (row, column) = (i / width, i % width);
            want_w[tokens[row] as usize * width + column] += f64::from(d);
            want_p[row % time * width + column] += f64::from(d);
        }
        close(b, &dw, &want_w, "embedding d words");
        close(b, &dp, &want_p, "embedding d places");
        results.extend([down(b, &y), down(b, &dw), down(b, &dp)]);

        // Without positions.
        let (mut none, mut dw) = (up_f32(b, &[]), up_f32(b, &dw0));
        b.embedding(&tb, B::all(&wb), B::all(&none), B::all_mut(&mut y)).unwrap();
        let word = |i: usize| words[tokens[i / width] as usize * width + i % width];
        assert_eq!(down(b, &y), (0..rows * width).map(word).collect::<Vec<_>>());
        b.embedding_backward(&tb, B::all(&dyb), B::all_mut(&mut dw), B::all_mut(&mut none)).unwrap();
        close(b, &dw, &want_w, "embedding d words without places");
    }
    results
}

fn attentions<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    let alone = [(1, 1, 1, 1), (2, 33, 3, 5), (1, 130, 2, 33), (3, 64, 1, 32), (2, 129, 2, 64), (1, 65, 1, 128)];
    let alone = alone.map(|(batch, time, heads, head_width)| (batch, time, heads, heads, head_width));
    // Heads of keys and values that several of queries share.
    let shared = [(2, 33, 6, 2, 5), (1, 130, 3, 1, 33), (2, 129, 4, 2, 64), (1, 65, 2, 1, 128)];
    for (batch, time, heads, kv_heads, head_width) in alone.into_iter().chain(shared) {
        let shape = Attention { batch, time, heads, kv_heads, head_width };
        let (d, packed) = (heads * head_width, shape.packed_width());
        let rows = batch * time;
        let (qkv, dy) = (random(b, 27, rows * packed), random(b, 28, rows * d));
        let (xb, dyb) = (up(b, &qkv), up(b, &dy));
        let (mut y, mut lse) = (up(b, &vec![0.0; rows * d]), up_f32(b, &vec![0.0; rows * heads]));
        b.attention(shape, B::all(&xb), B::all_mut(&mut y), B::all_mut(&mut lse)).unwrap();
        let mut dqkv = up(b, &vec![0.0; rows * packed]);
        let views = (B::all(&xb), B::all(&y), B::all(&lse), B::all(&dyb));
        b.attention_backward(shape, views.0, views.1, views.2, views.3, B::all_mut(&mut dqkv)).unwrap();

        let (mut want_y, mut want_d) = (vec![0.0; rows * d], vec![0.0; rows * packed]);
        let scale = 1.0 / (head_width as f64).sqrt();
        for (sequence, head) in (0..batch * heads).map(|i| (i / heads, i % heads)) {
            let key = heads + head / (heads / kv_heads);
            let places = [head, key, key + kv_heads];
            let at = |part: usize, t: usize, i: usize| (sequence * time + t) * packed + places[part] * head_width + i;
            let of_y = |t: usize, i: usize| (sequence * time + t) * d + head * head_width + i;
            for t in 0..time {
                let dot = |part_a: usize, ta: usize, part_b: usize, tb: usize| -> f64 {
                    (0..head_width).map(|i| f64::from(qkv[at(part_a, ta, i)]) * f64::from(qkv[at(part_b, tb, i)])).sum()
                };
                let scores: Vec<f64> = (0..=t).map(|s| dot(0, t, 1, s) * scale).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                let p: Vec<f64> = scores.iter().map(|s| (s - top).exp() / total).collect();
                let dp: Vec<f64> = (0..=t)
                    .map(|s| (0..head_width).map(|i| f64::from(dy[of_y(t, i)]) * f64::from(qkv[at(2, s, i)])).sum())
                    .collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for s in 0..=t {
                    let ds = p[s] * (dp[s] - mean) * scale;
                    for i in 0..head_width {
                        want_y[of_y(t, i)] += p[s] * f64::from(qkv[at(2, s, i)]);
                        want_d[at(0, t, i)] += ds * f64::from(qkv[at(1, s, i)]);
                        want_d[at(1, s, i)] += ds * f64::from(qkv[at(0, t, i)]);
                        want_d[at(2, s, i)] += p[s] * f64::from(dy[of_y(t, i)]);
                    }
                }
            }
        }
        close(b, &y, &want_y, "attention");
        close(b, &dqkv, &want_d, "attention dqkv");
        results.extend([down(b, &y), down(b, &lse), down(b, &dqkv)]);
    }
    results
}

fn rotations<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (batch, time, heads, head_width, others) in [(1, 1, 1, 2, 0), (2, 33, 3, 6, 5), (3, 17, 2, 64, 64)] {
        let (rows, half, width) = (batch * time, head_width / 2, heads * head_width + others);
        let angle = |t: usize, i: usize| t as f64 * 100f64.powf(-(i as f64) / half as f64);
        // The table may be of more positions than there are.
        let table = (0..time + 1).flat_map(|t| {
            let angles = (0..half).map(move |i| angle(t, i));
            angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|x| x as f32)
        });
        let table = up_f32(b, &table.collect::<Vec<_>>());
        let x = random(b, 37, rows * width);
        for back in [false, true] {
            let mut turned = up(b, &x);
            let shape = Rotary { batch, time, heads, head_width, width, back };
            b.rotary(shape, B::all(&table), B::all_mut(&mut turned)).unwrap();
            let mut want = wide(&x);
            for (row, head, i) in (0..rows * heads * half).map(|n| (n / half / heads, n / half % heads, n % half)) {
                let (sin, cos) = angle(row % time, i).sin_cos();
                let sin = if back { -sin } else { sin };
                let at = row * width + head * head_width + i;
                let [first, second] = [x[at], x[at + half]].map(f64::from);
                (want[at], want[at + half]) = (first * cos - second * sin, second * cos + first * sin);
            }
            close(b, &turned, &want, "rotary positions");
            results.push(down(b, &turned));
        }
    }
    results
}

fn gates<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, width) in [(1, 1), (7, 33), (70, 64), (3, 20_001)] {
        let x: Vec<f32> = random(b, 38, rows * 2 * width).iter().map(|x| 3.0 * x).collect();
        let (x, dy) = (rounded(b, &x), random(b, 39, rows * width));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let slope = |x: f64| (silu(x + 1e-5) - silu(x - 1e-5)) / 2e-5;
        let (mut want_y, mut want_d) = (vec![0.0; rows * width], vec![0.0; rows * 2 * width]);
        for (row, i) in (0..rows * width).map(|n| (n / width, n % width)) {
            let (at, of_gate) = (row * width + i, row * 2 * width + i);
            let [gate, up, dy] = [x[of_gate], x[of_gate + width], dy[at]].map(f64::from);
            want_y[at] = silu(gate) * up;
            (want_d[of_gate], want_d[of_gate + width]) = (dy * up * slope(gate), dy * silu(gate));
        }
        let (mut xb, dyb, mut y) = (up(b, &x), up(b, &dy), up(b, &vec![0.0; rows * width]));
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
    assert!(y[0].abs() < 1e-30 && y[1].abs() < 1e-30 && y[2..] == rounded(b, &[100.0, 1e4]), "{y:?}");
    results
}

fn optimizers<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for len in [0, 1, 33, 20_001] {
        let (g, m, p) = (random(b, 31, len), random(b, 32, len), random(b, 33, len));
        let v: Vec<f32> = random(b, 34, len).iter().map(|x| x * x).collect();
        let (gb, mut mb, mut vb, mut pb) = (up_f32(b, &g), up_f32(b, &m), up_f32(b, &v), up_f32(b, &p));
        let mut copy = up(b, &p);
        let u = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.2, step: 3, grad_scale: 0.5 };
        let squares = b.adamw_step_squares(u, B::all(&gb), B::all(&mb), B::all(&vb), B::all(&pb)).unwrap();
        let (m_view, v_view, p_view) = (B::all_mut(&mut mb), B::all_mut(&mut vb), B::all_mut(&mut pb));
        b.adamw(u, B::all(&gb), m_view, v_view, p_view, Some(B::all_mut(&mut copy))).unwrap();
        let [lr, beta1, beta2, decay] = [u.lr, u.beta1, u.beta2, u.weight_decay].map(f64::from);
        let (mut want_m, mut want_v, mut want_p) = (vec![], vec![], vec![]);
        for i in 0..len {
            let g = f64::from(g[i]) * 0.5;
            want_m.push(beta1 * f64::from(m[i]) + (1.0 - beta1) * g);
            want_v.push(beta2 * f64::from(v[i]) + (1.0 - beta2) * g * g);
            let (m_hat, v_hat) = (want_m[i] / (1.0 - beta1.powi(3)), want_v[i] / (1.0 - beta2.powi(3)));
            want_p.push(f64::from(p[i]) * (1.0 - lr * decay) - lr * m_hat / (v_hat.sqrt() + 1e-8));
        }
        let step = |(&p, want): (&f32, &f64)| (f64::from(p) - want) / lr;
        let want: f64 = p.iter().zip(&want_p).map(step).map(|u| u * u).sum();
        let got = b.read(squares).unwrap();
        assert!((got - want).abs() <= 1e-5 * want, "adamw step squares: {got} is not {want}");
        close(b, &mb, &want_m, "adamw m");
        close(b, &vb, &want_v, "adamw v");
        close(b, &pb, &want_p, "adamw p");
        assert_eq!(down(b, &copy), rounded(b, &down(b, &pb)));
        results.extend([down(b, &mb), down(b, &vb), down(b, &pb)]);

        for nesterov in [false, true] {
            let (mut mb, mut pb) = (up_f32(b, &m), up_f32(b, &p));
            let u = Sgd { lr: 0.1, momentum: 0.9, nesterov, weight_decay: 0.2, grad_scale: 0.5 };
            b.sgd(u, B::all(&gb), B::all_mut(&mut mb), B::all_mut(&mut pb), None).unwrap();
            let (mut want_m, mut want_p) = (vec![], vec![]);
            for i in 0..len {
                let [g, m, p] = [g[i], m[i], p[i]].map(f64::from);
                let g = g * 0.5 + f64::from(0.2f32) * p;
                let m = f64::from(0.9f32) * m + g;
                want_p.push(p - f64::from(0.1f32) * if nesterov { g + f64::from(0.9f32) * m } else { m });
                want_m.push(m);
            }
            close(b, &mb, &want_m, "sgd momentum");
            close(b, &pb, &want_p, "sgd p");
            results.extend([down(b, &mb), down(b, &pb)]);
        }

        let (mut pb, mut copy) = (up_f32(b, &p), up(b, &p));
        b.approach(0.3, B::all(&gb), B::all_mut(&mut pb), Some(B::all_mut(&mut copy))).unwrap();
        let want: Vec<f64> = wide(&p).iter().zip(wide(&g)).map(|(p, g)| p + f64::from(0.3f32) * (g - p)).collect();
        close(b, &pb, &want, "approach");
        assert_eq!(down(b, &copy), rounded(b, &down(b, &pb)));
        results.push(down(b, &pb));

        for rule in [
            Elementwise::Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
            Elementwise::Adagrad { eps: 1e-6 },
            Elementwise::RmsProp { alpha: 0.9, eps: 1e-6, momentum: 0.8 },
            Elementwise::Lion { beta1: 0.9, beta2: 0.99 },
        ] {
            let u = Elements { rule, lr: 0.1, weight_decay: 0.2, step: 3, grad_scale: 0.5 };
            let squares = matches!(rule, Elementwise::Adam { .. });
            let of_second = if squares {
                &v[..]
            } else if rule.states() == 2 {
                &m[..]
            } else {
                &[]
            };
            let of_first = if squares { &m[..] } else { &v[..] };
            let (mut first, mut second, mut pb) = (up_f32(b, of_first), up_f32(b, of_second), up_f32(b, &p));
            let mut copy = up(b, &p);
            let (one, two, to) = (B::all_mut(&mut first), B::all_mut(&mut second), B::all_mut(&mut pb));
            b.elements(u, B::all(&gb), one, two, to, Some(B::all_mut(&mut copy))).unwrap();
            let (mut want_first, mut want_second, mut want_p) = (vec![], vec![], vec![]);
            for i in 0..len {
                let [raw, p] = [0.5 * g[i], p[i]].map(f64::from);
                let s = f64::from(of_first[i]);
                let t = of_second.get(i).map_or(0.0, |t| f64::from(*t));
                let (lr, decay) = (f64::from(0.1f32), f64::from(0.2f32));
                let coupled = raw + decay * p;
                let (s, t, p) = match rule {
                    Elementwise::Adam { beta1, beta2, eps } => {
                        let [b1, b2, eps] = [beta1, beta2, eps].map(f64::from);
                        let (s, t) = (b1 * s + (1.0 - b1) * coupled, b2 * t + (1.0 - b2) * coupled * coupled);
                        let (m_hat, v_hat) = (s / (1.0 - b1.powi(3)), t / (1.0 - b2.powi(3)));
                        (s, t, p - lr * m_hat / (v_hat.sqrt() + eps))
                    }
                    Elementwise::Adagrad { eps } => {
                        let s = s + coupled * coupled;
                        (s, t, p - lr * coupled / (s.sqrt() + f64::from(eps)))
                    }
                    Elementwise::RmsProp { alpha, eps, momentum } => {
                        let [alpha, eps, momentum] = [alpha, eps, momentum].map(f64::from);
                        let s = alpha * s + (1.0 - alpha) * coupled * coupled;
                        let t = momentum * t + coupled / (s.sqrt() + eps);
                        (s, t, p - lr * t)
                    }
                    Elementwise::Lion { beta1, beta2 } => {
                        let [b1, b2] = [beta1, beta2].map(f64::from);
                        let way = b1 * s + (1.0 - b1) * raw;
                        (b2 * s + (1.0 - b2) * raw, t, p * (1.0 - lr * decay) - lr * way.signum())
                    }
                };
                want_first.push(s);
                want_second.push(t);
                want_p.push(p);
            }
            close(b, &first, &want_first, &format!("{rule:?} first state"));
            if rule.states() == 2 {
                close(b, &second, &want_second, &format!("{rule:?} second state"));
            }
            close(b, &pb, &want_p, &format!("{rule:?} p"));
            assert_eq!(down(b, &copy), rounded(b, &down(b, &pb)));
            results.extend([down(b, &first), down(b, &second), down(b, &pb)]);
        }
    }
    results
}

fn dropouts<B: Kernels>(b: &B) -> Results {
    let len = 40_000;
    let mask = |offset| Dropout { rate: 0.25, key: 9, offset };
    let mut whole = up(b, &vec![1.0; len]);
    b.dropout(mask(0), B::all_mut(&mut whole)).unwrap();
    let whole = down(b, &whole);
    let kept = whole.iter().filter(|&&x| x != 0.0).count() as f64 / len as f64;
    assert!((kept - 0.75).abs() < 0.01, "kept {kept}");
    let factor = rounded(b, &[1.0 / 0.75])[0];
    assert!(whole.iter().all(|&x| x == 0.0 || x == factor));
    // Any window sees its part of the same mask.
    for (start, end) in [(0, 1), (1, 2), (2, 20_001), (16_383, 16_390), (5, 5), (39_999, 40_000)] {
        let mut part = up(b, &vec![1.0; end - start]);
        b.dropout(mask(start as u64), B::all_mut(&mut part)).unwrap();
        assert_eq!(down(b, &part), whole[start..end], "{start}..{end}");
    }
    let mut other = up(b, &vec![1.0; len]);
    b.dropout(Dropout { key: 10, ..mask(0) }, B::all_mut(&mut other)).unwrap();
    assert_ne!(down(b, &other), whole);
    let mut none = up(b, &random(b, 35, 100));
    b.dropout(Dropout { rate: 0.0, ..mask(0) }, B::all_mut(&mut none)).unwrap();
    assert_eq!(down(b, &none), random(b, 35, 100));
    vec![whole]
}

/// Panics unless an operation gives the same bits on any number of threads.
fn on_any_threads(test: fn(&Cpu) -> Results) {
    let one = bits(test(&Cpu::new(1)));
    for threads in [2, 3, 8] {
        assert!(bits(test(&Cpu::new(threads))) == one, "{threads} threads give other bits than one");
    }
}

fn bits(results: Results) -> Vec<Vec<u32>> {
    results.into_iter().map(|result| result.into_iter().map(f32::to_bits).collect()).collect()
}

macro_rules! on_cpu {
    ($($operation:ident: $test:expr,)*) => {
        mod cpu {
            $(
                #[test]
                fn $operation() {
                    super::on_any_threads($test);
                }
            )*
        }
    };
}

each_operation! { on_cpu! {
    products: |b| super::products(b, super::random),
    convolutions: |b| super::layers::convolutions(b, super::random),
} }

/// Products by a library on several numbers of threads: false if the library is missing.
fn by_library(by: Products, random: fn(&Cpu, u64, usize) -> Vec<f32>) -> bool {
    let on = |threads| -> Option<Vec<Vec<u32>>> {
        let cpu = Cpu::new(threads).with_products(by).map_err(|e| eprintln!("skipped: {e}")).ok()?;
        Some(bits([layers::convolutions(&cpu, random), products(&cpu, random)].concat()))
    };
    let Some(one) = on(1) else { return false };
    for threads in [2, 3, 8] {
        assert!(on(threads).as_ref() == Some(&one), "{threads} threads give other bits than one");
    }
    true
}

#[test]
fn products_by_onednn_are_right_and_do_not_depend_on_the_threads() {
    by_library(Products::OneDnn, random);
}

#[test]
fn products_of_bf16_are_right_where_the_cpu_has_them() {
    // Operands that bf16 holds: the sums are those of f32.
    let narrow = |_: &Cpu, seed, len| -> Vec<f32> {
        random(&Cpu::new(1), seed, len).into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect()
    };
    by_library(Products::Bf16, narrow);
}

/// An operation on the first GPU, twice.
fn on_first_gpu(precision: cuda::Precision, test: fn(&cuda::Cuda) -> Results) {
    let device = cuda::Device::open(0).unwrap();
    let once = || bits(test(&cuda::Cuda::new(&device, 256 << 20, precision).unwrap()));
    assert!(once() == once(), "two runs give different bits");
}

/// Bits of TF32's mantissa.
const TF32_BITS: u32 = 10;

/// As [`random`], in TF32.
fn random_tf32<B: Kernels>(b: &B, seed: u64, len: usize) -> Vec<f32> {
    let lost = f32::MANTISSA_DIGITS - 1 - TF32_BITS;
    random(b, seed, len).into_iter().map(|x| f32::from_bits(x.to_bits() >> lost << lost)).collect()
}

/// Products in TF32 round their operands to it and no further: operands that it holds give the results of f32, and
/// others are off by the rounding of the two, of each product's magnitude.
fn products_in_tf32<B: Kernels>(b: &B) -> Results {
    let mut results = products(b, random_tf32);
    // For any rounding. Sums in f32 add their own error.
    let operand = 0.5f64.powi(TF32_BITS as i32);
    let (mut furthest, mut beyond_f32) = (0.0f64, 0);
    for (m, n, k) in [(1, 1, 1), (1, 33, 7), (33, 31, 65), (130, 257, 100)] {
        let (x, y) = (random(b, 3, m * k), random(b, 4, k * n));
        let (xb, yb, mut zb) = (up(b, &x), up(b, &y), up(b, &vec![0.0; m * n]));
        let shape = Gemm { m, n, k, ta: false, tb: false, acc: false };
        b.gemm(shape, B::all(&xb), B::all(&yb), B::all_mut(&mut zb)).unwrap();
        let (xt, yt) = (|i: usize, l: usize| f64::from(x[i * k + l]), |l: usize, j: usize| f64::from(y[l * n + j]));
        let want = product(m, n, k, xt, yt);
        let magnitudes = product(m, n, k, |i, l| xt(i, l).abs(), |l, j| yt(l, j).abs());
        let got = down(b, &zb);
        for (i, ((&got, want), magnitude)) in got.iter().zip(want).zip(magnitudes).enumerate() {
            let off = (f64::from(got) - want).abs() / magnitude;
            let of_sums = k as f64 * f64::from(f32::EPSILON);
            assert!(off <= (1.0 + operand).powi(2) - 1.0 + of_sums, "tf32 {m}×{n}×{k}[{i}]: {got}, in f64 {want}");
            furthest = furthest.max(off);
            beyond_f32 += usize::from(off > of_sums);
        }
        results.push(got);
    }
    assert!(beyond_f32 > 0, "products are at most {furthest:e} off: they are not in TF32");
    results
}

/// Runs an ignored test of this program with the simulator's libraries (`tests/cudasim/`).
fn simulated(test: &str, settings: &[(&str, &str)]) {
    let program = std::env::current_exe().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Beside the folder of the programs, where integration tests build it too.
    let out = program.ancestors().nth(3).unwrap().join("tmp/cudasim");
    assert!(Command::new(root.join("tests/cudasim/build.sh")).arg(&out).status().unwrap().success());
    let mut command = Command::new(program);
    command.args([&format!("backend::suite::{test}"), "--exact", "--ignored", "--nocapture"]);
    command.env("LD_LIBRARY_PATH", out.join("lib")).env("CUDASIM_CACHE", out.join("kernels"));
    command.env("XDG_CACHE_HOME", out.join("cache")).env_remove("CUDA_VISIBLE_DEVICES");
    let output = command.envs(settings.iter().copied()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let told = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success() && told.contains("1 passed"), "{settings:?}: {told}");
}

macro_rules! on_cuda {
    ($module:ident, $precision:expr; $($operation:ident: $test:expr,)*) => {
        mod $module {
            $(
                #[test]
                #[ignore = "needs a GPU or its simulator"]
                fn $operation() {
                    super::on_first_gpu($precision, $test);
                }
            )*
        }
    };
}

each_operation! { on_cuda! {
    cuda_f32, super::cuda::Precision::F32(super::cuda::Arithmetic::Full);
    products: |b| super::products(b, super::random),
    convolutions: |b| super::layers::convolutions(b, super::random),
} }

each_operation! { on_cuda! {
    cuda_tf32, super::cuda::Precision::F32(super::cuda::Arithmetic::Tf32);
    products: super::products_in_tf32,
    convolutions: |b| super::layers::convolutions(b, super::random_tf32),
} }

each_operation! { on_cuda! {
    cuda_bf16, super::cuda::Precision::Bf16;
    products: |b| super::products(b, super::random),
    convolutions: |b| super::layers::convolutions(b, super::random),
} }

/// The tests of a module on the simulator, with settings of it.
macro_rules! simulated {
    ($module:ident, $of:literal, $settings:expr; $($operation:ident: $_test:expr,)*) => {
        mod $module {
            $(
                #[test]
                fn $operation() {
                    super::simulated(concat!($of, "::", stringify!($operation)), $settings);
                }
            )*
        }
    };
}

each_operation! { simulated! {
    simulated_f32, "cuda_f32", &[("CUDASIM_STREAMS", "lazy"), ("CUDASIM_ORDER", "reverse")];
    products: super::products,
    convolutions: super::layers::convolutions,
} }

each_operation! { simulated! {
    simulated_tf32, "cuda_tf32", &[];
    products: super::products_in_tf32,
    convolutions: super::layers::convolutions,
} }

each_operation! { simulated! {
    simulated_bf16, "cuda_bf16", &[("CUDASIM_HOST_ACCESS", "0")];
    products: super::products,
    convolutions: super::layers::convolutions,
} }

each_operation! { simulated! {
    simulated_without_races_f32, "cuda_f32", &[("CUDASIM_CHECK", "1")];
    products: super::products,
    convolutions: super::layers::convolutions,
} }

each_operation! { simulated! {
    simulated_without_races_bf16, "cuda_bf16", &[("CUDASIM_CHECK", "1")];
    products: super::products,
    convolutions: super::layers::convolutions,
} }
