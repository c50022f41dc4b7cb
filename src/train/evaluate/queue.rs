//! The queue of checkpoints to evaluate, and the wait for the next one.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::signals;
use hpctrain_checkpoint::lease::LeaseGuard;
use hpctrain_checkpoint::run_dir::RunDirectory;
use hpctrain_checkpoint::run_dir::markers::{End, Markers, RunStatus};
use hpctrain_checkpoint::{Checkpoints, Manifest, name_of};
use hpctrain_config::telemetry::evaluations::{self, Evaluations};
use hpctrain_config::telemetry::say;

/// Time between two reads of the run's directory.
pub const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Maximum time between two checks of the trainer's lease.
const LEASE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// How long an evaluator waits for its trainer to create the run, unless it is given a time.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of attempts to evaluate a checkpoint that cannot be read, or to read the run's directory.
pub const ATTEMPTS: usize = 3;
/// Pause between attempts.
pub const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Which checkpoints to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// Only the newest; older ones are skipped.
    Latest,
    /// All of them, oldest first. The trainer keeps those that are not evaluated yet.
    Every,
}

/// A checkpoint that this evaluator has claimed.
#[derive(Debug)]
pub struct Claim {
    /// The step of the checkpoint.
    pub step: u64,
    /// The id of the save.
    pub id: String,
    lease: LeaseGuard,
}

impl Claim {
    /// Releases the claim, once the evaluation is recorded.
    pub fn release(self) {
        drop(self.lease);
    }
}

/// How a queue knows which checkpoints are done.
enum DoneBy {
    /// By the lines of `eval.jsonl`, which all evaluators of the run share.
    Records,
    /// By the ids of the saves that this queue has claimed.
    Claims(HashSet<String>),
}

/// The checkpoints of a run as an evaluator sees them.
pub struct Queue {
    checkpoints: Checkpoints,
    policy: Policy,
    done: DoneBy,
    /// Ids of saves by step and inode of the directory, whose manifest never changes.
    ids: HashMap<(u64, u64), Option<String>>,
}

impl Queue {
    /// Creates the queue of a run whose evaluators share its checkpoints, by leases and `eval.jsonl`.
    pub fn recorded(checkpoints: Checkpoints, policy: Policy) -> Self {
        Self { checkpoints, policy, done: DoneBy::Records, ids: HashMap::new() }
    }

    /// Creates a queue that has each checkpoint once, whatever other processes do with it.
    pub fn separate(checkpoints: Checkpoints, policy: Policy) -> Self {
        Self { done: DoneBy::Claims(HashSet::new()), ..Self::recorded(checkpoints, policy) }
    }

    /// Claims the next checkpoint that is not done and that no evaluator has claimed, if there is
    /// one.
    ///
    /// # Errors
    /// Returns an error if the run's directory cannot be read or a lease cannot be taken.
    pub fn next(&mut self) -> Result<Option<Claim>> {
        for (step, id) in self.waiting()? {
            let leases = self.checkpoints.leases();
            let lease = match self.done {
                DoneBy::Records => leases.take(&format!("{}.evaluate", name_of(step)))?,
                DoneBy::Claims(_) => leases.share(&name_of(step))?,
            };
            let Some(lease) = lease else { continue };
            // Another evaluator may have been faster, or the trainer may have removed the
            // checkpoint before it saw the lease.
            if !self.is_done(&id, &self.evaluated()?) && self.id(step)?.as_ref() == Some(&id) {
                if let DoneBy::Claims(claimed) = &mut self.done {
                    claimed.insert(id.clone());
                }
                return Ok(Some(Claim { step, id, lease }));
            }
        }
        Ok(None)
    }

    /// Returns true if no checkpoint is left to evaluate. Claimed ones count as left.
    ///
    /// # Errors
    /// Returns an error if the run's directory cannot be read.
    pub fn is_empty(&mut self) -> Result<bool> {
        Ok(self.waiting()?.is_empty())
    }

    /// Returns the step up to which all checkpoints are done.
    ///
    /// # Errors
    /// Returns an error if the run's directory cannot be read.
    pub fn done_up_to(&mut self) -> Result<u64> {
        let newest = self.checkpoints.steps()?.last().copied().unwrap_or(0);
        let next = self.waiting()?.first().map(|(step, _)| step.saturating_sub(1));
        Ok(next.unwrap_or(newest))
    }

    /// Returns the evaluations by which checkpoints are done, if they are done by these.
    fn evaluated(&self) -> Result<Evaluations> {
        match self.done {
            DoneBy::Records => self.checkpoints.evaluated(),
            DoneBy::Claims(_) => Ok(Evaluations::default()),
        }
    }

    fn is_done(&self, id: &str, evaluated: &Evaluations) -> bool {
        match &self.done {
            DoneBy::Records => evaluations::is_settled(evaluated.known(), id),
            DoneBy::Claims(claimed) => claimed.contains(id),
        }
    }

