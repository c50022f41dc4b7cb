//! Invalid input of users: the program prints one error that names the cause and its place, a hint,
//! exits with code 2, and changes no files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use hdf5::H5Type;
use hpctrain::checkpoint::Checkpoints;
use hpctrain::data::TokenizerKind;
use hpctrain::data::import::{ImportText, import_text};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{Ended, finish, mpirun, program};
use hpctrain_testkit::runs::{Run, RunFiles, copy};

/// Panics unless a program ended with exit code 2, one error with all `words`, and a hint.
#[track_caller]
fn refused(ended: &Ended, words: &[&str]) {
    assert_eq!(ended.code(), 2, "{ended}");
    assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
    assert_eq!(ended.stderr.matches("\nhint: ").count(), 1, "{ended}");
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
    }
}

/// Returns every file below a directory with its content.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for path in std::fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                true => folders.push(path),
                false => drop(files.insert(path.clone(), std::fs::read(&path).unwrap())),
            }
        }
    }
    files
}

/// Runs a command that must be refused and may not change files below `folder`, except that logs
/// may grow.
#[track_caller]
fn refuses(command: &mut Command, folder: &Path, words: &[&str]) {
    let before = snapshot(folder);
    refused(&finish(command), words);
    let after = snapshot(folder);
    for (path, content) in before {
        let log = path.extension().is_some_and(|extension| extension == "log");
        let kept = after
            .get(&path)
            .is_some_and(|now| *now == content || (log && now.starts_with(&content)));
        assert!(kept, "{} has changed", path.display());
    }
}

/// Writes a shard of ids with its vocabulary.
fn shard<T: H5Type>(folder: &Path, name: &str, ids: &[T], vocabulary: u64) {
    std::fs::create_dir_all(folder).unwrap();
    let path = folder.join(name);
    // A process that another test started while the earlier shard was open still holds its lock.
    if path.exists() {
        std::fs::remove_file(&path).unwrap();
    }
    let file = hdf5::File::create(path).unwrap();
    file.new_dataset::<T>().shape(ids.len()).create("tokens").unwrap().write_raw(ids).unwrap();
    file.new_attr::<u64>().create("vocabulary_size").unwrap().write_scalar(&vocabulary).unwrap();
}

/// Writes two training shards and one for validation: 62 and 62 samples of 16 ids below 5.
fn shards(folder: &Path) {
    let ids: Vec<u8> = (0..1000).map(|i| (i * i % 5) as u8).collect();
    for name in ["train-0.h5", "train-1.h5", "val-0.h5"] {
        shard(folder, name, &ids, 5);
    }
}

/// Imports 1000 letters as four training shards and one for validation.
fn import(out: &Path) {
    let input = out.with_file_name("letters");
    let letter = |i: usize| char::from(b'a' + (i * i % 5) as u8);
    std::fs::write(&input, (0..1000).map(letter).collect::<String>()).unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Char, out);
    (import.to.shards, import.to.val_fraction) = (4, 0.2);
    import_text(&import).unwrap();
}

/// Transports of cases in which all ranks find the same error.
const ALL: &[Transport] = &[Alone, Mpirun(2), Simulate(2)];
const ONE: &[Transport] = &[Alone];
const JOBS: &[Transport] = &[Mpirun(2), Simulate(2)];
const THREADS: &[Transport] = &[Simulate(2)];

#[test]
fn settings() {
    let cases: &[(&str, &[Transport], &[&str])] = &[
        ("run.stps=5", ALL, &["--set run.stps=5", "unknown key `stps`", "did you mean `steps`"]),
        ("rnu.steps=5", ONE, &["unknown key `rnu`", "did you mean `run`"]),
        ("run.steps", ONE, &["--set run.steps: not of the form section.key=value"]),
        ("run.steps=many", ONE, &["--set run.steps=many", "many"]),
        ("run.steps=1.5", ONE, &["--set run.steps=1.5", "1.5"]),
        ("run.steps=-1", ONE, &["--set run.steps=-1", "-1"]),
        ("run.time_limit=soon", ONE, &["--set run.time_limit=soon", "run.time_limit", "soon"]),
        ("data.augment.flop=true", ONE, &["unknown key `flop`", "did you mean `flip`"]),
        ("data.augment.shift=-1", ONE, &["--set data.augment.shift=-1", "-1"]),
        ("data.augment.flip=true", ALL, &["data.augment is for images, but samples have ids"]),
        ("parallel.zero=5", ONE, &["5", "0 to 3"]),
        ("lr_schedule.kind=cosin", ONE, &["unknown value `cosin`", "did you mean `cosine`"]),
        ("comm.timeout=-1", ONE, &["--set comm.timeout=-1", "-1"]),
        ("comm.timeout=700000", ONE, &["comm.timeout = 700000 is out of range", "604800"]),
        ("comm.algorithm=rng", ONE, &["unknown value `rng`", "did you mean `ring`"]),
        ("comm.transport=straight", ONE, &["unknown value `straight`", "staged"]),
        (
            "comm.transport=cuda-aware",
            ALL,
            &["comm.transport = cuda-aware is for GPUs", "hint: omit it"],
        ),
        ("comm.transport=nccl", ALL, &["comm.transport = nccl is for GPUs", "hint: omit it"]),
        ("model.place.tables=disk", ONE, &["unknown value `disk`", "it can be device, host"]),
        (
            "model.place.tables=host",
            ALL,
            &["model.place.tables = host is for GPUs", "hint: omit it"],
        ),
        (
            "model.rope_scaling.rope_type=yarn",
            ONE,
            &["unknown value `yarn`", "it can be default, linear, llama3"],
        ),
        (
            "model.rope_scaling.factor=8",
            ALL,
            &["model.rope_scaling is not a key of GPTs", "hint: omit it"],
        ),
        ("model.kind=bert", ONE, &["unknown value `bert`", "gpt"]),
        ("run.steps=0", ONE, &["run.steps = 0 is out of range", "at least 1"]),
        ("model.dropout=1.5", ONE, &["model.dropout = 1.5 is out of range"]),
        (
            "optimizer.lr=nan",
            ONE,
            &["--set optimizer.lr=nan: optimizer.lr = NaN", "a finite number"],
        ),
        ("eval.min_delta=inf", ALL, &["eval.min_delta = inf", "hint: give a finite number"]),
        ("lr_schedule.min_ratio=2", ONE, &["lr_schedule.min_ratio", "2"]),
        ("model.heads=3", ONE, &["model.width = 32", "model.heads = 3"]),
        ("model.vocabulary=10", ONE, &["65", "10", "model.vocabulary"]),
        ("run.name=a/b", ONE, &["run.name = \"a/b\""]),
        (
            "parallel.virtual_tensor_ranks=3",
            THREADS,
            &["parallel.virtual_tensor_ranks = 3 does not divide model.heads = 2"],
        ),
        (
            "parallel.replica=3",
            THREADS,
            &[
                "replica(3) × shard(1) × tensor(1) = 3 ranks, but 2 started",
                "hint: the nearest that fit: ",
                "replica = 2",
            ],
        ),
        (
            "run.memory_limit=lots",
            ONE,
            &["--set run.memory_limit=lots", "not a size such as \"8GiB\""],
        ),
        (
            "run.memory_limit=20MiB",
            ALL,
            &[
                "a rank needs ",
                "(parameters ",
                "runtime ",
                "more than run.memory_limit = 20MiB",
                "hint: no layout",
            ],
        ),
        (
            "model.width=65536",
            ALL,
            &[
                " × ",
                " TiB (parameters ",
                " GiB, gradients ",
                "are needed for the ranks on ",
                " are available\nhint: ",
            ],
        ),
        (
            "parallel.virtual_ranks=1",
            JOBS,
            &["parallel.virtual_ranks = 1", "2 data-parallel ranks", "2 or more"],
        ),
        ("parallel.shard=2", THREADS, &["parallel.shard = 2", "parallel.zero"]),
        (
            "batch.global=8",
            &[Mpirun(3), Simulate(3)],
            &["batch.global = 8", "8 / 3 = 2.67", "6 or 9"],
        ),
        (
            "batch.global=2",
            &[Simulate(4)],
            &["batch.global = 2", "4 virtual ranks", "nearest batch that does: 4"],
        ),
        ("batch.micro=3", THREADS, &["batch.micro = 3", "4 samples of a virtual rank"]),
        ("data.path=bundled:hamlet", ONE, &["hamlet", "tiny-shakespeare"]),
        ("data.path=/no/such/data", ALL, &["/no/such/data does not exist", "data.path"]),
    ];
    let root = tempfile::tempdir().unwrap();
    // On CPUs with bf16 the error may name a missing library, or there is none.
    #[cfg(target_arch = "x86_64")]
    let lacks = !is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let lacks = true;
    let words: &[&str] = &[
        "precision.dtype = bf16 needs a GPU, or a CPU with avx512_bf16",
        "hint: remove the setting",
    ];
    let of_cpu = lacks.then_some(("precision.dtype=bf16", ALL, words));
    for (setting, transports, words) in cases.iter().chain(&of_cpu) {
        for transport in *transports {
            refuses(
                &mut Run::new(*transport, root.path(), "x", &[setting]).command(),
                root.path(),
                words,
            );
        }
    }
    assert_eq!(snapshot(root.path()).len(), 0, "a refused run leaves no files");
}

