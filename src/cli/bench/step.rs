//! `hpctrain bench step`, `kernels` and `gemm`: the speed of training on CPUs, in whole and by
//! kernel.
//!
//! All three take steps on random data. The rates of kernels are compared with the machine's peak,
//! measured right before.

use clap::Args;
use serde::Serialize;

use crate::backend::cpu::{Cpu, Peak, Products};
use crate::backend::{Backend as _, Tallies};
use crate::cli::json;
use crate::cli::train::SourceArgs;
use crate::comm::Comm;
use crate::config::{Compute, ResolvedConfig};
use crate::engine::SyntheticTrainer;
use crate::error::Result;
use crate::gpu_assignment::cpu;
use crate::telemetry::efficiency::{Efficiency, readable_rate};
use crate::telemetry::{grouped, say};
use crate::train::Energy;

/// Arguments of the three.
#[derive(Args)]
pub struct PaceArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Samples a rank and step; left out, the micro-batch of the configuration.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Steps that are timed, after two that are not.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// Let oneDNN multiply matrices, if it is there.
    #[arg(long)]
    onednn: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// The part of the work that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Whole steps.
    Step,
    /// Every kernel, by shape.
    Kernels,
    /// Products of matrices only.
    Gemm,
}

/// The common head of all reports.
#[derive(Serialize)]
struct Machine {
    /// Preset or file.
    network: String,
    ranks: usize,
    threads: usize,
    /// Samples a rank and step.
    samples: u64,
    /// Peak GFLOP/s of a rank's threads in the number format of the matmuls; none where it cannot
    /// be measured (AMX).
    peak_gflops: Option<f64>,
    /// GB/s of a triad, of 10⁹ bytes.
    peak_bandwidth: f64,
}

/// Whole steps.
#[derive(Serialize)]
struct Steps {
    #[serde(flatten)]
    machine: Machine,
    parameters: u64,
    /// Median and fastest.
    step_ms: f64,
    fastest_step_ms: f64,
    /// The predictions counted: tokens or samples.
    predictions: &'static str,
    /// Of all ranks, by the median.
    per_second: f64,
    /// Of a rank's products and attention, by the median.
    gflops: f64,
    of_peak: Option<f64>,
    /// Model TFLOP/s per rank, by the median.
    tflops_per_rank: f64,
    /// Model FLOPs utilisation, from 0 to 1.
    mfu: Option<f64>,
    /// Joules per prediction over the timed steps, where all nodes have energy counters.
    joules_per_prediction: Option<f64>,
}

/// A kernel on one shape.
#[derive(Serialize)]
struct Row {
    kernel: String,
    shape: Vec<usize>,
    calls_per_step: f64,
    /// Mean, and the fastest; the rates are the fastest's.
    microseconds: f64,
    fastest_microseconds: f64,
    /// None for kernels that only move memory.
    gflops: Option<f64>,
    of_peak_gflops: Option<f64>,
    /// GB/s, as if every operand were moved once. A kernel that finds one in a cache may exceed the
    /// memory's peak.
    bandwidth: f64,
    of_peak_bandwidth: f64,
}

/// Kernels by shape.
#[derive(Serialize)]
struct Kernels {
    #[serde(flatten)]
    machine: Machine,
    /// The kernel that takes the most time comes first.
    rows: Vec<Row>,
}

/// Steps that are not timed: memory is new, threads are cold.
const WARM_UP: usize = 2;

