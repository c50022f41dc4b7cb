//! Copies of shards on a node's local disk.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use hpctrain::data::{DataSpec, Dataset, Split};

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::Run;

/// Writes three shards of 640 ids below 5.
fn shards(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    for name in ["train-0.h5", "train-1.h5", "val-0.h5"] {
        let file = crate::create_hdf5(folder.join(name));
        let ids: Vec<u8> = (0..640u32).map(|i| (i * i * 7 % 5) as u8).collect();
        file.new_dataset::<u8>()
            .shape(ids.len())
            .create("tokens")
            .unwrap()
            .write_raw(&ids)
            .unwrap();
        file.new_attr::<u64>().create("vocabulary_size").unwrap().write_scalar(&5u64).unwrap();
    }
}

#[test]
fn ranks_read_the_copies() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    let disk = root.path().join("disk");
    shards(&data);
    std::fs::create_dir(&disk).unwrap();
    let at = format!("data.path={}", data.display());
    let stage = format!("data.local_cache={}", disk.display());
    let run = |transport, name, settings: &[&str]| {
        Run::new(
            transport,
            root.path(),
            name,
            &[&[&at, "parallel.virtual_ranks=4"], settings].concat(),
        )
    };
    let plain = run(Alone, "plain", &[]).succeeds();
    run(Mpirun(2), "two", &[&stage]).succeeds().same_as(&plain, 6, "two ranks");
    let copies = std::fs::read_dir(&disk).unwrap().next().unwrap().unwrap().path();
    let fingerprint =
        |path: &Path| Dataset::open(&DataSpec::new(path), Split::Train, 16).unwrap().fingerprint();
    assert_eq!(
        fingerprint(&copies),
        fingerprint(&data),
        "a checkpoint has the same fingerprint for copies and originals"
    );
    let written = || std::fs::metadata(copies.join("staged.json")).unwrap().modified().unwrap();
    let before = written();
    run(Simulate(4), "four", &[&stage]).succeeds().same_as(&plain, 6, "four ranks");
    assert_eq!(written(), before, "existing copies are used again");
    // Once copied, a shard is read from the copy: this one is damaged, and is copied again.
    std::fs::write(copies.join("train-0.h5"), "damaged").unwrap();
    run(Mpirun(2), "again", &[&stage]).succeeds().same_as(&plain, 6, "after damage");
    assert_eq!(
        std::fs::read(copies.join("train-0.h5")).unwrap(),
        std::fs::read(data.join("train-0.h5")).unwrap()
    );
}

/// Elements behind a link or in a raw file would be missing in a copy, or read from the originals.
#[test]
fn shards_with_parts_in_other_files_are_refused_before_they_are_copied() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    let disk = root.path().join("disk");
    shards(&data);
    std::fs::create_dir(&disk).unwrap();
    std::fs::rename(data.join("train-0.h5"), data.join("source.h5")).unwrap();
    std::fs::write(data.join("source.raw"), [3; 640]).unwrap();
    let write = |tokens: &dyn Fn(&hdf5::File)| {
        let file = crate::create_hdf5(data.join("train-0.h5"));
        file.new_attr::<u64>().create("vocabulary_size").unwrap().write_scalar(&5u64).unwrap();
        tokens(&file);
    };
    let absolute = data.join("source.h5").display().to_string();
    let raw = data.join("source.raw").display().to_string();
    let link = |to: &str| {
        let to = to.to_owned();
        move |file: &hdf5::File| file.link_external(&to, "/tokens", "tokens").unwrap()
    };
    let relative = link("source.h5");
    let absolute = link(&absolute);
    let external = |file: &hdf5::File| {
        drop(file.new_dataset::<u8>().external(&raw, 0, 640).shape(640).create("tokens").unwrap());
    };
    let ways: [&dyn Fn(&hdf5::File); 3] = [&relative, &absolute, &external];
    let settings =
        [format!("data.path={}", data.display()), format!("data.local_cache={}", disk.display())];
    for tokens in ways {
        write(tokens);
        let ended =
            Run { settings: settings.to_vec(), ..Run::new(Mpirun(2), root.path(), "refused", &[]) }
                .ends();
        assert_eq!(ended.code(), 2, "{ended}");
        let refusal = "train-0.h5: /tokens has elements in other files, which data.local_cache does not copy\nhint: ";
        assert_eq!(ended.stderr.matches(refusal).count(), 1, "{ended}");
        assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 0);
    }
    // They can be read from their original place.
    write(&relative);
    Run::new(Alone, root.path(), "beside", &[&settings[0]]).succeeds();
}

#[test]
fn a_place_that_is_not_there_is_refused_once() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    shards(&data);
    let settings =
        [format!("data.path={}", data.display()), "data.local_cache=/nowhere/at/all".to_owned()];
    for transport in [Alone, Mpirun(2)] {
        let ended =
            Run { settings: settings.to_vec(), ..Run::new(transport, root.path(), "refused", &[]) }
                .ends();
        assert_eq!(ended.code(), 2, "{ended}");
        assert_eq!(
            ended
                .stderr
                .matches("data.local_cache = /nowhere/at/all is not a directory\nhint: ")
                .count(),
            1,
            "{ended}"
        );
        assert!(!root.path().join("refused").exists());
    }
}

/// Each user has separate copies: neither may write to, or has to trust, those of the other.
#[test]
fn users_share_a_disk_and_trust_only_their_own_copies() {
    let root = tempfile::tempdir().unwrap();
    if std::fs::metadata(root.path()).unwrap().uid() != 0 {
        return eprintln!("skipped: only root can act as several users");
    }
    let open =
        |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    open(root.path(), 0o755);
    let data = root.path().join("data");
    let disk = root.path().join("disk");
    shards(&data);
    std::fs::create_dir(&disk).unwrap();
    open(&disk, 0o1777);
    // They may not have access to the directory where the tests were built.
    let program = root.path().join("hpctrain");
    std::fs::copy(hpctrain_testkit::program(), &program).unwrap();
    let settings =
        [format!("data.path={}", data.display()), format!("data.local_cache={}", disk.display())];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let by = |user: u32, name: &str| {
        let home = root.path().join(user.to_string());
        std::fs::create_dir_all(&home).unwrap();
        chown(&home, Some(user), Some(user)).unwrap();
        let arguments = Run::new(Alone, &home, name, &settings).command();
        let mut command = Command::new(&program);
        finish(command.args(arguments.get_args()).env("HOME", &home).uid(user).gid(user))
    };
    by(12345, "one").succeeded();
    let copies = std::fs::read_dir(&disk).unwrap().next().unwrap().unwrap().path();
    by(12346, "two").succeeded();
    assert_eq!(std::fs::read_dir(&disk).unwrap().count(), 2);
    assert_eq!(std::fs::metadata(&copies).unwrap().mode() & 0o777, 0o700);
    // Another user was there first, with what looks like copies of a third user.
    let planted = copies.to_str().unwrap().replace("12345", "12347");
    std::fs::create_dir(&planted).unwrap();
    chown(&planted, Some(12345), Some(12345)).unwrap();
    let ended = by(12347, "three");
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("belongs to user 12345, not to you (user 12347)\nhint: "),
        "{ended}"
    );
}
