//! The operations of networks by layers, and losses.

use super::{Results, close, down, ids, random, rounded, up, up_f32, wide};
use crate::backend::{
    Activation, Channels, Columns, Convolution, CrossEntropy, Deviation, Kernels, LossWeights, Pairs, Regression,
    Window,
};

pub fn activations<B: Kernels>(b: &B) -> Results {
    let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
    let gelu = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    type Function<'a> = (Activation, &'a dyn Fn(f64) -> f64);
    let all: [Function<'_>; 5] = [
        (Activation::Relu, &|x| x.max(0.0)),
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
        // A rectifier has no slope at zero to take the difference over.
        let slope = |x: f64| match f {
            Activation::Relu => f64::from(x > 0.0),
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

pub fn softmaxes<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, width) in [(1, 1), (7, 33), (70, 10), (3, 5001)] {
        let x: Vec<f32> = random(b, 50, rows * width).iter().map(|x| 3.0 * x + 50.0).collect();
        let (x, dy) = (rounded(b, &x), random(b, 51, rows * width));
        let (mut want_y, mut want_d) = (vec![], vec![]);
        for (x, dy) in x.chunks(width).zip(dy.chunks(width)) {
            let (x, dy) = (wide(x), wide(dy));
            let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = x.iter().map(|x| (x - top).exp()).sum();
            let y: Vec<f64> = x.iter().map(|x| (x - top).exp() / total).collect();
            let dot: f64 = y.iter().zip(&dy).map(|(y, dy)| y * dy).sum();
            want_d.extend(y.iter().zip(&dy).map(|(y, dy)| y * (dy - dot)));
            want_y.extend(y);
        }
        let (xb, mut y, mut d) = (up(b, &x), up(b, &vec![0.0; rows * width]), up(b, &dy));
        b.softmax(width, B::all(&xb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &want_y, "softmax");
        b.softmax_backward(width, B::all(&y), B::all_mut(&mut d)).unwrap();
        if width > 1 {
            close(b, &d, &want_d, "softmax backward");
        }
        results.extend([down(b, &y), down(b, &d)]);
    }
    results
}

/// Calls `see` for every element that the window sees: place of the output, row and column in the window, element.
fn each_seen(w: Window, channel: usize, mut see: impl FnMut(usize, [usize; 2], Option<usize>)) {
    let [high, wide] = w.places();
    for place in 0..w.batch * high * wide {
        let (image, row, column) = (place / wide / high, place / wide % high, place % wide);
        for (i, j) in (0..w.size[0]).flat_map(|i| (0..w.size[1]).map(move |j| (i, j))) {
            let line = (row * w.stride[0] + i).checked_sub(w.padding[0]).filter(|line| *line < w.height);
            let at = (column * w.stride[1] + j).checked_sub(w.padding[1]).filter(|at| *at < w.width);
            let element =
                line.zip(at).map(|(line, at)| ((image * w.height + line) * w.width + at) * w.channels + channel);
            see(place, [i, j], element);
        }
    }
}

/// `random` draws operands of products.
pub fn convolutions<B: Kernels>(b: &B, random: fn(&B, u64, usize) -> Vec<f32>) -> Results {
    let mut results = Vec::new();
    for (batch, [height, width, all], size, stride, padding, [first, channels, filters]) in [
        (1, [1, 1, 1], [1, 1], [1, 1], [0, 0], [0, 1, 1]),
        (2, [5, 7, 3], [3, 3], [1, 1], [1, 1], [0, 3, 17]),
        (3, [9, 8, 5], [3, 2], [2, 3], [1, 0], [2, 3, 4]),
        // Several tiles an image, and parts of the gradient of the filters.
        (2, [40, 41, 1], [3, 3], [1, 1], [0, 0], [0, 1, 3]),
        (5, [12, 12, 16], [5, 3], [1, 1], [2, 1], [0, 16, 8]),
        // More filters than tiles are worth it for.
        (1, [4, 3, 128], [3, 3], [1, 1], [1, 1], [0, 128, 60]),
    ] {
        let window = Window { batch, height, width, channels: all, size, stride, padding };
        let s = Convolution { window, first, channels, filters };
        let (rows, seen) = (window.rows(), s.seen());
        let (x, weight, bias) =
            (random(b, 70, window.elements()), random(b, 71, filters * seen), random(b, 72, filters));
        let (dy, dx) = (random(b, 73, rows * filters), random(b, 74, window.elements()));
        let mut want_y: Vec<f64> = (0..rows).flat_map(|_| wide(&bias)).collect();
        let (mut want_dw, mut want_db, mut want_dx) = (vec![0.0; filters * seen], vec![0.0; filters], wide(&dx));
        for channel in 0..channels {
            each_seen(window, first + channel, |place, [i, j], element| {
                let Some(element) = element else { return };
                for filter in 0..filters {
                    let at = filter * seen + (i * size[1] + j) * channels + channel;
                    let (y, w, x) = (place * filters + filter, f64::from(weight[at]), f64::from(x[element]));
                    want_y[y] += w * x;
                    want_dw[at] += f64::from(dy[y]) * x;
                    want_dx[element] += f64::from(dy[y]) * w;
                }
            });
        }
        (0..rows * filters).for_each(|i| want_db[i % filters] += f64::from(dy[i]));
        let [xb, wb, bb, dyb, mut dxb] = [&x, &weight, &bias, &dy, &dx].map(|values| up(b, values));
        let mut y = up(b, &vec![0.0; rows * filters]);
        b.convolve(s, B::all(&xb), B::all(&wb), B::all(&bb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &want_y, "convolution");
        let (mut dw, mut db) = (up_f32(b, &vec![0.0; filters * seen]), up_f32(b, &vec![0.0; filters]));
        let (to_weight, to_bias) = (B::all_mut(&mut dw), B::all_mut(&mut db));
        b.convolve_backward_weight(s, B::all(&dyb), B::all(&xb), to_weight, to_bias).unwrap();
        close(b, &dw, &want_dw, "convolution, weight's gradient");
        close(b, &db, &want_db, "convolution, bias's gradient");
        b.convolve_backward_input(s, B::all(&dyb), B::all(&wb), B::all_mut(&mut dxb)).unwrap();
        close(b, &dxb, &want_dx, "convolution, input's gradient");
        results.extend([down(b, &y), down(b, &dw), down(b, &db), down(b, &dxb)]);
    }
    results
}

pub fn windows<B: Kernels>(b: &B) -> Results {
    let window = |batch, [height, width, channels]: [usize; 3], size, stride, padding| Window {
        batch,
        height,
        width,
        channels,
        size,
        stride,
        padding,
    };
    let mut results = Vec::new();
    for w in [
        window(1, [1, 1, 1], [1, 1], [1, 1], [0, 0]),
        window(2, [5, 7, 3], [3, 3], [1, 1], [1, 1]),
        window(3, [6, 5, 4], [2, 2], [2, 2], [0, 0]),
        window(1, [9, 8, 5], [3, 2], [2, 3], [1, 0]),
        window(2, [7, 7, 2], [5, 7], [3, 1], [4, 3]),
        window(2, [4, 4, 33], [4, 4], [4, 4], [0, 0]),
    ] {
        let x = random(b, 60, w.elements());
        let xb = up(b, &x);
        for (first, channels) in [(0, w.channels), (w.channels / 2, w.channels - w.channels / 2)] {
            let row = w.size[0] * w.size[1] * channels;
            let dy = random(b, 61, w.rows() * row);
            let (mut want, mut want_d) = (vec![0.0; w.rows() * row], wide(&random(b, 62, w.elements())));
            for channel in 0..channels {
                each_seen(w, first + channel, |place, [i, j], element| {
                    let at = place * row + (i * w.size[1] + j) * channels + channel;
                    if let Some(element) = element {
                        want[at] = x[element];
                        want_d[element] += f64::from(dy[at]);
                    }
                });
            }
            let mut y = up(b, &random(b, 63, w.rows() * row));
            b.unfold(w, first, channels, B::all(&xb), B::all_mut(&mut y)).unwrap();
            assert_eq!(down(b, &y), want, "unfold {w:?}");
            let (dyb, mut dx) = (up(b, &dy), up(b, &random(b, 62, w.elements())));
            b.fold(w, first, channels, B::all(&dyb), B::all_mut(&mut dx)).unwrap();
            close(b, &dx, &want_d, "fold");
            results.push(down(b, &dx));
        }

        // Few values, so that some windows have two largest elements.
        let few: Vec<f32> = ids(64, w.elements(), 4).into_iter().map(|id| id as f32 - 2.0).collect();
        let (fb, dy) = (up(b, &few), random(b, 65, w.rows() * w.channels));
        let outputs = w.rows() * w.channels;
        let (mut largest, mut place_of) = (vec![f32::NEG_INFINITY; outputs], vec![0; outputs]);
        let (mut sums, mut counts) = (vec![0.0; outputs], vec![0.0; outputs]);
        for channel in 0..w.channels {
            each_seen(w, channel, |place, _, element| {
                let (Some(element), at) = (element, place * w.channels + channel) else { return };
                if few[element] > largest[at] {
                    (largest[at], place_of[at]) = (few[element], element);
                }
                sums[at] += f64::from(x[element]);
                counts[at] += 1.0;
            });
        }
        let (mut want_max, mut want_mean) = (vec![0.0; w.elements()], vec![0.0; w.elements()]);
        for (at, dy) in dy.iter().enumerate() {
            want_max[place_of[at]] += f64::from(*dy);
        }
        for channel in 0..w.channels {
            each_seen(w, channel, |place, _, element| {
                let at = place * w.channels + channel;
                if let Some(element) = element {
                    want_mean[element] += f64::from(dy[at]) / counts[at];
                }
            });
        }
        let (dyb, mut y, mut dx) = (up(b, &dy), up(b, &vec![0.0; outputs]), up(b, &random(b, 66, w.elements())));
        b.max_pool(w, B::all(&fb), B::all_mut(&mut y)).unwrap();
        assert_eq!(down(b, &y), largest, "max pool {w:?}");
        b.max_pool_backward(w, B::all(&fb), B::all(&dyb), B::all_mut(&mut dx)).unwrap();
        close(b, &dx, &want_max, "max pool backward");
        results.push(down(b, &dx));
        b.average_pool(w, B::all(&xb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &sums.iter().zip(&counts).map(|(sum, count)| sum / count).collect::<Vec<_>>(), "average pool");
        b.average_pool_backward(w, B::all(&dyb), B::all_mut(&mut dx)).unwrap();
        close(b, &dx, &want_mean, "average pool backward");
        results.extend([down(b, &y), down(b, &dx)]);
    }
    results
}

pub fn columns<B: Kernels>(b: &B) -> Results {
    for (rows, count, from, to) in [(1, 1, [1, 0], [1, 0]), (33, 3, [7, 2], [5, 1]), (700, 31, [31, 0], [65, 34])] {
        let (x, y) = (random(b, 67, rows * from[0]), random(b, 68, rows * to[0]));
        let (xb, mut yb, mut want) = (up(b, &x), up(b, &y), y);
        for (row, column) in (0..rows).flat_map(|row| (0..count).map(move |column| (row, column))) {
            want[row * to[0] + to[1] + column] = x[row * from[0] + from[1] + column];
        }
        b.copy_columns(Columns { rows, count, from, to }, B::all(&xb), B::all_mut(&mut yb)).unwrap();
        assert_eq!(down(b, &yb), want);
    }
    vec![]
}

pub fn pairs<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    // Pairs counted from 0 where their square root is whole, or not quite.
    for (samples, rows, width) in [(1, 2, 1), (3, 5, 7), (33, 27, 16), (2, 130, 3), (700, 3, 35)] {
        let shape = Pairs { samples, rows, width };
        let (inputs, outputs) = (rows * width, shape.outputs());
        let (x, dy) = (random(b, 71, samples * inputs), random(b, 72, samples * outputs));
        let (wx, wdy) = (wide(&x), wide(&dy));
        let (mut want_y, mut want_dx) = (Vec::new(), vec![0.0; samples * inputs]);
        for sample in 0..samples {
            let (x, dy) = (&wx[sample * inputs..][..inputs], &wdy[sample * outputs..][..outputs]);
            let dx = &mut want_dx[sample * inputs..][..inputs];
            want_y.extend_from_slice(&x[..width]);
            dx[..width].copy_from_slice(&dy[..width]);
            let pairs = (1..rows).flat_map(|i| (0..i).map(move |j| (i, j)));
            for ((i, j), slope) in pairs.zip(&dy[width..]) {
                want_y.push((0..width).map(|k| x[i * width + k] * x[j * width + k]).sum());
                for k in 0..width {
                    dx[i * width + k] += slope * x[j * width + k];
                    dx[j * width + k] += slope * x[i * width + k];
                }
            }
        }
        let (xb, dyb) = (up(b, &x), up(b, &dy));
        let (mut y, mut dx) = (up(b, &vec![9.0; samples * outputs]), up(b, &vec![9.0; samples * inputs]));
        b.pair_products(shape, B::all(&xb), B::all_mut(&mut y)).unwrap();
        close(b, &y, &want_y, &format!("{shape:?}"));
        b.pair_products_backward(shape, B::all(&xb), B::all(&dyb), B::all_mut(&mut dx)).unwrap();
        close(b, &dx, &want_dx, &format!("{shape:?} backward"));
        results.extend([down(b, &y), down(b, &dx)]);
    }
    results
}

/// Statistics and normalisation of channels, each number by its definition.
pub fn channels<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    // One chunk of places and many, one channel and more than a warp's, groups of one channel and of several.
    for (samples, places, channels, groups) in
        [(1, 1, 1, 1), (3, 37, 6, 3), (1, 301, 35, 35), (2, 600, 8, 1), (4, 2, 40, 5)]
    {
        let shape = Channels { samples, places, channels, groups };
        let (len, of_group) = (shape.elements(), channels / groups);
        // Far from zero, as sums of squares do not like it.
        let x: Vec<f32> = random(b, 1, len).iter().map(|x| x + 3.0).collect();
        let (x, dy) = (rounded(b, &x), random(b, 2, len));
        let (weight, bias) = (random(b, 3, channels), random(b, 4, channels));
        let stats: Vec<f32> = random(b, 5, 2 * samples * groups).iter().map(|x| x.abs() + 0.5).collect();
        let means = random(b, 6, 2 * samples * groups);
        let (xb, dyb, wb, bb) = (up(b, &x), up(b, &dy), up(b, &weight), up(b, &bias));
        let (sb, mb) = (up_f32(b, &stats), up_f32(b, &means));
        let what = format!("{shape:?}");
        let (xs, ds) = (wide(&x), wide(&dy));
        let at = |sample: usize, place: usize, channel: usize| (sample * places + place) * channels + channel;
        let group = |sample: usize, channel: usize| 2 * (sample * groups + channel / of_group);

        let mut moments = up_f32(b, &vec![7.0; samples * 3 * channels]);
        b.channel_moments(shape, B::all(&xb), B::all_mut(&mut moments)).unwrap();
        let mut want = Vec::new();
        for sample in 0..samples {
            let shift = |channel| xs[at(sample, 0, channel)];
            let apart = |channel, place| xs[at(sample, place, channel)] - shift(channel);
            want.extend((0..channels).map(shift));
            want.extend((0..channels).map(|channel| (0..places).map(|place| apart(channel, place)).sum::<f64>()));
            want.extend(
                (0..channels).map(|channel| (0..places).map(|place| apart(channel, place).powi(2)).sum::<f64>()),
            );
        }
        close_f32(&down(b, &moments), &want, &format!("moments {what}"));

        let mut y = up(b, &vec![7.0; len]);
        b.channel_norm(shape, B::all(&xb), B::all(&sb), B::all(&wb), B::all(&bb), B::all_mut(&mut y)).unwrap();
        let mut sums = up_f32(b, &vec![7.0; samples * 2 * channels]);
        b.channel_norm_sums(shape, B::all(&xb), B::all(&dyb), B::all(&sb), B::all_mut(&mut sums)).unwrap();
        let (mut dx, mut want_y, mut want_dx) = (up(b, &vec![7.0; len]), vec![0.0; len], vec![0.0; len]);
        let mut want_sums = vec![0.0; samples * 2 * channels];
        b.channel_norm_backward(
            shape,
            B::all(&xb),
            B::all(&dyb),
            B::all(&sb),
            B::all(&wb),
            B::all(&mb),
            B::all_mut(&mut dx),
        )
        .unwrap();
        for (sample, place, channel) in
            (0..samples).flat_map(|s| (0..places).flat_map(move |p| (0..channels).map(move |c| (s, p, c))))
        {
            let (at, group) = (at(sample, place, channel), group(sample, channel));
            let [mean, rstd] = [stats[group], stats[group + 1]].map(f64::from);
            let [a, b] = [means[group], means[group + 1]].map(f64::from);
            let (hat, w) = ((xs[at] - mean) * rstd, f64::from(weight[channel]));
            want_y[at] = hat * w + f64::from(bias[channel]);
            want_dx[at] = rstd * (ds[at] * w - a - hat * b);
            want_sums[2 * sample * channels + channel] += ds[at];
            want_sums[(2 * sample + 1) * channels + channel] += ds[at] * hat;
        }
        close(b, &y, &want_y, &format!("channel norm {what}"));
        close_f32(&down(b, &sums), &want_sums, &format!("channel sums {what}"));
        close(b, &dx, &want_dx, &format!("channel norm backward {what}"));
        results.extend([down(b, &moments), down(b, &y), down(b, &sums), down(b, &dx)]);
    }
    results
}

/// As [`close`], for sums that are f32 on every device: relative to the largest of all.
fn close_f32(got: &[f32], want: &[f64], what: &str) {
    let most = want.iter().fold(0.0f64, |most, want| most.max(want.abs())).max(1.0);
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() <= 2e-6 * most, "{what}[{i}]: {got} is not {want}");
    }
}

