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

use std::any::Any;
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaStream, result};

use super::device_memcpy;
use super::event::{self, is_complete};
use super::launch_dims::Grid;
use super::libraries::check;
use super::nvrtc::{KernelModules, Variant};
use super::streams;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::library::open_first;
use hpctrain_device::library_functions;
use hpctrain_device::{
    CommId, DeviceCollective, DeviceComm, DeviceEvent, DeviceOperation, DeviceSpan, DeviceTimer,
    MAX_SUM_TERMS, OrderedSum,
};

/// The file names of the run-time and of the development package.
const FILES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest supported version, in NCCL's encoding.
const OLDEST: c_int = 21_800;

/// The hint if NCCL is missing.
const HINT: &str = "install NCCL 2.18 or later (pip install nvidia-nccl-cu13 has it) and name its folder in LD_LIBRARY_PATH, \
     or set comm.transport=host-staged";

/// `ncclInProgress`. Success is 0.
const IN_PROGRESS: c_int = 7;

/// `ncclFloat32`. Copies preserve all bits.
const WORD: c_int = 7;

/// `ncclSum`
const SUM: c_int = 0;

/// The polling interval of a waiting thread.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

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

/// Returns the library, which is opened once.
fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    LIBRARY.get_or_init(open_library).as_ref().map_err(Clone::clone)
}

