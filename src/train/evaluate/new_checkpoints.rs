//! An iterator over the checkpoints of a run as they are published, for other programs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::queue::{
    CheckpointWatch, Claim, NextCheckpoint, POLL_INTERVAL, Policy, Queue, await_run,
};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::signals;
use hpctrain_checkpoint::lease::LeaseGuard;
use hpctrain_checkpoint::run_dir::RunDirectory;
use hpctrain_checkpoint::{Checkpoints, Reader};

/// The checkpoints of a run, each once, as they are published: an iterator that blocks until there
/// is another one, and ends when the run has ended and all are done. It does not depend on
/// `eval.jsonl` or on evaluators, and writes nothing but leases. A checkpoint is not removed while
/// its item lives.
///
/// With [`Policy::Latest`] only the newest checkpoint is returned, which skips older ones. With
/// [`Policy::Every`] all are returned, oldest first, and the trainer keeps those that are still to
/// come.
///
/// The last item is an error if a checkpoint or the run's directory cannot be read, if no trainer
/// holds the run for the timeout, or if a signal came that
/// [`record_signals`](hpctrain_base::signals::record_signals) has recorded.
///
/// Every iterator sees all checkpoints. In a program of several ranks, use one on rank 0 and send
/// the step to the others.
///
/// ```no_run
/// use std::time::Duration;
///
/// use hpctrain_train::evaluate::{NewCheckpoints, Policy};
///
/// let timeout = Some(Duration::from_secs(600));
/// for checkpoint in NewCheckpoints::watch("runs/mine", Policy::Every, timeout)? {
///     let checkpoint = checkpoint?;
///     let reader = checkpoint.open()?;
///     println!("step {}: {}", checkpoint.step(), reader.manifest().id);
/// }
/// # Ok::<(), hpctrain_base::error::Error>(())
/// ```
pub struct NewCheckpoints {
    watch: CheckpointWatch,
    checkpoints: Checkpoints,
    policy: Policy,
    /// The lease on the checkpoints that are still to come.
    next: Option<(u64, LeaseGuard)>,
    has_ended: bool,
}

impl NewCheckpoints {
    /// Watches the run in a directory. Waits for its trainer to create it.
    ///
    /// `timeout` limits each wait for a trainer: for the run's directory, half a minute by default,
    /// and then for another trainer while none holds the run; by default the latter has no limit.
    ///
    /// # Errors
    /// Returns an error if the directory is not a run, or cannot be read.
    pub fn watch(run: impl AsRef<Path>, policy: Policy, timeout: Option<Duration>) -> Result<Self> {
        let run = run.as_ref();
        await_run(run, true, timeout, None)?;
        let checkpoints = RunDirectory::at(run).checkpoints();
        let queue = Queue::separate(checkpoints.clone(), policy);
        let watch = CheckpointWatch::new(run, queue, timeout);
        let mut new = Self { watch, checkpoints, policy, next: None, has_ended: false };
        new.keep_next()?;
        Ok(new)
    }

    /// Moves the lease on the checkpoints that are still to come.
    fn keep_next(&mut self) -> Result<()> {
        if self.policy == Policy::Latest {
            return Ok(());
        }
        let done = self.watch.queue().done_up_to()?;
        if self.next.as_ref().is_none_or(|(step, _)| *step != done) {
            // The new lease is taken before the old one is released.
            let lease = self.checkpoints.leases().watch_after(done)?;
            self.next = lease.map(|lease| (done, lease));
        }
        Ok(())
    }

    /// Waits for the next checkpoint; `None` if there will be no other.
    fn wait(&mut self) -> Result<Option<NewCheckpoint>> {
        loop {
            if let Some(signal) = signals::last_signal() {
                return Err(Error::interrupted(format!(
                    "{signal} came during the wait for a checkpoint"
                )));
            }
            match self.watch.next()? {
                NextCheckpoint::Claimed(claim) => {
                    self.keep_next()?;
                    let path = self.checkpoints.path(claim.step);
                    return Ok(Some(NewCheckpoint { claim, path }));
                }
                NextCheckpoint::Wait => {
                    // The run may have gone back to an earlier step.
                    self.keep_next()?;
                    std::thread::sleep(POLL_INTERVAL);
                }
                NextCheckpoint::End(_) => return Ok(None),
                NextCheckpoint::GiveUp(why) => {
                    return Err(Error::comm(why).hint("start the trainer again with --resume auto"));
                }
            }
        }
    }
}

impl Iterator for NewCheckpoints {
    type Item = Result<NewCheckpoint>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        // The caller is done with the last one.
        self.watch.is_done();
        let next = self.wait().transpose();
        self.has_ended = !matches!(next, Some(Ok(_)));
        if self.has_ended {
            self.next = None;
        }
        next
    }
}

/// A checkpoint of [`NewCheckpoints`], which is not removed before this is dropped.
#[derive(Debug)]
pub struct NewCheckpoint {
    claim: Claim,
    path: PathBuf,
}

impl NewCheckpoint {
    /// Returns its step.
    pub fn step(&self) -> u64 {
        self.claim.step
    }

    /// Returns the id of its save, by which two checkpoints of one step differ.
    pub fn id(&self) -> &str {
        &self.claim.id
    }

    /// Returns its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it.
    ///
    /// # Errors
    /// Returns an error if it is damaged, or was replaced by another save of its step.
    pub fn open(&self) -> Result<Reader> {
        let reader = Reader::open(&self.path)?;
        let found = &reader.manifest().id;
        if *found != self.claim.id {
            return Err(Error::input(format!(
                "{} was replaced by another save, {found}",
                self.path.display()
            )));
        }
        Ok(reader)
    }
}
