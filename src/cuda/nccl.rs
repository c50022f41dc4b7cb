//! NCCL, NVIDIA's library for communication between GPUs, loaded at run time.
//!
//! Its functions are looked up here one by one: cudarc does not know the file name of NCCL without
//! its headers, and panics if an older version lacks a function. The interface is that of 2.14, but
//! at least 2.18 is required: older versions wrote to the address of the handle after the call to
//! initialise had returned.
//!
//! Communicators are non-blocking. A call returns at once; the state of the work is read from the
//! communicator, and until it reports success, the work may not be in the stream yet.
//!
//! NCCL refuses two ranks on one GPU, so `placement` refuses them earlier. The device memory
//! that NCCL allocates is measured at the start of a run, before the pool takes its own. NCCL configures its
//! network itself (`NCCL_SOCKET_IFNAME` and others).

use std::cell::OnceCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::CudaContext;

use super::comm_queue::{CommQueue, CommState, CommStreams};
use super::libraries::check;
use super::nvrtc::KernelModules;
use super::ordered_sum::OrderedSumKernel;
use super::python_packages;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::library::open_first;
use hpctrain_device::library_functions;
use hpctrain_device::{
    CommId, DeviceCollective, DeviceComm, DeviceEvent, DeviceOperation, DeviceSpan, OrderedSum,
};

/// The file names of the run-time and of the development package.
const FILES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The file of NVIDIA's Python package.
const PACKAGE: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The oldest supported version, in NCCL's encoding.
const OLDEST: c_int = 21_800;

/// The hint if NCCL is missing.
const HINT: &str = "install NCCL 2.18 or later (pip install nvidia-nccl-cu13 has it), or name its folder in LD_LIBRARY_PATH, \
     or set comm.transport=host-staged";

/// `ncclInProgress`. Success is 0.
const IN_PROGRESS: c_int = 7;

/// `ncclFloat32`. Copies preserve all bits.
const WORD: c_int = 7;

/// `ncclSum`
const SUM: c_int = 0;

/// `ncclComm_t`
type Handle = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId(CommId);

/// `ncclConfig_t` of version 2.14. Later versions use defaults for fields that they have added.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    const NON_BLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 };
}

