//! Lines for people on standard output and standard error. Neither need be read, nor even be open: no program depends
//! on that.

use std::io::{ErrorKind, Write as _, stderr, stdout};
use std::sync::OnceLock;

use crate::error::Error;

/// The first error by which a line could not be printed.
static LOST: OnceLock<String> = OnceLock::new();

/// Prints a line to standard output. A run goes on when nobody reads it any more, and when it cannot be written; the latter
/// is logged once, and [`lost`] knows of it.
pub fn say(line: impl std::fmt::Display) {
    match writeln!(stdout(), "{line}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe && LOST.set(e.to_string()).is_ok() => {
            log::error!("cannot write to standard output: {e}");
        }
        _ => {}
    }
}

/// Prints a line to standard error, if it can be.
pub fn say_error(line: impl std::fmt::Display) {
    // Nobody is left to tell when standard error is closed or full.
    let _ = writeln!(stderr(), "{line}");
}

/// The error if standard output has refused a line, a closed pipe aside: a failure of a command that is run for its
/// output.
pub fn lost() -> Option<Error> {
    let refused = std::path::Path::new("standard output");
    LOST.get().map(|why| Error::io("write", refused, why).hint("make room there, or send it elsewhere"))
}
