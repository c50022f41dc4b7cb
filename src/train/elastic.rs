//! A run's part in an elastic job: when losses are survived from, when processes join, and what each
//! change of the ranks cost.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;
use hpctrain_checkpoint::lease::declare_gone;
use hpctrain_comm::Comm;
use hpctrain_comm::membership::{ControlPlane, Membership};
use hpctrain_config::job::RUN_FILE;
use hpctrain_config::telemetry::elastic::{self, Change, ChangeTimes, LostMember};
use hpctrain_config::telemetry::{say, unix_time};
use hpctrain_device::Backend;

/// The number of losses at one step after which the job ends: the step itself may be the cause.
const MOST_LOSSES_AT_A_STEP: usize = 3;

/// The part of a process in an elastic job. Clones share it.
#[derive(Clone)]
pub struct ElasticJob {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    plane: ControlPlane,
    /// The directory in which the processes of the job find each other.
    rendezvous: PathBuf,
    /// The directory of the run, once it is known.
    run: Option<PathBuf>,
    /// The finished steps of the run so far, as this rank knows.
    step: u64,
    /// The start of this process's first part in the run, from which its time limit counts.
    started: Instant,
    /// The change of the ranks that the run has not continued from yet.
    pending: Option<Pending>,
}

/// A change of the ranks that is under way.
struct Pending {
    membership: Membership,
    /// The number of ranks before.
    ranks_before: usize,
    /// The finished steps before it, as this rank knows.
    step: u64,
    /// The time from the first sign of a loss until this rank had ended its requests.
    interrupt: Duration,
    agree: Duration,
    since: Instant,
}

impl fmt::Debug for ElasticJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ElasticJob").finish_non_exhaustive()
    }
}

impl ElasticJob {
    /// Creates the part of a process of the job whose processes find each other in the directory
    /// `rendezvous`.
    pub fn new(plane: ControlPlane, rendezvous: PathBuf) -> Self {
        let started = Instant::now();
        let inner = Inner { plane, rendezvous, run: None, step: 0, started, pending: None };
        Self { inner: Arc::new(Mutex::new(inner)) }
    }

    /// Enters the first membership of the job, the ranks of `comm`. Collective over its world.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn begin<B: Backend>(&self, comm: &Comm<B>) -> Result<()> {
        self.lock().plane.begin(comm)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the directory of the run, from which on losses are survived. Collective over the world
    /// of `comm`.
    ///
    /// # Errors
    /// Returns an error, the same on all ranks, if the membership cannot be written.
    pub fn publish<B: Backend>(&self, comm: &Comm<B>, run: &Path) -> Result<()> {
        let mut inner = self.lock();
        let is_first = inner.run.is_none();
        inner.run = Some(run.to_path_buf());
        inner.plane.publish(comm, run)?;
        // The launcher and the processes that it starts later find the run here.
        let noted = match is_first && comm.rank() == 0 {
            true => write_run_file(&inner.rendezvous, run),
            false => Ok(()),
        };
        comm.world().all_ok(noted)
    }

    /// Returns the directory of the run that the job trains.
    ///
    /// # Errors
    /// Returns an error if no rank has noted it.
    pub fn published_run(&self) -> Result<PathBuf> {
        let path = self.lock().rendezvous.join(RUN_FILE);
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
        Ok(PathBuf::from(text))
    }

    /// Returns the directory of the run, once it is known.
    pub fn run(&self) -> Option<PathBuf> {
        self.lock().run.clone()
    }

    /// Returns the start of this process, from which its time limit counts.
    pub fn started(&self) -> Instant {
        self.lock().started
    }

    /// Returns the rank of this process in the membership.
    pub fn rank(&self) -> Option<usize> {
        self.lock().plane.rank()
    }

    /// Returns true if losses are survived.
    pub fn is_published(&self) -> bool {
        self.lock().plane.is_published()
    }

    /// Returns true on rank 0 if a process waits to join.
    pub fn has_joiners(&self) -> bool {
        self.lock().plane.has_joiners()
    }

    /// Notes that the run has finished `step` steps.
    pub fn note_step(&self, step: u64) {
        self.lock().step = step;
    }

    /// Asks to become a rank of the job that trains the run in directory `run`, and waits until it
    /// is, or until `is_over` returns true since there is nothing to join any more. Returns whether
    /// it has joined.
    ///
    /// # Errors
    /// Returns an error in the cases of [`ControlPlane::join`].
    pub fn join(&self, run: &Path, is_over: impl Fn() -> bool) -> Result<bool> {
        let mut inner = self.lock();
        inner.run = Some(run.to_path_buf());
        let Some(membership) = inner.plane.join(run, is_over)? else { return Ok(false) };
        membership.lost.iter().for_each(|lost| declare_gone(&lost.host, lost.pid));
        inner.pending = Some(Pending {
            ranks_before: membership.members.len() - membership.joined.len(),
            membership,
            step: 0,
            interrupt: Duration::ZERO,
            agree: Duration::ZERO,
            since: Instant::now(),
        });
        Ok(true)
    }

    /// Agrees with the other ranks on the next membership, after a loss or for processes that join,
    /// and connects to its ranks. `connect` connects; it is called again if a rank was lost
    /// meanwhile.
    ///
    /// # Errors
    /// Returns an error in the cases of [`ControlPlane::agree`], or if ranks are lost again and
    /// again at the same step.
    pub fn regroup(&self) -> Result<()> {
        let mut inner = self.lock();
        let interrupt = inner.plane.since_notice();
        let ranks_before = inner.plane.membership().map_or(0, |before| before.members.len());
        let since = Instant::now();
        let membership = inner.plane.agree()?;
        // One of them may have been rank 0, which held the directory of the run.
        membership.lost.iter().for_each(|lost| declare_gone(&lost.host, lost.pid));
        let pending = Pending {
            membership,
            ranks_before,
            step: inner.step,
            interrupt,
            agree: since.elapsed(),
            since,
        };
        let first = inner.pending.take();
        inner.pending = Some(match first {
            Some(first) => pending.after(first),
            None => pending,
        });
        inner.check_losses()
    }

