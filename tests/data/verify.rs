//! Damage of every kind is detected and located.

use std::path::{Path, PathBuf};

use hpctrain::data::import::{
    Categories, CategoryIds, ImportCsv, ImportIdx, ImportOptions, ImportText, NotFinite,
    import_csv, import_idx, import_text,
};
use hpctrain::data::{
    DataSpec, Dataset, Ids, SampleMut, SampleSpec, Sampler, Split, Target, TokenizerKind, Verify,
    inspect, verify,
};
use hpctrain_testkit::shards;

/// Imports two training shards of 100,000 tokens and a validation shard of 50,000, with a
/// vocabulary of 26.
fn import(dir: &Path, compress: Option<u8>) -> PathBuf {
    let input = dir.join("input.txt");
    let out = dir.join("out");
    let text: String =
        (0..250_000u64).map(|i| char::from(b'a' + (i * i * i % 1009 % 26) as u8)).collect();
    std::fs::write(&input, text).unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Char, &out);
    (import.to.shards, import.to.val_fraction, import.to.compress) = (2, 0.2, compress);
    import_text(&import).unwrap();
    out
}

/// Returns the lines of the error of `verify`, without its hint.
fn problems(path: &Path) -> Vec<String> {
    let error = verify::verify(path).unwrap_err().to_string();
    let (message, hint) = error.split_once("\nhint: ").unwrap();
    assert_eq!(hint, "copy or import the damaged files again");
    message.lines().map(str::to_owned).collect()
}

/// Overwrites one byte of a contiguous shard: the id at `at`.
fn set_id(path: &Path, at: usize, id: u8) {
    let offset = shards::open(path).dataset("tokens").unwrap().offset().unwrap() as usize;
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
        assert_eq!(
            (report.files, report.ids, report.checksums, report.notes.len()),
            (3, 250_000, 5, 0)
        );
        assert_eq!(report.to_string(), "3 files in order: 250000 ids, 5 checksums");
        // A single shard is complete by itself.
        assert_eq!(verify::verify(&out.join("train-00001.h5")).unwrap().files, 1);
    }
}

#[test]
fn a_changed_id_breaks_its_block() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    let shard = out.join("train-00001.h5");
    let at = 70_000;
    let id = shards::open(&shard).dataset("tokens").unwrap().read_raw::<u8>().unwrap()[at];
    set_id(&shard, at, (id + 1) % 26);
    let problems = problems(&out);
    assert_eq!(problems[0], format!("1 problem in 3 files of {}", out.display()));
    assert!(
        problems[1].contains("train-00001.h5: /tokens[65536..100000] has checksum"),
        "{problems:?}"
    );
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
        problems
            .contains("val-00000.h5: /tokens[1234] is token id 26, outside the vocabulary of 26"),
        "{problems}"
    );
    assert!(
        problems.contains("val-00000.h5: /tokens has 2 ids outside the vocabulary in all"),
        "{problems}"
    );
}

#[test]
fn a_broken_compressed_block_leaves_the_others_to_be_checked() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), Some(6));
    let shard = out.join("train-00000.h5");
    let file = shards::open(&shard);
    let chunk = file.dataset("tokens").unwrap().chunk_info(0).unwrap();
    drop(file);
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[chunk.addr as usize..][..20].fill(0xff);
    std::fs::write(&shard, bytes).unwrap();
    let problems = problems(&out);
    assert!(
        problems[1].contains("train-00000.h5: /tokens[0..65536] cannot be read: "),
        "{problems:?}"
    );
    assert_eq!(problems.len(), 2);
}

#[test]
fn all_problems_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    std::fs::write(out.join("train-00000.h5"), "garbage").unwrap();
    set_id(&out.join("train-00001.h5"), 0, 200);
    let file = crate::create_hdf5(out.join("val-00000.h5"));
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
    let a = tempfile::tempdir().unwrap();
    let b = tempfile::tempdir().unwrap();
    let out = import(a.path(), None);
    let input = b.path().join("other.txt");
    let other = b.path().join("out");
    std::fs::write(&input, "0123456789").unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Char, &other);
    import.to.val_fraction = 0.2;
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
    let twice =
        "train-00000.h5 and train-00001.h5 are both number 0 of the 2 train shards of input.txt";
    assert!(problems(&out)[1].contains(twice));
    std::fs::remove_file(out.join("train-00000.h5")).unwrap();
    std::fs::copy(out.join("val-00000.h5"), out.join("extra.h5")).unwrap();
    let problems = problems(&out).join("\n");
    // It has the name of the missing shard, and the number of the shard whose name is missing.
    assert!(
        problems.contains("train-00001.h5 is number 0 and not 1 of the 2 train shards"),
        "{problems}"
    );
    let twice =
        "extra.h5 and val-00000.h5 are both number 0 of the only validation shard of input.txt";
    assert!(problems.contains(twice), "{problems}");
}

