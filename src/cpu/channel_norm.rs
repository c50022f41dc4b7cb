//! Batch and group normalisation of channels, and its statistics.

use rayon::prelude::*;

use super::Cpu;
use super::math::simd;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{ChannelNormShape, ChannelOps, KernelCost};

/// Positions of one partial sum.
const PLACES: usize = 256;
/// Positions that a task normalises.
const ROWS: usize = 64;

/// Computes two sums per sample and channel over the positions of the sample, first over chunks of
/// positions. `add` gets the sample, the range of a position's elements, and both sums of each
/// channel; `out` gets the sample and its sums.
fn sums(
    threads: &Threads,
    s: ChannelNormShape,
    mut out: impl FnMut(usize, &[f32]),
    add: impl Fn(usize, std::ops::Range<usize>, &mut [f32], &mut [f32]) + Sync,
) {
    let width = s.channels;
    let chunks = s.places.div_ceil(PLACES);
    let mut partial = vec![0.0; s.samples * chunks * 2 * width];
    threads.each(partial.par_chunks_mut(2 * width).enumerate(), |(at, sums)| {
        let sample = at / chunks;
        let first = at % chunks * PLACES;
        let (a, b) = sums.split_at_mut(width);
        simd(
            #[inline(always)]
            || {
                for place in first..(first + PLACES).min(s.places) {
                    let start = (sample * s.places + place) * width;
                    add(sample, start..start + width, a, b);
                }
            },
        );
    });
    for (sample, chunks) in partial.chunks_mut(chunks * 2 * width).enumerate() {
        let (total, rest) = chunks.split_at_mut(2 * width);
        for chunk in rest.chunks(2 * width) {
            total.iter_mut().zip(chunk).for_each(|(total, sum)| *total += sum);
        }
        out(sample, total);
    }
}

pub fn moments(threads: &Threads, s: ChannelNormShape, x: &[f32], moments: &mut [f32]) {
    assert!(x.len() == s.elements() && moments.len() == s.samples * 3 * s.channels);
    let width = s.channels;
    let sample_len = s.places * s.channels;
    let to = |sample: usize, sums: &[f32]| {
        let moments = &mut moments[sample * 3 * width..][..3 * width];
        moments[..width].copy_from_slice(&x[sample * sample_len..][..width]);
        moments[width..].copy_from_slice(sums);
    };
    sums(
        threads,
        s,
        to,
        #[inline(always)]
        |sample, place, a, b| {
            let shift = &x[sample * sample_len..][..width];
            for (((&x, &shift), a), b) in x[place].iter().zip(shift).zip(a).zip(b) {
                *a += x - shift;
                *b += (x - shift) * (x - shift);
            }
        },
    );
}

/// Returns, for every channel of every sample, the `N` numbers `of(statistics, channel)` computed
/// from the statistics of its group.
fn spread<const N: usize>(
    s: ChannelNormShape,
    group_stats: &[f32],
    of: impl Fn(&[f32], usize) -> [f32; N],
) -> Vec<[f32; N]> {
    let each = group_stats.len() / (s.samples * s.groups);
    (0..s.samples * s.channels)
        .map(|at| {
            let (sample, channel) = (at / s.channels, at % s.channels);
            let group = sample * s.groups + channel / s.channels_per_group();
            of(&group_stats[group * each..][..each], channel)
        })
        .collect()
}

/// Returns the part of `table` for the sample of an element.
fn of_sample<T>(s: ChannelNormShape, table: &[T], element: usize) -> &[T] {
    &table[element / (s.places * s.channels) * s.channels..][..s.channels]
}

pub fn normalise(
    threads: &Threads,
    s: ChannelNormShape,
    x: &[f32],
    stats: &[f32],
    weight: &[f32],
    bias: &[f32],
    y: &mut [f32],
) {
    assert!(
        x.len() == s.elements() && y.len() == x.len() && stats.len() == s.samples * s.groups * 2
    );
    let table =
        spread(s, stats, |stats, channel| [stats[0], stats[1] * weight[channel], bias[channel]]);
    let task = ROWS * s.channels;
    threads.each(x.par_chunks(task).zip(y.par_chunks_mut(task)).enumerate(), |(i, (x, y))| {
        simd(
            #[inline(always)]
            || {
                for (row, (x, y)) in x.chunks(s.channels).zip(y.chunks_mut(s.channels)).enumerate()
                {
                    let table = of_sample(s, &table, i * task + row * s.channels);
                    for ((y, x), [mean, scale, bias]) in y.iter_mut().zip(x).zip(table) {
                        *y = (x - mean) * scale + bias;
                    }
                }
            },
        );
    });
}

