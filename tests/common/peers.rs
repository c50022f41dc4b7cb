//! Third-party programs that read the output of hpctrain: TensorBoard, a browser. A test that needs
//! a missing program is skipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::launch::{inherits_nothing, test_name};

/// Returns the folder of this name next to the build, into which `scripts/setup --test` fetches
/// programs.
fn fetched(name: &str) -> PathBuf {
    super::target().with_file_name(name)
}

/// Returns the path of a script of `tests/common/`.
fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn python() -> Command {
    let mut python = Command::new(std::env::var("PYTHON").unwrap_or("python3".into()));
    let folders = [fetched("tensorboard"), fetched("python")];
    python.env("PYTHONPATH", std::env::join_paths(folders).unwrap());
    python
}

/// Returns the scalars, histograms and texts in a run's directory as TensorBoard's own
/// EventAccumulator reads them; none, with a message, if TensorBoard is not installed.
pub fn events(run: &Path) -> Option<Value> {
    events_in(&run.join("tensorboard"))
}

/// Returns the same of the events files in a directory.
pub fn events_in(directory: &Path) -> Option<Value> {
    let tried = inherits_nothing(
        python().args(["-c", "import tensorboard.backend.event_processing.event_accumulator"]),
    )
    .output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        println!(
            "SKIPPED: {}: TensorBoard is not here (scripts/setup --test fetches it)",
            test_name()
        );
        return None;
    }
    let read = inherits_nothing(python().arg(script("events.py")).arg(directory)).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    Some(serde_json::from_slice(&read.stdout).unwrap())
}

/// Names of programs that may be a headless Chromium.
const BROWSERS: [&str; 4] =
    ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];

/// Opens a page in a browser by `tests/common/browser.py` with these arguments and returns its
/// output; none, with a message, if no browser is installed.
pub fn browse(page: &Path, args: &[&str]) -> Option<Value> {
    let is_here = |name: &&&str| {
        let tried = inherits_nothing(Command::new(name).arg("--version")).output();
        tried.is_ok_and(|tried| tried.status.success())
    };
    let Some(browser) = BROWSERS.iter().find(is_here) else {
        println!(
            "SKIPPED: {}: no Chromium is here (scripts/setup --test installs it on Debian)",
            test_name()
        );
        return None;
    };
    let read =
        inherits_nothing(python().arg(script("browser.py")).arg(browser).arg(page).args(args))
            .output()
            .unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    Some(serde_json::from_slice(&read.stdout).unwrap())
}
