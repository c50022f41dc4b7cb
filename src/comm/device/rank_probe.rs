//! Probes whether a transport of devices works between all ranks of a job: NCCL, or memory that ranks
//! open of each other (CUDA IPC).
//!
//! Libraries and drivers may crash or hang where containers or networks are not as they expect. So
//! the probe runs in child processes: each rank starts a process of this program, which opens the
//! rank's device. These processes create a communicator as the ranks would, exchange memory around
//! a ring, and with NCCL all-reduce it. The ranks pass on what the processes have to send to each
//! other for that, and monitor them together: if one of them fails, or has not answered in time,
//! all are killed.

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

/// A transport that a probe is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankProbe {
    /// NCCL.
    Nccl,
    /// CUDA IPC.
    CudaIpc,
}

impl RankProbe {
    /// Returns the command that runs a process of the probe: `hpctrain COMMAND RANK RANKS DEVICE`.
    pub const fn command(self) -> &'static str {
        match self {
            RankProbe::Nccl => "probe-nccl",
            RankProbe::CudaIpc => "probe-cuda-ipc",
        }
    }

    /// Returns the name of the transport for messages.
    fn name(self) -> &'static str {
        match self {
            RankProbe::Nccl => "NCCL",
            RankProbe::CudaIpc => "CUDA IPC",
        }
    }

    /// Returns the number of processes, the first ones, that send a message to all: an identifier,
    /// or the handle of their memory.
    fn senders(self, size: usize) -> usize {
        match self {
            RankProbe::Nccl => 1,
            RankProbe::CudaIpc => size,
        }
    }
}

/// Elements of a test message: more than any library sends at once.
const ELEMENTS: usize = 100_000;

/// The least digits of a message of a process.
const LEAST_DIGITS: usize = 64;

/// Time limit of the probe, to which [`TIMEOUT_PER_RANK`] is added for each rank: a device may be slow
/// to start, and a library to set up the network.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Processes of one node start at the same time, from one file system.
const TIMEOUT_PER_RANK: Duration = Duration::from_secs(1);

/// A variable that overrides the time limit, in seconds.
const SECONDS: &str = "HPCTRAIN_PROBE_SECONDS";

/// Interval at which ranks exchange the states of their processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time to read the standard error of a process that has ended.
const STDERR_TIMEOUT: Duration = Duration::from_secs(1);

static SUPPORTS_PROBE: OnceLock<()> = OnceLock::new();

/// Returns the time limit of a probe of `ranks` ranks.
fn time_limit(ranks: usize) -> Duration {
    TIMEOUT + TIMEOUT_PER_RANK * u32::try_from(ranks).unwrap_or(u32::MAX)
}

/// Declares that this program calls [`run_rank_probe`] when it is started with a
/// [command](RankProbe::command) of a probe. Other programs are not started for probes, since they
/// would begin their own work again.
pub fn enable_rank_probes() {
    SUPPORTS_PROBE.get_or_init(|| ());
}

/// The status of a rank's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ProbeStatus {
    state: State,
    /// The message of the process to the others, in the first status after it has one.
    message: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum State {
    Trying,
    Done,
    Failed(String),
}

/// The probe process of a rank.
struct ProbeProcess {
    child: Child,
    input: Option<ChildStdin>,
    /// The lines of its standard output.
    lines: Receiver<String>,
    /// Its whole standard error, once it has ended.
    errors: Receiver<String>,
    begun: Instant,
    timeout: Duration,
}

