//! Runs ranks as threads of this process.

use std::thread::ScopedJoinHandle;

use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::spawn::spawn_scoped;
use hpctrain_comm::{Algorithm, Comm, start_threads};
use hpctrain_device::Backend;

/// Runs `rank` on `ranks` threads, each with its communicator. Returns their results in rank order.
///
/// # Errors
/// Returns the error of the rank that made the others fail.
pub fn on_threads<B: Backend, T: Send>(
    ranks: usize,
    rank: impl Fn(&Comm<B>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let comms = start_threads(ranks, Algorithm::HalvingDoubling)?;
    let rank = &rank;
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |comm: Comm<B>| {
            let name = format!("rank-{}", comm.rank());
            spawn_scoped(scope, &name, move || rank(&comm).map_err(|e| (comm.rank(), e)))
        };
        let threads: Vec<_> = comms.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.and_then(join)).collect()
    });
    let mut given = Vec::with_capacity(ranks);
    let mut errors = Vec::new();
    for result in results {
        match result {
            Ok(value) => given.push(value),
            Err(e) => errors.push(e),
        }
    }
    // If one rank fails, the others fail because it is gone: its error is the cause.
    errors.sort_by_key(|e| matches!(e.kind(), Kind::Comm | Kind::Lost));
    errors.into_iter().next().map_or(Ok(given), Err)
}

/// Returns the result of a rank's thread, with an error that names the rank.
fn join<T>(thread: ScopedJoinHandle<'_, std::result::Result<T, (usize, Error)>>) -> Result<T> {
    let outcome = thread.join().unwrap_or_else(|_| Err((0, Error::internal("a rank panicked"))));
    outcome.map_err(|(rank, e)| if e.is_shared() { e } else { e.on_rank(rank) })
}
