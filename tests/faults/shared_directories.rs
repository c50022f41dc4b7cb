//! Run directories prepared by other users, and directories that are shared on purpose.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, lchown, symlink};
use std::path::Path;

use hpctrain::config::Config;
use hpctrain::run_dir::{Resume, RunDirectory};

use crate::refused;
use hpctrain_testkit::launch::Transport::{Alone, Mpirun};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::Run;

/// Another user, and another group.
const OTHER: u32 = 12345;

/// The owner to which a file server maps files of root.
const SQUASHED: u32 = 54322;

const SETTINGS: [&str; 4] =
    ["run.steps=2", "checkpoint.every=1", "eval.every=1", "log.sample_tokens=4"];

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root makes files of another user");
    }
    is_root
}

fn run(root: &Path, more: &[&str]) -> Run {
    Run::new(Alone, root, "x", &[&SETTINGS[..], more].concat())
}

/// Returns the number of entries below a directory, without following links.
fn entries(path: &Path) -> usize {
    let count = |entry: fs::DirEntry| match entry.file_type().unwrap().is_dir() {
        true => 1 + entries(&entry.path()),
        false => 1,
    };
    fs::read_dir(path).unwrap().map(|entry| count(entry.unwrap())).sum()
}

#[test]
fn a_directory_of_another_user_is_refused_and_nothing_is_written_through_its_links() {
    if !is_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let shared = root.path().join("shared");
    let [victim, run_of_other] = [root.path().join("victim"), shared.join("x")];
    fs::create_dir_all(&run_of_other).unwrap();
    fs::set_permissions(&shared, Permissions::from_mode(0o1777)).unwrap();
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, run_of_other.join(".eval.lock")).unwrap();
    symlink(root.path().join("made"), run_of_other.join("config.toml")).unwrap();
    symlink(root.path(), run_of_other.join("logs")).unwrap();
    for path in [run_of_other.clone(), run_of_other.join(".eval.lock"), run_of_other.join("logs")] {
        lchown(path, Some(OTHER), Some(OTHER)).unwrap();
    }
    let before = (entries(root.path()), entries(&run_of_other));
    for run in [
        run(&shared, &[]),
        run(&shared, &[]).resume("auto"),
        Run { transport: Mpirun(2), ..run(&shared, &[]) },
    ] {
        refused(&run.ends(), &["x belongs to user 12345, not to you (user 0)", "run.group"]);
    }
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(!root.path().join("made").exists());
    assert_eq!((entries(root.path()), entries(&run_of_other)), before);
}

/// The directory of the run belongs to this user, but a link in it does not.
#[test]
fn a_link_of_another_user_is_not_followed() {
    if !is_root() {
        return;
    }
    for name in ["logs", "checkpoints"] {
        let root = tempfile::tempdir().unwrap();
        let [target, mine] = [root.path().join("target"), root.path().join("x")];
        fs::create_dir(&target).unwrap();
        fs::create_dir(&mine).unwrap();
        symlink(&target, mine.join(name)).unwrap();
        lchown(mine.join(name), Some(OTHER), Some(OTHER)).unwrap();
        refused(&run(root.path(), &[]).ends(), &[&format!("x/{name} is a link of user 12345")]);
        assert_eq!(entries(&target), 0, "{name}");
    }
}

#[test]
fn links_of_this_user_lead_where_they_should() {
    let root = tempfile::tempdir().unwrap();
    let [scratch, runs, checkpoints] =
        ["scratch", "runs", "checkpoints"].map(|name| root.path().join(name));
    for path in [&scratch, &runs, &checkpoints] {
        fs::create_dir(path).unwrap();
    }
    // The root, the run and its checkpoints are links.
    symlink(&runs, root.path().join("linked")).unwrap();
    symlink(&scratch, runs.join("x")).unwrap();
    symlink(&checkpoints, scratch.join("checkpoints")).unwrap();
    let linked = root.path().join("linked");
    run(&linked, &[]).succeeds();
    assert!(checkpoints.join("step-00000002").exists() && scratch.join("metrics.jsonl").exists());
    let more = run(&linked, &["run.steps=3"]).resume("auto").succeeds();
    assert_eq!(more.steps().len(), 3);
    finish(program(["eval", "--checkpoint"]).arg(linked.join("x"))).succeeded();
}

#[test]
fn a_directory_that_all_may_write_to_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("x");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    refused(&run(root.path(), &[]).ends(), &["x has mode 777", "chmod o-w"]);
    fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    run(root.path(), &[]).succeeds();
}

/// Prepares the run `x` in `root` with a thread whose files belong to [`SQUASHED`], as on a file
/// server that maps root to that owner; returns the error.
fn prepared_under_another_owner(root: &Path, resume: Resume) -> Option<String> {
    let mut config = Config::default();
    config.run.root = root.display().to_string();
    config.run.name = Some("x".into());
    let prepare = move || {
        // SAFETY: the call changes only this thread, which owns no memory that depends on it.
        unsafe { libc::setfsuid(SQUASHED) };
        RunDirectory::prepare(&config, "x", &resume).map(drop).err().map(|e| e.to_string())
    };
    std::thread::spawn(prepare).join().unwrap()
}

#[test]
fn a_directory_of_the_owner_that_a_server_gives_this_users_files_is_this_users() {
    if !is_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    chown(root.path(), Some(SQUASHED), Some(SQUASHED)).unwrap();
    let path = root.path().join("x");
    assert_eq!(prepared_under_another_owner(root.path(), Resume::No), None);
    // Without such a server, the directory belongs to another user.
    fs::create_dir_all(&path).unwrap();
    chown(&path, Some(SQUASHED), Some(SQUASHED)).unwrap();
    refused(&run(root.path(), &[]).ends(), &["x belongs to user 54322, not to you (user 0)"]);
    assert_eq!(prepared_under_another_owner(root.path(), Resume::Auto), None);
    // With one, a directory of a third user is refused, even if files can be created there.
    chown(&path, Some(OTHER), Some(OTHER)).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
    let before = entries(&path);
    let error = prepared_under_another_owner(root.path(), Resume::Auto).unwrap();
    assert!(error.contains("x belongs to user 12345, not to you (user 0)"), "{error}");
    assert_eq!(entries(&path), before);
}

#[test]
fn a_group_shares_a_run() {
    if !is_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("x");
    fs::create_dir(&path).unwrap();
    chown(&path, Some(OTHER), Some(OTHER)).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o2775)).unwrap();
    refused(&run(root.path(), &[]).ends(), &["belongs to user 12345"]);
    refused(
        &run(root.path(), &["run.group='no-such-group'"]).ends(),
        &["run.group = no-such-group"],
    );
    let shared = ["run.group='12345'"];
    run(root.path(), &shared).succeeds();
    run(root.path(), &[&shared[..], &["run.steps=3"]].concat()).resume("auto").succeeds();
}
