//! Checks of the driver, GPUs, NVRTC, cuBLASLt and NCCL: that they exist, are recent enough, and
//! compute correctly.

use std::fs;
use std::path::Path;

use super::Finding;
use super::probe::ProbeReporter;
use crate::backend::cuda::nvrtc::{self, Variant};
use crate::backend::cuda::{Arithmetic, Cuda, Device, Precision, devices, libraries, nccl};
use crate::backend::{Backend, ElementwiseOps, Gemm, LinearOps, MemoryKind};
use crate::energy::{Counters, EnergySource};
use crate::error::{Error, Result};
use crate::telemetry::bytes;

/// The bytes of GPU memory that checks allocate: the workspace of GEMMs and their operands.
const POOL: usize = 64 << 20;

/// If less than this fraction of a GPU's memory is free, another program is using it.
const MOSTLY_FREE: f64 = 0.5;

/// The PCI vendor id of NVIDIA, and the prefix of the class of display controllers.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

/// Returns the PCI addresses of NVIDIA GPUs, whether or not they have a driver.
pub(super) fn on_bus() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/bus/pci/devices") else { return Vec::new() };
    let gpus = entries.flatten().filter(|entry| is_gpu(&entry.path()));
    gpus.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns true if the PCI device in this directory is an NVIDIA GPU.
fn is_gpu(path: &Path) -> bool {
    let starts = |file: &str, with: &str| {
        fs::read_to_string(path.join(file)).is_ok_and(|id| id.starts_with(with))
    };
    starts("vendor", NVIDIA) && starts("class", DISPLAY)
}

/// Checks driver and libraries, and every `every`th GPU from number `first` (modulo their number)
/// on.
pub(super) fn probe(reporter: &ProbeReporter, first: usize, every: usize) {
    if !libraries::driver_is_there() {
        reporter.attempt("gpu driver", no_driver);
        toolkit(reporter, Finding::at_most_a_warning);
        return;
    }
    let mut count = 0;
    let works = reporter.attempt("gpu driver", || {
        let found = libraries::driver().and_then(|version| {
            count = devices()?;
            Ok(format!("CUDA {version}, {} here, {}", gpus(count), library_path("libcuda.so")))
        });
        found.into()
    });
    // Missing libraries are a failure only if there is a GPU.
    if !works || count == 0 {
        toolkit(reporter, Finding::at_most_a_warning);
        return;
    }
    let computes = toolkit(reporter, std::convert::identity);
    (first % count..count)
        .step_by(every.max(1))
        .for_each(|number| check_gpu(reporter, number, computes));
}

fn gpus(count: usize) -> String {
    format!("{count} GPU{}", if count == 1 { "" } else { "s" })
}

fn no_driver() -> Finding {
    let found = "no CUDA driver: CPU only";
    match on_bus().first() {
        Some(pci) => Finding::warning(
            format!("{found}, although there is an NVIDIA GPU at {pci}"),
            "install NVIDIA's driver (525 or later); in a container pass it in with --gpus all (Docker) or --nv (Apptainer)",
        ),
        None => Finding::warning(
            found,
            "to train on GPUs, start on a node that has some; training on CPUs needs nothing more",
        ),
    }
}

/// Checks the libraries that compile kernels and multiply matrices; `weigh` adjusts the status of
/// findings. Returns true if both work.
fn toolkit(reporter: &ProbeReporter, weigh: fn(Finding) -> Finding) -> bool {
    let finding = |version: Result<String>, file: &str| -> Finding {
        version.map(|version| format!("{version}, {}", library_path(file))).into()
    };
    let compiles = reporter.attempt("nvrtc", || weigh(finding(libraries::nvrtc(), "libnvrtc.so")));
    let multiplies =
        reporter.attempt("cublaslt", || weigh(finding(libraries::cublaslt(), "libcublasLt.so")));
    // NCCL is optional.
    reporter.attempt("nccl", || finding(nccl::version(), "libnccl.so").at_most_a_warning());
    compiles && multiplies
}

/// Returns the path from which a library of this process was loaded.
fn library_path(file: &str) -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    mapped_path(&maps, file).unwrap_or("found by the system's loader").to_owned()
}

/// Returns the path of the mapped file whose name starts with `file`.
fn mapped_path<'a>(maps: &'a str, file: &str) -> Option<&'a str> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut named =
        paths.filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(file)));
    named.next()
}

/// Checks a GPU, and computes on it if the libraries work.
fn check_gpu(reporter: &ProbeReporter, number: usize, computes: bool) {
    let name = format!("gpu {number}");
    let mut opened = None;
    reporter.attempt(&name, || {
        match Device::open(number).and_then(|device| Ok((describe(&device)?, device))) {
            Ok((finding, device)) => {
                opened = Some(device);
                finding
            }
            Err(error) => Err(error).into(),
        }
    });
    if let Some(device) = &opened {
        reporter.attempt(&format!("{name} energy"), || energy(device));
    }
    if let Some(device) = opened.filter(|_| computes) {
        reporter.attempt(&format!("{name} kernel"), || kernel(&device).into());
        reporter.attempt(&format!("{name} matmul"), || matmul(&device).into());
    }
}

