//! The device test suite on a GPU and on its simulator, in each precision. Two runs must give the
//! same bits.

use std::path::Path;
use std::process::Command;

use hpctrain_device_tests::common::{Results, bits, down, random, random_tf32, up, up_f32};
use hpctrain_device_tests::each_operation;

use crate::memory::Element;
use crate::{Cuda, Device, lead};

/// Runs an operation twice on the first GPU.
fn on_first_gpu(precision: crate::Precision, test: fn(&Cuda) -> Results) {
    let device = Device::open(0).unwrap();
    let once = || bits(test(&Cuda::new(&device, 256 << 20, precision).unwrap()));
    assert!(once() == once(), "two runs give different bits");
}

/// Offsets of operands from a multiple of 256 bytes, in elements: tensors in a unit have any
/// offset.
const LEADS: [usize; 3] = [1, 3, 5];

/// The environment variable that restricts tests to the first of these offsets.
const ONE_LEAD: &str = "HPCTRAIN_TEST_ONE_LEAD";

/// Runs an operation like [`on_first_gpu`], with unaligned operands.
fn on_first_gpu_anywhere(precision: crate::Precision, operation: &str, test: fn(&Cuda) -> Results) {
    if operation == "attention" {
        return eprintln!(
            "skipped: operands of attention are whole buffers, aligned for tensor cores"
        );
    }
    // The simulator depends only on the alignment, which is the same for all odd offsets.
    let leads = if std::env::var_os(ONE_LEAD).is_some() { &LEADS[..1] } else { &LEADS };
    for lead in leads {
        lead::set(*lead);
        on_first_gpu(precision, test);
        lead::set(0);
    }
}

#[test]
#[ignore = "needs the simulator of a GPU, whose priorities are known"]
fn urgent_streams() {
    let cuda = Cuda::new(&Device::open(0).unwrap(), 64 << 20, crate::Precision::Bf16).unwrap();
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
    // The folder that integration tests use too.
    let out = program.ancestors().nth(3).unwrap().join("tmp/cudasim");
    assert!(
        Command::new(root.join("../../tests/cudasim/build.sh"))
            .arg(&out)
            .status()
            .unwrap()
            .success()
    );
    let mut command = Command::new(program);
    command.args([&format!("suite::{test}"), "--exact", "--ignored", "--nocapture"]);
    command.env("LD_LIBRARY_PATH", out.join("lib")).env("CUDASIM_CACHE", out.join("kernels"));
    command.env("XDG_CACHE_HOME", out.join("cache")).env_remove("CUDA_VISIBLE_DEVICES");
    let output = command.envs(settings.iter().copied()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output_text = text(&output.stdout) + &text(&output.stderr);
    assert!(
        output.status.success() && output_text.contains("1 passed"),
        "{settings:?}: {output_text}"
    );
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
    cuda_f32, crate::Precision::F32(crate::Arithmetic::Full);
    matmuls: |b| hpctrain_device_tests::linear::matmuls(b, super::random),
    convolutions: |b| hpctrain_device_tests::convolution::convolutions(b, super::random),
} }

each_operation! { on_cuda! {
    cuda_tf32, crate::Precision::F32(crate::Arithmetic::Tf32);
    matmuls: hpctrain_device_tests::linear::matmuls_in_tf32,
    convolutions: |b| hpctrain_device_tests::convolution::convolutions(b, super::random_tf32),
} }

each_operation! { on_cuda! {
    cuda_bf16, crate::Precision::Bf16;
    matmuls: |b| hpctrain_device_tests::linear::matmuls(b, super::random),
    convolutions: |b| hpctrain_device_tests::convolution::convolutions(b, super::random),
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
    cuda_anywhere_f32, crate::Precision::F32(crate::Arithmetic::Full);
    matmuls: |b| hpctrain_device_tests::linear::matmuls(b, super::random),
    convolutions: |b| hpctrain_device_tests::convolution::convolutions(b, super::random),
} }

each_operation! { on_cuda_anywhere! {
    cuda_anywhere_bf16, crate::Precision::Bf16;
    matmuls: |b| hpctrain_device_tests::linear::matmuls(b, super::random),
    convolutions: |b| hpctrain_device_tests::convolution::convolutions(b, super::random),
} }

