//! `hpctrain verify`: layouts that are equal, differences, and settings that it refuses.

use std::path::Path;

use hpctrain_testkit::launch::{Ended, finish, program};

/// Settings of a network whose steps take a millisecond and change the weights from the first on.
const TINY: [&str; 9] = [
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=16",
    "model.dropout=0.1",
    "batch.global=8",
    "lr_schedule.warmup=2",
    "optimizer.lr=0.01",
    "run.seed=7",
];

/// Verifies the tiny network with more settings and arguments, in an empty directory that must stay
/// empty.
#[track_caller]
fn verify(settings: &[&str], args: &[&str]) -> Ended {
    verify_only(&[&TINY[..], settings].concat(), args)
}

/// Verifies the network of these settings.
#[track_caller]
fn verify_only(settings: &[&str], args: &[&str]) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program(["verify"]);
    command.args(settings.iter().flat_map(|setting| ["--set", setting])).args(args);
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    let ended = finish(command.current_dir(folder.path()));
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "a verification leaves no files");
    ended
}

/// Returns the lines of the output that contain `word`.
fn lines<'a>(ended: &'a Ended, word: &str) -> Vec<&'a str> {
    ended.stdout.lines().filter(|line| line.contains(word)).collect()
}

#[test]
fn every_layout_gives_the_same_bits() {
    let ended = verify(&["parallel.virtual_ranks=8"], &["--steps", "5"]).succeeded();
    assert_eq!(ended.stderr, "");
    let table = lines(&ended, "equal       equal       equal");
    assert_eq!(table.len(), 25, "{ended}");
    for (ranks, layout, zero) in
        [(1, "1 × 1 × 1 × 1", 0), (8, "1 × 1 × 8 × 1", 3), (8, "1 × 4 × 2 × 1", 1)]
    {
        let row = format!("{ranks:>5}  {layout:<35}  {zero:>4}  ");
        assert!(table.iter().any(|line| line.starts_with(&row)), "{row}: {ended}");
    }
    assert!(
        ended.stdout.contains("expected     the same bits: parallel.virtual_ranks = 8"),
        "{ended}"
    );
    assert!(ended.stdout.ends_with("\n25 rows, 5 steps: 0 differing bits\n"), "{ended}");
}

/// Chunks of the chunked cross-entropy are rows of a micro-batch, which all layouts have in common.
#[test]
fn chunked_cross_entropy_gives_the_same_bits() {
    let settings = [
        "parallel.virtual_ranks=4",
        "batch.global=16",
        "parallel.loss_chunk_tokens=5",
        "parallel.virtual_tensor_ranks=2",
    ];
    let args = [
        "--pipeline",
        "1,2",
        "--tensor",
        "1,2",
        "--ranks",
        "1,2,4",
        "--zero",
        "0,1,3",
        "--steps",
        "4",
    ];
    let ended = verify(&settings, &args).succeeded();
    assert!(lines(&ended, "equal       equal       equal").len() > 12, "{ended}");
    assert!(ended.stdout.ends_with("\n26 rows, 4 skipped, 4 steps: 0 differing bits\n"), "{ended}");
}

#[test]
fn processes_of_mpirun_give_the_same_bits() {
    let ended =
        verify(&["parallel.virtual_ranks=8"], &["--mpi", "--ranks", "2,4", "--zero", "0,3"])
            .succeeded();
    assert!(ended.stdout.contains("processes of mpirun"), "{ended}");
    assert!(ended.stdout.ends_with("\n5 rows, 20 steps: 0 differing bits\n"), "{ended}");
}

/// All rows use the micro-batches of the deepest pipeline. Rows whose ranks the pipeline does not
/// divide are skipped and counted.
#[test]
fn stages_of_a_pipeline_give_the_same_bits() {
    let args = ["--pipeline", "1,2,4", "--ranks", "1,4,8", "--zero", "0,1,3", "--steps", "4"];
    let ended = verify(&["parallel.virtual_ranks=4", "batch.global=16"], &args).succeeded();
    assert_eq!(lines(&ended, "equal       equal       equal").len(), 22, "{ended}");
    assert!(
        lines(&ended, &format!("    8  {:<35}     3  ", "4 × 1 × 2 × 1")).len() == 1,
        "{ended}"
    );
    assert_eq!(lines(&ended, "skipped: pipeline(").len(), 2, "{ended}");
    assert_eq!(
        lines(
            &ended,
            "skipped: parallel.virtual_ranks = 4 leaves some of the 8 data-parallel ranks"
        )
        .len(),
        7,
        "{ended}"
    );
    let args = ["--pipeline", "2", "--ranks", "2,4", "--zero", "0,2", "--mpi", "--steps", "4"];
    let ended = verify(&["parallel.virtual_ranks=4", "batch.global=16"], &args).succeeded();
    assert!(ended.stdout.ends_with("\n4 rows, 4 steps: 0 differing bits\n"), "{ended}");
}

