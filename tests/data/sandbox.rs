//! Files that end the process that reads them: a child reads them first, so that no rank is lost,
//! and the error names the file.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use hpctrain::data::TokenizerKind;
use hpctrain::data::import::{ImportText, import_text};

use hpctrain_testkit::launch::Transport::{Alone, Mpirun};
use hpctrain_testkit::launch::{Ended, finish, program};
use hpctrain_testkit::runs::Run;
use hpctrain_testkit::shards;

/// Builds a library that ends each process that opens a dataset; returns `None` if HDF5 is linked
/// statically.
fn crashing(root: &Path) -> Option<PathBuf> {
    if cfg!(feature = "static-hdf5") {
        eprintln!("skipped: functions of a static libhdf5 cannot be replaced");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/crashing_hdf5.c");
    let library = root.join("libcrashing.so");
    let status =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(status.unwrap().success());
    Some(library)
}

/// Imports two training shards and one for validation, of bytes.
fn import(root: &Path) -> PathBuf {
    let input = root.join("input.txt");
    let out = root.join("data");
    std::fs::write(&input, "to be, or not to be, that is the question\n".repeat(100)).unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Byte, &out);
    import.to.val_fraction = 0.1;
    import.to.shards = 2;
    import_text(&import).unwrap();
    out
}

#[track_caller]
fn names_file_and_signal(ended: &Ended, file: &str) {
    assert_eq!(ended.code(), 2, "{ended}");
    let error = format!("{file} is damaged: reading it ended a process by signal 11 (SIGSEGV)");
    assert_eq!(ended.stderr.matches(&error).count(), 1, "{error}: {ended}");
}

#[test]
fn a_file_that_ends_its_reader_is_one_error_of_the_job() {
    let root = tempfile::tempdir().unwrap();
    let Some(library) = crashing(root.path()) else { return };
    let data = import(root.path());
    let settings =
        [&format!("data.path={}", data.display())[..], "run.steps=2", "log.sample_tokens=0"];
    let trained = Run::new(Alone, root.path(), "sound", &settings).succeeds();
    for transport in [Alone, Mpirun(2)] {
        let mut command = Run::new(transport, root.path(), "refused", &settings).command();
        names_file_and_signal(&finish(command.env("LD_PRELOAD", &library)), "train-00000.h5");
    }
    let shard = data.join("train-00001.h5");
    let out = root.path().join("out");
    let [shard, data, out] = [&shard, &data, &out].map(|path| path.to_str().unwrap());
    let checkpoint = trained.0.to_str().unwrap();
    for arguments in [
        &["data", "inspect", shard][..],
        &["data", "import", "ids", shard, "--tokenizer", "byte", "--out", out],
        &["eval", "--checkpoint", checkpoint, "--data", shard],
    ] {
        names_file_and_signal(
            &finish(program(arguments).env("LD_PRELOAD", &library)),
            "train-00001.h5",
        );
    }
    assert!(!Path::new(out).exists());
    // One damaged file does not hide the others.
    let verified = finish(program(["data", "verify", data]).env("LD_PRELOAD", &library));
    for name in ["train-00000.h5", "train-00001.h5", "val-00000.h5"] {
        names_file_and_signal(&verified, name);
    }
}

/// The program reads or refuses a file with any byte of its structure changed.
#[test]
fn no_byte_of_a_files_structure_ends_the_program() {
    let root = tempfile::tempdir().unwrap();
    let shard = import(root.path()).join("train-00000.h5");
    let whole = std::fs::read(&shard).unwrap();
    let offset = shards::open(&shard).dataset("tokens").unwrap().offset().unwrap() as usize;
    for at in (0..offset).step_by(offset / 60) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&shard, bytes).unwrap();
        for command in ["inspect", "verify"] {
            let ended = finish(program(["data", command]).arg(&shard));
            assert!(
                ended.status.signal().is_none() && [0, 2].contains(&ended.code()),
                "byte {at}: {ended}"
            );
        }
    }
}

