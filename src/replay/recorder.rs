//! Records the tensors of steps on all ranks, and finds the first one with bad values.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::backend::Kernels;
use crate::comm::Group;
use crate::engine::{ObservedTensor, TensorKind, TensorObserver, TensorStatistics};
use crate::error::{Error, Result};

/// The values at which a replay stops.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum StopAt {
    /// NaN.
    Nan,
    /// Infinities and NaN, which often follow from infinities.
    Inf,
    /// Values that are this many times as large as usual, and those that are not finite.
    Spike(f64),
}

/// The factor of `spike`.
const SPIKE: f64 = 10.0;

impl FromStr for StopAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let factor = match text {
            "nan" => return Ok(Self::Nan),
            "inf" => return Ok(Self::Inf),
            "spike" => Some(SPIKE),
            _ => text.strip_prefix("spike:").and_then(|factor| factor.parse().ok()),
        };
        match factor.filter(|factor| f64::is_finite(*factor) && *factor > 1.0) {
            Some(factor) => Ok(Self::Spike(factor)),
            None => Err("one of nan, inf, spike, or spike:F with a factor F above 1".into()),
        }
    }
}

impl fmt::Display for StopAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nan => f.write_str("nan"),
            Self::Inf => f.write_str("inf"),
            Self::Spike(factor) => write!(f, "spike:{factor}"),
        }
    }
}

impl StopAt {
    /// Returns true if a tensor has such values. `usual` is its usual largest magnitude, if known.
    pub fn is_bad(self, counted: &TensorStatistics, usual: Option<f64>) -> bool {
        match self {
            Self::Nan => counted.nan > 0,
            Self::Inf => !counted.is_finite(),
            Self::Spike(factor) => {
                !counted.is_finite() || usual.is_some_and(|usual| counted.largest > factor * usual)
            }
        }
    }
}

/// A tensor of a step, over all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Its kind.
    pub kind: TensorKind,
    /// The index of its block.
    pub block: usize,
    /// The name of the block's unit; empty for a loss.
    pub unit: String,
    /// The name of the parameter; empty for outputs, losses and gradients of inputs.
    pub tensor: String,
    /// The samples of its micro-batch, as indices in the global batch.
    pub samples: Option<Range<u64>>,
    /// The counts of its elements.
    pub statistics: TensorStatistics,
}

/// Identifies the tensors that are compared from step to step.
type TensorKey = (TensorKind, usize, String);

impl Observation {
    fn key(&self) -> TensorKey {
        (self.kind, self.block, self.tensor.clone())
    }

    /// Returns the phase of the step: forwards and backwards, the reduction, the update.
    fn phase(&self) -> u8 {
        match self.kind {
            TensorKind::ReducedGradient => 1,
            TensorKind::Parameter => 2,
            _ => 0,
        }
    }

    /// Returns the place of the tensor in the order of one rank that computes all virtual ranks,
    /// except for the order within a micro-batch.
    fn place(&self) -> (u8, u64, usize) {
        let phase = self.phase();
        let block = if phase == 0 { 0 } else { self.block };
        (phase, self.samples.as_ref().map_or(0, |samples| samples.start), block)
    }
}

impl fmt::Display for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, unit, tensor, .. } = self;
        match kind {
            TensorKind::Loss => f.write_str("the loss, summed over the micro-batch"),
            TensorKind::Output => write!(f, "the output of {unit}"),
            TensorKind::InputGradient => write!(f, "the gradient of the input of {unit}"),
            TensorKind::Gradient => write!(f, "the gradient of {tensor}"),
            TensorKind::ReducedGradient => {
                write!(f, "the gradient of {tensor}, summed over all virtual ranks")
            }
            TensorKind::Parameter => write!(f, "the parameter {tensor} after the update"),
        }
    }
}

/// The observations of one rank since they were last taken.
#[derive(Debug, Clone, Default)]
pub struct Recorder(Arc<Mutex<Vec<Observation>>>);

impl TensorObserver for Recorder {
    fn observe(&mut self, seen: &ObservedTensor<'_>) -> Result<()> {
        let ObservedTensor { kind, block, unit, tensor, samples, statistics } = seen;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Observation {
            kind: *kind,
            block: *block,
            unit: (*unit).to_owned(),
            tensor: (*tensor).to_owned(),
            samples: samples.clone(),
            statistics: *statistics,
        });
        Ok(())
    }
}

impl Recorder {
    /// Takes the observations of all ranks, in the order of computation of one rank. Collective.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn take<B: Kernels>(&self, world: &Group<B>) -> Result<Vec<Observation>> {
        let mine = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let message = serde_json::to_vec(&mine)
            .map_err(|e| Error::internal(format!("observed tensors: {e}")))?;
        let mut all = Vec::new();
        for message in world.gather_bytes(message).wait()? {
            let of_rank: Vec<Observation> = serde_json::from_slice(&message)
                .map_err(|e| Error::comm(format!("a rank's observed tensors: {e}")))?;
            all.extend(of_rank);
        }
        Ok(merge(all))
    }
}

/// Merges the parts of tensors, and sorts the tensors by their order of computation.
fn merge(parts: Vec<Observation>) -> Vec<Observation> {
    let mut places: BTreeMap<(TensorKey, Option<u64>), usize> = BTreeMap::new();
    let mut whole: Vec<Observation> = Vec::new();
    for part in parts {
        let start = part.samples.as_ref().map(|samples| samples.start);
        match places.get(&(part.key(), start)) {
            Some(at) => whole[*at].statistics.merge(&part.statistics),
            None => {
                places.insert((part.key(), start), whole.len());
                whole.push(part);
            }
        }
    }
    // The sort is stable: tensors of one micro-batch stay in the order of their rank.
    whole.sort_by_key(Observation::place);
    whole
}

