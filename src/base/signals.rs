//! Handles the signals that request the end of the process: SIGTERM, SIGINT, SIGUSR1, and SIGXCPU,
//! which a limit on CPU time sends.
//!
//! The handler only records the signal; the ranks agree on the response at their next
//! synchronisation. SIGXFSZ, which a limit on the size of files sends, is handled as an error of
//! the write that exceeds the limit.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXCPU, SIGXFSZ};
use signal_hook::flag;

use crate::error::{Error, Result};

/// The signals with their names.
const SIGNALS: [(i32, &str); 4] = [
    (SIGTERM, "SIGTERM"),
    (SIGINT, "SIGINT"),
    (SIGUSR1, "SIGUSR1"),
    (SIGXCPU, "SIGXCPU (limit on CPU time)"),
];

/// Interval at which signals are polled during a pause.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Exit code after a second SIGINT: 128 plus the signal's number, as in shells.
const INTERRUPTED: i32 = 130;

/// The index of the last signal plus one; 0 before any.
static CAME: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Records the signals from now on instead of ending the process. A second SIGINT ends it at once.
///
/// # Errors
/// Returns an error if a signal handler cannot be registered.
pub fn record_signals() -> Result<()> {
    let refused = |e: std::io::Error| Error::internal(format!("cannot handle signals: {e}"));
    let came = CAME.get_or_init(Arc::default);
    // Registered first, so that no signal is lost once it no longer ends the process.
    for (index, (signal, _)) in SIGNALS.iter().enumerate() {
        flag::register_usize(*signal, came.clone(), index + 1).map_err(refused)?;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    // In this order: the first SIGINT finds the flag unset.
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED, interrupted.clone())
        .map_err(refused)?;
    flag::register(SIGINT, interrupted).map_err(refused)?;
    Ok(())
}

/// Makes a write that exceeds the limit on the size of files (`ulimit -f`) fail with `EFBIG`
/// instead of ending the process. Child processes keep the default behaviour.
///
/// # Errors
/// Returns an error if the signal handler cannot be registered.
pub fn survive_file_size_limit() -> Result<()> {
    // With any handler, the write returns an error. An ignored signal would also be ignored in
    // child processes.
    let came = Arc::new(AtomicBool::new(false));
    let handled = flag::register(SIGXFSZ, came);
    handled.map(drop).map_err(|e| Error::internal(format!("cannot handle SIGXFSZ: {e}")))
}

/// Sleeps for `time`, or until a signal requests the end of this process.
pub fn pause(time: Duration) {
    let begun = Instant::now();
    while last_signal().is_none() && begun.elapsed() < time {
        std::thread::sleep(POLL_INTERVAL.min(time.saturating_sub(begun.elapsed())));
    }
}

/// Returns the name of the last signal, if one was received.
pub fn last_signal() -> Option<&'static str> {
    let index = CAME.get()?.load(Ordering::Relaxed).checked_sub(1)?;
    Some(SIGNALS[index].1)
}
