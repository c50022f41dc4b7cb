//! The report of a search, as text and as JSON.

use serde::Serialize;

use super::layouts::{LayoutKeys, RejectedLayout};
use super::search::{Proposal, SearchResult};
use super::trial_runs::{COUNTED, Trial};
use hpctrain_base::error::{Error, Result};
use hpctrain_config::telemetry::grouped;
use hpctrain_data::inspect::table;
use hpctrain_device::format_bytes;

/// Maximum number of reasons for rejected layouts in the text, without `--all`.
const SHOWN_REASONS: usize = 8;

/// The output of `hpctrain plan`.
pub struct PlanReport<'a> {
    /// The preset or file of the network.
    pub network: &'a str,
    /// The number of ranks.
    pub ranks: usize,
    /// Consecutive ranks on each node.
    pub per_node: usize,
    /// Where the rates come from.
    pub rates: String,
    /// The result of the search.
    pub choice: &'a SearchResult,
    /// The trials of the first proposals, if there were any.
    pub trials: &'a [Trial],
}

#[derive(Serialize)]
struct Json<'a> {
    network: &'a str,
    ranks: usize,
    nodes: usize,
    rates: &'a str,
    memory_limit_bytes: Option<usize>,
    layouts: Vec<LayoutRecord>,
    rejected: Vec<RejectedRecord<'a>>,
    reasons: &'a [String],
}

#[derive(Serialize)]
struct LayoutRecord {
    pipeline: usize,
    schedule: String,
    tensor: usize,
    sequence: bool,
    zero: u8,
    shard: usize,
    replica: usize,
    micro: u64,
    recompute: bool,
    offload_optimizer: bool,
    offload_params: bool,
    offload_activations: bool,
    /// Does not include copies to the host and updates there.
    step_ms: f64,
    /// Tokens for language models, else samples.
    per_second: f64,
    memory_bytes: usize,
    host_bytes: usize,
    bubble: f64,
    exposed: f64,
    toml: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tried: Option<TrialRecord>,
}

/// The trial of a proposal in real steps.
#[derive(Serialize)]
struct TrialRecord {
    step_ms: f64,
    /// Peak bytes of parameters, gradients, optimizer state, activations and workspace, as
    /// allocated.
    counted_bytes: usize,
    /// The same by the estimate.
    estimated_bytes: usize,
}

#[derive(Serialize)]
struct RejectedRecord<'a> {
    layout: String,
    why: &'a str,
}

impl LayoutRecord {
    /// Returns the record of a proposal and its trial, if there was one.
    fn new(one: &Proposal, trial: Option<&Trial>) -> Self {
        Self {
            pipeline: one.keys.pipeline,
            schedule: one.keys.schedule.to_string(),
            tensor: one.keys.tensor,
            sequence: one.keys.sequence,
            zero: one.keys.zero.into(),
            shard: one.keys.shard,
            replica: one.keys.replica,
            micro: one.plan.micro,
            recompute: one.keys.recompute,
            offload_optimizer: one.keys.offload.optimizer,
            offload_params: one.keys.offload.params,
            offload_activations: one.keys.offload.activations,
            step_ms: one.time.step * 1e3,
            per_second: one.per_second(),
            memory_bytes: one.bytes(),
            host_bytes: one.memory.host(),
            bubble: one.time.bubble,
            exposed: one.time.exposed,
            toml: one.keys.toml(),
            tried: trial.map(|trial| TrialRecord {
                step_ms: trial.step * 1e3,
                counted_bytes: trial.allocated,
                estimated_bytes: COUNTED
                    .map(|kind| one.memory.categories()[kind as usize])
                    .iter()
                    .sum(),
            }),
        }
    }
}

