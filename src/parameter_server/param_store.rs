//! The ranges of one server: parameters, optimizer state, and their updates.
//!
//! Each range has its own lock: pushes to a range are applied in order of arrival, pushes to
//! different ranges in parallel.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::codec;
use super::partitioner::ParamRange;
use super::protocol::{Assignment, Pushed, ServerLoad, Values};
use super::push_pull::max_message_bytes;
use super::run_spec::{RunSpec, layouts};
use super::tree_reducer::TreeReducer;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_checkpoint::{Ranged, Reader, ShardFileInfo, write_ranges};
use hpctrain_config::{MessageDtype, ResolvedConfig, StaleRate};
use hpctrain_cpu::{Cpu, add_serial};
use hpctrain_device::ops::ElementwiseOps as _;
use hpctrain_device::{Backend as _, format_bytes};
use hpctrain_engine::memory::available;
use hpctrain_nn::optim::EMA;
use hpctrain_parallel::{
    self as parallel, Hyper, OptimizerShard, SparseRows, SquareSum, Storage as Place, Updates,
    initial_range, state_names,
};

/// The parameter ranges that a server holds.
pub struct ParamStore {
    terms: RunSpec,
    /// The index of this server.
    server: usize,
    plan: ResolvedConfig,
    layouts: Vec<UnitLayout>,
    /// The backend of updates that one request makes.
    backend: Cpu,
    /// The backend of the threads of connections, which work beside each other.
    of_connections: Cpu,
    ranges: Vec<RangeSlot>,
    /// The number of the first ranges that are rows of tables with sparse updates.
    row_ranges: usize,
    cut: Mutex<Option<Arc<Cut>>>,
    revoked: Mutex<HashSet<u64>>,
    /// The last push of each connection.
    pushers: Mutex<HashMap<Pusher, Arc<Mutex<Last>>>>,
    counts: Counts,
}

/// A range with its state.
struct RangeSlot {
    piece: ParamRange,
    state: Mutex<State>,
}

/// The mutable state of a range.
struct State {
    owner: OptimizerShard<Cpu>,
    /// The number of updates and replacements since the start.
    version: u64,
    /// The number of replacements of the values by [`ParamStore::set`].
    replaced: u64,
    /// With synchronous training: the step whose gradients are being reduced, and their partial
    /// sums.
    step: u64,
    sums: Sums,
    /// The squared norms of the gradient as [`ParamStore::squares`] returns them, once it is complete.
    squares: Option<Vec<u64>>,
}

/// The partial sums of the gradients of a range.
enum Sums {
    /// Sums of all elements.
    Dense(TreeReducer<Vec<f32>>),
    /// Sums of rows of tables with sparse updates.
    Rows(TreeReducer<SparseRows>),
}

impl Sums {
    fn clear(&mut self) {
        match self {
            Self::Dense(sums) => sums.clear(),
            Self::Rows(sums) => sums.clear(),
        }
    }

    /// Returns the gradient of all elements, once it is complete.
    fn dense(&self) -> Option<&Vec<f32>> {
        match self {
            Self::Dense(sums) => sums.whole(),
            Self::Rows(_) => None,
        }
    }
}

impl State {
    /// Returns the number of updates since the start.
    fn updates(&self) -> u64 {
        self.version - self.replaced
    }
}

/// A snapshot of parameters and optimizer state.
struct Cut {
    number: u64,
    /// The parameters of each range, followed by each buffer of optimizer state.
    ranges: Vec<Vec<Vec<f32>>>,
}

/// A worker and the index of one of its connections; `None` for rows of tables.
type Pusher = (u64, Option<usize>);

/// The last push on a connection of a worker.
#[derive(Default)]
struct Last {
    number: u64,
    staleness: u64,
}

#[derive(Default)]
struct Counts {
    pulls: AtomicU64,
    pulled: AtomicU64,
    pushes: AtomicU64,
    pushed: AtomicU64,
    refused: AtomicU64,
    updating: AtomicU64,
}

impl Counts {
    fn add(to: &AtomicU64, count: usize) {
        to.fetch_add(count as u64, Ordering::Relaxed);
    }
}

