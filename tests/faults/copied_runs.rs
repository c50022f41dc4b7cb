//! Runs copied by a tool that follows links, so that `latest` and `best` are directories with
//! copies of checkpoints.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::refused;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, json};

const SETTINGS: [&str; 4] =
    ["checkpoint.every=2", "checkpoint.keep=9", "eval.every=2", "checkpoint.io_retry_seconds=600"];

fn run(root: &Path, name: &str, steps: u64) -> Run {
    Run::new(Alone, root, name, &[&SETTINGS[..], &[&format!("run.steps={steps}")]].concat())
}

/// Runs four steps, and returns a copy made by a tool that follows links.
fn copied(root: &Path) -> RunFiles {
    let original = run(root, "a", 4).succeeds();
    let copy = root.join("b");
    assert!(Command::new("cp").arg("-rL").args([&original.0, &copy]).status().unwrap().success());
    RunFiles(copy)
}

fn entries(files: &RunFiles) -> Vec<String> {
    let entries = files.path("checkpoints").read_dir().unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".leases");
    names.sort();
    names
}

#[test]
fn a_run_copied_with_links_followed_can_be_resumed() {
    let root = tempfile::tempdir().unwrap();
    let files = copied(root.path());
    assert!(!files.path("checkpoints/latest").is_symlink());
    let ended = run(root.path(), "b", 6).resume("auto").ends().succeeded();
    assert!(ended.stderr.contains("a tool that follows links has copied the run"), "{ended}");
    assert_eq!(
        std::fs::read_link(files.path("checkpoints/latest")).unwrap(),
        PathBuf::from("step-00000006")
    );
    assert!(files.path("checkpoints/best").is_symlink());
    assert_eq!(
        entries(&files),
        ["best", "latest", "step-00000002", "step-00000004", "step-00000006"]
    );
    assert_eq!(json(&files.path("END"))["status"], "finished");
}

/// A directory that is not a copy of an existing checkpoint is refused before training, and nothing
/// is removed.
#[test]
fn another_directory_under_the_name_of_a_link_is_refused() {
    for name in ["latest", "best"] {
        let root = tempfile::tempdir().unwrap();
        let files = copied(root.path());
        let mine = files.path("checkpoints").join(name);
        std::fs::remove_dir_all(&mine).unwrap();
        std::fs::create_dir(&mine).unwrap();
        std::fs::write(mine.join("notes"), "mine").unwrap();
        let ended = run(root.path(), "b", 6).resume("auto").ends();
        refused(&ended, &[&format!("checkpoints/{name} is a directory"), "rm -r"]);
        assert!(mine.join("notes").exists() && !files.checkpoint(6).exists());
    }
}

/// A directory `latest` that appeared beside a newer checkpoint does not make readers take an older
/// one.
#[test]
fn readers_take_the_newest_checkpoint_where_latest_is_a_directory() {
    let root = tempfile::tempdir().unwrap();
    let files = copied(root.path());
    let newer = run(root.path(), "c", 6).succeeds();
    hpctrain_testkit::runs::copy(&newer.checkpoint(6), &files.checkpoint(6));
    for path in [files.0.clone(), files.path("checkpoints/latest")] {
        let ended = finish(program(["checkpoint", "inspect", "--json"]).arg(&path)).succeeded();
        let found: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(found["step"], 6, "{ended}");
        assert!(ended.stderr.contains("latest is a directory, not a link"), "{ended}");
    }
    let ended = finish(program(["eval", "--checkpoint"]).arg(files.path("checkpoints/best")));
    refused(&ended, &["best is a directory", "rm -r"]);
}
