//! The sample at each position of a run, from one data set or a mixture of several, computed by a
//! pure function.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Draw, ExcludedSamples, FileOrder, Sampler};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random::{derive, name};

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
pub struct SampleOrder {
    kind: Kind,
    exclusion: Option<Exclusion>,
}

/// The samples that a run does not read, and the batches whose positions draw others instead.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Exclusion {
    excluded: Arc<ExcludedSamples>,
    seed: u64,
    /// The position of the first sample of a global batch, and the number of its samples.
    first: u64,
    global: u64,
}

/// The number of random draws for a position whose sample is excluded, before the data set is
/// searched.
const ATTEMPTS: u64 = 64;

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
        Ok(Self::from_kind(Kind::All(Mixture { parts, pattern })))
    }

    fn from_kind(kind: Kind) -> Self {
        Self { kind, exclusion: None }
    }

    /// Returns the same order without the samples `excluded`. A position whose sample is excluded
    /// draws another one of the same data set, which no other position of its global batch has.
    /// All other positions keep their samples. Global batches of `global` samples follow each
    /// other from position `first` on. The substitutes are a function of `seed` and the position.
    #[must_use]
    pub fn excluding(
        self,
        excluded: Arc<ExcludedSamples>,
        seed: u64,
        first: u64,
        global: u64,
    ) -> Self {
        Self { exclusion: Some(Exclusion { excluded, seed, first, global }), ..self }
    }

    /// Returns the sample at `position`, counted from the start of the run.
    pub fn draw(&self, position: u64) -> Draw {
        Drawing::new(self).draw(position)
    }

    /// Returns the first data set that `positions` consecutive positions might take a sample of
    /// twice: its number, its number of samples, and the number of positions that draw from it.
    /// Excluded samples do not count. If files are dealt to ranks, the data set is that of this
    /// rank.
    pub fn repeats_within(&self, positions: u64) -> Option<(usize, u64, u64)> {
        let excluded = self.exclusion.as_ref().map(|exclusion| &*exclusion.excluded);
        match &self.kind {
            Kind::All(mixture) => mixture.repeats_within(positions, excluded),
            Kind::Files(files) => {
                let share = files.share(positions);
                let have = files.samples() - excluded.map_or(0, |excluded| files.count(excluded));
                (share > have).then_some((0, have, share))
            }
        }
    }
}

/// Draws the samples of positions, and remembers the substitutes of the last batch.
pub(super) struct Drawing<'a> {
    order: &'a SampleOrder,
    /// The first position of a global batch, and the samples that its positions draw instead of
    /// excluded ones.
    batch: Option<(u64, HashMap<u64, u64>)>,
}

impl<'a> Drawing<'a> {
    pub fn new(order: &'a SampleOrder) -> Self {
        Self { order, batch: None }
    }

    /// Returns the sample at `position`.
    pub fn draw(&mut self, position: u64) -> Draw {
        let SampleOrder { kind, exclusion } = self.order;
        let draw = kind.draw(position);
        let Some(exclusion) = exclusion.as_ref().filter(|it| it.excluded.contains(draw.sample))
        else {
            return draw;
        };
        let base = position - (position - exclusion.first) % exclusion.global;
        let (_, substitutes) = match self.batch.take().filter(|(first, _)| *first == base) {
            Some(batch) => self.batch.insert(batch),
            None => self.batch.insert((base, exclusion.substitutes(kind, base))),
        };
        Draw { sample: substitutes.get(&position).copied().unwrap_or(draw.sample), ..draw }
    }
}

impl Exclusion {
    /// Returns the samples that positions of the global batch from `base` on draw instead of
    /// excluded ones.
    fn substitutes(&self, kind: &Kind, base: u64) -> HashMap<u64, u64> {
        let mut taken = HashSet::new();
        let mut without = Vec::new();
        for position in kind.positions(base, self.global) {
            let Draw { sample, .. } = kind.draw(position);
            if self.excluded.contains(sample) {
                without.push(position);
            } else {
                taken.insert(sample);
            }
        }
        let mut substitutes = HashMap::with_capacity(without.len());
        for position in without {
            if let Some(sample) = self.substitute(kind, position, &taken) {
                taken.insert(sample);
                substitutes.insert(position, sample);
            }
        }
        substitutes
    }

    /// Returns a sample for a position whose own is excluded: one that is not in `taken`, if there
    /// is one. Returns `None` if the data set has no other samples.
    fn substitute(&self, kind: &Kind, position: u64, taken: &HashSet<u64>) -> Option<u64> {
        let count = kind.choices(position);
        let draw = |attempt| derive(self.seed, &[name("exclude"), position, attempt]) % count;
        let is_allowed = |sample: &u64| !self.excluded.contains(*sample);
        let is_free = |sample: &u64| is_allowed(sample) && !taken.contains(sample);
        let random = (0..ATTEMPTS).map(|attempt| kind.choice(position, draw(attempt)));
        let start = draw(ATTEMPTS);
        let rest = (0..count).map(|step| kind.choice(position, (start + step) % count));
        random.chain(rest.clone()).find(is_free).or_else(|| rest.clone().find(is_allowed))
    }
}

impl Kind {
    fn draw(&self, position: u64) -> Draw {
        match self {
            Kind::All(mixture) => mixture.draw(position),
            Kind::Files(files) => files.draw(position),
        }
    }

    /// Returns the positions of the global batch from `base` on whose samples may coincide: all, or
    /// those of this rank if files are dealt to ranks.
    fn positions(&self, base: u64, global: u64) -> Vec<u64> {
        match self {
            Kind::All(_) => (base..base + global).collect(),
            Kind::Files(files) => files.positions(base).collect(),
        }
    }