impl ParamStore {
    /// Creates the ranges of an assignment, with values from its checkpoint or initialized from the
    /// seed.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid, the assigned ranges do not exist, the
    /// memory does not suffice, or the checkpoint cannot be read.
    pub fn new(assignment: &Assignment, threads: usize) -> Result<Self> {
        let absent = || Error::comm("the coordinator assigned ranges that do not exist");
        let terms = assignment.terms.clone().with_held_network();
        let mut plan = RunSpec::plan(&terms.config, terms.workers, terms.vocabulary, threads)?;
        if !terms.is_synchronous() {
            // Each connection has a thread, on which it updates ranges while others do.
            plan.threads = 1;
        }
        let layouts = layouts(&plan);
        let backend = Cpu::new(plan.threads).with_all_threads()?;
        let updates = Updates {
            rule: plan.update_rule,
            groups: plan.config.optimizer.groups.clone(),
            ema_decay: plan.ema,
            local_sgd: None,
            storage: Place::Ranks,
            sdc_check_every: plan.config.run.sdc_check_every,
            host: None,
        };
        log::info!("updates on {} threads", plan.threads);
        let names = state_names(Some(plan.update_rule), plan.ema, None);
        let pieces = assignment.pieces().ok_or_else(absent)?;
        let all_exist = pieces.iter().all(|ParamRange { unit, range }| {
            range.start <= range.end
                && layouts.get(*unit).is_some_and(|layout| range.end <= layout.padded)
        });
        if terms.workers == 0 || !all_exist {
            return Err(absent());
        }
        let row_ranges = terms.table_ranges(assignment.server);
        check_memory(&plan, &terms, pieces, row_ranges, 1 + names.len())?;
        let mut reader = assignment.from.as_deref().map(Reader::open).transpose()?;
        if let Some(reader) = &mut reader {
            reader.manifest().check(
                reader.dir(),
                &layouts,
                assignment.with_state.then_some(&names[..]),
            )?;
            if terms.addresses.is_empty() || assignment.part > reader.manifest().state.len() {
                return Err(absent());
            }
            reader.share_checks(assignment.server, terms.addresses.len());
            reader.check_files()?;
        }
        let mut ranges = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            let layout = &layouts[piece.unit];
            let values = initial_range(layout, Some(plan.config.run.seed), piece.range.clone());
            let mut owner = OptimizerShard::new(
                &backend,
                None,
                Some(&updates),
                layout,
                piece.range.clone(),
                &values,
                false,
            )?;
            if let Some(reader) = &mut reader {
                owner.restore(|part, range| {
                    let part = match part {
                        _ if assignment.with_state => Some(part),
                        // A new EMA starts at the parameters; other fresh state is zero.
                        0 => Some(assignment.part),
                        part => (names[part - 1] == EMA).then_some(assignment.part),
                    };
                    read(reader, layout, part, range)
                })?;
            }
            let state = State {
                owner,
                version: 0,
                replaced: 0,
                step: terms.start.step,
                sums: match index < row_ranges {
                    true => Sums::Rows(TreeReducer::new(plan.virtual_ranks)),
                    false => Sums::Dense(TreeReducer::new(plan.virtual_ranks)),
                },
                squares: None,
            };
            ranges.push(RangeSlot { piece: piece.clone(), state: Mutex::new(state) });
        }
        Ok(Self {
            terms,
            server: assignment.server,
            plan,
            layouts,
            backend,
            of_connections: Cpu::new(1),
            ranges,
            row_ranges,
            cut: Mutex::default(),
            revoked: Mutex::default(),
            pushers: Mutex::default(),
            counts: Counts::default(),
        })
    }

    /// Returns the generation of the run to which the ranges belong.
    pub fn generation(&self) -> u64 {
        self.terms.generation
    }

    /// Returns whether the run records a trace.
    pub fn is_traced(&self) -> bool {
        self.terms.trace
    }

    /// Returns the number of elements of all ranges.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(|slot| slot.piece.range.len()).sum()
    }

    /// Returns the most bytes of a request's body: the gradients of all elements, or of all rows
    /// with their ids.
    pub fn max_body_bytes(&self) -> usize {
        let elements = self.elements();
        let ids = self.terms.row_width.map_or(0, |width| elements.div_ceil(width));
        elements * size_of::<f32>() + ids * size_of::<u32>()
    }

    /// Returns the smallest and the largest step that a range has reached, with synchronous
    /// training.
    pub fn step_range(&self) -> (u64, u64) {
        let steps = || self.ranges.iter().map(|slot| locked(&slot.state).step);
        let start = self.terms.start.step;
        (steps().min().unwrap_or(start), steps().max().unwrap_or(start))
    }

    /// Returns the work done so far.
    pub fn load(&self) -> ServerLoad {
        let Counts { pulls, pulled, pushes, pushed, refused, updating } = &self.counts;
        let [pulls, pulled, pushes, pushed, refused, updating] =
            [pulls, pulled, pushes, pushed, refused, updating]
                .map(|count| count.load(Ordering::Relaxed));
        let bytes = (self.elements() * size_of::<f32>()) as u64;
        ServerLoad {
            ranges: self.ranges.len(),
            bytes,
            pulls,
            pulled,
            pushes,
            pushed,
            refused,
            updating,
        }
    }

    /// Appends the values of those of the ranges `pieces` whose version differs from the known one
    /// to `body`, and returns the versions of all.
    ///
    /// # Errors
    /// Returns an error if the snapshot or a range does not exist.
    pub fn pull(
        &self,
        of: Values,
        pieces: Range<usize>,
        known: &[Option<u64>],
        body: &mut Vec<u8>,
    ) -> Result<Vec<u64>> {
        let format = self.plan.config.parameter_server.message_dtype;
        let cut = match of {
            Values::Live => None,
            Values::Cut(number) => Some(self.cut(number)?),
        };
        let used = self.used();
        let ranges = self.slots(&pieces)?;
        let elements: usize = ranges.iter().map(|slot| slot.piece.range.len()).sum();
        body.reserve_exact(elements * codec::width(format));
        let mut versions = Vec::with_capacity(ranges.len());
        for (index, (number, slot)) in pieces.clone().zip(ranges).enumerate() {
            let known = known.get(index).copied().flatten();
            match &cut {
                Some(cut) => {
                    versions.push(0);
                    codec::encode(format, &cut.ranges[number][used], body);
                }
                None => {
                    let state = locked(&slot.state);
                    versions.push(state.version);
                    if known != Some(state.version) {
                        let (params, _) = state.owner.values(slot.piece.range.clone(), None)?;
                        codec::encode(format, slice(&params), body);
                    }
                }
            }
        }
        Counts::add(&self.counts.pulls, usize::from(self.is_last(&pieces)));
        Counts::add(&self.counts.pulled, body.len());
        Ok(versions)
    }

    /// Replaces the values of the ranges `pieces`, which are in `body`, and clears their optimizer
    /// state.
    ///
    /// # Errors
    /// Returns an error if a range does not exist, or the body does not have the length of the
    /// ranges.
    pub fn set(&self, pieces: Range<usize>, body: &[u8]) -> Result<()> {
        let slots = self.slots(&pieces)?;
        let elements = slots.iter().map(|slot| slot.piece.range.len()).sum();
        let values = codec::decode(MessageDtype::F32, body, elements)?;
        let names = state_names(Some(self.plan.update_rule), self.plan.ema, None);
        let mut rest = &values[..];
        for slot in slots {
            let of_range;
            (of_range, rest) = rest.split_at(slot.piece.range.len());
            let mut state = locked(&slot.state);
            state.owner.restore(|part, range| {
                // A new EMA starts at the parameters; other fresh state is zero.
                let is_set = part == 0 || names[part - 1] == EMA;
                Ok(if is_set { of_range.to_vec() } else { vec![0.0; range.len()] })
            })?;
            state.version += 1;
            state.replaced += 1;
        }
        Ok(())
    }

    /// Returns the index of the parameters or state buffer used for evaluation: the EMA, if there
    /// is one.
    fn used(&self) -> usize {
        let names = state_names(Some(self.plan.update_rule), self.plan.ema, None);
        names.iter().position(|name| *name == EMA).map_or(0, |at| at + 1)
    }

    /// Applies the gradients of the ranges `pieces` that a worker pushed, and returns their largest
    /// staleness. A message that arrives twice is applied once.
    ///
    /// # Errors
    /// Returns an error if a range does not exist, the body does not have the length of the ranges,
    /// or the update fails.
    pub fn push(
        &self,
        (member, connection): (u64, usize),
        number: u64,
        of: &Pushed,
        pieces: Range<usize>,
        body: &[u8],
    ) -> Result<u64> {
        let pusher = (member, Some(connection));
        let pusher = locked(&self.pushers).entry(pusher).or_default().clone();
        // Pushes of a connection arrive in order; a repeated push waits here for the first.
        let mut last = locked(&pusher);
        if number <= last.number {
            return Ok(last.staleness);
        }
        let ranges = self.slots(&pieces)?;
        let elements = ranges.iter().map(|slot| slot.piece.range.len()).sum();
        let gradient =
            codec::decode(self.plan.config.parameter_server.message_dtype, body, elements)?;
        Counts::add(&self.counts.pushed, body.len());
        let staleness = match of {
            Pushed::VirtualRanks { step, virtual_ranks } => {
                self.add(*step, virtual_ranks, ranges, &gradient).map(|()| Some(0))
            }
            Pushed::Batch { ticket, scale, versions } => {
                self.apply(*ticket, f32::from_bits(*scale), ranges, versions, &gradient)
            }
        }?;
        // A push of several messages is counted once, with its last message.
        let count = if staleness.is_some() { &self.counts.pushes } else { &self.counts.refused };
        Counts::add(count, usize::from(self.is_last(&pieces)));
        let staleness = staleness.unwrap_or(0);
        *last = Last { number, staleness };
        Ok(staleness)
    }

    /// Returns ranges by index.
    fn slots(&self, pieces: &Range<usize>) -> Result<&[RangeSlot]> {
        self.ranges.get(pieces.clone()).ok_or_else(wrong_ranges)
    }

    /// Returns whether a message has the last ranges of a pull or push.
    fn is_last(&self, pieces: &Range<usize>) -> bool {
        pieces.end == self.ranges.len()
    }

    /// Adds the gradients of virtual ranks to the sums of the current step.
    fn add(
        &self,
        step: u64,
        virtual_ranks: &Range<usize>,
        ranges: &[RangeSlot],
        gradient: &[f32],
    ) -> Result<()> {
        let mut rest = gradient;
        for slot in ranges {
            let of_range;
            (of_range, rest) = rest.split_at(slot.piece.range.len());
            let mut state = locked(&slot.state);
            let is_current = state.step == step;
            let Sums::Dense(sums) = &mut state.sums else { return Err(wrong_ranges()) };
            self.check_group(sums, virtual_ranks)?;
            // Otherwise other workers have already computed these virtual ranks, with the same
            // bits.
            if is_current {
                sums.put(virtual_ranks.clone(), Cow::Borrowed(of_range), |into, from| {
                    add_serial(from, into)
                });
                self.note_squares(slot, &mut state)?;
            }
        }
        Ok(())
    }

    /// Refuses virtual ranks whose sum is not one of the tree.
    fn check_group<T>(&self, sums: &TreeReducer<T>, virtual_ranks: &Range<usize>) -> Result<()> {
        match sums.is_group(virtual_ranks) {
            true => Ok(()),
            false => Err(Error::comm(format!(
                "virtual ranks {virtual_ranks:?} are not a group of the {}",
                self.plan.virtual_ranks
            ))),
        }
    }

    /// Returns the rows that a range has, by id, and their elements.
    fn rows_of(&self, slot: &RangeSlot) -> Result<(Range<usize>, usize)> {
        let width = self.terms.row_width.ok_or_else(wrong_ranges)?;
        Ok((slot.piece.range.start / width..slot.piece.range.end / width, width))
    }

    /// Appends the rows whose ids are in `ids` to `body`, and returns the versions of all ranges of
    /// rows.
    ///
    /// # Errors
    /// Returns an error if the snapshot does not exist, the ids do not ascend, or a row is on
    /// another server.
    pub fn pull_rows(&self, of: Values, ids: &[u8], body: &mut Vec<u8>) -> Result<Vec<u64>> {
        let mut ids = SparseRows { ids: bytemuck::pod_collect_to_vec(ids), values: vec![] };
        self.check_rows(&ids.ids)?;
        let format = self.plan.config.parameter_server.message_dtype;
        let cut = match of {
            Values::Live => None,
            Values::Cut(number) => Some(self.cut(number)?),
        };
        let used = self.used();
        let mut versions = Vec::with_capacity(self.row_ranges);
        for (number, slot) in self.ranges[..self.row_ranges].iter().enumerate() {
            let (rows, width) = self.rows_of(slot)?;
            let state = locked(&slot.state);
            versions.push(state.version);
            let from = match &cut {
                Some(cut) => &cut.ranges[number][used][..],
                None => state.owner.params()?,
            };
            ids.values.clear();
            for id in &ids.ids[ids.within(&rows)] {
                let row = *id as usize - rows.start;
                ids.values.extend_from_slice(&from[row * width..(row + 1) * width]);
            }
            codec::encode(format, &ids.values, body);
        }
        // Other ranges are pulled, too, and count.
        Counts::add(&self.counts.pulls, usize::from(self.has_only_rows()));
        Counts::add(&self.counts.pulled, body.len());
        Ok(versions)
    }

    fn has_only_rows(&self) -> bool {
        self.row_ranges == self.ranges.len()
    }

    /// Refuses ids that do not ascend, or whose rows are not here.
    fn check_rows(&self, ids: &[u32]) -> Result<()> {
        let rows = SparseRows { ids: ids.to_vec(), values: vec![] };
        let mut held = 0;
        for slot in &self.ranges[..self.row_ranges] {
            held += rows.within(&self.rows_of(slot)?.0).len();
        }
        let is_valid = held == ids.len() && ids.is_sorted_by(|one, next| one < next);
        if is_valid { Ok(()) } else { Err(wrong_ranges()) }
    }

    /// Applies the gradients of rows that a worker pushed, and returns their largest staleness.
    /// `body` has the ids, then the rows. A message that arrives twice is applied once.
    ///
    /// # Errors
    /// Returns an error if the ids do not ascend, a row is on another server, the body does not have
    /// the length of the rows, or the update fails.
    pub fn push_rows(
        &self,
        member: u64,
        number: u64,
        of: &Pushed,
        rows: usize,
        body: &[u8],
    ) -> Result<u64> {
        let pusher = locked(&self.pushers).entry((member, None)).or_default().clone();
        let mut last = locked(&pusher);
        if number <= last.number {
            return Ok(last.staleness);
        }
        let width = self.terms.row_width.ok_or_else(wrong_ranges)?;
        let bytes = rows.checked_mul(size_of::<u32>());
        let (ids, values) =
            bytes.and_then(|bytes| body.split_at_checked(bytes)).ok_or_else(wrong_ranges)?;
        let elements = rows.checked_mul(width).ok_or_else(wrong_ranges)?;
        let format = self.plan.config.parameter_server.message_dtype;
        let values = codec::decode(format, values, elements)?.into_owned();
        let gradient = SparseRows { ids: bytemuck::pod_collect_to_vec(ids), values };
        self.check_rows(&gradient.ids)?;
        Counts::add(&self.counts.pushed, body.len());
        let slots = &self.ranges[..self.row_ranges];
        let staleness = match of {
            Pushed::VirtualRanks { step, virtual_ranks } => {
                for slot in slots {
                    let of_range = self.rows_in(slot, &gradient)?;
                    let mut state = locked(&slot.state);
                    let is_current = state.step == *step;
                    let Sums::Rows(sums) = &mut state.sums else { return Err(wrong_ranges()) };
                    self.check_group(sums, virtual_ranks)?;
                    if is_current {
                        let add = |into: &mut SparseRows, from: &SparseRows| into.add(width, from);
                        sums.put(virtual_ranks.clone(), Cow::Owned(of_range), add);
                        self.note_squares(slot, &mut state)?;
                    }
                }
                Some(0)
            }
            Pushed::Batch { ticket, scale, versions } => self.apply_each(
                *ticket,
                f32::from_bits(*scale),
                slots,
                versions,
                |slot, state, hyper| {
                    state.owner.update_rows(hyper, &self.rows_in(slot, &gradient)?, width)
                },
            )?,
        };
        let count = if staleness.is_some() { &self.counts.pushes } else { &self.counts.refused };
        Counts::add(count, usize::from(self.has_only_rows()));
        let staleness = staleness.unwrap_or(0);
        *last = Last { number, staleness };
        Ok(staleness)
    }

    /// Returns the rows that are in a range.
    fn rows_in(&self, slot: &RangeSlot, all: &SparseRows) -> Result<SparseRows> {
        let (rows, width) = self.rows_of(slot)?;
        let places = all.within(&rows);
        Ok(SparseRows {
            ids: all.ids[places.clone()].to_vec(),
            values: all.values[places.start * width..places.end * width].to_vec(),
        })
    }

    /// Updates ranges with a gradient immediately; returns its largest staleness, or none if the
    /// gradient is refused.
    fn apply(
        &self,
        ticket: u64,
        scale: f32,
        ranges: &[RangeSlot],
        versions: &[u64],
        gradient: &[f32],
    ) -> Result<Option<u64>> {
        let mut rest = gradient;
        self.apply_each(ticket, scale, ranges, versions, |slot, state, hyper| {
            let of_range;
            (of_range, rest) = rest.split_at(slot.piece.range.len());
            state.owner.update(hyper, &[], of_range, None)
        })
    }

    /// Updates ranges immediately with `update`, which gets the constants for each; returns the
    /// largest staleness, or none if the gradient is refused.
    fn apply_each(
        &self,
        ticket: u64,
        scale: f32,
        ranges: &[RangeSlot],
        versions: &[u64],
        mut update: impl FnMut(&RangeSlot, &mut State, Hyper) -> Result<()>,
    ) -> Result<Option<u64>> {
        if locked(&self.revoked).contains(&ticket) || versions.len() != ranges.len() {
            return Ok(None);
        }
        let began = Instant::now();
        let mut most = 0;
        for (slot, pulled) in ranges.iter().zip(versions) {
            let mut state = locked(&slot.state);
            let staleness = state.version.saturating_sub(*pulled);
            most = most.max(staleness);
            let start = self.terms.start;
            let rate =
                self.plan.schedule.rate(start.step + state.updates() / self.terms.workers as u64);
            let rate = match self.plan.config.parameter_server.stale_lr {
                StaleRate::None => rate,
                StaleRate::Inverse => rate / (1 + staleness) as f64,
            };
            let hyper = Hyper {
                lr: rate as f32,
                weight_decay: self.plan.config.optimizer.weight_decay,
                step: start.updates + state.updates() + 1,
                grad_scale: scale,
            };
            update(slot, &mut state, hyper)?;
            state.version += 1;
        }
        Counts::add(&self.counts.updating, began.elapsed().as_micros() as usize);
        Ok(Some(most))
    }

    /// Ignores later pushes of this ticket.
    pub fn revoke(&self, ticket: u64) {
        locked(&self.revoked).insert(ticket);
    }

    /// Returns the squared norms of the gradient of step `step`: for each range, the bits of one
    /// number per virtual shard.
    ///
    /// # Errors
    /// Returns an error if the gradients of some virtual ranks are missing.
    pub fn squares(&self, step: u64) -> Result<Vec<Vec<u64>>> {
        let of_range = |slot: &RangeSlot| {
            let state = locked(&slot.state);
            let squares = state.squares.clone().filter(|_| state.step == step);
            squares.ok_or_else(|| Error::comm(format!("gradients of step {step} are missing")))
        };
        self.ranges.iter().map(of_range).collect()
    }

    /// Computes the squared norms of a gradient once it is complete, while it is in the caches.
    fn note_squares(&self, slot: &RangeSlot, state: &mut State) -> Result<()> {
        if state.squares.is_some() {
            return Ok(());
        }
        let squares: Result<_> = match &state.sums {
            Sums::Rows(sums) => {
                let Some(sum) = sums.whole() else { return Ok(()) };
                let (_, width) = self.rows_of(slot)?;
                let square = SquareSum::of_rows(width, &sum.values);
                Ok(square.encode().map(f64::to_bits).collect())
            }
            Sums::Dense(sums) => {
                let Some(sum) = sums.whole() else { return Ok(()) };
                let layout = &self.layouts[slot.piece.unit];
                let virtual_ranks = self.plan.virtual_ranks;
                let start = slot.piece.range.start;
                let of_shard = |shard| {
                    let counted = layout.counted(layout.part(shard, virtual_ranks));
                    let gradient = &sum[counted.start - start..counted.end - start];
                    let square = self.of_connections.sum_squares(gradient)?;
                    self.of_connections.read(square).map(f64::to_bits)
                };
                shards(layout, &slot.piece, virtual_ranks).map(of_shard).collect()
            }
        };
        state.squares = Some(squares?);
        Ok(())
    }

    /// Returns the squared norms from which trust ratios are computed, for the gradient of the
    /// current step: the virtual shard, the index of the tensor over all units, and the bits of
    /// both squares.
    ///
    /// # Errors
    /// Returns an error if the gradients of some virtual ranks are missing.
    pub fn norms(&self, hyper: Hyper) -> Result<Vec<(usize, usize, [u64; 2])>> {
        let mut all = Vec::new();
        for slot in &self.ranges {
            let ParamRange { unit, range } = &slot.piece;
            let layout = &self.layouts[*unit];
            let virtual_ranks = self.plan.virtual_ranks;
            let before: usize =
                self.layouts[..*unit].iter().map(|layout| layout.tensors.len()).sum();
            let mut state = locked(&slot.state);
            let State { owner, sums, .. } = &mut *state;
            let sum = sums.dense().ok_or_else(|| Error::comm("gradients are missing"))?;
            for shard in shards(layout, &slot.piece, virtual_ranks) {
                let part = layout.part(shard, virtual_ranks);
                debug_assert!(part.start >= range.start && part.end <= range.end);
                for (tensor, pair) in owner.squares(hyper, part, sum, None)? {
                    let [norm, compared] = pair;
                    let pair = [
                        norm.read(&self.backend)?.to_bits(),
                        compared.read(&self.backend)?.to_bits(),
                    ];
                    all.push((shard, before + tensor, pair));
                }
            }
        }
        Ok(all)
    }

    /// Ends step `ended`, unless it has ended: updates every range with its gradient, or skips the
    /// update if `hyper` is none. `trust` has the trust ratio of every tensor of every unit, for
    /// optimizers that use them.
    ///
    /// # Errors
    /// Returns an error if gradients are missing, or the update fails.
    pub fn update(&self, ended: u64, hyper: Option<Hyper>, trust: &[Vec<f32>]) -> Result<()> {
        let began = Instant::now();
        for slot in &self.ranges {
            let mut state = locked(&slot.state);
            let State { owner, version, step, sums, squares, .. } = &mut *state;
            if *step != ended {
                continue;
            }
            if let Some(hyper) = hyper {
                let missing = || Error::comm("gradients are missing");
                match sums {
                    Sums::Dense(sums) => {
                        let trust = trust.get(slot.piece.unit).map_or(&[][..], Vec::as_slice);
                        owner.update(hyper, trust, sums.whole().ok_or_else(missing)?, None)?;
                    }
                    Sums::Rows(sums) => {
                        let (_, width) = self.rows_of(slot)?;
                        owner.update_rows(hyper, sums.whole().ok_or_else(missing)?, width)?;
                    }
                }
                *version += 1;
            }
            *step += 1;
            sums.clear();
            *squares = None;
        }
        Counts::add(&self.counts.updating, began.elapsed().as_micros() as usize);
        Ok(())
    }

    /// Takes a snapshot of all ranges, which replaces the previous one; returns the largest number
    /// of updates of a range.
    ///
    /// # Errors
    /// Returns an error if the parameters of a range are not in memory.
    pub fn take_snapshot(&self, number: u64) -> Result<u64> {
        let mut updates = 0;
        let mut ranges = Vec::with_capacity(self.ranges.len());
        for slot in &self.ranges {
            let state = locked(&slot.state);
            updates = state.updates().max(updates);
            let (params, buffers) = state.owner.values(slot.piece.range.clone(), None)?;
            let values = std::iter::once(&params).chain(&buffers);
            ranges.push(values.map(|values| slice(values).to_vec()).collect());
        }
        *locked(&self.cut) = Some(Arc::new(Cut { number, ranges }));
        Ok(updates)
    }

    fn cut(&self, number: u64) -> Result<Arc<Cut>> {
        let cut = locked(&self.cut).clone().filter(|cut| cut.number == number);
        cut.ok_or_else(|| Error::comm(format!("there is no snapshot {number}")))
    }

    /// Writes a snapshot into the directory of a checkpoint, as the file of this server.
    ///
    /// # Errors
    /// Returns an error if the snapshot does not exist, or the file cannot be written.
    pub fn save(&self, number: u64, staging: &Path) -> Result<ShardFileInfo> {
        let cut = self.cut(number)?;
        let ranges: Vec<Ranged<'_>> = self
            .ranges
            .iter()
            .zip(&cut.ranges)
            .map(|(slot, parts)| Ranged {
                layout: &self.layouts[slot.piece.unit],
                range: slot.piece.range.clone(),
                parts: parts.iter().map(Vec::as_slice).collect(),
            })
            .collect();
        let names = state_names(Some(self.plan.update_rule), self.plan.ema, None);
        write_ranges(staging, self.server, &names, &ranges)
    }
}

