//! `hpctrain checkpoint`, with intact checkpoints, damaged ones, and those of other programs.

use std::path::Path;

use hpctrain::checkpoint::{Checkpoints, Reader};
use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun};
use hpctrain_testkit::launch::{Ended, finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, copy, json};

/// Settings that save and evaluate every second of six steps.
const SETTINGS: [&str; 4] =
    ["checkpoint.every=2", "checkpoint.keep=9", "eval.every=2", "parallel.virtual_ranks=2"];

fn run(root: &Path, name: &str, more: &[&str]) -> RunFiles {
    Run::new(Alone, root, name, &[&SETTINGS, more].concat()).succeeds()
}

/// Returns a run with checkpoints of steps 2, 4 and 6, written by two ranks with ZeRO 1.
fn run_on_two(root: &Path, name: &str) -> RunFiles {
    Run::new(Mpirun(2), root, name, &[&SETTINGS[..], &["parallel.zero=1"]].concat()).copied()
}

fn text(path: impl AsRef<Path>) -> String {
    path.as_ref().to_str().unwrap().to_owned()
}

/// Runs `hpctrain checkpoint …`.
fn checkpoint(args: &[&str]) -> Ended {
    finish(&mut program([&["checkpoint"], args].concat()))
}

/// Returns the output of a command that must succeed without output on standard error.
#[track_caller]
fn printed(args: &[&str]) -> String {
    let ended = checkpoint(args).succeeded();
    assert_eq!(ended.stderr, "");
    ended.stdout
}

/// Panics unless the command fails with exit code 2, one error with all `words`, and a hint.
/// Returns its standard output.
#[track_caller]
fn refused(args: &[&str], words: &[&str]) -> String {
    let ended = checkpoint(args);
    assert_eq!(ended.code(), 2, "{ended}");
    assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended}");
    assert_eq!(ended.stderr.matches("\nhint: ").count(), 1, "{ended}");
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
    }
    ended.stdout
}

/// Panics unless two checkpoints differ. Returns the differences.
#[track_caller]
fn differences(args: &[&str]) -> String {
    let ended = checkpoint(&[&["diff"], args].concat());
    assert_eq!((ended.code(), &ended.stderr[..]), (1, ""), "{ended}");
    ended.stdout
}

/// Flips a bit of a file.
fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

/// Changes a manifest and updates its checksum.
fn edit(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("manifest.json");
    let mut manifest = json(&path);
    change(&mut manifest);
    let text = manifest.to_string();
    std::fs::write(
        dir.join("manifest.crc32"),
        format!("{:08x}  manifest.json\n", crc32fast::hash(text.as_bytes())),
    )
    .unwrap();
    std::fs::write(path, text).unwrap();
}

/// Returns all values of one part of a tensor.
fn values(dir: &Path, tensor: &str, part: usize) -> Vec<f32> {
    let mut reader = Reader::open(dir).unwrap();
    let mut values = vec![f32::NAN; reader.manifest().tensors[tensor].shape.iter().product()];
    reader.read(tensor, part, None, 0..values.len(), &mut values).unwrap();
    values
}

