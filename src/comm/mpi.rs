//! Ranks as processes that an MPI launcher started.
//!
//! All calls are made by one thread (`MPI_THREAD_FUNNELED`), through the bindings of rsmpi: its safe layer
//! ignores return codes. Waiting is ours: requests are started without blocking and polled as eagerly as
//! the pace allows, so that a rank with a busy core does not lose it to a spinning library, and so that an
//! abort is heard in the middle of a collective. The vendor's collectives alone block.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::num::NonZero;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use mpi::ffi;

use super::launch::launched_size;
use super::pace::Pace;
use super::shared::Shared;
use super::wire::{Members, Parcel, Vendor, Wire};
use super::worker::Worker;
use super::{Abort, Algorithm, Comm, NodeInfo, World};
use crate::backend::Backend;
use crate::error::{Error, Result};

/// Bytes of the longest message: counts are 31 bits wide.
const LONGEST: usize = 1 << 30;

/// Elements the vendor's collectives get at once: 16 MiB. Above that Open MPI leaves the cache.
const VENDOR_CHUNK: usize = 1 << 22;

/// Room for any text MPI may write: MPICH's version string is the longest.
const TEXT: usize = 8192;

/// Makes Open MPI's own waiting offer the core to others.
const YIELD: &str = "OMPI_MCA_mpi_yield_when_idle";

/// Initialises MPI on a new communication thread. Once in a process, from the main thread, before other
/// threads start: it may set an environment variable for MPI to read.
///
/// # Errors
/// MPI cannot be initialised, or the processes were started by the launcher of another MPI library.
pub fn start<B: Backend>(algorithm: Algorithm) -> Result<Comm<B>> {
    let env = |name: &str| std::env::var(name).ok();
    let local_size = env("OMPI_COMM_WORLD_LOCAL_SIZE").and_then(|size| size.parse().ok());
    if local_size > Some(cores()) && env(YIELD).is_none() {
        // SAFETY: as documented above no other thread of this process exists that could read the environment.
        unsafe { std::env::set_var(YIELD, "1") };
    }
    let shared: Arc<Shared> = Arc::default();
    let (tell, told) = sync_channel(1);
    let worker = Worker::start("comm".into(), algorithm, &shared, {
        let shared = shared.clone();
        move || {
            let (wire, news) = match Mpi::open(shared) {
                Ok((wire, world)) => (Some(Box::new(wire) as Box<dyn Wire>), Ok(world)),
                Err(error) => (None, Err(error)),
            };
            // The receiver waits below.
            let _ = tell.send(news);
            wire
        }
    });
    let world: World = told.recv().map_err(|_| Error::comm("the communication thread did not start"))??;
    match launched_size(env) {
        Some(started) if started > 1 && world.size == 1 => {
            worker.end();
            let message = format!("{started} processes were started, but {} sees only itself", world.library);
            Err(Error::comm(message).hint("start with the mpirun of the MPI library that hpctrain is linked with"))
        }
        _ => Ok(Comm::new(world, algorithm, Abort::Exit, shared, Some(worker))),
    }
}

