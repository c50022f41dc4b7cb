//! Probes whether the device vendor's library, such as NCCL, works between all ranks of a job.
//!
//! Such a library may crash or hang where drivers, containers or networks are not as it expects. So
//! the probe runs in child processes: each rank starts a process of this program, which opens the
//! rank's device. These processes create a communicator as the ranks would, exchange memory around
//! a ring and all-reduce it. The ranks monitor them together: if one of them fails, or has not
//! answered in time, all are killed.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::group::Group;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;
use hpctrain_device::{Backend, CommBuffer, CommId, DeviceCollective, DeviceSpan, MemoryKind};

/// The command that runs a process of the probe: `hpctrain probe-nccl RANK RANKS DEVICE`.
pub const NCCL_PROBE_COMMAND: &str = "probe-nccl";

/// Elements of a test message: more than any library sends at once.
const ELEMENTS: usize = 100_000;

/// Time limit of the probe: a device may be slow to start, and a library to set up the network.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A variable that overrides [`TIMEOUT`], in seconds.
const SECONDS: &str = "HPCTRAIN_PROBE_SECONDS";

/// Interval at which ranks exchange the states of their processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time to read the standard error of a process that has ended.
const STDERR_TIMEOUT: Duration = Duration::from_secs(1);

static SUPPORTS_PROBE: OnceLock<()> = OnceLock::new();

/// Declares that this program calls [`run_nccl_probe`] when it is started with [`NCCL_PROBE_COMMAND`]. Other
/// programs are not started for the probe, since they would begin their own work again.
pub fn enable_nccl_probe() {
    SUPPORTS_PROBE.get_or_init(|| ());
}

/// The status of a rank's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ProbeStatus {
    state: State,
    /// The identifier that the process of the first rank has created.
    id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum State {
    Trying,
    Done,
    Failed(String),
}

/// The probe process of a rank.
struct NcclProbe {
    child: Child,
    input: Option<ChildStdin>,
    /// The lines of its standard output.
    lines: Receiver<String>,
    /// Its whole standard error, once it has ended.
    errors: Receiver<String>,
    begun: Instant,
    timeout: Duration,
}

