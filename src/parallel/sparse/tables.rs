//! Embedding tables of which a step reads, sends and updates only the rows whose ids its batch
//! contains, in host memory.
//!
//! | | all ranks hold all rows | every rank holds some rows |
//! |---|---|---|
//! | forward | looks the rows up | sends ids to the ranks that hold them, which send the rows |
//! | backward | adds up the gradient of the rows of each virtual rank | the same |
//! | reduction | sends these sums to all ranks | to the ranks that hold the rows |
//! | update | of all rows of the batch | of those that it holds |
//!
//! The gradients of virtual ranks are added in the same tree as those of other units: a rank sends
//! the sum of each full subtree of its virtual ranks, and each receiver adds those of all ranks. So
//! all divisions have the same bits. Rows that the batch does not contain, and their optimizer
//! state, stay as they are. For SGD without momentum and Adagrad, without weight decay, that is what
//! a dense update computes; for others it is the lazy form, in which state decays only when a row is
//! updated (as in `torch.optim.SparseAdam`).

use std::collections::VecDeque;
use std::ops::Range;

use super::partition::{RowPartition, TableSharding};
use super::row_copies::elements_of;
use super::rows::{SparseRows, elements, malformed, number};
use super::squares::SquareSum;
use crate::fsdp_unit::initial_range;
use crate::optimizer_shard::{OptimizerShard, Updates};
use crate::owned::{Histograms, Owned};
use crate::restore_source::Source;
use crate::step_params::Hyper;
use crate::virtual_ranks::VirtualRanks;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_base::layout::{TensorPiece, TensorRange, UnitLayout};
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_base::tree_sum::Tree;
use hpctrain_comm::{Group, Pending};
use hpctrain_cpu::{Cpu, CpuBuf};
use hpctrain_device::{Backend as _, EmbeddingOps as _, MemoryKind};

/// A process that holds rows of tables, such as parameter servers.
pub trait RowSource: Send {
    /// Returns the rows of ascending ids, one behind the other.
    ///
    /// # Errors
    /// Returns an error if the rows cannot be had.
    fn rows(&mut self, ids: &[u32]) -> Result<Vec<f32>>;
}

/// The rows that this rank holds.
enum RowStore {
    /// Parameters and optimizer state.
    Here(Box<OptimizerShard<Cpu>>),
    /// None: others hold and update all.
    Elsewhere(Box<dyn RowSource>),
}

/// The tables of a network's first block, of one width, as one matrix of rows.
pub struct SparseTables {
    cpu: Cpu,
    /// The ranks with different data.
    ranks: Group<Cpu>,
    layout: UnitLayout,
    /// Elements of a row.
    width: usize,
    partition: RowPartition,
    store: RowStore,
    /// The full subtrees of virtual ranks that this rank computes, in its order.
    subtrees: Vec<Range<usize>>,
    /// The ids, and the gradients of their rows, of the current virtual rank.
    gradients: SparseRows,
    /// The virtual ranks of the current subtree.
    tree: Tree<SparseRows>,
    /// The virtual ranks in `tree`.
    summed: usize,
    /// The sums of finished subtrees.
    sums: Vec<SparseRows>,
    /// The sums of all ranks.
    reduction: Option<Pending<Vec<Vec<u8>>>>,
    /// The gradient of the rows that this rank holds.
    reduced: Option<SparseRows>,
    /// The step for which histograms of gradients are requested, and those counted so far.
    counts: Option<(u64, Histograms)>,
}

impl SparseTables {
    /// Creates the tables of a unit, which must be matrices of one width, with the initial values of
    /// `seed`; without a seed they are zero, to be restored. `ranks` are those with different data,
    /// replica-major, which compute the virtual ranks of `assignment`.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice.
    pub fn new(
        cpu: Cpu,
        ranks: Group<Cpu>,
        layout: UnitLayout,
        sharding: TableSharding,
        assignment: VirtualRanks,
        updates: Option<&Updates>,
        seed: Option<u64>,
    ) -> Result<Self> {
        let rows: Vec<usize> = layout.tensors.iter().map(|tensor| tensor.shape[0]).collect();
        let width = layout.tensors.first().map_or(1, |tensor| tensor.shape[1]);
        let partition = RowPartition::new(sharding, &rows, ranks.rank(), ranks.size());
        let held = elements_of(partition.held(), width);
        let values = initial_range(&layout, seed, held.clone());
        let owner = OptimizerShard::new(&cpu, None, updates, &layout, held, &values, false)?;
        Ok(Self::with_store(
            cpu,
            ranks,
            layout,
            partition,
            assignment,
            RowStore::Here(Box::new(owner)),
        ))
    }

