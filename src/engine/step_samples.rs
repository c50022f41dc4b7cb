//! The samples that the ranks of a run read in a step, without running it.

use std::path::PathBuf;

use super::micro_batches::{self, Positions};
use hpctrain_base::error::Result;
use hpctrain_base::mesh::Axis;
use hpctrain_config::ResolvedConfig;
use hpctrain_data::{Dataset, Draw, SampleOrder, Source};
use hpctrain_parallel::Progress;

/// A sample of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSample {
    /// Its position in the run.
    pub position: u64,
    /// The virtual rank of the global batch that computes it.
    pub virtual_rank: usize,
    /// The lowest rank that reads it. Other stages of a pipeline, and tensor-parallel ranks, read
    /// it, too.
    pub rank: usize,
    /// The number of its micro-batch among those of its rank in the step.
    pub micro_batch: u64,
    /// The number of its data set in `data.mix`; 0 if there is no mixture.
    pub data_set: usize,
    /// The number of the sample, and that of the completed passes over its data set.
    pub draw: Draw,
    /// The file that stores it.
    pub file: PathBuf,
    /// Its row in the file; for text the number of a window of `model.context` tokens.
    pub row: u64,
}

/// The micro-batches of a rank, in the order of their use.
pub struct RankSchedule {
    positions: Positions,
    order: SampleOrder,
}

impl RankSchedule {
    /// Creates the schedule of rank `rank` of a run from `progress` on. Ranks of the same
    /// data-parallel rank, such as stages of a pipeline, have the same schedule.
    ///
    /// # Errors
    /// Returns an error if [`micro_batches::read_schedule`] does.
    pub fn new(
        plan: &ResolvedConfig,
        train: &dyn Source,
        rank: usize,
        progress: Progress,
    ) -> Result<Self> {
        let (positions, order) =
            micro_batches::read_schedule(plan, train, data_rank(plan, rank), progress)?;
        Ok(Self { positions, order })
    }

    /// Returns the number of micro-batches of the rank in a step.
    pub fn micros_per_step(&self) -> u64 {
        self.positions.micros_per_step()
    }
}

/// Returns the samples of micro-batches, with their positions.
impl Iterator for RankSchedule {
    type Item = Vec<(u64, Draw)>;

    fn next(&mut self) -> Option<Self::Item> {
        let positions = self.positions.next()?;
        Some(positions.map(|position| (position, self.order.draw(position))).collect())
    }
}

/// Returns the data-parallel rank of a rank.
fn data_rank(plan: &ResolvedConfig, rank: usize) -> usize {
    let coordinates = plan.mesh.coordinates(rank);
    coordinates[Axis::Replica as usize] * plan.mesh.shard + coordinates[Axis::Shard as usize]
}

/// Returns the samples of the step after `progress`, whose `position` is that of the first sample
/// of the step, in the order of their positions. The plan is of the ranks of the run.
///
/// # Errors
/// Returns an error if [`micro_batches::read_schedule`] does.
pub fn samples_of_step(
    plan: &ResolvedConfig,
    train: &Dataset,
    progress: Progress,
) -> Result<Vec<StepSample>> {
    let mut samples = Vec::new();
    for of_data in 0..plan.mesh.data() {
        let Some(rank) = (0..plan.mesh.ranks()).find(|rank| data_rank(plan, *rank) == of_data)
        else {
            continue;
        };
        let schedule = RankSchedule::new(plan, train, rank, progress)?;
        let micros = schedule.micros_per_step();
        for (micro_batch, draws) in (0..micros).zip(schedule) {
            samples.extend(draws.into_iter().map(|(position, draw)| {
                let within = position - progress.position;
                let (file, row) = train.locate(draw.sample);
                StepSample {
                    position,
                    virtual_rank: (within / plan.virtual_rank_samples) as usize,
                    rank,
                    micro_batch,
                    data_set: train.data_set(draw.sample),
                    draw,
                    file: file.to_path_buf(),
                    row,
                }
            }));
        }
    }
    samples.sort_unstable_by_key(|sample| sample.position);
    Ok(samples)
}
