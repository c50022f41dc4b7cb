//! Matmuls by oneDNN, which is loaded at run time.
//!
//! Functions of versions 2 and 3 are supported; these versions describe matrices differently. Each
//! thread of a rank multiplies separate parts of the output: the library is set to one thread. A
//! thread caches the primitives of each shape, since creating one takes longer than many a matmul.
//!
//! It multiplies in f32 in a benchmark, and with `precision.dtype = "bf16"` on CPUs with AMX, whose
//! tiles the built-in kernels (`bf16/`) do not use: the operands of linear layers, of their
//! gradients and of other large matmuls are rounded to bf16, and sums are f32. The library may be
//! version 2 or 3, built with OpenMP or without threads. Bits do not depend on the number of
//! threads. If it is missing, the built-in kernels multiply, and the test of matmuls reports that
//! it was skipped.
//!
//! Tested with oneDNN 2.6.3 on AVX512-BF16 and on AMX: the tests of matmuls, 40 steps of the default
//! configuration (loss 3.0999; in f32 3.0998), and `hpctrain verify` with equal bits on 1, 2 and 4
//! ranks. Not tested in bf16 with version 3.
//!
//! `unsafe` code calls its C functions, which are found by name. Objects belong to one thread, and
//! the library gets the addresses of views that stay borrowed until it returns.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock, PoisonError};

use ndarray::{ArrayView2, ArrayViewMut2, Axis};

use super::gemm::each_part;
use super::matrix::{left, matrix_mut, right};
use super::output_init::OutputInit;
use super::threads::Threads;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::Gemm;
use hpctrain_device::library::open_first;
use hpctrain_device::library_functions;

/// Its file names: those of the runtime packages, and of the development package.
const FILES: [&str; 3] = ["libdnnl.so.3", "libdnnl.so.2", "libdnnl.so"];

/// Advice for a missing library.
const HINT: &str = "install oneDNN 2 or 3 (Debian 12: apt-get install libdnnl2) and add its folder to LD_LIBRARY_PATH if needed, \
     or do without: CPUs compute in f32 by default";

/// Types of operands that the library multiplies with sums in f32.
pub trait Operand: Copy + Sync {
    /// `dnnl_data_type_t`
    const TYPE: c_int;
}

impl Operand for f32 {
    const TYPE: c_int = 3;
}

/// The bits of bf16.
impl Operand for u16 {
    const TYPE: c_int = 2;
}

/// The values of `dnnl_cpu`, `dnnl_stream_in_order`, `dnnl_scratchpad_mode_user`,
/// `dnnl_query_scratchpad_md`.
const CPU: c_int = 1;
const IN_ORDER: c_uint = 1;
const OUR_SCRATCH: c_int = 1;
const SCRATCH: c_int = 136;

/// `DNNL_RUNTIME_SEQ` and `DNNL_RUNTIME_OMP`: builds that can be set to one thread.
const SEQUENTIAL: c_uint = 1;
const OPENMP: c_uint = 2;

/// `DNNL_ARG_SRC`, `DNNL_ARG_WEIGHTS`, `DNNL_ARG_DST`, `DNNL_ARG_SCRATCHPAD`
const ARGUMENTS: [c_int; 4] = [1, 33, 17, 80];

/// The most dimensions of a tensor.
const DIMENSIONS: usize = 12;

/// Any object of the library.
type Handle = *mut c_void;

/// `dnnl_memory_desc_t` of version 2, 696 bytes, with space to spare: only the library accesses its
/// contents.
#[repr(C, align(64))]
struct MemoryDesc([u8; 1024]);

/// `dnnl_matmul_desc_t` of version 2, 2800 bytes, with space to spare.
#[repr(C, align(64))]
struct MatmulDesc([u8; 4096]);

/// A description of a matrix, to which the library takes a pointer in both versions.
enum Description {
    Two(Box<MemoryDesc>),
    Three(Owned),
}

impl Description {
    fn pointer(&self) -> *const c_void {
        match self {
            Description::Two(desc) => (&raw const **desc).cast(),
            Description::Three(owned) => owned.handle,
        }
    }
}

/// `dnnl_exec_arg_t`
#[repr(C)]
struct Argument {
    what: c_int,
    memory: Handle,
}

/// `dnnl_version_t`
#[repr(C)]
struct Version {
    major: c_int,
    minor: c_int,
    patch: c_int,
    hash: *const c_char,
    cpu_runtime: c_uint,
    gpu_runtime: c_uint,
}