    /// Creates the tables of a unit whose rows another process holds and updates, for a rank alone
    /// that computes the virtual ranks of `assignment`.
    pub fn elsewhere(
        cpu: Cpu,
        alone: Group<Cpu>,
        layout: UnitLayout,
        assignment: VirtualRanks,
        source: Box<dyn RowSource>,
    ) -> Self {
        let rows: Vec<usize> = layout.tensors.iter().map(|tensor| tensor.shape[0]).collect();
        let partition = RowPartition::new(TableSharding::Replicated, &rows, 0, 1);
        Self::with_store(cpu, alone, layout, partition, assignment, RowStore::Elsewhere(source))
    }

    fn with_store(
        cpu: Cpu,
        ranks: Group<Cpu>,
        layout: UnitLayout,
        partition: RowPartition,
        assignment: VirtualRanks,
        store: RowStore,
    ) -> Self {
        let width = layout.tensors.first().map_or(1, |tensor| tensor.shape[1]);
        let subtrees = own_subtrees(&ranks, &assignment);
        Self {
            cpu,
            ranks,
            layout,
            width,
            partition,
            store,
            subtrees,
            gradients: SparseRows::default(),
            tree: Tree::default(),
            summed: 0,
            sums: vec![],
            reduction: None,
            reduced: None,
            counts: None,
        }
    }

    /// Expects the virtual ranks of another division of them among ranks in the next steps.
    pub fn expect(&mut self, assignment: &VirtualRanks) {
        self.subtrees = own_subtrees(&self.ranks, assignment);
    }

    /// Returns the layout of the unit.
    pub fn layout(&self) -> &UnitLayout {
        &self.layout
    }

    /// Looks up the rows of these ids. Collective over the ranks with different data if they hold
    /// different rows.
    ///
    /// # Errors
    /// Returns an error if memory runs out or a message fails.
    pub fn rows(&mut self, ids: &[u32]) -> Result<CpuBuf> {
        let mut rows = self.cpu.alloc(MemoryKind::Activations, ids.len() * self.width)?;
        if let RowStore::Here(owner) = &self.store
            && (self.partition.is_replicated() || self.ranks.size() == 1)
        {
            self.look_up(0, owner.params()?, ids, rows.as_mut_slice())?;
            return Ok(rows);
        }
        let mut wanted = ids.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        let received = match &mut self.store {
            RowStore::Here(_) => self.exchange(&wanted)?,
            RowStore::Elsewhere(source) => source.rows(&wanted)?,
        };
        // The place of each id among the wanted ones.
        let places: Vec<u32> =
            ids.iter().map(|id| wanted.partition_point(|other| other < id) as u32).collect();
        self.look_up(0, &received, &places, rows.as_mut_slice())?;
        Ok(rows)
    }

    /// Takes part in a look-up for other ranks.
    ///
    /// # Errors
    /// Returns an error if [`SparseTables::rows`] does.
    pub fn skip_rows(&mut self) -> Result<()> {
        self.rows(&[]).map(drop)
    }

    /// Copies the rows of ids from a matrix whose first row has id `first`.
    fn look_up(&self, first: usize, from: &[f32], ids: &[u32], to: &mut [f32]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let ids = self.cpu.upload_indices(ids)?;
        self.cpu.embedding(&ids, first, from, &[], to)
    }