/// Probes a transport between the ranks of a group of more than one rank. `device` identifies this
/// rank's device on its node. Collective.
///
/// # Errors
/// Returns the same error on all ranks if the transport does not work, and an error if a message
/// between ranks failed.
pub fn probe_ranks<B: Backend>(probed: RankProbe, world: &Group<B>, device: &str) -> Result<()> {
    let name = probed.name();
    let size = world.size();
    let mut process = ProbeProcess::start(probed, world.rank(), size, device);
    let mut messages: Vec<Option<String>> = vec![None; probed.senders(size)];
    let mut are_sent = false;
    loop {
        let state = match &mut process {
            Ok(process) => process.state(),
            Err(error) => State::Failed(error.message().to_owned()),
        };
        let message = process.as_ref().ok().and_then(ProbeProcess::next_message);
        let status = serde_json::to_vec(&ProbeStatus { state, message }).map_err(|e| {
            Error::internal(format!("cannot serialize the status of the {name} probe: {e}"))
        })?;
        let statuses = world.gather_bytes(status).wait()?;
        let statuses = statuses
            .iter()
            .map(|bytes| serde_json::from_slice::<ProbeStatus>(bytes))
            .collect::<Result<Vec<_>, _>>();
        let statuses = statuses.map_err(|e| {
            Error::comm(format!("cannot parse another rank's status of the {name} probe: {e}"))
        })?;
        let failed = statuses.iter().enumerate().find_map(|(rank, status)| match &status.state {
            State::Failed(why) => Some((rank, why)),
            _ => None,
        });
        if let Some((rank, why)) = failed {
            // The other processes wait for that one; dropping the probe kills them.
            return Err(
                Error::input(format!("the {name} probe of rank {rank} failed: {why}")).shared()
            );
        }
        if statuses.iter().all(|status| status.state == State::Done) {
            return Ok(());
        }
        for (message, status) in messages.iter_mut().zip(statuses) {
            *message = message.take().or(status.message);
        }
        if !are_sent
            && let Some(all) = messages.iter().cloned().collect::<Option<Vec<_>>>()
            && let Ok(process) = &mut process
        {
            are_sent = true;
            process.send(&all.join(" "));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl ProbeProcess {
    fn start(probed: RankProbe, rank: usize, size: usize, device: &str) -> Result<Self> {
        if SUPPORTS_PROBE.get().is_none() {
            let name = probed.name();
            return Err(Error::input(format!("this program does not support the {name} probe")));
        }
        let program = std::env::current_exe()
            .map_err(|e| Error::internal(format!("cannot find this program's file: {e}")))?;
        let mut command = Command::new(program);
        command.args([probed.command(), &rank.to_string(), &size.to_string(), device]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(|e| Error::input(format!("cannot start the probe process: {e}")))?;
        let ((line_sender, lines), (error_sender, errors)) = (channel(), channel());
        let output = child.stdout.take();
        let stderr = child.stderr.take();
        let seconds = std::env::var(SECONDS).ok().and_then(|seconds| seconds.parse().ok());
        let timeout = seconds.map_or_else(|| time_limit(size), Duration::from_secs);
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

    /// Returns the message of the process, if it has printed one that was not returned before.
    fn next_message(&self) -> Option<String> {
        self.lines.try_iter().find(|line| is_message(line))
    }

    /// Sends messages to the process. If it no longer reads, its state says why.
    fn send(&mut self, messages: &str) {
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{messages}");
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

impl Drop for ProbeProcess {
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

/// Runs the process of the probe of `probed` for rank `rank` of `size`: creates a communicator with
/// the others and exchanges device memory with them. Then it prints what that took as a line of
/// JSON. A single rank exchanges with itself, and needs no other process. The process exits when its
/// rank does.
///
/// # Errors
/// Returns an error if there is no device memory, the transport failed, or received memory differs
/// from what was sent.
pub fn run_rank_probe<B: Backend>(
    probed: RankProbe,
    backend: &B,
    rank: usize,
    size: usize,
) -> Result<()> {
    let none = || Error::input("there is no GPU whose memory could be exchanged");
    let copies = backend.copy_streams()?.ok_or_else(none)?;
    let free = copies.free_memory().ok();
    let begun = Instant::now();
    let comm = match probed {
        RankProbe::Nccl => {
            let mine = if rank == 0 { copies.comm_id()?.to_vec() } else { Vec::new() };
            let id = &exchange_messages(probed, rank, size, mine)?[0];
            let id = CommId::try_from(&id[..]).map_err(|_| malformed())?;
            copies.init_rank(&id, rank, size)?
        }
        RankProbe::CudaIpc => {
            let exported = copies.export_memory(size)?;
            let handles = exchange_messages(probed, rank, size, exported.handle())?;
            exported.open_peers(&handles, rank)?
        }
    };
    let settled = || comm.mark()?.wait();
    settled()?;
    let init = begun.elapsed();
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
    let begun = Instant::now();
    comm.exchange(&[(next, spans[0])], &[(previous, spans[1])])?;
    settled()?;
    let exchange = begun.elapsed();
    let mut sum = values(rank);
    let mut all_reduce = None;
    if probed == RankProbe::Nccl {
        let begun = Instant::now();
        comm.collective(DeviceCollective::AllReduce, spans[2])?;
        settled()?;
        all_reduce = Some(begun.elapsed());
        sum = vec![0.0; ELEMENTS];
        for other in 0..size {
            sum.iter_mut().zip(values(other)).for_each(|(sum, value)| *sum += value);
        }
    }
    let free = free.zip(copies.free_memory().ok());
    comm.part()?;
    settled()?;
    for (buf, want) in bufs.iter().zip([values(rank), values(previous), sum]) {
        let mut arrived = vec![0.0; ELEMENTS];
        backend.download(B::all(buf), &mut arrived)?;
        if arrived != want {
            return Err(Error::comm("received GPU memory differs from what was sent"));
        }
    }
    let milliseconds = |time: Duration| 1e3 * time.as_secs_f64();
    let figures = ProbeFigures {
        nccl: (probed == RankProbe::Nccl).then(B::device_comm_library).transpose()?,
        init_ms: milliseconds(init),
        exchange_ms: milliseconds(exchange),
        all_reduce_ms: all_reduce.map(milliseconds),
        memory_bytes: free.map(|(before, after)| before.saturating_sub(after)),
    };
    let figures = serde_json::to_string(&figures)
        .map_err(|e| Error::internal(format!("cannot serialize the figures of the probe: {e}")))?;
    print_line(&figures)
}

/// The measurements of a process of the probe.
#[derive(Serialize)]
struct ProbeFigures {
    /// The library and its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    nccl: Option<String>,
    /// The creation of the communicator. Among several ranks it includes their waits for each other.
    init_ms: f64,
    exchange_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    all_reduce_ms: Option<f64>,
    /// The device memory that is gone after the first collective.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<usize>,
}

/// Prints a line to standard output.
fn print_line(line: &str) -> Result<()> {
    let mut output = std::io::stdout();
    let written = writeln!(output, "{line}").and_then(|()| output.flush());
    written.map_err(|e| Error::internal(format!("cannot write to standard output: {e}")))
}

/// Returns the elements of a rank's process: whole numbers whose sums over thousands of ranks are
/// exact in any order.
fn values(rank: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|i| (i % 89 + rank % 7) as f32).collect()
}

/// Sends this process's message to the others, through the ranks, and returns those that they need.
/// The process exits when standard input is closed.
fn exchange_messages(
    probed: RankProbe,
    rank: usize,
    size: usize,
    mine: Vec<u8>,
) -> Result<Vec<Vec<u8>>> {
    if size == 1 {
        return Ok(vec![mine]);
    }
    if rank < probed.senders(size) {
        print_line(&mine.iter().map(|byte| format!("{byte:02x}")).collect::<String>())?;
    }
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input
        .read_line(&mut line)
        .map_err(|e| Error::input(format!("cannot read messages from standard input: {e}")))?;
    let messages: Option<Vec<_>> = line.split_whitespace().map(decode).collect();
    let messages = messages.filter(|messages| messages.len() == probed.senders(size));
    let messages = messages.ok_or_else(malformed)?;
    spawn("probe-input", move || {
        // Nothing follows but the end of the input, or an error.
        let _ = input.read(&mut [0]);
        std::process::exit(3)
    })?;
    Ok(messages)
}

/// Returns the error of a message that is not one of a process of the probe.
fn malformed() -> Error {
    Error::input("standard input has no valid messages of the other processes of the probe")
}

/// Decodes a message of hexadecimal digits.
fn decode(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok();
    pairs.map(byte).collect()
}

/// Returns true for a line that is a message of a process. Libraries may print other lines.
fn is_message(line: &str) -> bool {
    line.len() >= LEAST_DIGITS && line.bytes().all(|digit| digit.is_ascii_hexdigit())
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
        let error = ProbeProcess::start(RankProbe::Nccl, 0, 2, "x").err().unwrap();
        assert!(error.to_string().contains("does not support the NCCL probe"), "{error}");
    }

    #[test]
    fn messages_are_found_among_other_lines() {
        let id: String = (0..128).map(|byte| format!("{byte:02x}")).collect();
        assert!(is_message(&id));
        assert_eq!(decode(&id).unwrap(), (0..128).collect::<Vec<u8>>());
        for line in ["", "cafe", "host:42:42 [0] NCCL INFO Bootstrap", &format!("{id} ")] {
            assert!(!is_message(line), "{line}");
        }
        assert_eq!((decode("0g"), decode("é")), (None, None));
    }

    #[test]
    fn the_time_limit_grows_with_the_ranks() {
        assert_eq!([2, 512].map(|ranks| time_limit(ranks).as_secs()), [62, 572]);
    }
}