/// Ranks may get different settings by an outdated file on one node, or a script that sets them.
#[test]
fn ranks_with_different_settings() {
    let root = tempfile::tempdir().unwrap();
    for (setting, words) in [
        ("optimizer.lr=0.5", &["ranks differ in optimizer.lr: 0.01 on rank 0, 0.5 on rank 1"][..]),
        (
            "run.steps=7",
            &["ranks differ in run.steps", "start all ranks with the same configuration"],
        ),
        ("run.device=cpu", &["ranks differ in run.device"]),
    ] {
        let one = Run::new(Alone, root.path(), "x", &[]).command();
        let mut both = mpirun(1);
        both.arg(one.get_program()).args(one.get_args());
        both.args([":", "-np", "1"])
            .arg(one.get_program())
            .args(one.get_args())
            .args(["--set", setting]);
        refuses(&mut both, root.path(), words);
    }
    assert_eq!(snapshot(root.path()).len(), 0, "a refused run leaves no files");
}

#[test]
fn options_without_effect_are_refused() {
    for (args, words) in [
        (&["eval"][..], &["--run", "--checkpoint"]),
        (&["eval", "--run", "runs/x", "--checkpoint", "runs/y"], &["--run", "--checkpoint"]),
        (&["eval", "--run", "runs/x", "--json"], &["--run", "--json"]),
        (&["eval", "--run", "runs/x", "--data", "d"], &["--run", "--data"]),
        (&["eval", "--run", "runs/x", "--split", "train"], &["--run", "--split"]),
        (&["eval", "--checkpoint", "runs/x", "--watch"], &["--checkpoint", "--watch"]),
        (&["eval", "--checkpoint", "runs/x", "--timeout", "1h"], &["--checkpoint", "--timeout"]),
        (
            &["simulate", "--ranks", "2", "--evaluators", "1"],
            &["unexpected argument", "--evaluators"],
        ),
        (&["ps", "coordinator", "--policy", "every"], &["unexpected argument", "--policy"]),
    ] {
        let ended = finish(&mut program(args));
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(words.iter().all(|word| ended.stderr.contains(word)), "{args:?}: {ended}");
    }
}

#[test]
fn the_hint_names_a_setting_that_takes_less_memory() {
    let root = tempfile::tempdir().unwrap();
    let big = ["model.layers=4", "model.width=256", "model.context=64", "batch.global=16"];
    let command = |transport, more: &[&str]| {
        Run::new(transport, root.path(), "x", &[&big, more].concat()).command()
    };
    // The program counts, too, and is larger in debug builds.
    let needed = |transport, more: &[&str]| {
        let stderr =
            finish(&mut command(transport, &[more, &["run.memory_limit=8MiB"]].concat())).stderr;
        let (_, rest) = stderr.split_once("a rank needs ").unwrap();
        rest.split_once(" MiB").unwrap().0.parse::<f64>().unwrap() as u64
    };
    // Too little even without the copy of the state, 36 MiB, that an asynchronous save takes.
    let limit = format!("run.memory_limit={}MiB", needed(Alone, &[]) - 40);
    let words = [
        "a rank needs ",
        "activations 67.1 MiB",
        &format!("more than {}", limit.replace('=', " = ")),
        "\nhint: batch.micro=2",
    ];
    refuses(&mut command(Alone, &[&limit]), root.path(), &words);
    let words = ["activations ", "\nhint: parallel.zero=", " takes "];
    let of_two = format!("run.memory_limit={}MiB", needed(Mpirun(2), &["batch.micro=1"]) - 40);
    refuses(&mut command(Mpirun(2), &[&of_two, "batch.micro=1"]), root.path(), &words);
    assert_eq!(snapshot(root.path()).len(), 0, "a refused run leaves no files");
    // The value of the hint works.
    finish(&mut command(Alone, &[&limit, "batch.micro=2", "run.steps=1"])).succeeded();
}

/// An allocation may fail although the system reported enough memory: it ends the run like any
/// other error.
#[test]
fn an_allocation_that_fails() {
    let root = tempfile::tempdir().unwrap();
    let big = [
        "model.layers=6",
        "model.width=512",
        "model.context=64",
        "batch.global=32",
        "run.threads=1",
    ];
    let inner = Run::new(Alone, root.path(), "x", &big).command();
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -v 600000; exec \"$@\"", "sh"])
        .arg(inner.get_program())
        .args(inner.get_args());
    command
        .envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .env("MALLOC_ARENA_MAX", "1");
    let words = [
        "error: out of memory: cannot allocate ",
        " MiB for activations; this rank has allocated parameters 72.",
        ", optimizer 144.",
    ];
    refuses(&mut command, root.path(), &words);
}

