//! Requests to end that the operating system delivers: SIGTERM, SIGINT, SIGUSR1.
//!
//! A handler only notes that one came; the ranks agree on the response at the next point where they meet anyway.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use crate::error::{Error, Result};

/// The signals with their names.
const SIGNALS: [(i32, &str); 3] = [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT"), (SIGUSR1, "SIGUSR1")];

/// Exit code of a process that a second SIGINT ends at once: 128 and the signal's number, as shells have it.
const INTERRUPTED: i32 = 130;

/// One more than the index of the signal that came last; 0 before any.
static CAME: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Notes the signals from now on instead of dying of them. A second SIGINT ends the process at once.
///
/// # Errors
/// The system refused.
pub fn listen() -> Result<()> {
    let refused = |e: std::io::Error| Error::internal(format!("cannot handle signals: {e}"));
    let came = CAME.get_or_init(Arc::default);
    let interrupted = Arc::new(AtomicBool::new(false));
    // In this order: the first SIGINT finds the flag unset.
    flag::register_conditional_shutdown(SIGINT, INTERRUPTED, interrupted.clone()).map_err(refused)?;
    flag::register(SIGINT, interrupted).map_err(refused)?;
    for (index, (signal, _)) in SIGNALS.iter().enumerate() {
        flag::register_usize(*signal, came.clone(), index + 1).map_err(refused)?;
    }
    Ok(())
}

/// The name of the signal that came last, if one came.
pub fn came() -> Option<&'static str> {
    let index = CAME.get()?.load(Ordering::Relaxed).checked_sub(1)?;
    Some(SIGNALS[index].1)
}
