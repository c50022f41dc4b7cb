//! `hpctrain submit`: the scripts that it writes and submits, with stand-ins for the commands of
//! batch systems. `tests/hosts/slurm.rs` submits to a real Slurm.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use hpctrain_testkit::launch::{Ended, finish, in_our_environment, mpirun, program};
use hpctrain_testkit::runs::{RunFiles, SMALL};

const SITE: &str = "partition = 'long'\naccount = 'proj-1'\nmodules = ['openmpi']\n\
                    cores_per_node = 16\nprogram = '/opt/hpc train/hpctrain'\n";

/// A directory in which jobs are submitted, with a folder of programs and one of configurations.
struct Login(tempfile::TempDir);

impl Login {
    fn new() -> Self {
        let login = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(login.path("bin")).unwrap();
        fs::create_dir_all(login.path("config/hpctrain")).unwrap();
        login
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Writes the site file that is found without `--site`.
    fn with_site(self, text: &str) -> Self {
        fs::write(self.path("config/hpctrain/site.toml"), text).unwrap();
        self
    }

    /// Writes a program, the only one on `PATH` besides others of this kind.
    fn with_program(self, name: &str, script: &str) -> Self {
        let path = self.path("bin").join(name);
        fs::write(&path, format!("#!/bin/bash\nPATH=/usr/bin:/bin\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// Writes a command of a batch system that records its arguments and its input, and prints
    /// `printed`.
    fn with_command(self, name: &str, printed: &str) -> Self {
        let records = self.0.path().display().to_string();
        self.with_program(
            name,
            &format!(
                "printf '%s\\n' \"$@\" >'{records}/arguments'\ncat >'{records}/input'\necho '{printed}'"
            ),
        )
    }

    /// Returns the command `hpctrain submit`, which finds no other site file and programs than those
    /// of this directory.
    fn submit(&self, arguments: &[&str]) -> Command {
        let mut command = program(["submit"]);
        command.args(arguments).current_dir(self.0.path());
        command.env("XDG_CONFIG_HOME", self.path("config")).env("PATH", self.path("bin"));
        command
    }

    /// Returns the script that is written with these arguments.
    #[track_caller]
    fn script(&self, arguments: &[&str]) -> String {
        let ended = finish(&mut self.submit(arguments)).succeeded();
        assert!(ended.stderr.starts_with("plan: pipeline 1 × replica "), "{ended}");
        ended.stdout
    }

    /// Writes the script to `job` with the arguments of a small run, and returns the command that
    /// runs it as a batch system does.
    #[track_caller]
    fn job(&self, arguments: &[&str], settings: &[&str]) -> Command {
        let settings = SMALL.iter().chain(settings).flat_map(|setting| ["--set", *setting]);
        let arguments: Vec<&str> = arguments.iter().copied().chain(settings).collect();
        finish(self.submit(&arguments).args(["--out", "job"])).succeeded();
        let mut command = Command::new("bash");
        in_our_environment(&mut command);
        // mpirun starts as root and with few cores in tests.
        command.envs(mpirun(1).get_envs().filter_map(|(name, value)| Some((name, value?))));
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        command.arg(self.path("job")).env("PATH", path);
        command
    }
}

#[track_caller]
fn refused(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.code(), 2, "{ended}");
    assert_eq!(
        (ended.stdout.as_str(), ended.stderr.matches("\nhint: ").count()),
        ("", 1),
        "{ended}"
    );
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
    }
}

#[track_caller]
fn has_lines(script: &str, lines: &[&str]) {
    for line in lines {
        assert!(script.lines().any(|found| found == *line), "{line:?} is missing: {script}");
    }
}

#[test]
fn each_batch_system_has_its_script() {
    let login = Login::new().with_site(SITE);
    let arguments =
        ["--nodes", "2", "--time", "3h 30m", "--set", "run.steps=5", "--set", "batch.global=16"];
    let script = |system: &str| login.script(&[&arguments[..], &["--scheduler", system]].concat());
    let slurm = script("slurm");
    has_lines(
        &slurm,
        &[
            "# Written by hpctrain submit: 2 nodes × 4 ranks.",
            "#SBATCH --job-name=gpt-char",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --cpus-per-task=4",
            "#SBATCH --time=03:30:00",
            "#SBATCH --partition=long",
            "#SBATCH --account=proj-1",
            "#SBATCH --signal=USR1@120",
            "module load openmpi",
            "hpctrain='/opt/hpc train/hpctrain'",
            "run_name=${RUN_NAME:-gpt-char-$SLURM_JOB_ID}",
            "train=(--set run.steps=5 --set batch.global=16 --set run.name=\"$run_name\" --resume auto)",
        ],
    );
    assert!(slurm.contains("; a rank needs ") && !slurm.contains("gpu"), "{slurm}");
    has_lines(
        &script("pbs"),
        &[
            "#PBS -N gpt-char",
            "#PBS -l select=2:ncpus=16:mpiprocs=4:ompthreads=4",
            "#PBS -l walltime=03:30:00",
            "#PBS -q long",
            "run_name=${RUN_NAME:-gpt-char-${PBS_JOBID%%.*}}",
        ],
    );
    has_lines(
        &script("flux"),
        &[
            "#flux: --nslots=8",
            "#flux: --time-limit=12600s",
            "#flux: --queue=long",
            "#flux: --output=gpt-char-{{id}}.log",
        ],
    );
}

#[test]
fn gpus_of_the_site_get_a_rank_each() {
    let login = Login::new();
    let site = login.path("my site.toml");
    fs::write(&site, "scheduler = 'slurm'\ngpus_per_node = 4\nqueue = 'gpu'\ntime = '1h'\n")
        .unwrap();
    let site = ["--site", site.to_str().unwrap(), "--nodes", "2", "--name", "mine"];
    let script = login.script(&[&site[..], &["--set", "run.name=x y"]].concat());
    has_lines(
        &script,
        &[
            "#SBATCH --job-name=mine",
            "#SBATCH --ntasks-per-node=4",
            "#SBATCH --gpus-per-node=4",
            "#SBATCH --time=01:00:00",
            "run_name='x y'",
            "doctor=(--require-gpus --run-root runs)",
            "train=(--set 'run.name=x y' --set run.device=cuda --set run.name=\"$run_name\" --resume auto)",
        ],
    );
    let ended = finish(&mut login.submit(&[&site[..], &["--ranks-per-node", "5"]].concat()));
    refused(&ended, &["5 ranks on each node, but gpus_per_node = 4 in ", "my site.toml"]);
    fs::write(
        login.path("my site.toml"),
        "scheduler = 'slurm'\ngpus_per_node = 4\ngpu_memory = '8MiB'",
    )
    .unwrap();
    let ended = finish(&mut login.submit(&site));
    refused(&ended, &["a rank needs ", "more than gpu_memory = 8.0 MiB in ", "my site.toml"]);
}

#[test]
fn a_configuration_is_refused_as_train_refuses_it() {
    let login = Login::new().with_site(SITE);
    for setting in
        ["run.step=5", "optimizer.lr=-1", "run.device=gpu", "parameter_server.staleness=3"]
    {
        let set = ["--set", setting];
        let submitted = finish(&mut login.submit(&[&set[..], &["--scheduler", "slurm"]].concat()));
        let trained = finish(program(["train"]).args(set).current_dir(login.0.path()));
        assert_eq!(submitted.code(), 2, "{submitted}");
        assert_eq!(submitted.stderr, trained.stderr, "{setting}");
    }
    let uneven = ["--scheduler", "slurm", "--nodes", "3", "--set", "batch.global=16"];
    refused(
        &finish(&mut login.submit(&[&uneven[..], &["--set", "parallel.virtual_ranks=4"]].concat())),
        &["parallel.virtual_ranks = 4 leaves some of the 12 data-parallel ranks without work"],
    );
}

#[test]
fn site_files_are_refused_by_file_line_and_key() {
    let submit = |site: &str, arguments: &[&str]| {
        let login = Login::new().with_site(site);
        finish(&mut login.submit(arguments))
    };
    let ended = submit("account = 'a'\npartiton = 'gpu'\n", &["--scheduler", "slurm"]);
    refused(&ended, &["hpctrain/site.toml:2: unknown key `partiton`", "`partition`"]);
    let ended = submit("account = \"a\\n#SBATCH --nodes=99\"", &["--scheduler", "slurm"]);
    refused(&ended, &["hpctrain/site.toml", "account = ", "control character"]);
    let ended = submit("qos = 'high'\ncores_per_node = 4", &["--scheduler", "pbs"]);
    refused(&ended, &["hpctrain/site.toml: qos = \"high\" is not supported for PBS"]);
    let ended = submit("", &["--scheduler", "slurm"]);
    refused(&ended, &["the cores of a node are not known", "set cores_per_node in "]);
    let ended = submit("", &["--scheduler", "slurm", "--site", "missing.toml"]);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("cannot read the site file missing.toml: No such file"),
        "{ended}"
    );
    let ended = submit(SITE, &["--scheduler", "slurm", "--name", "a b"]);
    refused(&ended, &["--name \"a b\" cannot name a job"]);
}

#[test]
fn the_batch_system_is_the_one_on_the_path() {
    let ended = finish(&mut Login::new().with_site(SITE).submit(&[]));
    refused(&ended, &["none of sbatch, qsub and flux is on PATH", "--scheduler slurm|pbs|flux"]);
    let login = Login::new().with_site(SITE).with_command("qsub", "1");
    assert!(login.script(&[]).contains("\n#PBS -N gpt-char\n"));
    let ended = finish(&mut login.with_command("flux", "1").submit(&[]));
    refused(&ended, &["qsub and flux are on PATH", "choose by --scheduler"]);
}

#[test]
fn a_script_is_submitted_and_the_id_printed() {
    for (system, command, printed, words, id) in [
        ("slurm", "sbatch", "4711;cluster", "--parsable\n", "4711"),
        ("pbs", "qsub", "4711.server", "", "4711.server"),
        ("flux", "flux", "note: x\nƒ2oLkTLb", "batch\n", "ƒ2oLkTLb"),
    ] {
        let login = Login::new().with_site(SITE).with_command(command, printed);
        // The script is the input, and a file only if one is asked for.
        let ended = finish(&mut login.submit(&["--now"])).succeeded();
        let (script, last) = ended.stdout.trim_end().rsplit_once('\n').unwrap();
        assert_eq!((last, login.read("arguments").trim_end()), (id, words.trim_end()), "{system}");
        assert_eq!(login.read("input").trim_end(), script, "{system}");
        let ended = finish(&mut login.submit(&["--now", "--out", "a job.sh"])).succeeded();
        assert_eq!(ended.stdout.trim_end(), id);
        let path = login.0.path().canonicalize().unwrap().join("a job.sh");
        assert_eq!(login.read("arguments"), format!("{words}{}\n", path.display()));
        // The memory of this process, which is a part of the estimate, varies.
        let without_plan = |text: &str| {
            text.lines().filter(|line| !line.starts_with("# pipe")).collect::<String>()
        };
        assert_eq!(without_plan(&login.read("a job.sh")), without_plan(script));
    }
}

#[test]
fn a_refused_job_is_reported() {
    let login = Login::new().with_site(SITE);
    let ended = finish(&mut login.submit(&["--scheduler", "slurm", "--now"]));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("cannot submit to Slurm: sbatch: No such file"), "{ended}");
    let login = login.with_program("sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1");
    let ended = finish(&mut login.submit(&["--now", "--out", "job"]));
    refused(&ended, &["invalid account\nerror: sbatch refused the job: exit status: 1"]);
}

