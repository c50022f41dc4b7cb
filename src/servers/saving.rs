//! A checkpoint that is being written: each server its file, then the coordinator the manifest.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use super::fleet::Fleet;
use super::hub::Halt;
use super::message::{FromServer, ToServer};
use crate::checkpoint::{Job, Progress, Published};
use crate::error::{Error, Result};

/// A save that is under way, on a thread of its own.
pub struct Saving {
    thread: JoinHandle<Result<Published, Halt>>,
}

/// Begins to write the servers' cut `cut` as the checkpoint of `progress`.
///
/// # Errors
/// The system refused a thread.
pub fn begin(job: &Arc<Job>, fleet: &Fleet, generation: u64, cut: u64, progress: Progress) -> Result<Saving> {
    let (job, mut fleet, begun) = (job.clone(), fleet.again(generation), Instant::now());
    let write = move || {
        let staging = job.create(progress.step)?;
        let answers = fleet.all(|_| ToServer::Save { generation, cut, staging: staging.clone() });
        let published = answers.and_then(|answers| {
            let table = |answer| match answer {
                FromServer::Saved(written) => serde_json::to_vec(&written).map_err(|e| Error::internal(e.to_string())),
                other => Err(Error::internal(format!("a server answered {other:?}"))),
            };
            let tables: Vec<Vec<u8>> = answers.into_iter().map(table).collect::<Result<_>>()?;
            Ok(job.publish(progress, &tables, &staging)?)
        });
        if published.is_err() {
            job.checkpoints.abandon(&staging);
        }
        published?;
        job.retain(None);
        Ok(Published { progress, took: begun.elapsed() })
    };
    let thread = std::thread::Builder::new().name("publisher".into()).spawn(write);
    let thread = thread.map_err(|e| Error::internal(format!("cannot start the thread that saves: {e}")))?;
    Ok(Saving { thread })
}

impl Saving {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// A server is gone, or the file system refused.
    pub fn wait(self) -> Result<Published, Halt> {
        self.thread.join().map_err(|_| Error::internal("the thread that saves panicked"))?
    }
}
