//! `hpctrain data order`: the samples that each rank of a run reads, without running it.

use std::path::Path;

use clap::Args;
use serde::Serialize;

use super::json;
use super::train::SourceArgs;
use crate::checkpoint::Progress;
use crate::config::Environment;
use crate::data::inspect::table;
use crate::data::{Dataset, Draw};
use crate::engine::{RankSchedule, micro_batches, plan_for};
use crate::error::Result;
use crate::telemetry::say;

/// Arguments of `hpctrain data order`.
#[derive(Debug, Args)]
pub struct OrderArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Number of ranks of the run
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    /// Number of steps, from the first one on
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// The object of `--json`.
#[derive(Serialize)]
struct OrderReport {
    ranks: usize,
    /// The global batch.
    batch: u64,
    micro_batches: Vec<MicroBatchReport>,
}

/// A micro-batch of a rank.
#[derive(Serialize)]
struct MicroBatchReport {
    step: u64,
    rank: usize,
    micro_batch: u64,
    samples: Vec<SampleReport>,
}

/// A sample of a micro-batch.
#[derive(Serialize)]
struct SampleReport {
    sample: u64,
    /// The number of completed passes over its data set.
    epoch: u64,
    file: String,
    row: u64,
}

impl SampleReport {
    fn new(train: &Dataset, Draw { sample, epoch }: Draw) -> Self {
        let (file, row) = train.locate(sample);
        Self { sample, epoch, file: file.display().to_string(), row }
    }
}

/// Prints the samples of each rank, step and micro-batch.
pub fn run(args: &OrderArgs) -> Result<()> {
    let (config, _) = args.sources.load()?;
    let (train, _) = micro_batches::open(&config)?;
    let facts = Environment {
        ranks: usize::from(args.ranks),
        threads: 1,
        vocabulary: Some(train.vocabulary()).filter(|ids| *ids > 0),
        on_gpu: config.needs_gpu(),
    };
    let plan = plan_for(config, &facts, &train)?;
    let mut found = Vec::new();
    for rank in 0..facts.ranks {
        let schedule = RankSchedule::new(&plan, &train, rank, Progress::default())?;
        let per_step = schedule.micros_per_step();
        let wanted = schedule.take((args.steps.saturating_mul(per_step)) as usize);
        found.extend(wanted.enumerate().map(|(number, draws)| MicroBatchReport {
            step: number as u64 / per_step + 1,
            rank,
            micro_batch: number as u64 % per_step,
            samples: draws.iter().map(|(_, draw)| SampleReport::new(&train, *draw)).collect(),
        }));
    }
    found.sort_by_key(|micro| micro.step);
    if args.json {
        return json(&OrderReport {
            ranks: facts.ranks,
            batch: plan.config.batch.global,
            micro_batches: found,
        });
    }
    let header = ["step", "rank", "micro-batch", "samples", "file: rows"].map(str::to_owned);
    let rows: Vec<[String; 5]> =
        std::iter::once(header).chain(found.iter().map(MicroBatchReport::row)).collect();
    say(table(&rows).trim_end());
    Ok(())
}

impl MicroBatchReport {
    /// Returns the row of the table.
    fn row(&self) -> [String; 5] {
        let numbers: Vec<String> =
            self.samples.iter().map(|sample| sample.sample.to_string()).collect();
        // Consecutive samples of a file share its name.
        let places = self.samples.chunk_by(|one, next| one.file == next.file).map(|samples| {
            let name = Path::new(&samples[0].file).file_name().unwrap_or_default();
            let rows: Vec<String> = samples.iter().map(|sample| sample.row.to_string()).collect();
            format!("{}: {}", name.to_string_lossy(), rows.join(" "))
        });
        [
            self.step.to_string(),
            self.rank.to_string(),
            self.micro_batch.to_string(),
            numbers.join(" "),
            places.collect::<Vec<_>>().join(", "),
        ]
    }
}
