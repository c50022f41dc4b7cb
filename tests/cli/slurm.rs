//! The job scripts of `slurm/`, run as Slurm runs them, with stand-ins for srun and scontrol
//! (`tests/slurm/`). `tests/hosts/slurm.rs` runs them under a real Slurm.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{
    Ended, LIMIT, finish, in_our_environment, processes, rank_of, send, start,
    start_without_waiting,
};
use hpctrain_testkit::program;
use hpctrain_testkit::runs::{Run, RunFiles, SMALL, json};
use hpctrain_testkit::simulator::with_simulator;

const SCRIPTS: [&str; 5] =
    ["train.sbatch", "train-gpu.sbatch", "evaluate.sbatch", "servers.sbatch", "workers.sbatch"];

/// Options of sbatch that the scripts use, without their dashes. One that is not here may be a
/// typing error.
const KNOWN: [&str; 12] = [
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "cpus-per-task",
    "gpus-per-node",
    "time",
    "requeue",
    "signal",
    "open-mode",
    "output",
    "partition",
];

/// Settings of a network that trains on a simulated GPU in milliseconds, with the same bits on one
/// rank and two.
const ON_GPUS: [&str; 6] = [
    "model.layers=1",
    "model.width=16",
    "model.context=8",
    "parallel.virtual_ranks=2",
    "eval.samples=4",
    "device.memory_limit=96MiB",
];

const JOB: &str = "4711";

/// Options of sbatch by name, such as `ntasks` and `4`; of a flag the value is empty.
type Options = BTreeMap<String, String>;

fn path(script: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("slurm").join(script)
}

/// Reads the `#SBATCH` options of a script, those of each component of a heterogeneous job.
fn directives(script: &str) -> Vec<Options> {
    let text = fs::read_to_string(path(script)).unwrap();
    // sbatch reads them up to the first command.
    let head = text.lines().take_while(|line| line.is_empty() || line.starts_with('#')).count();
    let late = text.lines().skip(head).find(|line| line.starts_with("#SBATCH"));
    assert_eq!(late, None, "{script}: sbatch ignores an option after a command");
    let mut components = vec![Options::new()];
    for option in text.lines().take(head).filter_map(|line| line.strip_prefix("#SBATCH ")) {
        if option == "hetjob" {
            components.push(Options::new());
            continue;
        }
        let option = option.strip_prefix("--").unwrap_or_else(|| panic!("{script}: {option}"));
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let before = components.last_mut().unwrap().insert(name.into(), value.into());
        assert!(before.is_none(), "{script}: --{name} is there twice");
    }
    components
}

/// A job, as sbatch would start it.
struct Job {
    script: &'static str,
    components: Vec<Options>,
    restarts: u32,
    program: PathBuf,
    /// The directory of the runs, and of the records of calls of the stand-ins.
    folder: tempfile::TempDir,
}

impl Job {
    fn new(script: &'static str) -> Self {
        let components = directives(script);
        let folder = tempfile::tempdir().unwrap();
        Self { script, components, restarts: 0, program: program(), folder }
    }

    /// Overrides options of the script's first component, as arguments of sbatch do.
    fn with(mut self, options: &[(&str, &str)]) -> Self {
        self.components[0]
            .extend(options.iter().map(|(name, value)| (name.to_string(), value.to_string())));
        self
    }