#[test]
fn meshes_that_do_not_fit() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Simulate(4), root.path(), "x", &["parallel.zero=1", "parallel.shard=3"]);
    let words = [
        "pipeline(1) × replica(1) × shard(3) × tensor(1) = 3 ranks, but 4 started",
        "parallel.shard = 4 with parallel.replica = 1, or parallel.shard = 2 with parallel.replica = 2, or 3 ranks",
    ];
    refuses(&mut run.command(), root.path(), &words);
}

#[test]
fn impossible_pipelines() {
    let root = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str]); 7] = [
        ("parallel.pipeline=0", &["parallel.pipeline = 0 is out of range"]),
        (
            "parallel.pipeline=3",
            &[
                "pipeline(3) × replica(1) × shard(1) × tensor(1) = 3 ranks, but 4 started",
                "3 ranks",
            ],
        ),
        (
            "parallel.pipeline=2 parallel.stages=[4]",
            &["parallel.stages = [4] has 1 stages, but parallel.pipeline = 2"],
        ),
        (
            "parallel.pipeline=2 parallel.stages=[2,1]",
            &["parallel.stages = [2, 1] adds up to 3 blocks", "config summary"],
        ),
        (
            "parallel.pipeline=2 parallel.stages=[4,0]",
            &["parallel.stages = [4, 0] has a stage without blocks"],
        ),
        ("parallel.pipeline=2 batch.global=7", &["batch.global = 7", "2 virtual ranks", "6 or 8"]),
        (
            "parallel.pipeline=2 batch.micro=3",
            &["batch.micro = 3 does not divide the 4 samples", "nearest that does: 2"],
        ),
    ];
    for (settings, words) in cases {
        let settings: Vec<&str> = settings.split_whitespace().collect();
        refuses(
            &mut Run::new(Simulate(4), root.path(), "x", &settings).command(),
            root.path(),
            words,
        );
    }
    refuses(
        &mut Run::new(Mpirun(2), root.path(), "x", &["parallel.pipeline=4"]).command(),
        root.path(),
        &["= 4 ranks, but 2 started"],
    );
    let wrong = ["parallel.schedule=zerobubble", "parallel.pipeline=2"];
    let words = ["parallel.schedule=zerobubble", "did you mean `zero-bubble`"];
    refuses(&mut Run::new(Simulate(2), root.path(), "x", &wrong).command(), root.path(), &words);
    let ended = Run::new(Simulate(2), root.path(), "alone", &["parallel.schedule=zero-bubble"])
        .ends()
        .succeeded();
    let warning =
        "parallel.schedule = zero-bubble has no effect: there is one stage; hint: remove it";
    assert!(ended.stderr.contains(warning), "{ended}");
    let words = ["parallel.pipeline = 8, but the network has 4 blocks", "at most 4"];
    refuses(
        &mut Run::new(Simulate(8), root.path(), "x", &["parallel.pipeline=8"]).command(),
        root.path(),
        &words,
    );
    // A pipeline with too few micro-batches to fill it runs with a warning.
    let ended =
        Run::new(Simulate(4), root.path(), "few", &["parallel.pipeline=4", "batch.global=2"])
            .ends()
            .succeeded();
    assert!(
        ended
            .stderr
            .contains("2 micro-batches a rank for 4 stages leave 60 % of a step idle; hint: "),
        "{ended}"
    );
    assert!(
        ended.stdout.contains(
            "stages of 1 + 1 + 1 + 1 blocks; micro-batches per rank and step: 2, bubble: 60 %"
        ),
        "{ended}"
    );
}

#[test]
fn steps_and_epochs_exclude_each_other() {
    let root = tempfile::tempdir().unwrap();
    let cases: [(&[&str], &[&str]); 6] = [
        // Tests set run.steps.
        (&["run.epochs=2"], &["run.steps and run.epochs are both given", "give only one of them"]),
        (
            &["eval.every=3", "eval.every_epochs=1"],
            &["eval.every and eval.every_epochs are both given"],
        ),
        (
            &["checkpoint.every_epochs=1", "checkpoint.every=3"],
            &["checkpoint.every and checkpoint.every_epochs are both"],
        ),
        (&["run.steps=0", "run.epochs=0"], &["run.steps = 0 is out of range", "at least 1"]),
        (&["run.steps=0", "run.epochs=half"], &["--set run.epochs=half"]),
        (&["model.own=mine"], &["model.own = \"mine\" names a custom model", "use that program"]),
    ];
    for (settings, words) in cases {
        refuses(&mut Run::new(Alone, root.path(), "x", settings).command(), root.path(), words);
    }
}

#[test]
fn impossible_in_memory_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let cases: [(Transport, &str, &[&str]); 6] = [
        (
            Alone,
            "memory_checkpoint.every=often",
            &["--set memory_checkpoint.every=often", "neither a number of steps nor \"auto\""],
        ),
        (
            Mpirun(2),
            "memory_checkpoint.keep=2",
            &["memory_checkpoint.keep = 2 does nothing with memory_checkpoint.every = 0"],
        ),
        (
            Alone,
            "memory_checkpoint.every=1 memory_checkpoint.dir=shm",
            &["memory_checkpoint.dir = shm is out of range", "an absolute path"],
        ),
        (
            Alone,
            "memory_checkpoint.every=1 memory_checkpoint.disk_every=7",
            &["memory_checkpoint.disk_every = 7 does nothing without memory_checkpoint.disk_dir"],
        ),
        (
            Simulate(2),
            "memory_checkpoint.every=1 memory_checkpoint.dir=/no/such/place",
            &["/no/such/place", "memory_checkpoint.dir"],
        ),
        // The file system of processes has no free space.
        (
            Mpirun(2),
            "memory_checkpoint.every=1 memory_checkpoint.dir=/proc",
            &[
                "/proc has 0 B free, but the in-memory checkpoints of 2 ranks need",
                "hint: set memory_checkpoint.",
            ],
        ),
    ];
    for (transport, settings, words) in cases {
        let settings: Vec<&str> = settings.split(' ').collect();
        let run = Run::new(transport, root.path(), "x", &settings);
        refuses(&mut run.command(), root.path(), words);
    }
}