/// Gradients that are reduced after each micro-batch have the bits of those that are reduced once per
/// step, on any ranks; only stages without a rank are skipped.
#[test]
fn both_reductions_give_the_same_bits() {
    let settings = ["parallel.virtual_ranks=64", "batch.global=64", "batch.micro=1"];
    let small = ["model.layers=4", "model.width=32", "model.heads=2", "model.context=16"];
    let args = ["--reduce", "step,micro", "--zero", "1,2,3", "--ranks", "1,2,4,8"];
    let args = [&args[..], &["--pipeline", "1,2", "--steps", "2"]].concat();
    let ended = verify(&[&settings[..], &small].concat(), &args).succeeded();
    assert!(ended.stdout.ends_with("\n66 rows, 1 skipped, 2 steps: 0 differing bits\n"), "{ended}");
    assert_eq!(lines(&ended, "  micro   equal       equal       equal").len(), 33, "{ended}");
    // Without a number of virtual ranks, one rank has more of them than its reference.
    let args = ["--reduce", "micro", "--zero", "1", "--ranks", "1", "--steps", "2"];
    let ended = verify(&["batch.micro=2"], &args).succeeded();
    assert_eq!(lines(&ended, "  micro   close       close       close").len(), 1, "{ended}");
}

/// Two virtual tensor ranks on one rank or two, with pipeline and ZeRO stages.
#[test]
fn tensor_parallelism_gives_the_same_bits() {
    let sliced = ["parallel.virtual_ranks=4", "parallel.virtual_tensor_ranks=2", "batch.global=16"];
    let args =
        ["--pipeline", "1,2", "--tensor", "1,2", "--ranks", "2,8", "--zero", "0,3", "--steps", "4"];
    for more in [&[][..], &["parallel.sequence=true", "model.kind=llama", "model.hidden=25"]] {
        let ended = verify(&[&sliced[..], more].concat(), &args).succeeded();
        assert!(
            ended.stdout.contains("and virtual_tensor_ranks = 2 fix the order of additions"),
            "{ended}"
        );
        assert!(ended.stdout.ends_with(" 4 steps: 0 differing bits\n"), "{ended}");
        assert_eq!(
            lines(&ended, &format!("    8  {:<35}     3  auto    equal", "2 × 1 × 2 × 2")).len(),
            1,
            "{ended}"
        );
    }
    let args = ["--tensor", "2", "--ranks", "2,4", "--zero", "0,3", "--mpi", "--steps", "4"];
    let ended = verify(&sliced, &args).succeeded();
    assert!(ended.stdout.ends_with("\n4 rows, 4 steps: 0 differing bits\n"), "{ended}");
    // By default there are as many virtual tensor ranks as ranks, and sums depend on the ranks.
    let ended =
        verify(&["parallel.virtual_ranks=4"], &["--tensor", "2", "--ranks", "2", "--zero", "0"])
            .succeeded();
    assert!(
        ended.stdout.contains("parallel.virtual_tensor_ranks fixes their order too"),
        "{ended}"
    );
    assert_eq!(lines(&ended, "close       close       close").len(), 1, "{ended}");
}

/// Returns the settings of every case of pipelines of one, two and four stages, each on one to
/// eight ranks, with every ZeRO stage: each network, with and without recomputation, in each
/// schedule.
fn pipelines(pictures: &Path) -> Vec<Vec<String>> {
    let text = |model: &[&str]| -> Vec<String> {
        let tiny = TINY.iter().filter(|setting| !setting.starts_with("run.seed"));
        tiny.chain(["model.layers=3"].iter())
            .chain(model)
            .map(|setting| setting.to_string())
            .collect()
    };
    let llama = ["model.kind=llama", "model.kv_heads=1", "model.hidden=24"];
    let of_layers = [
        "model.kind=layers",
        "model.input=[7, 6, 1]",
        "model.layers=[{kind='conv2d', filters=4, kernel=3}, {kind='relu'}, {kind='group_norm', groups=2}, \
         {kind='flatten'}, {kind='dropout', rate=0.2}, {kind='dense', units=8}, {kind='tanh'}, {kind='dense', units=4}]",
        "optimizer.lr=0.01",
    ];
    let of_layers = of_layers
        .map(String::from)
        .into_iter()
        .chain([format!("data.path={}", pictures.display())]);
    let networks = [
        text(&[]),
        text(&[&llama[..], &["model.tied=true"]].concat()),
        text(&[&llama[..], &["model.tied=false"]].concat()),
        of_layers.collect(),
    ];
    let common = ["parallel.virtual_ranks=8", "batch.global=32", "batch.micro=1"].map(String::from);
    let mut cases = Vec::new();
    for (i, network) in networks.into_iter().enumerate() {
        for recompute in [false, true] {
            // Layer-list models do not support deferred wgrad.
            for schedule in if i < 3 { &["1f1b", "zero-bubble"][..] } else { &["1f1b"] } {
                let layout = [
                    format!("parallel.recompute={recompute}"),
                    format!("parallel.schedule={schedule}"),
                ];
                cases.push([&network[..], &common, &layout].concat());
            }
        }
    }
    cases
}