/// Trains and prints the report for `view`.
///
/// # Errors
/// The configuration cannot be, or the memory does not suffice.
pub fn table(comm: &Comm<Cpu>, args: &PaceArgs, view: View) -> Result<()> {
    let world = comm.world();
    let (config, network) = world.all_ok(args.sources.load())?;
    let backend = |plan: &ResolvedConfig| match args.onednn {
        true => Cpu::new(plan.threads)
            .with_products(Products::onednn(plan.config.precision.dtype == Compute::Bf16)),
        false => cpu(plan),
    };
    let mut pace = SyntheticTrainer::new(comm, config, args.samples, backend)?;
    // All ranks at once: they share memory and cores.
    world.barrier().wait()?;
    let peak = pace.backend().peak();
    let flops = pace.backend().measure_peak_flops();
    for _ in 0..WARM_UP {
        pace.step()?;
    }
    let speaks = comm.rank() == 0;
    let machine = Machine {
        network,
        ranks: comm.size(),
        threads: pace.backend().threads(),
        samples: pace.plan.micro,
        peak_gflops: flops.map(|flops| flops / 1e9),
        peak_bandwidth: peak.bandwidth / 1e9,
    };
    if speaks && !args.json {
        let Machine { network, ranks, threads, samples, peak_gflops, peak_bandwidth } = &machine;
        say(format_args!(
            "{network}: {ranks} × {threads} threads, {samples} samples a rank and step, on random data"
        ));
        let gflops = peak_gflops.map_or("unknown".into(), |peak| format!("{peak:.1} GFLOP/s"));
        say(format_args!("peak of a rank: {gflops}, {peak_bandwidth:.1} GB/s"));
    }
    if speaks && let Some(flops) = flops {
        let file = pace.backend().record_peak_flops(flops)?;
        if !args.json {
            say(format_args!(
                "recorded for the MFU of runs on this kind of CPU: {}\n",
                file.display()
            ));
        }
    }
    if view == View::Step {
        steps(comm, &mut pace, args, machine, speaks)
    } else {
        let peak = Peak { flops: flops.unwrap_or(f64::NAN), ..peak };
        kernels(&mut pace, args, machine, peak, view, speaks)
    }
}

/// One step of which every kernel is counted.
fn profiled(pace: &mut SyntheticTrainer<Cpu>) -> Result<()> {
    pace.backend().profile().record(true);
    pace.step()?;
    pace.backend().profile().record(false);
    Ok(())
}

fn steps(
    comm: &Comm<Cpu>,
    pace: &mut SyntheticTrainer<Cpu>,
    args: &PaceArgs,
    machine: Machine,
    speaks: bool,
) -> Result<()> {
    profiled(pace)?;
    let flops: f64 = pace.backend().profile().take().values().map(|tally| tally.flops).sum();
    let world = comm.world();
    let efficiency =
        Efficiency::gather(&world, &pace.plan.network, machine.peak_gflops.map(|peak| peak * 1e9))?;
    let energy = Energy::open(&world, &comm.node().host, None)?;
    let mut seconds = (0..args.steps).map(|_| pace.step()).collect::<Result<Vec<_>>>()?;
    let joules = energy.joules()?;
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let fastest = seconds[0];
    let gflops = flops / median / 1e9;
    let per_second = pace.plan.tokens_per_step() as f64 / median;
    let predictions = (u64::from(args.steps) * pace.plan.tokens_per_step()) as f64;
    let report = Steps {
        parameters: pace.parameters(),
        step_ms: median * 1e3,
        fastest_step_ms: fastest * 1e3,
        predictions: pace.plan.network.predictions(),
        per_second,
        gflops,
        of_peak: machine.peak_gflops.map(|peak| gflops / peak),
        tflops_per_rank: efficiency.tflops_per_rank(per_second),
        mfu: efficiency.mfu(per_second),
        joules_per_prediction: joules.map(|joules| joules / predictions),
        machine,
    };
    match (speaks, args.json) {
        (false, _) => Ok(()),
        (true, true) => json(&report),
        (true, false) => {
            let Steps {
                parameters, step_ms, fastest_step_ms, predictions, per_second, gflops, ..
            } = report;
            let percent = |part: Option<f64>, of: &str| {
                part.map_or(String::new(), |part| format!(", {:.1} % {of}", 100.0 * part))
            };
            say(format_args!("{} parameters", grouped(parameters)));
            say(format_args!(
                "step        {step_ms:.2} ms, the fastest of {} {fastest_step_ms:.2} ms",
                args.steps
            ));
            say(format_args!("throughput  {} {predictions}/s", grouped(per_second as u64)));
            let of_peak = percent(report.of_peak, "of the peak");
            let mfu = percent(report.mfu, "MFU");
            say(format_args!("arithmetic  {gflops:.1} GFLOP/s a rank as executed{of_peak}"));
            say(format_args!("model       {} a rank{mfu}", readable_rate(report.tflops_per_rank)));
            if let Some(joules) = report.joules_per_prediction {
                say(format_args!(
                    "energy      {joules:.2e} J/{}",
                    predictions.trim_end_matches('s')
                ));
            }
            Ok(())
        }
    }
}

