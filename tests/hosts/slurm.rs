//! The job scripts of `slurm/` under a real Slurm, which `scripts/slurm-up` starts on two hosts
//! with two simulated GPUs each. Skipped, with the reason, where Slurm or such hosts are missing.
//! `tests/cli/slurm.rs` runs the scripts with stand-ins.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::steps;
use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{
    self, LIMIT, finish, in_our_environment, start, start_without_waiting, test_name,
};
use hpctrain_testkit::program;
use hpctrain_testkit::runs::{Run, RunFiles, SMALL, json};
use hpctrain_testkit::simulator::with_simulator;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/slurm-up");

/// The exit code of the script if Slurm cannot run.
const NOT_HERE: i32 = 3;

/// The settings of a network that trains on a simulated GPU in milliseconds, with the same bits on
/// one rank and four.
const SETTINGS: [&str; 7] = [
    "model.layers=1",
    "model.width=16",
    "model.context=8",
    "parallel.virtual_ranks=4",
    "eval.samples=4",
    "device.memory_limit=96MiB",
    "checkpoint.every=100",
];

/// Two tasks on each of two nodes that have two GPUs and 8 CPUs.
const FOUR_GPUS: [&str; 4] =
    ["--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=4"];

/// Slurm on hosts h0 and h1, until it is dropped.
struct Slurm {
    hosts: Hosts,
    /// The directory of the runs and the logs.
    root: tempfile::TempDir,
}

impl Slurm {
    /// Starts Slurm. Returns `None` and prints the reason if it cannot run.
    fn new() -> Option<Self> {
        let check = finish(Command::new(SCRIPT).arg("check"));
        if check.code() == NOT_HERE {
            println!("SKIPPED: {}: {}", test_name(), check.stderr.trim());
            return None;
        }
        check.succeeded();
        let slurm = Self { hosts: Hosts::new(2)?, root: tempfile::tempdir().unwrap() };
        finish(&mut slurm.script(&["start"])).succeeded();
        Some(slurm)
    }

    fn script(&self, words: &[&str]) -> Command {
        let mut command = Command::new(SCRIPT);
        in_our_environment(&mut command);
        command.args(words).env("HPCTRAIN_HOSTS", self.hosts.folder());
        command
    }

    /// Runs a Slurm command and returns its output.
    #[track_caller]
    fn run(&self, words: &[&str]) -> String {
        finish(self.script(&["run"]).args(words)).succeeded().stdout
    }

    /// Submits a script of `slurm/` with options of sbatch, to train the run `name`. `arguments`
    /// are passed to the script, `variables` to the job's environment.
    #[track_caller]
    fn submit(
        &self,
        options: &[&str],
        script: &str,
        name: &str,
        arguments: &[String],
        variables: &[(&str, &str)],
    ) -> Job<'_> {
        let log = self.root.path().join(format!("{script}-{name}.log"));
        let mut command = self.script(&["run", "sbatch", "--parsable"]);
        command.arg(format!("--output={}", log.display())).args(options);
        command
            .arg(format!("slurm/{script}"))
            .args(arguments)
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        command.env("HPCTRAIN", program()).env("RUN_ROOT", self.root.path()).env("RUN_NAME", name);
        with_simulator(&mut command).env("CUDASIM_DEVICES", "2").envs(variables.iter().copied());
        let number = finish(&mut command).succeeded().stdout.trim().to_string();
        Job { slurm: self, number, log: log.to_str().unwrap().into() }
    }

    /// Submits a job of two ranks on each node by `hpctrain submit`, to train a run whose name begins
    /// with `name`. `site` is the text of a site file.
    #[track_caller]
    fn submit_by_program(&self, site: &str, name: &str, arguments: &[String]) -> Job<'_> {
        let path = self.root.path().join("site.toml");
        std::fs::write(&path, site).unwrap();
        let mut command = self.script(&["run"]);
        command.arg(program()).args(["submit", "--now", "--nodes", "2", "--ranks-per-node", "2"]);
        command.args(["--scheduler", "slurm", "--time", "30m", "--name", name, "--out", "job"]);
        command.arg("--site").arg(&path).args(arguments).current_dir(self.root.path());
        with_simulator(&mut command).env("CUDASIM_DEVICES", "2");
        let number = finish(&mut command).succeeded().stdout.trim().to_string();
        let log = self.root.path().join(format!("{name}-{number}.log"));
        Job { slurm: self, number, log: log.to_str().unwrap().into() }
    }

    /// Preempts the jobs on these nodes with a job that ends at once.
    #[track_caller]
    fn preempt(&self, nodes: &str) {
        let nodelist = format!("--nodelist={nodes}");
        self.run(&[
            "sbatch",
            "--wait",
            "--partition=high",
            &nodelist,
            "--exclusive",
            "--output=/dev/null",
            "--wrap=true",
        ]);
    }

    fn files(&self, name: &str) -> RunFiles {
        RunFiles(self.root.path().join(name))
    }
}