/// Runs the tests of a module on the simulator, with settings for it.
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
    matmuls: hpctrain_device_tests::linear::matmuls,
    convolutions: hpctrain_device_tests::convolution::convolutions,
} }

each_operation! { simulated! {
    simulated_tf32, "cuda_tf32", &[];
    matmuls: hpctrain_device_tests::linear::matmuls_in_tf32,
    convolutions: hpctrain_device_tests::convolution::convolutions,
} }

each_operation! { simulated! {
    simulated_bf16, "cuda_bf16", &[("CUDASIM_CHECK", "1"), ("CUDASIM_HOST_ACCESS", "0")];
    matmuls: hpctrain_device_tests::linear::matmuls,
    convolutions: hpctrain_device_tests::convolution::convolutions,
} }

each_operation! { simulated! {
    simulated_anywhere_f32, "cuda_anywhere_f32", &[(super::ONE_LEAD, "1")];
    matmuls: hpctrain_device_tests::linear::matmuls,
    convolutions: hpctrain_device_tests::convolution::convolutions,
} }

each_operation! { simulated! {
    simulated_anywhere_bf16, "cuda_anywhere_bf16", &[(super::ONE_LEAD, "1")];
    matmuls: hpctrain_device_tests::linear::matmuls,
    convolutions: hpctrain_device_tests::convolution::convolutions,
} }

/// If cuBLASLt knows no algorithm for a matmul with fused GELU, two kernels give the same results.
#[test]
fn matmuls_without_fused_gelu() {
    simulated("cuda_bf16::matmuls", &[("CUDASIM_FAIL", "nogelu")]);
}

/// If cuBLASLt does not support a matmul with a residual, two kernels give the same results.
#[test]
fn matmuls_without_a_fused_residual() {
    for operations in ["cuda_bf16::matmuls", "cuda_f32::matmuls"] {
        simulated(operations, &[("CUDASIM_FAIL", "residual")]);
    }
}

/// Without any algorithm the error names the matmul.
#[test]
fn matmuls_without_an_algorithm() {
    simulated("unknown_products", &[("CUDASIM_FAIL", "noalgo")]);
}

#[test]
#[ignore = "needs a simulator that knows no algorithm"]
fn unknown_products() {
    use hpctrain_device::{Backend as _, Gemm, LinearOps as _};
    let cuda = Cuda::new(&Device::open(0).unwrap(), 64 << 20, crate::Precision::Bf16).unwrap();
    let [a, b, mut c] = [6, 12, 8].map(|len| up(&cuda, &vec![1.0; len]));
    let shape = Gemm { m: 2, n: 4, k: 3, ta: false, tb: false, acc: false };
    let a = Cuda::all(&a);
    let b = Cuda::all(&b);
    let c = Cuda::all_mut(&mut c);
    let error = cuda.gemm(shape, a, b, c).unwrap_err().to_string();
    let says = "cuBLASLt knows no algorithm to multiply 2×4×3 of bf16 and bf16 in bf16";
    assert!(error.contains(says) && error.contains("hint: "), "{error}");
}

/// A driver refuses a grid without blocks.
#[test]
fn operations_on_no_rows() {
    simulated("no_rows", &[]);
}

#[test]
#[ignore = "needs a GPU or its simulator"]
fn no_rows() {
    use hpctrain_device::{Backend as _, LinearOps as _, Norm, NormOps as _, SoftmaxOps as _};
    on_first_gpu(crate::Precision::Bf16, |cuda| {
        const WIDTH: usize = 48;
        let weight = up(cuda, &[2.0; WIDTH]);
        let [none, mut y] = [0, 0].map(|len| up(cuda, &vec![0.0; len]));
        let mut stats = up_f32(cuda, &[]);
        let mut sums = up_f32(cuda, &[0.5; 2 * WIDTH]);
        let shape = Norm { rows: 0, width: WIDTH, epsilon: 1e-5, centred: true };
        let x = Cuda::all(&none);
        let w = Cuda::all(&weight);
        cuda.norm(shape, x, w, w, Cuda::all_mut(&mut y), Cuda::all_mut(&mut stats)).unwrap();
        cuda.softmax(WIDTH, x, Cuda::all_mut(&mut y)).unwrap();
        let (dweight, dbias) = Cuda::split_at_mut(Cuda::all_mut(&mut sums), WIDTH);
        let dx = Cuda::all_mut(&mut y);
        cuda.norm_backward(shape, x, x, w, Cuda::all(&stats), dx, dweight, dbias).unwrap();
        cuda.linear_backward_bias(0, x, Cuda::view_mut(&mut sums, 0..WIDTH)).unwrap();
        // Nothing is added.
        assert_eq!(down(cuda, &sums), [0.5; 2 * WIDTH]);
        vec![down(cuda, &sums)]
    });
}

