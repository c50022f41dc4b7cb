//! Shards copied to a disk of the node's own.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod common;

use std::path::Path;

use common::launch::Transport::{Alone, Mpirun, Simulate};
use common::runs::Run;

/// Three shards of 640 ids below 5.
fn shards(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    for name in ["train-0.h5", "train-1.h5", "val-0.h5"] {
        let file = hdf5::File::create(folder.join(name)).unwrap();
        let ids: Vec<u8> = (0..640u32).map(|i| (i * i * 7 % 5) as u8).collect();
        file.new_dataset::<u8>().shape(ids.len()).create("tokens").unwrap().write_raw(&ids).unwrap();
        file.new_attr::<u64>().create("vocabulary_size").unwrap().write_scalar(&5u64).unwrap();
    }
}

#[test]
fn ranks_read_the_copies() {
    let root = tempfile::tempdir().unwrap();
    let (data, disk) = (root.path().join("data"), root.path().join("disk"));
    shards(&data);
    std::fs::create_dir(&disk).unwrap();
    let at = format!("data.path={}", data.display());
    let stage = format!("data.stage={}", disk.display());
    let run = |transport, name, settings: &[&str]| {
        Run::new(transport, root.path(), name, &[&[&at, "parallel.lanes=4"], settings].concat())
    };
    let plain = run(Alone, "plain", &[]).succeeds();
    run(Mpirun(2), "two", &[&stage]).succeeds().same_as(&plain, 6, "two ranks");
    let copies = std::fs::read_dir(&disk).unwrap().next().unwrap().unwrap().path();
    let written = || std::fs::metadata(copies.join("staged.json")).unwrap().modified().unwrap();
    let before = written();
    run(Simulate(4), "four", &[&stage]).succeeds().same_as(&plain, 6, "four ranks");
    assert_eq!(written(), before, "copies that are there are used again");
    // Once copied, a shard is read from there: this one cannot be, and is copied again.
    std::fs::write(copies.join("train-0.h5"), "damaged").unwrap();
    run(Mpirun(2), "again", &[&stage]).succeeds().same_as(&plain, 6, "after damage");
    assert_eq!(std::fs::read(copies.join("train-0.h5")).unwrap(), std::fs::read(data.join("train-0.h5")).unwrap());
}

#[test]
fn a_place_that_is_not_there_is_refused_once() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    shards(&data);
    let settings = [format!("data.path={}", data.display()), "data.stage=/nowhere/at/all".to_owned()];
    for transport in [Alone, Mpirun(2)] {
        let ended = Run { settings: settings.to_vec(), ..Run::new(transport, root.path(), "refused", &[]) }.ends();
        assert_eq!(ended.code(), 2, "{ended}");
        assert_eq!(ended.stderr.matches("data.stage = /nowhere/at/all is no directory\nhint: ").count(), 1, "{ended}");
        assert!(!root.path().join("refused").exists());
    }
}