    /// Returns the number of samples that `position` may draw.
    fn choices(&self, position: u64) -> u64 {
        match self {
            Kind::All(mixture) => mixture.part(position).samples,
            Kind::Files(files) => files.samples(),
        }
    }

    /// Returns one of the samples that `position` may draw.
    fn choice(&self, position: u64, index: u64) -> u64 {
        match self {
            Kind::All(mixture) => mixture.part(position).first + index,
            Kind::Files(files) => files.sample(index),
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

    /// Returns the data set of a position.
    fn part(&self, position: u64) -> &MixedSet {
        &self.parts[self.pattern[(position % self.pattern.len() as u64) as usize].0]
    }

    fn repeats_within(
        &self,
        positions: u64,
        excluded: Option<&ExcludedSamples>,
    ) -> Option<(usize, u64, u64)> {
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
            let numbers = part.first..part.first + part.samples;
            let have = part.samples - excluded.map_or(0, |excluded| excluded.count_in(numbers));
            most.filter(|most| *most > have).map(|most| (number, have, most))
        })
    }
}

impl From<Sampler> for SampleOrder {
    fn from(sampler: Sampler) -> Self {
        let part = MixedSet { first: 0, samples: sampler.samples(), sampler, share: 1 };
        Self::from_kind(Kind::All(Mixture { parts: vec![part], pattern: vec![(0, 0)] }))
    }
}

impl From<FileOrder> for SampleOrder {
    fn from(files: FileOrder) -> Self {
        Self::from_kind(Kind::Files(files))
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

    /// Draws two data sets with 60 and 40 samples in batches of 16, without these samples.
    fn drawn_without(excluded: &[u64], batches: u64) -> Vec<(Draw, Draw)> {
        let order = SampleOrder::mixed(&[60, 40], &[0.5, 0.5], Some(3)).unwrap();
        let excluded = Arc::new(ExcludedSamples::new(excluded.to_vec()));
        let without = order.clone().excluding(excluded, 3, 0, 16);
        let mut drawing = Drawing::new(&without);
        (0..16 * batches)
            .map(|position| {
                // One after the other, and each by itself.
                assert_eq!(drawing.draw(position), without.draw(position));
                (order.draw(position), without.draw(position))
            })
            .collect()
    }

    #[test]
    fn excluded_samples_are_replaced_and_all_others_stay() {
        let excluded = [5, 6, 59, 60, 71, 99];
        let draws = drawn_without(&excluded, 40);
        let mut replaced = 0;
        for (before, now) in &draws {
            assert_eq!(now.epoch, before.epoch);
            assert!(!excluded.contains(&now.sample));
            if excluded.contains(&before.sample) {
                replaced += 1;
                assert_eq!(before.sample < 60, now.sample < 60, "of the same data set");
            } else {
                assert_eq!(before, now);
            }
        }
        assert!(replaced > 30, "{replaced}");
        for (batch, draws) in draws.chunks(16).enumerate() {
            let distinct = |samples: Vec<u64>| samples.iter().collect::<HashSet<_>>().len();
            let before = distinct(draws.iter().map(|(before, _)| before.sample).collect());
            let now = distinct(draws.iter().map(|(_, now)| now.sample).collect());
            assert!(now >= before, "batch {batch}: {now} distinct samples, {before} before");
        }
    }

    #[test]
    fn few_remaining_samples_are_found() {
        // Of the second data set eight samples remain, all of which a batch takes.
        let excluded: Vec<u64> = (60..92).collect();
        for draws in drawn_without(&excluded, 20).chunks(16) {
            let mut second: Vec<u64> =
                draws.iter().map(|(_, now)| now.sample).filter(|sample| *sample >= 60).collect();
            assert!(second.iter().all(|sample| *sample >= 92));
            second.sort_unstable();
            second.dedup();
            // A batch that two passes meet in may have a sample of both.
            assert!(second.len() >= 7, "{second:?}");
        }
        let order = SampleOrder::mixed(&[60, 40], &[0.5, 0.5], Some(3)).unwrap();
        let excluding = |numbers: Vec<u64>| {
            let excluded = Arc::new(ExcludedSamples::new(numbers));
            order.clone().excluding(excluded, 3, 0, 16).repeats_within(16)
        };
        assert_eq!(excluding(excluded.clone()), None);
        assert_eq!(excluding((60..93).collect()), Some((1, 7, 8)));
        assert_eq!(excluding((0..60).collect()), Some((0, 0, 8)));
    }

    #[test]
    fn samples_of_dealt_files_are_replaced_by_those_of_the_rank() {
        for rank in 0..2 {
            let batches = crate::RankBatches {
                first: 0,
                global: 8,
                virtual_rank_samples: 2,
                virtual_ranks: [vec![0, 1], vec![2, 3]][rank].clone(),
                ranks: 2,
                rank,
            };
            let files = FileOrder::new(&[6, 9, 7, 5], Some(1), batches).unwrap();
            let own = |sample: u64| usize::from((6..15).contains(&sample) || sample >= 22) == rank;
            let excluded = Arc::new(ExcludedSamples::new(vec![0, 1, 7, 8, 16, 25]));
            let order = SampleOrder::from(files.clone());
            let without = order.clone().excluding(excluded.clone(), 1, 0, 8);
            let have = [10, 11][rank];
            assert_eq!(without.repeats_within(24), Some((0, have, 12)));
            assert_eq!(order.repeats_within(24), None);
            for batch in 0..30 {
                let start = 8 * batch + 4 * rank as u64;
                for position in start..start + 4 {
                    let before = order.draw(position);
                    let now = without.draw(position);
                    assert!(own(now.sample) && !excluded.contains(now.sample));
                    assert!(before == now || excluded.contains(before.sample));
                }
            }
        }
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
