//! Environment variables that a process sets for CUDA and NCCL: every kind of start sets them.

use std::path::Path;
use std::process::Command;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::Run;

/// Builds the library that shows the variables of a process when it ends.
fn library(root: &Path) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/show_environment.c");
    let library = root.join("show_environment.so");
    let mut compiler = Command::new("cc");
    let status = compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    assert!(status.unwrap().success());
    library.to_str().unwrap().to_owned()
}

/// Returns the variables of all processes of a run: a line for each process.
#[track_caller]
fn shown(
    root: &Path,
    library: &str,
    name: &str,
    transport: Transport,
    settings: &[&str],
    variables: &[(&str, &str)],
) -> Vec<String> {
    let settings = [&["run.steps=1", "eval.samples=2"], settings].concat();
    let run = Run::new(transport, root, name, &settings);
    let path = root.join(format!("{name}.txt"));
    let mut command = run.command();
    command.env("LD_PRELOAD", library).env("SHOWN", &path);
    for name in ["CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "NCCL_MAX_P2P_NCHANNELS"] {
        command.env_remove(name);
    }
    finish(command.envs(variables.iter().copied())).succeeded();
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn every_start_sets_the_variables_of_cuda_and_nccl() {
    let root = tempfile::tempdir().unwrap();
    let library = library(root.path());
    for (name, transport, processes) in [
        ("alone", Alone, 1),
        ("threads", Simulate(2), 1),
        ("spawned", Spawn(2), 2),
        ("mpirun", Mpirun(2), 2),
    ] {
        let lines = shown(root.path(), &library, name, transport, &[], &[]);
        let set = lines.iter().filter(|line| *line == "queues 32, NVLS 0, channels 8").count();
        assert!(set >= processes, "{name}: {lines:?}");
    }
}

#[test]
fn variables_of_the_user_are_kept_and_nccls_own_collectives_may_use_nvls() {
    let root = tempfile::tempdir().unwrap();
    let library = library(root.path());
    let vendor = "comm.algorithm=vendor";
    let lines = shown(root.path(), &library, "vendor", Mpirun(2), &[vendor], &[]);
    let set = lines.iter().filter(|line| *line == "queues 32, NVLS unset, channels 8").count();
    assert!(set >= 2 && !lines.iter().any(|line| line.contains("NVLS 0")), "{lines:?}");

    let given = [("CUDA_DEVICE_MAX_CONNECTIONS", "16"), ("NCCL_NVLS_ENABLE", "1")];
    let lines = shown(root.path(), &library, "given", Simulate(2), &[], &given);
    assert!(lines.iter().all(|line| line.starts_with("queues 16, NVLS 1, ")), "{lines:?}");
    assert!(lines.iter().any(|line| line.ends_with("channels 8")), "{lines:?}");
}
