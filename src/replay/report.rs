//! The report of a replay, as lines or as a JSON object.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use super::options::ReplayOptions;
use super::recorder::StopAt;
use super::session::{FirstBad, ReplayOutcome, ReplayTask, SampleOutcome, StepOutcome};
use crate::config::ResolvedConfig;
use crate::engine::{StepSample, TensorKind};
use crate::error::{Error, Result};
use crate::run_records::RunRecords;
use crate::telemetry::metrics::Step;
use crate::telemetry::say;

/// The maximum number of samples, and of steps, that the lines of a report name.
const LISTED: usize = 8;

/// The maximum number of characters of a sample's contents in a line.
const CONTENTS: usize = 300;

/// The place of a bad tensor in the run, and the samples of its micro-batch.
#[derive(Debug, Default)]
pub struct Located {
    /// The virtual rank.
    pub virtual_rank: Option<usize>,
    /// The rank of the run that computed it.
    pub rank: Option<usize>,
    /// The host of that rank in the start of the run that took the step, if it is recorded.
    pub host: Option<String>,
    /// The number of the micro-batch among those of that rank in the step.
    pub micro_batch: Option<u64>,
    /// The samples with their contents.
    pub samples: Vec<(StepSample, Map<String, Value>)>,
}

/// A number of a step that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct StepDifference {
    /// The step.
    step: u64,
    /// The name of the number in `metrics.jsonl`.
    number: &'static str,
    /// The value in the records; null if it is not finite.
    recorded: Value,
    /// The value of the replay; null if it is not finite.
    replayed: Value,
}

/// A sample that causes bad values.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct SampleReport {
    /// Its position in the run.
    position: u64,
    /// The number of the sample, as `data.exclude` takes it.
    sample: u64,
    /// The number of completed passes over its data set.
    epoch: u64,
    /// The number of its data set in `data.mix`.
    data_set: usize,
    /// The file that stores it, and its row there.
    file: String,
    row: u64,
    /// Its loss, run alone, a mean over its predictions; null if it is not finite.
    loss: Option<f64>,
    /// Its contents.
    contents: Map<String, Value>,
}

/// The first tensor with bad values.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct TensorReport {
    step: u64,
    kind: TensorKind,
    /// The block; null for a loss.
    unit: Option<String>,
    /// The parameter; null for outputs and losses.
    tensor: Option<String>,
    elements: u64,
    nan: u64,
    inf: u64,
    /// The largest finite magnitude, and the usual one.
    largest: f64,
    usual: Option<f64>,
    virtual_rank: Option<usize>,
    rank: Option<usize>,
    host: Option<String>,
    micro_batch: Option<u64>,
    /// The samples that cause it.
    samples: Vec<SampleReport>,
    /// Whether they are all samples of the micro-batch, because they see each other or none of
    /// them differs from the others.
    is_set: bool,
    /// The description of the tensor.
    #[serde(skip)]
    words: String,
    /// The findings about the samples.
    note: Option<String>,
}

/// The report.
#[derive(Debug, Serialize)]
pub struct ReplayReport {
    run: String,
    /// The step of the checkpoint.
    from: u64,
    first: u64,
    last: u64,
    ranks: usize,
    ranks_of_run: usize,
    zero: u8,
    /// The number of steps that were compared.
    compared: usize,
    /// The number of steps that differ.
    differing: usize,
    differences: Vec<StepDifference>,
    /// Steps without a readable record.
    missing: Vec<u64>,
    /// The possible causes of differences.
    causes: Vec<String>,
    stop_at_first: Option<String>,
    /// Which other search finds a tensor, if this one has found none.
    note: Option<String>,
    first_bad: Option<TensorReport>,
}

