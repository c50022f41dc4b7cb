//! Tests of the CPU simulator of CUDA (`tests/cudasim/`): it must compute what a GPU would, and
//! detect mistakes. Its libraries are found through `LD_LIBRARY_PATH`, so each test runs its body
//! in a separate process.
#![allow(clippy::undocumented_unsafe_blocks, reason = "every call of the driver is one")]

use std::ffi::{CString, c_char, c_void};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Instant;

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys::{CUresult, CUstreamCaptureMode};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DriverError,
    LaunchConfig, PushKernelArg,
};
use cudarc::driver::{result, sys};
use cudarc::nvrtc::{Ptx, sys as nvrtc};
use half::bf16;

use hpctrain_testkit::launch::test_name;
use hpctrain_testkit::simulator::{Settings, child, role, under};

const BASIC: &str = include_str!("../cudasim/kernels/basic.cu");
const TENSOR: &str = include_str!("../cudasim/kernels/tensor.cu");
const FAULTS: &str = include_str!("../cudasim/kernels/faults.cu");
const EXCHANGE: &str = include_str!("../cudasim/kernels/exchange.cu");
const HEADERS: [(&str, &str); 2] = [
    ("common.cuh", include_str!("../../src/cuda/kernels/common.cuh")),
    ("ptx.cuh", include_str!("../../src/cuda/kernels/ptx.cuh")),
];

/// The ways in which work may be ordered and watched. All must give the same results.
const SCHEDULES: [&[(&str, &str)]; 4] = [
    &[],
    &[("CUDASIM_STREAMS", "lazy"), ("CUDASIM_ORDER", "reverse")],
    &[("CUDASIM_CHECK", "1")],
    &[("CUDASIM_HOST_ACCESS", "0")],
];

// ---- compiling and launching
// ------------------------------------------------------------------------------------

/// Compiles a source with the project's headers. Returns the cubin or the compiler's log.
fn compile(source: &str, options: &[&str]) -> Result<Vec<u8>, String> {
    let text = |s: &str| CString::new(s).unwrap();
    let source = text(source);
    let name = text("test.cu");
    let names = HEADERS.map(|(name, _)| text(name));
    let texts = HEADERS.map(|(_, header)| text(header));
    let names = names.each_ref().map(|name| name.as_ptr());
    let texts = texts.each_ref().map(|header| header.as_ptr());
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    unsafe {
        let mut program = null_mut();
        let created = nvrtc::nvrtcCreateProgram(
            &raw mut program,
            source.as_ptr(),
            name.as_ptr(),
            2,
            texts.as_ptr(),
            names.as_ptr(),
        );
        created.result().unwrap();
        let compiled =
            nvrtc::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr()).result();
        let mut size = 0;
        let mut bytes = Vec::new();
        if compiled.is_ok() {
            nvrtc::nvrtcGetCUBINSize(program, &raw mut size).result().unwrap();
            bytes.resize(size, 0u8);
            nvrtc::nvrtcGetCUBIN(program, bytes.as_mut_ptr().cast()).result().unwrap();
        } else {
            nvrtc::nvrtcGetProgramLogSize(program, &raw mut size).result().unwrap();
            bytes.resize(size, 0u8);
            nvrtc::nvrtcGetProgramLog(program, bytes.as_mut_ptr().cast()).result().unwrap();
        }
        nvrtc::nvrtcDestroyProgram(&raw mut program).result().unwrap();
        match compiled {
            Ok(()) => Ok(bytes),
            Err(_) => Err(String::from_utf8(bytes).unwrap()),
        }
    }
}

struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

impl Gpu {
    fn new(device: usize) -> Self {
        let context = CudaContext::new(device).unwrap();
        let stream = context.new_stream().unwrap();
        Self { context, stream }
    }

    fn module(&self, source: &str, options: &[&str]) -> Arc<CudaModule> {
        let options = [&["--gpu-architecture=sm_90a"], options].concat();
        let cubin = compile(source, &options).unwrap_or_else(|log| panic!("{log}"));
        self.context.load_module(Ptx::from_binary(cubin)).unwrap()
    }

    fn put<T: cudarc::driver::DeviceRepr>(&self, values: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(values).unwrap()
    }

    fn zeros<T: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> CudaSlice<T> {
        self.stream.alloc_zeros(len).unwrap()
    }

    fn get<T: cudarc::driver::DeviceRepr>(&self, values: &CudaSlice<T>) -> Vec<T> {
        self.stream.clone_dtoh(values).unwrap()
    }
}

fn shape(grid: u32, block: u32, shared: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (block, 1, 1), shared_mem_bytes: shared }
}

/// Launches `FUNCTION(ARGUMENTS)` on a stream.
macro_rules! launch {
    ($stream:expr, $function:expr, $shape:expr, $($argument:expr),+) => {
        unsafe { $stream.launch_builder($function)$(.arg($argument))+.launch($shape) }.map(drop)
    };
}

fn function(module: &Arc<CudaModule>, name: &str) -> CudaFunction {
    module.load_function(name).unwrap()
}

// ---- numbers
// ------------------------------------------------------------------------------------------------------

/// Deterministic values in [-1, 1).
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

#[track_caller]
fn close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let difference = (f64::from(got) - expected).abs();
        assert!(
            difference <= tolerance * (1.0 + expected.abs()),
            "element {i}: {got} instead of {expected}"
        );
    }
}

fn narrow(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect()
}

fn widen(values: &[u16]) -> Vec<f32> {
    values.iter().map(|&v| bf16::from_bits(v).to_f32()).collect()
}

// ---- kernels
// ------------------------------------------------------------------------------------------------------

#[test]
fn kernels_compute() {
    under(&SCHEDULES, || {
        let gpu = Gpu::new(0);
        let module = gpu.module(BASIC, &[]);
        let n = 5000;
        let a = noise(n, 1);
        let b = noise(n, 2);
        let da = gpu.put(&a);
        let db = gpu.put(&b);
        let mut sum = gpu.zeros::<f32>(n);
        let blocks = n.div_ceil(256) as u32;
        launch!(
            gpu.stream,
            &function(&module, "vec_add"),
            shape(blocks, 256, 0),
            &mut sum,
            &da,
            &db,
            &(n as i32)
        )
        .unwrap();
        assert_eq!(gpu.get(&sum), a.iter().zip(&b).map(|(x, y)| x + y).collect::<Vec<f32>>());

        let mut partial = gpu.zeros::<f32>(blocks as usize);
        let mut total = gpu.zeros::<f32>(1);
        let block_sum = function(&module, "block_sum");
        launch!(gpu.stream, &block_sum, shape(blocks, 256, 0), &mut partial, &da, &(n as i32))
            .unwrap();
        let total_sum = function(&module, "total_sum");
        launch!(gpu.stream, &total_sum, shape(blocks, 256, 1024), &mut total, &da, &(n as i32))
            .unwrap();
        let want: Vec<f64> = a.chunks(256).map(|c| c.iter().map(|&x| f64::from(x)).sum()).collect();
        close(&gpu.get(&partial), &want, 1e-5);
        close(&gpu.get(&total), &[want.iter().sum()], 1e-5);

        let rows = 5;
        let cols = 200;
        let mut out = gpu.zeros::<f32>(rows * cols);
        let mut mean = gpu.zeros::<f32>(rows);
        let mut rstd = gpu.zeros::<f32>(rows);
        let norm = function(&module, "layernorm");
        let rows_of = shape(rows as u32, 128, 0);
        launch!(
            gpu.stream,
            &norm,
            rows_of,
            &mut out,
            &mut mean,
            &mut rstd,
            &da,
            &da,
            &db,
            &(cols as i32),
            &1e-5f32
        )
        .unwrap();
        let mut want = Vec::new();
        for row in a[..rows * cols].chunks(cols) {
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / cols as f64;
            let variance =
                row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / cols as f64;
            let norm = |i: usize| (f64::from(row[i]) - mean) / (variance + 1e-5).sqrt();
            want.extend((0..cols).map(|i| norm(i) * f64::from(a[i]) + f64::from(b[i])));
        }
        close(&gpu.get(&out), &want, 1e-4);

        // Halves of a warp that shuffle separately.
        let mut halves = gpu.zeros::<i32>(64);
        launch!(gpu.stream, &function(&module, "halves"), shape(1, 64, 0), &mut halves).unwrap();
        let want: Vec<i32> = (0..64).map(|i| if i % 32 < 16 { 31 } else { 191 }).collect();
        assert_eq!(gpu.get(&halves), want);
    });
}