/// Terms of other ranks are added in the order of the tree, and those in bf16 rounded once.
#[test]
fn sums_in_order() {
    simulated("ordered_sums", &[]);
}

#[test]
#[ignore = "needs a GPU or its simulator"]
fn ordered_sums() {
    use half::bf16;
    use hpctrain_device::{Backend as _, CommBuffer, ElementwiseOps as _, MemoryKind, OrderedSum};
    on_first_gpu(crate::Precision::Bf16, |cuda| {
        let mut results = Vec::new();
        for (terms, words) in [(2, 1), (3, 1000), (8, 77), (255, 5)] {
            for element in [Element::F32, Element::Bf16] {
                let len = words * size_of::<f32>() / element.size();
                let values: Vec<f32> =
                    (0..terms * len).map(|i| (i * 7919 % 4001) as f32 * 0.37 - 700.0).collect();
                let mut all = match element {
                    Element::F32 => cuda.alloc_f32(MemoryKind::Gradients, terms * len),
                    Element::Bf16 => cuda.alloc_bf16(MemoryKind::Gradients, terms * len),
                }
                .unwrap();
                let from = up_f32(cuda, &values);
                cuda.copy(Cuda::all(&from), Cuda::all_mut(&mut all)).unwrap();
                let ready = Cuda::record_event(&all).unwrap();
                ready.unwrap().wait().unwrap();
                let CommBuffer::Device(span, copies) =
                    Cuda::comm_buffer(&mut all, 0..terms * len).unwrap()
                else {
                    panic!("host memory")
                };
                // The other terms are there in order after the first one.
                let own = span.part(0..words);
                let others = span.part(words..terms * words);
                let sum = OrderedSum { element, own, number: 0, others };
                copies.sum_in_order(&[sum]).unwrap().wait().unwrap();
                drop(copies);
                let got = down(cuda, &all)[..len].to_vec();
                for (i, &got) in got.iter().enumerate() {
                    let round = |x: f32| match element {
                        Element::F32 => x,
                        Element::Bf16 => bf16::from_f32(x).to_f32(),
                    };
                    let mut sums: Vec<f32> =
                        (0..terms).map(|term| round(values[term * len + i])).collect();
                    let exact: f64 = sums.iter().copied().map(f64::from).sum();
                    while sums.len() > 1 {
                        sums = sums.chunks(2).map(|pair| pair.iter().sum()).collect();
                    }
                    assert_eq!(got.to_bits(), round(sums[0]).to_bits(), "{terms} of {element:?}");
                    let epsilon = if element == Element::F32 { 1e-6 } else { 4e-3 };
                    let bound = epsilon * (700.0 * terms as f64);
                    assert!((f64::from(got) - exact).abs() <= bound, "{got} for {exact}");
                }
                results.push(got);
            }
        }
        results
    });
}

/// Memory of the communication thread may have been a buffer that queued kernels still use.
#[test]
fn scratch_waits_for_kernels() {
    simulated("scratch_of_a_freed_buffer", &[("CUDASIM_STREAMS", "lazy")]);
}