#[test]
fn impossible_local_sgd() {
    let root = tempfile::tempdir().unwrap();
    let cases: [(Transport, &str, &[&str]); 10] = [
        (
            Alone,
            "local_sgd.sync_every=8",
            &["local_sgd.sync_every = 8, but there is one replica", "local_sgd.replicas=2"],
        ),
        (
            Mpirun(2),
            "local_sgd.sync_every=8 parallel.zero=1",
            &["there is one replica", "parallel.replica=2"],
        ),
        (
            Simulate(2),
            "local_sgd.sync_every=2 local_sgd.replicas=3",
            &[
                "local_sgd.replicas = 3 does not divide over the 2 replicas of the mesh",
                "that does: 4",
            ],
        ),
        (
            Mpirun(2),
            "local_sgd.sync_every=often",
            &["--set local_sgd.sync_every=often", "number of steps"],
        ),
        (
            Simulate(2),
            "local_sgd.replicas=4",
            &["local_sgd.replicas = 4 does nothing", "local_sgd.sync_every"],
        ),
        (
            Simulate(2),
            "local_sgd.outer_lr=0.7",
            &["local_sgd.outer_lr = 0.7 does nothing with local_sgd.sync_every = 0"],
        ),
        (
            Simulate(2),
            "local_sgd.outer_momentum=0.9 local_sgd.sync_every=2 local_sgd.outer_lr=0",
            &["outer_lr = 0 is out"],
        ),
        (
            Simulate(2),
            "local_sgd.outer_momentum=1 local_sgd.sync_every=2",
            &["local_sgd.outer_momentum = 1 is out of range"],
        ),
        (
            Simulate(2),
            "local_sgd.sync_every=8 checkpoint.keep_every=20",
            &[
                "checkpoint.keep_every = 20 is not a multiple of local_sgd.sync_every = 8",
                "16 or 24",
            ],
        ),
        (
            Simulate(2),
            "local_sgd.sync_every=2 local_sgd.replicas=4 parallel.virtual_ranks=2",
            &[
                "parallel.virtual_ranks = 2 does not divide over 4 replicas of 1 shards",
                "set parallel.virtual_ranks to 4",
            ],
        ),
    ];
    for (transport, settings, words) in cases {
        let settings: Vec<&str> = settings.split_whitespace().collect();
        refuses(
            &mut Run::new(transport, root.path(), "x", &settings).command(),
            root.path(),
            words,
        );
    }
}

#[test]
fn ranks_that_cannot_be_spawned() {
    let root = tempfile::tempdir().unwrap();
    let words = ["--spawn 2, but this command does not run on ranks", "train, eval, predict"];
    refuses(&mut program(["verify", "--spawn", "2"]), root.path(), &words);
    let mut twice = mpirun(2);
    twice.arg(hpctrain_testkit::program()).args(["train", "--spawn", "2"]);
    let words = ["--spawn 2, but this process was started by Open MPI's mpirun", "use one of them"];
    refuses(&mut twice, root.path(), &words);
    let words = ["cannot start ./nothing: ", "give an executable file"];
    refuses(&mut program(["spawn", "-n", "2", "./nothing"]), root.path(), &words);
    let mut twice = mpirun(2);
    twice.arg(hpctrain_testkit::program()).args(["spawn", "-n", "2", "true"]);
    let words = ["spawn -n 2, but this process was started by Open MPI's mpirun", "use one of"];
    refuses(&mut twice, root.path(), &words);
    // An error that all ranks share is printed once, as under mpirun.
    let words = ["model.heads = 3"];
    refuses(
        &mut Run::new(Spawn(3), root.path(), "x", &["model.heads=3"]).command(),
        root.path(),
        &words,
    );
    let mut lost = program(["train"]);
    refuses(
        lost.env("HPCTRAIN_RENDEZVOUS", "2/2/tmp"),
        root.path(),
        &["HPCTRAIN_RENDEZVOUS=2/2/tmp", "unset it"],
    );
}

#[test]
fn impossible_central_storage() {
    let root = tempfile::tempdir().unwrap();
    let cases: [(Transport, &str, &[&str]); 7] = [
        (
            Mpirun(2),
            "parallel.owners=2",
            &["parallel.owners = 2 does nothing with parallel.storage = ranks", "central"],
        ),
        (Simulate(2), "parallel.owners=0", &["parallel.owners = 0 is out of range"]),
        (
            Simulate(4),
            "parallel.storage=central parallel.owners=3",
            &["parallel.owners = 3 does not divide the 4 data-parallel ranks", "that does: 2"],
        ),
        (
            Mpirun(2),
            "parallel.storage=central parallel.zero=2",
            &["the optimizer state on owners only, but parallel.zero = 2", "parallel.owners"],
        ),
        (
            Simulate(2),
            "parallel.storage=central parallel.shard=2",
            &["parallel.shard = 2, but", "omit parallel.shard"],
        ),
        (
            Simulate(2),
            "parallel.storage=central local_sgd.sync_every=8",
            &["local_sgd.sync_every is not supported with parallel.storage", "omit one of them"],
        ),
        (Simulate(2), "parallel.storage=middle", &["unknown value `middle`", "ranks, central"]),
    ];
    for (transport, settings, words) in cases {
        let settings: Vec<&str> = settings.split_whitespace().collect();
        refuses(
            &mut Run::new(transport, root.path(), "x", &settings).command(),
            root.path(),
            words,
        );
    }
    let plan = ["plan", "--ranks", "2", "--set", "parallel.storage=central"];
    refuses(
        &mut program(plan),
        root.path(),
        &["parallel.storage = central is a layout", "without it"],
    );
}

#[test]
fn impossible_tensor_parallelism() {
    let root = tempfile::tempdir().unwrap();
    let cases: [(usize, &str, &[&str]); 8] = [
        (1, "parallel.tensor=0", &["parallel.tensor = 0 is out of range"]),
        (
            4,
            "parallel.tensor=4",
            &["parallel.tensor = 4 does not divide model.heads = 2", "may be 1, 2"],
        ),
        (
            4,
            "parallel.tensor=4 model.kind=llama model.heads=4 model.kv_heads=2",
            &["parallel.tensor = 4 does not divide model.kv_heads = 2", "may be 1, 2"],
        ),
        (
            2,
            "parallel.tensor=2 parallel.virtual_tensor_ranks=3",
            &["virtual_tensor_ranks = 3 does not divide over 2 ranks", "4"],
        ),
        (3, "parallel.tensor=2", &["shard(1) × tensor(2) = 2 ranks, but 3 started"]),
        (
            2,
            "parallel.sequence=true",
            &["parallel.sequence = true divides nothing", "parallel.tensor"],
        ),
        (
            2,
            "parallel.tensor=2 parallel.sequence=true model.context=9",
            &["parallel.tensor = 2 does not divide model.context = 9", "10"],
        ),
        (
            2,
            "parallel.tensor=2 model.kind=llama model.hidden=1",
            &["without any of model.hidden = 1", "fewer tensor-parallel ranks"],
        ),
    ];
    for (ranks, settings, words) in cases {
        let settings: Vec<&str> = settings.split_whitespace().collect();
        refuses(
            &mut Run::new(Simulate(ranks), root.path(), "x", &settings).command(),
            root.path(),
            words,
        );
    }
}