/// Cores this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// The name and version in what `MPI_Get_library_version` tells: `"Open MPI v4.1.4, package: …"`,
/// `"MPICH Version:      4.1\nMPICH Release date: …"`.
fn short_version(text: &str) -> String {
    let first = text.split([',', '\n']).next().unwrap_or_default();
    first.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `MPI_IN_PLACE`, a macro that bindings cannot see: (void*)1 in Open MPI, (void*)-1 in MPICH and its descendants.
fn in_place(library: &str) -> *const c_void {
    std::ptr::without_provenance(if library.starts_with("Open MPI") { 1 } else { usize::MAX })
}

/// A count as MPI wants it.
fn count(len: usize) -> Result<c_int> {
    c_int::try_from(len).map_err(|_| Error::comm(format!("MPI cannot count {len} elements")))
}

/// Reads a text that MPI writes.
fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let (mut text, mut len) = ([0 as c_char; TEXT], 0);
    if write(text.as_mut_ptr(), &mut len) != 0 {
        return "unknown".into();
    }
    text[TEXT - 1] = 0;
    // SAFETY: the array outlives the borrow and ends in a zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

/// Turns a return code into an error.
fn check(code: c_int, call: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: MPI is initialised whenever one of its codes is checked; the buffer has room for any text.
    let reason = text(|to, len| unsafe { ffi::MPI_Error_string(code, to, len) });
    Err(Error::comm(format!("{call} failed: {reason}")))
}

/// A message that is leaving in the background.
struct Posted {
    requests: Vec<ffi::MPI_Request>,
    parcel: Box<dyn Parcel>,
}

struct Mpi {
    /// Communicators by group number; 0 is the world.
    groups: Vec<ffi::MPI_Comm>,
    rank: usize,
    posted: Vec<Posted>,
    in_place: *const c_void,
    crowded: bool,
    shared: Arc<Shared>,
}

impl Mpi {
    /// Initialises MPI on this thread, which makes all calls from now on.
    fn open(shared: Arc<Shared>) -> Result<(Self, World)> {
        let (mut initialized, mut provided) = (0, 0);
        let (mut rank, mut size, mut local_rank, mut local_size) = (0, 0, 0, 0);
        // SAFETY: naps of the pace end on time; affects this thread alone and takes no memory.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        // SAFETY: out-parameters are live locals, null arguments are allowed, and MPI_Initialized may be called
        // at any time; what follows MPI_Init_thread is called only if that succeeded.
        let (world, library, host) = unsafe {
            ffi::MPI_Initialized(&mut initialized);
            if initialized != 0 {
                return Err(Error::internal("MPI is initialised a second time"));
            }
            let (null, wanted) = (std::ptr::null_mut(), ffi::RSMPI_THREAD_FUNNELED);
            if ffi::MPI_Init_thread(null, null.cast(), wanted, &mut provided) != 0 || provided < wanted {
                return Err(Error::comm("MPI cannot be initialised for a program with threads"));
            }
            let world = ffi::RSMPI_COMM_WORLD;
            check(ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN), "MPI_Comm_set_errhandler")?;
            check(ffi::MPI_Comm_rank(world, &mut rank), "MPI_Comm_rank")?;
            check(ffi::MPI_Comm_size(world, &mut size), "MPI_Comm_size")?;
            let (mut node, kind) = (ffi::RSMPI_COMM_NULL, ffi::RSMPI_COMM_TYPE_SHARED);
            let code = ffi::MPI_Comm_split_type(world, kind, rank, ffi::RSMPI_INFO_NULL, &mut node);
            check(code, "MPI_Comm_split_type")?;
            check(ffi::MPI_Comm_rank(node, &mut local_rank), "MPI_Comm_rank")?;
            check(ffi::MPI_Comm_size(node, &mut local_size), "MPI_Comm_size")?;
            check(ffi::MPI_Comm_free(&mut node), "MPI_Comm_free")?;
            let library = text(|to, len| ffi::MPI_Get_library_version(to, len));
            (world, short_version(&library), text(|to, len| ffi::MPI_Get_processor_name(to, len)))
        };
        let node = NodeInfo { local_rank: local_rank as usize, local_size: local_size as usize, host };
        let mpi = Self {
            groups: vec![world],
            rank: rank as usize,
            posted: Vec::new(),
            in_place: in_place(&library),
            crowded: node.local_size > cores(),
            shared,
        };
        Ok((mpi, World { rank: rank as usize, size: size as usize, node, library }))
    }

    /// Ends all ranks. Used, too, when an error leaves MPI holding memory that is about to be given back.
    fn abort_all(&self, code: i32) -> ! {
        // SAFETY: called on the thread of all MPI calls, while MPI is initialised.
        unsafe { ffi::MPI_Abort(self.groups[0], code) };
        std::process::exit(code)
    }

    /// Starts sending one message of at most [`LONGEST`] bytes.
    ///
    /// # Safety
    /// The bytes stay where they are, unchanged, until the request is complete.
    unsafe fn start_send(&self, group: &Members, to: usize, bytes: &[u8]) -> Result<ffi::MPI_Request> {
        let (len, to) = (count(bytes.len())?, count(to)?);
        let comm = self.groups[group.id];
        // SAFETY: the caller keeps the bytes; the request is a live local.
        let (code, request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let from = bytes.as_ptr().cast();
            (ffi::MPI_Isend(from, len, ffi::RSMPI_UINT8_T, to, 0, comm, &mut request), request)
        };
        check(code, "MPI_Isend")?;
        self.shared.add_sent(bytes.len());
        Ok(request)
    }

    /// Starts receiving one message of at most [`LONGEST`] bytes.
    ///
    /// # Safety
    /// Nothing touches the bytes until the request is complete.
    unsafe fn start_receive(&self, group: &Members, from: usize, bytes: &mut [u8]) -> Result<ffi::MPI_Request> {
        let (len, from) = (count(bytes.len())?, count(from)?);
        let comm = self.groups[group.id];
        // SAFETY: the caller keeps the bytes; the request is a live local.
        let (code, request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let to = bytes.as_mut_ptr().cast();
            (ffi::MPI_Irecv(to, len, ffi::RSMPI_UINT8_T, from, 0, comm, &mut request), request)
        };
        check(code, "MPI_Irecv")?;
        Ok(request)
    }

    /// The status of a request, once it is complete. It then becomes a null one.
    fn test(request: &mut ffi::MPI_Request) -> Result<Option<ffi::MPI_Status>> {
        let mut done = 0;
        // SAFETY: a status is plain integers that MPI overwrites; out-parameters are live locals.
        let (code, status) = unsafe {
            let mut status = std::mem::zeroed();
            (ffi::MPI_Test(request, &mut done, &mut status), status)
        };
        check(code, "MPI_Test")?;
        Ok((done != 0).then_some(status))
    }

    /// The bytes that a complete request has received.
    fn received(status: &ffi::MPI_Status) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: the status is one that MPI wrote; the out-parameter is a live local.
        check(unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut bytes) }, "MPI_Get_count")?;
        Ok(bytes as usize)
    }

    /// As [`Wire::exchange`], for messages of at most [`LONGEST`] bytes. Returns only when MPI has let go of both
    /// buffers; if an error of MPI makes that impossible, the job ends.
    fn exchange_message(
        &mut self,
        group: &Members,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()> {
        let expected = receive.as_ref().map(|(from, bytes)| (group.ranks[*from], bytes.len()));
        // SAFETY: the buffer is borrowed until this function returns, which is after the request is complete.
        let start = |(from, bytes)| unsafe { self.start_receive(group, from, bytes) };
        let mut receiving = receive.map(start).transpose()?;
        // SAFETY: as above.
        let start = |(to, bytes)| unsafe { self.start_send(group, to, bytes) };
        let mut sending = match send.map(start).transpose() {
            Ok(sending) => sending,
            Err(error) if receiving.is_none() => return Err(error),
            Err(error) => self.give_up(&error),
        };
        let mut status = None;
        let mut pace = Pace::new(self.crowded);
        loop {
            status = self.completed(&mut receiving).or(status);
            self.completed(&mut sending);
            if receiving.is_none() && sending.is_none() {
                break;
            }
            self.poll();
            pace.pause(&self.shared);
        }
        let (Some((from, expected)), Some(status)) = (expected, status) else { return Ok(()) };
        match Self::received(&status)? {
            received if received == expected => Ok(()),
            received => Err(Error::comm(format!("rank {from} sent {received} bytes where {expected} were expected"))),
        }
    }

    /// Empties a slot whose request is complete.
    fn completed(&self, slot: &mut Option<ffi::MPI_Request>) -> Option<ffi::MPI_Status> {
        let status = Self::test(slot.as_mut()?).unwrap_or_else(|error| self.give_up(&error))?;
        *slot = None;
        Some(status)
    }

    /// Hears an abort, and gives back the parcels that have left.
    fn poll(&mut self) {
        if let Some(code) = self.shared.aborted() {
            self.abort_all(code);
        }
        let mut index = 0;
        while index < self.posted.len() {
            let mut requests = std::mem::take(&mut self.posted[index].requests);
            requests.retain_mut(|request| match Self::test(request) {
                Ok(done) => done.is_none(),
                Err(error) => self.give_up(&error),
            });
            if requests.is_empty() {
                self.posted.swap_remove(index).parcel.finish(Ok(()));
            } else {
                self.posted[index].requests = requests;
                index += 1;
            }
        }
    }

    /// Ends the job after an error that leaves MPI holding borrowed memory.
    fn give_up(&self, error: &Error) -> ! {
        log::error!("rank {}: {error}", self.rank);
        self.abort_all(error.exit_code())
    }
}