library_functions! {
    /// The functions of the library, which stays open.
    Library {
        get_version = "ncclGetVersion"(*mut c_int) -> c_int;
        get_error_string = "ncclGetErrorString"(c_int) -> *const c_char;
        get_last_error = "ncclGetLastError"(Handle) -> *const c_char;
        get_unique_id = "ncclGetUniqueId"(*mut UniqueId) -> c_int;
        comm_init_rank_config = "ncclCommInitRankConfig"(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
        comm_get_async_error = "ncclCommGetAsyncError"(Handle, *mut c_int) -> c_int;
        comm_finalize = "ncclCommFinalize"(Handle) -> c_int;
        comm_destroy = "ncclCommDestroy"(Handle) -> c_int;
        comm_abort = "ncclCommAbort"(Handle) -> c_int;
        group_start = "ncclGroupStart"() -> c_int;
        group_end = "ncclGroupEnd"() -> c_int;
        send = "ncclSend"(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        recv = "ncclRecv"(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        reduce = "ncclReduce"(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, *mut c_void) -> c_int;
        reduce_scatter = "ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
        all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
        broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
    }
}

/// The library, and the file if it is not one that the loader finds.
struct FoundLibrary {
    functions: Library,
    package: Option<PathBuf>,
}

/// Returns the library, which is opened once.
fn found() -> Result<&'static FoundLibrary> {
    static LIBRARY: OnceLock<Result<FoundLibrary>> = OnceLock::new();
    LIBRARY.get_or_init(open_library).as_ref().map_err(Clone::clone)
}

/// Returns the functions of the library.
fn library() -> Result<&'static Library> {
    Ok(&found()?.functions)
}

/// Opens the library.
fn open_library() -> Result<FoundLibrary> {
    let missing =
        |name: &str| Error::input(format!("NCCL is too old: it has no {name}")).hint(HINT);
    // SAFETY: NCCL does nothing when it is opened.
    let mut file = unsafe { open_first(&FILES) };
    let mut package = None;
    for path in python_packages::find(PACKAGE) {
        if file.is_none()
            && let Some(name) = path.to_str()
        {
            // SAFETY: as above.
            file = unsafe { open_first(&[name]) };
            package = file.is_some().then_some(path);
        }
    }
    let file =
        file.ok_or_else(|| Error::input("NCCL is missing: libnccl.so.2 was not found").hint(HINT))?;
    // SAFETY: its functions have had these types since they were introduced.
    let library = unsafe { Library::load(&file, missing) }?;
    let found = library.number()?;
    if found < OLDEST {
        return Err(
            Error::input(format!("NCCL is too old: {} is installed", named(found))).hint(HINT)
        );
    }
    // It stays open as long as the process.
    std::mem::forget(file);
    Ok(FoundLibrary { functions: library, package })
}

/// Returns NCCL's name and version, such as `NCCL 2.27.3`, and the file if the loader does not find
/// it by itself.
///
/// # Errors
/// Returns an error if the library is missing or too old.
pub fn name() -> Result<String> {
    let version = version()?;
    Ok(match &found()?.package {
        Some(path) => format!("NCCL {version} from {}", path.display()),
        None => format!("NCCL {version}"),
    })
}

/// Returns NCCL's version, such as `2.27.3`.
///
/// # Errors
/// Returns an error if the library is missing or too old.
pub fn version() -> Result<String> {
    Ok(named(library()?.number()?))
}

/// Formats a version, such as `2.27.3`.
fn named(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Creates a unique identifier of a communicator, by which `ncclCommInitRank` of other ranks finds
/// this process.
///
/// # Errors
/// Returns an error if the library is missing, or if it finds no network interface.
pub fn comm_id() -> Result<CommId> {
    let library = library()?;
    let mut id = UniqueId([0; size_of::<CommId>()]);
    // SAFETY: writes the identifier.
    library.check("create an identifier of a communicator", null(), unsafe {
        (library.get_unique_id)(&mut id)
    })?;
    Ok(id.0)
}

/// Returns a null handle.
fn null() -> Handle {
    std::ptr::null_mut()
}

impl Library {
    /// Returns the version in NCCL's encoding.
    fn number(&self) -> Result<c_int> {
        let mut found = 0;
        // SAFETY: writes one integer.
        self.check("report its version", null(), unsafe { (self.get_version)(&mut found) })?;
        Ok(found)
    }

    /// Turns a status code into an error. `action` is a phrase such as `"send"`.
    fn check(&self, action: &str, handle: Handle, code: c_int) -> Result<()> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        let text = |text: *const c_char| {
            // SAFETY: NCCL's texts are null or end in a zero, and stay.
            let text = (!text.is_null())
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
            text.filter(|text| !text.is_empty())
        };
        // SAFETY: any code has a text; the handle of `ncclCommGetLastError` may be null.
        let (what, more) =
            unsafe { (text((self.get_error_string)(code)), text((self.get_last_error)(handle))) };
        let message = what
            .into_iter()
            .chain(more.as_deref().and_then(|more| more.lines().last().map(str::to_owned)));
        let message = message.collect::<Vec<_>>().join(": ");
        Err(Error::device(format!("NCCL could not {action}: {message}"))
            .hint("set NCCL_DEBUG=INFO for more messages of NCCL"))
    }
}

/// A communicator.
struct Communicator {
    library: &'static Library,
    context: Arc<CudaContext>,
    /// `None` once it is destroyed.
    handle: Mutex<Option<Owned>>,
}

/// A handle used by one thread at a time.
struct Owned(Handle);

// SAFETY: communicators are bound to a device, not to a thread; the lock admits one thread at a
// time.
unsafe impl Send for Owned {}

impl Communicator {
    fn lock(&self) -> MutexGuard<'_, Option<Owned>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call with this communicator's device selected.
    fn call(&self, action: &str, call: impl FnOnce(&Library, Handle) -> c_int) -> Result<()> {
        check("be chosen", self.context.bind_to_thread())?;
        match &*self.lock() {
            Some(Owned(handle)) => self.library.check(action, *handle, call(self.library, *handle)),
            None => {
                Err(Error::device(format!("NCCL could not {action}: its communicator was aborted")))
            }
        }
    }

    /// Destroys the communicator, or aborts it unless `in_order`: it may only be destroyed if no
    /// operation is pending.
    fn end(&self, in_order: bool) {
        // The lock is released first, since these calls may take long.
        let Some(Owned(handle)) = self.lock().take() else { return };
        // A communicator that cannot be destroyed any more ends with the process.
        let _ = self.context.bind_to_thread();
        // SAFETY: the handle was the last one.
        unsafe {
            if in_order {
                (self.library.comm_destroy)(handle)
            } else {
                (self.library.comm_abort)(handle)
            }
        };
    }
}

impl CommState for Communicator {
    fn is_settled(&self) -> Result<bool> {
        let mut state = 0;
        // SAFETY: the communicator lives; writes one integer.
        self.call("report its state", |library, handle| unsafe {
            (library.comm_get_async_error)(handle, &mut state)
        })?;
        self.call("make progress", |_, _| state)?;
        Ok(state == 0)
    }
}

/// An NCCL communicator of several ranks.
pub struct NcclComm {
    communicator: Arc<Communicator>,
    queue: CommQueue,
    rank: usize,
    size: usize,
    parts: OnceCell<()>,
}

impl NcclComm {
    /// Joins a communicator on the device of these streams, see
    /// [`DeviceCopies::init_rank`](hpctrain_device::DeviceCopies::init_rank).
    ///
    /// # Errors
    /// Returns an error if the library is missing or fails.
    pub fn init_rank(
        streams: Arc<CommStreams>,
        programs: &Arc<KernelModules>,
        comm_id: &CommId,
        rank: usize,
        size: usize,
    ) -> Result<Self> {
        let library = library()?;
        let context = streams.compute.context();
        check("be chosen", context.bind_to_thread())?;
        // The kernel is loaded before any message, since loading may synchronise the device.
        let fold = OrderedSumKernel::load(programs)?;
        let mut handle = null();
        let mut config = Config::NON_BLOCKING;
        let ranks = count(size)?;
        let number = count(rank)?;
        // SAFETY: writes the handle; the configuration is one of 2.14, and read before the call
        // returns.
        let code = unsafe {
            (library.comm_init_rank_config)(
                &mut handle,
                ranks,
                UniqueId(*comm_id),
                number,
                &mut config,
            )
        };
        library.check("initialise the communicator", null(), code)?;
        let handle = Mutex::new(Some(Owned(handle)));
        let communicator = Arc::new(Communicator { library, context: context.clone(), handle });
        let queue = CommQueue::new(streams, fold, communicator.clone());
        Ok(Self { communicator, queue, rank, size, parts: OnceCell::new() })
    }
}

/// Converts a number of ranks to NCCL's type.
fn count(number: usize) -> Result<c_int> {
    c_int::try_from(number)
        .map_err(|_| Error::internal(format!("{number} ranks are more than NCCL supports")))
}

/// Returns the status code of a group from those of all its calls: the first error, or
/// [`IN_PROGRESS`] if a call is in progress, or success. All calls are made, because one that is in
/// progress does not end the group.
fn group_outcome(codes: impl IntoIterator<Item = c_int>) -> c_int {
    codes.into_iter().fold(0, |outcome, code| match outcome {
        0 => code,
        IN_PROGRESS if code != 0 => code,
        _ => outcome,
    })
}

/// Returns the address of a span.
fn at(span: DeviceSpan<'_>) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(span.address())
}

impl DeviceComm for NcclComm {
    fn begin(&self, ready: Option<&dyn DeviceEvent>) -> Result<()> {
        self.queue.begin(ready)
    }

    fn end(&self) -> Result<Arc<dyn DeviceOperation>> {
        self.queue.end()
    }

    fn exchange(
        &self,
        sends: &[(usize, DeviceSpan<'_>)],
        receives: &[(usize, DeviceSpan<'_>)],
    ) -> Result<()> {
        let stream = self.queue.streams.messages.cu_stream().cast();
        // All ranks fit NCCL's type of ranks.
        count(self.size)?;
        self.communicator.call("exchange a message", |library, handle| {
            // SAFETY: the communicator is alive, and the caller keeps the spans alive until it is
            // done with them. A group that was started is ended on every path.
            unsafe {
                let begun = (library.group_start)();
                let send = |&(to, span): &(usize, DeviceSpan<'_>)| {
                    (library.send)(at(span), span.words(), WORD, to as c_int, handle, stream)
                };
                let receive = |&(from, span): &(usize, DeviceSpan<'_>)| {
                    (library.recv)(at(span), span.words(), WORD, from as c_int, handle, stream)
                };
                let sent = group_outcome(sends.iter().map(send));
                let received = group_outcome(receives.iter().map(receive));
                let ended = (library.group_end)();
                group_outcome([begun, sent, received, ended])
            }
        })
    }

    fn sum_in_order(&self, folds: &[OrderedSum<'_>]) -> Result<()> {
        self.queue.sum_in_order(folds)
    }

    fn wait_for_sums(&self, but: usize) -> Result<()> {
        self.queue.wait_for_sums(but)
    }

    fn collective(&self, call: DeviceCollective, memory: DeviceSpan<'_>) -> Result<()> {
        let stream = self.queue.streams.messages.cu_stream().cast();
        let part = memory.words() / self.size;
        let mine = at(memory.part(self.rank * part..(self.rank + 1) * part));
        let all = at(memory);
        let words = memory.words();
        let root = match call {
            DeviceCollective::Broadcast { root } => count(root)?,
            _ => 0,
        };
        self.communicator.call("run a collective", |library, handle| {
            // SAFETY: the communicator is alive, and the caller keeps the memory alive until it is
            // done with it. For in-place collectives NCCL requires that `mine` is part number
            // `rank` of `all`.
            unsafe {
                match call {
                    DeviceCollective::AllReduce => {
                        (library.all_reduce)(all, all, words, WORD, SUM, handle, stream)
                    }
                    DeviceCollective::Reduce => {
                        (library.reduce)(all, all, words, WORD, SUM, root, handle, stream)
                    }
                    DeviceCollective::ReduceScatter => {
                        (library.reduce_scatter)(all, mine, part, WORD, SUM, handle, stream)
                    }
                    DeviceCollective::AllGather => {
                        (library.all_gather)(mine, all, part, WORD, handle, stream)
                    }
                    DeviceCollective::Broadcast { .. } => {
                        (library.broadcast)(all, all, words, WORD, root, handle, stream)
                    }
                }
            }
        })
    }

    fn part(&self) -> Result<()> {
        self.parts.get_or_init(|| ());
        // SAFETY: the communicator lives.
        self.communicator.call("finalise the communicator", |library, handle| unsafe {
            (library.comm_finalize)(handle)
        })
    }

    fn mark(&self) -> Result<Box<dyn DeviceEvent>> {
        self.queue.mark()
    }

    fn queued(&self) -> Box<dyn DeviceEvent> {
        self.queue.queued()
    }

    fn abort(&self) {
        self.communicator.end(false);
    }

    fn synchronize(&self) {
        self.queue.synchronize();
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let in_order = self.parts.get().is_some() && self.communicator.is_settled() == Ok(true);
        self.communicator.end(in_order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_a_group_is_not_hidden_by_a_call_in_progress() {
        /// `ncclSystemError`
        const SYSTEM: c_int = 2;
        /// `ncclInvalidUsage`
        const USAGE: c_int = 5;
        assert_eq!(group_outcome([]), 0);
        assert_eq!(group_outcome([0, 0]), 0);
        assert_eq!(group_outcome([0, IN_PROGRESS, 0]), IN_PROGRESS);
        assert_eq!(group_outcome([IN_PROGRESS, 0, SYSTEM]), SYSTEM);
        assert_eq!(group_outcome([IN_PROGRESS, USAGE, IN_PROGRESS, SYSTEM]), USAGE);
        assert_eq!(group_outcome([SYSTEM, IN_PROGRESS, USAGE]), SYSTEM);
        let mut made = 0;
        let calls = [IN_PROGRESS, 0, IN_PROGRESS].into_iter().inspect(|_| made += 1);
        assert_eq!((group_outcome(calls), made), (IN_PROGRESS, 3));
    }
}