/// A Slurm job.
struct Job<'a> {
    slurm: &'a Slurm,
    number: String,
    log: String,
}

impl Job<'_> {
    /// Returns a property such as `JobState`.
    #[track_caller]
    fn property(&self, name: &str) -> String {
        let text = self.slurm.run(&["scontrol", "--oneliner", "show", "job", &self.number]);
        let value = text
            .split_whitespace()
            .find_map(|word| word.strip_prefix(&format!("{name}=")).map(str::to_string));
        value.unwrap_or_else(|| panic!("no {name} in {text}"))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until `is_so` returns true; panics with the job's log if it takes too long.
    #[track_caller]
    fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(
                begun.elapsed() < LIMIT,
                "never {what}: {}: {}",
                self.property("JobState"),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Starts the job right after a requeue, which Slurm would do two minutes later.
    #[track_caller]
    fn start_now(&self) {
        self.slurm.run(&["scontrol", "update", &format!("jobid={}", self.number), "StartTime=now"]);
    }

    /// Waits for the end; panics with the job's log unless the job is in the expected state, such
    /// as `COMPLETED`.
    #[track_caller]
    fn ends(&self, state: &str) {
        let has_ended = || {
            !["PENDING", "CONFIGURING", "RUNNING", "COMPLETING"]
                .contains(&&self.property("JobState")[..])
        };
        self.until("ended", has_ended);
        assert_eq!(self.property("JobState"), state, "{}", self.log());
    }
}

/// Returns `--set` before each setting, those of small runs first.
fn sets(settings: &[&str]) -> Vec<String> {
    SMALL
        .iter()
        .chain(settings)
        .flat_map(|setting| ["--set".to_string(), setting.to_string()])
        .collect()
}

/// Runs one rank on one simulated GPU.
fn on_one_gpu(root: &Path, settings: &[&str]) -> RunFiles {
    let run = Run::new(Alone, root, "one", &[settings, &["run.device=cuda"]].concat());
    finish(with_simulator(&mut run.command())).succeeded();
    run.files()
}

#[test]
#[ignore = "takes minutes: scripts/test full runs it"]
fn a_preempted_gpu_job_continues_on_two_nodes_with_the_bits_of_one_rank() {
    let Some(slurm) = Slurm::new() else { return };
    let settings = [&SETTINGS[..], &["run.steps=300"]].concat();
    let files = slurm.files("x");
    let job = slurm.submit(&FOUR_GPUS, "train-gpu.sbatch", "x", &sets(&settings), &[]);
    job.until("at step 20", || steps(&files) >= 20);
    slurm.preempt("h[0-1]");
    job.until("requeued", || job.property("JobState") == "PENDING");
    assert!(steps(&files) < 300, "nothing was preempted: {}", job.log());
    job.start_now();
    job.ends("COMPLETED");
    assert_eq!(job.property("Restarts"), "1");

    let log = job.log();
    let ranks = [
        "rank 0 on h0: CPU simulator 0 at 0000:01:00.0",
        "rank 1 on h0: CPU simulator 1 at 0000:02:00.0",
        "rank 2 on h1: CPU simulator 0 at 0000:01:00.0",
        "rank 3 on h1: CPU simulator 1 at 0000:02:00.0",
    ];
    for rank in ranks {
        // Both the doctor and the training print it, in both starts.
        assert_eq!(log.matches(rank).count(), 4, "{rank}: {log}");
    }
    assert!(log.contains("\nended at step ") && log.contains("Exited with exit code 75"), "{log}");
    let card = json(&files.path("run.json"));
    assert_eq!(card["hosts"], serde_json::json!(["h0", "h0", "h1", "h1"]), "{card}");
    assert_eq!(card["device_path"], "nccl", "{card}");
    files.same_as(&on_one_gpu(slurm.root.path(), &settings), 300, "preempted");
}

#[test]
#[ignore = "takes minutes: scripts/test full runs it"]
fn a_gpu_that_computes_wrongly_fails_the_job_before_it_trains() {
    let Some(slurm) = Slurm::new() else { return };
    let broken = [("CUDASIM_FAIL", "matmul")];
    let job = slurm.submit(&FOUR_GPUS, "train-gpu.sbatch", "x", &sets(&SETTINGS), &broken);
    job.ends("FAILED");
    assert_eq!((&*job.property("ExitCode"), &*job.property("Restarts")), ("1:0", "0"));
    let reason = "preflight failed: hpctrain doctor ended with code 1 on h[0-1]";
    assert!(job.log().contains(reason) && !slurm.files("x").0.exists(), "{}", job.log());
}

#[test]
#[ignore = "takes minutes: scripts/test full runs it"]
fn a_job_of_hpctrain_submit_checks_its_nodes_and_trains_on_gpus() {
    let Some(slurm) = Slurm::new() else { return };
    let settings = [&SETTINGS[..], &["run.steps=30"]].concat();
    let site = "partition = 'low'\ngpus_per_node = 2\ncores_per_node = 8\n";
    let job = slurm.submit_by_program(site, "x", &sets(&settings));
    job.ends("COMPLETED");
    let files = slurm.files(&format!("runs/x-{}", job.number));
    let log = job.log();
    assert!(log.find("✓ run root shared") < log.find("\nrun          runs/x-"), "{log}");
    let card = json(&files.path("run.json"));
    assert_eq!(card["hosts"], serde_json::json!(["h0", "h0", "h1", "h1"]), "{card}");
    files.same_as(&on_one_gpu(slurm.root.path(), &settings), 30, "submitted");
}

/// The directory of runs of the second node is on a file system of that node.
#[test]
#[ignore = "takes minutes: scripts/test full runs it"]
fn a_job_of_hpctrain_submit_stops_at_a_node_that_does_not_share_the_runs() {
    let Some(slurm) = Slurm::new() else { return };
    let runs = slurm.root.path().join("runs");
    std::fs::create_dir(&runs).unwrap();
    slurm.hosts.run_script(&["run", "h1", "mount", "-t", "tmpfs", "tmpfs", runs.to_str().unwrap()]);
    let job = slurm.submit_by_program("cores_per_node = 8", "x", &sets(&["run.device=cpu"]));
    job.ends("FAILED");
    assert_eq!((&*job.property("ExitCode"), &*job.property("Restarts")), ("1:0", "0"));
    let log = job.log();
    let end = log.rsplit("\n✗ ").next().unwrap();
    assert!(
        end.starts_with("run root shared ")
            && end.contains("rank 2 on h1: this node does not see what rank 0 writes in "),
        "{log}"
    );
    let reason =
        "preflight failed: hpctrain doctor ended with code 1 on h[0-1]; nothing was trained\n";
    assert!(end.ends_with(reason), "{log}");
    assert_eq!(std::fs::read_dir(&runs).unwrap().count(), 0, "{log}");
}

#[test]
#[ignore = "takes minutes: scripts/test full runs it"]
fn a_job_trains_on_cores_and_another_evaluates_it_on_a_gpu() {
    let Some(slurm) = Slurm::new() else { return };
    let settings =
        [&SETTINGS[..], &["run.steps=200", "run.device=cpu", "eval.inline=false"]].concat();
    let sizes = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2"];
    let trainer = slurm.submit(&sizes, "train.sbatch", "x", &sets(&settings), &[]);
    let files = slurm.files("x");
    let words = [files.0.to_str().unwrap(), "--policy", "every", "--set", "run.device=cuda"]
        .map(String::from);
    let evaluator = slurm.submit(&["--gpus=1"], "evaluate.sbatch", "x", &words, &[]);
    trainer.ends("COMPLETED");
    evaluator.ends("COMPLETED");
    assert_eq!(files.numbers("eval.jsonl", "step"), [100.0, 200.0], "{}", evaluator.log());
    assert_eq!(json(&files.path("run.json"))["ranks"], 4);
}

#[test]
#[ignore = "takes minutes: scripts/test full runs it"]
fn servers_and_workers_train_in_one_job_with_the_bits_of_one_rank() {
    let Some(slurm) = Slurm::new() else { return };
    let settings = [&SETTINGS[..], &["run.steps=100"]].concat();
    let parts = [
        "--ntasks=3",
        "--cpus-per-task=1",
        ":",
        "--ntasks=2",
        "--cpus-per-task=2",
        "--gpus-per-task=1",
    ];
    let job = slurm.submit(&parts, "servers.sbatch", "x", &sets(&settings), &[]);
    job.ends("COMPLETED");
    assert!(job.log().contains("servers    2, "), "{}", job.log());
    let losses = |files: &RunFiles| files.numbers("metrics.jsonl", "loss");
    assert_eq!(
        losses(&slurm.files("x")),
        losses(&on_one_gpu(slurm.root.path(), &settings)),
        "{}",
        job.log()
    );
}

/// The coordinator and a server run outside of Slurm, so that only the worker is preempted.
#[test]
#[ignore = "takes minutes: scripts/test full runs it"]
fn a_preempted_worker_is_requeued_and_joins_again() {
    let Some(slurm) = Slurm::new() else { return };
    let settings = [&SETTINGS[..], &["run.steps=1000000", "run.name=x", "eval.every=0"]].concat();
    let files = slurm.files("x");
    let root = format!("run.root={}", slurm.root.path().display());
    let mut coordinate = launch::program(["ps", "coordinator", "--servers", "1", "--set", &root]);
    let mut coordinator = start(&mut slurm.hosts.on("h0", coordinate.args(sets(&settings))));
    coordinator.until("waiting for servers", || files.path("servers/coordinator").exists());
    let mut serve = launch::program(["ps", "server", "--run"]);
    let _server =
        start_without_waiting(&coordinator, &mut slurm.hosts.on("h0", serve.arg(&files.0)));

    let words = [files.0.to_str().unwrap().to_string()];
    let job = slurm.submit(&["--gpus=1", "--nodelist=h1"], "workers.sbatch", "x", &words, &[]);
    job.until("working", || steps(&files) >= 3);
    slurm.preempt("h1");
    job.until("requeued", || job.property("JobState") == "PENDING");
    let before = steps(&files);
    job.start_now();
    job.until("working again", || steps(&files) > before + 3);
    assert_eq!(job.property("Restarts"), "1");
}

/// One agent on each of two nodes starts the ranks of an elastic job; a rank is killed, the others go
/// on, and the agent starts a process that joins them.
#[test]
fn agents_of_srun_replace_a_lost_rank() {
    let Some(slurm) = Slurm::new() else { return };
    let root = slurm.root.path();
    let settings = [&SMALL[..], &["run.steps=400", "parallel.virtual_ranks=8", "eval.every=100"]];
    let settings = [&settings.concat()[..], &["checkpoint.every=100"]].concat();
    let reference = Run::new(Alone, root, "reference", &settings).succeeds();
    let elastic = ["elastic.on=true", "elastic.timeout=3", "memory_checkpoint.every=1"];
    let run = Run::new(Alone, root, "x", &[&settings[..], &elastic].concat());
    let files = run.files();
    let mut command = slurm.script(&["run", "srun", "--no-kill", "--kill-on-bad-exit=0"]);
    command.args(["--nodes=2", "--ntasks-per-node=1"]).arg(program());
    command.args(["agent", "--slots", "2", "--"]).arg(program()).args(run.command().get_args());
    let mut job = start(&mut command);
    job.until("at step 10", || steps(&files) >= 10);
    let pid = crate::ranks(&slurm.hosts, "h1", &run)[0];
    launch::send(pid, libc::SIGKILL);
    let has_joined = || {
        let text = std::fs::read_to_string(files.path("elastic.jsonl")).unwrap_or_default();
        text.contains("\"joined\":1")
    };
    job.until("four ranks again", has_joined);
    job.finish(LIMIT).succeeded();
    files.same_as(&reference, 400, "after a rank was killed under srun");
}
