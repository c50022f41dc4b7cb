//! Rates of a machine: from a description file, or roughly estimated for this machine.

use std::path::Path;

use serde::Deserialize;

use super::cost_model::{BlockTimes, GroupExtent, Rates};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Cut;
use hpctrain_comm::Operation;
use hpctrain_config::{Compute, ResolvedConfig, Size};
use hpctrain_cpu::Cpu;
use hpctrain_engine::memory::MemoryBudget;
use hpctrain_nn::{Blocks, Network};

/// The machine descriptions that are built in.
const BUILT_IN: [(&str, &str); 8] = [
    ("a100x8", include_str!("machines/a100x8.toml")),
    ("h100x8", DGX_H100),
    ("h200x8", HGX_H200),
    ("dgx-h100", DGX_H100),
    ("hgx-h200", HGX_H200),
    ("h100x4-ndr200", include_str!("machines/h100x4-ndr200.toml")),
    ("h100x8-ndr1", include_str!("machines/h100x8-ndr1.toml")),
    ("perlmutter", include_str!("machines/perlmutter.toml")),
];

/// The description of a DGX H100, and of other nodes of eight H100s with an adapter for each.
const DGX_H100: &str = include_str!("machines/dgx-h100.toml");

/// The description of a node with an HGX H200 board and an adapter for each GPU.
const HGX_H200: &str = include_str!("machines/hgx-h200.toml");

/// Fraction of the peak rate that matmuls of usual sizes reach on a CPU.
const CPU_EFFICIENCY: f64 = 0.75;

/// Number of kernels in a transformer block's forward on a GPU. Its backward has twice as many.
const FORWARD_KERNELS: f64 = 12.0;

/// Bytes that an update moves per element: gradient, master weight and two moments, read and
/// written.
const UPDATE_BYTES: f64 = 32.0;

/// The description of a machine.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The name of the machine, for display.
    pub name: String,
    /// Where the numbers come from.
    pub source: String,
    /// Whether ranks compute on GPUs.
    pub gpu: bool,
    /// Ranks on each node.
    pub ranks_per_node: usize,
    /// Memory that a rank may use: of its GPU, or of the host if there is none.
    pub memory: Size,
    /// Host memory of a node.
    pub host_memory: Size,
    /// Matmul rates, in operations per second.
    flops: Flops,
    /// Bytes per second between a rank and its memory.
    bandwidth: f64,
    /// Minimum seconds of a kernel.
    #[serde(default)]
    launch: f64,
    /// The link between ranks of a node.
    node: Link,
    /// The link between ranks of different nodes.
    network: Link,
    /// The fraction of a collective's time that overlaps with computation.
    overlap: f64,
    /// Bytes per element in all-reduces of tensor parallelism.
    #[serde(default = "four")]
    sum_bytes: usize,
    /// Bytes that the forward of attention moves per score; 0 if scores stay on the chip.
    #[serde(default)]
    score_bytes: f64,
}

fn four() -> usize {
    4
}

/// Operations per second by number format.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Flops {
    bf16: f64,
    f32: f64,
    /// Default: as f32.
    tf32: Option<f64>,
}

/// The link of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    /// Seconds of the smallest message.
    latency: f64,
    /// Bytes per second in each direction, while all other ranks send as well.
    bandwidth: f64,
}