    /// Sets the smallest size: one task in each component.
    fn smallest(mut self) -> Self {
        for options in &mut self.components {
            let one = |name: &str| {
                options.contains_key(name).then(|| (name.to_string(), "1".to_string()))
            };
            let names = ["nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node"];
            let ones: Vec<_> = names.into_iter().filter_map(one).collect();
            options.extend(ones);
        }
        self
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the files of the run that the job trains.
    fn files(&self) -> RunFiles {
        RunFiles(self.root().join(format!("slurm-{JOB}")))
    }

    /// Returns the command that starts the script with the variables that Slurm sets; arguments of
    /// the script may be appended.
    fn command(&self) -> Command {
        let stand_ins = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm");
        let mut command = Command::new("bash");
        in_our_environment(&mut command);
        command.arg(path(self.script));
        command.env("PATH", format!("{}:{}", stand_ins.display(), std::env::var("PATH").unwrap()));
        command
            .env("SLURM_STAND_IN", self.root())
            .env("HPCTRAIN", &self.program)
            .env("RUN_ROOT", self.root());
        command.envs([("SLURM_JOB_ID", JOB), ("SLURM_JOB_NODELIST", "n[0-1]")]);
        if self.restarts > 0 {
            command.env("SLURM_RESTART_COUNT", self.restarts.to_string());
        }
        for (component, options) in self.components.iter().enumerate() {
            let group = if self.components.len() > 1 {
                format!("_HET_GROUP_{component}")
            } else {
                String::new()
            };
            let number =
                |name: &str| options.get(name).map(|value| value.parse::<usize>().unwrap());
            let tasks = number("ntasks").unwrap_or_else(|| {
                number("nodes").unwrap()
                    * number("ntasks-per-node").expect("either --ntasks or --ntasks-per-node")
            });
            command.env(format!("SLURM_NTASKS{group}"), tasks.to_string());
            for name in ["cpus-per-task", "ntasks-per-node", "gpus-per-node"] {
                if let Some(value) = options.get(name) {
                    command.env(
                        format!("SLURM_{}{group}", name.to_uppercase().replace('-', "_")),
                        value,
                    );
                }
            }
        }
        command
    }

    /// Returns the calls of the stand-ins, as words.
    fn calls(&self) -> Vec<Vec<String>> {
        let text = fs::read_to_string(self.root().join("calls")).unwrap_or_default();
        text.lines().map(|line| line.split('\t').map(str::to_string).collect()).collect()
    }

    /// Returns the calls of srun: the options, and the command of hpctrain such as `train`.
    fn steps(&self) -> Vec<(Vec<String>, String)> {
        let steps = self.calls().into_iter().filter(|words| words[0] == "srun").map(|words| {
            let program =
                words.iter().position(|word| *word == self.program.to_str().unwrap()).unwrap();
            // `ps` is a group of commands.
            let command = words[program + 1..].iter().find(|word| *word != "ps").unwrap();
            (words[1..program].to_vec(), command.clone())
        });
        steps.collect()
    }

    fn is_requeued(&self) -> bool {
        let requeues = self.calls().into_iter().filter(|words| words[0] == "scontrol");
        let requeues: Vec<_> = requeues.map(|words| words[1..].join(" ")).collect();
        assert!(requeues.is_empty() || requeues == [format!("requeue {JOB}")], "{requeues:?}");
        !requeues.is_empty()
    }
}

/// Returns the settings as arguments, each after `--set`.
fn sets<'a>(settings: impl IntoIterator<Item = &'a &'a str>) -> Vec<String> {
    settings.into_iter().flat_map(|setting| ["--set".to_string(), setting.to_string()]).collect()
}

#[test]
fn scripts_are_valid_for_bash_and_sbatch() {
    let there = fs::read_dir(path(""))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut there: Vec<String> = there.collect();
    let mut tested = SCRIPTS.map(str::to_string);
    there.sort();
    tested.sort();
    assert_eq!(there, tested);
    for script in SCRIPTS {
        assert!(
            Command::new("bash").arg("-n").arg(path(script)).status().unwrap().success(),
            "{script}"
        );
        let text = fs::read_to_string(path(script)).unwrap();
        assert!(text.contains("\nset -euo pipefail\n"), "{script}");
        let components = directives(script);
        for name in components.iter().flat_map(Options::keys) {
            assert!(KNOWN.contains(&&name[..]), "{script}: --{name}");
        }
        let first = &components[0];
        // A requeued job appends to the same log.
        assert!(first.contains_key("requeue") && first["open-mode"] == "append", "{script}");
        assert!(first["output"].contains("%j") || first["output"].contains("%A"), "{script}");
    }
}

