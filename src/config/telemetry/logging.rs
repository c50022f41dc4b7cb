//! Loggers: all messages go to the file of the rank, warnings also to standard error.
//!
//! The default features of `env_logger` are off: they add colours and regular expressions.

use std::path::Path;
use std::sync::{OnceLock, PoisonError, RwLock};

use env_logger::{Builder, Logger, Target};
use log::{LevelFilter, Log, Metadata, Record};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::escape::visible;
use hpctrain_base::own_files;

/// The logger of the program. The file is set once the run directory is known.
struct RankLogger {
    console: OnceLock<Logger>,
    file: RwLock<Option<Logger>>,
}

/// The prefix of messages on the console.
static NAME: RwLock<String> = RwLock::new(String::new());

static LOGGER: RankLogger = RankLogger { console: OnceLock::new(), file: RwLock::new(None) };

impl RankLogger {
    /// Calls `act` with the loggers.
    fn each(&self, mut act: impl FnMut(&Logger)) {
        self.console.get().into_iter().for_each(&mut act);
        self.file.read().unwrap_or_else(PoisonError::into_inner).iter().for_each(act);
    }
}

impl Log for RankLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let mut is_enabled = false;
        self.each(|logger| is_enabled |= logger.enabled(metadata));
        is_enabled
    }

    fn log(&self, record: &Record<'_>) {
        self.each(|logger| {
            if logger.matches(record) {
                logger.log(record);
            }
        });
    }

    fn flush(&self) {
        self.each(Log::flush);
    }
}

/// Sends warnings to standard error, prefixed with `who` (such as `"rank 3"`). `RUST_LOG` can
/// enable more messages.
pub fn to_console(who: &str) {
    use std::io::Write as _;
    let mut builder = Builder::new();
    builder.filter_level(LevelFilter::Warn).parse_default_env();
    builder.format(|out, record| {
        let level = record.level().as_str().to_lowercase();
        let who = NAME.read().unwrap_or_else(PoisonError::into_inner);
        writeln!(out, "{level}: {who}: {}", visible(&record.args().to_string()))
    });
    let console = builder.build();
    log::set_max_level(console.filter());
    // A second call, by another thread-rank of the same process, changes nothing.
    if LOGGER.console.set(console).is_ok() {
        rename_console(who);
        let _ = log::set_logger(&LOGGER);
    }
}

/// Changes the prefix of messages on standard error, for a rank that gets another number than the
/// launcher's.
pub fn rename_console(who: &str) {
    who.clone_into(&mut NAME.write().unwrap_or_else(PoisonError::into_inner));
}

/// Also writes messages of at least `level` to `path`, appending.
///
/// # Errors
/// Returns an error if the file cannot be opened.
pub fn to_file(path: &Path, level: LevelFilter) -> Result<()> {
    let has_file = LOGGER.file.read().unwrap_or_else(PoisonError::into_inner).is_some();
    // Thread-ranks of one process share the first file.
    if has_file { Ok(()) } else { to_another_file(path, level) }
}

/// Writes messages as [`to_file`] does, to another file than so far: that of a rank which has got
/// another number.
///
/// # Errors
/// Returns an error if the file cannot be opened.
pub fn to_another_file(path: &Path, level: LevelFilter) -> Result<()> {
    let file = own_files::append(path).map_err(|e| Error::io("open the log", path, e))?;
    let mut builder = Builder::new();
    builder.filter_level(level).parse_default_env().target(Target::Pipe(Box::new(file)));
    let logger = builder.build();
    log::set_max_level(log::max_level().max(logger.filter()));
    *LOGGER.file.write().unwrap_or_else(PoisonError::into_inner) = Some(logger);
    Ok(())
}