#[test]
fn tensor_kernels_compute() {
    under(&SCHEDULES, || {
        let gpu = Gpu::new(0);
        let module = gpu.module(TENSOR, &[]);
        let m = 64;
        let n = 48;
        let k = 80;
        let a = narrow(&noise(m * k, 7));
        let b = narrow(&noise(n * k, 8));
        let da = gpu.put(&a);
        let db = gpu.put(&b);
        let a = widen(&a);
        let b = widen(&b);
        let grid = LaunchConfig { grid_dim: (n as u32 / 16, m as u32 / 32, 1), ..shape(1, 128, 0) };
        for transposed in [0, 1] {
            let mut c = gpu.zeros::<f32>(m * n);
            let rows = m as i32;
            let cols = n as i32;
            let depth = k as i32;
            let gemm = function(&module, "gemm");
            launch!(gpu.stream, &gemm, grid, &mut c, &da, &db, &rows, &cols, &depth, &transposed)
                .unwrap();
            let at = |j: usize, q: usize| if transposed == 0 { b[j * k + q] } else { b[q * n + j] };
            let product = |i: usize, j: usize| {
                (0..k).map(|q| f64::from(a[i * k + q]) * f64::from(at(j, q))).sum()
            };
            let want: Vec<f64> = (0..m * n).map(|ij| product(ij / n, ij % n)).collect();
            close(&gpu.get(&c), &want, 1e-5);
        }

        let x = noise(2 * 3 * 256, 12);
        let dx = gpu.put(&x);
        let mut out = gpu.zeros::<f32>(x.len());
        launch!(
            gpu.stream,
            &function(&module, "pipeline"),
            shape(2, 64, 2048),
            &mut out,
            &dx,
            &3,
            &1,
            &1
        )
        .unwrap();
        let want: Vec<f32> = x.chunks(256).flat_map(|tile| tile.iter().rev().copied()).collect();
        assert_eq!(gpu.get(&out), want);

        let mut sums = gpu.zeros::<f32>(64);
        launch!(
            gpu.stream,
            &function(&module, "sums"),
            shape(1, 64, 0),
            &mut sums,
            &gpu.put(&[0.5f32; 64])
        )
        .unwrap();
        assert_eq!(gpu.get(&sums), [96.0; 64]);

        let mut f = gpu.zeros::<f32>(3);
        let mut u = gpu.zeros::<u32>(2);
        let mut d = gpu.zeros::<f64>(1);
        let mut l = gpu.zeros::<u64>(1);
        let ones = gpu.put(&[1.0f32; 256]);
        launch!(
            gpu.stream,
            &function(&module, "language"),
            shape(1, 64, 0),
            &mut f,
            &mut u,
            &mut d,
            &mut l,
            &ones
        )
        .unwrap();
        assert_eq!(gpu.get(&f), [256.0, 135.0, 11.5]);
        assert_eq!(gpu.get(&u), [63 * 64, 0xc000_3f80]);
        assert_eq!(gpu.get(&d), [1.0 / 3.0]);
        assert_eq!(
            gpu.get(&l),
            [6_364_136_223_846_793_005u64.wrapping_mul(1_442_695_040_888_963_407)]
        );
    });
}

#[test]
fn a_missing_wait_for_asynchronous_copies_shows() {
    under(&[&[]], || {
        let gpu = Gpu::new(0);
        let pipeline = function(&gpu.module(TENSOR, &[]), "pipeline");
        let x = gpu.put(&noise(3 * 256, 12));
        let mut out = gpu.zeros::<f32>(3 * 256);
        launch!(gpu.stream, &pipeline, shape(1, 64, 2048), &mut out, &x, &3, &0, &1).unwrap();
        assert!(gpu.get(&out).iter().any(|v| v.is_nan()));
    });
}

// ---- compiler
// -----------------------------------------------------------------------------------------------------

#[test]
fn the_compiler_takes_headers_macros_and_architectures() {
    under(&[&[], &[("CUDASIM_CHECK", "1")]], || {
        let gpu = Gpu::new(0);
        let wide = function(&gpu.module(TENSOR, &[]), "twice");
        let half = function(&gpu.module(TENSOR, &["-DBF16"]), "twice");
        let x = gpu.put(&[1.5f32, -3.0]);
        let y = gpu.put(&narrow(&[1.5, -3.0]));
        let mut dx = gpu.zeros::<f32>(2);
        let mut dy = gpu.zeros::<u16>(2);
        launch!(gpu.stream, &wide, shape(1, 32, 0), &mut dx, &x, &2).unwrap();
        launch!(gpu.stream, &half, shape(1, 32, 0), &mut dy, &y, &2).unwrap();
        assert_eq!(gpu.get(&dx), [3.0, -6.0]);
        assert_eq!(widen(&gpu.get(&dy)), [3.0, -6.0]);

        let log =
            compile("#include \"common.cuh\"\n__global__ void f() { oops(); }", &[]).unwrap_err();
        assert!(log.contains("test.cu:2") && log.contains("oops"), "{log}");
        let log = compile("", &["--gpu-architecture=fast"]).unwrap_err();
        assert!(log.contains("--gpu-architecture"), "{log}");
        assert!(
            compile("", &["--gpu-architecture=compute_90"]).unwrap().is_empty(),
            "a cubin of no real architecture"
        );

        for (arch, runs) in [("sm_80", false), ("sm_90", true), ("sm_100", false), ("sm_90a", true)]
        {
            let cubin = compile(FAULTS, &[&format!("--gpu-architecture={arch}")]).unwrap();
            let loaded = gpu.context.load_module(Ptx::from_binary(cubin));
            assert_eq!(loaded.is_ok(), runs, "{arch} on 9.0");
        }
        let mut count = 0;
        unsafe { nvrtc::nvrtcGetNumSupportedArchs(&raw mut count).result().unwrap() };
        let mut archs = vec![0; count as usize];
        unsafe { nvrtc::nvrtcGetSupportedArchs(archs.as_mut_ptr()).result().unwrap() };
        assert!(archs.contains(&80) && archs.contains(&90));
    });
}

// ---- mistakes
// -----------------------------------------------------------------------------------------------------

/// Makes one mistake, and returns the driver's result.
fn mistake(which: &str) -> Result<(), DriverError> {
    let gpu = Gpu::new(0);
    let module = gpu.module(FAULTS, &[]);
    let mut p = gpu.zeros::<f32>(1000);
    let launched = match which {
        "guard" | "before" | "slack" | "freed" => {
            let at: i64 = match which {
                "guard" => 1024 + 7,
                "before" => -1500,
                "slack" => 1003,
                _ => 10,
            };
            let address = match which {
                "freed" => gpu.zeros::<f32>(1000).device_ptr(&gpu.stream).0, // dropped at once
                _ => p.device_ptr(&gpu.stream).0,
            };
            gpu.stream.synchronize().unwrap();
            launch!(gpu.stream, &function(&module, "write_at"), shape(4, 32, 0), &address, &at)
        }
        "failing_assert" => launch!(gpu.stream, &function(&module, which), shape(1, 64, 0), &40i32),
        "shared_overrun" => {
            launch!(gpu.stream, &function(&module, which), shape(1, 64, 256), &mut p)
        }
        "static_overrun" => {
            launch!(gpu.stream, &function(&module, which), shape(1, 64, 0), &mut p, &3i32)
        }
        "divide" => launch!(gpu.stream, &function(&module, which), shape(1, 1, 0), &mut p, &0i32),
        "lost_update" => launch!(gpu.stream, &function(&module, which), shape(2, 1, 0), &mut p),
        "pipeline" => {
            let pipeline = function(&gpu.module(TENSOR, &[]), which);
            let x = gpu.zeros::<f32>(3 * 256);
            launch!(gpu.stream, &pipeline, shape(1, 64, 2048), &mut p, &x, &3, &1, &0)
        }
        _ => launch!(gpu.stream, &function(&module, which), shape(1, 64, 0), &mut p),
    };
    launched.and_then(|()| gpu.stream.synchronize())
}