/// Refuses ranges that do not fit into the memory of this host: parameters and optimizer state
/// (`buffers` buffers), their snapshot for checkpoints, gradients that are being reduced, and
/// messages.
fn check_memory(
    plan: &ResolvedConfig,
    terms: &RunSpec,
    pieces: &[ParamRange],
    row_ranges: usize,
    buffers: usize,
) -> Result<()> {
    // Synchronous training keeps partial sums of the tree.
    let gradients =
        if terms.is_synchronous() { 2 + plan.virtual_ranks.ilog2() as usize } else { 0 };
    let elements = |pieces: &[ParamRange]| {
        pieces.iter().map(|piece| piece.range.len()).fold(0, usize::saturating_add)
    };
    // Each connection keeps the last message in both directions.
    let connections = terms.workers.saturating_mul(terms.config.parameter_server.connections);
    let messages = max_message_bytes(terms).saturating_mul(connections).saturating_mul(2);
    // Gradients of tables have few rows.
    let need = elements(pieces)
        .saturating_mul(2 * buffers)
        .saturating_add(elements(&pieces[row_ranges..]).saturating_mul(gradients))
        .saturating_mul(size_of::<f32>())
        .saturating_add(messages);
    let limit = plan.config.run.memory_limit.map(|limit| limit.0);
    let available = available(0).into_iter().chain(limit).min().unwrap_or(usize::MAX);
    if need <= available {
        return Ok(());
    }
    let message = format!(
        "a server needs {} for its ranges, but only {} is available",
        format_bytes(need),
        format_bytes(available)
    );
    Err(Error::input(message).hint("start more servers, on other hosts"))
}

