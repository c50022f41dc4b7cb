//! Compares the bytes of parameters, gradients and optimizer state per rank as measured, by
//! formula, and in docs/memory.md; and those of gradients over several micro-batches.

use std::fmt::Write as _;
use std::path::Path;

use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::{Backend as _, MemoryKind};
use hpctrain::engine::on_threads;
use hpctrain::layout::UnitLayout;
use hpctrain::mesh::Mesh;
use hpctrain::nn::Network;
use hpctrain::nn::gpt::Gpt;
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::{ControlFlags, Hyper, ReduceAfter, Zero};

use hpctrain_testkit::{Cut, engine, micro};

/// A small network of many blocks, like the networks that are worth sharding.
const GPT: Gpt =
    Gpt { layers: 12, heads: 2, width: 64, context: 8, vocabulary: 64, bias: true, dropout: 0.0 };
const RULE: UpdateRule = UpdateRule::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8 };
const STAGES: [Zero; 4] = [Zero::Zero, Zero::One, Zero::Two, Zero::Three];
const RANKS: [usize; 4] = [1, 2, 4, 8];

/// Number of blocks whose parameters ZeRO 3 prefetches: the default of `parallel.prefetch`.
const GATHERED_AHEAD: usize = 1;

/// Maximum relative difference between measured and computed bytes.
const TOLERANCE: f64 = 0.02;

/// Returns the sum of the three categories' peaks after some steps, with one virtual rank per rank:
/// the largest of all ranks.
fn measured(ranks: usize, zero: Zero) -> usize {
    let kinds = [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Optimizer];
    peaks(ranks, zero, Cut { virtual_ranks: ranks, ..Cut::WHOLE }, &kinds)
}

/// Returns the sum of some categories' peaks after some steps, the largest of all ranks.
fn peaks(ranks: usize, zero: Zero, cut: Cut, kinds: &[MemoryKind]) -> usize {
    let (shard, replica) = if zero == Zero::Zero { (1, ranks) } else { (ranks, 1) };
    let mesh = Mesh { pipeline: 1, replica, shard, tensor: 1 };
    let peaks = on_threads(ranks, |comm| {
        let mut engine =
            engine(comm, &Network::Gpt(GPT), mesh, zero, RULE, cut, (GPT.context * ranks) as u64);
        let backend = engine.model.backend.clone();
        let ids = vec![1; GPT.context];
        for step in 0..3 {
            engine.gradients(
                step,
                || Ok(micro(&backend, &ids, &ids, GPT.context, comm.rank() as u64)),
                ControlFlags::empty,
            )?;
            engine.model.sharded.update(Hyper {
                lr: 1e-3,
                weight_decay: 0.0,
                step: step + 1,
                grad_scale: 1.0,
            })?;
        }
        Ok(kinds.iter().map(|&what| backend.memory_stats().peak(what)).sum::<usize>())
    });
    peaks.unwrap().into_iter().max().unwrap()
}

/// Returns the same by the formula in the documentation.
fn computed(ranks: usize, zero: Zero) -> f64 {
    let blocks = GPT.blocks::<Cpu>();
    let padded =
        blocks.iter().map(|block| UnitLayout::new(block.name(), block.tensors(), ranks).padded);
    let padded: Vec<f64> = padded.map(|len| len as f64).collect();
    let psi = padded.iter().sum::<f64>();
    let table = padded[0];
    let block = padded[1];
    let n = ranks as f64;
    // A single rank never frees its memory.
    let zero = if ranks == 1 { Zero::Zero } else { zero };
    // The head's gradient of the tied table waits for the embedding's.
    let tied = (GPT.vocabulary * GPT.width) as f64;
    // The gradient of one block is computed while that of another is reduced.
    let gradients = 2.0 * block - (block + table) / n;
    let parameters = (1 + GATHERED_AHEAD) as f64 * block;
    4.0 * tied
        + match zero {
            Zero::Zero => 16.0 * psi,
            Zero::One => 8.0 * psi + 8.0 * psi / n,
            Zero::Two => 4.0 * psi + 12.0 * psi / n + 4.0 * gradients,
            Zero::Three => 16.0 * psi / n + 4.0 * gradients + 4.0 * parameters,
        }
}

/// The numbers of ranks and of micro-batches on each for which gradients are accumulated.
const ACCUMULATED: [(usize, usize); 4] = [(4, 8), (8, 8), (16, 8), (16, 2)];

/// Maximum relative difference between measured and computed bytes of gradients: some buffers are
/// reused for smaller ones.
const TOLERANCE_OF_GRADIENTS: f64 = 0.05;

/// The ways to accumulate gradients over micro-batches.
#[derive(Clone, Copy)]
enum Accumulation {
    /// In one virtual rank per rank.
    OneVirtualRank,
    /// In a virtual rank for each micro-batch, reduced after the step.
    Step,
    /// The same, reduced after each.
    Micro,
}