/// Opens the library.
fn open_library() -> Result<Library> {
    let missing =
        |name: &str| Error::input(format!("NCCL is too old: it has no {name}")).hint(HINT);
    // SAFETY: NCCL does nothing when it is opened.
    let file = unsafe { open_first(&FILES) };
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
    Ok(library)
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

    /// Returns true if all operations started so far have succeeded. For stream operations that
    /// means that they have been queued.
    fn is_settled(&self) -> Result<bool> {
        let mut state = 0;
        // SAFETY: the communicator lives; writes one integer.
        self.call("report its state", |library, handle| unsafe {
            (library.comm_get_async_error)(handle, &mut state)
        })?;
        self.call("make progress", |_, _| state)?;
        Ok(state == 0)
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

/// The streams that all communicators of a device share, so that the device runs their operations in
/// one order. Nothing else uses them.
pub struct NcclStreams {
    /// The stream of messages.
    pub(super) messages: Arc<CudaStream>,
    /// The stream of ordered sums.
    sums: Arc<CudaStream>,
    /// The stream of the kernels.
    compute: Arc<CudaStream>,
}

impl NcclStreams {
    /// Creates the streams besides `compute`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn new(compute: &Arc<CudaStream>) -> Result<Self> {
        Ok(Self {
            messages: streams::high_priority(compute.context())?,
            sums: streams::high_priority(compute.context())?,
            compute: compute.clone(),
        })
    }
}

/// An NCCL communicator of several ranks.
pub struct NcclComm {
    communicator: Arc<Communicator>,
    streams: Arc<NcclStreams>,
    rank: usize,
    size: usize,
    parts: OnceCell<()>,
    /// The kernel of ordered sums.
    fold: CudaFunction,
    /// Events at the ends of calls of `fold` for which no message waits yet, in order.
    folded: RefCell<VecDeque<CudaEvent>>,
    /// The start of the operation that was begun last.
    begun: RefCell<Option<Arc<CudaEvent>>>,
}

impl NcclComm {
    /// Joins a communicator on the device of these streams, see
    /// [`DeviceCopies::init_rank`](hpctrain_device::DeviceCopies::init_rank).
    ///
    /// # Errors
    /// Returns an error if the library is missing or fails.
    pub fn init_rank(
        streams: Arc<NcclStreams>,
        programs: &Arc<KernelModules>,
        comm_id: &CommId,
        rank: usize,
        size: usize,
    ) -> Result<Self> {
        let library = library()?;
        let context = streams.compute.context();
        check("be chosen", context.bind_to_thread())?;
        // The kernel is loaded before any message, since loading may synchronise the device.
        let fold = programs.function(
            Variant { source: "reduce_terms.cu", narrow: false, head: None },
            "fold_terms",
            0,
        )?;
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
        let (folded, begun) = (RefCell::default(), RefCell::default());
        Ok(Self { communicator, streams, rank, size, parts: OnceCell::new(), fold, folded, begun })
    }

    /// Queues an ordered sum.
    fn add(&self, OrderedSum { own, number, others }: OrderedSum<'_>) -> Result<()> {
        let ranks = others.words().checked_div(own.words()).map_or(1, |others| others + 1);
        assert!(
            others.words() == (ranks - 1) * own.words() && number < ranks,
            "term {number} of {ranks}"
        );
        if ranks > MAX_SUM_TERMS {
            return Err(Error::internal(format!(
                "an ordered sum of {ranks} terms, more than {MAX_SUM_TERMS}"
            )));
        }
        let from = others.address() as u64;
        let to = own.address() as u64;
        let (words, stride) = (own.words() as i64, own.words() as i64);
        let number = count(number)?;
        let ranks = count(ranks)?;
        let mut args: [*mut c_void; 6] = [
            std::ptr::from_ref(&from).cast_mut().cast(),
            std::ptr::from_ref(&to).cast_mut().cast(),
            std::ptr::from_ref(&words).cast_mut().cast(),
            std::ptr::from_ref(&stride).cast_mut().cast(),
            std::ptr::from_ref(&number).cast_mut().cast(),
            std::ptr::from_ref(&ranks).cast_mut().cast(),
        ];
        let Grid { blocks, threads, shared } = Grid::over(own.words());
        let stream = self.streams.sums.cu_stream();
        // SAFETY: the kernel takes two addresses, two lengths and two integers; `own` has `words`
        // words, and `others` has as many for each other term.
        let queued = unsafe {
            result::launch_kernel(
                self.fold.cu_function(),
                blocks,
                threads,
                shared,
                stream,
                &mut args,
            )
        };
        check("add messages", queued)
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
        let NcclStreams { messages, compute, .. } = &*self.streams;
        check("be chosen", compute.context().bind_to_thread())?;
        if let Some(ready) = ready {
            let ready: &dyn Any = ready;
            let ready = ready
                .downcast_ref::<device_memcpy::Mark>()
                .ok_or_else(|| Error::internal("an event of another kind of device"))?;
            check("wait for another stream", messages.wait(&ready.0))?;
        }
        *self.begun.borrow_mut() = Some(Arc::new(event::timed(messages)?));
        Ok(())
    }

    fn end(&self) -> Result<Arc<dyn DeviceOperation>> {
        self.wait_for_sums(0)?;
        let begun = self.begun.borrow_mut().take();
        let begun = begun.ok_or_else(|| Error::internal("an operation ends that has not begun"))?;
        Ok(Arc::new(Operation {
            communicator: self.communicator.clone(),
            begun,
            ended: event::timed(&self.streams.messages)?,
            compute: self.streams.compute.clone(),
        }))
    }

    fn exchange(
        &self,
        sends: &[(usize, DeviceSpan<'_>)],
        receives: &[(usize, DeviceSpan<'_>)],
    ) -> Result<()> {
        let stream = self.streams.messages.cu_stream().cast();
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
        if !folds.is_empty() {
            let NcclStreams { messages, sums, .. } = &*self.streams;
            check("wait for another stream", sums.join(messages))?;
            folds.iter().try_for_each(|&fold| self.add(fold))?;
        }
        // A call without sums counts as a call too.
        self.folded
            .borrow_mut()
            .push_back(check("record an event", self.streams.sums.record_event(None))?);
        Ok(())
    }

    fn wait_for_sums(&self, but: usize) -> Result<()> {
        let mut folded = self.folded.borrow_mut();
        let past = folded.len().saturating_sub(but);
        // The last event comes after the others.
        match folded.drain(..past).next_back() {
            Some(last) => check("wait for another stream", self.streams.messages.wait(&last)),
            None => Ok(()),
        }
    }

    fn collective(&self, call: DeviceCollective, memory: DeviceSpan<'_>) -> Result<()> {
        let stream = self.streams.messages.cu_stream().cast();
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
        self.wait_for_sums(0)?;
        let communicator = self.communicator.clone();
        let stream = self.streams.messages.clone();
        Ok(Box::new(Mark { communicator, stream, point: OnceCell::new() }))
    }

    fn queued(&self) -> Box<dyn DeviceEvent> {
        Box::new(Queued(self.communicator.clone()))
    }

    fn abort(&self) {
        self.communicator.end(false);
    }

    fn synchronize(&self) {
        let NcclStreams { messages, sums, .. } = &*self.streams;
        // Sums may be queued behind the messages. If waiting for them fails, the device has failed.
        let _ = messages.synchronize().and_then(|()| sums.synchronize());
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let in_order = self.parts.get().is_some() && self.communicator.is_settled() == Ok(true);
        self.communicator.end(in_order);
    }
}

/// An operation in the stream of messages.
struct Operation {
    communicator: Arc<Communicator>,
    begun: Arc<CudaEvent>,
    ended: CudaEvent,
    compute: Arc<CudaStream>,
}

impl DeviceOperation for Operation {
    fn is_done(&self) -> Result<bool> {
        // An error of another rank may keep the device from ever reaching the end.
        Ok(self.communicator.is_settled()? && is_complete(&self.ended)?)
    }

    fn before_compute(&self) -> Result<Box<dyn DeviceTimer>> {
        check("be chosen", self.compute.context().bind_to_thread())?;
        let idle_from = event::timed(&self.compute)?;
        check("wait for another stream", self.compute.wait(&self.ended))?;
        Ok(Box::new(Timer { begun: idle_from, ended: event::timed(&self.compute)? }))
    }

    fn seconds(&self) -> Result<f64> {
        Ok(f64::from(event::milliseconds(&self.begun, &self.ended)?) * 1e-3)
    }
}

/// The time between two events of a stream.
struct Timer {
    begun: CudaEvent,
    ended: CudaEvent,
}

impl DeviceTimer for Timer {
    fn seconds(&self) -> Result<Option<f64>> {
        if !is_complete(&self.ended)? {
            return Ok(None);
        }
        Ok(Some(f64::from(event::milliseconds(&self.begun, &self.ended)?) * 1e-3))
    }
}

/// Completes when the last operation started has been queued in its stream.
struct Queued(Arc<Communicator>);

impl DeviceEvent for Queued {
    fn is_done(&self) -> Result<bool> {
        self.0.is_settled()
    }

    fn wait(&self) -> Result<()> {
        while !self.is_done()? {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Completes when all operations started have finished.
struct Mark {
    communicator: Arc<Communicator>,
    stream: Arc<CudaStream>,
    /// An event after the work in the stream, once that is queued.
    point: OnceCell<CudaEvent>,
}

impl DeviceEvent for Mark {
    fn is_done(&self) -> Result<bool> {
        // This is checked even while the stream works, since an error of another rank may keep it
        // from ever finishing.
        if !self.communicator.is_settled()? {
            return Ok(false);
        }
        let point = match self.point.get() {
            Some(point) => point,
            None => {
                let point = check("record an event", self.stream.record_event(None))?;
                self.point.get_or_init(|| point)
            }
        };
        is_complete(point)
    }

    fn wait(&self) -> Result<()> {
        while !self.is_done()? {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
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