/// Imports two training shards of 400 rows and one of 200 for validation, with two numbers, an id,
/// a class and a weight each.
fn import_rows(dir: &Path) -> PathBuf {
    let input = dir.join("table.csv");
    let out = dir.join("rows");
    let row = |i: u32| {
        format!("{},{},c{},{},{}\n", i * i % 1013, f64::from(i) / 7.0, i % 5, i % 3, 1 + i % 4)
    };
    std::fs::write(&input, format!("a,b,c,y,w\n{}", (0..1000).map(row).collect::<String>()))
        .unwrap();
    let kept = ImportOptions {
        not_finite: NotFinite::Error,
        every: 5,
        shards: 2,
        normalize: true,
        out: out.clone(),
    };
    let categories = Categories::Named { columns: vec!["c".into()], ids: CategoryIds::APPEARANCE };
    let targets = vec!["y".to_owned()];
    let weight = Some("w".to_owned());
    import_csv(&ImportCsv { targets, weight, categories, ..ImportCsv::new(input, kept) }).unwrap();
    out
}

#[test]
fn rows_have_checksums() {
    let dir = tempfile::tempdir().unwrap();
    let out = import_rows(dir.path());
    let report = verify::verify(&out).unwrap();
    // Four datasets in each of three files, none of which fills a block of 16 KiB.
    assert_eq!((report.files, report.checksums), (3, 12));
    let without_vocabulary = |note: &String| note.contains("has no vocabulary_size");
    assert!(report.notes.iter().all(without_vocabulary), "{report}");
    let report = inspect::inspect(&out).unwrap().to_string();
    assert!(
        !report.contains("not written by hpctrain") && !report.contains("/checksums"),
        "{report}"
    );
    assert!(
        report.contains("rows, format version 2, split train, num_shards 2, source table.csv\n"),
        "{report}"
    );

    for (dataset, at, hint) in
        [("inputs", 5, "/inputs[0..400]"), ("categories", 399, "/categories[0..400]")]
            .into_iter()
            .chain([("targets", 0, "/targets[0..400]"), ("weights", 77, "/weights[0..400]")])
    {
        let path = out.join("train-00001.h5");
        let whole = std::fs::read(&path).unwrap();
        let offset = shards::open(&path).dataset(dataset).unwrap().offset().unwrap() as usize;
        let mut bytes = whole.clone();
        // The lowest bit of a number: only a checksum detects its change.
        bytes[offset + 4 * at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let problems = problems(&out);
        assert!(
            problems[1].contains(&format!("train-00001.h5: {hint} has checksum ")),
            "{problems:?}"
        );
        assert_eq!(problems.len(), 2);
        std::fs::write(&path, whole).unwrap();
    }
    let file = shards::edit(out.join("val-00000.h5"));
    file.unlink("checksums/targets").unwrap();
    file.close().unwrap();
    assert!(problems(&out)[1].contains("val-00000.h5: /targets has no checksums"));
}

/// Returns all samples of the training shards as they are read, or the first error.
fn samples(spec: &DataSpec, context: usize) -> hpctrain::error::Result<Vec<Vec<u32>>> {
    let mut dataset = Dataset::open(spec, Split::Train, context)?;
    let sizes = dataset.sizes();
    let sampler = Sampler::new(dataset.samples(), 3);
    let mut all = vec![Vec::new(); dataset.samples() as usize];
    for sample in (0..dataset.samples()).map(|position| sampler.index(position)) {
        let mut ids = vec![0; sizes.ids];
        let mut classes = vec![0; sizes.classes];
        let mut features = vec![0.0; sizes.features];
        let mut weights = vec![0.0; sizes.weights];
        let into = SampleMut {
            ids: &mut ids,
            features: &mut features,
            classes: &mut classes,
            values: &mut [],
            weights: &mut weights,
        };
        dataset.read(sample, into)?;
        let numbers = features.iter().chain(&weights).map(|x| x.to_bits());
        all[sample as usize] = ids.iter().chain(&classes).copied().chain(numbers).collect();
    }
    Ok(all)
}

#[test]
fn what_is_read_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let of_rows =
        SampleSpec::Rows { input: 2, ids: Ids::Tables([6].into()), target: Target::Class(3) };
    let rows = DataSpec { samples: of_rows, ..DataSpec::new(import_rows(dir.path())) };
    let plain = DataSpec::new(import(dir.path(), None));
    std::fs::rename(&plain.path, dir.path().join("plain")).unwrap();
    let plain = DataSpec { path: dir.path().join("plain"), ..plain };
    // The same in chunks, which are read through the library.
    let chunked = DataSpec::new(import(dir.path(), None));
    let file = shards::edit(chunked.path.join("train-00001.h5"));
    let ids: Vec<u8> = file.dataset("tokens").unwrap().read_raw().unwrap();
    file.unlink("tokens").unwrap();
    file.new_dataset::<u8>()
        .shape(ids.len())
        .chunk(1000)
        .create("tokens")
        .unwrap()
        .write_raw(&ids)
        .unwrap();
    file.close().unwrap();
    let classes: Vec<u32> = shards::open(rows.path.join("train-00001.h5"))
        .dataset("targets")
        .unwrap()
        .read_raw()
        .unwrap();
    // Another valid class.
    let row = classes.iter().position(|class| *class == 0).unwrap();
    for (spec, dataset, at, place) in [
        (&plain, "tokens", 70_000, "/tokens[65536..100000]"),
        (&chunked, "tokens", 70_000, "/tokens[65536..100000]"),
        (&rows, "inputs", 8 * 300 + 4, "/inputs[0..400]"),
        (&rows, "categories", 4 * 300, "/categories[0..400]"),
        (&rows, "targets", 4 * row, "/targets[0..400]"),
        (&rows, "weights", 4 * 300 + 3, "/weights[0..400]"),
    ] {
        let with = |verify| samples(&DataSpec { verify, ..spec.clone() }, 64);
        let sound = with(Verify::Off).unwrap();
        assert_eq!(with(Verify::FirstPass).unwrap(), sound, "{dataset}");
        assert_eq!(with(Verify::Always).unwrap(), sound, "{dataset}");

        let path = spec.path.join("train-00001.h5");
        let whole = std::fs::read(&path).unwrap();
        let stored = shards::open(&path).dataset(dataset).unwrap();
        let in_chunk = || stored.chunk_info(at / 1000).unwrap().addr as usize + at % 1000;
        let offset = stored.offset().map_or_else(in_chunk, |offset| offset as usize + at);
        drop(stored);
        let mut bytes = whole.clone();
        bytes[offset] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        for verify in [Verify::FirstPass, Verify::Always] {
            let error = with(verify).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let error = error.to_string();
            assert!(
                error.starts_with(&format!("{}: {place} has checksum ", path.display())),
                "{error}"
            );
            assert!(error.contains("\nhint: copy or import the shard again"), "{error}");
        }
        // The number is still valid: without a comparison the change goes unnoticed.
        assert_ne!(with(Verify::Off).unwrap(), sound, "{dataset}");
        std::fs::write(&path, whole).unwrap();
    }
    let path = rows.path.join("train-00001.h5");
    let file = shards::edit(&path);
    file.unlink("checksums/targets").unwrap();
    file.close().unwrap();
    let error = samples(&rows, 1).unwrap_err().to_string();
    assert!(
        error.contains("train-00001.h5: /targets has no checksums")
            && error.contains("data.verify"),
        "{error}"
    );
    samples(&DataSpec { verify: Verify::Off, ..rows.clone() }, 1).unwrap();
}

