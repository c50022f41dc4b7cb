//! Limits of containers and users: a small `/dev/shm`, PID namespaces, nodes with other files, few
//! threads. Tests are skipped, with the reason, if this user may not create namespaces or become
//! another user.

use std::process::Command;

use crate::{lines, refused};
use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{Ended, finish, mpirun, program, test_name};
use hpctrain_testkit::runs::{Run, RunFiles};

/// A shell script that mounts a small `/dev/shm`, and runs its arguments.
const LITTLE_SHARED: &str = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec \"$@\"";

/// Returns whether this system permits a command such as `unshare`; prints a message if it does
/// not.
fn may(command: &[&str]) -> bool {
    let output = Command::new(command[0]).args(&command[1..]).output();
    let may = output.is_ok_and(|output| output.status.success());
    if !may {
        println!("SKIPPED: {}: this system refuses `{}`", test_name(), command.join(" "));
    }
    may
}

/// Returns the program and the arguments of a command.
fn words(command: &Command) -> Vec<String> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_str().unwrap().to_string()).collect()
}

/// Returns another command with the environment of `command`.
fn in_its_environment(command: &Command, program: &str, args: &[&str]) -> Command {
    let mut other = Command::new(program);
    other.args(args);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other
}

/// Runs a command with a `/dev/shm` of 64 KiB.
fn with_little_shared(command: &Command) -> Ended {
    let mut outer =
        in_its_environment(command, "unshare", &["--mount", "sh", "-c", LITTLE_SHARED, "mpirun"]);
    finish(outer.args(words(command)))
}

