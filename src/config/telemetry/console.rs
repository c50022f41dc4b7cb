//! Lines for people on standard output and standard error. Neither need be read, nor even be open:
//! no program depends on that.

use std::io::{ErrorKind, IsTerminal as _, Write as _, stderr, stdout};
use std::sync::OnceLock;

use hpctrain_base::error::Error;
use hpctrain_base::escape::visible;

/// The first error by which a line could not be printed.
static LOST: OnceLock<String> = OnceLock::new();

/// Prints a line to standard output, with control characters written out: it may tell of files. A
/// run goes on when nobody reads it any more, and when it cannot be written; the latter is logged
/// once, and [`lost`] knows of it.
pub fn say(line: impl std::fmt::Display) {
    print(&visible(&line.to_string()));
}

/// As [`say`], for text that is a result: as it is, unless a terminal shows it.
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

/// Prints a line to standard error, if it can be, with control characters written out.
pub fn say_error(line: impl std::fmt::Display) {
    let line = line.to_string();
    let line = visible(&line);
    // Nobody is left to tell when standard error is closed or full.
    let _ = writeln!(stderr(), "{line}");
}

/// The error if standard output has refused a line, a closed pipe aside: a failure of a command
/// that is run for its output.
pub fn lost() -> Option<Error> {
    let refused = std::path::Path::new("standard output");
    LOST.get()
        .map(|why| Error::io("write", refused, why).hint("make room there, or send it elsewhere"))
}
