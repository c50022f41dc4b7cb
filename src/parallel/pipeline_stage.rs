//! The part of a network that a pipeline stage has: consecutive units, and tied-weight replicas,
//! which are copies of parameters of other stages' units that its blocks are tied to. This module
//! computes with indices only.
//!
//! Slots are the units of the stage, counted from its first, followed by the tied-weight replicas.

use std::ops::Range;

use hpctrain_nn::TiedParam;

/// A pipeline stage: with one stage, the whole network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// The index of the stage.
    pub index: usize,
    /// The number of stages.
    pub count: usize,
    /// The units of the stage, by index in the network.
    pub units: Range<usize>,
    /// The units of other stages that its blocks are tied to.
    pub tied_replicas: Vec<TiedUnit>,
    /// Its units that blocks of other stages are tied to.
    pub tied_exports: Vec<TiedExport>,
    /// For each of its units, the parameters that its block is tied to.
    pub tied_imports: Vec<Option<TiedImport>>,
}

/// A unit of another stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedUnit {
    /// The unit, by index in the network.
    pub unit: usize,
    /// The stage that trains it.
    pub stage: usize,
}

/// A unit that a block of another stage is tied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedExport {
    /// The slot of the unit in its stage.
    pub slot: usize,
    /// The stage of the block.
    pub to: usize,
    /// The number of elements that the block uses, from the start of the unit.
    pub len: usize,
}

/// The parameters that a block of this stage is tied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedImport {
    /// The slot of the parameters.
    pub slot: usize,
    /// The stage that trains them, if it is another one.
    pub from: Option<usize>,
    /// The number of elements that the block uses, from the start of the unit.
    pub len: usize,
}

impl Stage {
    /// Returns stage `index` of a network that is partitioned into `stages`; `loans` has the
    /// parameters that each block is tied to.
    pub fn new(stages: &[Range<usize>], index: usize, loans: &[Option<TiedParam>]) -> Self {
        let units = stages[index].clone();
        let stage_of =
            |unit: usize| stages.iter().position(|stage| stage.contains(&unit)).unwrap_or(index);
        let mut tied_replicas: Vec<TiedUnit> = Vec::new();
        let mut tied_imports = Vec::with_capacity(units.len());
        for loan in &loans[units.clone()] {
            tied_imports.push(loan.as_ref().map(|loan| match stage_of(loan.unit) {
                stage if stage == index => {
                    TiedImport { slot: loan.unit - units.start, from: None, len: loan.len }
                }
                stage => {
                    let replica = replica_index(&mut tied_replicas, loan.unit, stage);
                    TiedImport { slot: units.len() + replica, from: Some(stage), len: loan.len }
                }
            }));
        }
        let others = loans
            .iter()
            .enumerate()
            .filter_map(|(block, loan)| Some((stage_of(block), loan.as_ref()?)));
        let lent = others.filter(|(to, loan)| *to != index && units.contains(&loan.unit));
        let tied_exports = lent
            .map(|(to, loan)| TiedExport { slot: loan.unit - units.start, to, len: loan.len })
            .collect();
        Self { index, count: stages.len(), units, tied_replicas, tied_exports, tied_imports }
    }

    /// Returns the only stage of a network.
    pub fn whole(loans: &[Option<TiedParam>]) -> Self {
        Self::new(std::slice::from_ref(&(0..loans.len())), 0, loans)
    }

    /// Returns the only stage of a network whose first block, the embedding tables, is offloaded:
    /// the blocks after it.
    pub fn after_embedding_tables(loans: &[Option<TiedParam>]) -> Self {
        Self::new(std::slice::from_ref(&(1..loans.len())), 0, loans)
    }

    /// Returns the stage of offloaded embedding tables, before that of [`Stage::after_embedding_tables`].
    pub fn embedding_tables(loans: &[Option<TiedParam>]) -> Self {
        Self::new(std::slice::from_ref(&(0..1)), 0, loans)
    }

    /// Returns whether its input is rows of offloaded embedding tables, so that the host needs the
    /// ids of the data.
    pub fn takes_embedding_rows(&self) -> bool {
        self.is_first() && self.units.start > 0
    }

    /// Returns whether it is the first stage, which takes the data.
    pub fn is_first(&self) -> bool {
        self.index == 0
    }

    /// Returns whether it is the last stage, which computes the loss.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.count
    }

    /// Returns for each of its units the slot that its block is tied to.
    pub fn tied_slots(&self) -> Vec<Option<usize>> {
        self.tied_imports.iter().map(|loan| loan.map(|loan| loan.slot)).collect()
    }

    /// Returns the units of all slots, by index in the network.
    pub fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        self.units.clone().chain(self.tied_replicas.iter().map(|guest| guest.unit))
    }
}

/// Returns the index of the replica of a unit that `stage` trains; adds the replica if there is
/// none.
fn replica_index(tied_replicas: &mut Vec<TiedUnit>, unit: usize, stage: usize) -> usize {
    let known = tied_replicas.iter().position(|replica| replica.unit == unit);
    known.unwrap_or_else(|| {
        tied_replicas.push(TiedUnit { unit, stage });
        tied_replicas.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a stage of five blocks, of which the last is tied to the first.
    fn stage(stages: &[Range<usize>], index: usize) -> Stage {
        Stage::new(stages, index, &[None, None, None, None, Some(TiedParam { unit: 0, len: 7 })])
    }

    #[test]
    fn one_stage_has_everything() {
        let whole = stage(std::slice::from_ref(&(0..5)), 0);
        assert_eq!(whole.tied_imports[4], Some(TiedImport { slot: 0, from: None, len: 7 }));
        assert!(
            whole.tied_replicas.is_empty()
                && whole.tied_exports.is_empty()
                && whole.is_first()
                && whole.is_last()
        );
    }

    #[test]
    fn tied_stages_have_replicas() {
        let cut = [0..2, 2..3, 3..5];
        let first = stage(&cut, 0);
        assert_eq!(
            (first.tied_exports, first.tied_replicas),
            (vec![TiedExport { slot: 0, to: 2, len: 7 }], vec![])
        );
        let middle = stage(&cut, 1);
        assert_eq!(
            (middle.tied_exports, middle.tied_replicas, middle.tied_imports),
            (vec![], vec![], vec![None])
        );
        let last = stage(&cut, 2);
        assert_eq!(last.tied_replicas, [TiedUnit { unit: 0, stage: 0 }]);
        assert_eq!(last.tied_slots(), [None, Some(2)]);
        assert_eq!(last.slots().collect::<Vec<_>>(), [3, 4, 0]);
    }
}
