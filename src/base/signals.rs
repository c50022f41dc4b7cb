//! Requests to end that the operating system delivers: SIGTERM, SIGINT, SIGUSR1, and SIGXCPU of a
//! limit on CPU time.
//!
//! A handler only notes that one came; the ranks agree on the response at the next point where they
//! meet anyway. SIGXFSZ, of a limit on the size of files, stands for an error of the write that met
//! the limit, and is handled as such.

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

/// Time between two looks for a signal during a pause.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Exit code of a process that a second SIGINT ends at once: 128 and the signal's number, as shells
/// have it.
const INTERRUPTED: i32 = 130;

/// One more than the index of the signal that came last; 0 before any.
static CAME: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Notes the signals from now on instead of dying of them. A second SIGINT ends the process at
/// once.
///
/// # Errors
/// The system refused.
pub fn listen() -> Result<()> {
    let refused = |e: std::io::Error| Error::internal(format!("cannot handle signals: {e}"));
    let came = CAME.get_or_init(Arc::default);
    // First of all: a signal is noted as soon as the process does not die of it.
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

/// Has a write that meets the limit on the size of files (`ulimit -f`) fail with `EFBIG`, instead
/// of ending the process. Programs that this one starts are ended as ever.
///
/// # Errors
/// Returns an error if the system refuses.
pub fn survive_file_size_limit() -> Result<()> {
    // With a handler, whatever it does, the write returns an error. Ignored, the signal would stay
    // so in started programs.
    let came = Arc::new(AtomicBool::new(false));
    let handled = flag::register(SIGXFSZ, came);
    handled.map(drop).map_err(|e| Error::internal(format!("cannot handle SIGXFSZ: {e}")))
}

/// Sleeps for a while, or until a signal asks this process to end.
pub fn pause(time: Duration) {
    let begun = Instant::now();
    while came().is_none() && begun.elapsed() < time {
        std::thread::sleep(POLL_INTERVAL.min(time.saturating_sub(begun.elapsed())));
    }
}

/// The name of the signal that came last, if one came.
pub fn came() -> Option<&'static str> {
    let index = CAME.get()?.load(Ordering::Relaxed).checked_sub(1)?;
    Some(SIGNALS[index].1)
}