#[test]
fn impossible_plans() {
    let root = tempfile::tempdir().unwrap();
    let machine = root.path().join("mine.toml");
    std::fs::write(&machine, "name = 'mine'\ngpu = 7\n").unwrap();
    let machine = machine.display().to_string();
    let cases: [(&str, &[&str]); 12] = [
        (
            "--ranks 6 --nodes 4",
            &["--nodes 4 does not divide --ranks 6", "every node has the same number of ranks"],
        ),
        ("--ranks 4 --machine b300x8", &["b300x8", "a100x8, h100x8, h200x8"]),
        (
            &format!("--ranks 4 --machine {machine}"),
            &["mine.toml:2: invalid type: integer `7`", "docs/parallelism.md"],
        ),
        (
            "--ranks 16 --nodes 1 --machine h100x8",
            &["16 ranks on each node, but ", "has room for 8", "--nodes 2"],
        ),
        (
            "--ranks 7 --set batch.global=16",
            &[
                "no layout is possible: batch.global = 16 does not divide into 7 virtual ranks",
                "another number of ranks",
            ],
        ),
        (
            "--ranks 4 --set parallel.pipeline=3",
            &["no layout is possible: pipeline(3)", "[parallel]"],
        ),
        (
            "--ranks 2 --set model.heads=3",
            &["no layout is possible: model.width = ", "hint: set model.heads="],
        ),
        (
            "--ranks 2 --set run.memory_limit=1MiB",
            &["no layout fits: of 2 ranks the smallest needs ", "1.0 MiB a rank"],
        ),
        ("--ranks 2 --set precision.dtype=tf32", &["rates are not known here", "--machine h100x8"]),
        (
            "--ranks 2 --measure --set precision.dtype=tf32",
            &["for GPUs", "mpirun -np N hpctrain plan --measure"],
        ),
        (
            "--ranks 2 --set local_sgd.sync_every=4",
            &["local_sgd.sync_every is set, but layouts differ", "without it"],
        ),
        ("--ranks 2 --set optimizer.lr=x", &["--set optimizer.lr=x"]),
    ];
    for (arguments, words) in cases {
        refuses(program(["plan"]).args(arguments.split_whitespace()), root.path(), words);
    }
    refuses(
        mpirun(2).arg(hpctrain_testkit::program()).args(["plan", "--measure", "--ranks", "3"]),
        root.path(),
        &["--measure with --ranks 3, but 2 ranks were started", "mpirun -np 3"],
    );
    // Only runs support parallel.layout = auto.
    refuses(
        program(["verify", "--ranks", "1"]).args(["--set", "parallel.layout=auto"]),
        root.path(),
        &["parallel.layout = auto chooses a layout for a run", "hpctrain plan"],
    );
    let run =
        Run::new(Simulate(2), root.path(), "x", &["parallel.layout=auto", "run.memory_limit=1MiB"]);
    refuses(&mut run.command(), root.path(), &["no layout fits: of 2 ranks"]);
}

#[test]
fn configuration_files() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("mine.toml");
    let cases: [(&str, &[&str]); 5] = [
        (
            "[run]\nsteps = 5\n\n[modle]\nwidth = 64\n",
            &["mine.toml:4", "unknown key `modle`", "did you mean `model`"],
        ),
        (
            "[run]\nsteps = 5\nstps = 6\n",
            &["mine.toml:3", "unknown key `stps`", "did you mean `steps`"],
        ),
        ("[run]\nname = \"x\"\nsteps = \"many\"\n", &["mine.toml:3", "many"]),
        ("[run\nsteps = 5\n", &["mine.toml:1"]),
        ("[batch]\nglobal = 0\n", &["batch.global = 0 is out of range"]),
    ];
    for (text, words) in cases {
        std::fs::write(&file, text).unwrap();
        refuses(Alone.train().arg("--config").arg(&file), root.path(), words);
        refuses(program(["config", "show", "--config"]).arg(&file), root.path(), words);
    }
    refuses(Mpirun(2).train().arg("--config").arg(&file), root.path(), cases[4].1);
    let missing = root.path().join("none.toml");
    for transport in ALL {
        refuses(
            transport.train().arg("--config").arg(&missing),
            root.path(),
            &["none.toml", "config show"],
        );
        refuses(
            transport.train().args(["--preset", "gpt-chra"]),
            root.path(),
            &["gpt-chra", "did you mean `gpt-char`"],
        );
    }
}

/// A function that damages the shards of a directory.
type Spoil = fn(&Path);

#[test]
fn data() {
    let cases: &[(Spoil, &str, &[Transport], &[&str])] = &[
        (
            |dir| std::fs::create_dir(dir).unwrap(),
            "",
            ONE,
            &["no file in", "train-*.h5", "data.train"],
        ),
        (
            shards,
            "data.validation=test-*.h5",
            ONE,
            &["test-*.h5", "data.validation", "train-0.h5, train-1.h5"],
        ),
        (
            shards,
            "data.val_fraction=0.1",
            ALL,
            &["data.val_fraction = 0.1", "has validation shards", "remove data.val_fraction"],
        ),
        (
            |dir| {
                shards(dir);
                std::fs::remove_file(dir.join("val-0.h5")).unwrap();
            },
            "eval.patience=1",
            ALL,
            &["no validation data: eval.patience", "data.val_fraction"],
        ),
        (
            |dir| {
                shards(dir);
                std::fs::OpenOptions::new()
                    .write(true)
                    .open(dir.join("train-1.h5"))
                    .unwrap()
                    .set_len(1500)
                    .unwrap();
            },
            "",
            ALL,
            &["train-1.h5", "damaged or truncated"],
        ),
        (
            |dir| {
                shards(dir);
                std::fs::write(dir.join("train-1.h5"), "what is this?").unwrap();
            },
            "",
            ONE,
            &["train-1.h5 is not an HDF5 file", "data import"],
        ),
        (shards, "data.tokens=/ids", ALL, &["train-0.h5", "/ids", "/tokens", "data.tokens"]),
        (
            |dir| {
                shards(dir);
                shard(dir, "train-0.h5", &[0.5f32; 100], 5);
            },
            "",
            THREADS,
            &["train-0.h5", "/tokens is of type float32", "integer"],
        ),
        (
            |dir| {
                shards(dir);
                shard(dir, "train-1.h5", &[1u8; 100], 7);
            },
            "",
            THREADS,
            &["vocabulary_size differs", "train-1.h5 has 7", "train-0.h5 has 5"],
        ),
        (
            |dir| {
                shards(dir);
                shard(dir, "train-1.h5", &[1u16; 100], 5);
            },
            "",
            ONE,
            &["dtype differs", "train-1.h5 has /tokens uint16", "train-0.h5 has /tokens uint8"],
        ),
        (
            |dir| {
                import(dir);
                std::fs::remove_file(dir.join("train-00002.h5")).unwrap();
            },
            "",
            ALL,
            &["train-00002.h5 is missing of the 4 train shards of letters", "data.train"],
        ),
        (
            |dir| {
                import(dir);
                std::fs::remove_file(dir.join("train-00002.h5")).unwrap();
            },
            "data.local_cache=/tmp",
            ONE,
            &["/data-", "train-00002.h5 is missing of the 4 train shards of letters"],
        ),
        (
            shards,
            "model.vocabulary=4",
            ONE,
            &["train-0.h5", "vocabulary_size is 5", "model.vocabulary is 4"],
        ),
        (shards, "model.context=2000", ONE, &["train-0.h5", "1000 tokens", "2000 + 1"]),
        (
            shards,
            "batch.global=200",
            ALL,
            &["124 training samples", "batch.global = 200", "at most 124"],
        ),
    ];
    for (i, (spoil, setting, transports, words)) in cases.iter().enumerate() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(format!("data-{i}"));
        spoil(&folder);
        let path = format!("data.path={}", folder.display());
        let settings: Vec<&str> =
            [path.as_str(), setting].into_iter().filter(|setting| !setting.is_empty()).collect();
        for transport in *transports {
            refuses(
                &mut Run::new(*transport, root.path(), "x", &settings).command(),
                root.path(),
                words,
            );
        }
    }
}