/// Damage that happens during a run is found by readers that always compare.
#[test]
fn only_always_compares_twice() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    let mut open = [Verify::FirstPass, Verify::Always].map(|verify| {
        Dataset::open(&DataSpec { verify, ..DataSpec::new(&out) }, Split::Train, 64).unwrap()
    });
    let read = |dataset: &mut Dataset, sample| {
        let mut ids = [0; 64];
        let mut classes = [0; 64];
        dataset.read(sample, SampleMut::text(&mut ids, &mut classes)).map(|()| ids)
    };
    let before = open.each_mut().map(|dataset| read(dataset, 0).unwrap());
    let id = before[0][0] as u8;
    set_id(&out.join("train-00000.h5"), 0, (id + 1) % 26);
    let [once, always] = &mut open;
    assert_eq!(read(once, 0).unwrap()[1..], before[0][1..]);
    assert!(read(always, 1).unwrap_err().to_string().contains("/tokens[0..65536] has checksum "));
}

#[test]
fn blocks_of_rows_are_small_and_files_the_same_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let idx = |shape: &[u32], elements: &[u8]| {
        let axes = shape.iter().flat_map(|extent| extent.to_be_bytes());
        [0, 0, 8, shape.len() as u8]
            .into_iter()
            .chain(axes)
            .chain(elements.iter().copied())
            .collect::<Vec<u8>>()
    };
    let images = dir.path().join("images");
    let labels = dir.path().join("labels");
    let pixels: Vec<u8> = (0..100 * 28 * 28u32).map(|i| (i * 7 % 251) as u8).collect();
    std::fs::write(&images, idx(&[100, 28, 28], &pixels)).unwrap();
    std::fs::write(&labels, idx(&[100], &[3; 100])).unwrap();
    let [first, again] = ["first", "again"].map(|name| {
        let out = dir.path().join(name);
        let kept = ImportOptions {
            not_finite: NotFinite::Error,
            every: 0,
            shards: 1,
            normalize: true,
            out: out.clone(),
        };
        import_idx(&ImportIdx { images: images.clone(), labels: labels.clone(), options: kept })
            .unwrap();
        // HDF5 timestamps have a resolution of one second.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        out.join("train-00000.h5")
    });
    assert!(std::fs::read(&first).unwrap() == std::fs::read(&again).unwrap());
    let file = shards::open(&first);
    let sums = file.dataset("checksums/inputs").unwrap();
    // 21 images of 784 bytes are the least that fill 16 KiB; the last block has 16.
    assert_eq!(sums.attr("checksum_block").unwrap().read_scalar::<u64>().unwrap(), 21);
    assert_eq!(sums.read_raw::<u32>().unwrap()[4], crc32fast::hash(&pixels[84 * 784..]));
    assert_eq!(verify::verify(&first).unwrap().checksums, 5 + 1);
}