    /// Returns the rows of ascending ids, each from the rank that holds it.
    fn exchange(&self, wanted: &[u32]) -> Result<Vec<f32>> {
        let wanted_of = |rank: usize| {
            let rows = self.partition.of_rank(rank);
            let before = |end: usize| wanted.partition_point(|id| (*id as usize) < end);
            &wanted[before(rows.start)..before(rows.end)]
        };
        let requests = (0..self.ranks.size())
            .map(|rank| bytemuck::cast_slice(wanted_of(rank)).to_vec())
            .collect();
        let ranks = self.ranks.with_label(&self.layout.name);
        let requests = ranks.all_to_all_bytes(requests).wait()?;
        let held = self.partition.held();
        let answer = |request: &Vec<u8>| {
            let mut request = &request[..];
            let count = request.len() / size_of::<u32>();
            let ids: Vec<u32> = elements(&mut request, count)?;
            if !ids.iter().all(|id| held.contains(&(*id as usize))) {
                return Err(malformed());
            }
            let mut rows = vec![0.0; ids.len() * self.width];
            self.look_up(held.start, self.owner()?.params()?, &ids, &mut rows)?;
            Ok(bytemuck::cast_slice(&rows).to_vec())
        };
        let answers = requests.iter().map(answer).collect::<Result<_>>()?;
        let mut rows = Vec::with_capacity(wanted.len() * self.width);
        for (rank, answer) in ranks.all_to_all_bytes(answers).wait()?.iter().enumerate() {
            let mut answer = &answer[..];
            rows.extend(elements::<f32>(&mut answer, wanted_of(rank).len() * self.width)?);
        }
        Ok(rows)
    }

    /// Adds the gradient of the rows of ids of a micro-batch. `virtual_rank_end` is set at the end
    /// of a virtual rank, and true for the last one; then the reduction over ranks starts.
    pub fn add_gradient(&mut self, ids: &[u32], rows: &[f32], virtual_rank_end: Option<bool>) {
        self.gradients.ids.extend_from_slice(ids);
        self.gradients.values.extend_from_slice(rows);
        let Some(last) = virtual_rank_end else { return };
        let gradients = std::mem::take(&mut self.gradients);
        let width = self.width;
        let mut add = |into: &mut SparseRows, from: SparseRows| {
            into.add(width, &from);
            Ok::<_, std::convert::Infallible>(())
        };
        let sum = SparseRows::sum(width, &gradients.ids, &gradients.values);
        let Ok(()) = self.tree.push(sum, &mut add);
        self.summed += 1;
        let subtree = self.subtrees.get(self.sums.len()).map(Range::len);
        if subtree == Some(self.summed) || last {
            let Ok(sum) = self.tree.finish(&mut add);
            self.sums.extend(sum);
            self.summed = 0;
        }
        if last {
            self.start_reduction();
        }
    }

    /// Starts to send the sums of this rank's subtrees to the ranks that hold their rows.
    fn start_reduction(&mut self) {
        fault::point("reduce");
        let sums = std::mem::take(&mut self.sums);
        let ranks = self.ranks.with_label(&self.layout.name);
        let encode = |ids: &Range<usize>| {
            let mut message = vec![];
            for (subtree, sum) in self.subtrees.iter().zip(&sums) {
                message.extend((subtree.start as u64).to_le_bytes());
                message.extend((subtree.len() as u64).to_le_bytes());
                sum.encode(self.width, ids, &mut message);
            }
            message
        };
        self.reduction = Some(match self.partition.is_replicated() {
            true => ranks.gather_bytes(encode(&(0..self.partition.rows()))),
            false => ranks.all_to_all_bytes(
                (0..ranks.size()).map(|rank| encode(&self.partition.of_rank(rank))).collect(),
            ),
        });
    }

    /// Waits for the sums of all ranks, and adds them in the order of the tree over virtual ranks.
    fn finish_reduction(&mut self) -> Result<&SparseRows> {
        if let Some(pending) = self.reduction.take() {
            let held = self.partition.held();
            let mut sums = vec![];
            for message in pending.wait()? {
                let mut left = &message[..];
                while !left.is_empty() {
                    let (start, len) = (number(&mut left)?, number(&mut left)?);
                    sums.push((start, len, SparseRows::decode(self.width, &held, &mut left)?));
                }
            }
            sums.sort_by_key(|(start, ..)| *start);
            let add = |into: &mut SparseRows, from: SparseRows| {
                into.add(self.width, &from);
                Ok::<_, std::convert::Infallible>(())
            };
            let mut tree = Tree::default();
            for (_, len, sum) in sums {
                let height = len.checked_ilog2().ok_or_else(malformed)?;
                let Ok(()) = tree.push_subtree(height, sum, add);
            }
            let Ok(sum) = tree.finish(add);
            self.reduced = Some(sum.unwrap_or_default());
        }
        self.reduced.as_ref().ok_or_else(|| Error::internal("the tables have no gradient"))
    }

