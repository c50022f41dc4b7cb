//! The banner's promise of memory against what the process took.

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::runs::Run;

/// A network whose own memory is several times that of the program.
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

/// The promise in MiB: the banner's line is "memory       123.4 MiB a rank: …".
fn promised(stdout: &str) -> f64 {
    let line = stdout.lines().find(|line| line.starts_with("memory ")).unwrap();
    let (number, _) = line["memory ".len()..].trim().split_once(" MiB a rank: ").unwrap();
    number.parse().unwrap()
}

/// Promise and peak may differ by this part of the promise.
const TOLERANCE: f64 = 0.1;

#[test]
fn the_banner_promises_what_a_run_takes() {
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
        let promise = promised(&ended.stdout);
        let line = ended.stdout.lines().find(|line| line.starts_with("memory ")).unwrap();
        println!(
            "{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken\n  {line}\n  {}",
            card["peak_bytes"]
        );
        if (peak - promise).abs() > TOLERANCE * promise {
            wrong.push(format!(
                "{transport:?} {layout}: {promise} MiB promised, {peak:.1} MiB taken"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Categories whose peaks follow from the layout of a stage; of the rest, buffers are counted as
/// they are needed.
const OF_A_STAGE: [&str; 4] = ["parameters", "gradients", "optimizer", "activations"];

/// MiB of outputs that wait here at most until a late stage behind takes them, where a micro-batch
/// is one sample: a stage runs ahead by the number of stages behind it. The estimate counts one, as
/// where no stage is late.
fn not_taken(stage: usize, stages: usize) -> f64 {
    let context = 64;
    let width = 256;
    ((stages - 1 - stage) * context * width * size_of::<f32>()) as f64 / f64::from(1 << 20)
}

#[test]
fn stages_take_what_is_said_of_them() {
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
            // Training takes more than an evaluation.
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
                let [said, taken] = ["estimated_bytes", "peak_bytes"]
                    .map(|which| memory[which][category].as_f64().unwrap() / f64::from(1 << 20));
                println!(
                    "{layout:?} stage {stage}, {category}: {said:.2} MiB said, {taken:.2} MiB taken"
                );
                let late = if category == "activations" { not_taken(stage, pipeline) } else { 0.0 };
                let is_near = (taken - said).abs() <= 0.05 * said + late;
                assert!(
                    is_near,
                    "{layout:?} stage {stage}, {category}: {said:.2} MiB said, {taken:.2} MiB taken"
                );
            }
        }
    }
}

/// Ranks that share blocks have their part of the units, and of the activations of blocks.
#[test]
fn slices_take_what_is_said_of_them() {
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
        let of = |axis: &str| {
            let key = format!("parallel.{axis}=");
            layout
                .iter()
                .find_map(|setting| setting.strip_prefix(&key))
                .map_or(1, |value| value.parse().unwrap())
        };
        let ranks: usize =
            of("tensor") * of("pipeline") * if case.contains("zero=3") { 2 } else { 1 };
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

/// Every category of every stage in which a run takes a twentieth more or less than it says.
fn off_by_a_twentieth(run: &Run, case: &str) -> Vec<String> {
    run.ends().succeeded();
    let card: Value = serde_json::from_str(&run.files().text("run.json")).unwrap();
    let mut wrong = Vec::new();
    let stages = card["stages"].as_array().unwrap();
    for (stage, memory) in stages.iter().enumerate() {
        for category in OF_A_STAGE {
            let [said, taken] = ["estimated_bytes", "peak_bytes"]
                .map(|which| memory[which][category].as_f64().unwrap() / f64::from(1 << 20));
            let told = format!(
                "{case} stage {stage}, {category}: {said:.2} MiB said, {taken:.2} MiB taken"
            );
            println!("{told}");
            let late = if category == "activations" { not_taken(stage, stages.len()) } else { 0.0 };
            wrong.extend(((taken - said).abs() > 0.05 * said + late).then_some(told));
        }
    }
    wrong
}

/// Replicas that train apart: the sums of an average, the outer step's buffers, and several on a
/// rank.
#[test]
fn replicas_that_train_apart_take_what_is_said_of_them() {
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
fn owners_take_what_is_said_of_them() {
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
fn stages_are_cut_to_fit() {
    let root = tempfile::tempdir().unwrap();
    // The first stage has the moments of a large table, which costs the last one work.
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
    let limit = format!("run.memory_limit={}MiB", promised(&free.stdout) as usize - 4);
    let run = Run::new(
        Transport::Simulate(2),
        root.path(),
        "limited",
        &[&settings[..], &[&limit]].concat(),
    );
    let limited = run.ends().succeeded();
    assert!(limited.stdout.contains("stages of 6 + 4 blocks"), "{limited}");
    let told = "the stages with the least work do not fit into memory: blocks are cut into [6, 4]";
    assert!(limited.stderr.contains(told), "{limited}");
    // A cut that was asked for stays.
    let given = ["parallel.stages=[7,3]", &limit];
    let refused =
        Run::new(Transport::Simulate(2), root.path(), "given", &[&settings[..], &given].concat())
            .ends();
    assert_eq!(refused.code(), 2, "{refused}");
    assert!(refused.stderr.contains("more than run.memory_limit"), "{refused}");
}