impl Wire for Mpi {
    fn exchange(
        &mut self,
        group: &Members,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()> {
        let (to, outgoing) = send.unwrap_or_default();
        let (from, incoming) = receive.unwrap_or_default();
        let (mut outgoing, mut incoming) = (outgoing.chunks(LONGEST), incoming.chunks_mut(LONGEST));
        loop {
            let send = outgoing.next().map(|bytes| (to, bytes));
            let receive = incoming.next().map(|bytes| (from, bytes));
            if send.is_none() && receive.is_none() {
                return Ok(());
            }
            self.exchange_message(group, send, receive)?;
        }
    }

    fn post(&mut self, group: &Members, to: usize, mut parcel: Box<dyn Parcel>) -> Result<()> {
        let bytes = match parcel.bytes() {
            Ok(bytes) => bytes,
            Err(error) => {
                parcel.finish(Err(error.clone()));
                return Err(error);
            }
        };
        let mut requests = Vec::with_capacity(1);
        for message in bytes.chunks(LONGEST) {
            // SAFETY: the parcel keeps its bytes in place until it is finished, which `poll` does only when
            // all requests are complete.
            match unsafe { self.start_send(group, to, message) } {
                Ok(request) => requests.push(request),
                Err(error) => self.give_up(&error),
            }
        }
        self.posted.push(Posted { requests, parcel });
        self.poll();
        Ok(())
    }

    fn progress(&mut self) -> Result<bool> {
        self.poll();
        Ok(!self.posted.is_empty())
    }

    fn vendor(&mut self, group: &Members, call: Vendor, memory: &mut [f32]) -> Result<()> {
        let (comm, in_place) = (self.groups[group.id], self.in_place);
        let part = memory.len() / group.size();
        // SAFETY: reading constants of the library.
        let (float, sum) = unsafe { (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM) };
        let others = size_of_val(memory) / group.size() * (group.size() - 1);
        self.shared.add_sent(if let Vendor::AllReduce = call { 2 * others } else { others });
        match call {
            Vendor::AllReduce => memory.chunks_mut(VENDOR_CHUNK).try_for_each(|chunk| {
                let (to, len) = (chunk.as_mut_ptr().cast(), count(chunk.len())?);
                // SAFETY: the call blocks, and `len` elements of the exclusive slice are read and written.
                check(unsafe { ffi::MPI_Allreduce(in_place, to, len, float, sum, comm) }, "MPI_Allreduce")
            }),
            Vendor::ReduceScatter => {
                let (to, len) = (memory.as_mut_ptr().cast(), count(part)?);
                // SAFETY: the call blocks; `size` parts of the exclusive slice are read, the first is written.
                let code = unsafe { ffi::MPI_Reduce_scatter_block(in_place, to, len, float, sum, comm) };
                check(code, "MPI_Reduce_scatter_block")?;
                memory.copy_within(0..part, group.rank * part);
                Ok(())
            }
            Vendor::AllGather => {
                let (to, len) = (memory.as_mut_ptr().cast(), count(part)?);
                // SAFETY: the call blocks; my part of the exclusive slice is read, the others are written.
                check(unsafe { ffi::MPI_Allgather(in_place, 0, float, to, len, float, comm) }, "MPI_Allgather")
            }
            Vendor::Broadcast { root } => memory.chunks_mut(VENDOR_CHUNK).try_for_each(|chunk| {
                let (to, len) = (chunk.as_mut_ptr().cast(), count(chunk.len())?);
                // SAFETY: the call blocks, and `len` elements of the exclusive slice are read or written.
                check(unsafe { ffi::MPI_Bcast(to, len, float, count(root)?, comm) }, "MPI_Bcast")
            }),
        }
    }

    fn split(&mut self, color: usize) -> Result<usize> {
        let (color, key) = (count(color)?, count(self.rank)?);
        // SAFETY: the out-parameter is a live local.
        let (code, group) = unsafe {
            let mut group = ffi::RSMPI_COMM_NULL;
            (ffi::MPI_Comm_split(self.groups[0], color, key, &mut group), group)
        };
        check(code, "MPI_Comm_split")?;
        self.groups.push(group);
        Ok(self.groups.len() - 1)
    }

    fn abort(&mut self, code: i32) {
        self.abort_all(code)
    }

    fn leave(&mut self, in_order: bool) {
        // After an error other ranks may wait for this one; only `abort` can end them.
        for posted in self.posted.drain(..) {
            posted.parcel.abandon(Error::comm("another message failed before this one had left"));
        }
        if in_order {
            // SAFETY: nothing is in flight, no MPI call follows.
            unsafe { ffi::MPI_Finalize() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_briefly() {
        assert_eq!(short_version("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"), "Open MPI v4.1.4");
        assert_eq!(short_version("MPICH Version:      4.1\nMPICH Release date: x"), "MPICH Version: 4.1");
    }
}