/// Only the rank that reads an invalid id detects it, and the whole job ends.
#[test]
fn an_id_outside_the_vocabulary() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("data");
    shards(&folder);
    // In order, a step takes 8 samples of 16 ids: 4 for each of two ranks. Sample 22 is of step 3
    // and rank 1.
    let mut ids = [1u8; 1000];
    ids[22 * 16 + 5] = 9;
    shard(&folder, "train-0.h5", &ids, 5);
    let path = format!("data.path={}", folder.display());
    let words = ["train-0.h5", "/tokens[357] is token id 9", "vocabulary of 5", "model.vocabulary"];
    for (i, transport) in [Alone, Mpirun(2), Simulate(2), Mpirun(4)].into_iter().enumerate() {
        let name = format!("x-{i}");
        let run = Run::new(
            transport,
            root.path(),
            &name,
            &[&path, "data.shuffle=false", "checkpoint.every=1"],
        );
        refuses(&mut run.command(), &folder, &words);
        let ended = finish(&mut Run { name: name + "-again", ..run.clone() }.command());
        let rank = match transport {
            Alone => "error: /",
            Mpirun(4) => "error: rank 3: ",
            _ => "error: rank 1: ",
        };
        refused(&ended, &[rank]);
        // Earlier steps are kept.
        let steps = run.files().numbers("metrics.jsonl", "step");
        assert!(
            steps.len() <= 2 && steps.iter().zip(1..).all(|(&step, n)| step == f64::from(n)),
            "{steps:?}"
        );
    }
}

/// Only the rank that reads from a damaged block detects it, and the whole job ends.
#[test]
fn a_damaged_block() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("data");
    import(&folder);
    let path = folder.join("train-00003.h5");
    let offset =
        hdf5::File::open(&path).unwrap().dataset("tokens").unwrap().offset().unwrap() as usize;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[offset + 15] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let at = format!("data.path={}", folder.display());
    // A batch takes 8 of 4 x 12 samples in order: those of the last shard come in the fifth step.
    let settings = [&at[..], "data.shuffle=false", "checkpoint.every=1"];
    let words = [
        "train-00003.h5: /tokens[0..200] has checksum ",
        "was written",
        "copy or import the shard again",
    ];
    for transport in [Alone, Mpirun(2)] {
        let name = format!("{transport:?}");
        let run = Run::new(transport, root.path(), &name, &settings);
        refused(&finish(&mut run.command()), &words);
        assert_eq!(run.files().numbers("metrics.jsonl", "step"), [1.0, 2.0, 3.0, 4.0]);
        let unseen = Run::new(
            transport,
            root.path(),
            &format!("{name}-off"),
            &[&settings[..], &["data.verify=off"]].concat(),
        );
        unseen.succeeds();
    }
    let wrong = Run::new(Alone, root.path(), "wrong", &[&at, "data.verify=sometimes"]);
    refused(&wrong.ends(), &["data.verify=sometimes", "first-pass"]);
}

#[test]
fn run_directories() {
    let root = tempfile::tempdir().unwrap();
    Run::new(Alone, root.path(), "taken", &["run.steps=2"]).succeeds();
    std::fs::write(root.path().join("file"), "not a directory").unwrap();
    let below = root.path().join("file/deeper");
    let nothing = root.path().join("nothing");
    std::fs::create_dir(&nothing).unwrap();
    let nothing = nothing.to_str().unwrap();
    for transport in ALL {
        let run = |root: &Path, name: &str| Run::new(*transport, root, name, &[]);
        let cases: [(Run, &[&str]); 5] = [
            (run(root.path(), "taken"), &["taken holds another run", "--resume auto", "run.name"]),
            (run(root.path(), "taken").resume(nothing), &["taken holds another run"]),
            (
                run(root.path(), "new").resume(nothing),
                &["nothing is neither a checkpoint nor a run", "checkpoints/latest"],
            ),
            (run(&below, "x"), &["cannot create", "file/deeper/x", "Not a directory", "run.root"]),
            (run(Path::new("/proc"), "x"), &["cannot create /proc/x", "run.root"]),
        ];
        // A start of mpirun that fails takes seconds, so it is tested for two cases only.
        let some = if matches!(transport, Mpirun(_)) { &cases[2..4] } else { &cases[..] };
        for (run, words) in some {
            refuses(&mut run.command(), root.path(), words);
        }
    }
    // A run without a checkpoint starts from the beginning with `--resume auto`, and prints that:
    // a scheduler starts it with the same command every time.
    let taken = RunFiles(root.path().join("taken"));
    std::fs::remove_dir_all(taken.path("checkpoints")).unwrap();
    let ended = Run::new(Simulate(2), root.path(), "taken", &["parallel.virtual_ranks=2"])
        .resume("auto")
        .ends()
        .succeeded();
    assert!(ended.stdout.contains("no checkpoint yet: begins at step 0"), "{ended}");
    assert_eq!(taken.steps().len(), 6);
}

#[test]
fn traces() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("file"), "not a directory").unwrap();
    for transport in ALL {
        let run = Run::new(*transport, root.path(), "x", &[]);
        let mut command = run.command();
        refuses(
            command.arg("--trace").arg(root.path().join("file/out.json")),
            root.path(),
            &["cannot write the trace", "file/out.json", "Not a directory", "--trace"],
        );
        assert!(!run.files().0.exists(), "nothing has begun");
    }
}

#[test]
fn samples() {
    let root = tempfile::tempdir().unwrap();
    let files = Run::new(Alone, root.path(), "x", &["run.steps=1"]).succeeds();
    let latest = files.path("checkpoints/latest");
    let latest = latest.to_str().unwrap();
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--checkpoint", latest, "--prompt", "naïve"], &["'ï'", "U+00EF", "65 characters"]),
        (&["--checkpoint", latest, "--prompt", "a", "--prompt", ""], &["--prompt is empty"]),
        (&["--checkpoint", latest, "--stop", ""], &["--stop is empty"]),
        (
            &["--checkpoint", latest, "--prompts", "/no/such/file"],
            &["cannot read /no/such/file", "on each line"],
        ),
        (&["--checkpoint", latest, "--prompts", "/dev/null"], &["/dev/null", "not a regular file"]),
        (&["--checkpoint", latest, "--prompt", ""], &["--prompt is empty"]),
        (&["--checkpoint", latest, "--temperature=-1"], &["--temperature -1 is out of range"]),
        (&["--checkpoint", "/no/such/run"], &["/no/such/run does not exist"]),
    ];
    for (args, words) in cases {
        refuses(program(["sample"]).args(args), root.path(), words);
    }
}

