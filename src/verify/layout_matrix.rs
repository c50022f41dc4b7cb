//! The matrix: the layouts that are compared with one rank, and the agreement that is expected of
//! each.

use std::fmt;

use serde::Serialize;

use crate::config::Config;
use crate::parallel::{Storage, Zero};

/// A layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Ranks in all.
    pub ranks: usize,
    /// Stages of the pipeline.
    pub pipeline: usize,
    /// Ranks that share the blocks.
    pub tensor: usize,
    /// ZeRO stage.
    pub zero: Zero,
    /// Ranks that share one copy of the parameters.
    pub shard: usize,
    /// Copies.
    pub replica: usize,
    /// The ranks that update: where it is central, the shards are its owners.
    pub storage: Storage,
}

/// One rank that shards nothing, with which the others are compared.
pub const REFERENCE: Row = Row {
    ranks: 1,
    pipeline: 1,
    tensor: 1,
    zero: Zero::Zero,
    shard: 1,
    replica: 1,
    storage: Storage::Ranks,
};

impl Row {
    /// Ranks with different data.
    pub fn data(&self) -> usize {
        self.shard * self.replica
    }

    /// The configuration with this layout.
    pub fn config(&self, base: &Config) -> Config {
        let mut config = base.clone();
        config.parallel.pipeline = self.pipeline;
        config.parallel.tensor = self.tensor;
        // Where nothing is divided rows are not either: the bits are the same.
        config.parallel.sequence &= self.tensor > 1;
        config.parallel.zero = self.zero;
        config.parallel.shard = Some(self.shard);
        config.parallel.replica = Some(self.replica);
        config.parallel.storage = self.storage;
        config.parallel.owners = if self.storage == Storage::Central { self.shard } else { 1 };
        config
    }

    /// Whether `virtual_ranks` virtual ranks, and so many virtual tensor ranks, are added by the same tree as on one rank
    /// with as many: each rank, and each copy of the parameters, has a power of two of them. Of
    /// `apart` replicas that train apart each adds its own virtual ranks, and each rank averages a power of
    /// two of them.
    pub fn same_tree(
        &self,
        virtual_ranks: usize,
        virtual_tensor_ranks: usize,
        apart: Option<usize>,
    ) -> bool {
        let power = |virtual_ranks: usize, parts| {
            parts == 1
                || virtual_ranks.is_multiple_of(parts) && (virtual_ranks / parts).is_power_of_two()
        };
        let data = match apart {
            Some(replicas) => {
                power(virtual_ranks / replicas, self.shard) && power(replicas, self.replica)
            }
            None => power(virtual_ranks, self.data()) && power(virtual_ranks, self.replica),
        };
        data && power(virtual_tensor_ranks, self.tensor)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout =
            format!("{} × {} × {} × {}", self.pipeline, self.replica, self.shard, self.tensor);
        write!(f, "{:>5}  {layout:<35}  {:>4}", self.ranks, u8::from(self.zero))
    }
}

/// For every number of ranks, of pipeline stages and of ranks that share blocks, every ZeRO stage;
/// then, for those that shard, every way to have several copies of several shards. Where storage is
/// central, every number of owners instead. Ranks that these cannot divide make one row, which
/// cannot run and says why.
pub fn matrix(
    ranks: &[usize],
    pipelines: &[usize],
    tensors: &[usize],
    stages: &[Zero],
    storage: Storage,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for (&ranks, &pipeline) in
        ranks.iter().flat_map(|ranks| pipelines.iter().map(move |pipeline| (ranks, pipeline)))
    {
        for &tensor in tensors {
            add_rows(&mut rows, [ranks, pipeline, tensor], stages, storage);
        }
    }
    rows
}