fn describe(device: &Device) -> Result<Finding> {
    device.check_capability()?;
    let (free, (major, minor)) = (device.free_memory()?, device.capability);
    let found = format!(
        "{}, {}, {} of {} free, compute capability {major}.{minor}",
        device.name,
        device.pci,
        bytes(free),
        bytes(device.memory)
    );
    Ok(if (free as f64) < MOSTLY_FREE * device.memory as f64 {
        Finding::warning(found, "nvidia-smi shows which processes use the rest of its memory")
    } else {
        Finding::ok(found)
    })
}

/// Checks whether runs can record the energy of a GPU.
fn energy(device: &Device) -> Finding {
    match Counters::open(std::slice::from_ref(&device.id)).has(EnergySource::Gpu) {
        Ok(()) => Finding::ok("NVML measures its energy: runs record joules per token"),
        Err(why) => Finding::ok(format!("runs do not record the energy of GPUs: {why}")),
    }
}

/// Opens the device for a check.
fn open(device: &Device) -> Result<Cuda> {
    Cuda::new(device, POOL, Precision::F32(Arithmetic::Full))
}

/// Compiles a kernel, even if it is cached, and runs it.
fn kernel(device: &Device) -> Result<String> {
    let architecture = device.architecture();
    let size =
        nvrtc::compile(Variant { source: "add.cu", narrow: false, head: None }, &architecture)?
            .len();

    let cuda = open(device)?;
    // The number of elements is not a multiple of the block size.
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let mut sum = cuda.upload(MemoryKind::Activations, &vec![0.5; x.len()])?;
    cuda.add(Cuda::all(&cuda.upload(MemoryKind::Activations, &x)?), Cuda::all_mut(&mut sum))?;
    let mut got = vec![0.0; x.len()];
    cuda.download(Cuda::all(&sum), &mut got)?;
    match x.iter().zip(&got).find(|&(x, got)| x + 0.5 != *got) {
        Some((x, got)) => Err(wrong(format!("{x} + 0.5 = {got}"))),
        None => Ok(format!("compiled for {architecture} ({}), adds correctly", bytes(size))),
    }
}

/// Multiplies two matrices and compares the result with that of the host.
fn matmul(device: &Device) -> Result<String> {
    let shape = Gemm { m: 65, n: 33, k: 129, ta: false, tb: false, acc: false };
    // Small multiples of 1/8: all arithmetic is exact, in any order.
    let values = |len: usize, step: usize| -> Vec<f32> {
        (0..len).map(|i| (i * step % 17) as f32 / 8.0 - 1.0).collect()
    };
    let a = values(shape.m * shape.k, 5);
    let b = values(shape.k * shape.n, 7);
    let cuda = open(device)?;
    let mut c = cuda.alloc(MemoryKind::Activations, shape.m * shape.n)?;
    let left = cuda.upload(MemoryKind::Activations, &a)?;
    let right = cuda.upload(MemoryKind::Activations, &b)?;
    cuda.gemm(shape, Cuda::all(&left), Cuda::all(&right), Cuda::all_mut(&mut c))?;
    let mut got = vec![0.0; shape.m * shape.n];
    cuda.download(Cuda::all(&c), &mut got)?;
    for (at, got) in got.iter().enumerate() {
        let row = at / shape.n;
        let column = at % shape.n;
        let expected: f32 =
            (0..shape.k).map(|k| a[row * shape.k + k] * b[k * shape.n + column]).sum();
        if *got != expected {
            return Err(wrong(format!(
                "row {row}, column {column} of a matmul is {got}, expected {expected}"
            )));
        }
    }
    Ok(format!("{}×{}×{} in f32, exact", shape.m, shape.n, shape.k))
}

fn wrong(what: String) -> Error {
    Error::device(format!("the GPU computes wrong results: {what}"))
        .hint("try another GPU or driver; nvidia-smi -q shows memory errors")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_where_they_are_mapped() {
        let maps = "7f00-7f01 r-xp 0 00:00 1   /opt/cuda/lib/libnvrtc-builtins.so.13.0\n\
                    7f02-7f03 r-xp 0 00:00 2   /opt/my cuda/lib/libnvrtc.so.13\n7f04-7f05 rw-p 0 00:00 0  [heap]\n";
        assert_eq!(mapped_path(maps, "libnvrtc.so"), Some("/opt/my cuda/lib/libnvrtc.so.13"));
        assert_eq!(mapped_path(maps, "libcuda.so"), None);
    }
}
