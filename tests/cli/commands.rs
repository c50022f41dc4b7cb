//! The command line with valid input: its output and the files that it writes.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{Ended, finish, mpirun, program};
use hpctrain_testkit::runs::{Run, SMALL};

/// Returns the output of a command that succeeds without warnings.
#[track_caller]
fn printed(args: &[&str]) -> String {
    let ended = finish(&mut program(args)).succeeded();
    assert_eq!(ended.stderr, "");
    ended.stdout
}

/// Returns arguments that set keys.
fn set<'a>(settings: impl IntoIterator<Item = &'a &'a str>) -> Vec<&'a str> {
    settings.into_iter().flat_map(|setting| ["--set", *setting]).collect()
}

#[test]
fn help_names_every_command() {
    let help = printed(&["--help"]);
    let listed = help.split("Commands:").nth(1).and_then(|rest| rest.split("\n\n").next()).unwrap();
    let commands: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .collect();
    let known = "train eval predict simulate ps supervise submit agent verify sample plan data checkpoint \
                 report watch runs replay spawn compare config doctor bench completions man";
    let sorted = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    let others = commands.iter().copied().filter(|command| *command != "help").collect();
    assert_eq!(sorted(others), sorted(known.split_whitespace().collect()), "{help}");
    for command in known.split_whitespace() {
        assert!(printed(&[command, "--help"]).contains(&format!("Usage: hpctrain {command}")));
    }
    let roles = printed(&["ps", "--help"]);
    for role in ["coordinator", "server", "worker", "auto", "status"] {
        assert!(roles.contains(&format!("\n  {role} ")), "{roles}");
    }
    assert!(help.contains("--set <SECTION.KEY=VALUE>") && help.contains("--resume"), "{help}");
    assert!(
        printed(&["data", "import", "text", "--help"])
            .contains("Example: hpctrain data import text")
    );
}

