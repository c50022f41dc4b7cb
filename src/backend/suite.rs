//! One suite for every device: each kernel against f64 arithmetic at awkward sizes, and for repeatable bits.

use std::path::Path;
use std::process::Command;

use super::cpu::{Cpu, Products};
use super::cuda;
use super::{Kernels, MemoryKind};
use crate::random::Stream;

/// Results of kernels, one vector a kernel and shape.
pub type Results = Vec<Vec<f32>>;

/// Relative error allowed, against the largest value of the result.
pub fn tolerance<B: Kernels>(b: &B) -> f64 {
    if b.computes_narrow() { 1e-2 } else { 1e-5 }
}

/// Normal numbers that the device's compute type can hold, named by `seed`.
pub fn random<B: Kernels>(b: &B, seed: u64, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Stream::new(seed).fill_normal(&mut values);
    rounded(b, &values)
}

/// The values as the device's compute type holds them.
pub fn rounded<B: Kernels>(b: &B, values: &[f32]) -> Vec<f32> {
    down(b, &up(b, values))
}

pub fn ids(seed: u64, len: usize, below: usize) -> Vec<u32> {
    (0..len).map(|i| (Stream::new(seed).uniform(i as u64) * below as f64) as u32).collect()
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

pub fn close<B: Kernels>(b: &B, got: &B::Buf, want: &[f64], what: &str) {
    let got = down(b, got);
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-6, |a: f64, b| a.max(b.abs()));
    let mut bias = 0.0;
    for (i, (&g, w)) in got.iter().zip(want).enumerate() {
        let error = f64::from(g) - w;
        assert!(error.abs() <= tolerance(b) * largest, "{what}[{i}]: {g}, in f64 {w}");
        bias += error / largest;
    }
    // Rounding goes up as often as down.
    let count = got.len() as f64;
    assert!(bias.abs() <= tolerance(b) * (count.sqrt() + 0.01 * count), "{what} is off by {} on average", bias / count);
}

/// In the compute type: parameters, activations.
pub fn up<B: Kernels>(b: &B, x: &[f32]) -> B::Buf {
    b.upload(MemoryKind::Parameters, x).unwrap()
}

/// In f32: masters, gradients of parameters, statistics, losses.
pub fn up_f32<B: Kernels>(b: &B, x: &[f32]) -> B::Buf {
    b.upload_f32(MemoryKind::Gradients, x).unwrap()
}

pub fn down<B: Kernels>(b: &B, x: &B::Buf) -> Vec<f32> {
    let mut host = vec![0.0; B::len(x)];
    b.download(B::all(x), &mut host).unwrap();
    host
}

/// Elements from a row of so many columns to the next that a device takes: none between them, and its own padding.
pub fn strides<B: Kernels>(columns: usize) -> Vec<usize> {
    let mut all = vec![columns, B::row_stride(columns)];
    all.dedup();
    all
}

/// Rows that lie so far apart, with NaN between them: no result may come of that.
pub fn apart(rows: &[f32], columns: usize, stride: usize) -> Vec<f32> {
    let padding = vec![f32::NAN; stride - columns];
    rows.chunks(columns).flat_map(|row| row.iter().chain(&padding).copied()).collect()
}

/// The rows of [`apart`] again. Panics if anything but NaN is between them.
pub fn together<B: Kernels>(b: &B, buf: &B::Buf, columns: usize, stride: usize) -> Vec<f32> {
    let all = down(b, buf);
    assert!(all.chunks(stride).all(|row| row[columns..].iter().all(|x| x.is_nan())), "padding was written");
    all.chunks(stride).flat_map(|row| row[..columns].iter().copied()).collect()
}

/// A row-major product in f64, `a` m×k and `b` k×n.
pub fn product(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    (0..m * n).map(|i| (0..k).map(|l| a(i / n, l) * b(l, i % n)).sum()).collect()
}

/// As [`close`], for sums that are f32 on every device: relative to the largest of all.
pub fn close_f32(got: &[f32], want: &[f64], what: &str) {
    let most = want.iter().fold(0.0f64, |most, want| most.max(want.abs())).max(1.0);
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() <= 2e-6 * most, "{what}[{i}]: {got} is not {want}");
    }
}

