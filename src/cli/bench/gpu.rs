//! `hpctrain bench gpu`: benchmarks the operations of a GPT on a GPU.

use clap::Args;
use serde::Serialize;

use crate::backend::cpu::Cpu;
use crate::backend::cuda::{Arithmetic, Cuda, Device, Precision, libraries};
use crate::backend::format_bytes;
use crate::bench::operations::{OpSizes, OpTiming, operations};
use crate::cli::json;
use crate::comm::Comm;
use crate::config::{Compute, Size};
use crate::error::{Error, Result};
use crate::telemetry::say;

/// Arguments of `hpctrain bench gpu`.
#[derive(Args)]
pub struct GpuArgs {
    /// Index of the GPU among those that this process sees.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    device: usize,
    /// Number format of parameters, activations and matmuls.
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = ["bf16", "tf32", "f32"])]
    compute: String,
    /// GPU memory to allocate [default: nine tenths of the free memory]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Number of batches of launches, of which medians are printed.
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u16).range(1..))]
    batches: u16,
    /// Use tiny sizes, to test that everything runs; the times are meaningless.
    #[arg(long)]
    small: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// One line of the table.
#[derive(Serialize)]
struct OpRow {
    operation: String,
    shape: String,
    /// The time of the median batch.
    microseconds: f64,
    /// The time of the fastest batch.
    fastest_microseconds: f64,
    bytes: f64,
    /// The memory bandwidth in GB/s (10⁹ bytes).
    bandwidth: f64,
    /// The bandwidth divided by that of a copy within the device.
    of_copy: f64,
    /// The rate in TFLOP/s; none for operations that only move memory.
    teraflops: Option<f64>,
}

/// The object of `--json`.
#[derive(Serialize)]
struct GpuReport {
    device: String,
    multiprocessors: usize,
    memory_bytes: usize,
    /// The CUDA version of the driver, as of NVRTC and cuBLASLt below.
    driver: String,
    nvrtc: String,
    cublaslt: String,
    compute: Compute,
    /// Whether the sizes are those of `--small`.
    small: bool,
    batches: u16,
    /// The bandwidth of a copy within the device in GB/s.
    copy_bandwidth: f64,
    rows: Vec<OpRow>,
}

/// Runs the benchmark and prints the table.
///
/// # Errors
/// Returns an error if there are several ranks, the GPU does not exist, a library is missing, or
/// the device fails.
pub fn table(comm: &Comm<Cpu>, args: &GpuArgs) -> Result<()> {
    if comm.size() > 1 {
        let error =
            Error::input(format!("bench gpu runs on one rank, but {} were started", comm.size()));
        return Err(error.hint("start it without mpirun: hpctrain bench gpu").shared());
    }
    let (compute, precision) = match args.compute.as_str() {
        "f32" => (Compute::F32, Precision::F32(Arithmetic::Full)),
        "tf32" => (Compute::Tf32, Precision::F32(Arithmetic::Tf32)),
        _ => (Compute::Bf16, Precision::Bf16),
    };
    let device = Device::open(args.device)?;
    let memory = match args.memory {
        Some(size) => size.0,
        None => device.free_memory()? / 10 * 9,
    };
    let cuda = Cuda::new(&device, memory, precision)?;
    let sizes = if args.small { OpSizes::small() } else { OpSizes::gpt2() };
    if !args.json {
        say(format_args!(
            "{}, {}, {} of it used\n",
            device.name,
            format_bytes(device.memory),
            format_bytes(memory)
        ));
        say(
            "operation                  shape                  time µs       GB/s  of copy   TFLOP/s",
        );
    }
    let mut rows = Vec::new();
    let mut copy = None;
    operations(&cuda, &sizes, usize::from(args.batches), &mut |timing| {
        let row = row(timing, *copy.get_or_insert(timing.bytes / timing.seconds));
        if !args.json {
            say(line(&row));
        }
        rows.push(row);
        Ok(())
    })?;
    if args.json {
        let report = GpuReport {
            multiprocessors: device.multiprocessors()?,
            memory_bytes: device.memory,
            driver: libraries::driver()?,
            nvrtc: libraries::nvrtc()?,
            cublaslt: libraries::cublaslt()?,
            device: device.name,
            compute,
            small: args.small,
            batches: args.batches,
            copy_bandwidth: copy.unwrap_or(0.0) / 1e9,
            rows,
        };
        json(&report)?;
    }
    Ok(())
}

fn row(timing: &OpTiming, copy: f64) -> OpRow {
    let bandwidth = timing.bytes / timing.seconds;
    OpRow {
        operation: timing.operation.clone(),
        shape: timing.shape.clone(),
        microseconds: timing.seconds * 1e6,
        fastest_microseconds: timing.fastest * 1e6,
        bytes: timing.bytes,
        bandwidth: bandwidth / 1e9,
        of_copy: bandwidth / copy,
        teraflops: (timing.flops > 0.0).then(|| timing.flops / timing.seconds / 1e12),
    }
}

fn line(row: &OpRow) -> String {
    let OpRow { operation, shape, microseconds, bandwidth, of_copy, teraflops, .. } = row;
    let teraflops =
        teraflops.map_or_else(|| format!("{:>10}", "–"), |rate| format!("{rate:>10.1}"));
    format!(
        "{operation:<26} {shape:<20} {microseconds:>9.1} {bandwidth:>10.1} {of_copy:>8.2}{teraflops}"
    )
}