/// Commands that do not run on ranks work as tasks of srun without a process-management interface,
/// such as in the shell of `srun -n 4 --pty bash`.
#[test]
fn commands_without_ranks_need_no_launcher_for_ranks() {
    let under_srun = |args: &[&str]| {
        let mut command = program(args);
        finish(command.envs([("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "0")]))
    };
    for args in
        [&["--version"][..], &["config", "show"], &["runs", "--help"], &["completions", "bash"]]
    {
        let ended = under_srun(args).succeeded();
        assert!(!ended.stdout.is_empty() && ended.stderr.is_empty(), "{ended}");
    }
    let ended = under_srun(&["train"]);
    assert_eq!(ended.code(), 2, "{ended}");
    for words in [
        "srun started 4 tasks without a process-management interface",
        "hint: srun --mpi=pmix",
        "HPCTRAIN_MPI=0",
    ] {
        assert!(ended.stderr.contains(words), "{ended}");
    }
}

#[test]
fn version() {
    let version = format!("hpctrain {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(printed(&["--version"]), version);
    // All ranks get the same arguments, and one of them prints.
    let ended = finish(mpirun(2).arg(hpctrain_testkit::program()).arg("--version")).succeeded();
    assert_eq!(ended.stdout, version);
}

#[test]
fn manual() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("share/man/man1");
    printed(&["man", "--out", out.to_str().unwrap()]);
    let page = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    assert!(page("hpctrain.1").contains("hpctrain\\-train(1)"));
    assert!(page("hpctrain-train.1").contains(".TH hpctrain-train 1"));
    // Commands of the program itself are not documented.
    assert!(!out.join("hpctrain-data-sandbox.1").exists());
}

#[test]
fn completions() {
    for (shell, word) in [
        ("bash", "complete -F _hpctrain"),
        ("zsh", "#compdef hpctrain"),
        ("fish", "complete -c hpctrain"),
    ] {
        let script = printed(&["completions", shell]);
        assert!(script.contains(word), "{shell}");
        // Options with few values complete these values.
        assert!(
            ["resnet-18-cifar", "gpt2-124m"].iter().all(|preset| script.contains(preset)),
            "{shell}"
        );
    }
    assert!(printed(&["train", "--help"]).contains("gpt-char, gpt-baby, gpt2-124m"));
}

#[test]
fn config_show_prints_a_configuration_that_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("any.toml");
    let file = file.to_str().unwrap();
    for args in [
        vec![],
        vec!["--preset", "gpt-char"],
        vec![
            "--preset",
            "gpt-baby",
            "--ranks",
            "4",
            "--set",
            "parallel.zero=3",
            "--set",
            "run.name=a \"b\"",
        ],
        vec!["--preset", "tinyllama-1.1b", "--ranks", "8", "--set", "parallel.zero=3"],
        vec!["--preset", "cnn-mnist", "--ranks", "2", "--set", "loss.label_smoothing=0.1"],
        vec![
            "--preset",
            "gpt2-124m",
            "--ranks",
            "8",
            "--set",
            "lr_schedule.kind=wsd",
            "--set",
            "eval.samples=100",
        ],
    ] {
        let shown = printed(&[&["config", "show"], &args[..]].concat());
        let table: toml::Table = shown.parse().unwrap();
        assert_eq!(table.len(), 19, "{shown}");
        std::fs::write(file, &shown).unwrap();
        let ranks = args.iter().position(|arg| *arg == "--ranks").map_or("1", |at| args[at + 1]);
        assert_eq!(
            printed(&["config", "show", "--config", file, "--ranks", ranks]),
            shown,
            "{args:?}"
        );
    }
    let shown = printed(&["config", "show", "--ranks", "4", "--set", "parallel.zero=1"])
        .parse::<toml::Table>()
        .unwrap();
    let parallel = shown["parallel"].as_table().unwrap();
    let number = |key: &str| parallel[key].as_integer().unwrap();
    assert_eq!(
        (number("zero"), number("shard"), number("replica"), number("virtual_ranks")),
        (1, 4, 1, 4)
    );
    assert_eq!(shown["batch"]["micro"].as_integer(), Some(4));
    assert_eq!(shown["model"]["vocabulary"].as_integer(), Some(65));
    assert_eq!(shown["run"]["name"].as_str(), Some("gpt-char"));
}

/// Lists the files below a directory, sorted.
fn listing(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() && !path.is_symlink() {
                true => folders.push(path),
                false => {
                    names.push(path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned())
                }
            }
        }
    }
    names.sort();
    names
}

#[test]
fn without_a_subcommand_it_trains_the_default_in_any_directory() {
    let folder = tempfile::tempdir().unwrap();
    let smaller =
        ["run.steps=3", "model.layers=1", "model.width=16", "model.context=8", "eval.samples=8"];
    let ended = finish(program(set(&smaller)).current_dir(folder.path())).succeeded();
    assert_eq!(ended.stderr, "");
    for words in [
        "run          runs/gpt-char\n",
        "bundled:tiny-shakespeare",
        "step      3/3",
        "validation loss ",
    ] {
        assert!(ended.stdout.contains(words), "{words:?} is missing: {ended}");
    }
    // The trained model has generated a text.
    let text = ended
        .stdout
        .split("checkpoints/latest\n\n")
        .nth(1)
        .and_then(|rest| rest.split("\n\nmore text: ").next());
    assert_eq!(text.map(|text| text.chars().count()), Some(300), "{ended}");
    let run = folder.path().join("runs/gpt-char");
    let files = [
        ".eval.lock",
        "END",
        "checkpoints/best",
        "checkpoints/latest",
        "checkpoints/step-00000003/manifest.crc32",
        "checkpoints/step-00000003/manifest.json",
        "checkpoints/step-00000003/rank-00000.h5",
        "config.toml",
        "eval.jsonl",
        "logs/rank-00000.log",
        "metrics.jsonl",
        "run.json",
        "samples.jsonl",
        "starts.jsonl",
    ];
    assert_eq!(listing(&run), files);
    assert!(!run.join("tensorboard").exists());
    assert_eq!(
        std::fs::read_link(run.join("checkpoints/best")).unwrap().to_str(),
        Some("step-00000003")
    );
    assert_eq!(
        std::fs::read_link(run.join("checkpoints/latest")).unwrap().to_str(),
        Some("step-00000003")
    );

    let text = |name: &str| std::fs::read_to_string(run.join(name)).unwrap();
    let shown = printed(
        &[&["config", "show", "--config", run.join("config.toml").to_str().unwrap()], &[][..]]
            .concat(),
    );
    assert_eq!(shown, text("config.toml"));
    assert!(text("logs/rank-00000.log").contains("saved runs/gpt-char/checkpoints/step-00000003"));
    let lines = |name: &str| {
        text(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let steps = lines("metrics.jsonl");
    assert_eq!(
        steps.iter().map(|step| step["step"].as_u64().unwrap()).collect::<Vec<_>>(),
        [1, 2, 3]
    );
    let parts = ["compute_ms", "comm_exposed_ms", "comm_hidden_ms", "loader_ms", "optimizer_ms"];
    let rest = [
        "epoch",
        "grad_norm",
        "loss",
        "lr",
        "peak_bytes",
        "step",
        "step_ms",
        "tflops_per_rank",
        "time",
        "tokens",
        "tokens_per_second",
    ];
    let keys: BTreeSet<&str> = parts.into_iter().chain(rest).collect();
    // These lines exist if the peak of the CPU is recorded, or its energy is measured.
    let may_be_there = ["mfu", "energy_kwh", "joules_per_token"];
    let has = |step: &Value| -> BTreeSet<String> {
        step.as_object()
            .unwrap()
            .keys()
            .filter(|key| !may_be_there.contains(&key.as_str()))
            .cloned()
            .collect()
    };
    assert!(steps.iter().all(|step| has(step).iter().eq(keys.iter())), "{steps:?}");
    let evaluation = &lines("eval.jsonl")[0];
    let card: Value = serde_json::from_str(&text("run.json")).unwrap();
    assert_eq!(card["validation_loss"], evaluation["loss"]);
    assert_eq!((card["steps"].as_u64(), card["ranks"].as_u64()), (Some(3), Some(1)));
    let loss = evaluation["loss"].as_f64().unwrap();
    assert!(ended.stdout.contains(&format!("validation loss {loss:.4} over 8 samples")), "{ended}");
}

#[test]
fn unnamed_runs_are_numbered() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("mine.toml");
    std::fs::write(&file, "[run]\nsteps = 1\n[batch]\nglobal = 4\n").unwrap();
    let place = format!("run.root={}", root.path().display());
    let small: Vec<&str> = SMALL
        .into_iter()
        .filter(|s| !s.starts_with("run.steps") && !s.starts_with("batch"))
        .collect();
    let train = |more: &[&str]| {
        let args = [
            &["train", "--config", file.to_str().unwrap(), "--set", &place],
            &set(&small)[..],
            more,
        ]
        .concat();
        finish(&mut program(args)).succeeded()
    };
    (0..3).for_each(|_| drop(train(&[])));
    for name in ["mine", "mine-2", "mine-3"] {
        assert!(root.path().join(name).join("run.json").exists(), "{name}");
    }
    assert!(!root.path().join("mine-4").exists());
    // `--resume auto` selects the run that can be resumed.
    for name in ["mine", "mine-3"] {
        std::fs::remove_dir_all(root.path().join(name).join("checkpoints")).unwrap();
    }
    let ended: Ended = train(&["--resume", "auto", "--set", "run.steps=2"]);
    assert!(ended.stdout.contains("mine-2/checkpoints/step-00000001"), "{ended}");
    let steps = |name: &str| {
        std::fs::read_to_string(root.path().join(name).join("metrics.jsonl"))
            .unwrap()
            .lines()
            .count()
    };
    assert_eq!(["mine", "mine-2", "mine-3"].map(steps), [1, 2, 1]);
}

#[test]
fn text_is_imported_described_checked_and_trained_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let text: String = (0..400).map(|i| format!("line {i} of the text\n")).collect();
    std::fs::write(path("input.txt"), &text).unwrap();
    for (tokenizer, more) in
        [("char", &[][..]), ("byte", &["--compress", "6"]), ("gpt2", &["--val-fraction", "0.2"])]
    {
        let out = path(tokenizer);
        let input = path("input.txt");
        let import = [
            "data",
            "import",
            "text",
            &input,
            "--tokenizer",
            tokenizer,
            "--shards",
            "2",
            "--out",
            &out,
        ];
        printed(&[&import, more].concat());
        assert_eq!(listing(Path::new(&out)), ["train-00000.h5", "train-00001.h5", "val-00000.h5"]);
        let shown = printed(&["data", "inspect", &out]);
        assert!(
            shown.contains("/tokens")
                && shown.contains(tokenizer)
                && shown.contains("val-00000.h5"),
            "{shown}"
        );
        let checked = printed(&["data", "verify", &out]);
        assert!(checked.starts_with("3 files in order: "), "{checked}");
        let data = format!("data.path={out}");
        let files =
            Run::new(Alone, folder.path(), &format!("run-{tokenizer}"), &[&data, "run.steps=2"])
                .succeeds();
        assert_eq!(files.steps().len(), 2);
    }
    // The same text through a pipe.
    let import = format!(
        "{} data import text - --shards 2 --out {}",
        hpctrain_testkit::program().display(),
        path("piped")
    );
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &format!("cat {} | {import}", path("input.txt"))]);
    let ended = finish(&mut shell).succeeded();
    assert!(ended.stdout.contains("train-00001.h5: "), "{ended}");
    let ids = |name: &str| {
        let shard = hdf5::File::open(path(name) + "/train-00001.h5").unwrap();
        shard.dataset("tokens").unwrap().read_raw::<u8>().unwrap()
    };
    assert_eq!(ids("piped"), ids("char"));
    assert!(
        printed(&["data", "inspect", &path("piped")]).contains("source standard input (sha256 ")
    );
    // A flipped bit of an id is detected.
    let shard = path("char") + "/train-00001.h5";
    let at = hdf5::File::open(&shard).unwrap().dataset("tokens").unwrap().offset().unwrap()
        as usize
        + 100;
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let ended = finish(&mut program(["data", "verify", &path("char")]));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("train-00001.h5") && ended.stderr.contains("checksum"),
        "{ended}"
    );
}