    /// Returns steps and save ids of the checkpoints to evaluate, in this order.
    fn waiting(&mut self) -> Result<Vec<(u64, String)>> {
        let evaluated = self.evaluated()?;
        let mut steps = self.checkpoints.steps()?;
        if self.policy == Policy::Latest {
            // Not the highest step: a run that has skipped a damaged checkpoint resumed before it.
            let latest = self.checkpoints.latest_step()?.or(steps.last().copied());
            steps.retain(|step| Some(*step) == latest);
        }
        let mut waiting = Vec::new();
        for step in steps {
            let id = self.id(step)?.filter(|id| !self.is_done(id, &evaluated));
            waiting.extend(id.map(|id| (step, id)));
        }
        Ok(waiting)
    }

    /// Returns the id of the save of a step, or `None` if it was removed, or its manifest is
    /// damaged or of another version.
    fn id(&mut self, step: u64) -> Result<Option<String>> {
        let path = self.checkpoints.path(step);
        let directory = match std::fs::metadata(&path) {
            Ok(directory) => directory.ino(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", &path, e)),
        };
        if let Some(id) = self.ids.get(&(step, directory)) {
            return Ok(id.clone());
        }
        let id = match Manifest::read(&path) {
            Ok(manifest) => Some(manifest.id),
            // The trainer has just removed it.
            Err(_) if !path.exists() => return Ok(None),
            Err(e) if matches!(e.kind(), Kind::Damaged | Kind::Input) => {
                log::warn!("cannot evaluate {}: {e}", path.display());
                None
            }
            Err(e) => return Err(e),
        };
        self.ids.insert((step, directory), id.clone());
        Ok(id)
    }
}

/// The next action for the checkpoints of a run.
#[derive(Debug)]
pub enum NextCheckpoint {
    /// This process has claimed a checkpoint.
    Claimed(Claim),
    /// There is nothing to do yet.
    Wait,
    /// End, for this reason: no more checkpoints will come, or none are waited for.
    End(String),
    /// Fail, for this reason: more checkpoints are expected, but there is no trainer.
    GiveUp(String),
}

/// Waits for the checkpoints of a run.
pub struct CheckpointWatch {
    queue: Queue,
    run: RunDirectory,
    marks: Markers,
    /// Whether to wait for further checkpoints until the run ends.
    waits: bool,
    /// How long to wait without a trainer.
    timeout: Option<Duration>,
    /// The name of this process in notes on standard output, if it prints any.
    prints_as: Option<&'static str>,
    /// When a trainer last held the run, or a checkpoint was last done.
    since: Instant,
    /// When the trainer's lease was last checked.
    lease_checked: Option<Instant>,
    /// The last reason for waiting that was printed.
    printed: Option<&'static str>,
    /// Consecutive failures to read the run's directory.
    failed_reads: usize,
}

impl CheckpointWatch {
    /// Creates a watch of the run in a directory, which gives up if no trainer holds it for
    /// `timeout`.
    pub fn new(run: &Path, queue: Queue, timeout: Option<Duration>) -> Self {
        let run = RunDirectory::at(run);
        Self {
            queue,
            marks: run.markers(),
            run,
            waits: true,
            timeout,
            prints_as: None,
            since: Instant::now(),
            lease_checked: None,
            printed: None,
            failed_reads: 0,
        }
    }

    /// Prints what is waited for, each line after this name.
    #[must_use]
    pub fn with_notes(self, name: &'static str) -> Self {
        Self { prints_as: Some(name), ..self }
    }

    /// Ends once the checkpoints that exist are done.
    #[must_use]
    pub fn without_waiting(self) -> Self {
        Self { waits: false, ..self }
    }

    /// Returns the queue.
    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// Notes that a checkpoint is done, which restarts the timeout.
    pub fn is_done(&mut self) {
        self.since = Instant::now();
    }

    /// Decides the next action without waiting. Failed reads are retried a few times.
    ///
    /// # Errors
    /// Returns an error if the run's directory cannot be read, or has no checkpoint and none is
    /// waited for.
    pub fn next(&mut self) -> Result<NextCheckpoint> {
        match self.next_once() {
            Err(e) if e.kind() == Kind::Io && self.failed_reads + 1 < ATTEMPTS => {
                self.failed_reads += 1;
                log::warn!("trying again: {e}");
                std::thread::sleep(RETRY_DELAY);
                Ok(NextCheckpoint::Wait)
            }
            next => {
                self.failed_reads = 0;
                next
            }
        }
    }

