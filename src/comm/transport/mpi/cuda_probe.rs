//! Probes whether the MPI library is CUDA-aware: by its claim, and by a test in child processes.
//!
//! A library that is not CUDA-aware crashes on device addresses, and some claim to be where the
//! driver is missing. So the test runs in two processes of this program that the library's own
//! launcher starts on this node; it needs two, because transfers between processes take another
//! path than within one. Where no launcher is found, one process exchanges with itself, and the log
//! says that no more was tested.

use std::ffi::{c_int, c_void};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::ffi;

use super::calls::{check, count};
use super::{library, node};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::{spawn, spawn_scoped};
use hpctrain_device::{Backend, CommBuffer, MemoryKind};

/// Elements of a test message: more than any library sends eagerly.
const ELEMENTS: usize = 100_000;

/// Time limit of the probe; a device may be slow to start.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Time that a launcher has after SIGTERM to end its processes and itself.
const TERMINATION_GRACE: Duration = Duration::from_secs(2);

/// Interval at which the child's state is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Prefixes of variables that launchers set for their processes, and batch systems for launchers.
/// They are removed for the child, which starts alone and stays on this node.
const LAUNCHER_PREFIXES: [&str; 12] = [
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "SLURM_",
    "HYDRA_",
    "MPIR_",
    "PBS_",
    "LSB_",
    "LOADL_",
    "PE_HOSTFILE",
    "FLUX_",
];

/// Prefix of the variables among them that users set, which are kept.
const USER_PREFIX: &str = "OMPI_ALLOW_";

/// Settings with which a launcher starts two processes anywhere: oversubscribed and without binding
/// to cores.
const LAUNCHER_SETTINGS: [(&str, &str); 4] = [
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
];

/// A variable that is set for probe processes which are started as a pair.
const PAIR: &str = "HPCTRAIN_PROBE_PAIR";

/// Returns true if the library claims to be CUDA-aware. The function is looked up at run time,
/// because a program that is linked with a library without it could not start.
pub fn claims_cuda_aware() -> bool {
    // SAFETY: the name ends in a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"MPIX_Query_cuda_support".as_ptr()) };
    if found.is_null() {
        return false;
    }
    // SAFETY: this is the function's type in Open MPI and in MPICH and its descendants.
    let query: extern "C" fn() -> c_int = unsafe { std::mem::transmute(found) };
    query() != 0
}

/// Finds the library's launcher. A system may have those of other MPI libraries as well.
fn launcher() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let library = library().unwrap_or_default();
    launcher_in(&maps, library.starts_with("Open MPI"), |path| path.is_file())
}

/// Finds the launcher near the MPI library that `maps` lists, and otherwise in `PATH`.
fn launcher_in(maps: &str, is_open_mpi: bool, is_there: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let names: &[&str] = match is_open_mpi {
        true => &["mpirun.openmpi", "mpirun", "mpiexec"],
        false => &["mpiexec.hydra", "mpiexec.mpich", "mpiexec"],
    };
    let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let libraries = mapped.filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libmpi"))
    });
    let near_library = libraries.flat_map(Path::ancestors).map(|folder| folder.join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = near_library.chain(std::env::split_paths(&path)).collect::<Vec<_>>();
    let mut programs = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    programs.find(|program| is_there(program))
}

/// Runs the probe in child processes: this program with `arguments`, by which it calls [`run_cuda_probe`].
/// Returns the number of processes.
///
/// # Errors
/// Returns an error with the message of a process if one failed, or if none could be started or
/// ended in time.
pub fn probe_in_child(arguments: &[&str]) -> Result<usize> {
    let program = std::env::current_exe()
        .map_err(|e| Error::internal(format!("cannot find this program's file: {e}")))?;
    let launcher = launcher();
    let mut command = Command::new(launcher.as_ref().unwrap_or(&program));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if LAUNCHER_PREFIXES.iter().any(|prefix| text.starts_with(prefix))
            && !text.starts_with(USER_PREFIX)
        {
            command.env_remove(&name);
        }
    }
    let processes = if launcher.is_some() {
        command.args(["-n", "2"]).arg(&program).env(PAIR, "1").envs(LAUNCHER_SETTINGS);
        2
    } else {
        log::warn!(
            "found no launcher of {}: CUDA-aware MPI is tested only inside one process",
            library()?
        );
        // Open MPI starts no daemon for a process that will start no others.
        command.env("OMPI_MCA_ess_singleton_isolated", "1");
        1
    };
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let fails = |why: String| {
        Error::input(format!("the MPI library cannot exchange memory of the GPU: {why}"))
    };
    let mut child =
        command.spawn().map_err(|e| fails(format!("cannot start the probe process: {e}")))?;
    let (sender, receiver) = channel();
    if let Some(mut stderr) = child.stderr.take() {
        let listening = spawn("probe-errors", move || {
            let mut text = Vec::new();
            // Unreadable output is ignored.
            let _ = stderr.read_to_end(&mut text);
            let _ = sender.send(text);
        });
        if let Err(e) = listening {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
            return Err(e);
        }
    }
    match wait_with_timeout(&mut child) {
        Ok(Some(status)) if status.success() => Ok(processes),
        Ok(Some(status)) => {
            let text = receiver.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let line = text.lines().find_map(|line| line.strip_prefix("error: "));
            Err(fails(line.map_or_else(|| describe(status), str::to_string)))
        }
        Ok(None) => Err(fails(format!("no answer after {} seconds", TIMEOUT.as_secs()))),
        Err(e) => Err(fails(e.to_string())),
    }
}