/// Returns the files of the only run of a login directory.
#[track_caller]
fn only_run(login: &Login) -> RunFiles {
    let runs: Vec<_> =
        fs::read_dir(login.path("runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    RunFiles(runs[0].clone())
}

/// A site file with a path to the stand-ins for srun and scontrol.
fn slurm_job(login: &Login, settings: &[&str]) -> Command {
    let arguments = ["--scheduler", "slurm", "--ranks-per-node", "2"];
    let mut command = login.job(&arguments, settings);
    let stand_ins = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm");
    command.env("PATH", format!("{}:{}", stand_ins.display(), std::env::var("PATH").unwrap()));
    command.env("SLURM_STAND_IN", login.0.path());
    command.envs([
        ("SLURM_JOB_ID", "4711"),
        ("SLURM_JOB_NODELIST", "n[0-1]"),
        ("SLURM_NTASKS", "2"),
    ]);
    command
}

#[test]
fn a_slurm_job_checks_its_nodes_then_trains() {
    let login = Login::new();
    let ended = finish(&mut slurm_job(&login, &["run.steps=4"])).succeeded();
    assert!(
        ended.stdout.contains("✓ run root ") && ended.stdout.contains("step      4/4"),
        "{ended}"
    );
    let files = only_run(&login);
    assert!(files.0.ends_with("gpt-char-4711"), "{}", files.0.display());
    assert_eq!(files.steps().len(), 4);
    let calls = login.read("calls");
    assert_eq!(calls.matches("srun\t--mpi=pmix\t--cpu-bind=cores\t").count(), 2, "{calls}");
}

#[test]
fn a_job_on_a_bad_node_stops_with_the_reason() {
    let login = Login::new();
    let ended = finish(&mut slurm_job(&login, &["run.root=/proc/runs"]));
    assert_eq!(ended.code(), 1, "{ended}");
    let reason =
        "preflight failed: hpctrain doctor ended with code 1 on n[0-1]; nothing was trained\n";
    assert!(ended.stderr.ends_with(reason) && ended.stderr.contains("✗ run root "), "{ended}");
    assert!(!login.read("calls").contains("\ttrain\t") && !login.path("runs").exists(), "{ended}");
}

/// Returns a job for PBS that has the job's number and list of nodes.
#[track_caller]
fn pbs_job(login: &Login, arguments: &[&str], settings: &[&str]) -> Command {
    let pbs = ["--scheduler", "pbs", "--ranks-per-node", "2", "--time", "4h"];
    let mut command = login.job(&[&pbs[..], arguments].concat(), settings);
    fs::write(login.path("nodes"), "n1\nn0\nn1\n").unwrap();
    command.env("PBS_JOBID", "4711.server").env("PBS_NODEFILE", login.path("nodes"));
    command
}

/// The path of a stand-in for hpctrain, whose commands end with the codes of `HPCTRAIN_CODES`.
fn with_codes(login: &Login) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm/hpctrain");
    fs::write(login.path("site.toml"), format!("program = '{}'", path.display())).unwrap();
}

#[test]
fn a_pbs_job_trains_under_mpirun() {
    let login = Login::new();
    let ended = finish(&mut pbs_job(&login, &[], &["run.steps=4"])).succeeded();
    assert!(ended.stdout.contains("started by Open MPI's mpirun"), "{ended}");
    assert!(ended.stdout.contains("\ntime         3h "), "{ended}");
    let files = only_run(&login);
    assert!(files.0.ends_with("gpt-char-4711") && files.steps().len() == 4, "{ended}");
}

#[test]
fn a_pbs_job_is_submitted_again_under_the_name_of_its_run() {
    for (codes, restarts, code, is_submitted) in [
        ("train=0", "0", 0, false),
        ("train=75", "7", 75, true),
        ("train=74", "4", 74, true),
        ("train=74", "5", 74, false),
        ("train=2", "0", 2, false),
        ("doctor=1", "0", 1, false),
        ("doctor=75", "0", 75, true),
        ("doctor=75", "5", 75, false),
    ] {
        let login = Login::new().with_command("qsub", "4712.server");
        with_codes(&login);
        let calls = login.path("mpirun.calls").display().to_string();
        let login =
            login.with_program("mpirun", &format!("echo \"$*\" >>'{calls}'\nexec \"${{@:3}}\""));
        let mut command = pbs_job(&login, &["--site", "site.toml"], &[]);
        command.env("HPCTRAIN_CODES", codes).env("RESTARTS", restarts);
        if restarts != "0" {
            command.env("RUN_NAME", "first");
        }
        let ended = finish(&mut command);
        assert_eq!(ended.code(), code, "{codes}: {ended}");
        let name = if restarts == "0" { "gpt-char-4711" } else { "first" };
        let next = restarts.parse::<u32>().unwrap() + 1;
        let script = login.path("job");
        let submitted = format!("-v\nRUN_NAME={name},RESTARTS={next}\n{}\n", script.display());
        assert_eq!(login.read("arguments"), if is_submitted { &submitted } else { "" }, "{codes}");
        let reason = format!("ended with code {code} on n0,n1; nothing was trained\n");
        assert_eq!(ended.stderr.ends_with(&reason), codes == "doctor=1", "{ended}");
        let calls = login.read("mpirun.calls");
        assert!(calls.starts_with("--map-by ppr:2:node "), "{calls}");
        let train = calls.lines().nth(1).unwrap_or_default();
        assert_eq!(!train.is_empty(), codes.starts_with("train"), "{calls}");
        let limit = train.rsplit_once(" --set run.time_limit=").map_or("0s", |(_, limit)| limit);
        let seconds: u64 = limit.strip_suffix('s').unwrap().parse().unwrap();
        assert!(seconds <= 14_280 && (seconds > 0) != train.is_empty(), "{calls}");
    }
}

/// A stand-in for Flux: `flux run` starts the ranks by mpirun.
const FLUX: &str = r#"case "$*" in
    "getattr jobid") echo fAbC ;;
    "getattr hostlist") echo n0 ;;
    "job id --to=dec fAbC") echo 4711 ;;
    "--parent batch "*) echo "$RUN_NAME $RESTARTS ${*:3}" >RECORDS/submitted ;;
    "run -N1 -n2 -o cpu-affinity=per-task -o pmi=pmix "*) exec mpirun -np 2 "${@:8}" ;;
    *) echo "flux: unexpected arguments: $*" >&2; exit 1 ;;
esac"#;

#[test]
fn a_flux_job_trains_and_is_submitted_to_the_instance_around_it() {
    let login = Login::new();
    let records = login.0.path().display().to_string();
    let login = login.with_program("flux", &FLUX.replace("RECORDS", &records));
    let arguments = ["--scheduler", "flux", "--ranks-per-node", "2"];
    let ended = finish(&mut login.job(&arguments, &["run.steps=4"])).succeeded();
    let files = only_run(&login);
    assert!(files.0.ends_with("gpt-char-4711") && files.steps().len() == 4, "{ended}");
    assert_eq!(login.read("submitted"), "");
    with_codes(&login);
    let arguments = [&arguments[..], &["--site", "site.toml"]].concat();
    let ended = finish(login.job(&arguments, &[]).env("HPCTRAIN_CODES", "train=75"));
    assert_eq!(ended.code(), 75, "{ended}");
    let submitted = format!("gpt-char-4711 1 {}\n", login.path("job").display());
    assert_eq!(login.read("submitted"), submitted, "{ended}");
}
