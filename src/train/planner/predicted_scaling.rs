//! Compares the section "Predicted scaling" of docs/parallelism.md with the planner, and checks
//! that more nodes lower the predicted rate of a GPU.

use super::machine::Machine;
use super::search::{Proposal, SearchLimits, search_layouts};
use hpctrain_config::{Environment, Sources, load};
use hpctrain_engine::memory::BaselineMemory;

/// A row of the table.
struct PredictedRate {
    machine: String,
    preset: String,
    ranks: usize,
    layout: String,
    tokens: f64,
    per_gpu: f64,
    one_gpu: f64,
    efficiency: f64,
}

impl PredictedRate {
    /// Returns the row of a line of the page, or `None` if the line is not a row of a machine.
    fn parse(line: &str) -> Option<Self> {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, machine, preset, ranks, layout, tokens, per_gpu, one_gpu, efficiency, _] =
            cells[..]
        else {
            return None;
        };
        let machine = machine.strip_prefix('`')?.strip_suffix('`')?;
        Some(Self {
            machine: machine.into(),
            preset: preset.into(),
            ranks: ranks.parse().ok()?,
            layout: layout.into(),
            tokens: number(tokens)?,
            per_gpu: number(per_gpu)?,
            one_gpu: number(one_gpu)?,
            efficiency: number(efficiency.strip_suffix(" %")?)?,
        })
    }

    /// Returns the differences from the planner, one in a line.
    fn differences(&self) -> Vec<String> {
        let Self { machine, preset, ranks, .. } = self;
        // The search is restricted to the tensor parallelism of the row, for speed.
        let tensor = if self.layout.starts_with("tensor 2 ") { 2 } else { 1 };
        let there = fastest(preset, machine, *ranks, &keys(tensor));
        let one = fastest(preset, machine, 1, &keys(1)).per_second();
        let per_gpu = there.per_second() / *ranks as f64;
        let numbers = [
            ("tokens/s", self.tokens, there.per_second()),
            ("of a GPU", self.per_gpu, per_gpu),
            ("of one GPU", self.one_gpu, one),
            ("efficiency", self.efficiency, 100.0 * per_gpu / one),
        ];
        let mut found: Vec<String> = numbers
            .into_iter()
            .filter(|(_, page, here)| (page - here).abs() > 0.01 * here + 0.5)
            .map(|(name, page, here)| {
                format!("{machine}, {preset}, {ranks}: {name} {page} on the page, {here:.0} here")
            })
            .collect();
        let layout = there.keys.to_string();
        if layout != self.layout {
            let page = &self.layout;
            found.push(format!("{machine}, {preset}, {ranks}: {page} on the page, {layout} here"));
        }
        found
    }
}

/// Returns the number of a cell such as `4,096`.
fn number(text: &str) -> Option<f64> {
    text.replace(',', "").parse().ok()
}

/// Returns the settings that keep a search to layouts without pipelines, of `tensor` slices.
fn keys(tensor: usize) -> [String; 2] {
    ["parallel.pipeline=1".into(), format!("parallel.tensor={tensor}")]
}

/// Returns the fastest layout of a preset with settings, on `ranks` GPUs of a machine.
fn fastest(preset: &str, machine: &str, ranks: usize, settings: &[String]) -> Proposal {
    let sources = Sources { preset: Some(preset), overrides: settings, ..Sources::default() };
    let (config, _) = load(&sources).unwrap();
    let machine = Machine::named(machine).unwrap();
    let facts = Environment { ranks, threads: 1, vocabulary: None, on_gpu: true };
    let held = BaselineMemory {
        messages: 0,
        messages_on_device: true,
        resident: 0,
        cache: 0,
        foreign_ranks: 0,
        replaced: 0,
    };
    let per_node = machine.ranks_per_node.min(ranks);
    let place = SearchLimits { room: machine.memory_budget(), held, per_node };
    let mut choice = search_layouts(&config, &facts, &place, |_| Ok(machine)).unwrap();
    choice.proposals.swap_remove(0)
}

/// Returns the predicted tokens per second of each of `ranks` GPUs that train GPT-2 124M with the
/// batch of its preset, in micro-batches of four samples, with ZeRO 1.
fn rate_of_a_gpu(machine: &str, ranks: usize) -> f64 {
    let mut settings = keys(1).to_vec();
    settings.extend(["parallel.zero=1".into(), "batch.micro=4".into()]);
    fastest("gpt2-124m", machine, ranks, &settings).per_second() / ranks as f64
}

#[test]
fn the_page_has_the_predictions() {
    let page = include_str!("../../../docs/parallelism.md");
    let section = page.split_once("\n### Predicted scaling\n").unwrap().1;
    let section = section.split("\n## ").next().unwrap().split("\n### ").next().unwrap();
    let rows: Vec<PredictedRate> = section.lines().filter_map(PredictedRate::parse).collect();
    for machine in ["dgx-h100", "hgx-h200", "h100x4-ndr200", "h100x8-ndr1", "perlmutter"] {
        for preset in ["gpt2-124m", "tinyllama-1.1b"] {
            for ranks in [8, 128] {
                assert!(
                    rows.iter().any(|row| {
                        row.machine == machine && row.preset == preset && row.ranks == ranks
                    }),
                    "no row of {machine}, {preset}, {ranks}"
                );
            }
        }
    }
    let found: Vec<String> = rows.iter().flat_map(PredictedRate::differences).collect();
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn more_nodes_lower_the_rate_of_a_gpu() {
    for machine in ["dgx-h100", "hgx-h200", "h100x4-ndr200", "h100x8-ndr1", "perlmutter"] {
        let ranks = [1, 8, 16, 32, 64, 128];
        let rates = ranks.map(|ranks| rate_of_a_gpu(machine, ranks));
        assert!(rates.is_sorted_by(|fewer, more| fewer > more), "{machine}: {rates:?}");
        assert!(rates[1] > 0.9 * rates[0], "{machine}: {rates:?}");
    }
}

#[test]
fn a_shared_adapter_matters_between_nodes_only() {
    let [whole, shared] = ["dgx-h100", "h100x8-ndr1"].map(|machine| {
        let inside = rate_of_a_gpu(machine, 8);
        let between = rate_of_a_gpu(machine, 128);
        [inside, between]
    });
    assert_eq!(whole[0].to_bits(), shared[0].to_bits());
    assert!(shared[1] < 0.7 * whole[1], "{whole:?} {shared:?}");
}