/// Checks the error code of each mistake, and what the simulator prints.
#[track_caller]
fn finds(mistakes: &[(&str, CUresult, &str)], settings: Settings) {
    if let Some(which) = role() {
        let error = mistake(&which).unwrap_err();
        println!("found {:?}", error.0);
        return;
    }
    for (which, error, text) in mistakes {
        let ended = child(settings, which).succeeded();
        assert!(ended.stdout.contains(&format!("found {error:?}")), "{which}: {ended}");
        assert!(ended.stderr.contains(text), "{which}: {ended}");
    }
}

#[test]
fn invalid_accesses_are_found() {
    use CUresult::*;
    finds(
        &[
            ("guard", CUDA_ERROR_ILLEGAL_ADDRESS, "block (1,0,0), thread (5,0,0)"),
            ("before", CUDA_ERROR_ILLEGAL_ADDRESS, "bytes before allocation"),
            ("slack", CUDA_ERROR_ILLEGAL_ADDRESS, "past the end of allocation"),
            ("freed", CUDA_ERROR_ILLEGAL_ADDRESS, "of freed allocation"),
            ("bad_barrier", CUDA_ERROR_LAUNCH_FAILED, "deadlock"),
            ("failing_assert", CUDA_ERROR_ASSERT, "threadIdx.x < n"),
            ("shared_overrun", CUDA_ERROR_ILLEGAL_ADDRESS, "past the dynamic shared memory"),
            ("static_overrun", CUDA_ERROR_ILLEGAL_ADDRESS, "out of bounds"),
            ("misaligned", CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned"),
            ("divide", CUDA_ERROR_LAUNCH_FAILED, "division by zero"),
        ],
        &[],
    );
}

#[test]
fn races_are_found() {
    use CUresult::*;
    finds(
        &[
            ("late_read", CUDA_ERROR_LAUNCH_FAILED, "race on shared memory"),
            ("missing_barrier", CUDA_ERROR_LAUNCH_FAILED, "race on shared memory"),
            ("lost_update", CUDA_ERROR_LAUNCH_FAILED, "by thread 0 of another block"),
            ("pipeline", CUDA_ERROR_LAUNCH_FAILED, "race on shared memory"),
            ("slack", CUDA_ERROR_ILLEGAL_ADDRESS, "test.cu:3"),
        ],
        &[("CUDASIM_CHECK", "1")],
    );
}

#[test]
fn launches_beyond_the_limits_are_refused() {
    under(&[&[]], || {
        let gpu = Gpu::new(0);
        let pipeline = function(&gpu.module(TENSOR, &[]), "pipeline");
        let gemm = function(&gpu.module(TENSOR, &[]), "gemm");
        let x = gpu.zeros::<f32>(256);
        let mut y = gpu.zeros::<f32>(256);
        let mut with =
            |shared| launch!(gpu.stream, &pipeline, shape(1, 64, shared), &mut y, &x, &1, &1, &1);
        let large = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        with(48 << 10).unwrap();
        assert_eq!(with(49 << 10).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_VALUE);
        pipeline.set_attribute(large, 227 << 10).unwrap();
        with(227 << 10).unwrap();
        assert!(pipeline.set_attribute(large, (227 << 10) + 1).is_err());
        let a = gpu.zeros::<u16>(1);
        let bounds = launch!(gpu.stream, &gemm, shape(1, 256, 0), &mut y, &a, &a, &0, &0, &0, &0);
        assert_eq!(bounds.unwrap_err().0, CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(gemm.occupancy_max_active_blocks_per_multiprocessor(128, 0, None).unwrap(), 16);
        gpu.stream.synchronize().unwrap();
    });
}

#[test]
fn a_host_that_touches_device_memory_crashes() {
    if role().is_none() {
        let ended = child(&[("CUDASIM_HOST_ACCESS", "0")], "body");
        assert!(
            !ended.status.success() && ended.stderr.contains("host code touched device memory"),
            "{ended}"
        );
        return;
    }
    let gpu = Gpu::new(0);
    let x = gpu.zeros::<f32>(10);
    gpu.stream.synchronize().unwrap();
    let address = x.device_ptr(&gpu.stream).0 as *const f32;
    println!("{}", unsafe { address.read() });
}

// ---- streams, events, graphs
// --------------------------------------------------------------------------------------

#[test]
fn lazy_streams_show_a_missing_wait() {
    under(&[&[("CUDASIM_STREAMS", "lazy")]], || {
        let gpu = Gpu::new(0);
        let other = gpu.context.new_stream().unwrap();
        let add = function(&gpu.module(BASIC, &[]), "vec_add");
        let x = gpu.put(&[1.0f32; 64]);
        let mut y = gpu.zeros::<f32>(64);
        launch!(gpu.stream, &add, shape(1, 64, 0), &mut y, &x, &x, &64).unwrap();
        other.join(&gpu.stream).unwrap();
        let mut pinned = unsafe { gpu.context.alloc_pinned::<f32>(64).unwrap() };
        let raw = pinned.as_mut_ptr().unwrap();
        other.memcpy_dtoh(&y, &mut pinned).unwrap();
        assert!(unsafe { *raw }.is_nan(), "nothing has waited for the copy");
        let event = other.record_event(None).unwrap();
        let mut polls = 0;
        while !event.is_complete() {
            polls += 1;
        }
        assert!(polls > 0 && unsafe { *raw } == 2.0);
    });
}

#[test]
fn graphs_replay_what_was_captured() {
    under(&[&[], &[("CUDASIM_STREAMS", "lazy")]], || {
        let gpu = Gpu::new(0);
        unsafe { gpu.context.disable_event_tracking() };
        let second = gpu.context.new_stream().unwrap();
        let add = function(&gpu.module(BASIC, &[]), "vec_add");
        let x = gpu.put(&[1.0f32; 64]);
        let mut y = gpu.zeros::<f32>(64);
        let mut z = gpu.zeros::<f32>(64);
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let none = sys::CUgraphInstantiate_flags(0);
        let adds = |stream: &Arc<CudaStream>, to: &mut CudaSlice<f32>| {
            let from = to.clone_view();
            launch!(stream, &add, shape(1, 64, 0), to, &from, &x, &64)
        };

        // Two streams: z += x and y += x run concurrently, and both belong to the graph.
        gpu.stream.synchronize().unwrap();
        gpu.stream.begin_capture(relaxed).unwrap();
        second.join(&gpu.stream).unwrap();
        adds(&gpu.stream, &mut y).unwrap();
        adds(&second, &mut z).unwrap();
        gpu.stream.join(&second).unwrap();
        let graph = gpu.stream.end_capture(none).unwrap().unwrap();
        assert_eq!(gpu.get(&y), [0.0; 64], "captured, not run");
        for _ in 0..3 {
            graph.launch().unwrap();
        }
        assert_eq!(gpu.get(&y), [3.0; 64]);
        assert_eq!(gpu.get(&z), [3.0; 64]);

        // A call that a capture refuses ends it; the stream is usable afterwards.
        gpu.stream.begin_capture(relaxed).unwrap();
        assert_eq!(
            gpu.stream.synchronize().unwrap_err().0,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        );
        let ended = gpu.stream.end_capture(none).err().unwrap();
        assert_eq!(ended.0, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        gpu.stream.begin_capture(relaxed).unwrap();
        second.join(&gpu.stream).unwrap();
        adds(&second, &mut z).unwrap();
        let ended = gpu.stream.end_capture(none).err().unwrap();
        assert_eq!(ended.0, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        adds(&gpu.stream, &mut y).unwrap();
        assert_eq!(gpu.get(&y), [4.0; 64]);
    });
}

/// Device memory as a plain address, for kernels that read and write one array.
trait CloneView {
    fn clone_view(&self) -> u64;
}

impl CloneView for CudaSlice<f32> {
    fn clone_view(&self) -> u64 {
        self.device_ptr(self.stream()).0
    }
}

// ---- devices, memory, failures
// ------------------------------------------------------------------------------------

fn devices() -> Result<Vec<String>, DriverError> {
    result::init()?;
    let bus = |ordinal: i32| {
        let mut text = [0; 16];
        unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 16, ordinal).result().unwrap() };
        let text: Vec<u8> = text.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        String::from_utf8(text).unwrap()[5..7].to_owned()
    };
    Ok((0..CudaContext::device_count()?).map(bus).collect())
}

/// The uuid of the first device, in the form that `CUDA_VISIBLE_DEVICES` takes.
fn first_uuid() -> String {
    result::init().unwrap();
    let uuid = result::device::get_uuid(result::device::get(0).unwrap()).unwrap();
    let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[test]
fn the_visible_devices_are_those_asked_for() {
    match role().as_deref() {
        Some("first") => return println!("first {}", first_uuid()),
        Some(_) => return println!("sees {:?}", devices().map_err(|e| e.0)),
        None => {}
    }
    let first = child(&[], "first").succeeded().stdout;
    let first = first.lines().find_map(|line| line.strip_prefix("first ")).unwrap();
    let none = "Err(CUDA_ERROR_NO_DEVICE)";
    for (visible, sees) in [
        (None, r#"Ok(["01", "02", "03", "04"])"#),
        (Some("2,0"), r#"Ok(["03", "01"])"#),
        (Some("1,9,0"), r#"Ok(["02"])"#),
        (Some(&*format!("GPU-c3,{first}")), r#"Ok(["04", "01"])"#),
        (Some(""), none),
        (Some("-1"), none),
        (Some("1,1"), none),
    ] {
        let mut settings = vec![("CUDASIM_DEVICES", "4")];
        settings.extend(visible.map(|list| ("CUDA_VISIBLE_DEVICES", list)));
        let ended = child(&settings, "count").succeeded();
        assert!(ended.stdout.contains(&format!("sees {sees}\n")), "{visible:?}: {ended}");
    }
}

#[test]
fn devices_have_memories_of_their_own() {
    under(&[&[("CUDASIM_DEVICES", "2"), ("CUDASIM_MEM", "64M")]], || {
        let one = Gpu::new(0);
        let two = Gpu::new(1);
        assert_ne!(one.context.uuid().unwrap().bytes, two.context.uuid().unwrap().bytes);
        let x = one.put(&[4.0f32; 100]);
        let mut y = two.zeros::<f32>(100);
        one.stream.synchronize().unwrap();
        two.stream.memcpy_dtod(&x, &mut y).unwrap();
        assert_eq!(two.get(&y), [4.0; 100]);

        one.context.bind_to_thread().unwrap();
        let (free, total) = one.context.mem_get_info().unwrap();
        assert_eq!(total, 64 << 20);
        let fresh = unsafe { one.stream.alloc::<f32>(100).unwrap() };
        assert!(one.get(&fresh).iter().all(|v| v.is_nan()), "fresh memory is poison");
        let most = unsafe { one.stream.alloc::<u8>(free / 2 + 4096).unwrap() };
        let refused = unsafe { one.stream.alloc::<u8>(free / 2) }.unwrap_err();
        assert_eq!(refused.0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        drop(most);
        unsafe { one.stream.alloc::<u8>(free / 2).unwrap() };

        let mut base = 0;
        let mut size = 0;
        let mut ordinal = -1i32;
        let inside = y.device_ptr(&two.stream).0 + 8;
        let device = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        unsafe {
            sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, inside).result().unwrap();
            sys::cuPointerGetAttribute((&raw mut ordinal).cast(), device, inside).result().unwrap();
        }
        assert_eq!((base, size, ordinal), (inside - 8, 400, 1));
    });
}

#[test]
fn injected_failures_happen() {
    if let Some(which) = role() {
        let gpu = Gpu::new(0);
        let failed = match which.as_str() {
            "version" => {
                let mut version = 0;
                unsafe { sys::cuDriverGetVersion(&raw mut version).result().unwrap() };
                assert_eq!(version, 11040);
                return;
            }
            "compile" => compile(FAULTS, &[]).unwrap_err(),
            "nolt" => format!("{:?}", cudarc::cublaslt::result::create_handle().unwrap_err().0),
            "alloc" => {
                gpu.zeros::<f32>(1);
                format!("{:?}", gpu.stream.alloc_zeros::<f32>(1).unwrap_err().0)
            }
            _ => {
                let mut p = gpu.zeros::<f32>(64);
                let fine = function(&gpu.module(FAULTS, &[]), "fine");
                launch!(gpu.stream, &fine, shape(1, 64, 0), &mut p).unwrap();
                gpu.stream.synchronize().unwrap();
                let launched = launch!(gpu.stream, &fine, shape(1, 64, 0), &mut p);
                format!("{:?}", launched.and_then(|()| gpu.stream.synchronize()).unwrap_err().0)
            }
        };
        println!("failed: {failed}");
        return;
    }
    for (role, fail, says) in [
        ("alloc", "alloc:2", "failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ("launch", "launch:2", "failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("compile", "alloc:99,compile", "failed: test.cu(1): error: failure injected"),
        ("nolt", "nolt", "failed: CUBLAS_STATUS_NOT_INITIALIZED"),
    ] {
        let ended = child(&[("CUDASIM_FAIL", fail)], role).succeeded();
        assert!(ended.stdout.contains(says), "{role}: {ended}");
    }
    child(&[("CUDASIM_DRIVER_VERSION", "11040")], "version").succeeded();
}

// ---- memory and events of other processes
// -----------------------------------------------------------------------------------------

/// The floats of each of the two processes, half of them for each of two blocks.
const EXCHANGED: usize = 128;
const ROUNDS: u32 = 3;
const BYTES: usize = 2 * EXCHANGED * size_of::<f32>();
const OPEN: u32 = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`.
const SHARED_EVENT: u32 = 2 | 4;

fn to_hex(handle: [c_char; 64]) -> String {
    handle.iter().map(|byte| format!("{:02x}", *byte as u8)).collect()
}

/// Reads a handle from an environment variable.
fn handle_in(variable: &str) -> [c_char; 64] {
    let hex = std::env::var(variable).unwrap();
    std::array::from_fn(|i| u8::from_str_radix(&hex[2 * i..][..2], 16).unwrap() as c_char)
}

fn export(pointer: u64) -> Result<[c_char; 64], DriverError> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    unsafe { sys::cuIpcGetMemHandle(&raw mut handle, pointer).result()? };
    Ok(handle.reserved)
}

fn import(handle: [c_char; 64]) -> Result<u64, DriverError> {
    let mut pointer = 0;
    let handle = sys::CUipcMemHandle { reserved: handle };
    unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, OPEN).result()? };
    Ok(pointer)
}

fn event(flags: u32) -> Result<sys::CUevent, DriverError> {
    let mut event = null_mut();
    unsafe { sys::cuEventCreate(&raw mut event, flags).result()? };
    Ok(event)
}

fn export_event(event: sys::CUevent) -> Result<[c_char; 64], DriverError> {
    let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
    unsafe { sys::cuIpcGetEventHandle(&raw mut handle, event).result()? };
    Ok(handle.reserved)
}

fn import_event(handle: [c_char; 64]) -> Result<sys::CUevent, DriverError> {
    let mut event = null_mut();
    let handle = sys::CUipcEventHandle { reserved: handle };
    unsafe { sys::cuIpcOpenEventHandle(&raw mut event, handle).result()? };
    Ok(event)
}

/// Copies to the host after everything in the stream.
fn read(gpu: &Gpu, pointer: u64, len: usize) -> Vec<f32> {
    let mut values = vec![0.0f32; len];
    unsafe { result::memcpy_dtoh_async(&mut values, pointer, gpu.stream.cu_stream()).unwrap() };
    gpu.stream.synchronize().unwrap();
    values
}

fn fill(gpu: &Gpu, pointer: u64, value: u32, words: usize) {
    let stream = gpu.stream.cu_stream();
    unsafe { sys::cuMemsetD32Async(pointer, value, words, stream).result().unwrap() };
}

/// Launches all rounds of one of the two processes. Returns its sums, which may not be there yet.
/// `exchange` lives on until then, as the driver waits for the kernels of a module that it unloads.
fn launch_rounds(
    gpu: &Gpu,
    exchange: &CudaFunction,
    memory: u64,
    flags: u64,
    is_first: bool,
) -> CudaSlice<f32> {
    let floats = [memory, memory + BYTES as u64 / 2];
    let flags = [flags, flags + 8];
    let mut sums = gpu.zeros::<f32>(EXCHANGED);
    let own = usize::from(!is_first);
    for round in 1..=ROUNDS {
        launch!(
            gpu.stream,
            exchange,
            shape(2, EXCHANGED as u32 / 2, 0),
            &floats[own],
            &floats[1 - own],
            &flags[own],
            &flags[1 - own],
            &mut sums,
            &round
        )
        .unwrap();
    }
    sums
}

/// Runs a kernel whose threads wait for later ones, on a stream that has nothing else to do.
fn wait_within_block(gpu: &Gpu, module: &Arc<CudaModule>) {
    let gpu = Gpu { context: gpu.context.clone(), stream: gpu.context.new_stream().unwrap() };
    let mut p = gpu.zeros::<f32>(64);
    let wait = function(module, "wait_within_block");
    launch!(gpu.stream, &wait, shape(1, 64, 0), &mut p).unwrap();
    assert_eq!(gpu.get(&p), [1.0; 64]);
}

/// Starts the calling test again, in the role of the process that opens handles.
fn importer(role: &str, handles: &[(&str, [c_char; 64])]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&*test_name(), "--exact", "--nocapture"]).env("CUDASIM_TEST_ROLE", role);
    command.envs(handles.iter().map(|(name, handle)| (name, to_hex(*handle))));
    command
}

#[track_caller]
fn refused<T>(result: Result<T, DriverError>, error: CUresult) {
    assert_eq!(result.err().map(|e| e.0), Some(error));
}

/// Makes memory and events, and works on them together with a process on another device.
fn export_and_exchange() {
    use CUresult::*;
    let gpu = Gpu::new(0);
    let memory = unsafe { result::malloc_sync(BYTES).unwrap() };
    let flags = unsafe { result::malloc_sync(4 * 4).unwrap() };
    let freed = unsafe { result::malloc_sync(1000).unwrap() };
    fill(&gpu, flags, 0, 4);
    fill(&gpu, memory, 1f32.to_bits(), EXCHANGED);
    gpu.stream.synchronize().unwrap();
    let freed_handle = export(freed).unwrap();
    unsafe { result::free_sync(freed).unwrap() };
    assert_eq!(read(&gpu, memory, EXCHANGED), [1.0; EXCHANGED]);
    let handle = export(memory + 8).unwrap();
    assert_eq!(handle, export(memory).unwrap(), "a handle names the whole allocation");
    assert_eq!(read(&gpu, memory, EXCHANGED), [1.0; EXCHANGED], "its contents stay");

    refused(import(handle), CUDA_ERROR_INVALID_CONTEXT);
    refused(export(freed), CUDA_ERROR_INVALID_VALUE);
    let pooled = gpu.zeros::<f32>(64);
    refused(export(pooled.device_ptr(&gpu.stream).0), CUDA_ERROR_INVALID_VALUE);
    refused(export_event(event(2).unwrap()), CUDA_ERROR_INVALID_HANDLE);
    refused(event(4), CUDA_ERROR_INVALID_VALUE);
    let there = event(SHARED_EVENT).unwrap();
    let back = event(SHARED_EVENT).unwrap();
    refused(import_event(export_event(there).unwrap()), CUDA_ERROR_INVALID_CONTEXT);

    // The other process must wait for this fill, and kernels are launched before it exists.
    let second = memory + BYTES as u64 / 2;
    fill(&gpu, second, 2f32.to_bits(), EXCHANGED);
    unsafe { sys::cuEventRecord(there, gpu.stream.cu_stream()).result().unwrap() };
    let module = gpu.module(EXCHANGE, &[]);
    let exchange = function(&module, "exchange");
    let sums = launch_rounds(&gpu, &exchange, memory, flags, true);
    wait_within_block(&gpu, &module);
    let handles = [
        ("MEMORY", handle),
        ("FLAGS", export(flags).unwrap()),
        ("FREED", freed_handle),
        ("THERE", export_event(there).unwrap()),
        ("BACK", export_event(back).unwrap()),
    ];
    let mut other = importer("importer", &handles)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(gpu.get(&sums), [29.0; EXCHANGED]);

    // Its event, which it has recorded behind work that it may not have done.
    let mut lines = BufReader::new(other.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.by_ref().any(|line| line.contains("recorded")));
    unsafe { sys::cuStreamWaitEvent(gpu.stream.cu_stream(), back, 0).result().unwrap() };
    assert_eq!(read(&gpu, second, EXCHANGED), [9.0; EXCHANGED]);
    unsafe { sys::cuEventSynchronize(back).result().unwrap() };
    unsafe { sys::cuEventQuery(back).result().unwrap() };

    assert!(lines.by_ref().any(|line| line.contains("reads")));
    unsafe { result::free_sync(memory).unwrap() };
    other.stdin.take().unwrap().write_all(b"freed\n").unwrap();
    let rest: Vec<String> = lines.collect();
    assert!(other.wait().unwrap().success(), "{rest:?}");
}

/// Opens the memory and the events of [`export_and_exchange`].
fn import_and_exchange() {
    use CUresult::*;
    let gpu = Gpu::new(1);
    let there = import_event(handle_in("THERE")).unwrap();
    let back = import_event(handle_in("BACK")).unwrap();
    refused(export_event(back), CUDA_ERROR_INVALID_HANDLE);
    refused(import(handle_in("FREED")), CUDA_ERROR_INVALID_HANDLE);
    refused(import(handle_in("BACK")), CUDA_ERROR_INVALID_VALUE);

    let memory = import(handle_in("MEMORY")).unwrap();
    let flags = import(handle_in("FLAGS")).unwrap();
    assert_eq!(import(handle_in("MEMORY")).unwrap(), memory, "opened twice");
    refused(export(memory), CUDA_ERROR_INVALID_VALUE);
    refused(unsafe { result::free_sync(memory) }, CUDA_ERROR_INVALID_VALUE);
    let mut base = 0;
    let mut size = 0;
    let mut ordinal = -1i32;
    let device = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    unsafe {
        let inside = memory + 8;
        sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, inside).result().unwrap();
        sys::cuPointerGetAttribute((&raw mut ordinal).cast(), device, inside).result().unwrap();
    }
    assert_eq!((base, size, ordinal), (memory, BYTES, 0));

    let second = memory + BYTES as u64 / 2;
    unsafe { sys::cuStreamWaitEvent(gpu.stream.cu_stream(), there, 0).result().unwrap() };
    assert_eq!(read(&gpu, second, EXCHANGED), [2.0; EXCHANGED]);
    let exchange = function(&gpu.module(EXCHANGE, &[]), "exchange");
    let sums = launch_rounds(&gpu, &exchange, memory, flags, false);
    assert_eq!(gpu.get(&sums), [29.0; EXCHANGED]);

    fill(&gpu, second, 9f32.to_bits(), EXCHANGED);
    unsafe { sys::cuEventRecord(back, gpu.stream.cu_stream()).result().unwrap() };
    println!("recorded");
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(read(&gpu, second, EXCHANGED), [9.0; EXCHANGED]);
    println!("reads");
    std::io::stdin().lines().next().unwrap().unwrap();
    assert!(read(&gpu, memory, EXCHANGED).iter().all(|v| v.is_nan()), "freed by its process");
    unsafe {
        sys::cuIpcCloseMemHandle(memory).result().unwrap();
        sys::cuIpcCloseMemHandle(memory).result().unwrap();
        let closed = sys::cuIpcCloseMemHandle(memory).result();
        refused(closed, CUDA_ERROR_INVALID_VALUE);
        sys::cuIpcCloseMemHandle(flags).result().unwrap();
        let read = sys::cuMemsetD32_v2(flags, 0, 1).result();
        refused(read, CUDA_ERROR_INVALID_VALUE);
        sys::cuEventDestroy_v2(there).result().unwrap();
    }
}

#[test]
fn processes_share_memory_and_events() {
    match role().as_deref() {
        Some("importer") => return import_and_exchange(),
        Some(_) => return export_and_exchange(),
        None => {}
    }
    for settings in SCHEDULES {
        let settings = [settings, &[("CUDASIM_DEVICES", "2")]].concat();
        let ended = child(&settings, "exporter").succeeded();
        assert!(ended.stderr.contains("of 1024 bytes, which process"), "{settings:?}: {ended}");
    }
}

/// Opens memory, or fails to, and writes behind its end.
fn import_and_overrun() {
    let gpu = Gpu::new(0);
    let overrun = import(handle_in("MEMORY")).and_then(|memory| {
        let write_at = function(&gpu.module(FAULTS, &[]), "write_at");
        let behind = (BYTES / size_of::<f32>() + 7) as i64;
        launch!(gpu.stream, &write_at, shape(2, 32, 0), &memory, &behind)?;
        gpu.stream.synchronize()
    });
    println!("found {:?}", overrun.unwrap_err().0);
}

#[test]
fn memory_that_a_process_cannot_open_is_refused() {
    match role().as_deref() {
        Some("importer") => return import_and_overrun(),
        Some(_) => {}
        None => {
            child(&[("CUDASIM_DEVICES", "2")], "exporter").succeeded();
            return;
        }
    }
    let gpu = Gpu::new(0);
    let memory = unsafe { result::malloc_sync(BYTES).unwrap() };
    let handles = [("MEMORY", export(memory).unwrap())];
    let mut other = handles[0].1;
    other[48] ^= 1;
    for (settings, handles, error, text) in [
        (("CUDASIM_FAIL", "ipc"), handles, "MAP_FAILED", ""),
        (("CUDA_VISIBLE_DEVICES", "1"), handles, "INVALID_DEVICE", "does not see device 0"),
        (("CUDASIM_CHECK", "0"), handles, "ILLEGAL_ADDRESS", "past the end of allocation"),
        (("CUDASIM_CHECK", "1"), handles, "ILLEGAL_ADDRESS", "1024 bytes, which is allocation #"),
        (("CUDASIM_ALIGN", "4"), [("MEMORY", other)], "INVALID_VALUE", "of another host"),
    ] {
        let ended = importer("importer", &handles).env(settings.0, settings.1).output().unwrap();
        let stdout = String::from_utf8_lossy(&ended.stdout);
        let stderr = String::from_utf8_lossy(&ended.stderr);
        let found = format!("found CUDA_ERROR_{error}\n");
        assert!(stdout.contains(&found) && stderr.contains(text), "{error}: {stdout}{stderr}");
    }
    unsafe { result::free_sync(memory).unwrap() };
    drop(gpu);
}

#[test]
fn devices_without_peer_access_cannot_open_memory() {
    match role().as_deref() {
        Some("importer") => {
            let _gpu = Gpu::new(1);
            let refused = import(handle_in("MEMORY")).unwrap_err().0;
            return println!("found {refused:?}");
        }
        Some(_) => {}
        None => {
            child(&[("CUDASIM_DEVICES", "2"), ("CUDASIM_PEERS", "0")], "exporter").succeeded();
            return;
        }
    }
    let _gpu = Gpu::new(0);
    let mut yes = -1;
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut yes, 0, 1).result().unwrap() };
    assert_eq!(yes, 0);
    let memory = unsafe { result::malloc_sync(BYTES).unwrap() };
    let ended = importer("importer", &[("MEMORY", export(memory).unwrap())]).output().unwrap();
    let stdout = String::from_utf8_lossy(&ended.stdout);
    assert!(stdout.contains("found CUDA_ERROR_PEER_ACCESS_UNSUPPORTED\n"), "{stdout}");
}

/// The same on two devices of one process.
#[test]
fn devices_exchange_through_the_memory_of_a_peer() {
    let strict = ("CUDASIM_HOST_ACCESS", "0");
    let lazy = ("CUDASIM_STREAMS", "lazy");
    let Some(role) = role() else {
        for schedule in [&[strict][..], &[strict, lazy], &[lazy]] {
            let settings = [schedule, &[("CUDASIM_DEVICES", "2")]].concat();
            child(&settings, "peers").succeeded();
        }
        let ended = child(&[("CUDASIM_DEVICES", "2"), strict], "strangers").succeeded();
        assert!(ended.stderr.contains("byte 0 of allocation #1"), "{ended}");
        return;
    };
    let gpu = Gpu::new(0);
    let memory = unsafe { result::malloc_sync(BYTES).unwrap() };
    let flags = unsafe { result::malloc_sync(4 * 4).unwrap() };
    fill(&gpu, flags, 0, 4);
    fill(&gpu, memory, 1f32.to_bits(), EXCHANGED);
    fill(&gpu, memory + BYTES as u64 / 2, 2f32.to_bits(), EXCHANGED);
    gpu.stream.synchronize().unwrap();
    let peer = Gpu::new(1);
    if role == "peers" {
        let enable = || unsafe { sys::cuCtxEnablePeerAccess(gpu.context.cu_ctx(), 0).result() };
        enable().unwrap();
        refused(enable(), CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    }
    if role == "strangers" {
        let fine = function(&peer.module(FAULTS, &[]), "fine");
        let ended = launch!(peer.stream, &fine, shape(1, 64, 0), &memory);
        let ended = ended.and_then(|()| peer.stream.synchronize());
        return refused(ended, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    let there = function(&peer.module(EXCHANGE, &[]), "exchange");
    let theirs = launch_rounds(&peer, &there, memory, flags, false);
    gpu.context.bind_to_thread().unwrap();
    let here = function(&gpu.module(EXCHANGE, &[]), "exchange");
    let ours = launch_rounds(&gpu, &here, memory, flags, true);
    assert_eq!(gpu.get(&ours), [29.0; EXCHANGED]);
    assert_eq!(peer.get(&theirs), [29.0; EXCHANGED]);
}

#[test]
fn threads_wait_for_later_ones() {
    under(&SCHEDULES, || {
        let gpu = Gpu::new(0);
        wait_within_block(&gpu, &gpu.module(EXCHANGE, &[]));
    });
}

// ---- cuBLASLt
// -----------------------------------------------------------------------------------------------------

/// An element type of device matrices.
trait Element: cudarc::driver::DeviceRepr + Copy {
    const TYPE: lt::cudaDataType_t;
    /// The relative distance of neighbouring values.
    const STEP: f64;
    fn from_f32(v: f32) -> Self;
    fn value(self) -> f32;
}

impl Element for f32 {
    const TYPE: lt::cudaDataType_t = lt::cudaDataType_t::CUDA_R_32F;
    const STEP: f64 = f32::EPSILON as f64;
    fn from_f32(v: f32) -> Self {
        v
    }
    fn value(self) -> f32 {
        self
    }
}

impl Element for u16 {
    const TYPE: lt::cudaDataType_t = lt::cudaDataType_t::CUDA_R_16BF;
    const STEP: f64 = 1.0 / 128.0;
    fn from_f32(v: f32) -> Self {
        bf16::from_f32(v).to_bits()
    }
    fn value(self) -> f32 {
        bf16::from_bits(self).to_f32()
    }
}

/// A matmul `d = epilogue(alpha op(a) op(b) + beta c)`, column-major.
#[derive(Clone, Copy, Debug)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    ta: bool,
    tb: bool,
    beta: f32,
    epilogue: lt::cublasLtEpilogue_t,
    compute: lt::cublasComputeType_t,
}

/// The operands and the result of a matmul, from the device or in f64.
struct Results<T> {
    d: Vec<T>,
    bias: Vec<T>,
    aux: Vec<T>,
}

impl Product {
    fn lda(self) -> usize {
        if self.ta { self.k } else { self.m }
    }

    fn ldb(self) -> usize {
        if self.tb { self.n } else { self.k }
    }

    fn ldaux(self) -> usize {
        self.m.next_multiple_of(8)
    }

    fn bias_len(self) -> usize {
        if self.epilogue == lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB {
            self.n
        } else {
            self.m
        }
    }

    /// Runs the matmul on the device, with the given bias and auxiliary matrix.
    fn run<I: Element, O: Element>(
        self,
        gpu: &Gpu,
        a: &[I],
        b: &[I],
        c: &[O],
        bias: &[O],
        aux: &[O],
    ) -> Results<O> {
        use lt::cublasLtMatmulDescAttributes_t::*;
        let da = gpu.put(a);
        let db = gpu.put(b);
        let dbias = gpu.put(bias);
        let daux = gpu.put(aux);
        let dd = if self.beta == 0.0 {
            unsafe { gpu.stream.alloc::<O>(c.len()).unwrap() }
        } else {
            gpu.put(c)
        };
        let workspace = unsafe { gpu.stream.alloc::<u8>(1 << 16).unwrap() };
        let address = |p: &CudaSlice<O>| p.device_ptr(&gpu.stream).0;
        let a_at = da.device_ptr(&gpu.stream).0 as *const c_void;
        let b_at = db.device_ptr(&gpu.stream).0 as *const c_void;
        let d_at = address(&dd) as *mut c_void;
        let work_at = workspace.device_ptr(&gpu.stream).0 as *mut c_void;
        unsafe {
            let mut handle = null_mut();
            let mut desc = null_mut();
            let mut wish = null_mut();
            lt::cublasLtCreate(&raw mut handle).result().unwrap();
            let scale = lt::cudaDataType_t::CUDA_R_32F;
            lt::cublasLtMatmulDescCreate(&raw mut desc, self.compute, scale).result().unwrap();
            let set = |attribute, value: *const c_void, size| {
                lt::cublasLtMatmulDescSetAttribute(desc, attribute, value, size).result().unwrap();
            };
            for (attribute, on) in
                [(CUBLASLT_MATMUL_DESC_TRANSA, self.ta), (CUBLASLT_MATMUL_DESC_TRANSB, self.tb)]
            {
                let on = i32::from(on);
                set(attribute, (&raw const on).cast(), 4);
            }
            set(CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const self.epilogue).cast(), 4);
            let bias_at = address(&dbias);
            let bias_stride = self.bias_len() as i64;
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const bias_at).cast(), 8);
            set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, (&raw const bias_stride).cast(), 8);
            let aux_at = address(&daux);
            let ld = self.ldaux() as i64;
            let aux_stride = (self.ldaux() * self.n) as i64;
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (&raw const aux_at).cast(), 8);
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (&raw const ld).cast(), 8);
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, (&raw const aux_stride).cast(), 8);
            let layout = |kind, rows: usize, cols: usize| {
                use lt::cublasLtMatrixLayoutAttribute_t::*;
                let mut layout = null_mut();
                lt::cublasLtMatrixLayoutCreate(
                    &raw mut layout,
                    kind,
                    rows as u64,
                    cols as u64,
                    rows as i64,
                )
                .result()
                .unwrap();
                let batch = self.batch as i32;
                let stride = (rows * cols) as i64;
                let count = CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                let offset = CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                lt::cublasLtMatrixLayoutSetAttribute(layout, count, (&raw const batch).cast(), 4)
                    .result()
                    .unwrap();
                lt::cublasLtMatrixLayoutSetAttribute(layout, offset, (&raw const stride).cast(), 8)
                    .result()
                    .unwrap();
                layout
            };
            let la = layout(I::TYPE, self.lda(), self.m * self.k / self.lda());
            let lb = layout(I::TYPE, self.ldb(), self.n * self.k / self.ldb());
            let ld = layout(O::TYPE, self.m, self.n);
            lt::cublasLtMatmulPreferenceCreate(&raw mut wish).result().unwrap();
            let most = workspace.len() as u64;
            let attribute =
                lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            lt::cublasLtMatmulPreferenceSetAttribute(wish, attribute, (&raw const most).cast(), 8)
                .result()
                .unwrap();
            let mut found = std::mem::zeroed::<lt::cublasLtMatmulHeuristicResult_t>();
            let mut count = 0;
            lt::cublasLtMatmulAlgoGetHeuristic(
                handle,
                desc,
                la,
                lb,
                ld,
                ld,
                wish,
                1,
                &raw mut found,
                &raw mut count,
            )
            .result()
            .unwrap();
            assert!(count == 1 && found.workspaceSize <= workspace.len());
            let alpha = 0.5f32;
            let beta = self.beta;
            lt::cublasLtMatmul(
                handle,
                desc,
                (&raw const alpha).cast(),
                a_at,
                la,
                b_at,
                lb,
                (&raw const beta).cast(),
                d_at,
                ld,
                d_at,
                ld,
                &raw const found.algo,
                work_at,
                workspace.len(),
                gpu.stream.cu_stream().cast(),
            )
            .result()
            .unwrap();
            for layout in [la, lb, ld] {
                lt::cublasLtMatrixLayoutDestroy(layout).result().unwrap();
            }
            lt::cublasLtMatmulPreferenceDestroy(wish).result().unwrap();
            lt::cublasLtMatmulDescDestroy(desc).result().unwrap();
            lt::cublasLtDestroy(handle).result().unwrap();
        }
        Results { d: gpu.get(&dd), bias: gpu.get(&dbias), aux: gpu.get(&daux) }
    }

    /// Computes the same in f64.
    fn reference(self, a: &[f64], b: &[f64], c: &[f64], bias: &[f64], aux: &[f64]) -> Results<f64> {
        use lt::cublasLtEpilogue_t::*;
        let Self { m, n, k, epilogue, .. } = self;
        let mut out = Results { d: c.to_vec(), bias: bias.to_vec(), aux: aux.to_vec() };
        let inner = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        let gelu = |x: f64| 0.5 * x * (1.0 + inner(x).tanh());
        let slope = |x: f64| (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5;
        for t in 0..self.batch {
            let opa =
                |i: usize, q: usize| a[t * m * k + if self.ta { i * k + q } else { q * m + i }];
            let opb =
                |q: usize, j: usize| b[t * n * k + if self.tb { q * n + j } else { j * k + q }];
            let b0 = t * self.bias_len();
            let x0 = t * self.ldaux() * n;
            if [CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADB].contains(&epilogue) {
                out.bias[b0..][..self.bias_len()].fill(0.0);
            }
            for j in 0..n {
                for i in 0..m {
                    let at = t * m * n + j * m + i;
                    let aux_at = x0 + j * self.ldaux() + i;
                    let sum: f64 = (0..k).map(|q| opa(i, q) * opb(q, j)).sum();
                    let mut v = 0.5 * sum
                        + if self.beta == 0.0 { 0.0 } else { f64::from(self.beta) * c[at] };
                    if [CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS].contains(&epilogue)
                    {
                        v += bias[b0 + i];
                    }
                    match epilogue {
                        CUBLASLT_EPILOGUE_GELU_AUX | CUBLASLT_EPILOGUE_GELU_AUX_BIAS => {
                            out.aux[aux_at] = v;
                            v = gelu(v);
                        }
                        CUBLASLT_EPILOGUE_DGELU => v *= slope(aux[aux_at]),
                        CUBLASLT_EPILOGUE_DGELU_BGRAD => {
                            v *= slope(aux[aux_at]);
                            out.bias[b0 + i] += v;
                        }
                        _ => {}
                    }
                    out.d[at] = v;
                }
            }
            if epilogue == CUBLASLT_EPILOGUE_BGRADB {
                for j in 0..n {
                    out.bias[b0 + j] = (0..k).map(|q| opb(q, j)).sum();
                }
            }
        }
        out
    }

    fn check<I: Element, O: Element>(self, gpu: &Gpu) {
        let some = |len: usize, seed: u32| noise(len, seed);
        let from = |v: Vec<f32>| v.into_iter().map(I::from_f32).collect::<Vec<I>>();
        let into = |v: Vec<f32>| v.into_iter().map(O::from_f32).collect::<Vec<O>>();
        let Self { m, n, k, batch, .. } = self;
        let a = from(some(batch * m * k, 1));
        let b = from(some(batch * n * k, 2));
        let c = into(some(batch * m * n, 3));
        let bias = into(some(batch * self.bias_len(), 4));
        let aux = into(some(batch * self.ldaux() * n, 5));
        let got = self.run(gpu, &a, &b, &c, &bias, &aux);
        // Reduced precision rounds the mantissas of operands to the nearest.
        let lost = match self.compute {
            lt::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32 => 13,
            lt::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_16BF => 16,
            _ => 0,
        };
        let rounded = |x: f32| f32::from_bits((x.to_bits() + (1 << lost >> 1)) >> lost << lost);
        let exact_in =
            |v: &[I]| v.iter().map(|&x| f64::from(rounded(x.value()))).collect::<Vec<f64>>();
        let exact = |v: &[O]| v.iter().map(|&x| f64::from(x.value())).collect::<Vec<f64>>();
        let want =
            self.reference(&exact_in(&a), &exact_in(&b), &exact(&c), &exact(&bias), &exact(&aux));
        let values = |v: &[O]| v.iter().map(|x| x.value()).collect::<Vec<f32>>();
        // Half a rounding step, plus the error of the sums.
        let tolerance = 0.5 * O::STEP + 2e-6;
        close(&values(&got.d), &want.d, tolerance);
        close(&values(&got.bias), &want.bias, tolerance);
        close(&values(&got.aux), &want.aux, tolerance);
    }
}

#[test]
fn matrix_products_and_epilogues_match_f64() {
    under(&[&[], &[("CUDASIM_STREAMS", "lazy"), ("CUDASIM_HOST_ACCESS", "0")]], || {
        use lt::cublasLtEpilogue_t::*;
        let gpu = Gpu::new(0);
        use lt::cublasComputeType_t::*;
        let compute = CUBLAS_COMPUTE_32F;
        let epilogues = [
            CUBLASLT_EPILOGUE_DEFAULT,
            CUBLASLT_EPILOGUE_BIAS,
            CUBLASLT_EPILOGUE_GELU_AUX,
            CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            CUBLASLT_EPILOGUE_DGELU,
            CUBLASLT_EPILOGUE_DGELU_BGRAD,
            CUBLASLT_EPILOGUE_BGRADB,
        ];
        for (i, epilogue) in epilogues.into_iter().enumerate() {
            let beta = if i % 2 == 0 { 0.0 } else { 0.75 };
            let product = Product {
                m: 21,
                n: 13,
                k: 17,
                batch: 2,
                ta: true,
                tb: false,
                beta,
                epilogue,
                compute,
            };
            product.check::<f32, f32>(&gpu);
            product.check::<u16, u16>(&gpu);
            product.check::<u16, f32>(&gpu);
        }
        let epilogue = CUBLASLT_EPILOGUE_DEFAULT;
        for (m, n, k) in [(1, 1, 1), (16, 6, 8), (33, 40, 5), (5, 1, 70)] {
            for transposed in 0..4 {
                let ta = transposed & 1 == 1;
                let tb = transposed & 2 == 2;
                Product { m, n, k, batch: 1, ta, tb, beta: 1.0, epilogue, compute }
                    .check::<f32, f32>(&gpu);
                Product { m, n, k, batch: 3, ta, tb, beta: 0.0, epilogue, compute }
                    .check::<u16, f32>(&gpu);
                for compute in [CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_FAST_16BF] {
                    Product { m, n, k, batch: 2, ta, tb, beta: 0.5, epilogue, compute }
                        .check::<f32, f32>(&gpu);
                }
            }
        }
    });
}

// ---- speed
// --------------------------------------------------------------------------------------------------------

/// Prints the speed of the simulator: `cargo test --release --test gpu -- --ignored --nocapture
/// speed`.
#[test]
#[ignore = "a measurement"]
fn speed() {
    if role().is_none() {
        print!("{}", child(&[], "body").succeeded().stdout);
        return;
    }
    let gpu = Gpu::new(0);
    let seconds = |work: &mut dyn FnMut()| {
        work();
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    let start = Instant::now();
    let basic = gpu.module(BASIC, &[]);
    let tensor = gpu.module(TENSOR, &[]);
    println!("two modules compiled and loaded: {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    let x = gpu.zeros::<f32>(1 << 20);
    let mut y = gpu.zeros::<f32>(1 << 20);
    let add = function(&basic, "vec_add");
    let launches = seconds(&mut || {
        for _ in 0..10_000 {
            launch!(gpu.stream, &add, shape(1, 64, 0), &mut y, &x, &x, &64).unwrap();
        }
        gpu.stream.synchronize().unwrap();
    });
    println!("launch of 64 threads: {:.2} us", launches * 1e2);
    let mut mean = gpu.zeros::<f32>(1024);
    let mut rstd = gpu.zeros::<f32>(1024);
    let norm = function(&basic, "layernorm");
    let norms = seconds(&mut || {
        launch!(
            gpu.stream,
            &norm,
            shape(1024, 128, 0),
            &mut y,
            &mut mean,
            &mut rstd,
            &x,
            &x,
            &x,
            &1024,
            &1e-5f32
        )
        .unwrap();
        gpu.stream.synchronize().unwrap();
    });
    println!(
        "layer norm of 1024 rows, 128 threads each: {:.2} M threads/s",
        131_072.0 / norms / 1e6
    );
    let a = gpu.zeros::<u16>(256 * 256);
    let gemm = function(&tensor, "gemm");
    let grid = LaunchConfig { grid_dim: (16, 8, 1), ..shape(1, 128, 0) };
    let products = seconds(&mut || {
        launch!(gpu.stream, &gemm, grid, &mut y, &a, &a, &256, &256, &256, &0).unwrap();
        gpu.stream.synchronize().unwrap();
    });
    let flops = 2.0 * 256f64.powi(3);
    println!("mma kernel, 256^3: {:.2} GFLOP/s", flops / products / 1e9);
    let blas = cudarc::cublaslt::CudaBlasLT::new(gpu.stream.clone()).unwrap();
    for size in [64u64, 256, 512] {
        use cudarc::cublaslt::{Matmul as _, MatmulConfig};
        let ld = size as i64;
        let config = MatmulConfig {
            transa: true,
            transb: false,
            transc: false,
            m: size,
            n: size,
            k: size,
            alpha: 1.0,
            lda: ld,
            ldb: ld,
            beta: 0.0,
            ldc: ld,
            stride_a: None,
            stride_b: None,
            stride_c: None,
            stride_bias: None,
            batch_size: None,
        };
        let products = seconds(&mut || {
            unsafe { blas.matmul(config, &x, &x, &mut y, None, None).unwrap() };
            gpu.stream.synchronize().unwrap();
        });
        println!(
            "cublasLtMatmul f32 {size}^3: {:.1} GFLOP/s",
            2.0 * (size as f64).powi(3) / products / 1e9
        );
    }
}
