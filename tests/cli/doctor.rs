//! `hpctrain doctor`: its findings on this machine, and on a simulated GPU that works or does not.

use std::process::Command;

use serde_json::Value;

use hpctrain_testkit::launch::{
    Ended, LIMIT, finish, handles, mpirun, processes, program, rank_of, send, start,
};
use hpctrain_testkit::simulator::{simulator, with_simulator};

/// The report that a doctor printed with `--json`, which must agree with its exit code.
#[track_caller]
fn report(ended: &Ended) -> Value {
    let report: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended}"));
    let checks = report["checks"].as_array().unwrap();
    let failed = checks.iter().any(|check| check["status"] == "failure");
    assert_eq!(ended.code(), i32::from(failed), "{ended}");
    for check in checks {
        assert_eq!(check["hint"].is_string(), check["status"] != "ok", "{check}");
        assert!(
            !check["found"].as_str().unwrap().is_empty() && check["ranks"].is_array(),
            "{check}"
        );
    }
    report
}

/// Returns the status and the finding of a check that occurs once.
#[track_caller]
fn check<'a>(report: &'a Value, name: &str) -> (&'a str, &'a str) {
    let named: Vec<&Value> =
        report["checks"].as_array().unwrap().iter().filter(|check| check["name"] == name).collect();
    assert_eq!(named.len(), 1, "{name} in {report:#}");
    (named[0]["status"].as_str().unwrap(), named[0]["found"].as_str().unwrap())
}

/// Runs one rank on the simulator.
#[track_caller]
fn simulated(settings: &[(&str, &str)]) -> Value {
    let mut command = program(["doctor", "--json"]);
    report(&finish(with_simulator(&mut command).envs(settings.iter().copied())))
}

/// Returns the command of a doctor under mpirun.
fn on_ranks(ranks: usize, args: &[&str]) -> Command {
    let mut command = mpirun(ranks);
    command.arg(hpctrain_testkit::program()).arg("doctor").args(args);
    command
}

