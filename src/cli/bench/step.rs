//! `hpctrain bench step`, `kernels` and `gemm`: benchmark training steps on CPUs, as a whole and by
//! kernel.
//!
//! All three run steps on random data. The rates of kernels are compared with the peak rate of the
//! machine, which is measured just before.

use clap::Args;
use serde::Serialize;

use crate::backend::cpu::{Cpu, MatmulBackend, Peak};
use crate::backend::{Backend as _, KernelStats, KernelTotals};
use crate::cli::json;
use crate::cli::train::SourceArgs;
use crate::comm::Comm;
use crate::config::{Compute, ResolvedConfig};
use crate::engine::SyntheticTrainer;
use crate::error::Result;
use crate::gpu_assignment::open_cpu;
use crate::telemetry::efficiency::{Efficiency, readable_rate};
use crate::telemetry::{grouped, say};
use crate::train::Energy;

/// Arguments of `hpctrain bench step`, `kernels` and `gemm`.
#[derive(Args)]
pub struct StepArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Number of samples per rank and step [default: the micro-batch of the configuration]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Number of timed steps, after two warm-up steps.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// Use oneDNN for matmuls, if it is installed.
    #[arg(long)]
    onednn: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// The workload of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Whole steps.
    Step,
    /// Every kernel, by shape.
    Kernels,
    /// GEMMs only.
    Gemm,
}

/// The fields common to all reports.
#[derive(Serialize)]
struct Machine {
    /// The name of the preset or file.
    network: String,
    ranks: usize,
    threads: usize,
    /// The number of samples per rank and step.
    samples: u64,
    /// The peak GFLOP/s of a rank's threads in the number format of the matmuls; none if it cannot
    /// be measured (AMX).
    peak_gflops: Option<f64>,
    /// The bandwidth of a STREAM triad in GB/s (10⁹ bytes).
    peak_bandwidth: f64,
}

/// The report of `bench step`.
#[derive(Serialize)]
struct Steps {
    #[serde(flatten)]
    machine: Machine,
    parameters: u64,
    /// The time of the median step.
    step_ms: f64,
    fastest_step_ms: f64,
    /// The unit of `per_second`: tokens or samples.
    predictions: &'static str,
    /// The throughput of all ranks, from the median step.
    per_second: f64,
    /// The GFLOP/s of a rank's matmuls and attention, from the median step.
    gflops: f64,
    of_peak: Option<f64>,
    /// The model TFLOP/s per rank, from the median step.
    tflops_per_rank: f64,
    /// The model FLOPs utilisation (MFU), from 0 to 1.
    mfu: Option<f64>,
    /// The energy per prediction in joules over the timed steps, if all nodes have energy counters.
    joules_per_prediction: Option<f64>,
}

/// The statistics of a kernel on one shape.
#[derive(Serialize)]
struct KernelRow {
    kernel: String,
    shape: Vec<usize>,
    calls_per_step: f64,
    /// The mean time of a call.
    microseconds: f64,
    /// The fastest time of a call, from which the rates are computed.
    fastest_microseconds: f64,
    /// The rate in GFLOP/s; none for kernels that only move memory.
    gflops: Option<f64>,
    of_peak_gflops: Option<f64>,
    /// The bandwidth in GB/s, as if every operand were moved once. A kernel whose operands are
    /// cached may exceed the peak of the memory.
    bandwidth: f64,
    of_peak_bandwidth: f64,
}

/// The report of `bench kernels` and `bench gemm`.
#[derive(Serialize)]
struct Kernels {
    #[serde(flatten)]
    machine: Machine,
    /// The kernels, sorted by descending total time.
    rows: Vec<KernelRow>,
}

/// The number of warm-up steps, which are not timed.
const WARMUP_STEPS: usize = 2;