/// Arguments that are refused by the parser of the command line, in its own format.
#[test]
fn arguments() {
    let cases: [(&[&str], &str); 6] = [
        (&["--confg", "x"], "'--confg'"),
        (&["trian"], "'trian'"),
        (&["simulate", "--ranks", "0"], "'0'"),
        (&["simulate"], "--ranks"),
        (&["sample"], "--checkpoint"),
        (&["completions", "dos"], "'dos'"),
    ];
    for (args, word) in cases {
        let ended = finish(&mut program(args));
        assert_eq!(ended.code(), 2, "{ended}");
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
        assert!(ended.stderr.contains(word), "{ended}");
    }
    let ended = finish(Mpirun(2).train().args(["--confg", "x"]));
    assert_eq!((ended.code(), ended.stderr.matches("error:").count()), (2, 1), "{ended}");
    refused(&finish(program(["train"]).env("HPCTRAIN_MPI", "maybe")), &["HPCTRAIN_MPI", "maybe"]);
}

/// Mounts a disk of 1 MiB on the first argument, runs the other arguments there until it is full,
/// enlarges it, and resumes.
const SMALL_DISK: &str = r#"
    disk=$1; shift
    mount -t tmpfs -o size=1m small "$disk" || exit 99
    "$@"; echo "exit code $?"
    cp -a "$disk/x" "$disk.full"
    mount -o remount,size=64m "$disk" || exit 99
    "$@" --resume auto || exit
    cp -a "$disk/x" "$disk.resumed"
"#;

/// Returns arguments of `unshare` that give a separate mount namespace, if any do.
fn mounting() -> Option<&'static [&'static str]> {
    let ways: [&[&str]; 2] = [&["--mount"], &["--map-root-user", "--mount"]];
    let folder = tempfile::tempdir().unwrap();
    ways.into_iter().find(|flags| {
        let mut command = Command::new("unshare");
        command
            .args(*flags)
            .args(["mount", "-t", "tmpfs", "-o", "size=1m", "small"])
            .arg(folder.path());
        command.output().is_ok_and(|output| output.status.success())
    })
}

#[test]
fn a_full_disk_loses_no_checkpoint() {
    let Some(flags) = mounting() else {
        println!("skipped: this user may not mount a small disk");
        return;
    };
    let root = tempfile::tempdir().unwrap();
    let settings = [
        "run.steps=8",
        "checkpoint.every=1",
        "checkpoint.keep=99",
        "parallel.virtual_ranks=2",
        "checkpoint.io_retry_seconds=0",
    ];
    let reference = Run::new(Alone, root.path(), "reference", &settings).succeeds();
    for (i, transport) in ALL.iter().enumerate() {
        let disk = root.path().join(format!("disk-{i}"));
        std::fs::create_dir(&disk).unwrap();
        let inner = Run::new(*transport, &disk, "x", &settings).command();
        let mut command = Command::new("unshare");
        command.args(flags).args(["sh", "-c", SMALL_DISK, "sh"]).arg(&disk);
        command.arg(inner.get_program()).args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let ended = finish(&mut command);
        assert_eq!(ended.code(), 0, "{ended}");
        assert!(ended.stdout.contains("exit code 74\n"), "{ended}");
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
        for word in [
            "checkpoint of step ",
            "No space left on device",
            "\nhint: ",
            "last published checkpoint is kept",
        ] {
            assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
        }
        // The full disk held only whole checkpoints, and the steps up to the failure.
        let full = RunFiles(disk.with_extension("full"));
        let saved = Checkpoints::new(full.path("checkpoints")).steps().unwrap();
        assert!((1..8).contains(&saved.len()), "{saved:?}");
        let unfinished = |name: &str| name.contains(".tmp") || name.contains(".trash");
        let names =
            full.path("checkpoints").read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        assert!(names.into_iter().all(|name| !unfinished(name.to_str().unwrap())), "{ended}");
        for step in saved {
            assert_eq!(full.tensors(step), reference.tensors(step));
        }
        RunFiles(disk.with_extension("resumed")).same_as(&reference, 8, "after the disk was full");
    }
}

#[test]
fn imports_do_not_overwrite_files() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("input.txt");
    std::fs::write(&text, "some text to import\n".repeat(10)).unwrap();
    let out = folder.path().join("out");
    let import = |more: &[&str]| {
        let mut command = program(["data", "import", "text"]);
        command.arg(&text).arg("--out").arg(&out).args(more);
        command
    };
    finish(&mut import(&[])).succeeded();
    refuses(&mut import(&[]), folder.path(), &["holds shards already", "train-00000.h5"]);
    let spare = folder.path().join("spare");
    copy(&out, &spare);
    let cases: [(&[&str], &[&str]); 2] =
        [(&["verify"], &["does not exist"]), (&["inspect"], &["does not exist"])];
    for (args, words) in cases {
        refuses(program(["data"]).args(args).arg(folder.path().join("none")), folder.path(), words);
    }
}

#[test]
fn benchmarks_of_gpus_require_one() {
    let folder = tempfile::tempdir().unwrap();
    let bench = |args: &[&str]| {
        let mut command = program(["bench", "gpu"]);
        // Hides the GPUs, if there are any.
        command.args(args).current_dir(folder.path()).env("CUDA_VISIBLE_DEVICES", "");
        command
    };
    for args in [&["--json"][..], &["--small", "--compute", "f32", "--device", "1"]] {
        refuses(&mut bench(args), folder.path(), &["CUDA driver", "\nhint: ", "GPU"]);
    }
    let mut two = mpirun(2);
    two.arg(hpctrain_testkit::program()).args(["bench", "gpu"]);
    refused(&finish(&mut two), &["bench gpu runs on one rank, but 2", "without mpirun"]);
}

#[test]
fn imports_of_rows() {
    let root = tempfile::tempdir().unwrap();
    let [table, out, nowhere] =
        ["table.csv", "out", "nowhere"].map(|name| root.path().join(name).display().to_string());
    let refused = |args: &[&str], words: &[&str]| {
        let mut command = program(["data", "import"].iter().chain(args));
        refuses(&mut command, root.path(), words);
    };
    refused(&["csv", &nowhere, "--target", "b", "--out", &out], &["nowhere"]);
    std::fs::write(&table, "a,b\n1,2\n3,4\n").unwrap();
    let words = ["every row would be kept for validation"];
    refused(&["csv", &table, "--target", "b", "--out", &out, "--val-every", "1"], &words);
    refused(
        &["idx", &table, &table, "--out", &out],
        &["table.csv: not an IDX file of bytes: it begins with"],
    );
}