#[test]
fn samples_follow_the_seed() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(
        Alone,
        root.path(),
        "x",
        &["parallel.virtual_ranks=2", "parallel.recompute=true", "run.steps=12"],
    );
    let latest = run.succeeds().path("checkpoints/latest");
    let latest = latest.to_str().unwrap();
    let sample = |more: &[&str]| {
        printed(&[&["sample", "--checkpoint", latest, "--tokens", "40"], more].concat())
    };
    let one = sample(&["--seed", "1", "--prompt", "ROMEO:"]);
    assert!(one.starts_with("ROMEO:") && one.chars().count() == 6 + 40 + 1, "{one:?}");
    assert_eq!(sample(&["--seed", "1", "--prompt", "ROMEO:"]), one);
    assert_ne!(sample(&["--seed", "2", "--prompt", "ROMEO:"]), one);
    assert_ne!(sample(&["--seed", "1", "--prompt", "ROMEO:", "--temperature", "0.1"]), one);
    let likeliest = sample(&["--temperature", "0"]);
    assert_eq!(sample(&["--temperature", "0", "--seed", "5"]), likeliest);
    assert_eq!(sample(&["--top-k", "1", "--seed", "3"]), likeliest);
    assert_eq!(sample(&["--top-k", "65", "--seed", "3"]), sample(&["--seed", "3"]));
    assert_eq!(
        printed(&["sample", "--checkpoint", latest, "--tokens", "0", "--prompt", "a"]),
        "a\n"
    );
    // The prompt may be longer than the context.
    let long = "To be, or not to be, that is the question";
    assert!(sample(&["--prompt", long]).starts_with(long));
}