impl Machine {
    /// Returns a built-in description by name, or reads one from a file by its path.
    ///
    /// # Errors
    /// Returns an error if there is neither, or if the file is malformed.
    pub fn named(name: &str) -> Result<Self> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return Self::parse(text, name);
        }
        let path = Path::new(name);
        let text = std::fs::read_to_string(path).map_err(|e| {
            let names = BUILT_IN.map(|(name, _)| name).join(", ");
            Error::io("read the machine", path, e)
                .hint(format!("a file such as machine.toml, or one of {names}"))
        })?;
        Self::parse(&text, name)
    }

    /// Parses a description. `origin` names it in errors.
    ///
    /// # Errors
    /// Returns an error if the description is malformed.
    pub(super) fn parse(text: &str, origin: &str) -> Result<Self> {
        let machine: Self = toml::from_str(text).map_err(|e| {
            let line = e
                .span()
                .map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            let message = e.message().lines().next().unwrap_or_default();
            Error::input(format!("{origin}:{line}: {message}"))
                .hint("docs/parallelism.md lists the keys of a machine")
        })?;
        machine.check(origin)?;
        Ok(machine)
    }

    /// Estimates this machine from one process, for `ranks` ranks of `threads` threads on each
    /// node, each of which may use `memory` bytes: the peak rates of its cores and memory are
    /// measured, the network is a guess.
    pub fn estimate_local(ranks: usize, threads: usize, memory: usize) -> Self {
        let peak = Cpu::new(threads).peak();
        let bandwidth = peak.bandwidth / ranks as f64;
        let flops = CPU_EFFICIENCY * peak.flops;
        Self {
            name: format!("this machine, {ranks} × {threads} threads"),
            source: "peak rates of its cores and memory; a network of 100 Gbit/s is assumed".into(),
            gpu: false,
            ranks_per_node: ranks,
            memory: Size(memory),
            host_memory: Size(memory.saturating_mul(ranks)),
            flops: Flops { bf16: flops, f32: flops, tf32: None },
            bandwidth,
            launch: 0.0,
            // A message is written once and read once.
            node: Link { latency: 1e-5, bandwidth: bandwidth / 3.0 },
            network: Link { latency: 2e-5, bandwidth: 12.5e9 / ranks as f64 },
            overlap: 0.0,
            sum_bytes: 4,
            score_bytes: 0.0,
        }
    }

    /// Returns the memory that a rank may use.
    pub fn memory_budget(&self) -> MemoryBudget {
        let host = self.host_memory.0 / self.ranks_per_node;
        match self.gpu {
            true => MemoryBudget { host, gpu: self.memory.0 },
            false => MemoryBudget { host: self.memory.0.min(host), gpu: usize::MAX },
        }
    }

    fn check(&self, origin: &str) -> Result<()> {
        let Self { flops, bandwidth, launch, node, network, overlap, .. } = self;
        let positive = [
            ("flops.bf16", flops.bf16),
            ("flops.f32", flops.f32),
            ("flops.tf32", flops.tf32.unwrap_or(1.0)),
            ("bandwidth", *bandwidth),
            ("node.bandwidth", node.bandwidth),
            ("network.bandwidth", network.bandwidth),
            ("ranks_per_node", self.ranks_per_node as f64),
        ];
        let from_zero = [
            ("launch", *launch),
            ("node.latency", node.latency),
            ("network.latency", network.latency),
            ("score_bytes", self.score_bytes),
        ];
        let wrong = |key: &str, value: f64, range: &str| {
            Err(Error::input(format!("{origin}: {key} = {value}"))
                .hint(format!("it must be {range}")))
        };
        if let Some((key, value)) =
            positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            return wrong(key, value, "more than 0");
        }
        if let Some((key, value)) =
            from_zero.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0))
        {
            return wrong(key, value, "at least 0");
        }
        if !(0.0..=1.0).contains(overlap) {
            return wrong("overlap", *overlap, "from 0 to 1");
        }
        Ok(())
    }

    fn flops(&self, plan: &ResolvedConfig) -> f64 {
        match plan.config.precision.dtype {
            Compute::Bf16 => self.flops.bf16,
            Compute::Tf32 => self.flops.tf32.unwrap_or(self.flops.f32),
            Compute::Auto | Compute::F32 => self.flops.f32,
        }
    }

    /// Returns the seconds of moving a buffer `times` times over the links of a group: inside nodes
    /// first, then between ranks of different nodes, each with its part of the buffer (Thakur et
    /// al., "Optimization of collective communication operations in MPICH", 2005).
    fn moved(&self, span: GroupExtent, bytes: usize, times: f64) -> f64 {
        let inside = span.ranks.div_ceil(span.nodes);
        let part = |ranks: usize| (ranks - 1) as f64 / ranks as f64;
        let hops = |ranks: usize| (ranks as f64).log2().ceil();
        let bytes = bytes as f64;
        let node = part(inside) * bytes / self.node.bandwidth + hops(inside) * self.node.latency;
        let between = part(span.nodes) * bytes / inside as f64 / self.network.bandwidth
            + hops(span.nodes) * self.network.latency;
        times * (node + between)
    }

    /// Returns the seconds of block `unit` of `blocks` for a micro-batch of a plan. The block's
    /// forward takes `flops` operations per sample.
    fn block_times(
        &self,
        plan: &ResolvedConfig,
        blocks: &Blocks<Cpu>,
        unit: usize,
        flops: u64,
    ) -> BlockTimes {
        let size = plan.config.precision.dtype.size(!self.gpu);
        let samples = plan.micro as f64;
        let rows = plan.micro as usize * plan.network.context();
        let share = 1.0 / plan.mesh.tensor as f64;
        let tensor = GroupExtent {
            ranks: plan.mesh.tensor,
            nodes: plan.mesh.tensor.div_ceil(self.ranks_per_node),
        };
        let last = blocks.len() - 1;
        // The width of the residual stream is the input width of a language model's head.
        let width = blocks[last].input_per_row();
        let block = &blocks[unit];
        let tensors = block.tensors();
        let parameters = share * tensors.iter().map(|tensor| tensor.len() as f64).sum::<f64>();
        let matmuls = share * samples * flops as f64 / self.flops(plan);
        // Each element, saved or temporary, is written once and read by the next kernel.
        let saved = (block.saved_elems_per_row() + block.input_per_row()) as f64;
        let scores = if unit == 0 || unit == last { 0.0 } else { self.score_traffic(plan) };
        let forward =
            2.0 * (saved + block.forward_scratch_per_row() as f64) * rows as f64 * size as f64
                + scores;
        let backward = 2.0 * (saved + block.scratch_per_row() as f64) * rows as f64 * size as f64
            + 2.0 * scores;
        // Weights are read, and f32 gradients are accumulated; small matmuls are bound by that.
        let weights = parameters * size as f64 / self.bandwidth;
        let gradients = 8.0 * parameters / self.bandwidth;
        let launches = if unit == 0 || unit == last { 3.0 } else { FORWARD_KERNELS };
        // Row-parallel linear layers need one all-reduce in each direction, a vocabulary-parallel
        // embedding one in the forward, and the head one in the backward.
        let all_reduces = tensors
            .iter()
            .filter(|tensor| tensor.cut == Some(Cut::Columns) && tensor.shape.len() > 1)
            .count();
        let (in_forward, in_backward) = match unit {
            _ if tensor.ranks == 1 => (0, 0),
            0 => (1, 0),
            unit if unit == last => (0, 1),
            _ => (all_reduces, all_reduces),
        };
        let all_reduce = self.moved(tensor, rows * width * self.sum_bytes, 2.0);
        BlockTimes {
            forward: matmuls.max(weights)
                + forward / self.bandwidth
                + launches * self.launch
                + in_forward as f64 * all_reduce,
            backward: 2.0 * matmuls.max(weights)
                + gradients
                + backward / self.bandwidth
                + 2.0 * launches * self.launch
                + in_backward as f64 * all_reduce,
            weights: matmuls + gradients,
        }
    }

    /// Returns the bytes of attention scores that a transformer block's forward moves on a rank
    /// for a micro-batch.
    fn score_traffic(&self, plan: &ResolvedConfig) -> f64 {
        let heads = match &plan.network {
            Network::Gpt(gpt) => gpt.heads,
            Network::Llama(llama) => llama.heads,
            Network::Layers(_) | Network::Custom(_) => 0,
        };
        let share = 1.0 / plan.mesh.tensor as f64;
        share
            * plan.micro as f64
            * heads as f64
            * (plan.network.context() as f64).powi(2)
            * self.score_bytes
    }
}

