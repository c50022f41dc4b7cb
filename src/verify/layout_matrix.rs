//! The matrix of layouts that are compared with one rank, and whether each must be bitwise
//! identical.

use std::fmt;

use serde::Serialize;

use crate::config::{Config, ReduceChoice, WorkShares};
use crate::parallel::{Storage, VirtualRanks, Zero};

/// A layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LayoutRow {
    /// The total number of ranks.
    pub ranks: usize,
    /// The number of pipeline stages.
    pub pipeline: usize,
    /// The number of tensor-parallel ranks.
    pub tensor: usize,
    /// The ZeRO stage.
    pub zero: Zero,
    /// The number of ranks that shard a replica.
    pub shard: usize,
    /// The number of replicas.
    pub replica: usize,
    /// The ranks that update the parameters. With central storage, the shards are its owners.
    pub storage: Storage,
    /// When gradients are reduced over shards.
    pub reduce: ReduceChoice,
}

/// The axes of the matrix.
#[derive(Debug, Clone)]
pub struct LayoutAxes {
    /// The numbers of ranks.
    pub ranks: Vec<usize>,
    /// The numbers of pipeline stages.
    pub pipelines: Vec<usize>,
    /// The numbers of tensor-parallel ranks.
    pub tensors: Vec<usize>,
    /// The ZeRO stages.
    pub stages: Vec<Zero>,
    /// When gradients are reduced over shards.
    pub reductions: Vec<ReduceChoice>,
}

/// The reference with which the others are compared: one rank.
pub const REFERENCE: LayoutRow = LayoutRow {
    ranks: 1,
    pipeline: 1,
    tensor: 1,
    zero: Zero::Zero,
    shard: 1,
    replica: 1,
    storage: Storage::Ranks,
    reduce: ReduceChoice::Step,
};

impl LayoutRow {
    /// Returns the number of ranks with different data.
    pub fn data(&self) -> usize {
        self.shard * self.replica
    }

    /// Returns the configuration with this layout.
    pub fn config(&self, base: &Config) -> Config {
        let mut config = base.clone();
        config.parallel.pipeline = self.pipeline;
        // Shares of the work are those of other ranks; they change no bits.
        config.parallel.work_shares = WorkShares::Equal;
        config.parallel.tensor = self.tensor;
        // Without tensor parallelism there is no sequence parallelism either: the bits are the
        // same.
        config.parallel.sequence &= self.tensor > 1;
        config.parallel.zero = self.zero;
        config.parallel.shard = Some(self.shard);
        config.parallel.replica = Some(self.replica);
        config.parallel.storage = self.storage;
        config.parallel.reduce = match self.zero {
            // Without shards only the order of additions is left to choose.
            Zero::Zero if base.parallel.reduce == ReduceChoice::Micro => ReduceChoice::Auto,
            Zero::Zero => base.parallel.reduce,
            _ => self.reduce,
        };
        config.parallel.owners = if self.storage == Storage::Central { self.shard } else { 1 };
        config
    }

    /// Returns true if `virtual_ranks` and `virtual_tensor_ranks` are summed by the same tree as on
    /// one rank: `in_blocks`, or because each rank, and each replica, has a power of two of them. With
    /// local SGD, each of the `local_sgd_replicas` sums its own virtual ranks, and each rank averages
    /// a power of two of the replicas.
    pub fn same_tree(
        &self,
        in_blocks: bool,
        virtual_ranks: usize,
        virtual_tensor_ranks: usize,
        local_sgd_replicas: Option<usize>,
    ) -> bool {
        let power = |virtual_ranks: usize, parts| {
            parts == 1
                || virtual_ranks.is_multiple_of(parts) && (virtual_ranks / parts).is_power_of_two()
        };
        let data = match local_sgd_replicas {
            Some(replicas) => {
                power(virtual_ranks / replicas, self.shard) && power(replicas, self.replica)
            }
            None => {
                in_blocks || VirtualRanks::are_in_one_tree(virtual_ranks, self.replica, self.shard)
            }
        };
        data && power(virtual_tensor_ranks, self.tensor)
    }
}

impl fmt::Display for LayoutRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout =
            format!("{} × {} × {} × {}", self.pipeline, self.replica, self.shard, self.tensor);
        let zero = u8::from(self.zero);
        write!(f, "{:>5}  {layout:<35}  {zero:>4}  {:<6}", self.ranks, self.reduce)
    }
}

/// Returns the layouts to compare: for every number of ranks, pipeline stages and tensor-parallel
/// ranks, every ZeRO stage; then, for the stages that shard, every split into several replicas of
/// several shards; of those, all reductions. With central storage, every number of owners instead.
/// A number of ranks that cannot be divided gives one row, which is skipped with the reason.
pub fn matrix(axes: &LayoutAxes, storage: Storage) -> Vec<LayoutRow> {
    let LayoutAxes { ranks, pipelines, tensors, stages, reductions } = axes;
    let mut rows = Vec::new();
    for (&ranks, &pipeline) in
        ranks.iter().flat_map(|ranks| pipelines.iter().map(move |pipeline| (ranks, pipeline)))
    {
        for &tensor in tensors {
            add_rows(&mut rows, [ranks, pipeline, tensor], stages, storage);
        }
    }
    let each_reduction = |row: LayoutRow| -> Vec<LayoutRow> {
        match row.zero {
            // There are no shards to reduce over.
            Zero::Zero => vec![LayoutRow { reduce: ReduceChoice::Step, ..row }],
            _ => reductions.iter().map(|&reduce| LayoutRow { reduce, ..row }).collect(),
        }
    };
    rows.into_iter().flat_map(each_reduction).collect()
}