    /// Decides the next action from the present files, without retries.
    fn next_once(&mut self) -> Result<NextCheckpoint> {
        // The end mark is read first: then all checkpoints published before it are seen.
        let ended = self.marks.ended();
        if let Some(claim) = self.queue.next()? {
            return Ok(NextCheckpoint::Claimed(claim));
        }
        let idle = self.queue.is_empty()?;
        let nothing = self.run.checkpoints().steps()?.is_empty();
        let run = self.run.path().display();
        let waits_for = match ended {
            Some(end) if idle && end.status != RunStatus::Preempted => {
                let why = format!("the run has ended at step {}", end.step);
                return Ok(NextCheckpoint::End(why));
            }
            _ if nothing && !self.waits => {
                return Err(Error::input(format!("{run} has no checkpoint"))
                    .hint("use --watch to wait for one"));
            }
            _ if idle && !self.waits && !nothing => {
                return Ok(NextCheckpoint::End("every checkpoint is evaluated".into()));
            }
            Some(_) if idle => "the trainer was interrupted: waiting for it to resume",
            _ if nothing => "waiting for the first checkpoint",
            _ if idle => "waiting for the next checkpoint",
            _ => "waiting for another evaluator",
        };
        if let Some(name) = self.prints_as.filter(|_| self.printed != Some(waits_for)) {
            self.printed = Some(waits_for);
            say(format_args!("{name}: {waits_for} of {run}"));
        }
        let Some(timeout) = self.timeout.filter(|_| self.waits && idle) else {
            return Ok(NextCheckpoint::Wait);
        };
        if !self.is_abandoned(timeout)? {
            return Ok(NextCheckpoint::Wait);
        }
        let run = self.run.path().display();
        let span = humantime::format_duration(timeout);
        let why = match ended {
            Some(End { step, status: RunStatus::Failed, reason: why }) => {
                let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                format!("the last one failed at step {step}{why}")
            }
            Some(End { step, .. }) => format!("the last one was interrupted at step {step}"),
            None if nothing => "none has saved anything".into(),
            None => "the last one ended without a record of it".into(),
        };
        let why = format!("no trainer has held {run} for {span} (--timeout): {why}");
        Ok(NextCheckpoint::GiveUp(why))
    }

    /// Returns true if no trainer has held the run, and nothing was done here, for `timeout`.
    fn is_abandoned(&mut self, timeout: Duration) -> Result<bool> {
        let pause = LEASE_CHECK_INTERVAL.min(timeout / 10);
        if self.lease_checked.is_none_or(|checked| checked.elapsed() >= pause) {
            self.lease_checked = Some(Instant::now());
            if self.run.has_trainer()? {
                self.since = Instant::now();
            }
        }
        Ok(self.since.elapsed() >= timeout)
    }
}

/// Waits for the trainer to create the run, since jobs that are submitted together do not start
/// together: `timeout`, or half a minute if the directory above it exists, since a path may be
/// misspelled. A note on standard output begins with `prints_as`.
///
/// # Errors
/// Returns an error if the path is not the directory of a run, or a signal came during the wait.
pub fn await_run(
    run: &Path,
    watch: bool,
    timeout: Option<Duration>,
    prints_as: Option<&str>,
) -> Result<()> {
    let begun = Instant::now();
    let may_come = watch
        && match timeout {
            // Servers and workers may have created the directory before the run starts.
            Some(_) => check_run(run).is_err(),
            // A trainer that is starting holds its lease before it writes the first other file, so
            // it is looked for last.
            None => {
                !run.exists() && has_parent(run)
                    || RunDirectory::at(run).holds_only_leases()
                    || has_trainer(run)
            }
        };
    let timeout = timeout.unwrap_or(START_TIMEOUT);
    if let Some(name) = prints_as.filter(|_| may_come) {
        say(format_args!(
            "{name}: {} is not the directory of a run yet: waiting {} s for its trainer",
            run.display(),
            timeout.as_secs()
        ));
    }
    while may_come
        && check_run(run).is_err()
        && begun.elapsed() < timeout
        && signals::last_signal().is_none()
    {
        std::thread::sleep(POLL_INTERVAL);
    }
    check_run(run).map_err(|e| match signals::last_signal().filter(|_| may_come) {
        Some(signal) => Error::interrupted(format!("{signal} came before the run was created")),
        None => e,
    })
}

/// Returns true if a trainer holds the run in a directory, as far as that can be read.
fn has_trainer(run: &Path) -> bool {
    RunDirectory::at(run).has_trainer().unwrap_or(false)
}

/// Returns true if the directory in which a run would be created exists.
fn has_parent(run: &Path) -> bool {
    let root = run
        .parent()
        .map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    root.is_some_and(Path::is_dir)
}

/// Returns an error if the path is not the directory of a run.
fn check_run(run: &Path) -> Result<()> {
    if run.join("checkpoints").is_dir() || run.join("config.toml").is_file() {
        return Ok(());
    }
    let what = if run.exists() { "is not the directory of a run" } else { "does not exist" };
    Err(Error::input(format!("{} {what}", run.display()))
        .hint("give the directory of a run, such as runs/gpt-char, once its trainer has begun"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluator_waits_for_a_run_whose_directory_is_being_created() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("run");
        std::fs::create_dir_all(run.join(".leases")).unwrap();
        let trainer = std::thread::spawn({
            let run = run.clone();
            move || {
                std::thread::sleep(2 * POLL_INTERVAL);
                std::fs::write(run.join("config.toml"), "").unwrap();
            }
        });
        await_run(&run, true, None, None).unwrap();
        trainer.join().unwrap();
        // A directory of other files is not waited for.
        let refused = await_run(root.path(), true, None, None).unwrap_err().to_string();
        assert!(refused.contains("is not the directory of a run"), "{refused}");
    }
}
