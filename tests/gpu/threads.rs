//! Threads that call the driver for the first time: the simulator refuses every call that needs a
//! current context, and the backend sets the context before every call.
#![allow(clippy::undocumented_unsafe_blocks, reason = "every call of the driver is one")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;

use cudarc::cublaslt::{result as lt, sys as lt_sys};
use cudarc::driver::result::{event, stream};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, DevicePtr};
use hpctrain::backend::cuda::{Arithmetic, Cuda, Device, Precision};
use hpctrain::backend::{
    Activation, ActivationOps, Backend, CommBuffer, Element, ElementwiseOps, Gemm, LinearOps,
    MemoryKind, OrderedSum,
};

use hpctrain_testkit::launch::{Transport, finish};
use hpctrain_testkit::runs::Run;
use hpctrain_testkit::simulator::{is_on_gpu, under, with_simulator};

/// Runs `body` on a new thread, which has called nothing before.
fn fresh<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(body).join().unwrap())
}

/// A handle that a test moves to another thread.
#[derive(Clone, Copy)]
struct Carried<T>(T);

// SAFETY: handles of the driver and of its libraries belong to no thread.
unsafe impl<T> Send for Carried<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Carried<T> {}

impl<T: Copy> Carried<T> {
    fn get(&self) -> T {
        self.0
    }
}

/// Runs only on the simulator: a driver may crash, and its libraries choose a device themselves.
#[test]
fn a_thread_without_a_context_is_refused() {
    if is_on_gpu() {
        return eprintln!("skipped: a test of the simulator");
    }
    under(&[&[]], || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let memory = stream.alloc_zeros::<f32>(16).unwrap();
        let at = memory.device_ptr(&stream).0;
        let queue = Carried(stream.cu_stream());
        let mark = stream.record_event(None).unwrap();
        let timed = || event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        let events = Carried([mark.cu_event(), timed(), timed()]);
        let pinned = Carried(unsafe { cudarc::driver::result::malloc_host(64, 0) }.unwrap());
        let refused = fresh(move || {
            let (queue, [mark, early, late], pinned) = (queue.get(), events.get(), pinned.get());
            let mut host = [0u8; 64];
            let mut address = 0;
            let mut bytes = [0usize; 2];
            let mut milliseconds = 0.0;
            let to = host.as_mut_ptr().cast::<c_void>();
            let mut made = null_mut();
            let mut module = null_mut();
            let mut made_stream = null_mut();
            // By the name that all drivers have, which cudarc does not use.
            type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
            let elapsed = unsafe {
                let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
                std::mem::transmute::<*mut c_void, Elapsed>(libc::dlsym(
                    driver,
                    c"cuEventElapsedTime".as_ptr(),
                ))
            };
            unsafe {
                [
                    ("cuEventQuery", sys::cuEventQuery(mark)),
                    ("cuEventSynchronize", sys::cuEventSynchronize(mark)),
                    ("cuEventRecord", sys::cuEventRecord(mark, queue)),
                    ("cuEventCreate", sys::cuEventCreate(&raw mut made, 0)),
                    ("cuEventElapsedTime", elapsed(&raw mut milliseconds, early, late)),
                    ("cuEventDestroy", sys::cuEventDestroy_v2(late)),
                    ("cuStreamQuery", sys::cuStreamQuery(queue)),
                    ("cuStreamSynchronize", sys::cuStreamSynchronize(queue)),
                    ("cuStreamWaitEvent", sys::cuStreamWaitEvent(queue, mark, 0)),
                    ("cuStreamCreate", sys::cuStreamCreate(&raw mut made_stream, 1)),
                    ("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut address, 64)),
                    ("cuMemFree", sys::cuMemFree_v2(at)),
                    ("cuMemGetInfo", sys::cuMemGetInfo_v2(&raw mut bytes[0], &raw mut bytes[1])),
                    ("cuMemFreeHost", sys::cuMemFreeHost(pinned)),
                    ("cuMemcpyHtoDAsync", sys::cuMemcpyHtoDAsync_v2(at, to, 64, queue)),
                    ("cuMemcpyDtoHAsync", sys::cuMemcpyDtoHAsync_v2(to, at, 64, queue)),
                    ("cuMemcpyDtoDAsync", sys::cuMemcpyDtoDAsync_v2(at, at + 32, 32, queue)),
                    ("cuMemsetD8Async", sys::cuMemsetD8Async(at, 0, 64, queue)),
                    ("cuModuleLoadData", sys::cuModuleLoadData(&raw mut module, to)),
                    (
                        "cuLaunchKernel",
                        sys::cuLaunchKernel(
                            null_mut(),
                            1,
                            1,
                            1,
                            1,
                            1,
                            1,
                            0,
                            queue,
                            null_mut(),
                            null_mut(),
                        ),
                    ),
                    ("cuCtxSynchronize", sys::cuCtxSynchronize()),
                ]
            }
        });
        for (call, result) in refused {
            assert_eq!(result, CUresult::CUDA_ERROR_INVALID_CONTEXT, "{call}");
        }

        let not_ready = lt_sys::cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED;
        assert_eq!(
            fresh(|| lt::create_handle().map(Carried)).err().unwrap().0,
            not_ready,
            "cublasLtCreate"
        );
        let handle = Carried(lt::create_handle().unwrap());
        let destroyed = fresh(move || unsafe { lt::destroy_handle(handle.get()) });
        assert_eq!(destroyed.unwrap_err().0, not_ready, "cublasLtDestroy");

        let unhandled: c_int = 1; // ncclUnhandledCudaError
        assert_eq!(fresh(|| unsafe { join_alone() }), unhandled, "ncclCommInitRank");
        assert_eq!(unsafe { join_alone() }, 0, "ncclCommInitRank with a context");
        unsafe {
            event::destroy(events.get()[1]).unwrap();
            event::destroy(events.get()[2]).unwrap();
            cudarc::driver::result::free_host(pinned.get()).unwrap();
            stream::synchronize(queue.get()).unwrap();
        }
    });
}

