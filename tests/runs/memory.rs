//! Compares the memory estimate of the startup summary with the memory that processes use.

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::runs::Run;

/// A network that needs several times the memory of the program itself.
const BIG: [&str; 9] = [
    "model.layers=4",
    "model.width=256",
    "model.heads=4",
    "model.context=64",
    "batch.global=16",
    "run.steps=2",
    "eval.samples=32",
    "eval.batch=16",
    "run.threads=1",
];

/// Returns the estimate in MiB, from a line such as "memory       123.4 MiB per rank: …".
fn estimated_mib(stdout: &str) -> f64 {
    let line = stdout.lines().find(|line| line.starts_with("memory ")).unwrap();
    let (number, _) = line["memory ".len()..].trim().split_once(" MiB per rank: ").unwrap();
    number.parse().unwrap()
}

/// Maximum relative difference between estimate and peak.
const TOLERANCE: f64 = 0.1;

#[test]
fn the_startup_summary_estimates_the_memory_of_a_run() {
    let layouts: [(Transport, &str); 4] = [
        (Alone, "parallel.zero=0"),
        (Alone, "parallel.recompute=true"),
        (Mpirun(2), "parallel.zero=0"),
        (Mpirun(2), "parallel.zero=3"),
    ];
    let root = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (i, (transport, layout)) in layouts.into_iter().enumerate() {
        let run =
            Run::new(transport, root.path(), &format!("x-{i}"), &[&BIG[..], &[layout]].concat());
        let ended = run.ends().succeeded();
        let card: Value = serde_json::from_str(&run.files().text("run.json")).unwrap();
        let peak = card["peak_resident_bytes"].as_f64().unwrap() / (1 << 20) as f64;
        let estimate = estimated_mib(&ended.stdout);
        let line = ended.stdout.lines().find(|line| line.starts_with("memory ")).unwrap();
        println!(
            "{transport:?} {layout}: {estimate} MiB estimated, {peak:.1} MiB used\n  {line}\n  {}",
            card["peak_bytes"]
        );
        if (peak - estimate).abs() > TOLERANCE * estimate {
            wrong.push(format!(
                "{transport:?} {layout}: {estimate} MiB estimated, {peak:.1} MiB used"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The categories whose peaks follow from the layout of a stage. The others depend on the buffers
/// that are needed.
const OF_A_STAGE: [&str; 4] = ["parameters", "gradients", "optimizer", "activations"];

/// Returns the maximum MiB of outputs that wait for a slow later stage, with micro-batches of one
/// sample: a stage can run ahead by the number of later stages. The estimate counts one, for the
/// case that no stage is slow.
fn waiting_outputs(stage: usize, stages: usize) -> f64 {
    let context = 64;
    let width = 256;
    ((stages - 1 - stage) * context * width * size_of::<f32>()) as f64 / f64::from(1 << 20)
}

#[test]
fn the_memory_of_stages_is_as_estimated() {
    let root = tempfile::tempdir().unwrap();
    let mut cases = Vec::new();
    for zero in 0..4 {
        cases.push((zero, 2 + zero % 2 * 2, zero > 1, "1f1b"));
        cases.push((zero, 4 - zero % 2 * 2, zero < 2, "zero-bubble"));
    }
    for (i, (zero, pipeline, recompute, schedule)) in cases.into_iter().enumerate() {
        let layout = [
            format!("parallel.zero={zero}"),
            format!("parallel.pipeline={pipeline}"),
            format!("parallel.recompute={recompute}"),
            format!("parallel.schedule={schedule}"),
            // Training needs more than an evaluation.
            "eval.batch=1".into(),
        ];
        let layout: Vec<&str> = layout.iter().map(String::as_str).collect();
        let ranks = if zero == 0 { pipeline } else { 2 * pipeline };
        let name = format!("x-{i}");
        let run =
            Run::new(Transport::Simulate(ranks), root.path(), &name, &[&BIG[..], &layout].concat());
        run.ends().succeeded();
        let card: Value = serde_json::from_str(&run.files().text("run.json")).unwrap();
        let stages = card["stages"].as_array().unwrap();
        assert_eq!(stages.len(), pipeline);
        for (stage, memory) in stages.iter().enumerate() {
            for category in OF_A_STAGE {
                let [estimated, used] = ["estimated_bytes", "peak_bytes"]
                    .map(|which| memory[which][category].as_f64().unwrap() / f64::from(1 << 20));
                println!(
                    "{layout:?} stage {stage}, {category}: {estimated:.2} MiB estimated, {used:.2} MiB used"
                );
                let late =
                    if category == "activations" { waiting_outputs(stage, pipeline) } else { 0.0 };
                let is_near = (used - estimated).abs() <= 0.05 * estimated + late;
                assert!(
                    is_near,
                    "{layout:?} stage {stage}, {category}: {estimated:.2} MiB estimated, {used:.2} MiB used"
                );
            }
        }
    }
}

/// Tensor-parallel ranks have their share of the units, and of the activations of blocks.
#[test]
fn the_memory_of_tensor_parallel_ranks_is_as_estimated() {
    let root = tempfile::tempdir().unwrap();
    let cases = [
        "parallel.tensor=2",
        "parallel.tensor=2 parallel.sequence=true",
        "parallel.tensor=4 parallel.sequence=true",
        "parallel.tensor=4 parallel.recompute=true",
        "parallel.tensor=2 parallel.zero=3 parallel.sequence=true",
        "parallel.tensor=2 parallel.pipeline=2",
        "parallel.tensor=2 parallel.pipeline=2 parallel.sequence=true parallel.schedule=zero-bubble",
        "parallel.tensor=2 model.kind=llama model.kv_heads=4",
        "parallel.tensor=4 parallel.sequence=true model.kind=llama model.kv_heads=4",
        "parallel.virtual_tensor_ranks=4",
        "parallel.tensor=2 parallel.virtual_tensor_ranks=4",
        "model.vocabulary=2000 parallel.loss_chunk_tokens=100",
        "model.vocabulary=2000 parallel.loss_chunk_tokens=100 parallel.recompute=true eval.batch=16",
        "model.vocabulary=2000 parallel.loss_chunk_tokens=7 parallel.tensor=2 parallel.pipeline=2",
    ];
    let mut wrong = Vec::new();
    for (i, case) in cases.into_iter().enumerate() {
        let layout: Vec<&str> = case.split(' ').chain(["eval.batch=1"]).collect();
        let size = |axis: &str| {
            let key = format!("parallel.{axis}=");
            layout
                .iter()
                .find_map(|setting| setting.strip_prefix(&key))
                .map_or(1, |value| value.parse().unwrap())
        };
        let ranks: usize =
            size("tensor") * size("pipeline") * if case.contains("zero=3") { 2 } else { 1 };
        let run = Run::new(
            Transport::Simulate(ranks),
            root.path(),
            &format!("x-{i}"),
            &[&BIG[..], &layout].concat(),
        );
        wrong.extend(off_by_a_twentieth(&run, case));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns every category of every stage whose peak differs from the estimate by more than 5 %.
fn off_by_a_twentieth(run: &Run, case: &str) -> Vec<String> {
    run.ends().succeeded();
    let card: Value = serde_json::from_str(&run.files().text("run.json")).unwrap();
    let mut wrong = Vec::new();
    let stages = card["stages"].as_array().unwrap();
    for (stage, memory) in stages.iter().enumerate() {
        for category in OF_A_STAGE {
            let [estimated, used] = ["estimated_bytes", "peak_bytes"]
                .map(|which| memory[which][category].as_f64().unwrap() / f64::from(1 << 20));
            let line = format!(
                "{case} stage {stage}, {category}: {estimated:.2} MiB estimated, {used:.2} MiB used"
            );
            println!("{line}");
            let late =
                if category == "activations" { waiting_outputs(stage, stages.len()) } else { 0.0 };
            wrong.extend(((used - estimated).abs() > 0.05 * estimated + late).then_some(line));
        }
    }
    wrong
}

/// Local SGD needs memory for the sums of an average, the buffers of the outer step, and several
/// replicas on a rank.
#[test]
fn the_memory_of_local_sgd_is_as_estimated() {
    let root = tempfile::tempdir().unwrap();
    let cases = [
        (2, "local_sgd.outer_lr=1"),
        (1, "local_sgd.replicas=2"),
        (2, "local_sgd.replicas=8 local_sgd.outer_momentum=0.9"),
        (4, "parallel.zero=1 parallel.shard=2 local_sgd.outer_lr=0.7"),
        (2, "parallel.zero=2 parallel.shard=2 local_sgd.replicas=4"),
        (4, "parallel.zero=3 parallel.shard=2 local_sgd.replicas=4 local_sgd.outer_momentum=0.9"),
        (4, "parallel.pipeline=2 local_sgd.replicas=4"),
    ];
    let mut wrong = Vec::new();
    for (i, (ranks, case)) in cases.into_iter().enumerate() {
        let layout: Vec<&str> =
            case.split(' ').chain(["eval.batch=1", "local_sgd.sync_every=2"]).collect();
        let run = Run::new(
            Transport::Simulate(ranks),
            root.path(),
            &format!("x-{i}"),
            &[&BIG[..], &layout].concat(),
        );
        wrong.extend(off_by_a_twentieth(&run, case));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_memory_of_owners_is_as_estimated() {
    let root = tempfile::tempdir().unwrap();
    let mut wrong = Vec::new();
    for (ranks, case) in
        [(2, "parallel.owners=1"), (4, "parallel.owners=2 parallel.recompute=true")]
    {
        let layout: Vec<&str> =
            case.split(' ').chain(["eval.batch=1", "parallel.storage=central"]).collect();
        let name = format!("x-{ranks}");
        let run =
            Run::new(Transport::Simulate(ranks), root.path(), &name, &[&BIG[..], &layout].concat());
        wrong.extend(off_by_a_twentieth(&run, case));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn stages_are_split_to_fit() {
    let root = tempfile::tempdir().unwrap();
    // The first stage has the moments of a large embedding table, for which only the last one has
    // work.
    let wide = [
        "model.layers=8",
        "model.width=128",
        "model.vocabulary=6000",
        "parallel.pipeline=2",
        "batch.micro=1",
    ];
    let settings = [&wide[..], &["run.steps=2", "eval.samples=8", "run.threads=1"]].concat();
    let free = Run::new(Transport::Simulate(2), root.path(), "free", &settings).ends().succeeded();
    assert!(free.stdout.contains("stages of 7 + 3 blocks"), "{free}");
    let limit = format!("run.memory_limit={}MiB", estimated_mib(&free.stdout) as usize - 4);
    let run = Run::new(
        Transport::Simulate(2),
        root.path(),
        "limited",
        &[&settings[..], &[&limit]].concat(),
    );
    let limited = run.ends().succeeded();
    assert!(limited.stdout.contains("stages of 6 + 4 blocks"), "{limited}");
    let message =
        "the stages with the least work do not fit into memory: stages of [6, 4] blocks are used";
    assert!(limited.stderr.contains(message), "{limited}");
    // Configured stages are kept.
    let given = ["parallel.stages=[7,3]", &limit];
    let refused =
        Run::new(Transport::Simulate(2), root.path(), "given", &[&settings[..], &given].concat())
            .ends();
    assert_eq!(refused.code(), 2, "{refused}");
    assert!(refused.stderr.contains("more than run.memory_limit"), "{refused}");
}
