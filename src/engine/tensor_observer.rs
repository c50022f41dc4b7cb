//! Observers of the tensors of training steps, for debugging. Training has none, and then a step
//! tests one option per block.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::Result;
use hpctrain_base::layout::UnitLayout;
use hpctrain_device::Kernels;
use hpctrain_nn::MicroBatch;
use hpctrain_parallel::{OpenGradient, Sharded};

/// The kinds of tensors that an observer sees, in the order of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// The output of a block's forward.
    Output,
    /// The loss of a micro-batch or, with chunked cross-entropy, of some of its rows.
    Loss,
    /// The gradient of a block's input.
    InputGradient,
    /// The gradient of a parameter: the sum over the micro-batches of one virtual rank so far.
    Gradient,
    /// The gradient of a parameter, reduced over all virtual ranks.
    ReducedGradient,
    /// A parameter after the update.
    Parameter,
}

impl fmt::Display for TensorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Output => "output",
            Self::Loss => "loss",
            Self::InputGradient => "input gradient",
            Self::Gradient => "gradient",
            Self::ReducedGradient => "reduced gradient",
            Self::Parameter => "parameter after the update",
        })
    }
}

/// The values of a tensor that are not finite, and the largest finite magnitude.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TensorStatistics {
    /// The number of elements.
    pub elements: u64,
    /// The number of NaN.
    pub nan: u64,
    /// The number of positive and negative infinities.
    pub inf: u64,
    /// The largest magnitude of the finite elements.
    pub largest: f64,
}

impl TensorStatistics {
    /// Counts the elements of a tensor.
    pub fn new(values: &[f32]) -> Self {
        values.iter().fold(Self::default(), |counted, value| counted.with(f64::from(*value)))
    }

    /// Adds an element.
    #[must_use]
    pub fn with(mut self, value: f64) -> Self {
        self.elements += 1;
        if value.is_nan() {
            self.nan += 1;
        } else if value.is_infinite() {
            self.inf += 1;
        } else {
            self.largest = self.largest.max(value.abs());
        }
        self
    }

    /// Adds those of another part of the tensor.
    pub fn merge(&mut self, other: &Self) {
        self.elements += other.elements;
        self.nan += other.nan;
        self.inf += other.inf;
        self.largest = self.largest.max(other.largest);
    }

    /// Returns true if all elements are finite.
    pub fn is_finite(&self) -> bool {
        self.nan == 0 && self.inf == 0
    }
}

/// A tensor that a step has computed.
#[derive(Debug, Clone, PartialEq)]
pub struct ObservedTensor<'a> {
    /// Its kind.
    pub kind: TensorKind,
    /// The index of its block in the stage, with embedding tables on the host; the number of blocks
    /// for a loss.
    pub block: usize,
    /// The name of the block's unit; empty for a loss.
    pub unit: &'a str,
    /// The name of the parameter; empty for outputs, losses and gradients of inputs.
    pub tensor: &'a str,
    /// The samples of the micro-batch, as indices in the global batch; `None` after the reduction.
    pub samples: Option<Range<u64>>,
    /// The counts of its elements, of which this rank may have a part only.
    pub statistics: TensorStatistics,
}