/// Creates a communicator of one rank with NCCL's functions, and returns the status.
unsafe fn join_alone() -> c_int {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Id([c_char; 128]);
    type MakeId = unsafe extern "C" fn(*mut Id) -> c_int;
    type Join = unsafe extern "C" fn(*mut *mut c_void, c_int, Id, c_int) -> c_int;
    let find = |name: &CStr| unsafe {
        let library = libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        found
    };
    let mut id = Id([0; 128]);
    let mut communicator = null_mut();
    unsafe {
        let make_id = std::mem::transmute::<*mut c_void, MakeId>(find(c"ncclGetUniqueId"));
        let join = std::mem::transmute::<*mut c_void, Join>(find(c"ncclCommInitRank"));
        assert_eq!(make_id(&raw mut id), 0);
        join(&raw mut communicator, 1, id, 0)
    }
}

/// Makes every call of the backend the first one of a thread.
#[test]
fn the_backend_chooses_its_device_on_every_thread() {
    let all: [&[(&str, &str)]; 2] = [&[], &[("CUDASIM_STREAMS", "lazy")]];
    under(&all, || {
        for precision in [Precision::F32(Arithmetic::Full), Precision::Bf16] {
            let cuda =
                fresh(|| Cuda::new(&Device::open(0).unwrap(), 128 << 20, precision).unwrap());
            let cuda = &cuda;
            let upload =
                |values: &[f32]| fresh(|| cuda.upload(MemoryKind::Activations, values).unwrap());
            let see = |buf: &_| {
                let mut values = vec![0.0; Cuda::len(buf)];
                fresh(|| cuda.download(Cuda::all(buf), &mut values).unwrap());
                values
            };
            let x = upload(&[1.0, 2.0, 3.0, 4.0]);
            let mut y = upload(&[0.5; 4]);
            fresh(|| cuda.add(Cuda::all(&x), Cuda::all_mut(&mut y)).unwrap());
            // Once more: the kernel is already loaded.
            fresh(|| cuda.add(Cuda::all(&x), Cuda::all_mut(&mut y)).unwrap());
            assert_eq!(see(&y), [2.5, 4.5, 6.5, 8.5]);
            fresh(|| cuda.copy(Cuda::all(&x), Cuda::all_mut(&mut y)).unwrap());
            assert_eq!(see(&y), [1.0, 2.0, 3.0, 4.0]);
            let shape = Gemm { m: 2, n: 2, k: 2, ta: false, tb: false, acc: false };
            let mut c = upload(&[0.0; 4]);
            for _ in 0..2 {
                fresh(|| {
                    cuda.gemm(shape, Cuda::all(&x), Cuda::all(&y), Cuda::all_mut(&mut c)).unwrap()
                });
            }
            assert_eq!(see(&c), [7.0, 10.0, 15.0, 22.0]);
            fresh(|| {
                cuda.activation(Activation::Relu, Cuda::all(&x), Cuda::all_mut(&mut c)).unwrap()
            });
            let wide = fresh(|| cuda.upload_f32(MemoryKind::Gradients, &[3.0, 4.0]).unwrap());
            let sum = fresh(|| cuda.sum_squares(Cuda::all(&wide)).unwrap());
            assert_eq!(fresh(|| cuda.read(sum).unwrap()), 25.0);
            fresh(|| cuda.zero(Cuda::all_mut(&mut c)).unwrap());
            assert_eq!(see(&c), [0.0; 4]);
            drop(fresh(|| cuda.upload_indices(&[1, 2, 3]).unwrap()));

            // The work of the communication thread, beginning with its event.
            let ready = Cuda::record_event(&wide).unwrap().unwrap();
            let ready = fresh(move || {
                while !ready.is_done().unwrap() {}
                ready
            });
            fresh(move || ready.wait().unwrap());
            let mut wide = wide;
            let copies = fresh(|| match Cuda::comm_buffer(&mut wide, 0..2).unwrap() {
                CommBuffer::Device(_, copies) => {
                    assert!(
                        !cudarc::driver::result::ctx::get_current().unwrap().unwrap().is_null()
                    );
                    copies
                }
                CommBuffer::Host(_) => panic!("host memory"),
            });
            let scratch = fresh(|| copies.scratch(2).unwrap());
            let CommBuffer::Device(span, _) = Cuda::comm_buffer(&mut wide, 0..2).unwrap() else {
                panic!("host memory")
            };
            let aside = scratch.span();
            fresh(|| copies.copy(span, aside).unwrap());
            fresh(|| copies.add(aside, span).unwrap());
            let sum = OrderedSum { element: Element::F32, own: span, number: 1, others: aside };
            fresh(|| copies.sum_in_order(&[sum]).unwrap().wait().unwrap());
            let done = fresh(|| copies.mark().unwrap());
            fresh(move || while !done.is_done().unwrap() {});
            let mut pinned = fresh(|| copies.pinned(2).unwrap());
            let host = Carried(pinned.words().as_mut_ptr());
            fresh(|| unsafe { copies.download(&[(span, 0)], host.get()) }.unwrap().wait().unwrap());
            assert_eq!(pinned.words(), [9.0, 12.0]);
            pinned.words().fill(1.0);
            fresh(|| {
                unsafe { copies.upload(host.get().cast_const(), &[(span, 0)]) }
                    .unwrap()
                    .wait()
                    .unwrap()
            });
            assert_eq!(see(&wide), [1.0, 1.0]);
            fresh(move || drop((pinned, scratch, copies)));
            fresh(move || drop((x, y, c, wide)));
        }
    });
}