/// Returns the peak of gradients by the formula in the documentation.
fn gradients(ranks: usize, micros: usize, way: Accumulation) -> f64 {
    let blocks = GPT.blocks::<Cpu>();
    let virtual_ranks = if let Accumulation::OneVirtualRank = way { ranks } else { ranks * micros };
    let padded = blocks
        .iter()
        .map(|block| UnitLayout::new(block.name(), block.tensors(), virtual_ranks).padded as f64);
    let padded: Vec<f64> = padded.collect();
    let psi = padded.iter().sum::<f64>();
    let block = padded[1];
    let n = ranks as f64;
    let levels = f64::from(micros.ilog2());
    let tied = (GPT.vocabulary * GPT.width) as f64;
    let elements = match way {
        // The first reduced part is there beside all full gradients.
        Accumulation::OneVirtualRank => psi + block / n,
        Accumulation::Step => levels * psi + block + block / n,
        Accumulation::Micro => levels * psi / n + 2.0 * block + block / n,
    };
    4.0 * (elements + tied)
}

/// A table of the page, between two comments.
const BEGIN: &str = "<!-- measured by tests/runs/memory_table.rs -->\n";
const BEGIN_ACCUMULATED: &str = "<!-- gradients, measured by tests/runs/memory_table.rs -->\n";
const END: &str = "<!-- end -->\n";

/// Compares a table with that of the page, or writes it there.
fn assert_documented(begin: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/memory.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(begin).unwrap();
    let (there, after) = rest.split_once(END).unwrap();
    if std::env::var("UPDATE").is_ok_and(|update| update == "1") {
        std::fs::write(&path, format!("{before}{begin}{table}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(
        there, table,
        "docs/memory.md is out of date; write it: UPDATE=1 cargo test --test runs memory_table -- --test-threads=1"
    );
}

#[test]
fn accumulated_gradients_follow_the_formula() {
    let blocks = GPT.blocks::<Cpu>();
    let mut table = String::from(
        "| ranks × micro-batches | ZeRO | one virtual rank per rank | a virtual rank per micro-batch, `step` | `micro` |\n\
         |---|---|---|---|---|\n",
    );
    let mut wrong = Vec::new();
    for ((ranks, micros), zero) in
        ACCUMULATED.into_iter().flat_map(|shape| [Zero::Two, Zero::Three].map(|zero| (shape, zero)))
    {
        let psi: usize = blocks
            .iter()
            .map(|block| UnitLayout::new(block.name(), block.tensors(), ranks * micros).padded)
            .sum();
        write!(table, "| {ranks} × {micros} | {} |", u8::from(zero)).unwrap();
        for way in [Accumulation::OneVirtualRank, Accumulation::Step, Accumulation::Micro] {
            let cut = match way {
                Accumulation::OneVirtualRank => {
                    Cut { virtual_ranks: ranks, micros_per_virtual_rank: micros, ..Cut::WHOLE }
                }
                Accumulation::Step => Cut { virtual_ranks: ranks * micros, ..Cut::WHOLE },
                Accumulation::Micro => Cut {
                    virtual_ranks: ranks * micros,
                    reduce_after: ReduceAfter::MicroBatch,
                    ..Cut::WHOLE
                },
            };
            let have = peaks(ranks, zero, cut, &[MemoryKind::Gradients]) as f64;
            let want = gradients(ranks, micros, way);
            let of_full = |bytes: f64| bytes / (4.0 * psi as f64);
            if (have - want).abs() > TOLERANCE_OF_GRADIENTS * want {
                wrong.push(format!(
                    "{ranks} ranks × {micros} {zero:?}: {:.3} Ψ, by formula {:.3} Ψ",
                    of_full(have),
                    of_full(want)
                ));
            }
            write!(table, " {:.2} ({:.2}) |", of_full(have), of_full(want)).unwrap();
        }
        table.push('\n');
    }
    println!("{table}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_documented(BEGIN_ACCUMULATED, &table);
}

#[test]
fn memory_follows_the_formula() {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let mut table =
        String::from("| ranks | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |\n|---|---|---|---|---|\n");
    let mut wrong = Vec::new();
    for ranks in RANKS {
        write!(table, "| {ranks} |").unwrap();
        for zero in STAGES {
            let have = measured(ranks, zero) as f64;
            let want = computed(ranks, zero);
            if (have - want).abs() > TOLERANCE * want {
                wrong.push(format!(
                    "{ranks} ranks {zero:?}: {:.3} MiB, by formula {:.3} MiB",
                    mib(have),
                    mib(want)
                ));
            }
            write!(table, " {:.2} ({:.2}) |", mib(have), mib(want)).unwrap();
        }
        table.push('\n');
    }
    println!("{table}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_documented(BEGIN, &table);
}
