//! The sample at each position of a run, from one data set or a mixture of several, computed by a
//! pure function.

use serde::{Deserialize, Serialize};

use super::{Draw, FileOrder, Sampler};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random::derive;

/// A data set that is mixed with others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mix {
    /// The path of the data set, like `data.path`.
    pub path: String,
    /// The relative share of positions: the shares of two data sets have the ratio of their
    /// weights.
    pub weight: f64,
    /// The name in evaluations. Default: the last component of the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Mix {
    /// Returns a name for each data set of a mixture: its own, or the last component of its path;
    /// the whole path and its number if another data set has the same name.
    pub fn names(mix: &[Self]) -> Vec<String> {
        let all = mix.iter().map(|one| {
            let last = one.path.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or_default();
            one.name.clone().unwrap_or_else(|| last.to_owned())
        });
        let all: Vec<String> = all.collect();
        let is_one = |name: &String| all.iter().filter(|other| *other == name).count() == 1;
        let displayed =
            mix.iter().zip(&all).enumerate().map(|(number, (one, name))| match is_one(name) {
                true => name.clone(),
                false => format!("{} ({number})", one.name.as_ref().unwrap_or(&one.path)),
            });
        displayed.collect()
    }
}

/// The number of positions after which the pattern of a mixture repeats. Shares are rounded to
/// whole positions of it.
const PERIOD: u64 = 1024;

/// Maps positions of a run to samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleOrder(Kind);

/// The kinds of orders.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    /// Every rank draws from all samples.
    All(Mixture),
    /// A rank draws from the files that are dealt to it.
    Files(FileOrder),
}

/// The order of data sets that are interleaved.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mixture {
    parts: Vec<MixedSet>,
    /// For each position of a period: its data set, and the number of earlier positions of that
    /// data set in the period.
    pattern: Vec<(usize, u64)>,
}

/// One of the data sets of a mixture.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MixedSet {
    /// The number of its first sample in the numbering of all samples.
    first: u64,
    samples: u64,
    sampler: Sampler,
    /// The number of its positions in a period.
    share: u64,
}

impl SampleOrder {
    /// Creates an order of data sets with these numbers of samples, which are numbered one data set
    /// after the other. Each data set is traversed by itself, shuffled by `seed`, or in its own
    /// order without one, and the data sets are interleaved evenly.
    ///
    /// # Errors
    /// Returns an error if a weight is not a positive number, or is less than 1 / 1024 of all.
    ///
    /// # Panics
    ///
    /// If a data set has no samples; an open one always has.
    pub fn mixed(samples: &[u64], weights: &[f64], seed: Option<u64>) -> Result<Self> {
        let shares = shares(weights)?;
        let mut parts = Vec::with_capacity(samples.len());
        let mut first = 0;
        for ((number, &samples), &share) in samples.iter().enumerate().zip(&shares) {
            let sampler = match seed {
                // The first data set has the order that it would have alone.
                Some(seed) if number == 0 => Sampler::new(samples, seed),
                Some(seed) => Sampler::new(samples, derive(seed, &[number as u64])),
                None => Sampler::in_order(samples),
            };
            parts.push(MixedSet { first, samples, sampler, share });
            first += samples;
        }
        let period: u64 = shares.iter().sum();
        let mut counts = vec![0; shares.len()];
        let mut pattern = Vec::with_capacity(period as usize);
        for place in 1..=period as i64 {
            // The data set that is furthest behind its share; the first of equal ones.
            let lag =
                |part: &usize| shares[*part] as i64 * place - period as i64 * counts[*part] as i64;
            let part = (0..shares.len()).rev().max_by_key(lag).unwrap_or(0);
            pattern.push((part, counts[part]));
            counts[part] += 1;
        }
        Ok(Self(Kind::All(Mixture { parts, pattern })))
    }

    /// Returns the sample at `position`, counted from the start of the run.
    pub fn draw(&self, position: u64) -> Draw {
        match &self.0 {
            Kind::All(mixture) => mixture.draw(position),
            Kind::Files(files) => files.draw(position),
        }
    }

    /// Returns the first data set that `positions` consecutive positions might take a sample of
    /// twice: its number, its number of samples, and the number of positions that draw from it. If
    /// files are dealt to ranks, the data set is that of this rank.
    pub fn repeats_within(&self, positions: u64) -> Option<(usize, u64, u64)> {
        match &self.0 {
            Kind::All(mixture) => mixture.repeats_within(positions),
            Kind::Files(files) => {
                let share = files.share(positions);
                (share > files.samples()).then(|| (0, files.samples(), share))
            }
        }
    }
}

impl Mixture {
    fn draw(&self, position: u64) -> Draw {
        let period = self.pattern.len() as u64;
        let (part, before) = self.pattern[(position % period) as usize];
        let MixedSet { first, samples, sampler, share } = &self.parts[part];
        let own = position / period * share + before;
        Draw { sample: first + sampler.index(own), epoch: own / samples }
    }

    fn repeats_within(&self, positions: u64) -> Option<(usize, u64, u64)> {
        let period = self.pattern.len();
        self.parts.iter().enumerate().find_map(|(number, part)| {
            // For each position of a period, the number of earlier positions of the data set.
            let mut before = Vec::with_capacity(period);
            let mut count = 0;
            for (owner, _) in &self.pattern {
                before.push(count);
                count += u64::from(*owner == number);
            }
            let taken_until = |position: u64| {
                position / period as u64 * part.share + before[(position % period as u64) as usize]
            };
            let most = (0..period as u64)
                .map(|start| taken_until(start + positions) - taken_until(start))
                .max();
            most.filter(|most| *most > part.samples).map(|most| (number, part.samples, most))
        })
    }
}