/// In runs, and in the probe before them, device addresses are passed to MPI only by threads that
/// have selected the device.
#[test]
fn mpi_is_given_addresses_by_threads_with_a_context() {
    let root = tempfile::tempdir().unwrap();
    let probe = root.path().join("probe.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/probe.c");
    let built = Command::new("mpicc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&probe, &source])
        .arg("-ldl")
        .status();
    assert!(built.unwrap().success());
    for (name, algorithm) in [("own", "halving-doubling"), ("library", "vendor")] {
        let algorithm = format!("comm.algorithm={algorithm}");
        let settings = [
            "run.device=cuda",
            "run.steps=2",
            "comm.transport=cuda-aware",
            "device.memory_limit=128MiB",
            &algorithm,
        ];
        let run = Run::new(Transport::Mpirun(2), root.path(), name, &settings);
        let mut command = run.command();
        with_simulator(&mut command).env("CUDASIM_DEVICES", "2").env("LD_PRELOAD", &probe);
        let ended = finish(&mut command).succeeded();
        let counts =
            ended.stderr.lines().filter_map(|line| line.strip_prefix("probe: ")?.split_once(' '));
        let counts: Vec<u32> = counts.map(|(count, _)| count.parse().unwrap()).collect();
        assert!(counts.len() == 2 && counts.iter().all(|&count| count > 0), "{counts:?}: {ended}");
    }
}
