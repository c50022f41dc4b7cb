//! Bitwise comparison of two checkpoints.

use std::fmt;

use serde::Serialize;

use crate::{Manifest, PARAMS, Reader};
use hpctrain_base::error::Result;
use hpctrain_config::telemetry::grouped;

/// The number of elements compared at once: 4 MiB of each checkpoint.
const CHUNK: usize = 1 << 20;

/// The counts of a comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// The number of compared tensors, counting the parameters and each state buffer.
    pub tensors: usize,
    /// The number of their elements.
    pub elements: u64,
    /// The number of differences reported.
    pub differences: usize,
}

/// A difference between two checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "what", rename_all = "lowercase")]
pub enum CheckpointDifference {
    /// A count of the progress differs.
    Count {
        /// The name of the count.
        name: &'static str,
        /// The value in A.
        a: u64,
        /// The value in B.
        b: u64,
    },
    /// Only one checkpoint has a state buffer of the optimizer.
    State {
        /// The name of the buffer.
        name: String,
        /// The checkpoint that has it.
        only_in: char,
    },
    /// Only one checkpoint has a tensor.
    Tensor {
        /// The name of the tensor.
        name: String,
        /// The checkpoint that has it.
        only_in: char,
    },
    /// The shapes of a tensor differ.
    Shape {
        /// The name of the tensor.
        name: String,
        /// The shape in A.
        a: Vec<usize>,
        /// The shape in B.
        b: Vec<usize>,
    },
    /// Elements of a tensor, or of one of its state buffers, differ.
    Elements {
        /// `params`, or the name of the state buffer.
        group: String,
        /// The name of the tensor.
        name: String,
        /// How they differ.
        #[serde(flatten)]
        found: ElementDiff,
    },
}

/// The differences between the elements of two tensors of the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ElementDiff {
    /// The number of elements with different bits.
    pub elements: u64,
    /// The number of elements of the tensor.
    pub of: u64,
    /// The flat index of the first different element.
    pub first: usize,
    /// The value of this element in A.
    pub a: f32,
    /// The value of this element in B.
    pub b: f32,
    /// The largest absolute difference; NaN if a value is NaN.
    pub largest: f64,
}

impl fmt::Display for CheckpointDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { name, a, b } => write!(f, "{name}: {a} in A, {b} in B"),
            Self::State { name, only_in } => write!(f, "optimizer state {name}: only in {only_in}"),
            Self::Tensor { name, only_in } => write!(f, "{name}: only in {only_in}"),
            Self::Shape { name, a, b } => write!(f, "{name}: {a:?} in A, {b:?} in B"),
            Self::Elements {
                group,
                name,
                found: ElementDiff { elements, of, first, a, b, largest },
            } => write!(
                f,
                "/{group}/{name}: {} of {} elements differ, the first is {first}: {a:e} and {b:e}; \
                 largest difference {largest:.3e}",
                grouped(*elements),
                grouped(*of)
            ),
        }
    }
}

/// Compares two checkpoints, and calls `report` for every tensor, buffer and count that differs.
/// With `weights_only`, compares only the parameters.
///
/// # Errors
/// Returns an error if one of them is damaged or cannot be read.
pub fn diff(
    a: &mut Reader,
    b: &mut Reader,
    weights_only: bool,
    report: &mut dyn FnMut(CheckpointDifference),
) -> Result<Compared> {
    let mine = a.manifest().clone();
    let others = b.manifest().clone();
    let mut compared = Compared::default();
    let mut report = |found| {
        compared.differences += 1;
        report(found);
    };
    let mut tensors = 0;
    let mut elements = 0;
    if !weights_only {
        progress(&mine, &others).into_iter().chain(buffers(&mine, &others)).for_each(&mut report);
    }
    for name in others.tensors.keys().filter(|name| !mine.tensors.contains_key(*name)) {
        report(CheckpointDifference::Tensor { name: name.clone(), only_in: 'B' });
    }
    for (name, entry) in &mine.tensors {
        let Some(other) = others.tensors.get(name) else {
            report(CheckpointDifference::Tensor { name: name.clone(), only_in: 'A' });
            continue;
        };
        if entry.shape != other.shape {
            let a = entry.shape.clone();
            let b = other.shape.clone();
            report(CheckpointDifference::Shape { name: name.clone(), a, b });
            continue;
        }
        let len = entry.shape.iter().product();
        for (group, part_a, part_b) in parts(&mine, &others, weights_only) {
            tensors += 1;
            elements += len as u64;
            if let Some(found) = tensor(a, b, name, [part_a, part_b], len)? {
                report(CheckpointDifference::Elements { group, name: name.clone(), found });
            }
        }
    }
    Ok(Compared { tensors, elements, ..compared })
}

/// Returns the counts that differ.
fn progress(a: &Manifest, b: &Manifest) -> Vec<CheckpointDifference> {
    let counts = [
        ("step", a.step, b.step),
        ("updates", a.updates, b.updates),
        ("position", a.position, b.position),
        ("seed", a.seed, b.seed),
    ];
    let differ = counts.into_iter().filter(|(_, a, b)| a != b);
    differ.map(|(name, a, b)| CheckpointDifference::Count { name, a, b }).collect()
}

/// Returns the state buffers that only one of them has.
fn buffers(a: &Manifest, b: &Manifest) -> Vec<CheckpointDifference> {
    let only = |have: &Manifest, lack: &Manifest, only_in: char| -> Vec<CheckpointDifference> {
        let missing = have.state.iter().filter(|name| !lack.state.contains(name));
        missing.map(|name| CheckpointDifference::State { name: name.clone(), only_in }).collect()
    };
    [only(a, b, 'A'), only(b, a, 'B')].concat()
}

/// Returns the parts that both have of every tensor: the group's name, and the number of the part
/// in each checkpoint.
fn parts(a: &Manifest, b: &Manifest, weights_only: bool) -> Vec<(String, usize, usize)> {
    let mut parts = vec![(PARAMS.to_string(), 0, 0)];
    if !weights_only {
        parts.extend(a.state.iter().enumerate().filter_map(|(k, name)| {
            let other = b.state.iter().position(|other| other == name)?;
            Some((name.clone(), k + 1, other + 1))
        }));
    }
    parts
}

/// Compares a tensor of `len` elements: part `parts[0]` in `a` with part `parts[1]` in `b`.
fn tensor(
    a: &mut Reader,
    b: &mut Reader,
    name: &str,
    parts: [usize; 2],
    len: usize,
) -> Result<Option<ElementDiff>> {
    let mut found: Option<ElementDiff> = None;
    let mut mine = vec![0.0; CHUNK.min(len)];
    let mut others = vec![0.0; CHUNK.min(len)];
    for start in (0..len).step_by(CHUNK) {
        let range = start..(start + CHUNK).min(len);
        let mine = &mut mine[..range.len()];
        let others = &mut others[..range.len()];
        a.read(name, parts[0], None, range.clone(), mine)?;
        b.read(name, parts[1], None, range.clone(), others)?;
        for (at, (x, y)) in range.zip(mine.iter().zip(others.iter())) {
            if x.to_bits() == y.to_bits() {
                continue;
            }
            let difference = (f64::from(*x) - f64::from(*y)).abs();
            let of = len as u64;
            let found = found.get_or_insert(ElementDiff {
                elements: 0,
                of,
                first: at,
                a: *x,
                b: *y,
                largest: 0.0,
            });
            found.elements += 1;
            if difference.is_nan() || difference > found.largest {
                found.largest = difference;
            }
        }
    }
    Ok(found)
}