impl Rates for Machine {
    fn passes(&self, plan: &ResolvedConfig) -> Result<Vec<BlockTimes>> {
        let blocks = plan.network.cpu_blocks(&plan.tensor_shards(0));
        let work = plan.network.blocks_summary();
        Ok((0..blocks.len())
            .map(|unit| self.block_times(plan, &blocks, unit, work[unit].flops))
            .collect())
    }

    fn micro(&self, plan: &ResolvedConfig) -> Result<f64> {
        // Logits are read twice, and their gradient is written.
        let size = plan.config.precision.dtype.size(!self.gpu);
        let logits = plan.network.outputs().div_ceil(plan.mesh.tensor)
            * plan.micro as usize
            * plan.network.context();
        Ok((3 * logits * size) as f64 / self.bandwidth + 2.0 * self.launch)
    }

    fn collective(&self, operation: Operation, span: GroupExtent, bytes: usize) -> f64 {
        let times = if operation == Operation::AllReduce { 2.0 } else { 1.0 };
        self.moved(span, bytes, times)
    }

    fn message(&self, span: GroupExtent, bytes: usize) -> f64 {
        let link = if span.nodes > 1 { self.network } else { self.node };
        link.latency + bytes as f64 / link.bandwidth
    }

    fn update(&self, _: &ResolvedConfig, elements: usize) -> f64 {
        UPDATE_BYTES * elements as f64 / self.bandwidth + 2.0 * self.launch
    }

