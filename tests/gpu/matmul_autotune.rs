//! Matmul autotuning (`device.matmul_autotune = true`) in the simulator, whose cuBLASLt proposes
//! several algorithms with different last bits and configurable times.

use std::path::{Path, PathBuf};
use std::process::Command;

use hpctrain::backend::cuda::{Cuda, Device, Precision};
use hpctrain::backend::{Backend, ChosenAlgorithm, MatmulKey, MemoryKind};
use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{Ended, finish};
use hpctrain_testkit::runs::{Run, RunFiles, copy, json};
use hpctrain_testkit::simulator::{Settings, is_on_gpu, under, with_simulator};

const STEPS: u64 = 4;

/// The number of matmuls per algorithm and shape in a measurement: two for warm-up, and five that
/// are timed.
const MEASURED: usize = 7;

const TIMED: &str = "device.matmul_autotune=true";

/// The last bits of sums change the trained parameters.
const F32: &str = "precision.dtype=f32";

/// One GPU that two ranks share.
const SHARED: [&str; 2] = ["device.ranks_per_gpu=2", "device.memory=0.4"];

fn run(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> Run {
    let ours = [
        "run.steps=4",
        "parallel.virtual_ranks=2",
        "eval.samples=8",
        "device.memory_limit=64MiB",
        "checkpoint.every=2",
    ];
    Run::new(transport, root, name, &[&ours[..], &["checkpoint.keep=5"], settings].concat())
}

fn simulated(run: &Run, sim: Settings) -> Command {
    let mut command = run.command();
    with_simulator(&mut command).envs(sim.iter().copied());
    command
}

#[track_caller]
fn trains(
    transport: Transport,
    root: &Path,
    name: &str,
    settings: &[&str],
    sim: Settings,
) -> (RunFiles, Ended) {
    let run = run(transport, root, name, settings);
    let ended = finish(&mut simulated(&run, sim)).succeeded();
    (run.files(), ended)
}

/// Returns the choices in a run's file by kind of device.
fn choices(files: &RunFiles) -> Vec<(String, Vec<Value>)> {
    let kinds = json(&files.path("matmuls.json"))["kinds"].clone();
    let of_kind =
        |(kind, chosen): (&String, &Value)| (kind.clone(), chosen.as_array().unwrap().clone());
    kinds.as_object().unwrap().iter().map(of_kind).collect()
}

/// Returns the ranks of all choices among cuBLASLt's proposals, for a single kind of device.
#[track_caller]
fn places(files: &RunFiles) -> Vec<u64> {
    let choices = choices(files);
    assert_eq!(choices.len(), 1, "{choices:?}");
    let places: Vec<u64> = choices[0].1.iter().map(|one| one["place"].as_u64().unwrap()).collect();
    assert!(places.len() > 8, "{places:?}");
    places
}

/// Returns the number of matmuls that an algorithm has computed, from the simulator's trace.
fn computed(ended: &Ended, algorithm: usize) -> usize {
    ended.stderr.matches(&format!("run   cublasLtMatmul, algorithm {algorithm}\n")).count()
}

/// Returns true if the ranks together have measured `count` matmuls.
fn says_measured(ended: &Ended, count: usize) -> bool {
    ended.stdout.contains(&format!(" ({count} measured, "))
        || ended.stderr.contains(&format!(" ({count} measured, "))
}

#[track_caller]
fn differ(one: &RunFiles, other: &RunFiles) {
    let one = one.numbers("metrics.jsonl", "loss");
    let other = other.numbers("metrics.jsonl", "loss");
    assert!(one.len() == other.len() && one != other, "{one:?}");
    let off = one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off < 2e-2, "{off}");
}

/// Returns a bf16 matmul with `m` rows, and operands with these alignments.
fn product(m: usize, alignments: [u32; 3]) -> MatmulKey {
    MatmulKey {
        sizes: [m, 24, 40],
        strides: [if m > 999 { 40 } else { m }, 40, 32],
        transposed: [m < 1000, true],
        adds: true,
        out_of_place: false,
        epilogue: 1,
        keeps: false,
        bytes: [2, 2, 4],
        tf32: false,
        alignments,
    }
}