#[test]
fn a_run_is_listed_inspected_and_verified() {
    let root = tempfile::tempdir().unwrap();
    let files = run_on_two(root.path(), "x");
    let run = text(&files.0);
    let checkpoints = text(files.path("checkpoints"));
    let listed = printed(&["list", &run]);
    assert_eq!(listed, printed(&["list", &checkpoints]));
    let lines: Vec<Vec<&str>> =
        listed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.iter().map(|line| line[0]).collect::<Vec<_>>(), ["step", "2", "4", "6"]);
    assert!(lines[3].contains(&"latest,") || lines[3].contains(&"latest"), "{listed}");
    assert_eq!(listed.matches("best").count(), 1, "{listed}");
    for (line, loss) in lines[1..].iter().zip(files.numbers("eval.jsonl", "loss")) {
        assert!(line.contains(&format!("{loss:.4}").as_str()), "{listed}");
    }
    let all = Checkpoints::new(files.path("checkpoints"));
    let lease = all.leases().share("step-00000004").unwrap().unwrap();
    assert!(printed(&["list", &run]).lines().nth(2).unwrap().contains("leased"));
    drop(lease);
    assert!(!printed(&["list", &run]).contains("leased"));

    let latest = text(all.latest());
    let shown = printed(&["inspect", &latest]);
    assert_eq!(shown, printed(&["inspect", &run]));
    let manifest = Reader::open(&files.checkpoint(6)).unwrap().manifest().clone();
    let version = format!("by hpctrain {}, 2 ranks on ", env!("CARGO_PKG_VERSION"));
    for words in [
        "step-00000006\n",
        "format       3\n",
        &manifest.id,
        "step 6, 6 updates, 48 samples, seed 7\n",
        &version,
        "2 layers, 2 heads, width 32, context 16, vocabulary 65",
        "state        m, v\n",
        "char, 65 ids",
        "rank-00001.h5",
        "wte.weight              65 × 32   ",
    ] {
        assert!(shown.contains(words), "{words:?} is missing: {shown}");
    }

    let verified = printed(&["verify", &run]);
    assert_eq!(verified.matches(": ok, ").count(), 9, "{verified}");
    let verified = printed(&["verify", &latest]);
    assert_eq!(verified.lines().count(), 3, "{verified}");
    // The commands have released all their leases.
    assert!(!printed(&["list", &run]).contains("leased"));
}

#[test]
fn wrong_paths_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let files = run(root.path(), "x", &["run.steps=2"]);
    let nowhere = text(root.path().join("y"));
    let here = text(root.path());
    let one = text(files.checkpoint(2));
    let out = text(root.path().join("out"));
    for command in ["list", "inspect", "verify"] {
        refused(&[command, &nowhere], &["y does not exist"]);
    }
    for args in [
        &["inspect", &here][..],
        &["verify", &here],
        &["diff", &one, &here],
        &["export", &here, "--out", &out],
    ] {
        refused(args, &["neither a checkpoint nor a run"]);
    }
    for args in [&["list", &here][..], &["prune", &here, "--keep", "1"]] {
        refused(args, &["not the directory of a run"]);
    }
    refused(&["list", &one], &["one checkpoint, not a run"]);
    let empty = root.path().join("empty/checkpoints");
    std::fs::create_dir_all(&empty).unwrap();
    refused(&["inspect", &text(&empty)], &["there is no checkpoint in"]);
    refused(&["verify", &text(&empty)], &["there is no checkpoint in"]);
    assert!(printed(&["list", &text(&empty)]).contains("no checkpoint in"));
}

