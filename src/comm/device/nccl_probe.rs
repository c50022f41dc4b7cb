//! The proof that the library of the devices' vendor, such as NCCL, works between all ranks of a
//! job.
//!
//! Such a library may crash or wait for ever where drivers, containers or networks are not as it
//! wants them. So others than the ranks try: each rank starts a process of this program, which
//! opens the rank's device. These processes meet in a communicator as the ranks would, exchange
//! memory around a ring and add it up. The ranks look after them together: when one of them fails,
//! or has not answered in time, all are ended.

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

/// The command by which a program that can be tried is started: `hpctrain prove-together RANK RANKS
/// DEVICE`.
pub const TOGETHER: &str = "prove-together";

/// Elements that are tried: more than any library sends at once.
const LEN: usize = 100_000;

/// Time for all of it: a device may take its time to start, and a library to look at the network.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A variable with another number of seconds.
const SECONDS: &str = "HPCTRAIN_PROOF_SECONDS";

/// Interval at which ranks tell each other how far their processes are.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time for the last words of a process that has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);

static CAN_BE_TRIED: OnceLock<()> = OnceLock::new();

/// Announces that this program, started with [`TOGETHER`], calls [`answer_trial`]. Another program
/// would begin its own work once more.
pub fn can_be_tried() {
    CAN_BE_TRIED.get_or_init(|| ());
}

/// News of a rank's process.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ProbeStatus {
    state: State,
    /// Of the first rank: the identifier that its process has made.
    id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum State {
    Trying,
    Done,
    Failed(String),
}

/// The process of a rank.
struct NcclProbe {
    child: Child,
    input: Option<ChildStdin>,
    /// Lines of its standard output.
    lines: Receiver<String>,
    /// All of its standard error, when it has ended.
    errors: Receiver<String>,
    begun: Instant,
    patience: Duration,
}

