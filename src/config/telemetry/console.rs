//! Human-readable lines on standard output and standard error. A program keeps running when nobody
//! reads them, or when they are closed.

use std::io::{ErrorKind, IsTerminal as _, Write as _, stderr, stdout};
use std::sync::OnceLock;

use hpctrain_base::error::Error;
use hpctrain_base::escape::visible;

/// The first error by which a line could not be printed.
static LOST: OnceLock<String> = OnceLock::new();

/// Prints a line to standard output, with control characters escaped, as it may contain names of
/// files. Does not fail if the pipe is closed or the line cannot be written; the latter is logged
/// once, and [`stdout_error`] returns the error.
pub fn say(line: impl std::fmt::Display) {
    print(&visible(&line.to_string()));
}

/// Prints text that is the result of a command: unchanged, unless standard output is a terminal,
/// for which control characters are escaped.
pub fn say_text(text: &str) {
    if stdout().is_terminal() { say(text) } else { print(text) }
}

fn print(line: &str) {
    match writeln!(stdout(), "{line}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe && LOST.set(e.to_string()).is_ok() => {
            log::error!("cannot write to standard output: {e}");
        }
        _ => {}
    }
}

/// Prints a line to standard error, if it can be written, with control characters escaped.
pub fn say_error(line: impl std::fmt::Display) {
    let line = line.to_string();
    let line = visible(&line);
    // There is no other place to report that standard error is closed or full.
    let _ = writeln!(stderr(), "{line}");
}

/// Returns the error if a line could not be written to standard output, except for a closed pipe:
/// a command that is run for its output has failed then.
pub fn stdout_error() -> Option<Error> {
    let refused = std::path::Path::new("standard output");
    LOST.get()
        .map(|why| Error::io("write", refused, why).hint("make room there, or send it elsewhere"))
}