#[test]
fn a_run_root_is_checked_and_left_unchanged() {
    let root = tempfile::tempdir().unwrap();
    let args = ["doctor", "--run-root", root.path().to_str().unwrap()];
    let ended = finish(&mut program(args));
    let mut lines = ended.stdout.lines().peekable();
    while let Some(line) = lines.next() {
        let advised = lines.peek().is_some_and(|next| next.starts_with("  hint: "));
        match line.chars().next().unwrap() {
            '✓' => assert!(!advised, "{ended}"),
            '!' | '✗' => assert!(advised, "{ended}"),
            ' ' => {}
            _ => panic!("{line:?} in {ended}"),
        }
    }
    let report = report(&finish(program(args).arg("--json")));
    for name in
        ["gpu driver", "nvrtc", "cublaslt", "ranks", "cores", "free space", "memory", "open files"]
    {
        assert!(
            report["checks"].as_array().unwrap().iter().any(|check| check["name"] == name),
            "{name}: {report:#}"
        );
    }
    assert!(check(&report, "mpi").1.contains("started alone"));
    for name in ["hdf5", "hdf5 files", "run root", "bundled data"] {
        assert_eq!(check(&report, name).0, "ok", "{report:#}");
    }
    assert_eq!(report["ranks"].as_array().unwrap().len(), 1);
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_missing_run_root_is_not_created() {
    let root = tempfile::tempdir().unwrap();
    let report = report(&finish(program(["doctor", "--json"]).current_dir(root.path())));
    assert!(
        check(&report, "run root").1.contains("for runs, which does not exist yet"),
        "{report:#}"
    );
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_run_root_that_cannot_be_written_fails() {
    let ended = finish(&mut program(["doctor", "--json", "--run-root", "/proc"]));
    let report = report(&ended);
    assert_eq!(
        (ended.code(), check(&report, "run root").0, check(&report, "hdf5 files").0),
        (1, "failure", "failure")
    );
    assert_eq!(check(&report, "bundled data").0, "ok");
}

#[test]
fn ranks_meet_in_one_report() {
    let report = report(&finish(&mut on_ranks(2, &["--json"])));
    let ranks = report["ranks"].as_array().unwrap();
    assert_eq!(
        ranks.iter().map(|rank| rank["local_rank"].as_u64().unwrap()).collect::<Vec<_>>(),
        [0, 1]
    );
    assert!(ranks.iter().all(|rank| !rank["cores"].as_array().unwrap().is_empty()), "{report:#}");
    assert!(
        check(&report, "mpi").1.contains("2 ranks, started by Open MPI's mpirun"),
        "{report:#}"
    );
    assert_eq!(check(&report, "mpi threads").0, "ok");
    assert_eq!(check(&report, "shared memory").0, "ok");
    assert!(check(&report, "ranks").1.starts_with("2 on "), "{report:#}");

    let separate =
        self::report(&finish(on_ranks(2, &["--json"]).env("HPCTRAIN_RANKS_PER_NODE", "1")));
    assert_eq!(check(&separate, "shared memory").0, "warning");
}

#[test]
fn a_gpu_that_works_is_computed_on() {
    let report = simulated(&[("CUDASIM_DEVICES", "2")]);
    for name in [
        "gpu driver",
        "nvrtc",
        "cublaslt",
        "nccl",
        "gpu 0 kernel",
        "gpu 0 matmul",
        "gpu 1 kernel",
        "gpu 1 matmul",
    ] {
        assert_eq!(check(&report, name).0, "ok", "{report:#}");
    }
    for (name, file) in [("nvrtc", "lib/libnvrtc.so"), ("nccl", "lib/libnccl.so.2")] {
        let place = simulator().join(file);
        assert!(check(&report, name).1.ends_with(place.to_str().unwrap()), "{report:#}");
    }
    assert!(
        check(&report, "gpu 1").1.contains("0000:02:00.0")
            && check(&report, "gpu 1").1.contains("capability 9.0")
    );
    assert_eq!(report["ranks"][0]["gpu"]["pci"], "0000:01:00.0");
}

#[test]
fn ranks_exchange_the_memory_of_their_gpus() {
    let mut two = on_ranks(2, &["--json"]);
    let report = report(&finish(with_simulator(&mut two).env("CUDASIM_DEVICES", "2")));
    assert_eq!(check(&report, "transport host-staged").0, "ok", "{report:#}");
    let (status, found) = check(&report, "transport nccl");
    assert!(
        status == "ok" && found.contains(" carries GPU memory unchanged between all ranks"),
        "{report:#}"
    );
    assert_eq!(
        check(&report, "transport cuda-ipc").1,
        "the ranks open each other's GPU memory (CUDA IPC)",
        "{report:#}"
    );
    assert!(
        check(&report, "transport cuda-aware").1.contains("does not report CUDA support"),
        "{report:#}"
    );
    let gpus = |rank: usize| report["ranks"][rank]["gpu"]["pci"].as_str().unwrap().to_owned();
    assert_eq!([gpus(0), gpus(1)], ["0000:01:00.0", "0000:02:00.0"]);
    assert_eq!(check(&report, "gpu of each rank").1.lines().count(), 2);

    let mut slow = on_ranks(2, &["--json"]);
    let none = [("CUDASIM_DEVICES", "2"), ("CUDASIM_FAIL", "nccl,ipc")];
    let report = self::report(&finish(with_simulator(&mut slow).envs(none)));
    let (status, found) = check(&report, "transport auto");
    assert!(
        status == "warning"
            && found
                .starts_with("messages between GPUs go through host memory: an all-reduce takes ")
            && found.contains(" s per GB of gradients"),
        "{report:#}"
    );

    let mut shared = on_ranks(2, &["--json"]);
    let report = self::report(&finish(with_simulator(&mut shared).env("CUDASIM_DEVICES", "1")));
    let (status, found) = check(&report, "gpu of each rank");
    assert!(status == "warning" && found.contains("are to share 1 GPU"), "{report:#}");
}

#[test]
fn gpus_that_are_required_and_missing_are_a_failure() {
    let mut shared = on_ranks(2, &["--json", "--require-gpus"]);
    let report = report(&finish(with_simulator(&mut shared).env("CUDASIM_DEVICES", "1")));
    let (status, found) = check(&report, "gpu of each rank");
    assert!(status == "failure" && found.contains("are to share 1 GPU"), "{report:#}");

    // A node without a driver.
    let ended = finish(program(["doctor", "--json", "--require-gpus"]).env("LD_LIBRARY_PATH", ""));
    let report = self::report(&ended);
    if check(&report, "gpu driver").0 == "warning" {
        let (status, found) = check(&report, "gpu of each rank");
        assert!(status == "failure" && found.contains("has no GPU"), "{report:#}");
    }
}

#[test]
fn ranks_that_see_different_gpus_are_warned_of() {
    let mut bound = mpirun(2);
    bound.args(["sh", "-c", "CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_RANK exec \"$@\"", "sh"]);
    bound.arg(hpctrain_testkit::program()).args(["doctor", "--json", "--require-gpus"]);
    let report = report(&finish(with_simulator(&mut bound).env("CUDASIM_DEVICES", "2")));
    let (status, found) = check(&report, "visible gpus");
    assert!(
        status == "warning"
            && found
                .contains("see different GPUs: NCCL copies through host memory instead of NVLink")
            && found.contains("CUDA IPC cannot open the memory of a hidden GPU"),
        "{report:#}"
    );
    let checks = report["checks"].as_array().unwrap();
    let hint = checks.iter().find(|check| check["name"] == "visible gpus").unwrap();
    let hint = hint["hint"].as_str().unwrap();
    assert!(hint.contains("--gpus-per-node=N --gpu-bind=none"), "{hint}");
}

#[test]
fn ranks_that_are_renumbered_by_node_are_reported() {
    let mut four = on_ranks(4, &["--json"]);
    let report = report(&finish(four.env("HPCTRAIN_RANKS_PER_NODE", "2,cyclic")));
    let (status, found) = check(&report, "rank numbers");
    assert!(status == "ok" && found.starts_with("by node: "), "{report:#}");
    assert_eq!(report["ranks"].as_array().unwrap().len(), 4);
}

/// A signal, such as that of a batch system that preempts the job, is not reported as a failure.
#[test]
fn a_signal_to_the_ranks_is_not_a_failure() {
    let root = tempfile::tempdir().unwrap();
    let mut two = on_ranks(2, &["--run-root", root.path().to_str().unwrap()]);
    let mut job = start(with_simulator(&mut two).env("CUDASIM_DEVICES", "2"));
    let ranks = || {
        let all = processes(root.path().to_str().unwrap());
        let listens =
            |process: &u32| rank_of(*process).is_some() && handles(*process, libc::SIGUSR1);
        all.into_iter().filter(listens).collect::<Vec<_>>()
    };
    job.until("listening", || ranks().len() == 2);
    ranks().into_iter().for_each(|rank| send(rank, libc::SIGUSR1));
    let ended = job.finish(LIMIT);
    assert_eq!(ended.code(), 75, "{ended}");
}

#[test]
fn a_gpu_that_does_not_work_fails() {
    let old = simulated(&[("CUDASIM_DRIVER_VERSION", "11000")]);
    let (status, found) = check(&old, "gpu driver");
    assert!(status == "failure" && found.contains("CUDA 11.0, but 12.0 is required"), "{old:#}");
    let none = simulated(&[("CUDASIM_DEVICES", "0")]);
    let (status, found) = check(&none, "gpu driver");
    assert!(status == "failure" && found.contains("NO_DEVICE"), "{none:#}");
    // The CPU is still checked.
    assert_eq!(check(&none, "hdf5 files").0, "ok");

    let driver_only = tempfile::tempdir().unwrap();
    std::fs::copy(simulator().join("lib/libcuda.so.1"), driver_only.path().join("libcuda.so"))
        .unwrap();
    let bare = simulated(&[("LD_LIBRARY_PATH", driver_only.path().to_str().unwrap())]);
    assert_eq!((check(&bare, "gpu driver").0, check(&bare, "gpu 0").0), ("ok", "ok"), "{bare:#}");
    assert_ne!(check(&bare, "nccl").0, "failure", "NCCL is optional");
    // Libraries of the system do not match this driver.
    assert!(
        bare["checks"].as_array().unwrap().iter().any(|check| check["status"] == "failure"),
        "{bare:#}"
    );
}