/// Ranks that are bound to one GPU each could not use NVLink, so the job requests as many tasks as
/// GPUs on a node and leaves it to hpctrain which rank has which.
#[test]
fn a_gpu_job_has_a_task_for_each_gpu_and_binds_none() {
    let [options] = &directives("train-gpu.sbatch")[..] else { panic!("one component") };
    assert!(options["gpus-per-node"].parse::<usize>().unwrap() > 1);
    assert_eq!(options["ntasks-per-node"], options["gpus-per-node"]);
    let lead = options["signal"].strip_prefix("USR1@").expect("to the ranks, not to the script");
    assert!(lead.parse::<u32>().unwrap() >= 60);

    let mut job = Job::new("train-gpu.sbatch").smallest();
    job.program = path("../tests/slurm/hpctrain");
    finish(&mut job.command()).succeeded();
    let steps = job.steps();
    let commands: Vec<_> = steps.iter().map(|(_, command)| &command[..]).collect();
    assert_eq!(commands, ["doctor", "train"]);
    let doctor = &steps[0].0;
    let train = &steps[1].0;
    assert_eq!(doctor, train, "the preflight must see what the training sees");
    for option in ["--mpi=pmix", "--cpus-per-task=1", "--cpu-bind=cores", "--kill-on-bad-exit=1"] {
        assert!(train.iter().any(|given| given == option), "{option}: {train:?}");
    }
    assert!(!train.iter().any(|given| given.contains("gpu")), "{train:?}");
    let trained =
        job.calls().into_iter().find(|words| words.contains(&"train".into())).unwrap().join(" ");
    assert!(
        trained.contains("--set run.device=cuda") && trained.ends_with("--resume auto"),
        "{trained}"
    );
}

/// Exit code 75 means that the run is to be resumed, 74 that the file system failed.
#[test]
fn jobs_are_requeued_for_the_codes_that_ask_for_it() {
    let cases = [
        ("train.sbatch", "train=0", 0, 0, false),
        ("train.sbatch", "train=75", 7, 75, true),
        ("train.sbatch", "train=74", 4, 74, true),
        ("train.sbatch", "train=74", 5, 74, false),
        ("train.sbatch", "train=2", 0, 2, false),
        ("train-gpu.sbatch", "train=0", 0, 0, false),
        ("train-gpu.sbatch", "train=75", 7, 75, true),
        ("train-gpu.sbatch", "train=74", 4, 74, true),
        ("train-gpu.sbatch", "train=74", 5, 74, false),
        ("train-gpu.sbatch", "train=2", 0, 2, false),
        ("train-gpu.sbatch", "doctor=1", 0, 1, false),
        ("train-gpu.sbatch", "doctor=2", 0, 1, false),
        ("train-gpu.sbatch", "doctor=75", 4, 75, true),
        ("train-gpu.sbatch", "doctor=75", 5, 75, false),
        // One rank crashed, and the launcher ended the others by SIGTERM.
        ("train-gpu.sbatch", "doctor=143", 0, 1, false),
        ("evaluate.sbatch", "eval=0", 0, 0, false),
        ("evaluate.sbatch", "eval=75", 0, 75, true),
        ("evaluate.sbatch", "eval=1", 0, 1, false),
        ("servers.sbatch", "coordinator=0", 0, 0, false),
        ("servers.sbatch", "coordinator=75", 0, 75, true),
        ("servers.sbatch", "coordinator=1", 0, 1, false),
        ("workers.sbatch", "worker=0", 0, 0, false),
        ("workers.sbatch", "worker=75", 0, 75, true),
        ("workers.sbatch", "worker=1", 0, 1, false),
    ];
    for (script, codes, restarts, code, requeued) in cases {
        let mut job = Job::new(script).smallest();
        if script == "servers.sbatch" {
            job = job.with(&[("ntasks", "2")]);
        }
        job.program = path("../tests/slurm/hpctrain");
        job.restarts = restarts;
        let ended = finish(job.command().arg("runs/x").env("HPCTRAIN_CODES", codes));
        let what = format!("{script}, {codes}, {restarts} restarts: {ended}");
        assert_eq!((ended.code(), job.is_requeued()), (code, requeued), "{what}");
        let trains = job.steps().iter().any(|(_, command)| command == "train");
        assert_eq!(trains, codes.starts_with("train"), "{what}");
        assert_eq!(
            ended.stderr.contains("preflight failed"),
            script == "train-gpu.sbatch" && code == 1,
            "{what}"
        );
    }
}