library_functions! {
    /// Functions of every version.
    Versioned {
        version = "dnnl_version"() -> *const Version;
    }
}

library_functions! {
    /// Functions of OpenMP, on which the library may depend.
    OpenMp {
        set_threads = "omp_set_num_threads"(c_int) -> ();
    }
}

library_functions! {
    /// Functions of both versions. Descriptions of matrices are opaque pointers.
    Functions {
        engine_create = "dnnl_engine_create"(*mut Handle, c_int, usize) -> c_int;
        stream_create = "dnnl_stream_create"(*mut Handle, Handle, c_uint) -> c_int;
        stream_destroy = "dnnl_stream_destroy"(Handle) -> c_int;
        size = "dnnl_memory_desc_get_size"(*const c_void) -> usize;
        attributes_create = "dnnl_primitive_attr_create"(*mut Handle) -> c_int;
        attributes_destroy = "dnnl_primitive_attr_destroy"(Handle) -> c_int;
        set_scratch = "dnnl_primitive_attr_set_scratchpad_mode"(Handle, c_int) -> c_int;
        set_post_ops = "dnnl_primitive_attr_set_post_ops"(Handle, Handle) -> c_int;
        post_ops_create = "dnnl_post_ops_create"(*mut Handle) -> c_int;
        post_ops_destroy = "dnnl_post_ops_destroy"(Handle) -> c_int;
        plan_destroy = "dnnl_primitive_desc_destroy"(Handle) -> c_int;
        plan_describes = "dnnl_primitive_desc_query_md"(Handle, c_int, c_int) -> *const c_void;
        primitive_create = "dnnl_primitive_create"(*mut Handle, Handle) -> c_int;
        primitive_destroy = "dnnl_primitive_destroy"(Handle) -> c_int;
        primitive_execute = "dnnl_primitive_execute"(Handle, Handle, c_int, *const Argument) -> c_int;
        memory_create = "dnnl_memory_create"(*mut Handle, *const c_void, Handle, *mut c_void) -> c_int;
        memory_destroy = "dnnl_memory_destroy"(Handle) -> c_int;
        memory_set = "dnnl_memory_set_data_handle"(Handle, *mut c_void) -> c_int;
    }
}

library_functions! {
    /// Functions of version 2 alone.
    Two {
        describe = "dnnl_memory_desc_init_by_strides"(*mut MemoryDesc, c_int, *const i64, c_int, *const i64) -> c_int;
        matmul = "dnnl_matmul_desc_init"(
            *mut MatmulDesc, *const c_void, *const c_void, *const c_void, *const c_void
        ) -> c_int;
        plan = "dnnl_primitive_desc_create"(*mut Handle, *const MatmulDesc, Handle, Handle, Handle) -> c_int;
        add = "dnnl_post_ops_append_sum"(Handle, f32) -> c_int;
    }
}

library_functions! {
    /// Functions of version 3 alone.
    Three {
        describe = "dnnl_memory_desc_create_with_strides"(*mut Handle, c_int, *const i64, c_int, *const i64) -> c_int;
        forget = "dnnl_memory_desc_destroy"(Handle) -> c_int;
        plan = "dnnl_matmul_primitive_desc_create"(
            *mut Handle, Handle, *const c_void, *const c_void, *const c_void, *const c_void, Handle
        ) -> c_int;
        add = "dnnl_post_ops_append_sum"(Handle, f32, i32, c_int) -> c_int;
    }
}

/// The functions that differ between the versions.
enum Dialect {
    Two(Two),
    Three(Three),
}

/// The library, which stays open.
struct Library {
    functions: Functions,
    dialect: Dialect,
    /// Sets OpenMP's number of threads for the calling thread. `None` if the library does not use
    /// OpenMP.
    open_mp: Option<OpenMp>,
    engine: Engine,
}

impl Library {
    /// Describes a matrix of the given sizes and strides.
    fn describe(
        &self,
        operands: c_int,
        sizes: [usize; 2],
        strides: [isize; 2],
    ) -> Result<Description> {
        let mut dims = [0; DIMENSIONS];
        let mut steps = [0; DIMENSIONS];
        for axis in 0..2 {
            (dims[axis], steps[axis]) = (sizes[axis] as i64, strides[axis] as i64);
        }
        let dims = dims.as_ptr();
        let steps = steps.as_ptr();
        match &self.dialect {
            Dialect::Two(two) => {
                let mut desc = Box::new(MemoryDesc([0; 1024]));
                // SAFETY: writes the description, which is large enough; reads as many numbers as
                // there can be dimensions.
                check("describe a matrix", unsafe {
                    (two.describe)(&raw mut *desc, 2, dims, operands, steps)
                })?;
                Ok(Description::Two(desc))
            }
            Dialect::Three(three) => Owned::new("describe a matrix", three.forget, |description| {
                // SAFETY: writes the handle; reads as many numbers as there can be dimensions.
                unsafe { (three.describe)(description, 2, dims, operands, steps) }
            })
            .map(Description::Three),
        }
    }