#[test]
fn a_profile_has_every_kernel_of_the_steps() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &["run.steps=3", "eval.every=1"]);
    let ended = finish(run.command().arg("--profile")).succeeded();
    let files = run.files();
    assert!(
        ended.stdout.contains("\nkernel        ") && ended.stdout.contains("profile in "),
        "{ended}"
    );
    assert!(files.text("logs/rank-00000.log").contains("profile of 3 steps:"));
    let report: Value = serde_json::from_str(&files.text("profile.json")).unwrap();
    assert_eq!(
        (report["steps"].as_u64(), report["waits_for_kernels"].as_bool()),
        (Some(3), Some(false))
    );
    let number = |value: &Value, key: &str| {
        value[key].as_f64().unwrap_or_else(|| panic!("{key} of {value}"))
    };
    let kernels = report["kernels"].as_array().unwrap();
    let sum: f64 = kernels.iter().map(|kernel| number(kernel, "seconds")).sum();
    assert!(
        (sum + number(&report, "other_seconds") - number(&report, "compute_seconds")).abs() < 1e-9
    );
    for kernel in kernels {
        assert!(number(kernel, "calls") > 0.0 && number(kernel, "bytes") > 0.0, "{kernel}");
        assert!(
            number(kernel, "of_compute") <= 1.0 && number(kernel, "gigabytes_per_second") > 0.0,
            "{kernel}"
        );
        assert_eq!(kernel["flops"].is_null(), kernel["gflops_per_second"].is_null(), "{kernel}");
    }
    let of = |name: &str| {
        kernels.iter().find(|kernel| kernel["kernel"] == name).unwrap_or_else(|| panic!("{name}"))
    };
    // Evaluations and the text at the end are not profiled: each step has one attention per layer
    // and micro-batch.
    assert_eq!(of("attention")["calls"], of("attention, backward")["calls"]);
    assert!(number(of("linear"), "flops") > 0.0 && of("adamw")["flops"].is_null());
    // Without the flag there is no profile.
    assert!(
        !Run::new(Alone, root.path(), "y", &["run.steps=1"])
            .succeeds()
            .path("profile.json")
            .exists()
    );
}

