//! The part of a unit that a rank has, for checkpoints and for histograms.

use std::collections::BTreeMap;
use std::ops::Range;

use super::optimizer_shard::Values;
use hpctrain_base::histogram::Histogram;
use hpctrain_base::layout::UnitLayout;
use hpctrain_device::Kernels;

/// The owned part of a unit, for checkpoints.
pub struct Owned<'a, B: Kernels> {
    /// The unit's layout.
    pub layout: &'a UnitLayout,
    /// The range of the unit that this view covers.
    pub range: Range<usize>,
    /// The parameters of the range.
    pub params: Values<'a, B>,
    /// The optimizer state of the range, one buffer for each of
    /// [`Sharded::state_names`](super::Sharded::state_names).
    pub state: Vec<Values<'a, B>>,
}

/// Histograms by the names of tensors.
pub type Histograms = BTreeMap<String, Histogram>;