/// Scratch operands have the same alignment as those of training: the simulator refuses a smaller
/// one, and a larger one would be a different matmul.
#[test]
fn a_product_is_measured_on_operands_of_its_own() {
    under(&[&[("CUDASIM_ALGOS", "3,2,1")]], || {
        let cuda = Cuda::new(&Device::open(0).unwrap(), 64 << 20, Precision::Bf16).unwrap();
        let device = cuda.matmul_algorithms().unwrap();
        let known = [product(48, [256; 3]), product(48, [16, 2, 64]), product(1024, [2, 128, 4])];
        let measured: Vec<ChosenAlgorithm> =
            known.iter().map(|one| device.measure(one).unwrap().unwrap()).collect();
        for (one, chosen) in known.iter().zip(&measured) {
            assert!(chosen.product == *one && device.accepts(chosen).unwrap());
            assert_eq!(device.heuristic(one).unwrap().unwrap().place, 0);
            if !is_on_gpu() {
                assert_eq!(chosen.place, 2);
            }
        }
        let mut strange = measured[0];
        strange.algorithm.0[5] = 77;
        assert!(is_on_gpu() || !device.accepts(&strange).unwrap());
        // Its operands do not fit into memory.
        let huge = device.measure(&product(1 << 20, [256; 3])).unwrap().unwrap();
        assert_eq!(huge.place, 0);
        // Its memory has been freed.
        assert_eq!(cuda.memory_stats().live(MemoryKind::Activations), 0);
        assert_eq!(device.seen(), []);
    });
}

/// An algorithm that is proposed and then refused is not a candidate.
#[test]
fn a_refused_proposal_is_left_out() {
    under(&[&[("CUDASIM_ALGOS", "3,1,2"), ("CUDASIM_FAIL", "algorithm1")]], || {
        let cuda = Cuda::new(&Device::open(0).unwrap(), 64 << 20, Precision::Bf16).unwrap();
        let chosen =
            cuda.matmul_algorithms().unwrap().measure(&product(48, [256; 3])).unwrap().unwrap();
        assert!(is_on_gpu() || chosen.place == 2, "{}", chosen.place);
    });
}

/// A matmul that adds another matrix than its result is measured with another matrix. The simulator
/// refuses to add to the result, so that it can measure no other matmul.
#[test]
fn a_residual_is_measured_outside_of_the_result() {
    under(&[&[("CUDASIM_ALGOS", "3,1"), ("CUDASIM_FAIL", "inplace")]], || {
        let cuda = Cuda::new(&Device::open(0).unwrap(), 64 << 20, Precision::Bf16).unwrap();
        let device = cuda.matmul_algorithms().unwrap();
        for (out_of_place, place) in [(true, 1), (false, 0)] {
            let kind = MatmulKey { out_of_place, ..product(48, [256; 3]) };
            let chosen = device.measure(&kind).unwrap().unwrap();
            assert!(is_on_gpu() || chosen.place == place, "{out_of_place}: {}", chosen.place);
        }
    });
}

/// Operands are used in turn, so that they have left the L2 cache, which has 4 MiB in the
/// simulator. If memory holds only one set, it is used alone.
#[test]
fn a_product_is_measured_on_several_sets_of_operands() {
    under(&[&[("CUDASIM_ALGOS", "2,1")]], || {
        let cuda = Cuda::new(&Device::open(0).unwrap(), 64 << 20, Precision::Bf16).unwrap();
        let device = cuda.matmul_algorithms().unwrap();
        let place = device.measure(&product(4096, [256; 3])).unwrap().unwrap().place;
        let peak = cuda.memory_stats().peak(MemoryKind::Activations);
        // Five others are larger than the cache: bf16 operands, a result and a bias in f32.
        let set = 2 * (4096 * 40 + 24 * 40) + 4 * (4096 * 32 + 24);
        assert!(is_on_gpu() || place == 1 && (6 * set..7 * set).contains(&peak), "{place}: {peak}");

        // A set of 18 MiB; half of the pool is workspace.
        let place = device.measure(&product(90_000, [256; 3])).unwrap().unwrap().place;
        assert!(is_on_gpu() || place == 1, "{place}");
        assert_eq!(cuda.memory_stats().live(MemoryKind::Activations), 0);
    });
}