    /// Returns the part of the gradient's squared norm for which this rank answers.
    ///
    /// # Errors
    /// Returns an error if a message of the reduction failed.
    pub fn squares(&mut self) -> Result<SquareSum> {
        let (own, width) = (self.partition.own(), self.width);
        let reduced = self.finish_reduction()?;
        let places = elements_of(reduced.within(&own), width);
        Ok(SquareSum::of_rows(width, &reduced.values[places]))
    }

    /// Updates the rows of the batch that this rank holds.
    ///
    /// # Errors
    /// Returns an error if there is no gradient, or memory runs out.
    pub fn update(&mut self, hyper: Hyper) -> Result<()> {
        self.finish_reduction()?;
        let _span = span(ActivityKind::Update, Some(&self.layout.name));
        fault::point("update");
        match (&mut self.store, self.reduced.take()) {
            (RowStore::Here(owner), Some(gradient)) => {
                owner.update_rows(hyper, &gradient, self.width)
            }
            _ => Err(Error::internal("the tables are not trained here")),
        }
    }

    /// Returns the reduced gradient of the rows that this rank holds, or of all rows if another
    /// process holds them.
    ///
    /// # Errors
    /// Returns an error if it was not reduced.
    pub fn gradient(&self) -> Result<&SparseRows> {
        self.reduced.as_ref().ok_or_else(|| Error::internal("the tables have no gradient"))
    }

    fn owner(&self) -> Result<&OptimizerShard<Cpu>> {
        match &self.store {
            RowStore::Here(owner) => Ok(owner),
            RowStore::Elsewhere(_) => Err(Error::internal("the tables are held elsewhere")),
        }
    }

    /// Discards the gradient, so that this step is skipped.
    pub fn skip(&mut self) {
        self.reduced = None;
    }

    /// Returns the rows that only this rank saves, if it has any.
    ///
    /// # Errors
    /// Returns an error if another process holds the rows.
    pub fn owned(&self) -> Result<Option<Owned<'_, Cpu>>> {
        let range = elements_of(self.partition.own(), self.width);
        if range.is_empty() {
            return Ok(None);
        }
        let (params, state) = self.owner()?.values(range.clone(), None)?;
        Ok(Some(Owned { layout: &self.layout, range, params, state }))
    }

    /// Returns the ranges that [`SparseTables::restore_from`] reads on this rank.
    pub fn restored(&self) -> Vec<TensorRange> {
        let own = elements_of(self.partition.own(), self.width);
        let pieces = self.layout.stored(own);
        let range =
            |tensor: &str, range| TensorRange { tensor: tensor.to_owned(), columns: None, range };
        pieces.map(|piece| range(&piece.tensor.name, piece.of_tensor)).collect()
    }

    /// Replaces parameters and optimizer state by those of a checkpoint. Collective over the ranks
    /// with different data.
    ///
    /// # Errors
    /// Returns an error if a message fails; errors of the source are kept there.
    pub fn restore_from(&mut self, source: &mut Source<'_>) -> Result<()> {
        let [own, held] =
            [self.partition.own(), self.partition.held()].map(|rows| elements_of(rows, self.width));
        // Without other copies nothing is sent.
        let longest = if self.partition.is_replicated() { self.partition.most_owned() } else { 0 };
        let RowStore::Here(owner) = &mut self.store else { return Ok(()) };
        let (layout, ranks) = (&self.layout, &self.ranks);
        let longest = longest * self.width;
        // The other ranks wait for the messages of all parts.
        let mut parts = VecDeque::from(owner.restored_parts());
        let restored = owner.restore(|part, _| {
            parts.pop_front();
            source.gathered(layout, part, held.clone(), own.clone(), ranks, longest)
        });
        source.keep_error(restored);
        for part in parts {
            source.gathered(layout, part, held.clone(), own.clone(), ranks, longest)?;
        }
        Ok(())
    }

    /// Requests histograms of the gradients of step `step`.
    pub fn count_gradients_of(&mut self, step: u64) {
        self.counts = Some((step, Histograms::new()));
    }

    /// Counts the gradients of step `step`, if they were requested, between
    /// [`SparseTables::squares`] and the update.
    ///
    /// # Errors
    /// Returns an error if there is no gradient.
    pub fn count_gradients(&mut self, step: u64) -> Result<()> {
        if self.counts.as_ref().is_none_or(|(requested, _)| *requested != step) {
            return Ok(());
        }
        let mut found = Histograms::new();
        for (tensor, values, zeros) in self.own_gradients()? {
            let counted = found.entry(tensor.to_owned()).or_default();
            counted.add(values);
            counted.add_zeros(zeros);
        }
        self.counts = Some((step, found));
        Ok(())
    }

    /// Returns, for each table, its name, the elements of the reduced gradient of the rows for which
    /// this rank answers, and the number of elements of the other ones, which are zero.
    ///
    /// # Errors
    /// Returns an error if the gradient was not reduced.
    pub fn own_gradients(&self) -> Result<Vec<(&str, &[f32], u64)>> {
        let (own, width) = (elements_of(self.partition.own(), self.width), self.width);
        let reduced = self.gradient()?;
        let of_table = |piece: TensorPiece<'_>| {
            let of_unit = own.start + piece.of_owned.start..own.start + piece.of_owned.end;
            let rows = of_unit.start / width..of_unit.end / width;
            let values = &reduced.values[elements_of(reduced.within(&rows), width)];
            let name = self.layout.tensors[piece.index].name.as_str();
            (name, values, (of_unit.len() - values.len()) as u64)
        };
        Ok(self.layout.pieces(own.clone()).map(of_table).collect())
    }

    /// Returns this rank's part of the requested histograms.
    pub fn counted_gradients(&mut self) -> Histograms {
        self.counts.take().map_or_else(Histograms::new, |(_, found)| found)
    }
}