/// A test of each operation on one device: `$stamp!` makes them, of the pairs of name and test that it is given, and of those
/// of all operations but products, whose tests differ with the precision.
macro_rules! each_operation {
    ($stamp:ident! { $($of:tt)* }) => {
        $stamp! {
            $($of)*
            elementwise: crate::backend::ops::elementwise::suite::elementwise,
            norms: crate::backend::ops::norm::suite::norms,
            embeddings: crate::backend::ops::embedding::suite::embeddings,
            embedding_parts: crate::backend::ops::embedding::suite::embedding_parts,
            attention: crate::backend::ops::attention::suite::attentions,
            rotary: crate::backend::ops::rotary::suite::rotations,
            gates: crate::backend::ops::swiglu::suite::gates,
            optimizers: crate::backend::ops::optimizer::suite::optimizers,
            digests: crate::backend::ops::digest::suite::digests,
            dropout: crate::backend::ops::dropout::suite::dropouts,
            activations: crate::backend::ops::activation::suite::activations,
            softmax: crate::backend::ops::softmax::suite::softmaxes,
            windows: crate::backend::ops::window::suite::windows,
            columns: crate::backend::ops::columns::suite::columns,
            pairs: crate::backend::ops::pairs::suite::pairs,
            channels: crate::backend::ops::channel::suite::channels,
            classifiers: crate::backend::ops::classifier::suite::classifiers,
            classifier_parts: crate::backend::ops::classifier::suite::classifier_parts,
            regressions: crate::backend::ops::regression::suite::regressions,
        }
    };
}

/// Panics unless an operation gives the same bits on any number of threads.
fn on_any_threads(test: fn(&Cpu) -> Results) {
    let one = bits(test(&Cpu::new(1)));
    for threads in [2, 3, 8] {
        assert!(bits(test(&Cpu::new(threads))) == one, "{threads} threads give other bits than one");
    }
}

fn bits(results: Results) -> Vec<Vec<u32>> {
    results.into_iter().map(|result| result.into_iter().map(f32::to_bits).collect()).collect()
}

macro_rules! on_cpu {
    ($($operation:ident: $test:expr,)*) => {
        mod cpu {
            $(
                #[test]
                fn $operation() {
                    super::on_any_threads($test);
                }
            )*
        }
    };
}

each_operation! { on_cpu! {
    products: |b| crate::backend::ops::linear::suite::products(b, super::random),
    convolutions: |b| crate::backend::ops::convolution::suite::convolutions(b, super::random),
} }

/// Products by this implementation on several numbers of threads, unless CPU or library are missing.
fn by(products: Products, random: fn(&Cpu, u64, usize) -> Vec<f32>) {
    let on = |threads| -> Option<Vec<Vec<u32>>> {
        let cpu = Cpu::new(threads).with_products(products).map_err(|e| eprintln!("skipped: {e}")).ok()?;
        Some(bits(
            [
                super::ops::convolution::suite::convolutions(&cpu, random),
                super::ops::linear::suite::products(&cpu, random),
            ]
            .concat(),
        ))
    };
    let Some(one) = on(1) else { return };
    for threads in [2, 3, 8] {
        assert!(on(threads).as_ref() == Some(&one), "{threads} threads give other bits than one");
    }
}

#[test]
fn products_by_onednn_are_right_and_do_not_depend_on_the_threads() {
    by(Products::OneDnn, random);
}

#[test]
fn products_of_bf16_are_right_where_the_cpu_has_them() {
    // Operands that bf16 holds: the sums are those of f32.
    let narrow = |_: &Cpu, seed, len| -> Vec<f32> {
        random(&Cpu::new(1), seed, len).into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect()
    };
    by(Products::OwnBf16, narrow);
    by(Products::OneDnnBf16, narrow);
}

/// An operation on the first GPU, twice.
fn on_first_gpu(precision: cuda::Precision, test: fn(&cuda::Cuda) -> Results) {
    let device = cuda::Device::open(0).unwrap();
    let once = || bits(test(&cuda::Cuda::new(&device, 256 << 20, precision).unwrap()));
    assert!(once() == once(), "two runs give different bits");
}

/// Elements that operands begin after a multiple of 256 bytes, as tensors do within a unit.
const LEADS: [usize; 3] = [1, 3, 5];

/// The variable with which the first of these is enough.
const ONE_LEAD: &str = "HPCTRAIN_TEST_ONE_LEAD";

/// As [`on_first_gpu`], with operands that begin anywhere.
fn on_first_gpu_anywhere(precision: cuda::Precision, operation: &str, test: fn(&cuda::Cuda) -> Results) {
    if operation == "attention" {
        return eprintln!("skipped: operands of attention are buffers of their own, which tensor cores want aligned");
    }
    // The simulator knows alignment alone, which is that of any odd number of elements.
    let leads = if std::env::var_os(ONE_LEAD).is_some() { &LEADS[..1] } else { &LEADS };
    for lead in leads {
        cuda::lead::set(*lead);
        on_first_gpu(precision, test);
        cuda::lead::set(0);
    }
}