    /// Creates the post-operation by which a matmul adds to its destination.
    fn sum(&self) -> Result<Owned> {
        let Functions { post_ops_create, post_ops_destroy, .. } = self.functions;
        let post_ops = Owned::new("create a post-operation", post_ops_destroy, |post_ops| {
            // SAFETY: writes the handle.
            unsafe { post_ops_create(post_ops) }
        })?;
        // SAFETY: changes the object that was just created.
        check("add a sum", unsafe {
            match &self.dialect {
                Dialect::Two(two) => (two.add)(post_ops.handle, 1.0),
                Dialect::Three(three) => (three.add)(post_ops.handle, 1.0, 0, 0),
            }
        })?;
        Ok(post_ops)
    }

    /// Creates the primitive descriptor of a matmul of three descriptions.
    fn plan(&self, [a, b, c]: [&Description; 3], attributes: &Owned) -> Result<Owned> {
        let [a, b, c] = [a, b, c].map(Description::pointer);
        let engine = self.engine.0;
        let attributes = attributes.handle;
        Owned::new("plan a matmul", self.functions.plan_destroy, |plan| match &self.dialect {
            Dialect::Two(two) => {
                let mut matmul = MatmulDesc([0; 4096]);
                // SAFETY: writes the description, which is large enough, from three that live.
                match unsafe { (two.matmul)(&mut matmul, a, b, null(), c) } {
                    // SAFETY: writes the handle; all that it reads lives.
                    0 => unsafe { (two.plan)(plan, &matmul, attributes, engine, null_mut()) },
                    failed => failed,
                }
            }
            // SAFETY: writes the handle; all that it reads lives.
            Dialect::Three(three) => unsafe {
                (three.plan)(plan, engine, a, b, null(), c, attributes)
            },
        })
    }
}

/// The library's CPU engine, which all threads may use.
struct Engine(Handle);

// SAFETY: the library's engines may be used by several threads at once; this one is never
// destroyed.
unsafe impl Send for Engine {}
// SAFETY: as above.
unsafe impl Sync for Engine {}

/// Checks a call's status, which is 0 on success.
fn check(what: &str, status: c_int) -> Result<()> {
    match status {
        0 => Ok(()),
        1 => Err(Error::device(format!("oneDNN could not {what}: out of memory"))),
        3 => Err(Error::device(format!("oneDNN could not {what}: not supported on this CPU"))),
        status => Err(Error::device(format!("oneDNN could not {what}: status {status}"))),
    }
}

/// Opens the library.
fn open() -> Result<Library> {
    // SAFETY: the library does nothing but measure caches when it is opened.
    let Some(file) = (unsafe { open_first(&FILES) }) else {
        return Err(
            Error::input("oneDNN was not found: neither libdnnl.so.3 nor libdnnl.so.2").hint(HINT)
        );
    };
    let missing = |name: &str| Error::input(format!("oneDNN lacks the function {name}")).hint(HINT);
    // SAFETY: the function has this type in every version, and its result lives as long as the
    // library.
    let version = unsafe { &*(Versioned::load(&file, missing)?.version)() };
    let Version { major, minor, patch, cpu_runtime, .. } = *version;
    if !matches!(major, 2 | 3) {
        return Err(Error::input(format!(
            "oneDNN {major}.{minor}.{patch} is not supported: expected version 2 or 3"
        ))
        .hint(HINT));
    }
    if !matches!(cpu_runtime, SEQUENTIAL | OPENMP) {
        let message = format!(
            "oneDNN {major}.{minor}.{patch} is built with neither OpenMP nor sequential threading"
        );
        return Err(Error::input(message).hint(HINT));
    }
    // SAFETY: the functions have these types in the versions that the tables are for.
    let functions = unsafe { Functions::load(&file, missing)? };
    let dialect = match major {
        // SAFETY: as above.
        2 => Dialect::Two(unsafe { Two::load(&file, missing)? }),
        // SAFETY: as above.
        _ => Dialect::Three(unsafe { Three::load(&file, missing)? }),
    };
    let open_mp = match cpu_runtime {
        // SAFETY: the library depends on OpenMP, whose function has this type.
        OPENMP => Some(unsafe { OpenMp::load(&file, missing)? }),
        _ => None,
    };
    let mut engine = null_mut();
    // SAFETY: writes the handle.
    check("create a CPU engine", unsafe { (functions.engine_create)(&mut engine, CPU, 0) })?;
    // It stays open as long as the process.
    std::mem::forget(file);
    Ok(Library { functions, dialect, open_mp, engine: Engine(engine) })
}