fn stages_of_every_network_give_the_same_bits(take: impl Fn(usize) -> bool) {
    let folder = tempfile::tempdir().unwrap();
    crate::networks::data(folder.path());
    let cases = pipelines(&folder.path().join("pictures"));
    assert_eq!(cases.len(), 14);
    for (i, case) in cases.into_iter().enumerate().filter(|(i, _)| take(*i)) {
        let case: Vec<&str> = case.iter().map(String::as_str).collect();
        let args =
            ["--pipeline", "1,2,4", "--ranks", "1,2,4,8", "--zero", "0,1,2,3", "--steps", "3"];
        let ended = verify_only(&case, &args).succeeded();
        println!("case {i}, {case:?}\n{ended}");
        // One rank cannot have two stages, and so on.
        assert_eq!(lines(&ended, "skipped: pipeline(").len(), 3, "{case:?}: {ended}");
        assert!(
            ended.stdout.ends_with("\n48 rows, 3 skipped, 3 steps: 0 differing bits\n"),
            "{case:?}: {ended}"
        );
    }
}

#[test]
fn stages_of_some_networks_give_the_same_bits() {
    stages_of_every_network_give_the_same_bits(|case| case % 5 == 1);
}

/// Only `scripts/test full` runs this.
#[test]
#[ignore = "672 rows take minutes"]
fn stages_of_all_networks_give_the_same_bits() {
    stages_of_every_network_give_the_same_bits(|_| true);
}

/// Four virtual tensor ranks, or two if there are two KV heads, on one, two and four ranks, with
/// pipeline stages and replicas or shards: for each network, with and without sequence parallelism
/// and recomputation.
fn tensor_parallelism_of_networks_gives_the_same_bits(width: usize, take: impl Fn(usize) -> bool) {
    let llama = ["model.kind=llama", "model.kv_heads=4"];
    let grouped = ["model.kind=llama", "model.kv_heads=2", "model.tied=true"];
    let width = format!("model.width={width}");
    let common =
        [&width, "model.heads=4", "parallel.virtual_ranks=2", "batch.global=8", "batch.micro=2"];
    let mut cases = Vec::new();
    for (network, virtual_ranks) in [(&["model.bias=true"][..], 4usize), (&llama, 4), (&grouped, 2)]
    {
        for (sequence, recompute) in [(false, false), (true, true), (true, false), (false, true)] {
            cases.push((network, virtual_ranks, sequence, recompute));
        }
    }
    for (_, (network, virtual_ranks, sequence, recompute)) in
        cases.into_iter().enumerate().filter(|(i, _)| take(*i))
    {
        let layout = [
            format!("parallel.virtual_tensor_ranks={virtual_ranks}"),
            format!("parallel.sequence={sequence}"),
            format!("parallel.recompute={recompute}"),
        ];
        let layout: Vec<&str> = layout.iter().map(String::as_str).collect();
        let args = [
            "--pipeline",
            "1,2",
            "--tensor",
            "1,2,4",
            "--ranks",
            "1,2,4,8,16",
            "--zero",
            "0,1,2,3",
            "--steps",
            "3",
        ];
        let ended = verify(&[&common[..], network, &layout].concat(), &args).succeeded();
        println!("{network:?}, {layout:?}\n{ended}");
        // One and two pipeline stages of one, two and four tensor-parallel ranks, with one or two
        // replicas or shards, in four ZeRO stages.
        let rows = 2 * (virtual_ranks.ilog2() as usize + 1) * 2 * 4;
        assert_eq!(lines(&ended, "equal       equal       equal").len(), rows, "{ended}");
        assert!(ended.stdout.contains(&format!("\n{rows} rows, ")), "{ended}");
        assert!(ended.stdout.ends_with(" skipped, 3 steps: 0 differing bits\n"), "{ended}");
    }
}

#[test]
fn tensor_parallelism_of_some_networks_gives_the_same_bits() {
    tensor_parallelism_of_networks_gives_the_same_bits(32, |case| case == 5);
}