#[test]
fn jobs_run_without_room_in_dev_shm() {
    if !may(&["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"]) {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let settings = ["parallel.virtual_ranks=2"];
    let reference = Run::new(Simulate(2), root.path(), "reference", &settings).succeeds();
    let run = Run::new(Mpirun(2), root.path(), "little", &settings);
    let ended = with_little_shared(&run.command()).succeeded();
    assert!(ended.stdout.contains("shared memory inside a node"), "{ended}");
    run.files().same_as(&reference, 6, "little");

    let hpctrain = words(&program([] as [&str; 0])).remove(0);
    let mut doctor = mpirun(2);
    doctor.args([&hpctrain, "doctor", "--run-root"]).arg(root.path());
    let report = with_little_shared(&doctor);
    assert!(report.stdout.contains("64.0 KiB free: MPI and NCCL"), "{report}");
    assert!(report.stdout.contains("--shm-size"), "{report}");

    let mut eval = mpirun(2);
    eval.args([&hpctrain, "eval", "--checkpoint"]).arg(run.files().path("checkpoints/latest"));
    with_little_shared(&eval).succeeded();
}

/// Runs two ranks with the same arguments, each with its own options of `mpirun`; the second one is
/// started by the command `before`.
fn two_ranks(run: &Run, options: [&[&str]; 2], before: &[&str]) -> Ended {
    let one = words(&run.command());
    let mut command = in_its_environment(&mpirun(1), "mpirun", options[0]);
    command
        .args(["-np", "1"])
        .args(&one)
        .arg(":")
        .args(options[1])
        .args(["-np", "1"])
        .args(before)
        .args(&one);
    finish(&mut command)
}

/// The environment of one rank may differ from that of another.
#[test]
fn ranks_of_a_machine_agree_on_the_ranks_of_a_node() {
    let root = tempfile::tempdir().unwrap();
    let run = |name: &str| Run::new(Alone, root.path(), name, &["parallel.virtual_ranks=2"]);
    let ended =
        two_ranks(&run("agreed"), [&["-x", "HPCTRAIN_RANKS_PER_NODE=1"], &[]], &[]).succeeded();
    assert!(!ended.stdout.contains("shared memory inside a node"), "{ended}");
    let ended = two_ranks(&run("refused"), [&[], &["-x", "HPCTRAIN_RANKS_PER_NODE=none"]], &[]);
    assert_ne!(ended.code(), 0, "{ended}");
    assert!(
        ended.stderr.contains("HPCTRAIN_RANKS_PER_NODE=none is not a number of ranks"),
        "{ended}"
    );
}

#[test]
fn ranks_that_do_not_see_each_other_exchange_by_messages() {
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc"];
    if !may(&[&unshare[..], &["true"]].concat()) {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let reference =
        Run::new(Simulate(2), root.path(), "reference", &["parallel.virtual_ranks=2"]).succeeds();
    let run = Run::new(Alone, root.path(), "apart", &["parallel.virtual_ranks=2"]);
    // MPI itself would try to copy from the memory of a process that it cannot see.
    let no_copies = ["--mca", "btl_vader_single_copy_mechanism", "none"];
    let ended = two_ranks(&run, [&no_copies, &[]], &unshare).succeeded();
    assert!(!ended.stdout.contains("shared memory inside a node"), "{ended}");
    assert_eq!(
        ended.stderr.matches("the ranks of this node exchange by MPI messages").count(),
        1,
        "{ended}"
    );
    run.files().same_as(&reference, 6, "apart");
}

#[test]
fn a_node_with_other_data_of_the_same_size_is_noticed() {
    if !may(&["unshare", "--mount", "true"]) {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(400);
    let import = |name: &str, text: &str| {
        let path = root.path().join(format!("{name}.txt"));
        std::fs::write(&path, text).unwrap();
        let mut command = program(["data", "import", "text"]);
        command.arg(&path).args(["--tokenizer", "byte", "--out"]).arg(root.path().join(name));
        finish(&mut command).succeeded();
    };
    import("here", &text);
    import("same", &text);
    import("other", &text.replace("fox", "cat"));
    let path_of = |name: &str| root.path().join(name).display().to_string();
    let train = |there: &str| {
        let path = format!("data.path={}", path_of("here"));
        let run = Run::new(Alone, root.path(), there, &[&path, "parallel.virtual_ranks=2"]);
        // Each rank counts as a node.
        let bind = format!("mount --bind {} {} && exec \"$@\"", path_of(there), path_of("here"));
        let before = ["unshare", "--mount", "sh", "-c", &bind, "sh"];
        let alone = ["-x", "HPCTRAIN_RANKS_PER_NODE=1"];
        (two_ranks(&run, [&alone, &alone], &before), run.files())
    };
    train("same").0.succeeded();
    let (ended, files) = train("other");
    refused(
        &ended,
        &["has other content than on the node of rank 0", "copy the same files to every node"],
    );
    assert!(!files.path("metrics.jsonl").exists(), "{ended}");
}

/// A user that has no other processes.
const USER: &str = "54321";

#[test]
fn a_limit_on_threads_ends_no_run_at_its_first_checkpoint() {
    let user = format!("--reuid={USER}");
    let group = format!("--regid={USER}");
    let become_user = ["setpriv", &user, &group, "--clear-groups"];
    if !may(&[&become_user[..], &[&words(&program([] as [&str; 0]))[0], "--version"]].concat()) {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(root.path(), everyone).unwrap();
    let mut outcomes = [0, 0];
    let mut named = String::new();
    // The largest limits reach compute and communication threads.
    let table =
        (1..=8).map(|limit| (limit, Alone, 1)).chain((1..=8).map(|limit| (limit, Alone, 4)));
    for (number, (limit, transport, threads)) in
        table.chain((1..=8).map(|limit| (limit, Simulate(2), 1))).enumerate()
    {
        let name = format!("{number}-limit-{limit}");
        let threads = format!("run.threads={threads}");
        let run = Run::new(
            transport,
            root.path(),
            &name,
            &["checkpoint.every=2", "parallel.virtual_ranks=2", &threads],
        );
        let script = format!("ulimit -u {limit} && exec \"$@\"");
        let inner = run.command();
        let mut command = in_its_environment(&inner, "bash", &["-c", &script, "bash"]);
        command.env("XDG_CACHE_HOME", root.path().join("cache"));
        let ended = finish(command.args(become_user).args(words(&inner)));
        let files: RunFiles = run.files();
        if ended.code() == 0 {
            outcomes[0] += 1;
            assert!(files.checkpoint(6).exists(), "{ended}");
        } else {
            outcomes[1] += 1;
            refused(
                &ended,
                &["cannot start the thread", &format!("ulimit -u is {limit}"), "lower run.threads"],
            );
            assert_eq!(lines(&files.path("metrics.jsonl")), 0, "{ended}");
            named += &ended.stderr;
        }
    }
    for thread in ["compute-1", "comm-0", "rank-1"] {
        assert!(
            named.contains(&format!("cannot start the thread {thread}: ")),
            "{thread}: {named}"
        );
    }
    assert!(
        outcomes.iter().all(|count| *count > 0),
        "{outcomes:?} runs succeeded and were refused"
    );
}
