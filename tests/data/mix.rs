//! Mixtures of several data sets.

use std::path::{Path, PathBuf};

use hpctrain::config::{Sources, load};
use hpctrain::data::{DataSpec, Dataset, Loader, SampleOrder, Split};
use hpctrain::engine::micro_batches;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::runs::Run;

/// Writes shards whose tokens are all `id`, in windows of 2.
fn tokens(folder: &Path, id: u8, windows: usize, vocabulary: u64) -> PathBuf {
    std::fs::create_dir(folder).unwrap();
    for name in ["train-0.h5", "train-1.h5", "val-0.h5"] {
        let file = crate::create_hdf5(folder.join(name));
        let ids = vec![id; 2 * windows + 1];
        file.new_dataset::<u8>()
            .shape(ids.len())
            .create("tokens")
            .unwrap()
            .write_raw(&ids)
            .unwrap();
        file.new_attr::<u64>()
            .create("vocabulary_size")
            .unwrap()
            .write_scalar(&vocabulary)
            .unwrap();
    }
    folder.to_path_buf()
}

#[test]
fn each_data_set_has_its_part_of_every_batch() {
    let root = tempfile::tempdir().unwrap();
    let paths = [(3, 10), (5, 4)]
        .map(|(id, windows)| tokens(&root.path().join(id.to_string()), id, windows, 8));
    let specs = paths.map(DataSpec::new);
    let dataset = Dataset::open_all(&specs, Split::Train, 2).unwrap();
    assert_eq!((dataset.samples(), dataset.parts()), (28, &[20, 8][..]));
    let order = SampleOrder::mixed(dataset.parts(), &[3.0, 1.0], Some(1)).unwrap();
    let mut loader = Loader::start(dataset, order, (0..20).map(|i| i * 8..i * 8 + 8), 2).unwrap();
    for _ in 0..20 {
        let batch = loader.next().unwrap();
        let of = |id| batch.parts.ids.iter().filter(|found| **found == id).count();
        assert_eq!((of(3), of(5)), (12, 4), "{:?}", batch.parts.ids);
        loader.recycle(batch);
    }
    let validation = Dataset::open_all(&specs, Split::Validation, 2).unwrap();
    assert_eq!(validation.parts(), [10, 4]);
}

#[test]
fn data_of_different_kinds_does_not_mix() {
    let root = tempfile::tempdir().unwrap();
    let first = tokens(&root.path().join("a"), 1, 4, 8);
    let second = tokens(&root.path().join("b"), 1, 4, 9);
    let error = Dataset::open_all(&[first, second].map(DataSpec::new), Split::Train, 2)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("vocabulary_size differs: ") && error.contains("has 9, "), "{error}");
    assert!(error.contains("those of data.mix must hold samples of one kind"), "{error}");
}

/// Data sets without validation shards keep a fraction of the samples for validation, whether or
/// not the others have validation shards.
#[test]
fn each_data_set_has_validation_data_or_none_has() {
    let root = tempfile::tempdir().unwrap();
    let paths = [(3, 10), (5, 20)]
        .map(|(id, windows)| tokens(&root.path().join(id.to_string()), id, windows, 8));
    let mix = format!(
        "data.mix=[{{path='{}', weight=1}}, {{path='{}', weight=1}}]",
        paths[0].display(),
        paths[1].display()
    );
    let open = |fraction: f64| {
        let overrides =
            [mix.clone(), "model.context=2".into(), format!("data.val_fraction={fraction}")];
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        let opened = micro_batches::open(&config).map_err(|e| e.to_string())?;
        Ok((opened.0.parts().to_vec(), opened.1.map(|validation| validation.parts().to_vec())))
    };
    let fails = |fraction, expected: &str| {
        let error: Result<_, String> = open(fraction);
        let error = error.unwrap_err();
        assert!(error.contains(expected), "{error}");
    };
    assert_eq!(open(0.0), Ok((vec![20, 40], Some(vec![10, 20]))));
    fails(0.2, "data.val_fraction = 0.2, but ");
    std::fs::remove_file(paths[1].join("val-0.h5")).unwrap();
    fails(
        0.0,
        "/5 has no validation data, but others of data.mix have some\nhint: set data.val_fraction",
    );
    assert_eq!(open(0.2), Ok((vec![20, 32], Some(vec![10, 8]))));
    std::fs::remove_file(paths[0].join("val-0.h5")).unwrap();
    assert_eq!(open(0.0), Ok((vec![20, 40], None)));
    assert_eq!(open(0.2), Ok((vec![16, 32], Some(vec![4, 8]))));
}

#[test]
fn a_mixture_has_the_bits_of_one_rank_and_goes_on_where_it_was() {
    let root = tempfile::tempdir().unwrap();
    let paths = [(3, 80), (5, 40)]
        .map(|(id, windows)| tokens(&root.path().join(id.to_string()), id, windows * 8, 8));
    let mix = format!(
        "data.mix=[{{path='{}', weight=2.5}}, {{path='{}', weight=1}}]",
        paths[0].display(),
        paths[1].display()
    );
    let run = |transport, name, settings: &[&str]| {
        Run::new(
            transport,
            root.path(),
            name,
            &[&[&mix, "parallel.virtual_ranks=4"], settings].concat(),
        )
    };
    let whole = run(Alone, "whole", &[]).succeeds();
    let losses = whole.numbers("metrics.jsonl", "loss");
    assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "{losses:?}");
    let two = run(Mpirun(2), "two", &["parallel.zero=3", "checkpoint.every=3"]).succeeds();
    two.same_as(&whole, 6, "two ranks");
    run(Simulate(4), "four", &["parallel.zero=1"]).succeeds().same_as(&whole, 6, "four ranks");
    let middle = two.checkpoint(3).display().to_string();
    let again = run(Alone, "again", &[]).resume(&middle).succeeds();
    assert_eq!(again.tensors(6), whole.tensors(6));
}

#[test]
fn mixtures_that_cannot_be_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let path = tokens(&root.path().join("a"), 3, 80, 8);
    let path = path.display();
    for (mix, wanted) in [
        (
            format!("[{{path='{path}', weight=1}}, {{path='{path}', weight=-1}}]"),
            "data.mix has weight = -1",
        ),
        (
            format!("[{{path='{path}', weight=1}}, {{path='{path}', weight=0.0001}}]"),
            "less than one in 1024 of all",
        ),
        (format!("[{{path='{path}'}}]"), "missing field `weight`"),
        (format!("[{{path='{path}', wieght=1}}]"), "did you mean `weight`"),
        (
            format!("[{{path='{path}', weight=1}}, {{path='nowhere', weight=1}}]"),
            "nowhere does not exist",
        ),
        (
            format!("[{{path='{path}', weight=19}}, {{path='{path}', weight=1}}]"),
            "training samples, but batch.global = 24",
        ),
    ] {
        let mix = format!("data.mix={mix}");
        let ended =
            Run::new(Alone, root.path(), "refused", &[&mix, "batch.global=24", "model.context=14"])
                .ends();
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(
            ended.stderr.contains(wanted) && ended.stderr.contains("\nhint: "),
            "{mix}: {ended}"
        );
    }
}
