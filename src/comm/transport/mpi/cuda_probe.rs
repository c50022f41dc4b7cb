//! Whether the MPI library takes addresses of a device: by its claim, and by a test.
//!
//! A library that does not know the device crashes on its addresses, and some say that they know it
//! where its driver is missing. So others than the rank try: two processes of this program that the
//! library's own launcher starts on this node, as memory goes another way between processes than
//! within one. Where no launcher is found, one process tries with itself, and the log says that no
//! more was proved.

use std::ffi::{c_int, c_void};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use mpi::ffi;

use super::calls::{check, count};
use super::{library, node};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::{spawn, spawn_scoped};
use hpctrain_device::{Backend, CommBuffer, DeviceSpan, MemoryKind};

/// Elements that are tried: more than any library sends along with the envelope of a message.
const LEN: usize = 100_000;

/// A device may take its time to start.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Duration of a launcher's good end, in which it ends its processes too.
const MERCY: Duration = Duration::from_secs(2);

/// Polling interval of the child's state.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Variables by which a launcher speaks to the processes it starts, and a batch system to a
/// launcher: the child was started by none, and stays on this node.
const OF_LAUNCHERS: [&str; 12] = [
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

/// Prefix of the variables among them that a user sets for every process.
const OF_USERS: &str = "OMPI_ALLOW_";

/// Settings for a launcher that starts two processes wherever this one runs: on one core, too, and
/// on none of their own.
const ANYWHERE: [(&str, &str); 4] = [
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
];

/// Tells the processes of a proof that they are to be two.
const PAIR: &str = "HPCTRAIN_PROOF_PAIR";

/// Whether the library claims to know CUDA. The system's library may lack the function, so no
/// program that is linked with it could call it by name.
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

/// The library's launcher: a system may have those of others as well.
fn launcher() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    launcher_in(&maps, library().starts_with("Open MPI"), |path| path.is_file())
}

/// The launcher beside the library that a process has mapped, else in the search path.
fn launcher_in(maps: &str, is_open_mpi: bool, is_there: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let names: &[&str] = match is_open_mpi {
        true => &["mpirun.openmpi", "mpirun", "mpiexec"],
        false => &["mpiexec.hydra", "mpiexec.mpich", "mpiexec"],
    };
    let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_mpi = |path: &&Path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libmpi"))
    };
    let beside = mapped.filter(is_mpi).flat_map(Path::ancestors).map(|folder| folder.join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = beside.chain(std::env::split_paths(&path)).collect::<Vec<_>>();
    let mut programs = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    programs.find(|program| is_there(program))
}

/// Tries the direct way in processes that are this program with other arguments and end in
/// [`prove`]; their number.
///
/// # Errors
/// One of them failed: with its message.
pub fn prove_in_child(arguments: &[&str]) -> Result<usize> {
    let program = std::env::current_exe()
        .map_err(|e| Error::internal(format!("where is this program? {e}")))?;
    let launcher = launcher();
    let mut command = Command::new(launcher.as_ref().unwrap_or(&program));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if OF_LAUNCHERS.iter().any(|prefix| text.starts_with(prefix)) && !text.starts_with(OF_USERS)
        {
            command.env_remove(&name);
        }
    }
    let processes = if launcher.is_some() {
        command.args(["-n", "2"]).arg(&program).env(PAIR, "1").envs(ANYWHERE);
        2
    } else {
        log::warn!(
            "no launcher of {} was found: one process tries with itself whether MPI takes memory of GPUs",
            library()
        );
        // Open MPI starts no daemon for a process that will start no others.
        command.env("OMPI_MCA_ess_singleton_isolated", "1");
        1
    };
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let fails = |why: String| {
        Error::input(format!("the MPI library cannot exchange memory of the GPU: {why}"))
    };
    let mut child = command.spawn().map_err(|e| fails(format!("no process could try: {e}")))?;
    let (tell, told) = channel();
    if let Some(mut stderr) = child.stderr.take() {
        let listening = spawn("proof-errors", move || {
            let mut text = Vec::new();
            // Unreadable output is ignored.
            let _ = stderr.read_to_end(&mut text);
            let _ = tell.send(text);
        });
        if let Err(e) = listening {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
            return Err(e);
        }
    }
    match ending(&mut child) {
        Ok(Some(status)) if status.success() => Ok(processes),
        Ok(Some(status)) => {
            let text = told.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
            let text = String::from_utf8_lossy(&text).into_owned();
            let line = text.lines().find_map(|line| line.strip_prefix("error: "));
            Err(fails(line.map_or_else(|| described(status), str::to_string)))
        }
        Ok(None) => Err(fails(format!("no answer after {} seconds", TIMEOUT.as_secs()))),
        Err(e) => Err(fails(e.to_string())),
    }
}

/// The end of a child, or of a launcher, which tells its process's signal as a shell does.
fn described(status: ExitStatus) -> String {
    match status.code() {
        Some(code @ 129..=159) => format!("a process ended by signal {}", code - 128),
        _ => status.to_string(),
    }
}