/// Runs training steps and prints the report for `view`.
///
/// # Errors
/// Returns an error if the configuration is invalid, or the memory does not suffice.
pub fn table(comm: &Comm<Cpu>, args: &StepArgs, view: View) -> Result<()> {
    let world = comm.world();
    let (config, network) = world.all_ok(args.sources.load())?;
    let mut pace =
        SyntheticTrainer::new(comm, config, args.samples, |plan| open_backend(plan, args.onednn))?;
    // All ranks measure the peak at once, because they share memory and cores.
    world.barrier().wait()?;
    let peak = pace.backend().peak();
    let flops = pace.backend().measure_peak_flops();
    for _ in 0..WARMUP_STEPS {
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
            "{network}: {ranks} × {threads} threads, {samples} samples per rank and step, random data"
        ));
        let gflops = peak_gflops.map_or("unknown".into(), |peak| format!("{peak:.1} GFLOP/s"));
        say(format_args!("peak per rank: {gflops}, {peak_bandwidth:.1} GB/s"));
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

/// Opens the CPU backend of a plan, with matmuls by oneDNN if `onednn` is set.
fn open_backend(plan: &ResolvedConfig, onednn: bool) -> Result<Cpu> {
    match onednn {
        true => Cpu::new(plan.threads).with_matmul_backend(MatmulBackend::onednn(
            plan.config.precision.dtype == Compute::Bf16,
        )),
        false => open_cpu(plan),
    }
}

/// Runs one step and records every kernel.
fn profile_step(pace: &mut SyntheticTrainer<Cpu>) -> Result<()> {
    pace.backend().profile().record(true);
    pace.step()?;
    pace.backend().profile().record(false);
    Ok(())
}

fn steps(
    comm: &Comm<Cpu>,
    pace: &mut SyntheticTrainer<Cpu>,
    args: &StepArgs,
    machine: Machine,
    speaks: bool,
) -> Result<()> {
    profile_step(pace)?;
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
            say(format_args!("arithmetic  {gflops:.1} GFLOP/s per rank as executed{of_peak}"));
            say(format_args!(
                "model       {} per rank{mfu}",
                readable_rate(report.tflops_per_rank)
            ));
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
    args: &StepArgs,
    machine: Machine,
    peak: Peak,
    view: View,
    speaks: bool,
) -> Result<()> {
    for _ in 0..args.steps {
        profile_step(pace)?;
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

/// Returns the kernels of `view`, sorted by descending total time.
fn rows(tallies: &KernelTotals, steps: f64, peak: Peak, view: View) -> Vec<KernelRow> {
    let is_gemm = |kernel: &str| {
        ["matmul", "linear", "convolution"].iter().any(|one| kernel.starts_with(one))
    };
    let seen = tallies.iter().filter(|((kernel, _), _)| view == View::Kernels || is_gemm(kernel));
    let mut seen: Vec<_> = seen.collect();
    seen.sort_by(|(_, one), (_, other)| other.seconds.total_cmp(&one.seconds));
    seen.into_iter()
        .map(|((kernel, shape), tally)| kernel_row(kernel, shape, tally, steps, peak))
        .collect()
}

/// Returns the row of a kernel with the statistics `tally` over `steps` steps.
fn kernel_row(
    kernel: &str,
    shape: &[usize; 4],
    tally: &KernelStats,
    steps: f64,
    peak: Peak,
) -> KernelRow {
    let calls = tally.calls as f64;
    // The work of a mean launch divided by the time of the fastest launch.
    let rate = |amount: f64| amount / calls / tally.fastest;
    let flops = rate(tally.flops);
    let bandwidth = rate(tally.bytes);
    let computes = tally.flops > 0.0;
    KernelRow {
        kernel: kernel.to_string(),
        shape: shape.iter().copied().filter(|size| *size > 0).collect(),
        calls_per_step: calls / steps,
        microseconds: tally.seconds / calls * 1e6,
        fastest_microseconds: tally.fastest * 1e6,
        gflops: computes.then_some(flops / 1e9),
        of_peak_gflops: computes.then_some(flops / peak.flops).filter(|part| part.is_finite()),
        bandwidth: bandwidth / 1e9,
        of_peak_bandwidth: bandwidth / peak.bandwidth,
    }
}

fn line(row: &KernelRow) -> String {
    let KernelRow {
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