/// Collective over a group of more than one rank, each with a device of its own, which is called
/// `device` on its node: whether the library works between them.
///
/// # Errors
/// The same on all ranks: the reason why it does not, or a message failed.
pub fn together<B: Backend>(world: &Group<B>, device: &str) -> Result<()> {
    let mut trial = NcclProbe::start(world.rank(), world.size(), device);
    let mut is_told = false;
    loop {
        let state = match &mut trial {
            Ok(trial) => trial.state(),
            Err(error) => State::Failed(error.message().to_owned()),
        };
        let id = trial
            .as_ref()
            .ok()
            .filter(|_| world.rank() == 0 && !is_told)
            .and_then(|trial| trial.lines.try_recv().ok());
        let news = serde_json::to_vec(&ProbeStatus { state, id })
            .map_err(|e| Error::internal(format!("a proof: {e}")))?;
        let told = world.gather_bytes(news).wait()?;
        let told = told
            .iter()
            .map(|bytes| serde_json::from_slice::<ProbeStatus>(bytes))
            .collect::<Result<Vec<_>, _>>();
        let told =
            told.map_err(|e| Error::comm(format!("another rank sent no news of a proof: {e}")))?;
        let failed = told.iter().enumerate().find_map(|(rank, news)| match &news.state {
            State::Failed(why) => Some((rank, why)),
            _ => None,
        });
        if let Some((rank, why)) = failed {
            // The others' processes wait for that one; dropped, they end.
            return Err(
                Error::input(format!("a process tried it beside rank {rank}: {why}")).shared()
            );
        }
        if told.iter().all(|news| news.state == State::Done) {
            return Ok(());
        }
        if let (Some(id), Ok(trial)) = (&told[0].id, &mut trial) {
            is_told = true;
            trial.tell(id);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl NcclProbe {
    fn start(rank: usize, size: usize, device: &str) -> Result<Self> {
        if CAN_BE_TRIED.get().is_none() {
            return Err(Error::input("this program was not made to try it"));
        }
        let program = std::env::current_exe()
            .map_err(|e| Error::internal(format!("where is this program? {e}")))?;
        let mut command = Command::new(program);
        command.args([TOGETHER, &rank.to_string(), &size.to_string(), device]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().map_err(|e| Error::input(format!("no process could try: {e}")))?;
        let ((say, lines), (complain, errors)) = (channel(), channel());
        let output = child.stdout.take();
        let complaints = child.stderr.take();
        let seconds = std::env::var(SECONDS).ok().and_then(|seconds| seconds.parse().ok());
        let patience = seconds.map_or(TIMEOUT, Duration::from_secs);
        // Dropped, it ends the process.
        let trial = Self {
            input: child.stdin.take(),
            child,
            lines,
            errors,
            begun: Instant::now(),
            patience,
        };
        if let Some(output) = output {
            spawn("trial-output", move || {
                // Unreadable output is none, and nobody may be there to hear it any more.
                let read = BufReader::new(output).lines().map_while(|line| line.ok());
                read.take_while(|line| say.send(line.clone()).is_ok()).for_each(drop);
            })?;
        }
        if let Some(mut output) = complaints {
            spawn("trial-errors", move || {
                let mut text = Vec::new();
                // Unreadable output is ignored, and nobody may be there to hear it any more.
                let _ = output.read_to_end(&mut text);
                let _ = complain.send(String::from_utf8_lossy(&text).into_owned());
            })?;
        }
        Ok(trial)
    }

    /// Gives it the identifier. If it does not listen any more, its state says why.
    fn tell(&mut self, id: &str) {
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{id}");
        }
    }

    fn state(&mut self) -> State {
        match self.child.try_wait() {
            Ok(Some(status)) if status.success() => State::Done,
            Ok(Some(status)) => {
                let text = self.errors.recv_timeout(LAST_WORDS).unwrap_or_default();
                let line = text.lines().find_map(|line| line.strip_prefix("error: "));
                State::Failed(line.map_or_else(|| described(status), str::to_owned))
            }
            Ok(None) if self.begun.elapsed() > self.patience => {
                State::Failed(format!("no answer after {} seconds", self.patience.as_secs()))
            }
            Ok(None) => State::Trying,
            Err(e) => State::Failed(format!("it cannot be waited for: {e}")),
        }
    }
}

impl Drop for NcclProbe {
    fn drop(&mut self) {
        // One that has ended needs neither.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn described(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("ended by signal {signal}"),
        None => status.to_string(),
    }
}

/// The part of the process of rank `rank` among `size`: it meets the others and exchanges memory of
/// its device with them. It ends when its rank does.
///
/// # Errors
/// The library failed, or memory arrived changed.
pub fn answer_trial<B: Backend>(backend: &B, rank: usize, size: usize) -> Result<()> {
    let none = || Error::input("there is no GPU whose memory could be exchanged");
    let copies = backend.copies()?.ok_or_else(none)?;
    if rank == 0 {
        let id: String = copies.comm_id()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut output = std::io::stdout();
        let said = writeln!(output, "{id}").and_then(|()| output.flush());
        said.map_err(|e| Error::internal(format!("the identifier cannot be told: {e}")))?;
    }
    let id = listen()?;
    let comm = copies.init_rank(&id, rank, size)?;
    let settled = || comm.mark()?.wait();
    settled()?;
    let mut bufs = Vec::new();
    for values in [values(rank), vec![0.0; LEN], values(rank)] {
        let buf = backend.upload_f32(MemoryKind::Communication, &values)?;
        if let Some(ready) = B::record_event(&buf)? {
            ready.wait()?;
        }
        bufs.push(buf);
    }
    let spans = bufs.iter_mut().map(|buf| match B::comm_buffer(buf, 0..LEN)? {
        CommBuffer::Device(memory, _) => Ok(memory),
        CommBuffer::Host(_) => Err(none()),
    });
    let spans: Vec<DeviceSpan<'_>> = spans.collect::<Result<_>>()?;
    let next = (rank + 1) % size;
    let previous = (rank + size - 1) % size;
    comm.exchange(&[(next, spans[0])], &[(previous, spans[1])])?;
    settled()?;
    comm.vendor(DeviceCollective::AllReduce, spans[2])?;
    settled()?;
    comm.part()?;
    settled()?;
    let mut sum = vec![0.0; LEN];
    for other in 0..size {
        sum.iter_mut().zip(values(other)).for_each(|(sum, value)| *sum += value);
    }
    for (buf, want) in bufs.iter().zip([values(rank), values(previous), sum]) {
        let mut arrived = vec![0.0; LEN];
        backend.download(B::all(buf), &mut arrived)?;
        if arrived != want {
            return Err(Error::comm("memory of a GPU arrived changed"));
        }
    }
    Ok(())
}

/// The elements of a rank's process: whole numbers whose sums over thousands of ranks are exact in
/// any order.
fn values(rank: usize) -> Vec<f32> {
    (0..LEN).map(|i| (i % 89 + rank % 7) as f32).collect()
}

/// The identifier from standard input. This process ends when that does.
fn listen() -> Result<CommId> {
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line).map_err(|e| Error::input(format!("no identifier was told: {e}")))?;
    let line = line.trim();
    let byte =
        |at: usize| line.get(2 * at..2 * at + 2).and_then(|byte| u8::from_str_radix(byte, 16).ok());
    let id = (0..size_of::<CommId>()).map(byte).collect::<Option<Vec<u8>>>();
    let id = id
        .and_then(|id| CommId::try_from(id).ok())
        .ok_or_else(|| Error::input("no identifier was told"))?;
    spawn("trial-input", move || {
        // Nothing more comes but the end, however it comes.
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
        assert!(error.to_string().contains("was not made to try it"), "{error}");
    }
}