#[test]
fn a_gpu_that_computes_wrongly_ends_the_job_before_it_trains() {
    let job = Job::new("train-gpu.sbatch").smallest();
    let ended = finish(with_simulator(&mut job.command()).env("CUDASIM_FAIL", "matmul"));
    assert!(ended.code() == 1 && ended.stdout.contains("✗ gpu 0 matmul"), "{ended}");
    let reason = "preflight failed: hpctrain doctor ended with code 1 on n[0-1]";
    assert!(ended.stderr.contains(reason), "{ended}");
    assert!(!job.files().0.exists() && !job.is_requeued(), "{ended}");
}

/// Starts a job, sends USR1 to its ranks during training as Slurm does, and starts it again as
/// after a requeue. Returns the end of the second start.
fn preempt(job: &mut Job, settings: &[&str], simulated: bool) -> Ended {
    let command = |job: &Job| {
        let mut command = job.command();
        if simulated {
            with_simulator(&mut command).env("CUDASIM_DEVICES", "2");
        }
        command.args(sets(SMALL.iter().chain(settings)));
        command
    };
    let files = job.files();
    let mut first = start(&mut command(job));
    let steps =
        || fs::read_to_string(files.path("metrics.jsonl")).unwrap_or_default().lines().count();
    first.until("at step 3", || steps() >= 3);
    let root = format!("run.root={}", job.root().display());
    for rank in processes(&root).into_iter().filter(|process| rank_of(*process).is_some()) {
        send(rank, libc::SIGUSR1);
    }
    let ended = first.finish(LIMIT);
    assert!(ended.code() == 75 && job.is_requeued(), "{ended}");

    fs::remove_file(job.root().join("calls")).unwrap();
    job.restarts = 1;
    let ended = finish(&mut command(job)).succeeded();
    assert!(ended.stdout.contains("\nresumed ") && !job.is_requeued(), "{ended}");
    ended
}

#[test]
fn a_preempted_job_is_requeued_and_continues_with_the_same_bits() {
    let settings = ["run.steps=150", "parallel.virtual_ranks=4"];
    let sizes = [("nodes", "2"), ("ntasks-per-node", "2"), ("cpus-per-task", "1")];
    let mut job = Job::new("train.sbatch").with(&sizes);
    preempt(&mut job, &settings, false);
    assert_eq!(json(&job.files().path("run.json"))["ranks"], 4);
    let whole = Run::new(Alone, job.root(), "whole", &settings).succeeds();
    job.files().same_as(&whole, 150, "preempted");
}