#[test]
fn damage_is_found_wherever_it_is() {
    let root = tempfile::tempdir().unwrap();
    let whole = run_on_two(root.path(), "whole");
    let first = Reader::open(&whole.checkpoint(2)).unwrap().manifest().tensors["wpe.weight"].pieces
        [0]
    .clone();
    let size = whole.checkpoint(2).join(&first.file).metadata().unwrap().len() as usize;
    let cases = [
        ("manifest.json", 200),
        ("manifest.crc32", 3),
        ("rank-00000.h5", 9),
        ("rank-00001.h5", 9),
        (&first.file, first.parts[0].offset as usize),
        (&first.file, first.parts[2].offset as usize + 4 * first.len - 1),
        (&first.file, size - 1),
    ];
    for (i, (name, at)) in cases.into_iter().enumerate() {
        let files = RunFiles(root.path().join(format!("damaged-{i}")));
        copy(&whole.0, &files.0);
        let dir = files.checkpoint(2);
        flip(&dir.join(name), at);
        let output = refused(&["verify", &text(&dir)], &["1 of ", " files are damaged"]);
        let bad: Vec<&str> = output.lines().filter(|line| !line.contains(": ok, ")).collect();
        assert!(
            bad.len() == 1 && bad[0].contains(name) && bad[0].contains("checksum"),
            "{name} {at}: {output}"
        );
        // The other files are intact.
        let output = refused(&["verify", &text(&files.0)], &["1 of "]);
        assert!(output.matches(": ok, ").count() >= 6, "{output}");
        // A damaged manifest is reported without reading tensors.
        let listed = printed(&["list", &text(&files.0)]);
        assert_eq!(listed.contains("damaged: "), name.starts_with("manifest"), "{listed}");
        let out = root.path().join("out");
        let good = text(whole.checkpoint(2));
        let bad = text(&dir);
        if name.starts_with("manifest") || at == first.parts[0].offset as usize {
            refused(&["diff", &good, &bad], &[name]);
            refused(&["export", &bad, "--out", &text(&out)], &[name]);
            assert!(
                !out.exists() && std::fs::read_dir(root.path()).unwrap().count() == 2 + i,
                "{name}"
            );
        }
    }

    // Every damaged file is reported, not only the first.
    let files = RunFiles(root.path().join("more"));
    copy(&whole.0, &files.0);
    flip(&files.checkpoint(2).join("rank-00000.h5"), 9);
    std::fs::remove_file(files.checkpoint(2).join("rank-00001.h5")).unwrap();
    let cut = files.checkpoint(4).join("rank-00001.h5");
    let length = cut.metadata().unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&cut).unwrap().set_len(length - 1).unwrap();
    std::fs::remove_file(files.checkpoint(6).join("manifest.crc32")).unwrap();
    let output = refused(&["verify", &text(&files.0)], &["4 of 7 files are damaged"]);
    let bad = output.lines().filter(|line| !line.contains(": ok, "));
    let names = ["2/rank-00000.h5", "2/rank-00001.h5", "4/rank-00001.h5", "6/manifest.crc32"];
    assert!(bad.zip(names).filter(|(line, name)| line.contains(name)).count() == 4, "{output}");
    let listed = printed(&["list", &text(&files.0)]);
    assert_eq!(listed.matches("damaged: ").count(), 3, "{listed}");
}

/// Inconsistent manifests are refused even if their checksum is right.
#[test]
fn inconsistent_manifests_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let whole = run_on_two(root.path(), "whole");
    type Change = fn(&mut Value);
    fn pieces(manifest: &mut Value) -> &mut Value {
        &mut manifest["tensors"]["wte.weight"]["pieces"]
    }
    fn add(value: &mut Value, more: i64) {
        *value = (value.as_i64().unwrap() + more).into();
    }
    let cases: [(Change, &str); 8] = [
        (|m| add(&mut pieces(m)[1]["start"], -1), "pieces of tensor wte.weight overlap at element"),
        (|m| add(&mut pieces(m)[1]["start"], 1), "no piece of tensor wte.weight holds element"),
        (
            |m| drop(pieces(m).as_array_mut().unwrap().pop()),
            "no piece of tensor wte.weight holds element",
        ),
        (
            |m| add(&mut m["tensors"]["wte.weight"]["shape"][0], 1),
            "no piece of tensor wte.weight holds element 2080",
        ),
        (
            |m| pieces(m)[0]["file"] = "rank-00007.h5".into(),
            "in the file rank-00007.h5, unknown there",
        ),
        (
            |m| pieces(m)[0]["parts"][1]["offset"] = (1u64 << 40).into(),
            "does not fit into rank-00000.h5",
        ),
        (|m| m["version"] = 4.into(), "format version 4 is newer than 3"),
        (|m| drop(m.as_object_mut().unwrap().remove("position")), "position"),
    ];
    for (i, (change, words)) in cases.into_iter().enumerate() {
        let dir = root.path().join(format!("edited-{i}"));
        copy(&whole.checkpoint(6), &dir);
        printed(&["verify", &text(&dir)]);
        edit(&dir, change);
        refused(&["inspect", &text(&dir)], &["manifest.json", words]);
        let output = refused(&["verify", &text(&dir)], &["1 of 1 files are damaged"]);
        assert!(output.contains(words), "{output}");
    }
}

