//! Driver, GPUs, NVRTC, cuBLASLt: there, recent enough, and right.

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

/// Memory of a GPU that checks take: the scratch of products, and something to multiply.
const POOL: usize = 64 << 20;

/// Less than this part of a GPU's memory free, and somebody else is at work there.
const MOSTLY_FREE: f64 = 0.5;

/// PCI's number of the vendor NVIDIA, and of the class of display controllers.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

/// NVIDIA's GPUs on the bus, whether or not a driver knows them.
pub(super) fn on_bus() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/bus/pci/devices") else { return Vec::new() };
    let is_gpu = |path: &Path| {
        let starts = |file: &str, with: &str| {
            fs::read_to_string(path.join(file)).is_ok_and(|id| id.starts_with(with))
        };
        starts("vendor", NVIDIA) && starts("class", DISPLAY)
    };
    let gpus = entries.flatten().filter(|entry| is_gpu(&entry.path()));
    gpus.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Looks at driver and libraries, and at every `every`th GPU from number `first` on, counted
/// around.
pub(super) fn probe(tell: &ProbeReporter, first: usize, every: usize) {
    if !libraries::driver_is_there() {
        tell.attempt("gpu driver", no_driver);
        toolkit(tell, Finding::at_most_a_warning);
        return;
    }
    let mut count = 0;
    let works = tell.attempt("gpu driver", || {
        let found = libraries::driver().and_then(|version| {
            count = devices()?;
            Ok(format!("CUDA {version}, {} here, {}", gpus(count), place("libcuda.so")))
        });
        found.into()
    });
    // The toolkit matters where there is a GPU to use it.
    if !works || count == 0 {
        toolkit(tell, Finding::at_most_a_warning);
        return;
    }
    let able = toolkit(tell, std::convert::identity);
    (first % count..count).step_by(every.max(1)).for_each(|number| look(tell, number, able));
}

fn gpus(count: usize) -> String {
    format!("{count} GPU{}", if count == 1 { "" } else { "s" })
}

fn no_driver() -> Finding {
    let found = "no CUDA driver: CPU only";
    match on_bus().first() {
        Some(pci) => Finding::warning(
            format!("{found}, though an NVIDIA GPU is at {pci}"),
            "install NVIDIA's driver (525 or later); a container needs it passed in, as with --gpus all or --nv",
        ),
        None => Finding::warning(
            found,
            "to train on GPUs start on a node that has some; CPUs need nothing more",
        ),
    }
}

/// Looks for the libraries that compile kernels and multiply matrices, `weighed` by whether they
/// are needed; returns whether all are there.
fn toolkit(tell: &ProbeReporter, weighed: fn(Finding) -> Finding) -> bool {
    let look = |version: Result<String>, file: &str| -> Finding {
        version.map(|version| format!("{version}, {}", place(file))).into()
    };
    let compiler = tell.attempt("nvrtc", || weighed(look(libraries::nvrtc(), "libnvrtc.so")));
    let products =
        tell.attempt("cublaslt", || weighed(look(libraries::cublaslt(), "libcublasLt.so")));
    // Only users that ask for it need it.
    tell.attempt("nccl", || look(nccl::version(), "libnccl.so").at_most_a_warning());
    compiler && products
}

/// Path from which a library of this process was loaded.
fn place(file: &str) -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    place_in(&maps, file).unwrap_or("found by the system's loader").to_owned()
}

/// The path of the mapped file whose name starts with `file`.
fn place_in<'a>(maps: &'a str, file: &str) -> Option<&'a str> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut named =
        paths.filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(file)));
    named.next()
}

/// Looks at one GPU, and computes on it if the libraries are there.
fn look(tell: &ProbeReporter, number: usize, able: bool) {
    let name = format!("gpu {number}");
    let mut opened = None;
    tell.attempt(&name, || {
        match Device::open(number).and_then(|device| Ok((describe(&device)?, device))) {
            Ok((finding, device)) => {
                opened = Some(device);
                finding
            }
            Err(error) => Err(error).into(),
        }
    });
    if let Some(device) = &opened {
        tell.attempt(&format!("{name} energy"), || energy(device));
    }
    if let Some(device) = opened.filter(|_| able) {
        tell.attempt(&format!("{name} kernel"), || kernel(&device).into());
        tell.attempt(&format!("{name} product"), || product(&device).into());
    }
}

