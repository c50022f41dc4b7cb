//! Divides the units of the model into ranges, and assigns each range to a server.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_config::Partition;

/// A range of a unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamRange {
    /// The unit.
    pub unit: usize,
    /// The elements of the unit.
    pub range: Range<usize>,
}

/// The parts of a unit that are not cut.
#[derive(Debug, Clone, Copy)]
pub struct Granules {
    /// Their number.
    pub count: usize,
    /// The elements of each.
    pub elements: usize,
}

impl Granules {
    /// Divides a unit into `count` equal parts, with its padding.
    pub fn equal(layout: &UnitLayout, count: usize) -> Self {
        Self { count, elements: layout.padded / count }
    }
}

/// Returns the ranges of each server, in model order. A unit, given by its index and layout, is cut
/// only between its granules. Ranges are assigned from the largest to the smallest, each to the
/// server with the fewest elements so far.
///
/// # Errors
/// Returns an error if there are more servers than ranges.
pub fn partition(
    layouts: &[UnitLayout],
    granules: impl Fn(usize, &UnitLayout) -> Granules,
    partition: Partition,
    servers: usize,
) -> Result<Vec<Vec<ParamRange>>> {
    let mut pieces = Vec::new();
    for (unit, layout) in layouts.iter().enumerate() {
        let Granules { count: granules, elements } = granules(unit, layout);
        let bytes = granules * elements * size_of::<f32>();
        let count = partition.count(bytes, servers).clamp(1, granules);
        let at = |part: usize| elements * (part * granules / count);
        pieces.extend((0..count).map(|part| ParamRange { unit, range: at(part)..at(part + 1) }));
    }
    if pieces.len() < servers {
        return Err(Error::input(format!("{servers} servers, but parameter_server.partition = {partition} cuts the model into {} ranges", pieces.len()))
            .hint("start fewer servers, or cut it into more: parameter_server.partition = \"fixed:N\"; with parameter_server.staleness = 0 a unit has at most parallel.virtual_ranks ranges"));
    }
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.range.len()));
    let mut of_servers = vec![(0, Vec::new()); servers];
    for piece in pieces {
        if let Some((held, of_server)) = of_servers.iter_mut().min_by_key(|(held, _)| *held) {
            *held += piece.range.len();
            of_server.push(piece);
        }
    }
    Ok(of_servers
        .into_iter()
        .map(|(_, mut pieces)| {
            pieces.sort_by_key(|piece| (piece.unit, piece.range.start));
            pieces
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::layout::{Init, Tensor};

    fn quarters(_: usize, layout: &UnitLayout) -> Granules {
        Granules::equal(layout, 4)
    }

    fn unit(elements: usize, virtual_ranks: usize) -> UnitLayout {
        UnitLayout::new("unit", vec![Tensor::new("w", &[elements], Init::Zeros)], virtual_ranks)
    }

    #[test]
    fn every_element_has_one_server_and_servers_are_balanced() {
        let layouts = [unit(1000, 4), unit(64, 4), unit(4000, 4), unit(500, 4)];
        for (servers, strategy) in
            [(1, "min:1KiB"), (2, "fixed:1"), (3, "min:1KiB"), (3, "max:4KiB"), (2, "fixed:9")]
        {
            let divided =
                partition(&layouts, quarters, strategy.parse().unwrap(), servers).unwrap();
            assert_eq!(divided.len(), servers);
            let mut all: Vec<&ParamRange> = divided.iter().flatten().collect();
            all.sort_by_key(|piece| (piece.unit, piece.range.start));
            for (unit, layout) in layouts.iter().enumerate() {
                let of_unit: Vec<_> = all.iter().filter(|piece| piece.unit == unit).collect();
                assert_eq!(
                    (of_unit[0].range.start, of_unit[of_unit.len() - 1].range.end),
                    (0, layout.padded)
                );
                assert!(of_unit.windows(2).all(|pair| pair[0].range.end == pair[1].range.start));
                assert!(
                    of_unit.iter().all(|piece| piece.range.start % (layout.padded / 4) == 0
                        && !piece.range.is_empty())
                );
            }
        }
        let fine = partition(&layouts, quarters, Partition::Fixed(4), 2).unwrap();
        let fine: Vec<usize> = fine
            .iter()
            .map(|of_server| of_server.iter().map(|piece| piece.range.len()).sum::<usize>())
            .collect();
        assert!(fine[0].abs_diff(fine[1]) <= 1024, "{fine:?}");
        let error = partition(&layouts, quarters, Partition::Fixed(1), 5).unwrap_err().to_string();
        assert!(
            error.contains(
                "5 servers, but parameter_server.partition = fixed:1 cuts the model into 4 ranges"
            ),
            "{error}"
        );
    }
}
