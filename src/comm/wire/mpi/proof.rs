//! Whether the MPI library takes addresses of a device: by its claim, and by a test.
//!
//! A library that does not know the device crashes on its addresses, and some say that they know it where its driver is
//! missing. So a child tries, alone in a world of its own.

use std::ffi::c_int;
use std::io::Read as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use mpi::ffi;

use super::calls::{check, count};
use crate::backend::{Backend, MemoryKind, Reach, Span};
use crate::error::{Error, Result};

/// Elements that are tried: more than any library sends along with the envelope of a message.
const LEN: usize = 100_000;

/// A device may take its time to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// Polling interval of the child's state.
const LOOK: Duration = Duration::from_millis(10);

/// Variables by which a launcher speaks to the processes it starts; the child was started by none.
const OF_LAUNCHERS: [&str; 7] = ["OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HYDRA_", "MPIR_"];

/// Prefix of the variables among them that a user sets for every process.
const OF_USERS: &str = "OMPI_ALLOW_";

/// Whether the library claims to know CUDA. The system's library may lack the function, so no program that is linked
/// with it could call it by name.
pub fn claims_devices() -> bool {
    // SAFETY: the name ends in a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"MPIX_Query_cuda_support".as_ptr()) };
    if found.is_null() {
        return false;
    }
    // SAFETY: this is the function's type in Open MPI and in MPICH and its descendants.
    let query: extern "C" fn() -> c_int = unsafe { std::mem::transmute(found) };
    query() != 0
}

/// Tries the direct way in a child of this process, which is this program with other arguments and ends in [`prove`].
///
/// # Errors
/// The child failed: with its message.
pub fn prove_in_child(arguments: &[&str]) -> Result<()> {
    let program = std::env::current_exe().map_err(|e| Error::internal(format!("where is this program? {e}")))?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if OF_LAUNCHERS.iter().any(|prefix| text.starts_with(prefix)) && !text.starts_with(OF_USERS) {
            command.env_remove(&name);
        }
    }
    // Open MPI starts no daemon for a process that will start no others.
    command.env("OMPI_MCA_ess_singleton_isolated", "1");
    let fails = |why: String| Error::input(format!("the MPI library cannot exchange memory of the GPU: {why}"));
    let mut child = command.spawn().map_err(|e| fails(format!("no process could try: {e}")))?;
    let (tell, told) = channel();
    if let Some(mut stderr) = child.stderr.take() {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            // Unreadable output is left out.
            let _ = stderr.read_to_end(&mut text);
            let _ = tell.send(text);
        });
    }
    match ending(&mut child) {
        Ok(Some(status)) if status.success() => Ok(()),
        Ok(Some(status)) => {
            let text = told.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let line = text.lines().find_map(|line| line.strip_prefix("error: "));
            Err(fails(line.map_or_else(|| status.to_string(), str::to_string)))
        }
        Ok(None) => Err(fails(format!("no answer after {} seconds", PATIENCE.as_secs()))),
        Err(e) => Err(fails(e.to_string())),
    }
}

/// The exit status of the child; none if it takes too long and is killed.
fn ending(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(LOOK);
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// Hands the library memory of a device: a message and a sum of this process with itself. It crashes, or returns.
///
/// # Errors
/// The memory is the host's, or the elements received differ from those sent.
pub fn prove<B: Backend>(backend: &B) -> Result<()> {
    let values: Vec<f32> = (0..LEN).map(|i| i as f32).collect();
    let mut bufs = Vec::new();
    for scale in [1.0, 0.0, 0.0] {
        let values: Vec<f32> = values.iter().map(|x| x * scale).collect();
        let buf = backend.upload_f32(MemoryKind::Communication, &values)?;
        if let Some(ready) = B::stamp(&buf)? {
            ready.wait()?;
        }
        bufs.push(buf);
    }
    let spans = bufs.iter_mut().map(|buf| match B::reach(buf, 0..LEN)? {
        Reach::Device(memory, _) => Ok(memory),
        Reach::Host(_) => Err(Error::input("there is no GPU whose memory could be exchanged")),
    });
    let spans = spans.collect::<Result<Vec<_>>>()?;
    let at = |span: Span<'_>| std::ptr::with_exposed_provenance_mut(span.address());
    let (sent, received, sum) = (at(spans[0]), at(spans[1]), at(spans[2]));
    let len = count(LEN)?;
    // SAFETY: MPI is used by this thread alone, in order; the spans live until the end, hold `len` elements each, and
    // may be given to MPI; status and out-parameters are live locals.
    unsafe {
        let mut provided = 0;
        check(
            ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), ffi::RSMPI_THREAD_FUNNELED, &mut provided),
            "MPI_Init_thread",
        )?;
        let (alone, float, mut status) = (ffi::RSMPI_COMM_SELF, ffi::RSMPI_FLOAT, std::mem::zeroed());
        let code = ffi::MPI_Sendrecv(sent, len, float, 0, 0, received, len, float, 0, 0, alone, &mut status);
        check(code, "MPI_Sendrecv")?;
        check(ffi::MPI_Allreduce(received, sum, len, float, ffi::RSMPI_SUM, alone), "MPI_Allreduce")?;
        check(ffi::MPI_Finalize(), "MPI_Finalize")?;
    }
    for buf in &bufs {
        let mut arrived = vec![0.0; LEN];
        backend.download(B::all(buf), &mut arrived)?;
        if arrived != values {
            return Err(Error::comm("a message of its memory arrived changed"));
        }
    }
    Ok(())
}
