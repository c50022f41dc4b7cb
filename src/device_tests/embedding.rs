//! Tests of the operations in `hpctrain_device::ops::embedding`.

use crate::common::{Results, close, down, ids, random, to_f64, up, up_f32};
use hpctrain_device::Kernels;

pub fn embeddings<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (sequences, time, vocabulary, width) in
        [(1, 1, 1, 1), (3, 31, 11, 33), (5, 64, 200, 65), (20, 33, 2, 96)]
    {
        let rows = sequences * time;
        let tokens = ids(21, rows, vocabulary);
        let words = random(b, 22, vocabulary * width);
        let places = random(b, 23, time * width);
        let tb = b.upload_indices(&tokens).unwrap();
        let wb = up(b, &words);
        let pb = up(b, &places);
        let mut y = up(b, &vec![0.0; rows * width]);
        b.embedding(&tb, 0, B::all(&wb), B::all(&pb), B::all_mut(&mut y)).unwrap();
        let sums = (0..rows * width).map(|at| {
            let (row, i) = (at / width, at % width);
            f64::from(words[tokens[row] as usize * width + i])
                + f64::from(places[row % time * width + i])
        });
        close(b, &y, &sums.collect::<Vec<_>>(), "embedding");

        let dy = random(b, 24, rows * width);
        let dw0 = random(b, 25, words.len());
        let dp0 = random(b, 26, places.len());
        let dyb = up(b, &dy);
        let mut dw = up_f32(b, &dw0);
        let mut dp = up_f32(b, &dp0);
        b.embedding_backward(&tb, 0, B::all(&dyb), B::all_mut(&mut dw), B::all_mut(&mut dp))
            .unwrap();
        let mut want_w = to_f64(&dw0);
        let mut want_p = to_f64(&dp0);
        for (i, &d) in dy.iter().enumerate() {
            let row = i / width;
            let column = i % width;
            want_w[tokens[row] as usize * width + column] += f64::from(d);
            want_p[row % time * width + column] += f64::from(d);
        }
        close(b, &dw, &want_w, "embedding d words");
        close(b, &dp, &want_p, "embedding d places");
        results.extend([down(b, &y), down(b, &dw), down(b, &dp)]);

        // Without positions.
        let mut none = up_f32(b, &[]);
        let mut dw = up_f32(b, &dw0);
        b.embedding(&tb, 0, B::all(&wb), B::all(&none), B::all_mut(&mut y)).unwrap();
        let expected: Vec<f32> = (0..rows * width)
            .map(|i| words[tokens[i / width] as usize * width + i % width])
            .collect();
        assert_eq!(down(b, &y), expected);
        b.embedding_backward(&tb, 0, B::all(&dyb), B::all_mut(&mut dw), B::all_mut(&mut none))
            .unwrap();
        close(b, &dw, &want_w, "embedding d words without places");
    }
    results
}

/// Tests token tables that have a part of the tokens each.
pub fn embedding_parts<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for (sequences, time, vocabulary, width) in
        [(1, 1, 1, 1), (3, 31, 11, 33), (5, 64, 200, 65), (20, 33, 2, 96)]
    {
        let rows = sequences * time;
        let cut = usize::div_ceil(vocabulary, 3);
        let tokens = ids(21, rows, vocabulary);
        let words = random(b, 22, vocabulary * width);
        let places = random(b, 23, time * width);
        let tb = b.upload_indices(&tokens).unwrap();
        let wb = up(b, &words);
        let pb = up(b, &places);
        let none = up(b, &[]);
        let (before, after) = B::split_at(B::all(&wb), cut * width);
        let forward = |first: usize, table: B::View<'_>, places: &B::Buf| {
            let mut y = up(b, &vec![f32::NAN; rows * width]);
            b.embedding(&tb, first, table, B::all(places), B::all_mut(&mut y)).unwrap();
            down(b, &y)
        };
        let sum = |one: &[f32], other: &[f32]| {
            one.iter().zip(other).map(|(a, b)| a + b).collect::<Vec<_>>()
        };
        let one = forward(0, before, &none);
        let other = forward(cut, after, &none);
        assert_eq!(sum(&one, &other), forward(0, B::all(&wb), &none));
        let with_places = forward(0, before, &pb);
        let whole = to_f64(&forward(0, B::all(&wb), &pb));
        close(b, &up_f32(b, &sum(&with_places, &other)), &whole, "parts of an embedding");
        results.extend([one, other, with_places]);

        let dy = random(b, 24, rows * width);
        let dw0 = random(b, 25, words.len());
        let dp0 = random(b, 26, places.len());
        let dy = up(b, &dy);
        let mut dw = up_f32(b, &dw0);
        let mut dp = up_f32(b, &dp0);
        b.embedding_backward(&tb, 0, B::all(&dy), B::all_mut(&mut dw), B::all_mut(&mut dp))
            .unwrap();
        let whole = [down(b, &dw), down(b, &dp)];
        let mut dw = up_f32(b, &dw0);
        let mut dp = up_f32(b, &dp0);
        let mut none = up_f32(b, &[]);
        let (before, after) = B::split_at_mut(B::all_mut(&mut dw), cut * width);
        b.embedding_backward(&tb, 0, B::all(&dy), before, B::all_mut(&mut none)).unwrap();
        b.embedding_backward(&tb, cut, B::all(&dy), after, B::all_mut(&mut dp)).unwrap();
        let parts = [down(b, &dw), down(b, &dp)];
        assert!(parts == whole, "gradients of parts are not the parts of the gradient");
        results.extend(parts);
    }
    results
}