#[test]
fn removed_checksums_are_a_problem_only_for_own_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), None);
    let shard = out.join("val-00000.h5");
    let file = shards::edit(&shard);
    file.unlink("checksums").unwrap();
    file.close().unwrap();
    assert!(problems(&out)[1].contains("val-00000.h5: has no checksums"));

    let foreign = dir.path().join("foreign.h5");
    let file = crate::create_hdf5(&foreign);
    file.new_dataset::<i32>().shape(3).create("tokens").unwrap().write_raw(&[1, 2, 300]).unwrap();
    file.close().unwrap();
    let report = verify::verify(&foreign).unwrap();
    assert_eq!((report.ids, report.checksums, report.notes.len()), (3, 0, 2));
    let file = shards::edit(&foreign);
    file.dataset("tokens").unwrap().write_raw(&[1, -2, 300]).unwrap();
    file.close().unwrap();
    assert!(problems(&foreign)[1].contains("/tokens[1] is token id -2"));
}

#[test]
fn inspection_shows_layout_and_origin() {
    let dir = tempfile::tempdir().unwrap();
    let out = import(dir.path(), Some(1));
    let report = inspect::inspect(&out).unwrap().to_string();
    let lines: Vec<&str> = report.lines().collect();
    assert!(lines[0].starts_with("file            dataset  shape   type   layout"), "{report}");
    assert!(
        lines[1].starts_with("train-00000.h5  /tokens  100000  uint8  chunks of 65536  deflate 1"),
        "{report}"
    );
    assert!(
        lines[3].starts_with("val-00000.h5    /tokens  50000   uint8  chunks of 50000  deflate 1"),
        "{report}"
    );
    assert!(report.contains(
        "train-00000.h5, train-00001.h5: format version 1, tokenizer char, vocabulary 26"
    ));
    assert!(report.contains("source input.txt (sha256 "), "{report}");
}