/// Returns the subtrees that this rank computes.
fn own_subtrees(ranks: &Group<Cpu>, assignment: &VirtualRanks) -> Vec<Range<usize>> {
    let shards = assignment.shards;
    subtrees(&assignment.for_shard(ranks.rank() / shards, ranks.rank() % shards))
}

/// Divides virtual ranks, in the order in which a rank computes them, into full subtrees of the tree
/// over all of them: powers of two of consecutive ones, which begin at a multiple of their number.
fn subtrees(virtual_ranks: &[usize]) -> Vec<Range<usize>> {
    let mut subtrees: Vec<Range<usize>> = vec![];
    let mut left = virtual_ranks;
    while let Some(&first) = left.first() {
        let run =
            left.iter().zip(first..).take_while(|(virtual_rank, next)| **virtual_rank == *next);
        let fits = 1 << run.count().ilog2();
        let aligned = if first == 0 { fits } else { 1 << first.trailing_zeros() };
        let len = fits.min(aligned);
        subtrees.push(first..first + len);
        left = &left[len..];
    }
    subtrees
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtual_ranks::ReduceAfter;

    #[test]
    fn virtual_ranks_are_divided_into_full_subtrees() {
        assert_eq!(subtrees(&[0, 1, 2, 3, 4]), [0..4, 4..5]);
        assert_eq!(subtrees(&[4, 5, 6, 7, 8]), [4..8, 8..9]);
        assert_eq!(subtrees(&[0, 1, 2, 3, 4, 5]), [0..4, 4..6]);
        assert_eq!(subtrees(&[3, 4, 5]), [3..4, 4..6]);
        assert_eq!(subtrees(&[1, 3, 5]), [1..2, 3..4, 5..6]);
        assert_eq!(subtrees(&[2, 3, 8]), [2..4, 8..9]);
        for (total, replicas, shards) in [(12, 1, 3), (7, 1, 2), (16, 2, 2), (6, 1, 1)] {
            for reduce_after in
                [ReduceAfter::Step, ReduceAfter::StepInBlocks, ReduceAfter::MicroBatch]
            {
                if total % (replicas * shards) > 0 && reduce_after != ReduceAfter::StepInBlocks {
                    continue;
                }
                let counts = None;
                let assignment = VirtualRanks { total, replicas, shards, reduce_after, counts };
                let mut all: Vec<Range<usize>> = (0..replicas * shards)
                    .flat_map(|rank| subtrees(&assignment.for_shard(rank / shards, rank % shards)))
                    .collect();
                all.sort_by_key(|subtree| subtree.start);
                let virtual_ranks: Vec<usize> = all.iter().cloned().flatten().collect();
                assert_eq!(virtual_ranks, (0..total).collect::<Vec<_>>());
            }
        }
    }
}