/// Bits of TF32's mantissa.
pub const TF32_BITS: u32 = 10;

/// As [`random`], in TF32.
pub fn random_tf32<B: Kernels>(b: &B, seed: u64, len: usize) -> Vec<f32> {
    let lost = f32::MANTISSA_DIGITS - 1 - TF32_BITS;
    random(b, seed, len).into_iter().map(|x| f32::from_bits(x.to_bits() >> lost << lost)).collect()
}

#[test]
#[ignore = "needs the simulator of a GPU, whose priorities are known"]
fn urgent_streams() {
    let cuda = cuda::Cuda::new(&cuda::Device::open(0).unwrap(), 64 << 20, cuda::Precision::Bf16).unwrap();
    assert_eq!(cuda.priorities().unwrap(), (0, vec![-5; 5]));
}

#[test]
fn messages_and_copies_go_before_kernels_that_compute() {
    simulated("urgent_streams", &[]);
}

/// Runs an ignored test of this program with the simulator's libraries (`tests/cudasim/`).
fn simulated(test: &str, settings: &[(&str, &str)]) {
    let program = std::env::current_exe().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Beside the folder of the programs, where integration tests build it too.
    let out = program.ancestors().nth(3).unwrap().join("tmp/cudasim");
    assert!(Command::new(root.join("tests/cudasim/build.sh")).arg(&out).status().unwrap().success());
    let mut command = Command::new(program);
    command.args([&format!("backend::suite::{test}"), "--exact", "--ignored", "--nocapture"]);
    command.env("LD_LIBRARY_PATH", out.join("lib")).env("CUDASIM_CACHE", out.join("kernels"));
    command.env("XDG_CACHE_HOME", out.join("cache")).env_remove("CUDA_VISIBLE_DEVICES");
    let output = command.envs(settings.iter().copied()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let told = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success() && told.contains("1 passed"), "{settings:?}: {told}");
}

macro_rules! on_cuda {
    ($module:ident, $precision:expr; $($operation:ident: $test:expr,)*) => {
        mod $module {
            $(
                #[test]
                #[ignore = "needs a GPU or its simulator"]
                fn $operation() {
                    super::on_first_gpu($precision, $test);
                }
            )*
        }
    };
}

each_operation! { on_cuda! {
    cuda_f32, super::cuda::Precision::F32(super::cuda::Arithmetic::Full);
    products: |b| crate::backend::ops::linear::suite::products(b, super::random),
    convolutions: |b| crate::backend::ops::convolution::suite::convolutions(b, super::random),
} }

each_operation! { on_cuda! {
    cuda_tf32, super::cuda::Precision::F32(super::cuda::Arithmetic::Tf32);
    products: crate::backend::ops::linear::suite::products_in_tf32,
    convolutions: |b| crate::backend::ops::convolution::suite::convolutions(b, super::random_tf32),
} }

each_operation! { on_cuda! {
    cuda_bf16, super::cuda::Precision::Bf16;
    products: |b| crate::backend::ops::linear::suite::products(b, super::random),
    convolutions: |b| crate::backend::ops::convolution::suite::convolutions(b, super::random),
} }

macro_rules! on_cuda_anywhere {
    ($module:ident, $precision:expr; $($operation:ident: $test:expr,)*) => {
        mod $module {
            $(
                #[test]
                #[ignore = "needs a GPU or its simulator"]
                fn $operation() {
                    super::on_first_gpu_anywhere($precision, stringify!($operation), $test);
                }
            )*
        }
    };
}

each_operation! { on_cuda_anywhere! {
    cuda_anywhere_f32, super::cuda::Precision::F32(super::cuda::Arithmetic::Full);
    products: |b| crate::backend::ops::linear::suite::products(b, super::random),
    convolutions: |b| crate::backend::ops::convolution::suite::convolutions(b, super::random),
} }

each_operation! { on_cuda_anywhere! {
    cuda_anywhere_bf16, super::cuda::Precision::Bf16;
    products: |b| crate::backend::ops::linear::suite::products(b, super::random),
    convolutions: |b| crate::backend::ops::convolution::suite::convolutions(b, super::random),
} }

