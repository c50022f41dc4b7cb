//! Writes a checkpoint in the background: each server writes its file, then the coordinator the
//! manifest.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::coordinator_service::SessionError;
use super::protocol::{ServerRequest, ServerResponse};
use super::server_clients::ServerClients;
use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::{Progress, Published, SaveContext, SaveTask, SaveThread};

/// A checkpoint save in progress.
pub struct Saving(SaveTask<Result<Published, SessionError>>);

/// Starts to write the servers' snapshot `cut` as the checkpoint of `progress`, on `thread`, over
/// the connections of `fleet`, which no other save uses.
pub fn begin(
    thread: &SaveThread,
    job: &Arc<SaveContext>,
    fleet: &Arc<Mutex<ServerClients>>,
    generation: u64,
    cut: u64,
    progress: Progress,
) -> Saving {
    let job = job.clone();
    let fleet = fleet.clone();
    let started = Instant::now();
    Saving(thread.begin(move || write(&job, &fleet, generation, cut, progress, started)))
}

/// Writes the servers' snapshot `cut` as a checkpoint and publishes it; `started` is the time at
/// which the save began.
///
/// # Errors
/// Returns an error if a server is lost, or a file cannot be written.
pub fn write(
    job: &SaveContext,
    fleet: &Mutex<ServerClients>,
    generation: u64,
    cut: u64,
    progress: Progress,
    started: Instant,
) -> Result<Published, SessionError> {
    let mut fleet = fleet.lock().unwrap_or_else(PoisonError::into_inner);
    let staging = job.create(progress.step)?;
    let answers = fleet.all(|_| ServerRequest::Save { generation, cut, staging: staging.clone() });
    let published = answers.and_then(|answers| {
        let tables: Vec<Vec<u8>> = answers.into_iter().map(shard_table).collect::<Result<_>>()?;
        Ok(job.publish(progress, &tables, &staging)?)
    });
    if published.is_err() {
        job.checkpoints.abandon(&staging);
    }
    published?;
    job.retain(None);
    Ok(Published { progress, took: started.elapsed() })
}

/// Returns the table of a server's file, as JSON, from its answer.
fn shard_table(answer: ServerResponse) -> Result<Vec<u8>> {
    match answer {
        ServerResponse::Saved(written) => {
            serde_json::to_vec(&written).map_err(|e| Error::internal(e.to_string()))
        }
        other => Err(Error::internal(format!("a server answered {other:?}"))),
    }
}

impl Saving {
    /// Returns whether the save has ended.
    pub fn is_done(&self) -> bool {
        self.0.is_finished()
    }

    /// Waits for the end of the save.
    ///
    /// # Errors
    /// Returns an error if a server is lost, or a file cannot be written.
    pub fn wait(self) -> Result<Published, SessionError> {
        self.0.join()?
    }
}