/// Sees the tensors of a rank's steps in the order of their computation.
pub trait TensorObserver: Send {
    /// Is called with each tensor.
    ///
    /// # Errors
    /// Returns an error to end the step on this rank.
    fn observe(&mut self, tensor: &ObservedTensor<'_>) -> Result<()>;
}

/// Returns the indices of a micro-batch's samples in the global batch.
pub(super) fn samples_in_batch<B: Kernels>(micro: &MicroBatch<B>) -> Range<u64> {
    micro.first..micro.first + micro.samples as u64
}

/// Copies a buffer to the host and counts its elements.
pub(super) fn statistics<B: Kernels>(backend: &B, values: &B::Buf) -> Result<TensorStatistics> {
    let mut host = vec![0.0; B::len(values)];
    backend.download(B::all(values), &mut host)?;
    Ok(TensorStatistics::new(&host))
}

/// Shows the gradients of a block after the backward of a micro-batch.
pub(super) fn observe_gradients<B: Kernels>(
    observer: &mut dyn TensorObserver,
    backend: &B,
    sharded: &Sharded<B>,
    block: usize,
    samples: &Range<u64>,
) -> Result<()> {
    let Some(OpenGradient { layout, own, tied }) = sharded.open_gradient(block) else {
        return Ok(());
    };
    let number = sharded.units_before() + block;
    let mut host = vec![0.0; layout.padded];
    backend.download(own, &mut host)?;
    for (tensor, statistics) in by_tensor(layout, &host) {
        observer.observe(&ObservedTensor {
            kind: TensorKind::Gradient,
            block: number,
            unit: &layout.name,
            tensor,
            samples: Some(samples.clone()),
            statistics,
        })?;
    }
    let Some((tensor, grads)) = tied else { return Ok(()) };
    observer.observe(&ObservedTensor {
        kind: TensorKind::Gradient,
        block: number,
        unit: &layout.name,
        tensor,
        samples: Some(samples.clone()),
        statistics: statistics(backend, grads)?,
    })
}

/// Returns the counts of the tensors of a unit, in their order.
fn by_tensor<'a>(layout: &'a UnitLayout, unit: &[f32]) -> Vec<(&'a str, TensorStatistics)> {
    let mut found: BTreeMap<usize, TensorStatistics> = BTreeMap::new();
    for piece in layout.pieces(0..layout.padded) {
        found.entry(piece.index).or_default().merge(&TensorStatistics::new(&unit[piece.of_owned]));
    }
    let named = |(index, counted): (usize, _)| (layout.tensors[index].name.as_str(), counted);
    found.into_iter().map(named).collect()
}

/// Shows the reduced gradients, of which each rank has parts.
pub(super) fn observe_reduced<B: Kernels>(
    observer: &mut dyn TensorObserver,
    sharded: &Sharded<B>,
) -> Result<()> {
    sharded.visit_reduced(&mut |block, layout, tensor, values| {
        observer.observe(&ObservedTensor {
            kind: TensorKind::ReducedGradient,
            block,
            unit: &layout.name,
            tensor,
            samples: None,
            statistics: TensorStatistics::new(values),
        })
    })
}

/// Shows the parameters, of which each rank has parts.
///
/// # Errors
/// Returns an error if an all-gather in flight or the device fails, or the observer returns one.
pub fn observe_parameters<B: Kernels>(
    observer: &mut dyn TensorObserver,
    sharded: &mut Sharded<B>,
) -> Result<()> {
    let mut host = Vec::new();
    let first = sharded.first_unit();
    let names: Vec<_> = sharded.layouts().iter().map(|layout| layout.name.clone()).collect();
    for owned in sharded.owned()? {
        let unit = names.iter().position(|name| *name == owned.layout.name);
        let block = unit.unwrap_or(first) - first;
        host.resize(owned.range.len(), 0.0);
        owned.params.read(&mut host)?;
        for piece in owned.layout.pieces(owned.range.clone()) {
            observer.observe(&ObservedTensor {
                kind: TensorKind::Parameter,
                block,
                unit: &owned.layout.name,
                tensor: &piece.tensor.name,
                samples: None,
                statistics: TensorStatistics::new(&host[piece.of_owned]),
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_not_finite_are_counted() {
        let values = [1.0, -3.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0];
        let mut parts = TensorStatistics::new(&values[..3]);
        parts.merge(&TensorStatistics::new(&values[3..]));
        let whole = TensorStatistics { elements: 6, nan: 1, inf: 2, largest: 3.0 };
        assert_eq!((parts, TensorStatistics::new(&values)), (whole, whole));
        assert!(!whole.is_finite() && TensorStatistics::new(&values[..2]).is_finite());
    }
}