pub fn classifiers<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (rows, classes) in [(1, 1), (31, 65), (3, 50_257), (600, 33)] {
        let logits: Vec<f32> = random(b, 29, rows * classes).iter().map(|x| 4.0 * x + 100.0).collect();
        let logits = rounded(b, &logits);
        let targets = ids(30, rows, classes);
        let tb = b.upload_ints(&targets).unwrap();
        let scale = 0.25;
        let some: Vec<f32> = (0..classes).map(|class| 0.5 + (class % 3) as f32).collect();
        // Among them a row that does not count.
        let of_rows: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 * 0.7).collect();
        for (smoothing, weights, of_rows) in [(0.0, &[][..], &[][..]), (0.2, &some, &of_rows), (0.0, &[], &of_rows)] {
            let (wb, rb) = (up_f32(b, weights), up_f32(b, of_rows));
            let (mut want_loss, mut want_d) = (vec![], vec![]);
            for (row, &target) in targets.iter().enumerate() {
                let x = wide(&logits[row * classes..][..classes]);
                let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let log_total = x.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top;
                let factor = |weights: &[f32], at: usize| weights.get(at).map_or(1.0, |weight| f64::from(*weight));
                let weight = factor(weights, target as usize) * factor(of_rows, row);
                let smoothing = f64::from(smoothing);
                let wanted = |class: usize| {
                    smoothing / classes as f64 + if class == target as usize { 1.0 - smoothing } else { 0.0 }
                };
                let loss: f64 = x.iter().enumerate().map(|(class, x)| wanted(class) * (log_total - x)).sum();
                want_loss.push(weight * loss);
                let gradient = |(class, x): (usize, &f64)| (x - log_total).exp() - wanted(class);
                want_d.extend(x.iter().enumerate().map(|one| f64::from(scale) * weight * gradient(one)));
            }
            for gradient in [false, true] {
                let (mut lb, mut losses) = (up(b, &logits), up_f32(b, &vec![0.0; rows]));
                let shape = CrossEntropy { rows, classes, scale, gradient, smoothing };
                let weights = LossWeights { classes: B::all(&wb), rows: B::all(&rb) };
                b.cross_entropy(shape, B::all_mut(&mut lb), &tb, weights, B::all_mut(&mut losses)).unwrap();
                close(b, &losses, &want_loss, "cross-entropy");
                if gradient {
                    close(b, &lb, &want_d, "cross-entropy gradient");
                } else {
                    assert_eq!(down(b, &lb), logits);
                }
                results.extend([down(b, &losses), down(b, &lb)]);
            }
        }

        // Few values, so that some logits are equal.
        let few: Vec<f32> = ids(31, rows * classes, 7).into_iter().map(|id| id as f32).collect();
        let fb = up(b, &few);
        for k in [1, 5] {
            let mut hits = up_f32(b, &vec![0.5; rows]);
            b.hits(classes, k, B::all(&fb), &tb, B::all_mut(&mut hits)).unwrap();
            let is_hit = |(row, target): (usize, &u32)| {
                let row = &few[row * classes..][..classes];
                let mut order: Vec<usize> = (0..classes).collect();
                order.sort_by(|one, other| row[*other].total_cmp(&row[*one]));
                f32::from(order[..k.min(classes)].contains(&(*target as usize)))
            };
            assert_eq!(down(b, &hits), targets.iter().enumerate().map(is_hit).collect::<Vec<_>>(), "top {k}");
        }
    }
    let broken = up(b, &[f32::NAN, 1.0]);
    let (tb, mut hits) = (b.upload_ints(&[1]).unwrap(), up_f32(b, &[1.0]));
    b.hits(2, 1, B::all(&broken), &tb, B::all_mut(&mut hits)).unwrap();
    assert_eq!(down(b, &hits), [0.0]);
    results
}