#[test]
fn the_fastest_algorithm_is_found_and_trains() {
    let root = tempfile::tempdir().unwrap();
    let sim = |algorithms| {
        let settings =
            [("CUDASIM_STREAMS", "lazy"), ("CUDASIM_HOST_ACCESS", "0"), ("CUDASIM_TRACE", "1")];
        [&settings[..], &[("CUDASIM_ALGOS", algorithms)]].concat()
    };
    // Evaluations have other matmuls.
    let trains = |name, matmul, algorithms| {
        trains(Alone, root.path(), name, &[F32, "eval.batch=2", matmul], &sim(algorithms))
    };
    let (first, ended) = trains("first", "device.matmul_autotune=false", "3,2,1");
    let products = computed(&ended, 0);
    assert_eq!([1, 2].map(|algorithm| computed(&ended, algorithm)), [0, 0]);
    assert!(!first.path("matmuls.json").exists() && !ended.stderr.contains("matmuls  "), "{ended}");

    let (timed, ended) = trains("timed", TIMED, "3,2,1");
    let places = places(&timed);
    assert!(places.iter().all(|place| *place == 2), "{places:?}");
    let count = places.len();
    let expected = format!(
        "matmuls      {count} autotuned, {count} of them not cuBLASLt's first proposal ({count} measured, "
    );
    assert!(
        ended.stdout.contains(&expected) || ended.stderr.contains(&expected),
        "{expected}: {ended}"
    );
    let [guess, second, third] = [0, 1, 2].map(|algorithm| computed(&ended, algorithm));
    assert_eq!(second, MEASURED * count);
    // The heuristic's first algorithm computes the warm-up step, and evaluations with other sizes;
    // the fastest computes all training steps.
    let of_steps = third - MEASURED * count;
    let of_step = of_steps / STEPS as usize;
    assert_eq!(of_steps % STEPS as usize, 0);
    assert_eq!(guess + of_steps, products + of_step + MEASURED * count);
    differ(&timed, &first);

    // Small differences do not change the choice.
    let (noise, _) = trains("noise", TIMED, "1,0.985,0.99");
    assert_eq!(self::places(&noise), vec![0; count]);
    noise.same_as(&first, STEPS, "measured, and cuBLASLt's first algorithms taken");
}

/// With one proposal autotuning changes nothing, so the warm-up step must not change any state.
#[test]
fn a_rehearsed_step_changes_no_bit() {
    let root = tempfile::tempdir().unwrap();
    let rows: [(Transport, &str); 5] = [
        (
            Alone,
            "model.dropout=0.2 optimizer.ema=0.9 parallel.recompute=true batch.micro=2 precision.dtype=f32",
        ),
        (Alone, "parallel.zero=3 offload.optimizer=true offload.params=true run.sdc_check_every=2"),
        (Mpirun(2), "parallel.zero=3 model.dropout=0.1 optimizer.kind=lamb"),
        (Simulate(2), "local_sgd.sync_every=2 local_sgd.outer_momentum=0.5"),
        (Simulate(2), "parallel.pipeline=2 parallel.schedule=zero-bubble batch.micro=1"),
    ];
    for (number, (transport, settings)) in rows.into_iter().enumerate() {
        let words: Vec<&str> = settings.split(' ').chain(SHARED).collect();
        let with = |name: &str, matmul| {
            let all = [&words[..], &[matmul]].concat();
            trains(transport, root.path(), &format!("{number}-{name}"), &all, &[]).0
        };
        let timed = with("timed", TIMED);
        let first = with("first", "device.matmul_autotune=false");
        assert!(choices(&timed)[0].1.len() > 8 && !first.path("matmuls.json").exists());
        timed.same_as(&first, STEPS, settings);
    }
}

/// A run of four steps, and copies of it as of step two.
struct Stopped {
    root: tempfile::TempDir,
    whole: RunFiles,
}

impl Stopped {
    /// The second algorithm was measured as the fastest.
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let (whole, _) =
            trains(Alone, root.path(), "whole", &[TIMED, F32], &[("CUDASIM_ALGOS", "2,1")]);
        assert!(places(&whole).iter().all(|place| *place == 1));
        Self { root, whole }
    }

    fn copy(&self, name: &str) -> PathBuf {
        let copied = self.root.path().join(name);
        copy(&self.whole.0, &copied);
        std::fs::remove_dir_all(copied.join("checkpoints/step-00000004")).unwrap();
        copied
    }

    /// Resumes in a copy, where the algorithms have other times.
    #[track_caller]
    fn resumed(&self, name: &str, algorithms: &str) -> (RunFiles, Ended) {
        let run = run(Alone, self.root.path(), name, &[TIMED, F32]).resume("auto");
        let sim = [("CUDASIM_ALGOS", algorithms), ("CUDASIM_TRACE", "1")];
        let ended = finish(&mut simulated(&run, &sim)).succeeded();
        (run.files(), ended)
    }
}