fn add_rows(
    rows: &mut Vec<LayoutRow>,
    [ranks, pipeline, tensor]: [usize; 3],
    stages: &[Zero],
    storage: Storage,
) {
    let data = ranks / (pipeline * tensor);
    let reduce = ReduceChoice::Step;
    let row = |zero, shard, replica| LayoutRow {
        ranks,
        pipeline,
        tensor,
        zero,
        shard,
        replica,
        storage,
        reduce,
    };
    if !ranks.is_multiple_of(pipeline * tensor) {
        rows.push(row(Zero::Zero, 1, data.max(1)));
        return;
    }
    if storage == Storage::Central {
        let central = stages.iter().filter(|zero| matches!(zero, Zero::Zero | Zero::Three));
        for &zero in central.filter(|zero| **zero == Zero::Zero || pipeline == 1) {
            let owners = (1..=data).filter(|owners| data.is_multiple_of(*owners));
            rows.extend(owners.map(|owners| row(zero, owners, data / owners)));
        }
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

    fn axes(
        ranks: &[usize],
        pipelines: &[usize],
        tensors: &[usize],
        stages: &[Zero],
    ) -> LayoutAxes {
        LayoutAxes {
            ranks: ranks.into(),
            pipelines: pipelines.into(),
            tensors: tensors.into(),
            stages: stages.into(),
            reductions: vec![ReduceChoice::Step],
        }
    }

    #[test]
    fn only_shards_have_several_reductions() {
        let reductions = vec![ReduceChoice::Step, ReduceChoice::Micro];
        let axes = LayoutAxes { reductions, ..axes(&[4], &[1], &[1], &[Zero::Zero, Zero::Two]) };
        let rows = matrix(&axes, Storage::Ranks);
        assert_eq!(rows.len(), 1 + 2 * 2);
        assert!(rows.iter().all(|row| row.zero == Zero::Two || row.reduce == ReduceChoice::Step));
    }

    #[test]
    fn hybrid_rows_fit_the_ranks() {
        let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three];
        let matrix = |ranks: &[usize], pipelines: &[usize], tensors: &[usize], stages: &[Zero]| {
            matrix(&axes(ranks, pipelines, tensors, stages), Storage::Ranks)
        };
        let rows = matrix(&[1, 2, 4, 8], &[1], &[1], &stages);
        assert_eq!(rows.len(), 4 * 4 + 3 * (1 + 2));
        assert!(rows.contains(&LayoutRow {
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
        assert!(cut.contains(&LayoutRow {
            ranks: 8,
            pipeline: 2,
            tensor: 2,
            zero: Zero::Two,
            shard: 2,
            ..REFERENCE
        }));
        assert!(piped.contains(&LayoutRow { ranks: 2, pipeline: 4, ..REFERENCE }));
    }

    #[test]
    fn central_storage_has_every_number_of_owners() {
        let stages = [Zero::Zero, Zero::Three];
        let rows = matrix(&axes(&[1, 4], &[1], &[1], &stages), Storage::Central);
        let owners = |zero: Zero| -> Vec<(usize, usize, usize)> {
            let of_stage = rows.iter().filter(|row| row.zero == zero);
            of_stage.map(|row| (row.ranks, row.shard, row.replica)).collect()
        };
        for stage in stages {
            assert_eq!(owners(stage), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (4, 4, 1)]);
        }
        let mut base = Config::default();
        base.parallel.storage = Storage::Central;
        let config = rows[3].config(&base);
        assert_eq!((config.parallel.owners, config.parallel.zero), (2, Zero::Zero));
        assert_eq!(REFERENCE.config(&config).parallel.storage, Storage::Ranks);
    }

    #[test]
    fn trees_are_the_same_with_powers_of_two() {
        let tree = |shard, replica, virtual_ranks| {
            LayoutRow { ranks: shard * replica, zero: Zero::One, shard, replica, ..REFERENCE }
                .same_tree(false, virtual_ranks, 1, None)
        };
        assert!(tree(4, 2, 8) && tree(3, 1, 12) && tree(1, 1, 7) && tree(1, 8, 8));
        assert!(!tree(3, 4, 12), "a copy has three virtual ranks");
        assert!(!tree(4, 1, 12), "a rank has three virtual ranks");
        assert!(!tree(8, 1, 4));
        let odd = LayoutRow { ranks: 5, zero: Zero::One, shard: 5, ..REFERENCE };
        assert!(odd.same_tree(true, 8, 1, None) && !odd.same_tree(false, 8, 1, None));
        let local_sgd = |shard, replica, virtual_ranks, replicas| {
            let row = LayoutRow { ranks: shard * replica, shard, replica, ..REFERENCE };
            row.same_tree(false, virtual_ranks, 1, Some(replicas))
        };
        assert!(
            local_sgd(1, 4, 4, 4)
                && local_sgd(1, 3, 12, 3)
                && local_sgd(2, 2, 8, 4)
                && local_sgd(1, 1, 18, 6)
        );
        assert!(!local_sgd(1, 2, 12, 6), "a rank averages three replicas");
        assert!(!local_sgd(2, 1, 24, 4), "a rank adds three virtual ranks of a replica");
        let cut = LayoutRow { ranks: 2, tensor: 2, ..REFERENCE };
        assert!(
            cut.same_tree(false, 1, 4, None)
                && cut.same_tree(false, 1, 2, None)
                && !cut.same_tree(true, 1, 6, None)
        );
    }
}