fn describe(device: &Device) -> Result<Finding> {
    let (free, (major, minor)) = (device.free_memory()?, device.capability);
    let found = format!(
        "{}, {}, {} of {} free, compute capability {major}.{minor}",
        device.name,
        device.pci,
        bytes(free),
        bytes(device.memory)
    );
    Ok(if major < 8 {
        Finding::warning(found, "bf16 needs compute capability 8.0: set precision.dtype=f32")
    } else if (free as f64) < MOSTLY_FREE * device.memory as f64 {
        Finding::warning(found, "nvidia-smi shows who has the rest of its memory")
    } else {
        Finding::ok(found)
    })
}

/// Whether runs can record the energy of a GPU.
fn energy(device: &Device) -> Finding {
    match Counters::open(std::slice::from_ref(&device.id)).has(EnergySource::Gpu) {
        Ok(()) => Finding::ok("NVML counts its energy: runs record joules per token"),
        Err(why) => Finding::ok(format!("runs record no energy of GPUs: {why}")),
    }
}

/// A rank on the device for a moment.
fn open(device: &Device) -> Result<Cuda> {
    Cuda::new(device, POOL, Precision::F32(Arithmetic::Full))
}

/// Compiles a kernel, whether or not it was compiled before, and runs it.
fn kernel(device: &Device) -> Result<String> {
    let architecture = device.architecture();
    let size =
        nvrtc::compile(Variant { source: "add.cu", narrow: false, head: None }, &architecture)?
            .len();

    let cuda = open(device)?;
    // A number of elements that fills no block.
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let mut sum = cuda.upload(MemoryKind::Activations, &vec![0.5; x.len()])?;
    cuda.add(Cuda::all(&cuda.upload(MemoryKind::Activations, &x)?), Cuda::all_mut(&mut sum))?;
    let mut got = vec![0.0; x.len()];
    cuda.download(Cuda::all(&sum), &mut got)?;
    match x.iter().zip(&got).find(|&(x, got)| x + 0.5 != *got) {
        Some((x, got)) => Err(wrong(format!("it adds {x} and 0.5 to {got}"))),
        None => Ok(format!("compiled for {architecture} ({}), adds right", bytes(size))),
    }
}

/// Multiplies two matrices and compares with the host.
fn product(device: &Device) -> Result<String> {
    let shape = Gemm { m: 65, n: 33, k: 129, ta: false, tb: false, acc: false };
    // Small multiples of 1/8: every product and sum is exact, in any order.
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
        let want: f32 = (0..shape.k).map(|k| a[row * shape.k + k] * b[k * shape.n + column]).sum();
        if *got != want {
            return Err(wrong(format!(
                "row {row}, column {column} of a product is {got}, not {want}"
            )));
        }
    }
    Ok(format!("{}×{}×{} in f32, right to the bit", shape.m, shape.n, shape.k))
}

fn wrong(what: String) -> Error {
    Error::device(format!("it computes wrongly: {what}"))
        .hint("try another GPU or driver; nvidia-smi -q shows errors of its memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_where_they_are_mapped() {
        let maps = "7f00-7f01 r-xp 0 00:00 1   /opt/cuda/lib/libnvrtc-builtins.so.13.0\n\
                    7f02-7f03 r-xp 0 00:00 2   /opt/my cuda/lib/libnvrtc.so.13\n7f04-7f05 rw-p 0 00:00 0  [heap]\n";
        assert_eq!(place_in(maps, "libnvrtc.so"), Some("/opt/my cuda/lib/libnvrtc.so.13"));
        assert_eq!(place_in(maps, "libcuda.so"), None);
    }
}
