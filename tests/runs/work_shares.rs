//! Ranks of unequal speed get unequal numbers of virtual ranks, with the same bits.

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, json};

const SETTINGS: [&str; 2] = ["parallel.virtual_ranks=8", "model.dropout=0.1"];

#[test]
fn given_shares_have_the_bits_of_one_rank() {
    let root = tempfile::tempdir().unwrap();
    let one = Run::new(Alone, root.path(), "one", &SETTINGS).succeeds();
    for (name, transport, settings, counts) in [
        ("two", Mpirun(2), &["parallel.work_shares=[3, 1]"][..], "(6, 2 on the ranks)"),
        ("sharded", Mpirun(2), &["parallel.work_shares=[1, 7]", "parallel.zero=3"], "(1, 7 on"),
        ("three", Simulate(3), &["parallel.work_shares=[1, 2, 1]"], "(2, 4, 2 on the ranks)"),
    ] {
        let run = Run::new(transport, root.path(), name, &[&SETTINGS[..], settings].concat());
        let ended = run.ends().succeeded();
        assert!(ended.stdout.contains(counts), "{ended}");
        run.files().same_as(&one, 6, name);
    }
}

/// Owners of central storage may compute nothing, and the others hold parameters for a use only.
#[test]
fn owners_may_have_no_share() {
    let root = tempfile::tempdir().unwrap();
    let one = Run::new(Alone, root.path(), "one", &SETTINGS).succeeds();
    let central = "parallel.storage=central";
    for (name, transport, settings, words) in [
        (
            "two",
            Mpirun(2),
            &["parallel.work_shares=[0, 1]"][..],
            "central, on the first rank, which computes no gradients",
        ),
        (
            "three",
            Spawn(3),
            &["parallel.work_shares=[0, 2, 1]", "parallel.zero=3"],
            "(0, 6, 2 on the ranks)",
        ),
        (
            "four",
            Mpirun(4),
            &[
                "parallel.work_shares=[0, 0, 1, 1]",
                "parallel.owners=2",
                "memory_checkpoint.every=1",
            ],
            "on 2 owners, 2 of which compute no gradients",
        ),
        ("auto", Spawn(2), &["parallel.work_shares=auto"], "central, on the first rank"),
    ] {
        let run =
            Run::new(transport, root.path(), name, &[&SETTINGS[..], settings, &[central]].concat());
        let ended = run.ends().succeeded();
        assert!(ended.stdout.contains(words), "{ended}");
        run.files().same_as(&one, 6, name);
    }
    let again = Run::new(
        Spawn(3),
        root.path(),
        "three",
        &[&SETTINGS[..], &["parallel.work_shares=[0, 1, 4]", central, "run.steps=8"]].concat(),
    );
    again.resume("auto").succeeds();
}

/// A rank that computes longer because it has more virtual ranks is not slow.
#[test]
fn ranks_are_compared_per_virtual_rank() {
    let root = tempfile::tempdir().unwrap();
    let more = ["parallel.work_shares=[3, 1]", "log.straggler_window=2"];
    let run = Run::new(Spawn(2), root.path(), "two", &[&SETTINGS[..], &more].concat());
    let page = root.path().join("report.html");
    for (slowed, is_slow) in [("0:10,1:10", false), ("0:10,1:40", true)] {
        std::fs::remove_dir_all(&run.files().0).unwrap_or_default();
        let ended = finish(run.command().env("HPCTRAIN_SLOW_RANK", slowed)).succeeded();
        assert_eq!(ended.stderr.contains("rank 1 (host "), is_slow, "{ended}");
        assert!(!ended.stderr.contains("rank 0 (host "), "{ended}");
        let times = run.files().text("rank_times.jsonl");
        assert!(times.lines().all(|line| line.contains(r#""virtual_ranks":[6,2]"#)), "{times}");
        let mut report = program(["report", "--out", page.to_str().unwrap()]);
        finish(report.arg(&run.files().0)).succeeded();
        let text = std::fs::read_to_string(&page).unwrap();
        assert_eq!(text.matches("class=\"bar slow\"").count(), usize::from(is_slow));
        assert!(text.contains(", 6 virtual ranks") && text.contains("per virtual rank."));
    }
}

/// A rank that takes twice as long for a forward gets half of the virtual ranks.
#[test]
fn auto_gives_slow_ranks_less_work() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&SETTINGS[..], &["batch.global=24", "parallel.virtual_ranks=12"]].concat();
    let one = Run::new(Alone, root.path(), "one", &settings).succeeds();
    let settings = [&settings[..], &["parallel.work_shares=auto"]].concat();
    let run = Run::new(Spawn(2), root.path(), "two", &settings);
    // Both are slowed down, by far more than they compute, so other work on the machine matters
    // little.
    let ended = finish(run.command().env("HPCTRAIN_SLOW_RANK", "0:40,1:80")).succeeded();
    assert!(ended.stdout.contains("12 virtual ranks (8, 4 on the ranks)"), "{ended}");
    run.files().same_as(&one, 6, "two");
    let written = run.files().text("config.toml");
    assert!(written.contains("work_shares = [8.0, 4.0]"), "{written}");
    // One rank has nothing to divide.
    let alone = Run::new(Alone, root.path(), "alone", &settings).succeeds();
    alone.same_as(&one, 6, "alone");
    assert_eq!(json(&alone.path("END"))["status"], "finished");
}
