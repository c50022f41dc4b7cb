//! A job of `--spawn` that trains in the temporary directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::{Error, Result};
use crate::run_dir::RunDirectory;
use crate::signals;
use crate::telemetry::long_lines::last_step;

/// The interval at which a job is polled.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time without a new step after which a job counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_secs(900);

/// The time in which a job must end that is not needed any more.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// The exit code of a job that was asked to end.
const PREEMPTED: i32 = 75;

/// A running job.
pub struct Trainer {
    name: &'static str,
    child: Child,
    run: RunDirectory,
    /// Its standard error.
    messages: PathBuf,
    /// The last step that was seen, and since when.
    seen: (u64, Instant),
}

impl Trainer {
    /// Starts the job that trains the run `name` in `folder`.
    pub fn start(name: &'static str, folder: &Path, arguments: &[String]) -> Result<Self> {
        let program = std::env::current_exe()
            .map_err(|e| Error::internal(format!("this program's path: {e}")))?;
        let create = |kind: &str| {
            let path = folder.join(format!("{name}.{kind}"));
            let file = File::create(&path).map_err(|e| Error::io("create", &path, e))?;
            Ok((path, file))
        };
        let (_, output) = create("out")?;
        let (messages, errors) = create("err")?;
        let mut command = Command::new(&program);
        command.args(arguments).stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = command.spawn().map_err(|e| Error::io("start", &program, e))?;
        let run = RunDirectory::at(folder.join(name));
        Ok(Self { name, child, run, messages, seen: (0, Instant::now()) })
    }

    /// Returns the directory of the run.
    pub fn run(&self) -> &Path {
        self.run.path()
    }

    /// Returns the last recorded step. Waits for a moment before, and returns an error if the job
    /// has ended or hangs, or a signal has come.
    pub fn poll(&mut self) -> Result<u64> {
        std::thread::sleep(POLL_INTERVAL);
        if let Some(signal) = signals::last_signal() {
            return Err(Error::interrupted(format!("{signal} came")));
        }
        let ended = self.child.try_wait().map_err(|e| Error::internal(format!("wait: {e}")))?;
        if let Some(status) = ended {
            return Err(self.failure(status.code()));
        }
        let path = self.run.metrics_path();
        let step = last_step(&path).map_err(|e| Error::io("read", &path, e))?;
        let (before, since) = self.seen;
        if step != before {
            self.seen = (step, Instant::now());
        } else if since.elapsed() > HANG_TIMEOUT {
            return Err(Error::comm(format!(
                "the {} run has taken no step for {} s after step {step}",
                self.name,
                HANG_TIMEOUT.as_secs()
            )));
        }
        Ok(step)
    }

    /// Waits until the checkpoint of a step is published.
    pub fn until_saved(&mut self, step: u64) -> Result<()> {
        let path = self.run.checkpoints().path(step);
        while !path.exists() {
            let polled = self.poll();
            // A job of no more steps ends by itself.
            if !path.exists() {
                polled?;
            }
        }
        Ok(())
    }

    /// Asks the job to save and end, waits for it, and returns the directory of the run.
    pub fn finish(mut self) -> Result<RunDirectory> {
        self.ask_to_end();
        loop {
            match self.child.try_wait().map_err(|e| Error::internal(format!("wait: {e}")))? {
                Some(status) if [Some(0), Some(PREEMPTED)].contains(&status.code()) => {
                    return Ok(self.run.clone());
                }
                Some(status) => return Err(self.failure(status.code())),
                None => self.poll_end()?,
            }
        }
    }

    /// Waits for a moment, and returns an error if the job takes too long to end.
    fn poll_end(&self) -> Result<()> {
        std::thread::sleep(POLL_INTERVAL);
        if self.seen.1.elapsed() > HANG_TIMEOUT {
            return Err(Error::comm(format!("the {} run does not end", self.name)));
        }
        Ok(())
    }

    fn ask_to_end(&self) {
        // This fails for a process that has ended.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }

    /// Returns the error of a job that ended with this exit code, with the message of its ranks.
    fn failure(&self, code: Option<i32>) -> Error {
        let text = std::fs::read_to_string(&self.messages).unwrap_or_default();
        let after = |prefix: &str| text.lines().rev().find_map(|line| line.strip_prefix(prefix));
        let code_text = code.map_or_else(|| "a signal".into(), |code| format!("exit code {code}"));
        let why = after("error: ").or_else(|| text.lines().last()).unwrap_or("no message");
        let error = match code {
            // The configuration is wrong, whatever the run is.
            Some(2) => Error::input(why),
            _ => Error::comm(format!("the {} run ended with {code_text}: {why}", self.name)),
        };
        match after("hint: ") {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // The launcher ends its ranks.
        self.ask_to_end();
        let asked = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && asked.elapsed() < END_TIMEOUT {
            std::thread::sleep(POLL_INTERVAL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
