//! Third-party programs that read the output of hpctrain: TensorBoard, a browser. A test that needs
//! a missing program is skipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::launch::{in_our_environment, inherits_nothing, test_name};

/// Returns the folder of this name next to the build, into which `scripts/setup --test` fetches
/// programs.
fn fetched(name: &str) -> PathBuf {
    super::target().with_file_name(name)
}

/// Returns a command that starts `ranks` ranks with ULFM, to which the program must be added: the
/// `mpirun` of Open MPI 5, whose library replaces the one that programs are linked with. Returns
/// none, with a message, if it is not installed or this program is linked with another library.
pub fn mpirun_with_ulfm(ranks: usize) -> Option<Command> {
    let prefix = std::env::var_os("HPCTRAIN_ULFM_PREFIX").map(PathBuf::from);
    let prefix = prefix.unwrap_or_else(|| fetched("openmpi"));
    let mpirun = prefix.join("bin/mpirun");
    if !mpirun.exists()
        || !hpctrain::comm::mpi::library().is_ok_and(|library| library.starts_with("Open MPI"))
    {
        println!("SKIPPED: {}: no Open MPI 5 in {}", test_name(), prefix.display());
        return None;
    }
    let mut command = Command::new(mpirun);
    in_our_environment(&mut command);
    command.args(["--with-ft", "ulfm", "--map-by", ":OVERSUBSCRIBE"]);
    command.args(["-np", &ranks.to_string()]).env("LD_LIBRARY_PATH", prefix.join("lib"));
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    Some(command)
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