/// Returns the report of `bench` on the steps of a network, as JSON.
#[track_caller]
fn bench(view: &str, more: &[&str]) -> Value {
    let args = [&["bench", view, "--json", "--steps", "2", "--samples", "2"], more].concat();
    serde_json::from_str(&printed(&args)).unwrap()
}

#[test]
fn steps_and_kernels_are_timed_on_random_data() {
    let gpt = set(&["model.layers=1", "model.width=32", "model.heads=2", "model.context=16"]);
    let positive = |report: &Value, keys: &[&str]| {
        keys.iter().for_each(|key| {
            assert!(report[*key].as_f64().unwrap_or(0.0) > 0.0, "{key} of {report}")
        });
    };
    let machine = ["ranks", "threads", "samples", "peak_gflops", "peak_bandwidth"];
    let step = bench("step", &gpt);
    positive(&step, &machine);
    positive(
        &step,
        &[
            "parameters",
            "step_ms",
            "fastest_step_ms",
            "per_second",
            "gflops",
            "of_peak",
            "tflops_per_rank",
            "mfu",
        ],
    );
    assert_eq!((&step["network"], &step["predictions"]), (&"gpt-char".into(), &"tokens".into()));
    assert_eq!(step["samples"], 2);

    let kernels = bench("kernels", &gpt);
    positive(&kernels, &machine);
    let rows = kernels["rows"].as_array().unwrap();
    for row in rows {
        positive(
            row,
            &[
                "calls_per_step",
                "microseconds",
                "fastest_microseconds",
                "bandwidth",
                "of_peak_bandwidth",
            ],
        );
        assert_eq!(row["gflops"].is_null(), row["of_peak_gflops"].is_null(), "{row}");
    }
    let shapes = |rows: &[Value], kernel: &str| -> Vec<Value> {
        rows.iter().filter(|row| row["kernel"] == kernel).map(|row| row["shape"].clone()).collect()
    };
    assert_eq!(shapes(rows, "attention"), [serde_json::json!([2, 16, 2, 16])]);
    assert!(shapes(rows, "linear").contains(&serde_json::json!([32, 32, 96])), "{kernels}");

    // Layer-list models do not need data either. Only GEMMs are reported here.
    let gemms = bench("gemm", &["--preset", "cnn-mnist"]);
    let rows = gemms["rows"].as_array().unwrap();
    assert!(shapes(rows, "linear").contains(&serde_json::json!([2, 3136, 128])), "{gemms}");
    assert!(
        shapes(rows, "convolution").contains(&serde_json::json!([2 * 14 * 14, 9 * 32, 64])),
        "{gemms}"
    );
    assert!(rows.iter().all(|row| row["gflops"].as_f64().unwrap() > 0.0));
    assert!(shapes(rows, "max pool").is_empty() && shapes(rows, "relu").is_empty());

    let table =
        printed(&[&["bench", "kernels", "--steps", "1", "--samples", "1"], &gpt[..]].concat());
    assert!(
        table.contains("peak per rank: ")
            && table.contains("\nkernel  ")
            && table.contains("1×16×2×16"),
        "{table}"
    );
    let table = printed(&[&["bench", "step", "--steps", "1", "--samples", "1"], &gpt[..]].concat());
    assert!(table.contains("\nthroughput  ") && table.contains(" tokens/s\n"), "{table}");
    let ended = finish(&mut program(["bench", "step", "--preset", "no-such"]));
    assert_eq!(ended.code(), 2, "{ended}");
}