    fn overlap(&self) -> f64 {
        self.overlap
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    /// Figures of a machine's data sheets.
    struct DataSheet {
        name: &'static str,
        ranks: usize,
        /// GB of a GPU.
        memory: usize,
        /// Operations per second in bf16.
        peak: f64,
        /// Bytes per second of a rank inside a node, and between nodes.
        links: [f64; 2],
    }

    const A100: DataSheet =
        DataSheet { name: "a100x8", ranks: 8, memory: 80, peak: 312e12, links: [300e9, 25e9] };
    const H100: DataSheet =
        DataSheet { name: "dgx-h100", ranks: 8, memory: 80, peak: 989e12, links: [450e9, 50e9] };
    const H200: DataSheet = DataSheet { name: "hgx-h200", memory: 141, ..H100 };

    /// The data sheets in the order of [`BUILT_IN`].
    const DATA_SHEETS: [DataSheet; BUILT_IN.len()] = [
        A100,
        DataSheet { name: "h100x8", ..H100 },
        DataSheet { name: "h200x8", ..H200 },
        H100,
        H200,
        DataSheet { name: "h100x4-ndr200", ranks: 4, links: [450e9, 25e9], ..H100 },
        DataSheet { name: "h100x8-ndr1", links: [450e9, 50e9 / 8.0], ..H100 },
        DataSheet { name: "perlmutter", ranks: 4, memory: 40, ..A100 },
    ];

    #[test]
    fn built_in_machines_stay_below_their_data_sheets() {
        assert_eq!(BUILT_IN.map(|(name, _)| name), DATA_SHEETS.map(|sheet| sheet.name));
        for DataSheet { name, ranks, memory, peak, links } in DATA_SHEETS {
            let machine = Machine::named(name).unwrap();
            let Machine { node, network, flops, .. } = &machine;
            assert!(machine.gpu && !machine.name.is_empty() && !machine.source.is_empty());
            assert_eq!(machine.ranks_per_node, ranks, "{name}");
            assert!((memory * GIB * 4 / 5..memory * GIB).contains(&machine.memory.0), "{name}");
            assert!(machine.host_memory.0 >= ranks * machine.memory.0, "{name}");
            // Programs reach two thirds of a link or more.
            let parts = [node.bandwidth / links[0], network.bandwidth / links[1]];
            assert!(parts.iter().all(|part| (0.66..1.0).contains(part)), "{name}: {parts:?}");
            assert!(node.latency < network.latency, "{name}");
            assert!(node.bandwidth < machine.bandwidth, "{name}");
            assert!((0.5 * peak..peak).contains(&flops.bf16), "{name}: {}", flops.bf16);
            assert!(flops.tf32.unwrap() < flops.bf16 && flops.f32 < flops.tf32.unwrap(), "{name}");
        }
    }

    #[test]
    fn each_rate_of_a_built_in_machine_has_its_source() {
        for (name, text) in BUILT_IN {
            let lines: Vec<&str> = text.lines().collect();
            for key in ["flops", "bandwidth", "launch", "node", "network", "overlap"] {
                let at = lines.iter().position(|line| line.starts_with(&format!("{key} =")));
                let at = at.unwrap_or_else(|| panic!("{name} has no {key}"));
                assert!(lines[at - 1].starts_with('#'), "{name}: {key} without a comment");
            }
        }
    }

    #[test]
    fn an_unknown_machine_lists_the_names() {
        let error = Machine::named("dgx-h1000").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(error.contains("dgx-h1000") && error.contains("hint: "), "{error}");
        for (name, _) in BUILT_IN {
            assert!(error.contains(name), "{name} is missing in {error}");
        }
    }
}