#[test]
fn layer_list_models() {
    let root = tempfile::tempdir().unwrap();
    let model = ["model.kind=layers", "model.input=[4, 4, 1]", "data.path=nowhere"];
    for (setting, words) in [
        (
            "model.layers=[{kind='flatten'}, {kind='conv2d', filters=2, kernel=3}]",
            &["model.layers[1] (conv2d) gets 16, but expects an image"][..],
        ),
        ("model.layers=[{kind='dens', units=2}]", &["layer 0 of the list: unknown variant `dens`"]),
        (
            "model.layers=[{kind='dense', units=2}, {kind='flatten'}, {kind='dense', units=3}]",
            &["nowhere does not exist"],
        ),
    ] {
        let command = Run::new(Alone, root.path(), "x", &[&model[..], &[setting]].concat());
        refuses(&mut command.command(), root.path(), words);
    }
}

#[test]
fn invalid_servers_and_settings() {
    let root = tempfile::tempdir().unwrap();
    let refuse = |transport: Transport, servers: usize, settings: &[&str], words: &[&str]| {
        let run = Run::new(transport, root.path(), "x", settings);
        let mut command = run.command();
        if servers > 0 {
            command.args(["--servers", &servers.to_string()]);
        }
        refuses(&mut command, root.path(), words);
        assert!(!run.files().0.exists(), "{words:?}");
    };
    refuse(Simulate(2), 2, &[], &["--servers 2 of 2 ranks leaves none to train", "--ranks 3"]);
    refuse(Spawn(2), 2, &[], &["--servers 2 of 2 ranks leaves none to train", "start 3 ranks"]);
    refuse(
        Alone,
        0,
        &["parameter_server.staleness='none'"],
        &["parameter_server.staleness = \"none\", but the run has no servers"],
    );
    refuse(
        Simulate(2),
        0,
        &["batch.worker=4"],
        &["batch.worker = 4, but the run has no servers", "--servers N"],
    );
    refuse(
        Simulate(6),
        5,
        &["parameter_server.partition='fixed:1'"],
        &["5 servers, but parameter_server.partition = fixed:1 cuts", "4 ranges"],
    );
    refuse(
        Simulate(3),
        1,
        &["parameter_server.partition='few'"],
        &["\"few\" is not a partition such as"],
    );
    refuse(
        Simulate(3),
        1,
        &["parameter_server.staleness='some'"],
        &["\"some\" is neither a number of steps nor \"none\""],
    );
    refuse(
        Simulate(3),
        1,
        &["parallel.zero=1"],
        &["parallel.zero = 1, but parameter servers do not support it"],
    );
    refuse(
        Simulate(3),
        1,
        &["parallel.storage=central"],
        &["parallel.storage = central, but parameter servers"],
    );
    refuse(
        Simulate(3),
        1,
        &["model.place.tables=host"],
        &["model.place.tables = host is set, but parameter servers"],
    );
    refuse(
        Simulate(3),
        1,
        &["checkpoint.every=auto"],
        &["checkpoint.every = auto is set, but parameter servers"],
    );
    refuse(
        Spawn(3),
        1,
        &["parallel.pipeline=2"],
        &["parallel.pipeline is set, but parameter servers"],
    );
    refuse(
        Simulate(3),
        1,
        &["device.matmul_autotune=true"],
        &["device.matmul_autotune is set, but parameter servers"],
    );
    refuse(
        Simulate(3),
        1,
        &["optimizer.kind=lamb", "parameter_server.staleness=2"],
        &["norms of whole tensors"],
    );
    let traced = Run::new(Simulate(3), root.path(), "traced", &[]);
    let mut command = traced.command();
    command.args(["--servers", "1", "--trace"]).arg(root.path().join("nowhere/trace.json"));
    refuses(
        &mut command,
        root.path(),
        &["cannot write the trace", "nowhere/trace.json", "--trace"],
    );
    assert!(!traced.files().0.exists());
    // These processes get their ranges when the directory of the run exists already.
    let small = |name: &str, limit: &str, words: &[&str]| {
        let run = Run::new(Simulate(3), root.path(), name, &[&format!("run.memory_limit={limit}")]);
        refused(&finish(run.command().args(["--servers", "1"])), words);
    };
    small("server", "1KiB", &["a server needs", "but only 1.0 KiB is available", "more servers"]);
    small("worker", "10MiB", &["a worker needs", "(parameters", "batch.micro"]);
    refuse(
        Simulate(3),
        1,
        &["parameter_server.timeout=0"],
        &["parameter_server.timeout = 0", "at least 1"],
    );
    refuse(
        Simulate(3),
        1,
        &["parameter_server.connections=0"],
        &["parameter_server.connections = 0", "at least 1"],
    );
    refuse(
        Spawn(3),
        1,
        &["batch.worker=0", "parameter_server.staleness='none'"],
        &["batch.worker = 0"],
    );
    refuse(
        Simulate(3),
        1,
        &["parameter_server.address='a:b'"],
        &["parameter_server.address = \"a:b\" is not a host with a port"],
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("parameter_server.address='{}'", taken.local_addr().unwrap());
    let mut traced = Run::new(Simulate(3), root.path(), "x", &[]).command();
    refuses(
        traced.args(["--servers", "1", "--profile"]),
        root.path(),
        &["--profile is not supported with parameter servers"],
    );
    refuse(Simulate(3), 1, &[&address], &["cannot listen on 127.0.0.1:", "Address already in use"]);
}

#[test]
fn roles_require_their_variables() {
    let root = tempfile::tempdir().unwrap();
    let role = |vars: &[(&str, &str)], settings: &[&str]| {
        let mut command = program(["ps", "auto"]);
        command
            .args(settings.iter().flat_map(|setting| ["--set", setting]))
            .envs(vars.iter().copied());
        command
            .env_remove("RANK")
            .env_remove("WORLD_SIZE")
            .env_remove("TF_CONFIG")
            .envs(vars.iter().copied());
        command
    };
    let place = format!("run.root={}", root.path().display());
    refuses(&mut role(&[], &[&place]), root.path(), &["neither TF_CONFIG nor RANK and WORLD_SIZE"]);
    refuses(
        &mut role(&[("TF_CONFIG", "{]")], &[&place]),
        root.path(),
        &["TF_CONFIG: key must be a string at line 1 column 2"],
    );
    let whole = r#"{"cluster": {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1"]}, "task": {"type": "worker", "index": 0}}"#;
    refuses(&mut role(&[("TF_CONFIG", whole)], &[&place]), root.path(), &["run.name is not set"]);
    let mut nowhere =
        role(&[("TF_CONFIG", whole)], &[&place, "run.name=x", "parameter_server.timeout=1"]);
    refuses(
        &mut nowhere,
        root.path(),
        &["cannot read", "x/servers/coordinator", "hpctrain ps coordinator"],
    );
    let mut status = program(["ps", "status", "--run"]);
    refuses(
        status.arg(root.path().join("x")),
        root.path(),
        &["cannot read", "x/servers/coordinator"],
    );
}