fn add_rows(
    rows: &mut Vec<Row>,
    [ranks, pipeline, tensor]: [usize; 3],
    stages: &[Zero],
    storage: Storage,
) {
    let data = ranks / (pipeline * tensor);
    let row = |zero, shard, replica| Row { ranks, pipeline, tensor, zero, shard, replica, storage };
    if !ranks.is_multiple_of(pipeline * tensor) {
        rows.push(row(Zero::Zero, 1, data.max(1)));
        return;
    }
    if storage == Storage::Central {
        let owners = (1..=data).filter(|owners| data.is_multiple_of(*owners));
        rows.extend(owners.map(|owners| row(Zero::Zero, owners, data / owners)));
        return;
    }
    rows.extend(stages.iter().map(|&zero| match zero {
        Zero::Zero => row(zero, 1, data),
        _ => row(zero, data, 1),
    }));
    for shard in (2..data).filter(|shard| data.is_multiple_of(*shard)) {
        let sharding = stages.iter().filter(|zero| **zero != Zero::Zero);
        rows.extend(sharding.map(|&zero| row(zero, shard, data / shard)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_rows_fit_the_ranks() {
        let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three];
        let matrix = |ranks: &[usize], pipelines: &[usize], tensors: &[usize], stages: &[Zero]| {
            matrix(ranks, pipelines, tensors, stages, Storage::Ranks)
        };
        let rows = matrix(&[1, 2, 4, 8], &[1], &[1], &stages);
        assert_eq!(rows.len(), 4 * 4 + 3 * (1 + 2));
        assert!(rows.contains(&Row {
            ranks: 8,
            zero: Zero::Two,
            shard: 4,
            replica: 2,
            ..REFERENCE
        }));
        assert!(
            matrix(&[6], &[1], &[1], &stages[..1])
                .iter()
                .all(|row| (row.shard, row.replica) == (1, 6))
        );
        let piped = matrix(&[2, 8], &[2, 4], &[1], &stages);
        assert_eq!(piped.len(), 4 + 1 + (4 + 3) + 4);
        let cut = matrix(&[8], &[2], &[1, 2], &stages);
        assert_eq!(cut.len(), (4 + 3) + 4);
        assert!(cut.contains(&Row {
            ranks: 8,
            pipeline: 2,
            tensor: 2,
            zero: Zero::Two,
            shard: 2,
            ..REFERENCE
        }));
        assert!(piped.contains(&Row { ranks: 2, pipeline: 4, ..REFERENCE }));
    }

    #[test]
    fn central_storage_has_every_number_of_owners() {
        let stages = [Zero::Zero, Zero::Three];
        let rows = matrix(&[1, 4], &[1], &[1], &stages, Storage::Central);
        let owners: Vec<(usize, usize, usize)> =
            rows.iter().map(|row| (row.ranks, row.shard, row.replica)).collect();
        assert_eq!(owners, [(1, 1, 1), (4, 1, 4), (4, 2, 2), (4, 4, 1)]);
        let mut base = Config::default();
        base.parallel.storage = Storage::Central;
        let config = rows[2].config(&base);
        assert_eq!((config.parallel.owners, config.parallel.zero), (2, Zero::Zero));
        assert_eq!(REFERENCE.config(&config).parallel.storage, Storage::Ranks);
    }

    #[test]
    fn trees_are_the_same_with_powers_of_two() {
        let tree =
            |shard, replica, virtual_ranks| {
                Row { ranks: shard * replica, zero: Zero::One, shard, replica, ..REFERENCE }
                    .same_tree(virtual_ranks, 1, None)
            };
        assert!(tree(4, 2, 8) && tree(3, 1, 12) && tree(1, 1, 7) && tree(1, 8, 8));
        assert!(!tree(3, 4, 12), "a copy has three virtual ranks");
        assert!(!tree(4, 1, 12), "a rank has three virtual ranks");
        assert!(!tree(8, 1, 4));
        let apart = |shard, replica, virtual_ranks, replicas| {
            Row { ranks: shard * replica, shard, replica, ..REFERENCE }.same_tree(
                virtual_ranks,
                1,
                Some(replicas),
            )
        };
        assert!(apart(1, 4, 4, 4) && apart(1, 3, 12, 3) && apart(2, 2, 8, 4) && apart(1, 1, 18, 6));
        assert!(!apart(1, 2, 12, 6), "a rank averages three replicas");
        assert!(!apart(2, 1, 24, 4), "a rank adds three virtual ranks of a replica");
        let cut = Row { ranks: 2, tensor: 2, ..REFERENCE };
        assert!(
            cut.same_tree(1, 4, None) && cut.same_tree(1, 2, None) && !cut.same_tree(1, 6, None)
        );
    }
}