impl ReplayReport {
    /// Compares the steps with the records, and describes the bad tensor.
    pub fn new(
        options: &ReplayOptions,
        records: &RunRecords,
        of_run: &ResolvedConfig,
        task: &ReplayTask,
        outcome: &ReplayOutcome,
        located: Option<Located>,
        unmet: Vec<String>,
    ) -> Self {
        let mut differences = Vec::new();
        let mut missing = Vec::new();
        for taken in &outcome.steps {
            match records.steps.iter().find(|step| step.step == taken.step) {
                None => missing.push(taken.step),
                Some(recorded) => differences.extend(compare(recorded, taken)),
            }
        }
        let mut steps: Vec<u64> = differences.iter().map(|one| one.step).collect();
        steps.dedup();
        let first_bad = outcome.first_bad.as_ref().zip(located);
        let is_infinite = options.stop == Some(StopAt::Nan)
            && outcome.first_bad.is_none()
            && outcome.steps.iter().any(|step| !(step.loss.is_finite() && step.norm.is_finite()));
        let note = is_infinite.then(|| {
            "the loss or gradient norm of a step is infinite, not NaN: --stop-at-first inf finds \
             its tensor"
                .to_owned()
        });
        Self {
            run: options.run.display().to_string(),
            from: outcome.from,
            first: *task.steps.start(),
            last: *task.steps.end(),
            ranks: options.ranks,
            ranks_of_run: of_run.mesh.ranks(),
            zero: outcome.zero,
            compared: outcome.steps.len() - missing.len(),
            differing: steps.len(),
            causes: causes(&steps, &outcome.steps, unmet),
            differences,
            missing,
            stop_at_first: options.stop.map(|stop| stop.to_string()),
            note,
            first_bad: first_bad.map(|(found, located)| describe(found, located, task)),
        }
    }

    /// Returns true if all steps have records, and their bits.
    pub fn is_same(&self) -> bool {
        self.differing == 0 && self.missing.is_empty()
    }

    /// Prints the report.
    ///
    /// # Errors
    /// Returns an error if it cannot be written as JSON.
    pub fn print(&self, json: bool) -> Result<()> {
        if json {
            say(serde_json::to_string_pretty(self).map_err(|e| Error::internal(e.to_string()))?);
        } else {
            say(self.to_string().trim_end());
        }
        Ok(())
    }
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = |ranks| format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" });
        writeln!(
            f,
            "replay       {}: steps {} to {} from the state of step {}, on {} with ZeRO {}; the run had {}",
            self.run,
            self.first,
            self.last,
            self.from,
            ranks(self.ranks),
            self.zero,
            ranks(self.ranks_of_run)
        )?;
        for StepDifference { step, number, recorded, replayed } in
            self.differences.iter().take(LISTED)
        {
            writeln!(f, "step {step:<7} {number} is {replayed} here, {recorded} in metrics.jsonl")?;
        }
        if self.differences.len() > LISTED {
            writeln!(f, "             and {} more numbers", self.differences.len() - LISTED)?;
        }
        if !self.missing.is_empty() {
            writeln!(f, "records      {} steps have no readable record", self.missing.len())?;
        }
        for cause in &self.causes {
            writeln!(f, "cause?       {cause}")?;
        }
        match (&self.first_bad, &self.stop_at_first) {
            (Some(found), _) => write!(f, "{found}")?,
            (None, Some(stop)) => {
                writeln!(
                    f,
                    "first bad    no tensor: --stop-at-first {stop} found none in these steps"
                )?;
            }
            (None, None) => {}
        }
        if let Some(note) = &self.note {
            writeln!(f, "note         {note}")?;
        }
        let verb = if self.differing == 1 { "differs" } else { "differ" };
        write!(f, "{} of {} steps {verb}", self.differing, self.compared)
    }
}

