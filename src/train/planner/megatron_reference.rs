//! Compares published step times of Megatron-LM with the predictions for the same layouts and
//! machine.

use super::machine::Machine;
use super::search::{SearchLimits, search_layouts};
use hpctrain_config::{Environment, Sources, load};
use hpctrain_engine::memory::BaselineMemory;

/// A published step.
struct Point {
    name: &'static str,
    layers: usize,
    width: usize,
    heads: usize,
    tensor: usize,
    pipeline: usize,
    ranks: usize,
    batch: u64,
    /// Samples of a micro-batch. `None` if the source does not give it; then the best is taken.
    micro: Option<u64>,
    /// Whether full activation recomputation was used; else sequence parallelism.
    recompute: bool,
    /// Seconds of a step.
    seconds: f64,
}

/// The settings that the steps of the first paper's weak scaling share.
const WEAK: Point = Point {
    name: "",
    layers: 0,
    width: 0,
    heads: 0,
    tensor: 1,
    pipeline: 1,
    ranks: 1,
    batch: 512,
    micro: None,
    recompute: true,
    seconds: 0.0,
};

/// The layout of 22B parameters.
const OF_22B: Point = Point {
    name: "22B, 8 GPUs",
    layers: 48,
    width: 6144,
    heads: 64,
    tensor: 8,
    pipeline: 1,
    ranks: 8,
    batch: 4,
    micro: Some(4),
    ..WEAK
};

/// The layout of 175B parameters.
const OF_175B: Point = Point {
    name: "175B, 64 GPUs",
    layers: 96,
    width: 12288,
    heads: 96,
    tensor: 8,
    pipeline: 8,
    ranks: 64,
    batch: 64,
    micro: Some(1),
    ..WEAK
};

impl Point {
    /// Returns the step with the seconds that follow from its teraFLOP/s per GPU.
    fn with_rate(self, rate: f64) -> Self {
        let Self { layers, width, batch, ranks, .. } = self;
        let seconds = operations(layers, width, batch) / (rate * 1e12 * ranks as f64);
        Self { seconds, ..self }
    }
}

/// Returns the operations of a step as counted by Narayanan et al., "Efficient large-scale language
/// model training on GPU clusters using Megatron-LM", 2021, equation 3, with full recomputation.
fn operations(layers: usize, width: usize, batch: u64) -> f64 {
    let [l, h, b, s, v] = [layers as f64, width as f64, batch as f64, 2048.0, 51200.0];
    96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h))
}

/// Returns the steps of table 1 of that paper, which gives teraFLOP/s per GPU instead of seconds,
/// and of table 5 of Korthikanti et al., "Reducing activation recomputation in large transformer
/// models", 2022.
fn points() -> Vec<Point> {
    vec![
        Point { name: "1.7B, 32 GPUs", layers: 24, width: 2304, heads: 24, ranks: 32, ..WEAK }
            .with_rate(137.0),
        Point {
            name: "3.6B, 64 GPUs",
            layers: 30,
            width: 3072,
            heads: 32,
            tensor: 2,
            ranks: 64,
            ..WEAK
        }
        .with_rate(138.0),
        Point {
            name: "7.5B, 128 GPUs",
            layers: 36,
            width: 4096,
            heads: 32,
            tensor: 4,
            ranks: 128,
            ..WEAK
        }
        .with_rate(142.0),
        Point { recompute: true, seconds: 1.42, ..OF_22B },
        Point { recompute: false, seconds: 1.10, ..OF_22B },
        Point { recompute: true, seconds: 18.13, ..OF_175B },
        Point { recompute: false, seconds: 13.75, ..OF_175B },
    ]
}

/// Returns the predicted seconds of the step on the described nodes of 8 A100s.
fn predicted(point: &Point) -> f64 {
    let Point { layers, width, heads, tensor, pipeline, ranks, batch, micro, recompute, .. } =
        *point;
    let mut set = vec![
        format!("model.layers={layers}"),
        format!("model.width={width}"),
        format!("model.heads={heads}"),
        "model.context=2048".into(),
        "model.vocabulary=51200".into(),
        "model.dropout=0.1".into(),
        "precision.dtype=bf16".into(),
        format!("batch.global={batch}"),
        format!("parallel.tensor={tensor}"),
        format!("parallel.pipeline={pipeline}"),
        "parallel.zero=0".into(),
        "parallel.schedule=1f1b".into(),
        format!("parallel.recompute={recompute}"),
        format!("parallel.sequence={}", !recompute),
    ];
    set.extend(micro.map(|micro| format!("batch.micro={micro}")));
    let (config, _) = load(&Sources { overrides: &set, ..Sources::default() }).unwrap();
    let machine =
        Machine::parse(include_str!("machines/megatron-a100x8.toml"), "megatron-a100x8").unwrap();
    let facts = Environment { ranks, threads: 1, vocabulary: Some(51200), on_gpu: true };
    let held = BaselineMemory {
        messages: 0,
        messages_on_device: true,
        resident: 0,
        cache: 0,
        foreign_ranks: 0,
        replaced: 0,
    };
    let place =
        SearchLimits { room: machine.memory_budget(), held, per_node: machine.ranks_per_node };
    let choice = search_layouts(&config, &facts, &place, |_| Ok(machine)).unwrap();
    choice.proposals[0].time.step
}

#[test]
fn published_steps_are_within_a_quarter() {
    let mut far = Vec::new();
    for point in points() {
        let seconds = point.seconds;
        let here = predicted(&point);
        let off = 100.0 * (here / seconds - 1.0);
        let kind = if point.recompute { "recomputed" } else { "sequence parallel" };
        let line = format!(
            "{}, {kind}: {seconds:.2} s published, {here:.2} s here, {off:+.0} %",
            point.name
        );
        println!("{line}");
        far.extend((off.abs() > 25.0).then_some(line));
    }
    assert!(far.is_empty(), "{far:#?}");
}