/// Returns the error for rows or ranges that a server does not have.
fn wrong_ranges() -> Error {
    Error::comm("a worker requested ranges that do not exist")
}

/// Returns the virtual shards within a range.
fn shards(layout: &UnitLayout, piece: &ParamRange, virtual_ranks: usize) -> Range<usize> {
    let size = layout.padded / virtual_ranks;
    piece.range.start / size..piece.range.end / size
}

/// Reads the values of a range from a part of a checkpoint; without a part, returns zeros.
fn read(
    reader: &mut Reader,
    layout: &UnitLayout,
    part: Option<usize>,
    range: Range<usize>,
) -> Result<Vec<f32>> {
    let mut values = vec![0.0; range.len()];
    if let Some(part) = part {
        for piece in layout.stored(range) {
            let to = &mut values[piece.of_owned];
            reader.read(&piece.tensor.name, part, piece.columns.as_ref(), piece.of_tensor, to)?;
        }
    }
    Ok(values)
}

/// Returns values as a slice.
fn slice<'a>(values: &parallel::Values<'a, Cpu>) -> &'a [f32] {
    match values {
        parallel::Values::Device(_, values) | parallel::Values::Host(_, values) => values,
    }
}

/// Locks a mutex and ignores poisoning: an update that panics ends the process.
fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