impl fmt::Display for TensorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, words, elements, nan, inf, largest, .. } = self;
        let mut values = Vec::new();
        for (count, name) in [(nan, "NaN"), (inf, "infinite")] {
            if *count > 0 {
                values.push(format!("{count} of {elements} {name}"));
            }
        }
        let usual =
            self.usual.map_or(String::new(), |usual| format!(", {usual:.4e} the step before"));
        values.push(format!("largest magnitude {largest:.4e}{usual}"));
        writeln!(f, "first bad    step {step}: {words}: {}", values.join(", "))?;
        if let (Some(virtual_rank), Some(rank), Some(micro)) =
            (self.virtual_rank, self.rank, self.micro_batch)
        {
            let host = self.host.as_ref().map_or(String::new(), |host| format!(" on {host}"));
            writeln!(
                f,
                "computed by  virtual rank {virtual_rank}, which was on rank {rank} of the run{host}, micro-batch {micro}"
            )?;
        }
        for sample in self.samples.iter().take(LISTED) {
            let SampleReport { position, sample, epoch, file, row, loss, .. } = sample;
            let loss = match (loss, self.is_set) {
                (Some(loss), _) => format!(", loss {loss:.4e}"),
                (None, true) => String::new(),
                (None, false) => ", loss not finite".to_owned(),
            };
            writeln!(
                f,
                "sample       {sample} at position {position} (epoch {epoch}): {file}, row {row}{loss}"
            )?;
            let contents = serde_json::to_string(&self.contents_of(*sample)).unwrap_or_default();
            let shown: String = contents.chars().take(CONTENTS).collect();
            let more = if shown.len() < contents.len() { "…" } else { "" };
            writeln!(f, "             {shown}{more}")?;
        }
        if self.samples.len() > LISTED {
            writeln!(f, "             and {} more samples", self.samples.len() - LISTED)?;
        }
        if let Some(note) = &self.note {
            writeln!(f, "note         {note}")?;
        }
        Ok(())
    }
}

impl TensorReport {
    /// Returns the contents of a sample.
    fn contents_of(&self, sample: u64) -> Map<String, Value> {
        let found = self.samples.iter().find(|one| one.sample == sample);
        found.map(|one| one.contents.clone()).unwrap_or_default()
    }
}

/// Returns the numbers of a step that differ from its record. Numbers that are not finite are null
/// in the records, and equal.
fn compare(recorded: &Step, taken: &StepOutcome) -> Vec<StepDifference> {
    let numbers = [
        ("loss", recorded.loss, taken.loss),
        ("grad_norm", recorded.grad_norm, taken.norm),
        ("lr", recorded.lr, taken.lr),
    ];
    let step = taken.step;
    let is_same = |recorded: f64, replayed: f64| {
        recorded.to_bits() == replayed.to_bits() || !(recorded.is_finite() || replayed.is_finite())
    };
    let mut found: Vec<StepDifference> = numbers
        .into_iter()
        .filter(|(_, recorded, replayed)| !is_same(*recorded, *replayed))
        .map(|(number, recorded, replayed)| {
            let [recorded, replayed] = [recorded, replayed].map(Value::from);
            StepDifference { step, number, recorded, replayed }
        })
        .collect();
    if recorded.skipped != taken.skipped {
        let [recorded, replayed] = [recorded.skipped, taken.skipped].map(Value::from);
        found.push(StepDifference { step, number: "skipped", recorded, replayed });
    }
    found
}

/// Returns what may explain that `differing` steps differ, a sentence each.
fn causes(differing: &[u64], steps: &[StepOutcome], unmet: Vec<String>) -> Vec<String> {
    let Some(first) = differing.first() else { return vec![] };
    let last = steps.last().map_or(0, |step| step.step);
    if let [alone] = differing
        && *alone < last
    {
        return vec![format!(
            "step {alone} differs alone: the steps after it have the bits of the records, so the \
             parameters were right, and the record of step {alone} was changed or damaged"
        )];
    }
    if unmet.is_empty() {
        return vec![format!(
            "the run met the conditions of equal bits (docs/determinism.md), so a machine may have \
             computed step {first} wrongly, in the run or here: replay again, if possible on another \
             machine, and let the run check itself with run.sdc_check_every"
        )];
    }
    unmet
}