/// The tests of a module on the simulator, with settings of it.
macro_rules! simulated {
    ($module:ident, $of:literal, $settings:expr; $($operation:ident: $_test:expr,)*) => {
        mod $module {
            $(
                #[test]
                fn $operation() {
                    super::simulated(concat!($of, "::", stringify!($operation)), $settings);
                }
            )*
        }
    };
}

each_operation! { simulated! {
    simulated_f32, "cuda_f32", &[("CUDASIM_CHECK", "1"), ("CUDASIM_STREAMS", "lazy"), ("CUDASIM_ORDER", "reverse")];
    products: crate::backend::ops::linear::suite::products,
    convolutions: crate::backend::ops::convolution::suite::convolutions,
} }

each_operation! { simulated! {
    simulated_tf32, "cuda_tf32", &[];
    products: crate::backend::ops::linear::suite::products_in_tf32,
    convolutions: crate::backend::ops::convolution::suite::convolutions,
} }

each_operation! { simulated! {
    simulated_bf16, "cuda_bf16", &[("CUDASIM_CHECK", "1"), ("CUDASIM_HOST_ACCESS", "0")];
    products: crate::backend::ops::linear::suite::products,
    convolutions: crate::backend::ops::convolution::suite::convolutions,
} }

each_operation! { simulated! {
    simulated_anywhere_f32, "cuda_anywhere_f32", &[(super::ONE_LEAD, "1")];
    products: crate::backend::ops::linear::suite::products,
    convolutions: crate::backend::ops::convolution::suite::convolutions,
} }

each_operation! { simulated! {
    simulated_anywhere_bf16, "cuda_anywhere_bf16", &[(super::ONE_LEAD, "1")];
    products: crate::backend::ops::linear::suite::products,
    convolutions: crate::backend::ops::convolution::suite::convolutions,
} }

/// Where cuBLASLt knows no algorithm for a product with its GELU, the two go one after the other, to the same results.
#[test]
fn products_without_fused_gelu() {
    simulated("cuda_bf16::products", &[("CUDASIM_FAIL", "nogelu")]);
}

/// Without any algorithm the error names the product.
#[test]
fn products_without_an_algorithm() {
    simulated("unknown_products", &[("CUDASIM_FAIL", "noalgo")]);
}

#[test]
#[ignore = "needs a simulator that knows no algorithm"]
fn unknown_products() {
    use super::{Backend, Gemm, LinearOps};
    let cuda = cuda::Cuda::new(&cuda::Device::open(0).unwrap(), 64 << 20, cuda::Precision::Bf16).unwrap();
    let [a, b, mut c] = [6, 12, 8].map(|len| up(&cuda, &vec![1.0; len]));
    let shape = Gemm { m: 2, n: 4, k: 3, ta: false, tb: false, acc: false };
    let (a, b, c) = (cuda::Cuda::all(&a), cuda::Cuda::all(&b), cuda::Cuda::all_mut(&mut c));
    let error = cuda.gemm(shape, a, b, c).unwrap_err().to_string();
    let says = "cuBLASLt knows no algorithm to multiply 2×4×3 of bf16 and bf16 in bf16";
    assert!(error.contains(says) && error.contains("hint: "), "{error}");
}

/// More chunks of places, and more samples, than a grid has blocks along y or z.
#[test]
fn channels_of_a_long_batch() {
    simulated("long_channels", &[]);
}

#[test]
#[ignore = "needs a GPU or its simulator"]
fn long_channels() {
    use super::{Backend, ChannelOps, Channels};
    on_first_gpu(cuda::Precision::F32(cuda::Arithmetic::Full), |cuda| {
        let moments = |samples, places, x: &[f32]| {
            let shape = Channels { samples, places, channels: 1, groups: 1 };
            let (x, mut moments) = (up(cuda, x), up_f32(cuda, &vec![7.0; 3 * samples]));
            cuda.channel_moments(shape, cuda::Cuda::all(&x), cuda::Cuda::all_mut(&mut moments)).unwrap();
            down(cuda, &moments)
        };
        let places = 65_536 * 128 + 1;
        let mut x = vec![1.0; places];
        x[places - 1] = 3.0;
        let long = moments(1, places, &x);
        assert_eq!(long, [1.0, 2.0, 4.0]);
        let x: Vec<f32> = (0..65_537).map(|sample| (sample % 3) as f32).collect();
        let many = moments(x.len(), 1, &x);
        assert!(many.chunks(3).zip(&x).all(|(moments, &x)| moments == [x, 0.0, 0.0]), "moments of samples");
        vec![long, many]
    });
}
