//! Malicious checkpoints: they name files elsewhere, block readers, overflow sizes, or contain
//! control characters for terminals.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, mknodat};
use serde_json::{Value, json};

use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{Ended, finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, copy};

/// Trains a run with one checkpoint, at step 2.
fn run(to: &Path) -> RunFiles {
    let _ = std::fs::remove_dir_all(to.join("x"));
    Run::new(Alone, to, "x", &["run.steps=2"]).copied()
}

/// Changes the manifest in `dir`, and updates its checksum.
fn change(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    let text = manifest.to_string();
    let seal = format!("{:08x}  manifest.json\n", crc32fast::hash(text.as_bytes()));
    std::fs::write(path, text).unwrap();
    std::fs::write(dir.join("manifest.crc32"), seal).unwrap();
}

/// Renames the only file of a manifest.
fn rename(manifest: &mut Value, name: &str) {
    let entry = manifest["files"].as_object_mut().unwrap().remove("rank-00000.h5").unwrap();
    manifest["files"][name] = entry;
    for (_, tensor) in manifest["tensors"].as_object_mut().unwrap() {
        tensor["pieces"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .for_each(|piece| piece["file"] = json!(name));
    }
}

fn verify(files: &RunFiles) -> Ended {
    finish(program(["checkpoint", "verify"]).arg(files.checkpoint(2)))
}

#[track_caller]
fn refused(ended: &Ended, words: &str) {
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stdout.contains(words) && ended.stderr.contains("files are damaged\nhint: "),
        "{words}: {ended}"
    );
}

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, 0o600.into(), 0).unwrap();
}

#[test]
fn manifests_name_regular_files_beside_them() {
    let root = tempfile::tempdir().unwrap();
    // There is a file under each of these names.
    let elsewhere = root.path().join("elsewhere.h5");
    for name in [
        "../../../elsewhere.h5",
        elsewhere.to_str().unwrap(),
        "./rank-00000.h5",
        "..",
        "a/../rank-00000.h5",
    ] {
        let files = run(root.path());
        std::fs::copy(files.checkpoint(2).join("rank-00000.h5"), &elsewhere).unwrap();
        change(&files.checkpoint(2), |manifest| rename(manifest, name));
        refused(
            &verify(&files),
            &format!("malformed manifest: {name:?} is not the name of a file beside it"),
        );
        // A run cannot be resumed from it either.
        let resumed = Run::new(Alone, root.path(), "x", &["run.steps=3"]).resume("auto").ends();
        assert_eq!(resumed.code(), 2, "{resumed}");
        assert!(resumed.stderr.contains("is not the name of a file beside it"), "{resumed}");
    }
    for name in ["rank-00000.h5", "manifest.json", "manifest.crc32"] {
        for is_pipe in [true, false] {
            let files = run(root.path());
            let path: PathBuf = files.checkpoint(2).join(name);
            std::fs::remove_file(&path).unwrap();
            if is_pipe {
                pipe(&path)
            } else {
                std::os::unix::fs::symlink("/dev/zero", &path).unwrap()
            }
            refused(&verify(&files), "it is a pipe, a socket or a device");
        }
    }
    let files = run(root.path());
    change(&files.checkpoint(2), |_| ());
    assert_eq!(verify(&files).code(), 0);
}

#[test]
fn sizes_in_manifests_do_not_overflow() {
    let root = tempfile::tempdir().unwrap();
    type Change<'a> = &'a dyn Fn(&mut Value);
    let changes: [(Change<'_>, &str); 4] = [
        (
            &|manifest| manifest["files"]["a"] = json!({"bytes": u64::MAX, "rest_crc32": 0}),
            "its files have more bytes than any file system",
        ),
        (
            &|manifest| {
                manifest["tensors"]["head.norm.weight"]["shape"] = json!([1u64 << 40, 1u64 << 40])
            },
            "",
        ),
        (
            &|manifest| {
                manifest["tensors"]["head.norm.weight"]["pieces"][0]["len"] = json!(u64::MAX)
            },
            "",
        ),
        (
            &|manifest| {
                manifest["tensors"]["head.norm.weight"]["pieces"][0]["parts"][0]["offset"] =
                    json!(u64::MAX)
            },
            "",
        ),
    ];
    for (number, (edit, words)) in changes.into_iter().enumerate() {
        let files = run(root.path());
        change(&files.checkpoint(2), |manifest| {
            let first = manifest["tensors"].as_object().unwrap().keys().next().unwrap().clone();
            // Any tensor may be changed.
            let tensor = manifest["tensors"].as_object_mut().unwrap().remove(&first).unwrap();
            manifest["tensors"]["head.norm.weight"] = tensor;
            edit(manifest);
        });
        refused(&verify(&files), &format!("malformed manifest: {words}"));
        let listed = finish(program(["checkpoint", "list"]).arg(&files.0));
        assert!(listed.code() == 0 && listed.stdout.contains("damaged: "), "{number}: {listed}");
    }
}

#[test]
fn texts_of_checkpoints_are_escaped_on_terminals() {
    const TITLE: &str = "\x1b]0;owned\x07\u{9b}31m";
    let root = tempfile::tempdir().unwrap();
    let files = run(root.path());
    change(&files.checkpoint(2), |manifest| {
        manifest["id"] = json!(format!("job{TITLE}\nfake: line"));
        manifest["origin"]["hosts"] = json!([TITLE]);
        manifest["origin"]["mpi"] = json!(TITLE);
    });
    for command in ["list", "inspect"] {
        let ended = finish(program(["checkpoint", command]).arg(&files.0));
        let printed = format!("{}{}", ended.stdout, ended.stderr);
        assert!(!printed.chars().any(|c| c.is_control() && c != '\n'), "{printed:?}");
        assert!(
            printed.contains("job\\u001b]0;owned\\u0007\\u009b31m\\u000afake: line"),
            "{printed}"
        );
        assert_eq!(ended.code(), 0, "{ended}");
    }
}

#[test]
fn checkpoints_have_one_name_for_each_step() {
    let root = tempfile::tempdir().unwrap();
    let files = run(root.path());
    for name in [
        "step-7",
        "step-+7",
        "step-+0000007",
        "step-0x000007",
        "step--0000007",
        "step-00000007 ",
        "step-٠٠٠٠٠٠٠٧",
    ] {
        copy(&files.checkpoint(2), &files.path("checkpoints").join(name));
    }
    let listed = finish(program(["checkpoint", "list"]).arg(&files.0));
    assert_eq!(listed.stdout.lines().count(), 2, "{listed}");
    let resumed = Run::new(Alone, root.path(), "x", &["run.steps=3"]).resume("auto").succeeds();
    assert_eq!(resumed.steps().len(), 3);
}