impl From<Sampler> for SampleOrder {
    fn from(sampler: Sampler) -> Self {
        let part = MixedSet { first: 0, samples: sampler.samples(), sampler, share: 1 };
        Self(Kind::All(Mixture { parts: vec![part], pattern: vec![(0, 0)] }))
    }
}

impl From<FileOrder> for SampleOrder {
    fn from(files: FileOrder) -> Self {
        Self(Kind::Files(files))
    }
}

/// Returns the number of positions in a period for each weight, rounded so that they add up.
fn shares(weights: &[f64]) -> Result<Vec<u64>> {
    if let Some(weight) = weights.iter().find(|weight| !(**weight > 0.0 && weight.is_finite())) {
        return Err(Error::input(format!("data.mix has weight = {weight}"))
            .hint("weights are positive numbers; remove data sets that are not to be used"));
    }
    if let [_] = weights {
        return Ok(vec![1]);
    }
    let all: f64 = weights.iter().sum();
    if !all.is_finite() {
        return Err(Error::input("data.mix has weights whose sum is not finite")
            .hint("divide them all by one number"));
    }
    let exact: Vec<f64> = weights.iter().map(|weight| weight / all * PERIOD as f64).collect();
    let mut shares: Vec<u64> = exact.iter().map(|share| share.floor() as u64).collect();
    let mut by_rest: Vec<usize> = (0..exact.len()).collect();
    by_rest.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
    let left = PERIOD.saturating_sub(shares.iter().sum());
    for part in by_rest.into_iter().take(left as usize) {
        shares[part] += 1;
    }
    match shares.iter().position(|share| *share == 0) {
        None => Ok(shares),
        Some(part) => Err(Error::input(format!(
            "data.mix has weight = {}, less than one in {PERIOD} of all",
            weights[part]
        ))
        .hint("remove that data set, or increase its weight")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_data_set_is_in_the_order_of_its_sampler() {
        let sampler = Sampler::new(10, 42);
        let order = SampleOrder::mixed(&[10], &[0.3], Some(42)).unwrap();
        assert_eq!(order, SampleOrder::from(sampler));
        for position in 0..35 {
            let epoch = position / 10;
            assert_eq!(order.draw(position), Draw { sample: sampler.index(position), epoch });
        }
    }

    #[test]
    fn each_has_its_part_everywhere_and_is_gone_through_evenly() {
        let samples = [50u64, 7, 300];
        let weights = [0.5, 0.2, 0.3];
        let order = SampleOrder::mixed(&samples, &weights, Some(9)).unwrap();
        let part_of = |sample: u64| usize::from(sample >= 50) + usize::from(sample >= 57);
        for start in [0u64, 1, 1000, 5000] {
            let mut counts = [0.0; 3];
            for position in start..start + 3000 {
                counts[part_of(order.draw(position).sample)] += 1.0;
            }
            for (count, weight) in counts.into_iter().zip(weights) {
                // Shares are rounded to one in 1024.
                assert!(
                    (count - 3000.0 * weight).abs() < 2.0 + 3000.0 / 1024.0,
                    "{counts:?} from {start}"
                );
            }
        }
        // Within an epoch of a data set each of its samples comes once.
        let mut seen: Vec<Draw> = (0..4096).map(|position| order.draw(position)).collect();
        for number in 0..3 {
            let own: Vec<Draw> =
                seen.iter().copied().filter(|draw| part_of(draw.sample) == number).collect();
            for (place, draw) in own.iter().enumerate() {
                assert_eq!(draw.epoch, place as u64 / samples[number]);
            }
        }
        seen.sort_unstable_by_key(|draw| (draw.epoch, draw.sample));
        assert!(seen.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn every_set_of_a_mixture_has_a_name() {
        let one = |path: &str, name: Option<&str>| Mix {
            path: path.into(),
            weight: 1.0,
            name: name.map(Into::into),
        };
        let names = |mix: &[Mix]| Mix::names(mix).join(", ");
        let own = one("c.h5", Some("chat"));
        assert_eq!(
            names(&[one("data/web/", None), one("bundled:tiny-shakespeare", None), own]),
            "web, tiny-shakespeare, chat"
        );
        assert_eq!(
            names(&[one("a/text", None), one("b/text", None), one("c", None)]),
            "a/text (0), b/text (1), c"
        );
    }

    #[test]
    fn unshuffled_data_keeps_its_order() {
        let order = SampleOrder::mixed(&[4, 2], &[2.0, 1.0], None).unwrap();
        let drawn: Vec<u64> = (0..9).map(|position| order.draw(position).sample).collect();
        assert_eq!(drawn, [0, 4, 1, 2, 5, 3, 0, 4, 1]);
    }

    #[test]
    fn a_batch_takes_no_sample_twice() {
        let order = SampleOrder::mixed(&[100, 4], &[1.0, 1.0], Some(1)).unwrap();
        assert_eq!(order.repeats_within(8), None);
        assert_eq!(order.repeats_within(9), Some((1, 4, 5)));
        assert_eq!(SampleOrder::from(Sampler::new(5, 1)).repeats_within(5), None);
        assert_eq!(SampleOrder::from(Sampler::new(5, 1)).repeats_within(6), Some((0, 5, 6)));
    }

    #[test]
    fn weights_must_be_seen() {
        let refused =
            |weights: &[f64]| SampleOrder::mixed(&[5, 5], weights, None).unwrap_err().to_string();
        assert!(refused(&[1.0, 0.0]).contains("data.mix has weight = 0\nhint: "));
        assert!(refused(&[f64::NAN, 1.0]).contains("weight = NaN"));
        assert!(refused(&[1.0, 1e-9]).contains("less than one in 1024 of all"));
    }
}