#[test]
fn differences_are_named() {
    let root = tempfile::tempdir().unwrap();
    let one = run(root.path(), "one", &[]);
    let two = run_on_two(root.path(), "two");
    let other = run(root.path(), "other", &["run.seed=8"]);
    let a = text(&one.0);
    let b = text(&other.0);
    // The layout does not matter.
    let same = printed(&["diff", &a, &text(&two.0)]);
    assert_eq!(same, "identical: 45 tensors, 81,984 elements\n");

    let output = differences(&[&a, &b]);
    assert!(output.contains("seed: 7 in A, 8 in B\n"), "{output}");
    for (group, part) in [("params", 0), ("m", 1), ("v", 2)] {
        let [x, y] = [&one, &other].map(|files| values(&files.checkpoint(6), "wte.weight", part));
        let different: Vec<usize> =
            (0..x.len()).filter(|at| x[*at].to_bits() != y[*at].to_bits()).collect();
        let largest = different
            .iter()
            .map(|at| (f64::from(x[*at]) - f64::from(y[*at])).abs())
            .fold(0.0, f64::max);
        let first = different[0];
        let elements = hpctrain::telemetry::grouped(different.len() as u64);
        let line = format!(
            "/{group}/wte.weight: {elements} of 2,080 elements differ, the first is {first}: {:e} and {:e}; \
             largest difference {largest:.3e}\n",
            x[first], y[first]
        );
        assert!(output.contains(&line), "{line} is missing: {output}");
    }
    assert!(output.ends_with(" differences in 45 tensors, 81,984 elements\n"), "{output}");
    let output = differences(&[&a, &b, "--weights-only"]);
    assert!(
        output.contains("/params/") && !output.contains("/m/") && !output.contains("seed"),
        "{output}"
    );

    let output = differences(&[&text(one.checkpoint(4)), &a]);
    for words in ["step: 4 in A, 6 in B", "updates: 4 in A, 6 in B", "position: 32 in A, 48 in B"] {
        assert!(output.contains(words), "{output}");
    }
    let wider =
        run(root.path(), "wider", &["model.width=36", "model.bias=true", "optimizer.kind=sgd"]);
    let output = differences(&[&a, &text(&wider.0)]);
    for words in [
        "wte.weight: [65, 32] in A, [65, 36] in B\n",
        "ln_f.bias: only in B\n",
        "optimizer state m: only in A\n",
        "optimizer state momentum: only in B\n",
    ] {
        assert!(output.contains(words), "{output}");
    }
}