fn kernels(
    pace: &mut SyntheticTrainer<Cpu>,
    args: &PaceArgs,
    machine: Machine,
    peak: Peak,
    view: View,
    speaks: bool,
) -> Result<()> {
    for _ in 0..args.steps {
        profiled(pace)?;
    }
    let report = Kernels {
        machine,
        rows: rows(&pace.backend().profile().take(), f64::from(args.steps), peak, view),
    };
    match (speaks, args.json) {
        (false, _) => {}
        (true, true) => json(&report)?,
        (true, false) => {
            say(
                "kernel                             shape                   calls    mean µs  fastest µs   GFLOP/s of peak      GB/s of peak",
            );
            report.rows.iter().for_each(|row| say(line(row)));
        }
    }
    Ok(())
}

/// Kernels by their time in a step.
fn rows(tallies: &Tallies, steps: f64, peak: Peak, view: View) -> Vec<Row> {
    let is_product = |kernel: &str| {
        ["product", "linear", "convolution"].iter().any(|one| kernel.starts_with(one))
    };
    let seen =
        tallies.iter().filter(|((kernel, _), _)| view == View::Kernels || is_product(kernel));
    let mut seen: Vec<_> = seen.collect();
    seen.sort_by(|(_, one), (_, other)| other.seconds.total_cmp(&one.seconds));
    let row =
        |((kernel, shape), tally): (&(&'static str, [usize; 4]), &crate::backend::KernelStats)| {
            let calls = tally.calls as f64;
            // The work of one launch, by the time of the fastest launch.
            let rate = |amount: f64| amount / calls / tally.fastest;
            let flops = rate(tally.flops);
            let bandwidth = rate(tally.bytes);
            let computes = tally.flops > 0.0;
            Row {
                kernel: kernel.to_string(),
                shape: shape.iter().copied().filter(|size| *size > 0).collect(),
                calls_per_step: calls / steps,
                microseconds: tally.seconds / calls * 1e6,
                fastest_microseconds: tally.fastest * 1e6,
                gflops: computes.then_some(flops / 1e9),
                of_peak_gflops: computes
                    .then_some(flops / peak.flops)
                    .filter(|part| part.is_finite()),
                bandwidth: bandwidth / 1e9,
                of_peak_bandwidth: bandwidth / peak.bandwidth,
            }
        };
    seen.into_iter().map(row).collect()
}

fn line(row: &Row) -> String {
    let Row {
        kernel,
        shape,
        calls_per_step,
        microseconds,
        fastest_microseconds,
        bandwidth,
        of_peak_bandwidth,
        ..
    } = row;
    let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
    let shape = shape.join("×");
    let flops = match (row.gflops, row.of_peak_gflops) {
        (Some(rate), Some(of)) => format!("{rate:>9.1} {of:>7.2}"),
        (Some(rate), None) => format!("{rate:>9.1} {:>7}", "–"),
        _ => format!("{:>9} {:>7}", "–", "–"),
    };
    format!(
        "{kernel:<34} {shape:<20} {calls_per_step:>8} {microseconds:>10.1} {fastest_microseconds:>11.1} {flops} {bandwidth:>9.1} {of_peak_bandwidth:>7.2}"
    )
}
