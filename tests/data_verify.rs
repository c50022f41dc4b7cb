//! Damage of every sort is found and located.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like the tests")]

use std::path::{Path, PathBuf};

use hdf5::File;
use hpctrain::data::import::{ImportText, import_text};
use hpctrain::data::{TokenizerKind, inspect, verify};

/// Two training shards of 100,000 tokens and a validation shard of 50,000, vocabulary 26.
fn import(dir: &Path, compress: Option<u8>) -> PathBuf {
    let (input, out) = (dir.join("input.txt"), dir.join("out"));
    let text: String = (0..250_000u64).map(|i| char::from(b'a' + (i * i * i % 1009 % 26) as u8)).collect();
    std::fs::write(&input, text).unwrap();
    let tokenizer = TokenizerKind::Char;
    import_text(&ImportText { input, tokenizer, shards: 2, val_fraction: 0.2, out: out.clone(), compress }).unwrap();
    out
}

/// The lines of the error that `verify` ends with, without its hint.
fn problems(path: &Path) -> Vec<String> {
    let error = verify::verify(path).unwrap_err().to_string();
    let (message, hint) = error.split_once("\nhint: ").unwrap();
    assert_eq!(hint, "copy or import the damaged files again");
    message.lines().map(str::to_owned).collect()
}

/// Overwrites one byte of a contiguous shard: the id at `at`.
fn set_id(path: &Path, at: usize, id: u8) {
    let offset = File::open(path).unwrap().dataset("tokens").unwrap().offset().unwrap() as usize;
    let mut bytes = std::fs::read(path).unwrap();
    assert_ne!(bytes[offset + at], id);
    bytes[offset + at] = id;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn sound_data_passes() {
    for compress in [None, Some(1)] {
        let dir = tempfile::tempdir().unwrap();
        let out = import(dir.path(), compress);
        let report = verify::verify(&out).unwrap();
        assert_eq!((report.files, report.ids, report.checksums, report.notes.len()), (3, 250_000, 5, 0));
        assert_eq!(report.to_string(), "3 files in order: 250000 ids, 5 checksums");
        // A single shard is complete in itself.
        assert_eq!(verify::verify(&out.join("train-00001.h5")).unwrap().files, 1);
    }
}

#[test]
fn a_changed_id_breaks_its_block() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    let shard = out.join("train-00001.h5");
    let at = 70_000;
    let id = File::open(&shard).unwrap().dataset("tokens").unwrap().read_raw::<u8>().unwrap()[at];
    set_id(&shard, at, (id + 1) % 26);
    let problems = problems(&out);
    assert_eq!(problems[0], format!("1 problem in 3 files of {}", out.display()));
    assert!(problems[1].contains("train-00001.h5: /tokens[65536..100000] has checksum"), "{problems:?}");
    assert_eq!(problems.len(), 2);
}

#[test]
fn an_impossible_id_is_located_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    set_id(&out.join("val-00000.h5"), 1234, 26);
    set_id(&out.join("val-00000.h5"), 40_000, 255);
    let problems = problems(&out).join("\n");
    assert!(problems.contains("val-00000.h5: /tokens[0..50000] has checksum"), "{problems}");
    assert!(
        problems.contains("val-00000.h5: /tokens[1234] is token id 26, outside the vocabulary of 26"),
        "{problems}"
    );
    assert!(problems.contains("val-00000.h5: /tokens has 2 ids outside the vocabulary in all"), "{problems}");
}

#[test]
fn a_broken_compressed_block_leaves_the_others_to_be_checked() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), Some(6));
    let shard = out.join("train-00000.h5");
    let file = File::open(&shard).unwrap();
    let chunk = file.dataset("tokens").unwrap().chunk_info(0).unwrap();
    drop(file);
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[chunk.addr as usize..][..20].fill(0xff);
    std::fs::write(&shard, bytes).unwrap();
    let problems = problems(&out);
    assert!(problems[1].contains("train-00000.h5: /tokens[0..65536] cannot be read: "), "{problems:?}");
    assert_eq!(problems.len(), 2);
}