/// Describes how a child ended. A launcher reports the signal of its process in the exit code, as a
/// shell does.
fn describe(status: ExitStatus) -> String {
    match status.code() {
        Some(code @ 129..=159) => format!("a process ended by signal {}", code - 128),
        _ => status.to_string(),
    }
}

/// Waits for the child. Returns its exit status, or `None` if it took too long and was ended.
fn wait_with_timeout(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    if let Some(status) = wait_within(child, TIMEOUT)? {
        return Ok(Some(status));
    }
    if let Ok(process) = c_int::try_from(child.id()) {
        // SAFETY: the child has not been waited for, so the process id is still its own.
        unsafe { libc::kill(process, libc::SIGTERM) };
    }
    if wait_within(child, TERMINATION_GRACE)?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(None)
}

/// Waits for the child until `limit`. Returns its exit status, or `None` if it still runs.
fn wait_within(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(None)
}

/// Runs the test in this process: passes device memory to MPI, in messages and sums with itself,
/// and with the other process if it was started as one of two. A library that is not CUDA-aware may
/// crash.
///
/// Like in a run, a separate thread makes all MPI calls, starts before the device is opened, and
/// selects the device when it accesses a buffer. `device` opens the device of the process with a
/// rank.
///
/// # Errors
/// Returns an error if the memory is the host's, the elements received differ from those sent, or
/// the other process of a pair is missing.
pub fn run_cuda_probe<B: Backend>(device: impl FnOnce(usize) -> Result<B>) -> Result<()> {
    std::thread::scope(|scope| {
        let (world_sender, world) = channel();
        let (buffer_sender, buffers) = channel();
        let exchanging =
            spawn_scoped(scope, "probe-mpi", move || exchange::<B>(&world_sender, &buffers))?;
        let exchanged = || {
            exchanging.join().unwrap_or_else(|_| Err(Error::internal("the thread of MPI panicked")))
        };
        let Ok((rank, size)) = world.recv() else { return exchanged().map(drop) };
        let backend = device(rank)?;
        let mine = values(rank);
        let empty = vec![0.0; ELEMENTS];
        let mut bufs = Vec::new();
        for values in [&mine, &empty, &empty, &empty, &empty] {
            let buf = backend.upload_f32(MemoryKind::Communication, values)?;
            if let Some(ready) = B::record_event(&buf)? {
                ready.wait()?;
            }
            bufs.push(buf);
        }
        // If the thread has ended, its result says why.
        let _ = buffer_sender.send(bufs);
        let bufs = exchanged()?;
        let theirs = values(other(rank));
        let mut sum = mine.clone();
        if size > 1 {
            sum.iter_mut().zip(&theirs).for_each(|(x, y)| *x += y);
        }
        let with_other = if size > 1 { [&theirs, &sum] } else { [&empty, &empty] };
        for (buf, want) in bufs.iter().zip([&mine, &mine, &mine].into_iter().chain(with_other)) {
            let mut arrived = vec![0.0; ELEMENTS];
            backend.download(B::all(buf), &mut arrived)?;
            if arrived != *want {
                return Err(Error::comm("received elements differ from those sent"));
            }
        }
        Ok(())
    })
}

/// Returns the elements of a process. Sums of two are exact.
fn values(rank: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|i| i as f32 + 0.5 * rank as f32).collect()
}