#[test]
fn a_preempted_gpu_job_is_requeued_and_continues_with_the_same_bits() {
    let settings = [&ON_GPUS[..], &["run.steps=150"]].concat();
    let sizes =
        [("nodes", "1"), ("gpus-per-node", "2"), ("ntasks-per-node", "2"), ("cpus-per-task", "1")];
    let mut job = Job::new("train-gpu.sbatch").with(&sizes);
    let ended = preempt(&mut job, &settings, true);
    for gpu in ["0000:01:00.0", "0000:02:00.0"] {
        let is_rank_on_it =
            |line: &&str| line.starts_with("device ") && line.contains(&format!(" at {gpu}, "));
        // It is listed in the report of the doctor, and once in the startup summary, whose line
        // starts with "device ".
        assert_eq!(ended.stdout.lines().filter(is_rank_on_it).count(), 1, "{gpu}: {ended}");
    }
    let card = json(&job.files().path("run.json"));
    assert_eq!((&card["ranks"], &card["device_path"]), (&2.into(), &"nccl".into()), "{card}");
    let whole =
        Run::new(Alone, job.root(), "whole", &[&settings[..], &["run.device=cuda"]].concat());
    finish(with_simulator(&mut whole.command())).succeeded();
    job.files().same_as(&whole.files(), 150, "preempted");
}

#[test]
fn an_evaluator_evaluates_on_a_gpu_and_ends_with_the_run() {
    let job = Job::new("evaluate.sbatch").smallest();
    let settings = [&ON_GPUS[..], &["eval.inline=false", "checkpoint.every=3"]].concat();
    let run = Run::new(Alone, job.root(), "x", &settings).succeeds();
    let mut command = job.command();
    command.arg(&run.0).args(["--policy", "every", "--set", "run.device=cuda"]);
    let ended = finish(with_simulator(&mut command)).succeeded();
    assert!(
        ended.stderr.contains("the run has ended") || ended.stdout.contains("the run has ended"),
        "{ended}"
    );
    assert_eq!(run.numbers("eval.jsonl", "step"), [3.0, 6.0], "{ended}");
    let [(options, command)] = &job.steps()[..] else { panic!("{:?}", job.calls()) };
    assert!(command == "eval" && options.contains(&"--mpi=pmix".to_string()), "{options:?}");
}

/// The coordinator, a server and a worker in one job, two more workers in jobs of an array. Slurm
/// preempts one of these, and later the servers: it sends USR1 to the scripts.
#[test]
fn servers_train_with_workers_of_other_jobs_and_all_are_requeued() {
    let servers = Job::new("servers.sbatch").smallest().with(&[("ntasks", "2")]);
    let settings = ["run.steps=100000", "parameter_server.staleness=\"none\"", "eval.every=0"];
    let mut job = start(servers.command().args(sets(SMALL.iter().chain(&settings))));
    let files = servers.files();
    let workers = || {
        let text = fs::read_to_string(files.path("workers.jsonl")).unwrap_or_default();
        let names =
            text.lines().filter_map(|line| line.split("\"worker\":\"").nth(1)?.split('"').next());
        names.map(str::to_string).collect::<BTreeSet<_>>().len()
    };
    job.until("training", || workers() == 1);
    let [preempted, other] = [0, 1].map(|_| Job::new("workers.sbatch").smallest());
    let [leaving, staying] =
        [&preempted, &other].map(|more| start_without_waiting(&job, more.command().arg(&files.0)));
    job.until("training with more workers", || workers() == 3);
    send(leaving.id(), libc::SIGUSR1);
    let ended = leaving.finish(LIMIT).succeeded();
    assert!(preempted.is_requeued() && job.runs(), "{ended}");

    send(job.id(), libc::SIGUSR1);
    let ended = job.finish(LIMIT);
    assert!(ended.code() == 75 && servers.is_requeued(), "{ended}");
    let ended = staying.finish(LIMIT);
    assert!(ended.code() == 75 && other.is_requeued(), "{ended}");

    let steps = servers.steps();
    for (name, group) in [("coordinator", "0"), ("server", "0"), ("worker", "1")] {
        let (options, _) = steps.iter().find(|(_, command)| command == name).unwrap();
        assert!(
            options.contains(&format!("--het-group={group}"))
                && options.contains(&"--mpi=none".into()),
            "{options:?}"
        );
    }
}