/// Returns the library, which is opened once.
fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// Checks that the library is available.
///
/// # Errors
/// Returns an error if it is not found, or is not a version that this program can use.
pub fn find() -> Result<()> {
    library().map(drop)
}

/// The key of a prepared matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    operands: c_int,
    /// Rows and columns of `a` and `b`.
    sizes: [[usize; 2]; 2],
    /// The row and column strides of `a`, `b` and `c`.
    strides: [[isize; 2]; 3],
    acc: bool,
}

/// A handle that is destroyed when it is dropped.
struct Owned {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
}

impl Owned {
    /// Creates a handle by calling `create`; `what` names the call in errors.
    fn new(
        what: &str,
        destroy: unsafe extern "C" fn(Handle) -> c_int,
        create: impl FnOnce(&mut Handle) -> c_int,
    ) -> Result<Self> {
        let mut handle = null_mut();
        check(what, create(&mut handle))?;
        Ok(Self { handle, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the handle was created by the library, has no other user and is not used again.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// A prepared matmul of one shape.
struct Prepared {
    primitive: Owned,
    /// The memory objects of source, weights, destination, scratch.
    memories: [Owned; 4],
    /// The memory of the scratch.
    _scratch: Vec<MemoryDesc>,
}

/// The library's state in one thread.
struct ThreadState {
    stream: Owned,
    prepared: HashMap<Shape, Prepared>,
}

thread_local! {
    static STATE: RefCell<Option<ThreadState>> = const { RefCell::new(None) };
}

impl ThreadState {
    fn new(library: &Library) -> Result<Self> {
        if let Some(open_mp) = &library.open_mp {
            // SAFETY: takes a number; it holds for the calling thread alone.
            unsafe { (open_mp.set_threads)(1) };
        }
        let stream = Owned::new("create a stream", library.functions.stream_destroy, |stream| {
            // SAFETY: writes the handle; the engine is there.
            unsafe { (library.functions.stream_create)(stream, library.engine.0, IN_ORDER) }
        })?;
        Ok(Self { stream, prepared: HashMap::new() })
    }
}

impl Prepared {
    fn new(library: &Library, shape: &Shape) -> Result<Self> {
        let ([[m, _], [_, n]], functions) = (shape.sizes, &library.functions);
        let a = library.describe(shape.operands, shape.sizes[0], shape.strides[0])?;
        let b = library.describe(shape.operands, shape.sizes[1], shape.strides[1])?;
        let c = library.describe(f32::TYPE, [m, n], shape.strides[2])?;
        let attributes =
            Owned::new("create attributes", functions.attributes_destroy, |attributes| {
                // SAFETY: writes the handle.
                unsafe { (functions.attributes_create)(attributes) }
            })?;
        // SAFETY: changes the object that was just created.
        check("set the scratchpad mode", unsafe {
            (functions.set_scratch)(attributes.handle, OUR_SCRATCH)
        })?;
        if shape.acc {
            let sum = library.sum()?;
            // SAFETY: as above; the sum is copied.
            check("set a post-operation", unsafe {
                (functions.set_post_ops)(attributes.handle, sum.handle)
            })?;
        }
        let plan = library.plan([&a, &b, &c], &attributes)?;
        let primitive =
            Owned::new("create a matmul primitive", functions.primitive_destroy, |primitive| {
                // SAFETY: writes the handle; the plan lives.
                unsafe { (functions.primitive_create)(primitive, plan.handle) }
            })?;
        // SAFETY: the plan lives, and so does the description that belongs to it.
        let scratch_desc = unsafe { (functions.plan_describes)(plan.handle, SCRATCH, 0) };
        // SAFETY: as above.
        let bytes = unsafe { (functions.size)(scratch_desc) };
        let mut scratch = Vec::new();
        scratch.resize_with(bytes.div_ceil(size_of::<MemoryDesc>()), || MemoryDesc([0; 1024]));
        let memory = |description: *const c_void, at: *mut c_void| {
            Owned::new("create a memory object", functions.memory_destroy, |memory| {
                // SAFETY: writes the handle; the description lives and is copied.
                unsafe { (functions.memory_create)(memory, description, library.engine.0, at) }
            })
        };
        let [a, b, c] = [a, b, c].map(|description| memory(description.pointer(), null_mut()));
        let memories = [a?, b?, c?, memory(scratch_desc, scratch.as_mut_ptr().cast())?];
        Ok(Self { primitive, memories, _scratch: scratch })
    }
}

/// Computes `c = a·b`, or `c += a·b` with `acc`, on the calling thread. Rows of `c` must be
/// contiguous, and rows or columns of `a` and `b`.
fn multiply_part<T: Operand>(
    a: ArrayView2<'_, T>,
    b: ArrayView2<'_, T>,
    mut c: ArrayViewMut2<'_, f32>,
    acc: bool,
) -> Result<()> {
    let ((m, k), (kb, n)) = (a.dim(), b.dim());
    assert!(
        kb == k && c.dim() == (m, n),
        "cannot multiply {:?} by {:?} into {:?}",
        a.dim(),
        b.dim(),
        c.dim()
    );
    if m * n * k == 0 {
        if !acc {
            c.fill(0.0);
        }
        return Ok(());
    }
    let library = library()?;
    // The stride along an axis of one element is never used, but the library requires it to be
    // consistent.
    let strides = |[rows, columns]: [usize; 2], strides: &[isize]| match (rows, columns) {
        (_, 1) => [strides[0], 1],
        (1, _) if strides[1] == 1 => [columns as isize, 1],
        _ => [strides[0], strides[1]],
    };
    let shape = Shape {
        operands: T::TYPE,
        sizes: [[m, k], [k, n]],
        strides: [
            strides([m, k], a.strides()),
            strides([k, n], b.strides()),
            strides([m, n], c.strides()),
        ],
        acc,
    };
    STATE.with_borrow_mut(|state| {
        let state = match state {
            Some(state) => state,
            none => none.insert(ThreadState::new(library)?),
        };
        let ThreadState { stream, prepared } = state;
        let matmul = match prepared.get(&shape) {
            Some(matmul) => matmul,
            None => prepared.entry(shape).or_insert(Prepared::new(library, &shape)?),
        };
        let operands =
            [a.as_ptr().cast_mut().cast(), b.as_ptr().cast_mut().cast(), c.as_mut_ptr().cast()];
        for (memory, at) in matmul.memories.iter().zip(operands) {
            // SAFETY: the memory belongs to this thread, and is used only below, while the views
            // are borrowed.
            check("set a memory object", unsafe {
                (library.functions.memory_set)(memory.handle, at)
            })?;
        }
        let arguments: [Argument; 4] = std::array::from_fn(|i| Argument {
            what: ARGUMENTS[i],
            memory: matmul.memories[i].handle,
        });
        let count = arguments.len() as c_int;
        let arguments = arguments.as_ptr();
        // SAFETY: the views guarantee that every element addressed by their sizes and strides is
        // valid, that of `c` exclusively; the library reads `a` and `b` and writes `c` and the
        // scratch, and is done when it returns, since it has no threads but this one.
        let status = unsafe {
            (library.functions.primitive_execute)(
                matmul.primitive.handle,
                stream.handle,
                count,
                arguments,
            )
        };
        check("multiply", status)
    })
}

/// Computes the matmul described by `s` and adds the bias, if there is one, on all threads, in
/// parts that depend on the shape alone.
///
/// # Errors
/// Returns an error if the library is missing or fails.
pub fn multiply<T: Operand>(
    threads: &Threads,
    s: Gemm,
    a: &[T],
    b: &[T],
    c: &mut [f32],
    bias: &[f32],
) -> Result<()> {
    let a = left(s, a);
    let b = right(s, b);
    let start = OutputInit::new(s.acc, bias);
    let failed = Mutex::new(None);
    each_part(threads, matrix_mut(c, s.m, s.n), s.k, [false, false], |rows, columns, mut c| {
        let acc = start.for_columns(columns.clone()).write_bias(c.view_mut());
        let a = a.slice_axis(Axis(0), rows.into());
        let b = b.slice_axis(Axis(1), columns.into());
        if let Err(error) = multiply_part(a, b, c, acc) {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
