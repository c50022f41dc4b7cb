//! The table of the algorithm of each operation at each size.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::algorithms::{Algorithm, Operation};
use crate::device::path::DeviceTransport;

/// The algorithm of a collective, and the transport of device memory if it is another one than that
/// of the communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The transport, or `None` for that of the communicator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<DeviceTransport>,
}

impl From<Algorithm> for Route {
    fn from(algorithm: Algorithm) -> Self {
        Self { algorithm, transport: None }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.algorithm)?;
        match self.transport {
            Some(transport) => write!(f, " over {}", transport.name()),
            None => Ok(()),
        }
    }
}

/// The algorithm of every operation and size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlgorithmTable(Vec<SizeRule>);

/// The algorithm of one operation up to one size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SizeRule {
    operation: Operation,
    /// The largest buffer, in bytes; `None` for all sizes that no other rule of the operation
    /// covers.
    up_to: Option<usize>,
    #[serde(flatten)]
    route: Route,
}

impl AlgorithmTable {
    /// Creates a table that uses one algorithm, or one route, for everything.
    pub fn uniform(route: impl Into<Route>) -> Self {
        let route = route.into();
        let rules =
            Operation::ALL.into_iter().map(|operation| SizeRule { operation, up_to: None, route });
        Self(rules.collect())
    }

    /// Returns true if a rule uses this transport.
    pub fn uses(&self, transport: DeviceTransport) -> bool {
        self.0.iter().any(|rule| rule.route.transport == Some(transport))
    }

    /// Returns the route of a collective on buffers of `bytes` bytes.
    pub fn pick(&self, operation: Operation, bytes: usize) -> Route {
        let rule = self.0.iter().find(|rule| {
            rule.operation == operation && rule.up_to.is_none_or(|most| bytes <= most)
        });
        rule.map_or(Algorithm::HalvingDoubling.into(), |rule| rule.route)
    }

    /// Sets an operation's rules from the fastest routes at some sizes, in ascending order.
    /// Each applies up to the geometric mean with the next size, the last up to its own size. Above
    /// that `beyond` applies.
    pub(super) fn set(&mut self, operation: Operation, fastest: &[(usize, Route)], beyond: Route) {
        self.0.retain(|rule| rule.operation != operation);
        let between = |a: usize, b: usize| (a as f64 * b as f64).sqrt() as usize;
        for (i, &(size, route)) in fastest.iter().enumerate() {
            let (next, up_to) =
                fastest.get(i + 1).map_or((beyond, size), |&(next, is)| (is, between(size, next)));
            if next != route {
                self.0.push(SizeRule { operation, up_to: Some(up_to), route });
            }
        }
        self.0.push(SizeRule { operation, up_to: None, route: beyond });
    }
}

impl AlgorithmTable {
    /// Describes the table in a line for the startup summary, such as `all_reduce by
    /// halving-doubling, all_gather by ring to 128 KiB then vendor`. Operations with the same rules
    /// share a phrase.
    pub fn describe(&self, operations: &[Operation]) -> String {
        let mut kinds: Vec<(String, Vec<&str>)> = Vec::new();
        for &operation in operations {
            let how = self.describe_rules(operation);
            match kinds.iter_mut().find(|(other, _)| *other == how) {
                Some((_, operations)) => operations.push(operation.name()),
                None => kinds.push((how, vec![operation.name()])),
            }
        }
        let parts =
            kinds.iter().map(|(how, operations)| format!("{} by {how}", operations.join(" and ")));
        parts.collect::<Vec<_>>().join(", ")
    }

    /// Describes the rules of an operation.
    fn describe_rules(&self, operation: Operation) -> String {
        let rules = self.0.iter().filter(|rule| rule.operation == operation);
        let parts = rules.map(|rule| match rule.up_to {
            Some(most) => format!("{} to {} KiB", rule.route, most / 1024),
            None => rule.route.to_string(),
        });
        parts.collect::<Vec<_>>().join(" then ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_find_their_rows() {
        let mut table = AlgorithmTable::uniform(Algorithm::HalvingDoubling);
        assert_eq!(
            table.describe(&Operation::ALL[1..3]),
            "reduce and reduce_scatter by halving-doubling"
        );
        table.set(
            Operation::AllGather,
            &[
                (1 << 14, Algorithm::Ring.into()),
                (1 << 16, Algorithm::Ring.into()),
                (1 << 20, Algorithm::Vendor.into()),
            ],
            Algorithm::Vendor.into(),
        );
        let pick = |bytes| table.pick(Operation::AllGather, bytes).algorithm;
        assert_eq!(
            (pick(0), pick(1 << 18), pick((1 << 18) + 1)),
            (Algorithm::Ring, Algorithm::Ring, Algorithm::Vendor)
        );
        assert_eq!(table.pick(Operation::Broadcast, 1), Algorithm::HalvingDoubling.into());
        assert_eq!(
            table.describe(&Operation::ALL),
            "all_reduce and reduce and reduce_scatter and broadcast by halving-doubling, all_gather by ring to 256 KiB then vendor"
        );
        let peers = Some(DeviceTransport::CudaIpc);
        let near = Route { algorithm: Algorithm::HalvingDoubling, transport: peers };
        table.set(Operation::AllReduce, &[(1 << 20, near)], Algorithm::Vendor.into());
        assert_eq!(
            table.describe(&[Operation::AllReduce]),
            "all_reduce by halving-doubling over cuda-ipc to 1024 KiB then vendor"
        );
        assert!(table.uses(DeviceTransport::CudaIpc) && !table.uses(DeviceTransport::Nccl));
        let text = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<AlgorithmTable>(&text).unwrap(), table);
    }
}
