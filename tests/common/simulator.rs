//! Tests on the GPU simulator (`tests/cudasim/`), in separate processes that load its libraries.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::launch::{Ended, finish, inherits_nothing, test_name};

pub type Settings<'a> = &'a [(&'a str, &'a str)];

/// The variable that, set to any value, makes the tests run on the machine's GPU instead.
const ON_GPU: &str = "HPCTRAIN_TEST_GPU";

/// Returns the simulator's folder, after building it if it is outdated.
pub fn simulator() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = super::target().join("cudasim");
        let script = super::root().join("tests/cudasim/build.sh");
        assert!(inherits_nothing(Command::new(script).arg(&out)).status().unwrap().success());
        out
    })
}

/// Lets a program load the simulator's libraries, and none of a GPU.
pub fn with_simulator(command: &mut Command) -> &mut Command {
    command
        .env("LD_LIBRARY_PATH", simulator().join("lib"))
        .env("CUDASIM_CACHE", simulator().join("kernels"));
    command.env("XDG_CACHE_HOME", simulator().join("cache")).env_remove("CUDA_VISIBLE_DEVICES")
}

/// Returns whether tests run on the machine's GPU.
pub fn is_on_gpu() -> bool {
    std::env::var_os(ON_GPU).is_some()
}

/// Returns the role of this process, if it runs the body of a test.
pub fn role() -> Option<String> {
    std::env::var("CUDASIM_TEST_ROLE").ok()
}

/// Runs the calling test in a child process with the simulator's libraries, in a role.
#[track_caller]
pub fn child(settings: Settings, role: &str) -> Ended {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&*test_name(), "--exact", "--nocapture", "--include-ignored"]);
    finish(
        with_simulator(&mut command).env("CUDASIM_TEST_ROLE", role).envs(settings.iter().copied()),
    )
}

/// Runs a test's body with each of some settings of the simulator, or once on the machine's GPU.
#[track_caller]
pub fn under(all: &[Settings], body: fn()) {
    if role().is_some() || is_on_gpu() {
        return body();
    }
    for settings in all {
        let ended = child(settings, "body");
        assert!(ended.status.success(), "{settings:?}: {ended}");
    }
}