#[test]
#[ignore = "needs a simulator that does work only when something waits for it"]
fn scratch_of_a_freed_buffer() {
    use hpctrain_device::{Backend as _, ElementwiseOps as _, MemoryKind, Slot};
    const POOL: usize = 34 << 20;
    let precision = crate::Precision::F32(crate::Arithmetic::Full);
    let cuda = Cuda::new(&Device::open(0).unwrap(), POOL, precision).unwrap();
    // Two buffers do not fit, so the second one has memory of the first.
    let words = (POOL - Cuda::WORKSPACE) / size_of::<f32>() / 4 * 3;
    let mut before = cuda.alloc(MemoryKind::Activations, words).unwrap();
    cuda.zero(Cuda::all_mut(&mut before)).unwrap();
    drop(before);
    let copies = cuda.0.copy_streams.copies();
    let scratch = copies.scratch(words).unwrap();
    let span = [(scratch.span(), 0)];
    let mut slot = Slot::new(&*copies, words).unwrap();
    slot.memory().unwrap().fill(1.0);
    slot.upload(&*copies, &span).unwrap();
    slot.memory().unwrap().fill(2.0);
    // Ends all work of the compute stream.
    assert_eq!(down(&cuda, &up(&cuda, &[3.0])), [3.0]);
    slot.download(&*copies, &span).unwrap();
    let is_kept = slot.memory().unwrap().iter().all(|word| *word == 1.0);
    assert!(is_kept, "a kernel wrote to the scratch memory");
}

/// Values of a micro-batch are uploaded without a wait, in order with compute: neither too late nor
/// over a buffer of an upload that the device has not done.
#[test]
fn uploads_wait_for_nothing() {
    for streams in ["lazy", "racing"] {
        simulated("uploads_in_order", &[("CUDASIM_STREAMS", streams)]);
    }
}

#[test]
#[ignore = "needs a simulator that does work only when something waits for it"]
fn uploads_in_order() {
    use hpctrain_device::{Backend as _, MemoryKind};
    for precision in [crate::Precision::F32(crate::Arithmetic::Full), crate::Precision::Bf16] {
        let cuda = Cuda::new(&Device::open(0).unwrap(), 64 << 20, precision).unwrap();
        let waits = || cuda.device_counters().host_waits;
        let before = waits();
        let values: Vec<Vec<f32>> = (1..=8).map(|k| vec![k as f32; 100 * k]).collect();
        let bufs: Vec<_> = values
            .iter()
            .map(|values| cuda.upload(MemoryKind::Activations, values).unwrap())
            .collect();
        assert_eq!(waits(), before, "uploads of values");
        assert!(cuda.upload(MemoryKind::Activations, &[]).is_ok() && waits() == before);
        let last = cuda.upload(MemoryKind::Activations, &[9.0]).unwrap();
        for (buf, values) in bufs.iter().zip(&values) {
            assert_eq!(down(&cuda, buf), *values);
        }
        assert_eq!(down(&cuda, &last), [9.0]);
    }
}

/// More chunks of positions, and more samples, than a grid may have blocks along y or z.
#[test]
fn channels_of_a_long_batch() {
    simulated("long_channels", &[]);
}

#[test]
#[ignore = "needs a GPU or its simulator"]
fn long_channels() {
    on_first_gpu(crate::Precision::F32(crate::Arithmetic::Full), |cuda| {
        let places = 65_536 * 128 + 1;
        let mut x = vec![1.0; places];
        x[places - 1] = 3.0;
        let long = channel_moments(cuda, [1, places], &x);
        assert_eq!(long, [1.0, 2.0, 4.0]);
        let x: Vec<f32> = (0..65_537).map(|sample| (sample % 3) as f32).collect();
        let many = channel_moments(cuda, [x.len(), 1], &x);
        assert!(
            many.chunks(3).zip(&x).all(|(moments, &x)| moments == [x, 0.0, 0.0]),
            "moments of samples"
        );
        vec![long, many]
    });
}

/// Returns the moments of each sample of one channel.
fn channel_moments(cuda: &Cuda, [samples, places]: [usize; 2], x: &[f32]) -> Vec<f32> {
    use hpctrain_device::{Backend as _, ChannelNormShape, ChannelOps as _};
    let shape = ChannelNormShape { samples, places, channels: 1, groups: 1 };
    let x = up(cuda, x);
    let mut moments = up_f32(cuda, &vec![7.0; 3 * samples]);
    cuda.channel_moments(shape, Cuda::all(&x), Cuda::all_mut(&mut moments)).unwrap();
    down(cuda, &moments)
}