/// Only `scripts/test full` runs this.
#[test]
#[ignore = "512 rows take minutes"]
fn tensor_parallelism_of_all_networks_gives_the_same_bits() {
    tensor_parallelism_of_networks_gives_the_same_bits(256, |_| true);
}

/// The ring algorithm adds in a different order.
#[test]
fn a_difference_is_named() {
    for more in [&["--ranks", "4", "--zero", "0"][..], &["--ranks", "4", "--zero", "0", "--mpi"]] {
        let ended = verify(&["parallel.virtual_ranks=8", "comm.algorithm=ring"], more);
        assert_eq!(ended.code(), 1, "{ended}");
        assert_eq!(lines(&ended, "DIFFER      DIFFER      DIFFER").len(), 1, "{ended}");
        let said = lines(&ended, "first difference at step 1: ");
        let [said] = said[..] else { panic!("{ended}") };
        for words in [
            "norm is ",
            "unit embedding, tensor wte.weight, element ",
            " of 2080 is ",
            " on one rank (",
        ] {
            assert!(said.contains(words), "{words:?} is missing: {ended}");
        }
        // The message has both values, which differ.
        let values = said.split(" of 2080 is ").nth(1).unwrap();
        let (here, rest) = values.split_once(" here, ").unwrap();
        let there = rest.split_once(" on one rank").unwrap().0;
        let [here, there] = [here, there].map(|value| value.parse::<f32>().unwrap());
        assert!(
            here != there && (here - there).abs() < 1e-6 * there.abs().max(1e-2),
            "{here} and {there}"
        );
        assert!(ended.stdout.ends_with("\n1 row, 20 steps: 1 row differs\n"), "{ended}");
    }
}

#[test]
fn without_virtual_ranks_results_are_close() {
    let ended = verify(&[], &["--ranks", "2,3", "--zero", "0,2"]).succeeded();
    assert!(
        ended.stdout.contains("expected     close results: without parallel.virtual_ranks"),
        "{ended}"
    );
    assert!(
        ended.stdout.contains("bounds       in the first 6 steps: loss within 1e-5, norm and "),
        "{ended}"
    );
    assert_eq!(lines(&ended, "close       close       close").len(), 2, "{ended}");
    let skipped = lines(&ended, "  skipped: batch.global = 8 does not divide into 3 virtual ranks");
    assert_eq!(skipped.len(), 2, "{ended}");
    assert!(
        ended
            .stdout
            .ends_with("\n2 rows, 2 skipped, 6 steps: all agree, 2 of them within bounds\n"),
        "{ended}"
    );
    // Any number of ranks, and replicas of three virtual ranks, add in the tree of one rank, unless
    // another order is allowed.
    let twelve = ["parallel.virtual_ranks=12", "batch.global=12", "optimizer.kind=sgd"];
    let ended = verify(&twelve, &["--ranks", "1,5,6", "--zero", "1"]).succeeded();
    assert_eq!(lines(&ended, "equal       equal       equal").len(), 5, "{ended}");
    let any_order = [&twelve[..], &["comm.deterministic=false", "comm.algorithm=halving-doubling"]];
    let ended = verify(&any_order.concat(), &["--ranks", "1,6", "--zero", "1"]).succeeded();
    assert_eq!(lines(&ended, "equal       equal       equal").len(), 3, "{ended}");
    assert_eq!(lines(&ended, "close       close       close").len(), 1, "{ended}");
}

#[test]
fn what_cannot_be_verified_is_refused() {
    let cases: [(&[&str], &[&str], &[&str]); 5] = [
        (&["run.stps=5"], &[], &["unknown key `stps`"]),
        (
            &["parallel.virtual_ranks=3"],
            &[],
            &["batch.global = 8 does not divide into 3 virtual ranks"],
        ),
        (&[], &["--ranks", "3"], &["no row of the matrix can run", "--ranks"]),
        (&["comm.algorithm=vendor"], &[], &["comm.algorithm = vendor requires MPI", "--mpi"]),
        (
            &["parallel.virtual_tensor_ranks=3"],
            &[],
            &["parallel.virtual_tensor_ranks = 3 does not divide model.heads = 2"],
        ),
    ];
    for (settings, args, words) in cases {
        let ended = verify(settings, args);
        assert_eq!(ended.code(), 2, "{ended}");
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
        assert_eq!(ended.stderr.matches("\nhint: ").count(), 1, "{ended}");
        words
            .iter()
            .for_each(|word| assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}"));
    }
    let ended = finish(program(["verify", "--mpi"]).env("PATH", "/nonexistent"));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("--mpi needs mpirun") && ended.stderr.contains("hint: put "),
        "{ended}"
    );
    for args in [["--zero", "4"], ["--ranks", "0"], ["--steps", "0"]] {
        assert_eq!(verify(&[], &args).code(), 2, "{args:?}");
    }
}