/// The usual largest magnitudes of tensors: those of the step before.
#[derive(Debug, Default)]
pub struct Usual(BTreeMap<TensorKey, f64>);

impl Usual {
    /// Replaces the magnitudes of the observed tensors, each by the largest over all micro-batches.
    pub fn note(&mut self, step: &[Observation]) {
        step.iter().for_each(|seen| {
            self.0.insert(seen.key(), 0.0);
        });
        for seen in step {
            let largest = self.0.entry(seen.key()).or_default();
            *largest = largest.max(seen.statistics.largest);
        }
    }

    /// Returns the usual largest magnitude of a tensor, if it is known: at least the median over
    /// all tensors of its kind, since a tensor that was nearly zero may grow by any factor.
    pub fn largest(&self, seen: &Observation) -> Option<f64> {
        let own = *self.0.get(&seen.key())?;
        let of_kind = self.0.iter().filter(|((kind, ..), _)| *kind == seen.kind);
        let mut of_kind: Vec<f64> = of_kind.map(|(_, largest)| *largest).collect();
        of_kind.sort_by(f64::total_cmp);
        Some(own.max(of_kind[of_kind.len() / 2])).filter(|usual| *usual > 0.0)
    }

    /// Returns the parameter that an update has grown by the largest factor, and its magnitude
    /// before, if the factor is large.
    pub fn most_grown<'a>(&self, updated: &'a [Observation]) -> Option<(&'a Observation, f64)> {
        let parameters = updated.iter().filter(|seen| seen.kind == TensorKind::Parameter);
        let known = parameters.filter_map(|seen| Some((seen, self.largest(seen)?)));
        let factor = |(seen, usual): &(&Observation, f64)| seen.statistics.largest / usual;
        known
            .max_by(|one, other| factor(one).total_cmp(&factor(other)))
            .filter(|most| factor(most) > GROWTH)
    }

    /// Returns the first tensor of a step with bad values.
    pub fn first_bad<'a>(&self, step: &'a [Observation], stop: StopAt) -> Option<&'a Observation> {
        step.iter().find(|seen| stop.is_bad(&seen.statistics, self.largest(seen)))
    }
}

/// The factor by which an update grows a parameter that is worth a note.
const GROWTH: f64 = 10.0;

/// Returns the largest loss of a micro-batch.
pub fn largest_loss(step: &[Observation]) -> Option<&Observation> {
    let losses = step.iter().filter(|seen| seen.kind == TensorKind::Loss);
    losses.max_by(|one, other| one.statistics.largest.total_cmp(&other.statistics.largest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(kind: TensorKind, tensor: &str, start: Option<u64>, values: &[f32]) -> Observation {
        Observation {
            kind,
            block: 0,
            unit: "h.0".into(),
            tensor: tensor.into(),
            samples: start.map(|start| start..start + 2),
            statistics: TensorStatistics::new(values),
        }
    }

    #[test]
    fn stops_are_parsed() {
        for (text, stop) in [
            ("nan", StopAt::Nan),
            ("inf", StopAt::Inf),
            ("spike", StopAt::Spike(10.0)),
            ("spike:2.5", StopAt::Spike(2.5)),
        ] {
            assert_eq!(text.parse(), Ok(stop));
        }
        for text in ["", "NaN", "spike:", "spike:1", "spike:inf", "spike:x", "spikes"] {
            assert!(text.parse::<StopAt>().is_err(), "{text}");
        }
    }

    /// Ranks compute at the same time, but the first tensor is that of one rank that computes all
    /// virtual ranks in order.
    #[test]
    fn the_order_is_that_of_one_rank() {
        use TensorKind::{Gradient, Loss, Output, Parameter, ReducedGradient};
        let bad = [f32::INFINITY];
        let first = [
            seen(Output, "", Some(0), &[1.0]),
            seen(Loss, "", Some(0), &[1.0]),
            seen(Gradient, "w", Some(0), &bad),
            seen(ReducedGradient, "w", None, &bad),
            seen(Parameter, "w", None, &[1.0]),
        ];
        let second = [
            seen(Output, "", Some(2), &bad),
            seen(Gradient, "w", Some(2), &bad),
            seen(ReducedGradient, "w", None, &[2.0]),
        ];
        let all = merge(second.into_iter().chain(first).collect());
        let found = Usual::default().first_bad(&all, StopAt::Inf).unwrap();
        assert_eq!((found.kind, found.samples.clone()), (Gradient, Some(0..2)));
        assert_eq!(all.last().unwrap().kind, Parameter);
        let reduced = all.iter().find(|seen| seen.kind == ReducedGradient).unwrap();
        assert_eq!((reduced.statistics.elements, reduced.statistics.inf), (2, 1));
        assert_eq!(Usual::default().first_bad(&all, StopAt::Nan), None);
    }

    #[test]
    fn spikes_are_measured_against_the_step_before() {
        use TensorKind::Parameter;
        let mut usual = Usual::default();
        let first = seen(Parameter, "w", None, &[100.0]);
        assert_eq!(usual.first_bad(std::slice::from_ref(&first), StopAt::Spike(2.0)), None);
        usual.note(&[
            seen(Parameter, "bias", None, &[0.0]),
            seen(Parameter, "v", None, &[1.0]),
            seen(Parameter, "w", None, &[5.0]),
        ]);
        let next = [
            // It was zero, but is not large for a parameter.
            seen(Parameter, "bias", None, &[0.5]),
            seen(Parameter, "v", None, &[1.9]),
            seen(Parameter, "w", None, &[-10.5]),
        ];
        assert_eq!(usual.first_bad(&next, StopAt::Spike(2.0)), Some(&next[2]));
        assert_eq!(usual.first_bad(&next, StopAt::Spike(3.0)), None);
    }
}