    /// Connects to the ranks of the membership.
    ///
    /// # Errors
    /// Returns an error of kind `Lost` if a rank is gone: then regroup again.
    pub fn connect<B: Backend>(&self) -> Result<Comm<B>> {
        self.lock().plane.connect(hpctrain_comm::Algorithm::HalvingDoubling)
    }

    /// Returns the communicator of the membership's ranks, which were ranks of `comm` before, over
    /// MPI. Lost processes on this host that may still run are killed first: MPI would wait for them.
    ///
    /// # Errors
    /// Returns an error of kind `Lost` if a rank is gone: then regroup again.
    pub fn shrink<B: Backend>(&self, comm: &Comm<B>) -> Result<Comm<B>> {
        let mut inner = self.lock();
        let lost = inner.pending.as_ref().map(|pending| pending.membership.lost.clone());
        let host = hpctrain_comm::host_name();
        for lost in lost.unwrap_or_default().iter().filter(|lost| lost.host == host) {
            if let Some(pid) = i32::try_from(lost.pid).ok().and_then(Pid::from_raw) {
                // This fails for a process that has ended.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        let left = comm.shrink()?;
        inner.plane.order_by(&left)?;
        Ok(left)
    }

    /// Returns true if the run continues after a change of the ranks.
    pub fn is_regrouping(&self) -> bool {
        self.lock().pending.is_some()
    }

    /// Returns true if the run continues after all ranks had finished a step, for processes that
    /// join.
    pub fn is_planned(&self) -> bool {
        let inner = self.lock();
        inner.pending.as_ref().is_some_and(|pending| pending.membership.lost.is_empty())
    }

    /// Notes that the run continues at `step`: rank 0 prints it and records it in `elastic.jsonl`.
    ///
    /// # Errors
    /// Returns an error if the record cannot be written.
    pub fn resumed<B: Backend>(&self, comm: &Comm<B>, step: u64) -> Result<()> {
        let mut inner = self.lock();
        inner.step = step;
        let (Some(pending), Some(run)) = (inner.pending.take(), inner.run.clone()) else {
            return Ok(());
        };
        if comm.rank() > 0 {
            return Ok(());
        }
        let change = pending.change(step, unix_time());
        say(format_args!("elastic    {change}"));
        elastic::record(&run, &change)
    }
}

/// Notes the directory of the run for other processes of the job.
fn write_run_file(rendezvous: &Path, run: &Path) -> Result<()> {
    let run = std::fs::canonicalize(run).map_err(|e| Error::io("find", run, e))?;
    let path = rendezvous.join(RUN_FILE);
    own_files::replace(&path, run.to_string_lossy().as_bytes())
        .map_err(|e| Error::io("write", &path, e))
}

impl Inner {
    /// Returns an error if ranks were lost at this step before: they may be lost again.
    fn check_losses(&self) -> Result<()> {
        let (Some(run), Some(pending)) = (&self.run, &self.pending) else { return Ok(()) };
        let before = elastic::read(run)?;
        let losses = before.iter().filter(|change| !change.lost.is_empty());
        let at_step = losses.rev().take_while(|change| change.step == pending.step).count();
        if pending.membership.lost.is_empty() || at_step + 1 < MOST_LOSSES_AT_A_STEP {
            return Ok(());
        }
        let step = pending.step + 1;
        let lost: Vec<String> = pending
            .membership
            .lost
            .iter()
            .map(|lost| format!("rank {} on {}", lost.rank, lost.host))
            .collect();
        Err(Error::internal(format!(
            "step {step}: ranks were lost {MOST_LOSSES_AT_A_STEP} times in a row at this step, the last time {}",
            lost.join(", ")
        ))
        .hint(format!(
            "hpctrain data which {run} --step {step} shows its samples, hpctrain replay {run} --steps {step}..{step} repeats it",
            run = run.display()
        ))
        .shared())
    }
}

impl Pending {
    /// Returns the change from before `first`, after which the run did not go on until this one.
    fn after(self, first: Self) -> Self {
        let mut membership = self.membership;
        let mut joined = first.membership.joined;
        joined.retain(|id| membership.rank(id).is_some());
        joined.append(&mut membership.joined);
        membership.joined = joined;
        membership.lost = [first.membership.lost, membership.lost].concat();
        Self {
            membership,
            ranks_before: first.ranks_before,
            step: first.step,
            interrupt: first.interrupt,
            agree: self.agree,
            since: first.since,
        }
    }

    /// Returns the record of the change, from which the run continues at `step`.
    fn change(&self, step: u64, now: f64) -> Change {
        let ms = |time: Duration| (time.as_secs_f64() * 1e3).round();
        Change {
            membership: self.membership.number,
            time: now,
            ranks_before: self.ranks_before,
            ranks: self.membership.members.len(),
            hosts: self.membership.members.iter().map(|member| member.host.clone()).collect(),
            lost: self
                .membership
                .lost
                .iter()
                .map(|lost| LostMember {
                    rank: lost.rank,
                    host: lost.host.clone(),
                    why: lost.why.clone(),
                })
                .collect(),
            joined: self.membership.joined.len(),
            step: self.step.max(step),
            resumed: step,
            ms: ChangeTimes {
                interrupt: ms(self.interrupt),
                agree: ms(self.agree),
                build: ms(self.since.elapsed().saturating_sub(self.agree)),
            },
        }
    }
}