/// Probes the library between the ranks of a group of more than one rank. `device` identifies this
/// rank's device on its node; every rank must have its own. Collective.
///
/// # Errors
/// Returns the same error on all ranks if the library does not work, and an error if a message
/// between ranks failed.
pub fn probe_nccl<B: Backend>(world: &Group<B>, device: &str) -> Result<()> {
    let mut probe = NcclProbe::start(world.rank(), world.size(), device);
    let mut id_sent = false;
    loop {
        let state = match &mut probe {
            Ok(probe) => probe.state(),
            Err(error) => State::Failed(error.message().to_owned()),
        };
        let id = probe
            .as_ref()
            .ok()
            .filter(|_| world.rank() == 0 && !id_sent)
            .and_then(|probe| probe.lines.try_recv().ok());
        let status = serde_json::to_vec(&ProbeStatus { state, id }).map_err(|e| {
            Error::internal(format!("cannot serialize the status of the NCCL probe: {e}"))
        })?;
        let statuses = world.gather_bytes(status).wait()?;
        let statuses = statuses
            .iter()
            .map(|bytes| serde_json::from_slice::<ProbeStatus>(bytes))
            .collect::<Result<Vec<_>, _>>();
        let statuses = statuses.map_err(|e| {
            Error::comm(format!("cannot parse another rank's status of the NCCL probe: {e}"))
        })?;
        let failed = statuses.iter().enumerate().find_map(|(rank, status)| match &status.state {
            State::Failed(why) => Some((rank, why)),
            _ => None,
        });
        if let Some((rank, why)) = failed {
            // The other processes wait for that one; dropping the probe kills them.
            return Err(
                Error::input(format!("the NCCL probe of rank {rank} failed: {why}")).shared()
            );
        }
        if statuses.iter().all(|status| status.state == State::Done) {
            return Ok(());
        }
        if let (Some(id), Ok(probe)) = (&statuses[0].id, &mut probe) {
            id_sent = true;
            probe.send_id(id);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl NcclProbe {
    fn start(rank: usize, size: usize, device: &str) -> Result<Self> {
        if SUPPORTS_PROBE.get().is_none() {
            return Err(Error::input("this program does not support the NCCL probe"));
        }
        let program = std::env::current_exe()
            .map_err(|e| Error::internal(format!("cannot find this program's file: {e}")))?;
        let mut command = Command::new(program);
        command.args([NCCL_PROBE_COMMAND, &rank.to_string(), &size.to_string(), device]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(|e| Error::input(format!("cannot start the probe process: {e}")))?;
        let ((line_sender, lines), (error_sender, errors)) = (channel(), channel());
        let output = child.stdout.take();
        let stderr = child.stderr.take();
        let seconds = std::env::var(SECONDS).ok().and_then(|seconds| seconds.parse().ok());
        let timeout = seconds.map_or(TIMEOUT, Duration::from_secs);
        // Dropping it kills the process.
        let probe = Self {
            input: child.stdin.take(),
            child,
            lines,
            errors,
            begun: Instant::now(),
            timeout,
        };
        if let Some(output) = output {
            spawn("probe-output", move || {
                // Unreadable output is ignored; the receiver may be gone.
                let read = BufReader::new(output).lines().map_while(|line| line.ok());
                read.take_while(|line| line_sender.send(line.clone()).is_ok()).for_each(drop);
            })?;
        }
        if let Some(mut output) = stderr {
            spawn("probe-errors", move || {
                let mut text = Vec::new();
                // Unreadable output is ignored; the receiver may be gone.
                let _ = output.read_to_end(&mut text);
                let _ = error_sender.send(String::from_utf8_lossy(&text).into_owned());
            })?;
        }
        Ok(probe)
    }

    /// Sends the identifier to the process. If it no longer reads, its state says why.
    fn send_id(&mut self, id: &str) {
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{id}");
        }
    }

    fn state(&mut self) -> State {
        match self.child.try_wait() {
            Ok(Some(status)) if status.success() => State::Done,
            Ok(Some(status)) => {
                let text = self.errors.recv_timeout(STDERR_TIMEOUT).unwrap_or_default();
                let line = text.lines().find_map(|line| line.strip_prefix("error: "));
                State::Failed(line.map_or_else(|| describe(status), str::to_owned))
            }
            Ok(None) if self.begun.elapsed() > self.timeout => {
                State::Failed(format!("no answer after {} seconds", self.timeout.as_secs()))
            }
            Ok(None) => State::Trying,
            Err(e) => State::Failed(format!("cannot wait for the probe process: {e}")),
        }
    }
}

impl Drop for NcclProbe {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("ended by signal {signal}"),
        None => status.to_string(),
    }
}

/// Runs the probe process of rank `rank` of `size`: creates a communicator with the others and
/// exchanges device memory with them. The process exits when its rank does.
///
/// # Errors
/// Returns an error if there is no device memory, the library failed, or received memory differs
/// from what was sent.
pub fn run_nccl_probe<B: Backend>(backend: &B, rank: usize, size: usize) -> Result<()> {
    let none = || Error::input("there is no GPU whose memory could be exchanged");
    let copies = backend.copy_streams()?.ok_or_else(none)?;
    if rank == 0 {
        let id: String = copies.comm_id()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut output = std::io::stdout();
        let written = writeln!(output, "{id}").and_then(|()| output.flush());
        written.map_err(|e| {
            Error::internal(format!("cannot write the identifier of the communicator: {e}"))
        })?;
    }
    let id = read_id()?;
    let comm = copies.init_rank(&id, rank, size)?;
    let settled = || comm.mark()?.wait();
    settled()?;
    let mut bufs = Vec::new();
    for values in [values(rank), vec![0.0; ELEMENTS], values(rank)] {
        let buf = backend.upload_f32(MemoryKind::Communication, &values)?;
        if let Some(ready) = B::record_event(&buf)? {
            ready.wait()?;
        }
        bufs.push(buf);
    }
    let spans = bufs.iter_mut().map(|buf| match B::comm_buffer(buf, 0..ELEMENTS)? {
        CommBuffer::Device(memory, _) => Ok(memory),
        CommBuffer::Host(_) => Err(none()),
    });
    let spans: Vec<DeviceSpan<'_>> = spans.collect::<Result<_>>()?;
    let next = (rank + 1) % size;
    let previous = (rank + size - 1) % size;
    comm.exchange(&[(next, spans[0])], &[(previous, spans[1])])?;
    settled()?;
    comm.collective(DeviceCollective::AllReduce, spans[2])?;
    settled()?;
    comm.part()?;
    settled()?;
    let mut sum = vec![0.0; ELEMENTS];
    for other in 0..size {
        sum.iter_mut().zip(values(other)).for_each(|(sum, value)| *sum += value);
    }
    for (buf, want) in bufs.iter().zip([values(rank), values(previous), sum]) {
        let mut arrived = vec![0.0; ELEMENTS];
        backend.download(B::all(buf), &mut arrived)?;
        if arrived != want {
            return Err(Error::comm("received GPU memory differs from what was sent"));
        }
    }
    Ok(())
}

/// Returns the elements of a rank's process: whole numbers whose sums over thousands of ranks are
/// exact in any order.
fn values(rank: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|i| (i % 89 + rank % 7) as f32).collect()
}

/// Reads the identifier from standard input. The process exits when standard input is closed.
fn read_id() -> Result<CommId> {
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line).map_err(|e| {
        Error::input(format!("cannot read the identifier from standard input: {e}"))
    })?;
    let line = line.trim();
    let byte =
        |at: usize| line.get(2 * at..2 * at + 2).and_then(|byte| u8::from_str_radix(byte, 16).ok());
    let id = (0..size_of::<CommId>()).map(byte).collect::<Option<Vec<u8>>>();
    let id = id
        .and_then(|id| CommId::try_from(id).ok())
        .ok_or_else(|| Error::input("standard input has no valid identifier"))?;
    spawn("probe-input", move || {
        // Nothing follows but the end of the input, or an error.
        let _ = input.read(&mut [0]);
        std::process::exit(3)
    })?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_many_ranks_are_exact() {
        let most = (88 + 6) * 100_000;
        assert!(most < 1 << 24, "{most}");
    }

    #[test]
    fn programs_that_cannot_be_tried_are_not_started() {
        let error = NcclProbe::start(0, 2, "x").err().unwrap();
        assert!(error.to_string().contains("does not support the NCCL probe"), "{error}");
    }
}
