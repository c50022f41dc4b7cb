//! Tests of the operations in `hpctrain_device::ops::im2col_pool`.

use crate::common::{Results, close, down, ids, random, to_f64, up};
use hpctrain_device::{Im2colShape, Kernels};

pub fn windows<B: Kernels>(b: &B) -> Results {
    let window = |batch, [height, width, channels]: [usize; 3], size, stride, padding| {
        Im2colShape { batch, height, width, channels, size, stride, padding }
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
            let mut want = vec![0.0; w.rows() * row];
            let mut want_d = to_f64(&random(b, 62, w.elements()));
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
            let dyb = up(b, &dy);
            let mut dx = up(b, &random(b, 62, w.elements()));
            b.fold(w, first, channels, B::all(&dyb), B::all_mut(&mut dx)).unwrap();
            close(b, &dx, &want_d, "fold");
            results.push(down(b, &dx));
        }

        // Few distinct values, so that some windows have two largest elements.
        let few: Vec<f32> =
            ids(64, w.elements(), 4).into_iter().map(|id| id as f32 - 2.0).collect();
        let fb = up(b, &few);
        let dy = random(b, 65, w.rows() * w.channels);
        let outputs = w.rows() * w.channels;
        let mut largest = vec![f32::NEG_INFINITY; outputs];
        let mut place_of = vec![0; outputs];
        let mut sums = vec![0.0; outputs];
        let mut counts = vec![0.0; outputs];
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
        let mut want_max = vec![0.0; w.elements()];
        let mut want_mean = vec![0.0; w.elements()];
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
        let dyb = up(b, &dy);
        let mut y = up(b, &vec![0.0; outputs]);
        let mut dx = up(b, &random(b, 66, w.elements()));
        b.max_pool(w, B::all(&fb), B::all_mut(&mut y)).unwrap();
        assert_eq!(down(b, &y), largest, "max pool {w:?}");
        b.max_pool_backward(w, B::all(&fb), B::all(&dyb), B::all_mut(&mut dx)).unwrap();
        close(b, &dx, &want_max, "max pool backward");
        results.push(down(b, &dx));
        b.average_pool(w, B::all(&xb), B::all_mut(&mut y)).unwrap();
        close(
            b,
            &y,
            &sums.iter().zip(&counts).map(|(sum, count)| sum / count).collect::<Vec<_>>(),
            "average pool",
        );
        b.average_pool_backward(w, B::all(&dyb), B::all_mut(&mut dx)).unwrap();
        close(b, &dx, &want_mean, "average pool backward");
        results.extend([down(b, &y), down(b, &dx)]);
    }
    results
}

/// Calls `see` for every element under the window with the output position, the row and column in
/// the window, and the element, or `None` in the padding.
pub fn each_seen(
    w: Im2colShape,
    channel: usize,
    mut see: impl FnMut(usize, [usize; 2], Option<usize>),
) {
    let [high, wide] = w.output_size();
    for place in 0..w.batch * high * wide {
        let image = place / wide / high;
        let row = place / wide % high;
        let column = place % wide;
        for (i, j) in (0..w.size[0]).flat_map(|i| (0..w.size[1]).map(move |j| (i, j))) {
            let line =
                (row * w.stride[0] + i).checked_sub(w.padding[0]).filter(|line| *line < w.height);
            let at =
                (column * w.stride[1] + j).checked_sub(w.padding[1]).filter(|at| *at < w.width);
            let element = line.zip(at).map(|(line, at)| {
                ((image * w.height + line) * w.width + at) * w.channels + channel
            });
            see(place, [i, j], element);
        }
    }
}