#[test]
fn a_resumed_run_takes_what_was_measured_before() {
    let stopped = Stopped::new();
    stopped.copy("kept");
    let (kept, ended) = stopped.resumed("kept", "1,2");
    assert!(
        ended.stderr.contains("(measured before)") || ended.stdout.contains("(measured before)"),
        "{ended}"
    );
    assert_eq!(kept.text("matmuls.json"), stopped.whole.text("matmuls.json"));
    assert!(computed(&ended, 1) > 0 && !ended.stderr.contains("matmuls.json is"), "{ended}");
    kept.same_as(&stopped.whole, STEPS, "resumed");

    // A damaged file is ignored: the first algorithm is now measured as the fastest, which changes
    // bits.
    for name in ["cut", "changed"] {
        let path = stopped.copy(name).join("matmuls.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let changed = text.replace("\"place\":1", "\"place\":0");
        let damaged = if name == "cut" { &text[..text.len() / 2] } else { &changed };
        std::fs::write(&path, damaged).unwrap();
        let (files, ended) = stopped.resumed(name, "1,2");
        let warned = ended.stderr.matches("matmuls.json is damaged (").count();
        assert!(warned == 1 && ended.stderr.contains("matmuls are measured again"), "{ended}");
        let places = places(&files);
        assert!(places.iter().all(|place| *place == 0), "{places:?}");
        differ(&files, &stopped.whole);
        // The rewritten file is valid.
        std::fs::remove_dir_all(files.checkpoint(STEPS)).unwrap();
        let (again, ended) = stopped.resumed(name, "2,1");
        assert!(
            ended.stderr.contains("(measured before)")
                || ended.stdout.contains("(measured before)"),
            "{ended}"
        );
        assert!(self::places(&again) == places && computed(&ended, 1) == 0, "{ended}");
    }
}

/// cuBLASLt checks algorithms read from disk. An unknown one is replaced by its first proposal.
#[test]
fn algorithms_that_cublaslt_does_not_take_any_more_are_left() {
    let stopped = Stopped::new();
    let count = places(&stopped.whole).len();
    stopped.copy("other");
    let (other, ended) = stopped.resumed("other", "1");
    let expected = format!("cuBLASLt no longer accepts {count} of the algorithms in ");
    assert_eq!(ended.stderr.matches(&expected).count(), 1, "{ended}");
    assert_eq!(places(&other), vec![0; count]);
    assert_eq!(computed(&ended, 1), 0);
    differ(&other, &stopped.whole);
}

/// One rank of each kind of device measures, and all ranks with such a device use its choices.
#[test]
fn ranks_agree_on_algorithms() {
    const OURS: [&str; 3] = [TIMED, F32, "batch.micro=4"];
    let root = tempfile::tempdir().unwrap();
    let sim = [("CUDASIM_ALGOS", "2,2,1"), ("CUDASIM_TRACE", "1"), ("CUDASIM_HOST_ACCESS", "0")];
    let (one, ended) = trains(Alone, root.path(), "one", &OURS, &sim);
    let chosen = choices(&one);
    let count = places(&one).len();
    assert_eq!(computed(&ended, 1), MEASURED * count);
    for (name, transport, settings) in [
        ("processes", Mpirun(2), "comm.transport=host-staged parallel.zero=3"),
        ("threads", Simulate(2), "parallel.zero=0"),
        ("stages", Mpirun(2), "comm.transport=host-staged parallel.pipeline=2"),
    ] {
        let settings: Vec<&str> = settings.split(' ').chain(SHARED).chain(OURS).collect();
        let (two, ended) = trains(transport, root.path(), name, &settings, &sim);
        two.same_as(&one, STEPS, name);
        assert_eq!(choices(&two), chosen, "{name}");
        // Trace lines of several processes may be interleaved.
        assert!(says_measured(&ended, count), "{name}: {ended}");
    }
    // The simulator's devices have different names.
    let two = [&sim[..], &[("CUDASIM_DEVICES", "2")]].concat();
    let (kinds, ended) = trains(
        Mpirun(2),
        root.path(),
        "kinds",
        &[&["comm.transport=host-staged"], &OURS[..]].concat(),
        &two,
    );
    kinds.same_as(&one, STEPS, "two kinds of devices");
    let found = choices(&kinds);
    assert_eq!(found.iter().map(|(_, chosen)| chosen).collect::<Vec<_>>(), [&chosen[0].1; 2]);
    assert!(
        found[0].0.starts_with("CPU simulator 0, compute capability 9.0, cuBLASLt 13"),
        "{}",
        found[0].0
    );
    assert!(found[1].0.starts_with("CPU simulator 1"), "{}", found[1].0);
    assert!(says_measured(&ended, 2 * count), "{ended}");
}

/// The key has no effect on CPUs.
#[test]
fn cpus_have_no_choice() {
    let root = tempfile::tempdir().unwrap();
    let with = |name: &str, autotune: bool| {
        trains(
            Alone,
            root.path(),
            name,
            &["run.device=cpu", &format!("device.matmul_autotune={autotune}")],
            &[],
        )
        .0
    };
    let timed = with("timed", true);
    let first = with("heuristic", false);
    assert!(!timed.path("matmuls.json").exists());
    timed.same_as(&first, STEPS, "on the CPU");
}
