//! Layouts across hosts give the same bits as one rank.

use crate::long;
use hpctrain_testkit::hosts::{Hosts, halves};
use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::layouts::{EQUAL_LAYOUTS, LayoutCase, give_the_same_bits};
use hpctrain_testkit::runs::{Run, RunFiles};

/// The number of steps of a run.
const STEPS: u64 = 6;

/// The layouts of [`EQUAL_LAYOUTS`] that are tried without `HPCTRAIN_TEST_HOSTS`: one for each kind of
/// communication.
const CHOSEN: [(usize, &str); 11] = [
    (4, "parallel.zero=0"),
    (4, "parallel.zero=1"),
    (4, "parallel.zero=3 parallel.shard=2 parallel.replica=2"),
    (4, "comm.algorithm=reduce-to-one parallel.zero=2"),
    (4, "comm.algorithm=hierarchical parallel.zero=3 parallel.replica=2"),
    (2, "comm.algorithm=hierarchical"),
    (4, "parallel.pipeline=2 parallel.zero=1"),
    (4, "parallel.pipeline=2 parallel.schedule=zero-bubble parallel.zero=3"),
    (4, "parallel.tensor=2 parallel.zero=3 parallel.recompute=true"),
    (4, "parallel.tensor=2 parallel.sequence=true parallel.pipeline=2"),
    (
        4,
        "parallel.storage=central parallel.owners=2 parallel.recompute=true comm.algorithm=reduce-to-one",
    ),
];

fn is_tried(LayoutCase(_, transport, settings): &LayoutCase) -> bool {
    let Mpirun(ranks @ (2 | 4)) = *transport else { return false };
    long() || CHOSEN.contains(&(ranks, settings))
}

/// Runs on the hosts of `ranks`, or without hosts if alone.
fn run(hosts: &Hosts, ranks: &str, transport: Transport, run: &Run) -> RunFiles {
    let mut command = Run { transport: Alone, ..run.clone() }.command();
    if transport != Alone {
        command = hosts.across(ranks, &command);
    }
    finish(&mut command).succeeded();
    run.files()
}

#[test]
fn two_hosts_give_the_bits_of_one_rank() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let rows: Vec<_> = EQUAL_LAYOUTS.iter().filter(|row| is_tried(row)).collect();
    assert!(rows.len() >= CHOSEN.len(), "{} layouts are in the table", rows.len());
    give_the_same_bits(
        rows.into_iter().map(|row| (row, vec![])),
        STEPS,
        |transport, settings, name| {
            let ranks = match transport {
                Mpirun(ranks) => halves(ranks),
                _ => String::new(),
            };
            run(
                &hosts,
                &ranks,
                transport,
                &Run { settings, ..Run::new(transport, root.path(), name, &[]) },
            )
        },
    );
}

#[test]
fn hosts_with_unequal_ranks_give_the_bits_of_one_rank() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let settings = |more: &'static str| {
        ["parallel.virtual_ranks=4", "batch.micro=1"]
            .into_iter()
            .chain(more.split(' '))
            .collect::<Vec<_>>()
    };
    let reference =
        Run::new(Alone, root.path(), "reference", &settings("parallel.zero=0")).succeeds();
    for (number, (ranks, more)) in [
        ("h0:1,h1:3", "parallel.zero=0"),
        ("h0:3,h1:1", "parallel.zero=3"),
        ("h0:1,h1:3", "parallel.zero=1 comm.algorithm=reduce-to-one"),
        ("h0:3,h1:1", "parallel.zero=1 parallel.pipeline=2"),
    ]
    .into_iter()
    .enumerate()
    {
        let one = Run::new(Mpirun(4), root.path(), &format!("x{number}"), &settings(more));
        run(&hosts, ranks, Mpirun(4), &one).same_as(&reference, STEPS, &format!("{ranks}, {more}"));
    }
    // Sums within a host come first, so the order of additions differs.
    let one =
        Run::new(Mpirun(4), root.path(), "hierarchical", &settings("comm.algorithm=hierarchical"));
    let files = run(&hosts, "h0:1,h1:3", Mpirun(4), &one);
    for (loss, wanted) in files
        .numbers("metrics.jsonl", "loss")
        .iter()
        .zip(reference.numbers("metrics.jsonl", "loss"))
    {
        assert!((loss - wanted).abs() <= 1e-6 * wanted, "{loss} {wanted}");
    }
}

#[test]
fn local_sgd_on_two_hosts_gives_the_bits_of_one_rank() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let local_sgd = ["local_sgd.sync_every=2", "local_sgd.replicas=4", "parallel.virtual_ranks=8"];
    let reference = Run::new(Alone, root.path(), "reference", &local_sgd).succeeds();
    let one = Run::new(Mpirun(4), root.path(), "x", &local_sgd);
    run(&hosts, "h0:2,h1:2", Mpirun(4), &one).same_as(&reference, STEPS, "local SGD");
}
