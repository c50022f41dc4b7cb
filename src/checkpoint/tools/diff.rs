//! Differences of two checkpoints, bit by bit.

use crate::checkpoint::{Manifest, PARAMS, Reader};
use crate::error::Result;
use crate::telemetry::grouped;

/// Elements compared at once: 4 MiB of each checkpoint.
const CHUNK: usize = 1 << 20;

/// Counts of a comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compared {
    /// Tensors compared: parameters, and each buffer of the optimizer's state.
    pub tensors: usize,
    /// Their elements.
    pub elements: u64,
    /// Lines told: each is a difference.
    pub differences: usize,
}

/// Differences of two tensors of one shape.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Difference {
    /// Elements with other bits.
    elements: u64,
    /// The first of them, flat, with both values.
    first: (usize, f32, f32),
    /// The largest absolute difference; not a number if a value is none.
    largest: f64,
}

/// Compares two checkpoints; `tell` gets a line for every tensor, buffer and count that differs. `weights_only` leaves
/// out all but the parameters.
///
/// # Errors
/// One of them is damaged.
pub fn diff(a: &mut Reader, b: &mut Reader, weights_only: bool, tell: &mut dyn FnMut(String)) -> Result<Compared> {
    let (mine, others) = (a.manifest().clone(), b.manifest().clone());
    let mut compared = Compared::default();
    let mut tell = |line| {
        compared.differences += 1;
        tell(line);
    };
    let (mut tensors, mut elements) = (0, 0);
    if !weights_only {
        progress(&mine, &others).into_iter().chain(buffers(&mine, &others)).for_each(&mut tell);
    }
    for name in others.tensors.keys().filter(|name| !mine.tensors.contains_key(*name)) {
        tell(format!("{name}: only in B"));
    }
    for (name, entry) in &mine.tensors {
        let Some(other) = others.tensors.get(name) else {
            tell(format!("{name}: only in A"));
            continue;
        };
        if entry.shape != other.shape {
            tell(format!("{name}: {:?} in A, {:?} in B", entry.shape, other.shape));
            continue;
        }
        let len = entry.shape.iter().product();
        for (group, part_a, part_b) in parts(&mine, &others, weights_only) {
            tensors += 1;
            elements += len as u64;
            if let Some(Difference { elements, first: (at, x, y), largest }) =
                tensor(a, b, name, [part_a, part_b], len)?
            {
                let (elements, len) = (grouped(elements), grouped(len as u64));
                tell(format!(
                    "/{group}/{name}: {elements} of {len} elements differ, the first is {at}: {x:e} and {y:e}; \
                     largest difference {largest:.3e}"
                ));
            }
        }
    }
    Ok(Compared { tensors, elements, ..compared })
}

/// Counts that differ.
fn progress(a: &Manifest, b: &Manifest) -> Vec<String> {
    let counts = [
        ("step", a.step, b.step),
        ("updates", a.updates, b.updates),
        ("position", a.position, b.position),
        ("seed", a.seed, b.seed),
    ];
    let differ = counts.into_iter().filter(|(_, a, b)| a != b);
    differ.map(|(name, a, b)| format!("{name}: {a} in A, {b} in B")).collect()
}

/// Buffers that only one of them has.
fn buffers(a: &Manifest, b: &Manifest) -> Vec<String> {
    let only = |have: &Manifest, lack: &Manifest, which: &str| -> Vec<String> {
        let missing = have.state.iter().filter(|name| !lack.state.contains(name));
        missing.map(|name| format!("optimizer state {name}: only in {which}")).collect()
    };
    [only(a, b, "A"), only(b, a, "B")].concat()
}

/// The parts of every tensor that both have: the group's name, and its number in each.
fn parts(a: &Manifest, b: &Manifest, weights_only: bool) -> Vec<(String, usize, usize)> {
    let mut parts = vec![(PARAMS.to_string(), 0, 0)];
    if !weights_only {
        let place = |name: &String| b.state.iter().position(|other| other == name);
        let state = a.state.iter().enumerate();
        parts.extend(state.filter_map(|(k, name)| Some((name.clone(), k + 1, place(name)? + 1))));
    }
    parts
}

/// Compares a tensor of `len` elements, part `parts[0]` of it in `a` with part `parts[1]` in `b`.
fn tensor(a: &mut Reader, b: &mut Reader, name: &str, parts: [usize; 2], len: usize) -> Result<Option<Difference>> {
    let mut found: Option<Difference> = None;
    let (mut mine, mut others) = (vec![0.0; CHUNK.min(len)], vec![0.0; CHUNK.min(len)]);
    for start in (0..len).step_by(CHUNK) {
        let range = start..(start + CHUNK).min(len);
        let (mine, others) = (&mut mine[..range.len()], &mut others[..range.len()]);
        a.read(name, parts[0], None, range.clone(), mine)?;
        b.read(name, parts[1], None, range.clone(), others)?;
        for (at, (x, y)) in range.zip(mine.iter().zip(others.iter())) {
            if x.to_bits() == y.to_bits() {
                continue;
            }
            let apart = (f64::from(*x) - f64::from(*y)).abs();
            let found = found.get_or_insert(Difference { elements: 0, first: (at, *x, *y), largest: 0.0 });
            found.elements += 1;
            if apart.is_nan() || apart > found.largest {
                found.largest = apart;
            }
        }
    }
    Ok(found)
}