/// Returns the rank of the other one of two processes.
fn other(rank: usize) -> usize {
    1 - rank.min(1)
}

/// Runs the MPI thread: sends its rank and the number of processes, and then exchanges the buffers
/// that it receives: the first with itself into the second and, summed, the third; and with the
/// other process into the fourth and, summed, the fifth.
fn exchange<B: Backend>(
    world_sender: &Sender<(usize, usize)>,
    buffers: &Receiver<Vec<B::Buf>>,
) -> Result<Vec<B::Buf>> {
    ffi::open()?;
    let mut provided = 0;
    let null = std::ptr::null_mut();
    // SAFETY: MPI is used by this thread alone, in order; the parameters are live locals or null,
    // which is allowed.
    let begun =
        unsafe { ffi::MPI_Init_thread(null, null.cast(), ffi::thread_funneled(), &mut provided) };
    check(begun, "MPI_Init_thread")?;
    let world = ffi::comm_world();
    let (rank, size) = node::place(world)?;
    if size != 2 && std::env::var_os(PAIR).is_some() {
        return Err(Error::input(format!(
            "the launcher started {size} processes in one world instead of 2: it belongs to another MPI library"
        )));
    }
    let _ = world_sender.send((rank, size));
    let Ok(mut bufs) = buffers.recv() else {
        return Err(Error::device("the device could not be opened"));
    };
    let spans = bufs.iter_mut().map(|buf| match B::comm_buffer(buf, 0..ELEMENTS)? {
        CommBuffer::Device(memory, _) => Ok(memory),
        CommBuffer::Host(_) => Err(Error::input("there is no GPU whose memory could be exchanged")),
    });
    let spans = spans.collect::<Result<Vec<_>>>()?;
    let [sent, received, sum, from_other, sum_of_both] = [0, 1, 2, 3, 4]
        .map(|i: usize| std::ptr::with_exposed_provenance_mut::<c_void>(spans[i].address()));
    let len = count(ELEMENTS)?;
    let partner = count(other(rank))?;
    // SAFETY: MPI is used by this thread alone, in order; the spans live until the end, hold `len`
    // elements each, and may be given to MPI; the status is a live local.
    unsafe {
        let alone = ffi::comm_self();
        let float = ffi::float();
        let mut status = std::mem::zeroed();
        let code = ffi::MPI_Sendrecv(
            sent,
            len,
            float,
            0,
            0,
            received,
            len,
            float,
            0,
            0,
            alone,
            &mut status,
        );
        check(code, "MPI_Sendrecv")?;
        check(ffi::MPI_Allreduce(received, sum, len, float, ffi::sum(), alone), "MPI_Allreduce")?;
        if size > 1 {
            let to = partner;
            let tag = 0;
            let code = ffi::MPI_Sendrecv(
                sent,
                len,
                float,
                to,
                tag,
                from_other,
                len,
                float,
                to,
                tag,
                world,
                &mut status,
            );
            check(code, "MPI_Sendrecv")?;
            check(
                ffi::MPI_Allreduce(sent, sum_of_both, len, float, ffi::sum(), world),
                "MPI_Allreduce",
            )?;
        }
        check(ffi::MPI_Finalize(), "MPI_Finalize")?;
    }
    Ok(bufs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launcher_is_that_of_the_library() {
        let maps = "7f00-7f01 r-xp 0 00:00 1   /opt/mpi/lib/libmpi.so.40\n7f02-7f03 rw-p 0 00:00 0  [heap]\n";
        let there = ["/opt/mpi/bin/mpirun", "/usr/bin/mpirun"];
        let found = launcher_in(maps, true, |path| there.contains(&path.to_str().unwrap()));
        assert_eq!(found, Some("/opt/mpi/bin/mpirun".into()));
        let debian =
            "7f00-7f01 r-xp 0 00:00 1   /usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4\n";
        let there = ["/usr/bin/mpirun.openmpi", "/usr/bin/mpirun", "/usr/bin/mpiexec.hydra"];
        let found = |is_open_mpi| {
            launcher_in(debian, is_open_mpi, |path| there.contains(&path.to_str().unwrap()))
        };
        assert_eq!(found(true), Some("/usr/bin/mpirun.openmpi".into()));
        assert_eq!(found(false), Some("/usr/bin/mpiexec.hydra".into()));
        assert_eq!(launcher_in(maps, true, |_| false), None);
    }
}