/// Describes a bad tensor and the samples that cause it.
fn describe(found: &FirstBad, located: Located, task: &ReplayTask) -> TensorReport {
    let FirstBad { step, seen, usual, is_largest_loss, position, samples, grown } = found;
    let outcomes = samples.as_deref().unwrap_or_default();
    let mut note = Vec::new();
    let mut causing = causing(outcomes, task.stop);
    if *is_largest_loss {
        note.push(
            "no tensor exceeds the bound: this is the micro-batch with the largest loss".to_owned(),
        );
    }
    let many = outcomes.len() > 1;
    let are_all = many && causing.len() == outcomes.len();
    let is_set = seen.samples.is_some() && (causing.is_empty() || are_all);
    match (seen.kind, &task.mixing) {
        (TensorKind::Parameter, _) => note.push(format!(
            "the update of step {step} made it: lower optimizer.lr, lengthen lr_schedule.warmup, or \
             lower optimizer.grad_clip"
        )),
        (TensorKind::ReducedGradient, _) => note.push(
            "the gradients of all virtual ranks are good: their sum is not".to_owned(),
        ),
        (_, Some(why)) => note.push(format!("{why}, so it is one of these samples")),
        _ if causing.is_empty() => note.push(
            "no sample alone has bad values: the sum over the micro-batch has".to_owned(),
        ),
        _ if are_all => note.push(match grown {
            Some(grown) => format!(
                "every sample of the micro-batch has bad values: the update of step {} has grown \
                 {} from {:.4e} to {:.4e}; lower optimizer.lr, lengthen lr_schedule.warmup, or \
                 lower optimizer.grad_clip",
                grown.step, grown.tensor, grown.from, grown.to
            ),
            None => "every sample of the micro-batch has bad values: the parameters cause them, \
                     not a sample; look at the updates before with an earlier --steps"
                .to_owned(),
        }),
        _ if seen.kind == TensorKind::Gradient || seen.kind == TensorKind::InputGradient => {
            note.push(
                "gradients of a sample alone are close to its part of the micro-batch's, not \
                 bitwise equal"
                    .to_owned(),
            );
        }
        _ => {}
    }
    if is_set && causing.is_empty() {
        causing = seen.samples.clone().into_iter().flatten().map(|index| (index, None)).collect();
    }
    let reports = causing.into_iter().filter_map(|(index, loss)| {
        let at = position + index;
        let (sample, contents) = located.samples.iter().find(|(one, _)| one.position == at)?;
        Some(SampleReport {
            position: at,
            sample: sample.draw.sample,
            epoch: sample.draw.epoch,
            data_set: sample.data_set,
            file: Path::new(&sample.file).display().to_string(),
            row: sample.row,
            loss,
            contents: contents.clone(),
        })
    });
    let named = |name: &String| Some(name.clone()).filter(|name| !name.is_empty());
    TensorReport {
        step: *step,
        kind: seen.kind,
        unit: named(&seen.unit),
        tensor: named(&seen.tensor),
        elements: seen.statistics.elements,
        nan: seen.statistics.nan,
        inf: seen.statistics.inf,
        largest: seen.statistics.largest,
        usual: *usual,
        virtual_rank: located.virtual_rank,
        rank: located.rank,
        host: located.host.clone(),
        micro_batch: located.micro_batch,
        samples: reports.collect(),
        is_set,
        words: seen.to_string(),
        note: Some(note.join("; ")).filter(|note| !note.is_empty()),
    }
}

/// Returns the samples that have bad values alone, as indices in the global batch, each with its
/// loss. If none exceeds the bound of a spike, it is the one with the largest values.
fn causing(outcomes: &[SampleOutcome], stop: Option<StopAt>) -> Vec<(u64, Option<f64>)> {
    let report = |one: &SampleOutcome| (one.index, Some(one.loss).filter(|loss| loss.is_finite()));
    let bad: Vec<_> = outcomes.iter().filter(|one| one.is_bad).map(report).collect();
    if !bad.is_empty() || !matches!(stop, Some(StopAt::Spike(_))) {
        return bad;
    }
    let largest = outcomes.iter().max_by(|one, other| one.largest.total_cmp(&other.largest));
    largest.map(report).into_iter().collect()
}