pub fn backward_sums(
    threads: &Threads,
    s: ChannelNormShape,
    x: &[f32],
    dy: &[f32],
    stats: &[f32],
    to: &mut [f32],
) {
    assert!(
        x.len() == s.elements() && dy.len() == x.len() && to.len() == s.samples * 2 * s.channels
    );
    let table = spread(s, stats, |stats, _| [stats[0], stats[1]]);
    let out = |sample: usize, sums: &[f32]| {
        to[sample * 2 * s.channels..][..2 * s.channels].copy_from_slice(sums)
    };
    sums(
        threads,
        s,
        out,
        #[inline(always)]
        |_, place, a, b| {
            let stats = of_sample(s, &table, place.start);
            let sums = a.iter_mut().zip(b);
            for (((&x, &dy), [mean, rstd]), (a, b)) in
                x[place.clone()].iter().zip(&dy[place]).zip(stats).zip(sums)
            {
                *a += dy;
                *b += dy * ((x - mean) * rstd);
            }
        },
    );
}

#[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
pub fn backward(
    threads: &Threads,
    s: ChannelNormShape,
    x: &[f32],
    dy: &[f32],
    stats: &[f32],
    weight: &[f32],
    means: &[f32],
    dx: &mut [f32],
) {
    assert!(x.len() == s.elements() && dy.len() == x.len() && dx.len() == x.len());
    let pairs = stats.as_chunks::<2>().0.iter().zip(means.as_chunks::<2>().0);
    let group_stats: Vec<f32> =
        pairs.flat_map(|(stats, means)| [*stats, *means].concat()).collect();
    let table = spread(s, &group_stats, |group, channel| {
        let [mean, rstd, a, b] = [group[0], group[1], group[2], group[3]];
        [mean, rstd * weight[channel], rstd * a, rstd * rstd * b]
    });
    let task = ROWS * s.channels;
    threads.each(
        x.par_chunks(task).zip(dy.par_chunks(task)).zip(dx.par_chunks_mut(task)).enumerate(),
        |(i, ((x, dy), dx))| {
            let rows =
                x.chunks(s.channels).zip(dy.chunks(s.channels)).zip(dx.chunks_mut(s.channels));
            simd(
                #[inline(always)]
                || {
                    for (row, ((x, dy), dx)) in rows.enumerate() {
                        let table = of_sample(s, &table, i * task + row * s.channels);
                        for (((dx, x), dy), [mean, scale, a, b]) in
                            dx.iter_mut().zip(x).zip(dy).zip(table)
                        {
                            *dx = dy * scale - a - (x - mean) * b;
                        }
                    }
                },
            );
        },
    );
}

impl ChannelOps for Cpu {
    fn channel_moments(
        &self,
        shape: ChannelNormShape,
        x: &[f32],
        moments: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::channel_sums("channels, sums", shape, 1));
        self::moments(&self.threads, shape, x, moments);
        Ok(())
    }

    fn channel_norm(
        &self,
        shape: ChannelNormShape,
        x: &[f32],
        stats: &[f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::channel_norm("channels, norm", shape, 2));
        normalise(&self.threads, shape, x, stats, weight, bias, y);
        Ok(())
    }

    fn channel_norm_sums(
        &self,
        shape: ChannelNormShape,
        x: &[f32],
        dy: &[f32],
        stats: &[f32],
        sums: &mut [f32],
    ) -> Result<()> {
        let _launch =
            self.start_kernel(KernelCost::channel_sums("channels, gradient's sums", shape, 2));
        backward_sums(&self.threads, shape, x, dy, stats, sums);
        Ok(())
    }

    fn channel_norm_backward(
        &self,
        shape: ChannelNormShape,
        x: &[f32],
        dy: &[f32],
        stats: &[f32],
        weight: &[f32],
        means: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        let _launch =
            self.start_kernel(KernelCost::channel_norm("channels, norm backward", shape, 3));
        backward(&self.threads, shape, x, dy, stats, weight, means, dx);
        Ok(())
    }
}