#[test]
fn all_problems_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    std::fs::write(out.join("train-00000.h5"), "garbage").unwrap();
    set_id(&out.join("train-00001.h5"), 0, 200);
    let file = File::create(out.join("val-00000.h5")).unwrap();
    file.new_dataset::<f64>().shape(5).create("tokens").unwrap();
    file.close().unwrap();
    let problems = problems(&out);
    assert!(problems[0].starts_with("4 problems in 3 files"), "{problems:?}");
    let text = problems.join("\n");
    for part in [
        "train-00000.h5 is not an HDF5 file",
        "train-00001.h5: /tokens[0..65536] has checksum",
        "train-00001.h5: /tokens[0] is token id 200",
        "val-00000.h5: /tokens is of type float64",
    ] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}

#[test]
fn shards_of_different_imports_do_not_mix() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let out = import(a.path(), None);
    let (input, other) = (b.path().join("other.txt"), b.path().join("out"));
    std::fs::write(&input, "0123456789").unwrap();
    let tokenizer = TokenizerKind::Char;
    let import = ImportText { input, tokenizer, shards: 1, val_fraction: 0.2, out: other.clone(), compress: None };
    import_text(&import).unwrap();
    std::fs::copy(other.join("val-00000.h5"), out.join("val-00000.h5")).unwrap();
    let problems = problems(&out).join("\n");
    assert!(problems.contains("vocabulary_size differs"), "{problems}");
    assert!(problems.contains("val-00000.h5 has 10"), "{problems}");
}

#[test]
fn missing_and_repeated_shards_are_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    std::fs::copy(out.join("train-00000.h5"), out.join("train-00001.h5")).unwrap();
    assert!(problems(&out)[1].contains("train has shards 0, 0 of 2"));
    std::fs::remove_file(out.join("train-00000.h5")).unwrap();
    std::fs::copy(out.join("val-00000.h5"), out.join("extra.h5")).unwrap();
    let problems = problems(&out).join("\n");
    assert!(problems.contains("train has shards 0 of 2"), "{problems}");
    assert!(problems.contains("validation has shards 0, 0 of 1"), "{problems}");
}

#[test]
fn removed_checksums_are_a_problem_only_for_own_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    let shard = out.join("val-00000.h5");
    let file = File::open_rw(&shard).unwrap();
    file.unlink("checksums").unwrap();
    file.close().unwrap();
    assert!(problems(&out)[1].contains("val-00000.h5: has no checksums"));

    let foreign = dir.path().join("foreign.h5");
    let file = File::create(&foreign).unwrap();
    file.new_dataset::<i32>().shape(3).create("tokens").unwrap().write_raw(&[1, 2, 300]).unwrap();
    file.close().unwrap();
    let report = verify::verify(&foreign).unwrap();
    assert_eq!((report.ids, report.checksums, report.notes.len()), (3, 0, 2));
    let file = File::open_rw(&foreign).unwrap();
    file.dataset("tokens").unwrap().write_raw(&[1, -2, 300]).unwrap();
    file.close().unwrap();
    assert!(problems(&foreign)[1].contains("/tokens[1] is token id -2"));
}

#[test]
fn inspection_shows_layout_and_origin() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), Some(1));
    let report = inspect::inspect(&out).unwrap();
    let lines: Vec<&str> = report.lines().collect();
    assert!(lines[0].starts_with("file            dataset  shape   type   layout"), "{report}");
    assert!(lines[1].starts_with("train-00000.h5  /tokens  100000  uint8  chunks of 65536  deflate 1"), "{report}");
    assert!(lines[3].starts_with("val-00000.h5    /tokens  50000   uint8  chunks of 50000  deflate 1"), "{report}");
    assert!(report.contains("train-00000.h5, train-00001.h5: format version 1, tokenizer char, vocabulary 26"));
    assert!(report.contains("source input.txt (sha256 "), "{report}");
}