impl PlanReport<'_> {
    /// Returns the report as a JSON object.
    ///
    /// # Errors
    /// Returns an error if the report cannot be serialised.
    pub fn json(&self) -> Result<String> {
        let Self { network, ranks, per_node, rates, choice, trials } = self;
        let on_gpu = choice.proposals.first().is_some_and(|one| one.memory.gpu.is_some());
        let limit = if on_gpu { choice.room.gpu } else { choice.room.host };
        let json = Json {
            network,
            ranks: *ranks,
            nodes: ranks.div_ceil(*per_node),
            rates,
            memory_limit_bytes: (limit < usize::MAX).then_some(limit),
            layouts: choice
                .proposals
                .iter()
                .enumerate()
                .map(|(number, one)| LayoutRecord::new(one, trials.get(number)))
                .collect(),
            rejected: choice
                .rejected
                .iter()
                .map(|out| RejectedRecord { layout: out.keys.to_string(), why: &out.reason })
                .collect(),
            reasons: &choice.reasons,
        };
        serde_json::to_string_pretty(&json).map_err(|e| Error::internal(format!("report: {e}")))
    }

    /// Returns the report as text: the first `most` layouts, each with its best micro-batch, the
    /// rejected layouts, the reasons, and the keys to set. With `all`, every micro-batch size and
    /// every rejected layout.
    pub fn text(&self, most: usize, all: bool) -> String {
        let Self { network, ranks, per_node, rates, choice, trials } = self;
        let nodes = ranks.div_ceil(*per_node);
        let many = |count: usize, one: &str| {
            if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") }
        };
        let mut out = format!(
            "{network} on {}, {}; rates: {rates}\n\n",
            many(*ranks, "rank"),
            many(nodes, "node")
        );
        let unit = choice.proposals.first().map_or("", |one| one.plan.network.predictions());
        let mut heads = vec!["", "layout", "ms a step", "a second", "memory", "bubble", "exposed"];
        heads.extend((!trials.is_empty()).then_some("measured"));
        let mut rows = vec![heads.into_iter().map(str::to_owned).collect::<Vec<_>>()];
        let mut seen: Vec<&LayoutKeys> = Vec::new();
        for (number, one) in choice.proposals.iter().enumerate() {
            let is_other_size = seen
                .iter()
                .any(|keys| keys.offload == one.keys.offload && keys.same_but_micro(&one.keys))
                && number >= trials.len();
            if !all && (is_other_size || (rows.len() > most && number >= trials.len())) {
                continue;
            }
            seen.push(&one.keys);
            let share = |part: f64| format!("{:.0} %", 100.0 * part);
            // Work on the host is not part of the predicted time.
            let (more, less) = if one.has_unmodelled_host_work() { ("> ", "< ") } else { ("", "") };
            let memory = match one.has_unmodelled_host_work() {
                true => format!(
                    "{}, host {}",
                    format_bytes(one.bytes()),
                    format_bytes(one.memory.host())
                ),
                false => format_bytes(one.bytes()),
            };
            let mut row = vec![
                (number + 1).to_string(),
                one.keys.to_string(),
                format!("{more}{:.2}", one.time.step * 1e3),
                format!("{less}{}", grouped(one.per_second() as u64)),
                memory,
                share(one.time.bubble),
                share(one.time.exposed),
            ];
            if !trials.is_empty() {
                row.push(
                    trials
                        .get(number)
                        .map_or_else(|| "–".into(), |trial| format!("{:.2} ms", trial.step * 1e3)),
                );
            }
            rows.push(row);
        }
        out += table(&rows).trim_end();
        let rest = choice.proposals.len() + 1 - rows.len();
        if rest > 0 {
            out += &format!("\n… and {} that fit (--all)", many(rest, "layout"));
        }
        out += &format!(
            "\na second: {unit}; bubble: waits for other stages; exposed: waits for collectives\n"
        );
        // A layout that fits with a smaller micro-batch is not listed as rejected.
        let left: Vec<&RejectedLayout> = choice
            .rejected
            .iter()
            .filter(|left| {
                all || !choice.proposals.iter().any(|one| one.keys.same_but_micro(&left.keys))
            })
            .collect();
        if !left.is_empty() {
            out += "\nrejected:\n";
            // Many layouts are rejected for the same reason.
            let groups: Vec<&[&RejectedLayout]> =
                left.chunk_by(|one, other| !all && one.reason == other.reason).collect();
            let shown = if all { groups.len() } else { SHOWN_REASONS };
            for group in groups.iter().take(shown) {
                let others = if group.len() > 1 {
                    format!(" and {} like it", group.len() - 1)
                } else {
                    String::new()
                };
                out += &format!("  {}{others}: {}\n", group[0].keys, group[0].reason);
            }
            let rest: usize = groups.iter().skip(shown).map(|group| group.len()).sum();
            if rest > 0 {
                out += &format!("  … and {rest} more (--all)\n");
            }
        }
        for reason in &choice.reasons {
            out += &format!("\n{reason}");
        }
        if let Some(best) = choice.proposals.first() {
            out += &format!("\n\n{}", best.keys.toml());
        }
        out
    }
}