#[test]
fn pruning_removes_what_it_reports() {
    let root = tempfile::tempdir().unwrap();
    let files =
        run(root.path(), "x", &["checkpoint.every=1", "eval.every=1", "checkpoint.keep_best=0"]);
    let run = text(&files.0);
    let checkpoints = Checkpoints::new(files.path("checkpoints"));
    assert_eq!(checkpoints.steps().unwrap(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(printed(&["prune", &run, "--keep", "6"]), "nothing to remove\n");
    assert_eq!(checkpoint(&["prune", &run, "--keep", "0"]).code(), 2);

    let lease = checkpoints.leases().share("step-00000002").unwrap().unwrap();
    let ask = ["prune", &run, "--keep", "1", "--keep-every", "3", "--keep-best", "0"];
    let output = printed(&[&ask[..], &["--dry-run"]].concat());
    let would: String = [1, 4, 5].map(|step| format!("would remove step-{step:08}\n")).concat();
    assert_eq!(output, would.clone() + "kept step-00000002: leased\n");
    assert_eq!(checkpoints.steps().unwrap(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(
        printed(&ask),
        would.replace("would remove", "removed") + "kept step-00000002: leased\n"
    );
    assert_eq!(checkpoints.steps().unwrap(), [2, 3, 6]);
    drop(lease);
    // The checkpoint with the lowest loss is always kept.
    let losses = files.numbers("eval.jsonl", "loss");
    let best = [2u64, 3, 6]
        .into_iter()
        .min_by(|a, b| losses[*a as usize - 1].total_cmp(&losses[*b as usize - 1]));
    printed(&["prune", &run, "--keep", "1"]);
    let mut kept = vec![best.unwrap(), 6];
    kept.dedup();
    assert_eq!(checkpoints.steps().unwrap(), kept);
    assert_eq!(checkpoints.latest().canonicalize().unwrap(), files.checkpoint(6));
    assert_eq!(checkpoints.best().canonicalize().unwrap(), files.checkpoint(best.unwrap()));
    printed(&["verify", &run]);
}

#[test]
fn exports_can_be_imported() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| text(root.path().join(name));
    let files = run(root.path(), "x", &["model.bias=true"]);
    let from = text(&files.0);
    let there = path("there");
    let back = path("back");
    let output = printed(&["export", &from, "--out", &there]);
    assert!(output.contains("28 tensors, 28,064 elements"), "{output}");
    let output = printed(&["import", &there, "--out", &back]);
    assert!(output.contains("28 tensors, 28,064 parameters"), "{output}");
    printed(&["verify", &back]);
    assert_eq!(
        printed(&["diff", &from, &back, "--weights-only"]),
        "identical: 28 tensors, 28,064 elements\n"
    );
    let output = differences(&[&from, &back]);
    assert!(
        output.contains("optimizer state m: only in A\n") && !output.contains("/params/"),
        "{output}"
    );
    assert!(printed(&["inspect", &back]).contains("state        none: parameters alone\n"));
    assert!(!printed(&["list", &from]).contains("leased"));

    // Another run can start from it. It has a tokenizer, without which no text can be generated.
    let fine =
        Run::new(Alone, root.path(), "fine", &["model.bias=true", "run.steps=1"]).resume(&back);
    let mut command = fine.command();
    assert!(finish(command.arg("--weights-only")).succeeded().stdout.contains("at step 0 from"));
    let sample = |checkpoint: &str| finish(&mut program(["sample", "--checkpoint", checkpoint]));
    assert_eq!(sample(&back).succeeded().stdout, sample(&from).succeeded().stdout);
    let bare = path("bare");
    printed(&["import", &there, "--tokenizer", "none", "--out", &bare]);
    let ended = sample(&bare);
    assert!(ended.code() == 2 && ended.stderr.contains("had no tokenizer"), "{ended}");

    // Nothing is overwritten.
    refused(&["export", &from, "--out", &there], &["there exists already"]);
    refused(&["import", &there, "--out", &back], &["back exists already"]);
    // A model without biases gets zeros, and a tokenizer can be given for one with enough ids.
    let plain = run(root.path(), "plain", &["model.bias=false", "model.vocabulary=300"]);
    let plain_there = path("plain-there");
    let plain_back = path("plain-back");
    let output = printed(&["export", &text(&plain.0), "--out", &plain_there]);
    assert!(output.contains("28 tensors, 13 of them biases of zero"), "{output}");
    printed(&["import", &plain_there, "--out", &plain_back, "--tokenizer", "byte"]);
    assert!(
        values(Path::new(&plain_back), "h.1.mlp.c_fc.bias", 0)
            .iter()
            .all(|bias| bias.to_bits() == 0)
    );
    finish(&mut program(["sample", "--checkpoint", &plain_back, "--tokens", "5"])).succeeded();
    let gpt2 = ["import", &plain_there, "--out", &path("no"), "--tokenizer", "gpt2"];
    refused(&gpt2, &["the tokenizer gpt2 has 50257 ids, the model only 300"]);
    assert!(!root.path().join("no").exists());
}