/// The type of a string in a file declares UTF-8, but its content is not UTF-8.
#[test]
fn texts_that_are_not_utf8_are_shown_as_far_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let shard = import(root.path()).join("train-00000.h5");
    let mut bytes = std::fs::read(&shard).unwrap();
    let place = bytes.windows(9).position(|window| window == b"input.txt").unwrap();
    bytes[place] = 0xff;
    std::fs::write(&shard, bytes).unwrap();
    let inspected = finish(program(["data", "inspect"]).arg(&shard)).succeeded();
    assert!(inspected.stdout.contains("\u{fffd}nput.txt"), "{inspected}");
    finish(program(["data", "verify"]).arg(&shard)).succeeded();
}

#[test]
fn links_that_lead_back_and_deep_groups_end_nothing() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("train-0.h5");
    let file = crate::create_hdf5(&path);
    file.create_group("entry").unwrap().new_dataset::<u8>().shape(4).create("x").unwrap();
    file.link_soft("/", "entry/soft").unwrap();
    file.link_hard("/", "entry/hard").unwrap();
    file.link_external("train-0.h5", "/", "entry/external").unwrap();
    file.close().unwrap();
    let inspected = finish(program(["data", "inspect"]).arg(&path)).succeeded();
    assert_eq!(inspected.stdout.matches("/entry/x").count(), 1, "{inspected}");
    // If a dataset is missing, the error lists all others.
    let settings = format!("data.path={}", path.display());
    let refused = Run::new(Alone, root.path(), "refused", &[&settings]).ends();
    assert_eq!(refused.code(), 2, "{refused}");
    assert!(refused.stderr.contains("the file holds /entry/x;"), "{refused}");

    let file = crate::create_hdf5(&path);
    let mut group = file.create_group("g").unwrap();
    for _ in 0..20_000 {
        group = group.create_group("g").unwrap();
    }
    drop(group);
    file.close().unwrap();
    for ended in [
        finish(program(["data", "inspect"]).arg(&path)),
        finish(program(["data", "verify"]).arg(&path)),
        Run::new(Alone, root.path(), "refused", &[&settings]).ends(),
    ] {
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(
            ended.stderr.contains("train-0.h5: groups are nested more than 64 deep"),
            "{ended}"
        );
    }
}

#[test]
fn raw_files_elsewhere_are_read_only_where_that_is_allowed() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    let secret = root.path().join("secret.txt");
    std::fs::create_dir(&data).unwrap();
    let text = "to be, or not to be, that is the question\n".repeat(100);
    std::fs::write(&secret, &text).unwrap();
    for name in ["train-0.h5", "val-0.h5"] {
        let file = crate::create_hdf5(data.join(name));
        let tokens = file
            .new_dataset::<u8>()
            .external(secret.to_str().unwrap(), 0, text.len())
            .shape(text.len());
        tokens.create("tokens").unwrap();
        file.close().unwrap();
    }
    let path = format!("data.path={}", data.display());
    let settings = [&path[..], "model.vocabulary=256", "run.steps=1", "log.sample_tokens=0"];
    let refused = Run::new(Alone, root.path(), "refused", &settings).ends();
    assert_eq!(refused.code(), 2, "{refused}");
    let expected = format!(
        "has its elements in the external raw file {}, which is outside ",
        secret.display()
    );
    assert!(refused.stderr.contains(&expected), "{refused}");
    assert!(
        refused.stderr.contains("\nhint: ") && refused.stderr.contains("data.external_files"),
        "{refused}"
    );
    assert!(!root.path().join("refused").exists());
    let allowed = [&settings[..], &["data.external_files=allow"]].concat();
    Run::new(Alone, root.path(), "allowed", &allowed).succeeds();
    // Raw files beside the HDF5 file belong to the data.
    std::fs::rename(&secret, data.join("tokens.raw")).unwrap();
    for name in ["train-0.h5", "val-0.h5"] {
        let file = crate::create_hdf5(data.join(name));
        let raw = data.join("tokens.raw");
        let tokens = file
            .new_dataset::<u8>()
            .external(raw.to_str().unwrap(), 0, text.len())
            .shape(text.len());
        tokens.create("tokens").unwrap();
        file.close().unwrap();
    }
    Run::new(Alone, root.path(), "beside", &settings).succeeds();
}
