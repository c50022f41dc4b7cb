//! Tests of the operations in `hpctrain_device::ops::channel_norm`.

use crate::common::{Results, close, close_f32, down, random, rounded, to_f64, up, up_f32};
use hpctrain_device::{ChannelNormShape, Kernels};

/// Tests the statistics and normalisation of channels against their definitions.
pub fn channels<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    // One chunk of positions and many, one channel and more than a warp's, groups of one channel
    // and of several.
    for (samples, places, channels, groups) in
        [(1, 1, 1, 1), (3, 37, 6, 3), (1, 301, 35, 35), (2, 600, 8, 1), (4, 2, 40, 5)]
    {
        let shape = ChannelNormShape { samples, places, channels, groups };
        let len = shape.elements();
        let of_group = channels / groups;
        // Far from zero, where sums of squares lose precision.
        let x: Vec<f32> = random(b, 1, len).iter().map(|x| x + 3.0).collect();
        let x = rounded(b, &x);
        let dy = random(b, 2, len);
        let weight = random(b, 3, channels);
        let bias = random(b, 4, channels);
        let stats: Vec<f32> =
            random(b, 5, 2 * samples * groups).iter().map(|x| x.abs() + 0.5).collect();
        let means = random(b, 6, 2 * samples * groups);
        let xb = up(b, &x);
        let dyb = up(b, &dy);
        let wb = up(b, &weight);
        let bb = up(b, &bias);
        let sb = up_f32(b, &stats);
        let mb = up_f32(b, &means);
        let what = format!("{shape:?}");
        let xs = to_f64(&x);
        let ds = to_f64(&dy);
        let at = |sample: usize, place: usize, channel: usize| {
            (sample * places + place) * channels + channel
        };
        let group = |sample: usize, channel: usize| 2 * (sample * groups + channel / of_group);

        let mut moments = up_f32(b, &vec![7.0; samples * 3 * channels]);
        b.channel_moments(shape, B::all(&xb), B::all_mut(&mut moments)).unwrap();
        let mut want = Vec::new();
        for sample in 0..samples {
            let shift = |channel| xs[at(sample, 0, channel)];
            let deviation = |channel, place| xs[at(sample, place, channel)] - shift(channel);
            want.extend((0..channels).map(shift));
            want.extend(
                (0..channels)
                    .map(|channel| (0..places).map(|place| deviation(channel, place)).sum::<f64>()),
            );
            want.extend((0..channels).map(|channel| {
                (0..places).map(|place| deviation(channel, place).powi(2)).sum::<f64>()
            }));
        }
        close_f32(&down(b, &moments), &want, &format!("moments {what}"));

        let mut y = up(b, &vec![7.0; len]);
        b.channel_norm(
            shape,
            B::all(&xb),
            B::all(&sb),
            B::all(&wb),
            B::all(&bb),
            B::all_mut(&mut y),
        )
        .unwrap();
        let mut sums = up_f32(b, &vec![7.0; samples * 2 * channels]);
        b.channel_norm_sums(shape, B::all(&xb), B::all(&dyb), B::all(&sb), B::all_mut(&mut sums))
            .unwrap();
        let mut dx = up(b, &vec![7.0; len]);
        let mut want_y = vec![0.0; len];
        let mut want_dx = vec![0.0; len];
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
        for (sample, place, channel) in (0..samples)
            .flat_map(|s| (0..places).flat_map(move |p| (0..channels).map(move |c| (s, p, c))))
        {
            let at = at(sample, place, channel);
            let group = group(sample, channel);
            let [mean, rstd] = [stats[group], stats[group + 1]].map(f64::from);
            let [a, b] = [means[group], means[group + 1]].map(f64::from);
            let hat = (xs[at] - mean) * rstd;
            let w = f64::from(weight[channel]);
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