pub fn regressions<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    let all = [Deviation::Squared, Deviation::Absolute, Deviation::Huber(0.7), Deviation::Binary, Deviation::Agreement];
    let shapes = [(1, 1, false), (33, 1, true), (33, 1, false), (7, 65, true), (600, 33, true)];
    for (by, (rows, width, is_weighted)) in all.into_iter().flat_map(|by| shapes.map(|shape| (by, shape))) {
        let weights: Vec<f32> = (0..rows).map(|row| (row % 4) as f32 * 0.7).collect();
        let weights = if is_weighted { &weights[..] } else { &[] };
        let (p, t) = (random(b, 69, rows * width), random(b, 70, rows * width));
        let of_logits = matches!(by, Deviation::Binary | Deviation::Agreement);
        let t: Vec<f32> = if of_logits { t.iter().map(|t| f32::from(*t > 0.0)).collect() } else { t };
        let scale = 0.25;
        let (mut want_loss, mut want_d) = (vec![0.0; rows], vec![]);
        for (i, (p, t)) in wide(&p).into_iter().zip(wide(&t)).enumerate() {
            let apart: f64 = p - t;
            let reach = f64::from(0.7f32);
            let (value, slope) = match by {
                Deviation::Squared => (apart * apart, 2.0 * apart),
                Deviation::Absolute => (apart.abs(), if apart == 0.0 { 0.0 } else { apart.signum() }),
                Deviation::Huber(_) if apart.abs() <= reach => (0.5 * apart * apart, apart),
                Deviation::Huber(_) => (reach * (apart.abs() - 0.5 * reach), reach * apart.signum()),
                Deviation::Binary => ((1.0 + p.exp()).ln() - p * t, 1.0 / (1.0 + (-p).exp()) - t),
                Deviation::Agreement => (f64::from((p > 0.0) == (t > 0.5)), 0.0),
            };
            let weight = weights.get(i / width).map_or(1.0, |weight| f64::from(*weight)) / width as f64;
            want_loss[i / width] += value * weight;
            want_d.push(f64::from(scale) * slope * weight);
        }
        let (tb, wb) = (up_f32(b, &t), up_f32(b, weights));
        for gradient in [false, true] {
            let (mut pb, mut losses) = (up(b, &p), up_f32(b, &vec![0.0; rows]));
            let shape = Regression { rows, width, by, scale, gradient };
            b.regression(shape, B::all_mut(&mut pb), B::all(&tb), B::all(&wb), B::all_mut(&mut losses)).unwrap();
            close(b, &losses, &want_loss, &format!("{by:?}"));
            if gradient {
                close(b, &pb, &want_d, &format!("{by:?} gradient"));
            } else {
                assert_eq!(down(b, &pb), p);
            }
            results.extend([down(b, &losses), down(b, &pb)]);
        }
    }
    // Far off nothing overflows.
    let (mut p, t, mut losses) = (up(b, &[1000.0, -1000.0]), up_f32(b, &[1.0, 1.0]), up_f32(b, &[0.0; 2]));
    let none = up_f32(b, &[]);
    let shape = Regression { rows: 2, width: 1, by: Deviation::Binary, scale: 1.0, gradient: true };
    b.regression(shape, B::all_mut(&mut p), B::all(&t), B::all(&none), B::all_mut(&mut losses)).unwrap();
    assert_eq!((down(b, &losses), down(b, &p)), (vec![0.0, 1000.0], vec![0.0, -1.0]));
    results
}