/// The exit status of the child; none if it takes too long and is ended.
fn ending(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let within = |child: &mut Child, limit: Duration| {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok::<_, std::io::Error>(None)
    };
    if let Some(status) = within(child, TIMEOUT)? {
        return Ok(Some(status));
    }
    if let Ok(process) = c_int::try_from(child.id()) {
        // SAFETY: the child has not been waited for: the number is its own.
        unsafe { libc::kill(process, libc::SIGTERM) };
    }
    if within(child, MERCY)?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(None)
}

/// Hands the library memory of a device, in messages and sums of this process with itself, and with
/// the other one if it was started as one of two. It crashes, or returns.
///
/// As in a run, a thread of its own makes all calls of MPI, begins before the device is opened, and
/// chooses the device when it reaches for a buffer. `device` makes the device of the process with a
/// number.
///
/// # Errors
/// The memory is the host's, the elements received differ from those sent, or there is no other
/// process where there is to be one.
pub fn prove<B: Backend>(device: impl FnOnce(usize) -> Result<B>) -> Result<()> {
    std::thread::scope(|scope| {
        let ((tell, told), (give, given)) = (channel(), channel());
        let exchanging = spawn_scoped(scope, "proof-mpi", move || exchange::<B>(&tell, &given))?;
        let exchanged = || {
            exchanging.join().unwrap_or_else(|_| Err(Error::internal("the thread of MPI panicked")))
        };
        let Ok((rank, size)) = told.recv() else { return exchanged().map(drop) };
        let backend = device(rank)?;
        let mine = values(rank);
        let empty = vec![0.0; LEN];
        let mut bufs = Vec::new();
        for values in [&mine, &empty, &empty, &empty, &empty] {
            let buf = backend.upload_f32(MemoryKind::Communication, values)?;
            if let Some(ready) = B::record_event(&buf)? {
                ready.wait()?;
            }
            bufs.push(buf);
        }
        // If the thread has ended it says why.
        let _ = give.send(bufs);
        let bufs = exchanged()?;
        let theirs = values(other(rank));
        let mut sum = mine.clone();
        if size > 1 {
            sum.iter_mut().zip(&theirs).for_each(|(x, y)| *x += y);
        }
        let with_other = if size > 1 { [&theirs, &sum] } else { [&empty, &empty] };
        for (buf, want) in bufs.iter().zip([&mine, &mine, &mine].into_iter().chain(with_other)) {
            let mut arrived = vec![0.0; LEN];
            backend.download(B::all(buf), &mut arrived)?;
            if arrived != *want {
                return Err(Error::comm("a message of its memory arrived changed"));
            }
        }
        Ok(())
    })
}

/// The elements of a process. Sums of two are exact.
fn values(rank: usize) -> Vec<f32> {
    (0..LEN).map(|i| i as f32 + 0.5 * rank as f32).collect()
}

/// The other one of two processes.
fn other(rank: usize) -> usize {
    1 - rank.min(1)
}

/// The part of MPI's thread: tells its number and that of processes, and exchanges the buffers that
/// it is given: from the first into the second and, added up, the third; and with the other process
/// into the fourth and the fifth.
fn exchange<B: Backend>(
    tell: &Sender<(usize, usize)>,
    given: &Receiver<Vec<B::Buf>>,
) -> Result<Vec<B::Buf>> {
    let mut provided = 0;
    let null = std::ptr::null_mut();
    // SAFETY: MPI is used by this thread alone, in order; the parameters are live locals or null,
    // which is allowed.
    let begun = unsafe {
        ffi::MPI_Init_thread(null, null.cast(), ffi::RSMPI_THREAD_FUNNELED, &mut provided)
    };
    check(begun, "MPI_Init_thread")?;
    // SAFETY: reading a constant of the library.
    let world = unsafe { ffi::RSMPI_COMM_WORLD };
    let (rank, size) = node::place(world)?;
    if size != 2 && std::env::var_os(PAIR).is_some() {
        return Err(Error::input(format!(
            "its launcher started {size} for two processes: it is another library's"
        )));
    }
    let _ = tell.send((rank, size));
    let Ok(mut bufs) = given.recv() else { return Err(Error::device("no device to try with")) };
    let spans = bufs.iter_mut().map(|buf| match B::comm_buffer(buf, 0..LEN)? {
        CommBuffer::Device(memory, _) => Ok(memory),
        CommBuffer::Host(_) => Err(Error::input("there is no GPU whose memory could be exchanged")),
    });
    let spans = spans.collect::<Result<Vec<_>>>()?;
    let at = |span: DeviceSpan<'_>| std::ptr::with_exposed_provenance_mut::<c_void>(span.address());
    let [sent, received, sum, from_other, sum_of_both] = [0, 1, 2, 3, 4].map(|i| at(spans[i]));
    let len = count(LEN)?;
    let partner = count(other(rank))?;
    // SAFETY: MPI is used by this thread alone, in order; the spans live until the end, hold `len`
    // elements each, and may be given to MPI; the status is a live local.
    unsafe {
        let alone = ffi::RSMPI_COMM_SELF;
        let float = ffi::RSMPI_FLOAT;
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
        check(
            ffi::MPI_Allreduce(received, sum, len, float, ffi::RSMPI_SUM, alone),
            "MPI_Allreduce",
        )?;
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
                ffi::MPI_Allreduce(sent, sum_of_both, len, float, ffi::RSMPI_SUM, world),
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
