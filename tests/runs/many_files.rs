//! Checkpoints and data of more files than a process may open.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{Ended, finish, inherits_nothing, program};
use hpctrain_testkit::runs::{Run, json as read};

/// Number of files of a checkpoint.
const FILES: usize = 2000;
/// Number of files that a process may open.
const LIMIT: usize = 256;

/// Runs a command with a limit of open files that it cannot raise.
fn limited(command: &Command) -> Ended {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -n {LIMIT} && exec \"$0\" \"$@\"")]);
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    finish(inherits_nothing(&mut shell))
}

/// Writes the checkpoint in `from` as one of [`FILES`] files, as if written by that many ranks.
fn scattered(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    let mut manifest: Value = read(&from.join("manifest.json"));
    let elements = |entry: &Value| -> usize {
        entry["pieces"]
            .as_array()
            .unwrap()
            .iter()
            .map(|piece| piece["len"].as_u64().unwrap() as usize)
            .sum()
    };
    let all: usize = manifest["tensors"].as_object().unwrap().values().map(elements).sum();
    let chunk = (all / FILES).max(1);
    let mut files = serde_json::Map::new();
    for entry in manifest["tensors"].as_object_mut().unwrap().values_mut() {
        let mut pieces = Vec::new();
        for piece in entry["pieces"].as_array().unwrap() {
            let source = std::fs::read(from.join(piece["file"].as_str().unwrap())).unwrap();
            let start = piece["start"].as_u64().unwrap() as usize;
            let len = piece["len"].as_u64().unwrap() as usize;
            for first in (0..len).step_by(chunk) {
                let count = chunk.min(len - first);
                let name = format!("rank-{:05}.h5", files.len());
                let mut bytes = Vec::new();
                let mut parts = Vec::new();
                for part in piece["parts"].as_array().unwrap() {
                    let offset = part["offset"].as_u64().unwrap() as usize + 4 * first;
                    let some = &source[offset..offset + 4 * count];
                    parts.push(json!({"offset": bytes.len(), "crc32": [crc32fast::hash(some)]}));
                    bytes.extend_from_slice(some);
                }
                std::fs::write(to.join(&name), &bytes).unwrap();
                pieces.push(
                    json!({"file": name, "start": start + first, "len": count, "parts": parts}),
                );
                files.insert(name, json!({"bytes": bytes.len(), "rest_crc32": 0}));
            }
        }
        entry["pieces"] = pieces.into();
    }
    assert!(files.len() >= FILES);
    manifest["files"] = files.into();
    // Manifests need not be compact.
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    std::fs::write(
        to.join("manifest.crc32"),
        format!("{:08x}  manifest.json\n", crc32fast::hash(text.as_bytes())),
    )
    .unwrap();
    std::fs::write(to.join("manifest.json"), text).unwrap();
}

#[test]
fn a_checkpoint_of_two_thousand_files_is_read_with_few_descriptors() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &["run.steps=2"]);
    let files = run.succeeds();
    let text = files.text("checkpoints/latest/manifest.json");
    assert!(!text.contains('\n'), "manifests are compact");
    let many = root.path().join("many");
    scattered(&files.path("checkpoints/latest"), &many);
    let at = many.to_str().unwrap();
    limited(&program(["checkpoint", "verify", at])).succeeded();
    limited(&program(["sample", "--checkpoint", at, "--tokens", "5"])).succeeded();
    // Resuming from it equals resuming from the original.
    let on = |name: &str, from: &Path| {
        Run::new(Alone, root.path(), name, &["run.steps=4"]).resume(from.to_str().unwrap())
    };
    limited(&on("of-many", &many).command()).succeeded();
    on("of-one", &files.path("checkpoints/latest")).succeeds();
    assert_eq!(on("of-many", &many).files().steps(), on("of-one", &many).files().steps());
}

#[test]
fn data_of_more_shards_than_descriptors_is_trained_on() {
    let root = tempfile::tempdir().unwrap();
    let [text, data] = ["text", "data"].map(|name| root.path().join(name));
    std::fs::write(&text, "to be or not to be, that is the question; ".repeat(1200)).unwrap();
    let [text, at] = [&text, &data].map(|path| path.to_str().unwrap());
    let arguments =
        ["data", "import", "text", text, "--shards", "400", "--val-fraction", "0.1", "--out", at];
    finish(&mut program(arguments)).succeeded();
    // Every shard is read several times.
    let settings = ["run.steps=150", &format!("data.path={at}")[..], "lr_schedule.warmup=1"];
    let run = Run::new(Alone, root.path(), "x", &settings);
    limited(&run.command()).succeeded();
}