#[test]
fn config_summary_lists_the_layers() {
    let summary = printed(&["config", "summary", "--preset", "cnn-mnist"]);
    for line in [
        "11 layers from 28 × 28 × 1 to 10",
        "layers.0 conv2d      28 × 28 × 32  320         451,584",
        "layers.6 flatten     3136          0           0",
        "layers.11 dense      10            1,290       2,560",
        "all                                421,642",
    ] {
        assert!(summary.contains(line), "{line:?} is missing: {summary}");
    }
    let summary = printed(&["config", "summary", "--preset", "gpt2-124m"]);
    assert!(
        summary.contains("h.11       1024 × 768") && summary.contains("124,475,904"),
        "{summary}"
    );
    assert!(
        printed(&["config", "summary", "--preset", "tinyllama-1.1b"]).contains("1,100,048,384")
    );
}

/// Runs a command in a shell that redirects its standard output and standard error.
fn through_a_shell(redirected: &str, args: &str) -> (Option<i32>, String) {
    let script = format!("{} {args} {redirected}", hpctrain_testkit::program().display());
    let ended = std::process::Command::new("bash")
        .args(["-o", "pipefail", "-c", &script])
        .output()
        .unwrap();
    (ended.status.code(), String::from_utf8(ended.stderr).unwrap())
}

#[test]
fn closed_output_does_not_change_the_exit_code() {
    for (redirected, code) in [
        ("| true", 0),
        (">&-", 0),
        ("2>&1 | true", 0),
        ("2>&-", 0),
        (">/dev/null 2>/dev/full", 0),
        (">/dev/full", 2),
    ] {
        let (found, stderr) = through_a_shell(redirected, "config show");
        assert_eq!(found, Some(code), "{redirected}: {stderr}");
        assert!(!stderr.contains("panic"), "{stderr}");
    }
    // The command only prints: output that cannot be written is an error, which is reported once.
    let (_, stderr) = through_a_shell(">/dev/full", "config summary");
    assert!(stderr.contains("cannot write standard output: No space left on device"), "{stderr}");
    assert_eq!(stderr.matches("cannot write to standard output").count(), 1, "{stderr}");
    for redirected in ["2>&1 | true", "2>&-", ">/dev/null 2>/dev/full"] {
        assert_eq!(
            through_a_shell(redirected, "config show --set no.such=1").0,
            Some(2),
            "{redirected}"
        );
    }
}
