//! Rows with targets: import, reading, and what is said of data that cannot be trained on.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use hpctrain::data::import::{Categories, ImportCsv, ImportIdx, Kept, NotFinite, import_csv, import_idx};
use hpctrain::data::{Augment, DataSpec, Dataset, Ids, Loader, SampleMut, Sampler, Split, Target, Wants, verify};

fn idx(shape: &[u32], elements: &[u8]) -> Vec<u8> {
    let axes = shape.iter().flat_map(|extent| extent.to_be_bytes());
    [0, 0, 8, shape.len() as u8].into_iter().chain(axes).chain(elements.iter().copied()).collect()
}

fn write(path: PathBuf, bytes: &[u8]) -> PathBuf {
    std::fs::write(&path, bytes).unwrap();
    path
}

fn kept(out: PathBuf) -> Kept {
    Kept { not_finite: NotFinite::Error, every: 5, shards: 2, normalize: true, out }
}

/// A row: inputs, classes, values.
type Row = (Vec<f32>, Vec<u32>, Vec<f32>);

/// Every row of a split, or why there is none.
fn rows(path: &Path, split: Split, input: usize, target: Target) -> hpctrain::error::Result<Vec<Row>> {
    let wants = Wants::Rows { input, ids: Ids::None, target };
    let mut dataset = Dataset::open(&DataSpec { wants, ..DataSpec::new(path) }, split, 1)?;
    let sizes = dataset.sizes();
    let mut all = Vec::new();
    for sample in 0..dataset.samples() {
        let (mut features, mut classes) = (vec![0.0; sizes.features], vec![0; sizes.classes]);
        let mut values = vec![0.0; sizes.values];
        let into =
            SampleMut { features: &mut features, classes: &mut classes, values: &mut values, ..SampleMut::default() };
        dataset.read(sample, into)?;
        all.push((features, classes, values));
    }
    Ok(all)
}

#[test]
fn images_arrive_on_a_common_scale_each_where_it_belongs() {
    let root = tempfile::tempdir().unwrap();
    let pixels: Vec<u8> = (0..11 * 6).map(|i| (i * 29 % 251) as u8).collect();
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(&idx(&[11, 2, 3], &pixels)).unwrap();
    let images = write(root.path().join("images.gz"), &gzip.finish().unwrap());
    let labels = write(root.path().join("labels"), &idx(&[11], &[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]));
    let out = root.path().join("out");
    let imported = import_idx(&ImportIdx { images, labels, kept: kept(out.clone()) }).unwrap();
    assert_eq!((imported.shape, imported.classes), (vec![2, 3, 1], Some(10)));
    let count: Vec<usize> = imported.shards.iter().map(|(_, rows)| *rows).collect();
    assert_eq!(count, [5, 4, 2]);

    // The fifth and the tenth are kept for validation.
    let train: Vec<usize> = (0..11).filter(|row| row % 5 != 4).collect();
    let numbers = |row: usize| pixels[row * 6..][..6].iter().map(|pixel| f64::from(*pixel));
    let all: Vec<f64> = train.iter().flat_map(|row| numbers(*row)).collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let std = (all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64).sqrt();
    for (split, wanted) in [(Split::Train, &train[..]), (Split::Validation, &[4, 9])] {
        let rows = rows(&out, split, 6, Target::Class(10)).unwrap();
        assert_eq!(rows.len(), wanted.len());
        for ((features, classes, _), row) in rows.iter().zip(wanted) {
            assert_eq!(classes[..], [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5][*row]]);
            let off = features.iter().zip(numbers(*row)).map(|(x, pixel)| (f64::from(*x) - (pixel - mean) / std).abs());
            assert!(off.fold(0.0, f64::max) < 1e-5);
        }
    }
}

#[test]
fn a_table_is_of_classes_or_of_numbers() {
    let root = tempfile::tempdir().unwrap();
    let table = "x, kind ,y\n1,0,2.5\n2,1,-1\n3,2,4e1\n4,0,0\n5,1,7\n6,2,1\n";
    let input = write(root.path().join("table.csv"), table.as_bytes());
    let import = |name: &str, targets: &[&str], regression| {
        let targets = targets.iter().map(|name| name.to_string()).collect();
        let kept =
            Kept { not_finite: NotFinite::Error, every: 3, shards: 1, normalize: false, out: root.path().join(name) };
        let imported = import_csv(&ImportCsv {
            input: input.clone(),
            targets,
            weight: None,
            regression,
            categories: Categories::NONE,
            kept,
        })
        .unwrap();
        (root.path().join(name), imported)
    };
    let (path, imported) = import("classes", &["kind"], false);
    assert_eq!((imported.shape, imported.classes), (vec![2], Some(3)));
    let train = rows(&path, Split::Train, 2, Target::Class(3)).unwrap();
    let want = [([1.0, 2.5], 0), ([2.0, -1.0], 1), ([4.0, 0.0], 0), ([5.0, 7.0], 1)];
    assert_eq!(train, want.map(|(x, class)| (x.to_vec(), vec![class], vec![])));
    let (path, imported) = import("numbers", &["y", "x"], false);
    assert_eq!((imported.shape, imported.classes), (vec![1], None));
    let validation = rows(&path, Split::Validation, 1, Target::Values(2)).unwrap();
    assert_eq!(validation, [(vec![2.0], vec![], vec![40.0, 3.0]), (vec![2.0], vec![], vec![1.0, 6.0])]);
    assert_eq!(import("forced", &["kind"], true).1.classes, None);
}

/// A row of a table: numbers, ids of categories, class.
type TableRow = (Vec<f32>, Vec<u32>, u32);

/// Every training row of a table.
fn table_rows(path: &Path, input: usize, tables: &[usize]) -> hpctrain::error::Result<Vec<TableRow>> {
    let wants = Wants::Rows { input, ids: Ids::Tables(tables.into()), target: Target::Class(2) };
    let mut dataset = Dataset::open(&DataSpec { wants, ..DataSpec::new(path) }, Split::Train, 1)?;
    let mut all = Vec::new();
    for sample in 0..dataset.samples() {
        let (mut features, mut ids, mut classes) = (vec![0.0; input], vec![0; tables.len()], [0]);
        let into = SampleMut {
            ids: &mut ids,
            features: &mut features,
            classes: &mut classes,
            values: &mut [],
            weights: &mut [],
        };
        dataset.read(sample, into)?;
        all.push((features, ids, classes[0]));
    }
    Ok(all)
}

#[test]
fn categories_become_ids_and_later_tables_the_same() {
    let root = tempfile::tempdir().unwrap();
    let import = |name: &str, table: &str, categories: Categories, normalize: bool| {
        let input = write(root.path().join(name).with_extension("csv"), table.as_bytes());
        let kept = Kept { not_finite: NotFinite::Error, every: 0, shards: 1, normalize, out: root.path().join(name) };
        import_csv(&ImportCsv { input, targets: vec!["y".into()], weight: None, regression: false, categories, kept })
    };
    let named = |columns: &[&str], hash| {
        let columns = columns.iter().map(|name| name.to_string()).collect();
        Categories::Named { columns, hash }
    };
    let table = "city,age,y, device\nRome,10,0,pc\nOslo,20,1,phone\n,30,1,pc\nRome,20,0, tablet \n";
    let imported = import("first", table, named(&["device", "city"], None), true).unwrap();
    assert_eq!((&imported.shape[..], &imported.tables[..]), (&[1][..], &[4, 3][..]));
    assert!(imported.to_string().ends_with("; embedding_tables: ids = [4, 3]"), "{imported}");
    // Of numbers 10, 20, 30, 20; the ids of the second table begin at 4.
    let at = |age: f32| vec![(age - 20.0) / 50f32.sqrt()];
    let rows = table_rows(&root.path().join("first"), 1, &[4, 3]).unwrap();
    let want =
        [(at(10.0), vec![1, 5], 0), (at(20.0), vec![2, 6], 1), (at(30.0), vec![1, 4], 1), (at(20.0), vec![3, 5], 0)];
    assert_eq!(rows, want);

    // Other order of columns, one more, values that were not there: the scale and the ids of the first table.
    let later = "y,device,note,age,city\n1,phone,?,40,Rome\n0,radio,?,10,Oslo\n";
    let like = || Categories::Like(root.path().join("first"));
    assert_eq!(import("later", later, like(), true).unwrap().tables, [4, 3]);
    let rows = table_rows(&root.path().join("later"), 1, &[4, 3]).unwrap();
    assert_eq!(rows, [(at(40.0), vec![2, 5], 1), (at(10.0), vec![0, 6], 0)]);
    let error = import("lacking", "y,age,city\n1,2,Rome\n", like(), true).unwrap_err().to_string();
    assert!(error.contains("there is no column \"device\"\nhint: its columns: y, age, city"), "{error}");

    let imported = import("hashed", table, named(&["city", "device", "age"], Some(50)), true).unwrap();
    assert_eq!((&imported.shape[..], &imported.tables[..]), (&[0][..], &[50, 50, 50][..]));
    let rows = table_rows(&root.path().join("hashed"), 0, &[50, 50, 50]).unwrap();
    assert!(rows[0].1 != rows[1].1 && rows[0].1[0] == rows[3].1[0] && rows[2].1[0] == 0, "{rows:?}");
    assert!(rows.iter().all(|(_, ids, _)| ids[0] < 50 && (50..100).contains(&ids[1]) && (100..150).contains(&ids[2])));

    for (categories, wanted) in [
        (named(&["town"], None), "there is no column \"town\""),
        (named(&["city", "city"], None), "column \"city\" is asked for twice\nhint: "),
        (named(&["y"], None), "column \"y\" is asked for twice"),
        (named(&["city"], Some(1)), "values hashed to 1 ids\nhint: "),
        (named(&[], None), "line 2, column \"city\": \"Rome\" is no number\nhint: "),
        (Categories::Like(root.path().join("none")), "does not exist"),
    ] {
        let error = import("refused", table, categories, true).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn ids_of_categories_fit_their_tables() {
    let root = tempfile::tempdir().unwrap();
    let file = |name: &str, ids: &[i32]| {
        let path = root.path().join(name);
        let file = hdf5::File::create(&path).unwrap();
        file.new_dataset::<i32>().shape([2, 2]).create("categories").unwrap().write_raw(ids).unwrap();
        file.new_dataset::<i32>().shape(2).create("targets").unwrap().write_raw(&[0, 1]).unwrap();
        path
    };
    let good = file("good.h5", &[0, 1, 2, 0]);
    assert_eq!(table_rows(&good, 0, &[3, 2]).unwrap(), [(vec![], vec![0, 4], 0), (vec![], vec![2, 3], 1)]);
    assert!(verify::verify(&good).unwrap().to_string().contains("6 ids"));
    for (path, tables, wanted) in [
        (&good, &[2, 2][..], "/categories[1, 0] is id 2, but table 0 has 2 rows\nhint: "),
        (&good, &[3, 1], "/categories[0, 1] is id 1, but table 1 has 1 rows"),
        (&good, &[3, 1, 5], "/categories has rows of 2, but the network has 3 embedding tables\nhint: "),
        (&file("bad.h5", &[0, 1, -2, 0]), &[3, 2], "/categories[1, 0] is id -2, but table 0 has 3 rows"),
    ] {
        let error = table_rows(path, 0, tables).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted), "{error}");
    }
    let error = table_rows(&good, 3, &[3, 2]).unwrap_err().to_string();
    assert!(error.contains("has no dataset /inputs\nhint: the file holds /categories, /targets"), "{error}");
}

#[test]
fn malformed_files_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let images = idx(&[2, 2, 1], &[1, 2, 3, 4]);
    let labels = idx(&[2], &[0, 1]);
    let cases: [(&[u8], &[u8], &str); 6] = [
        (b"PNG", &labels, "images: not an IDX file of bytes: it begins with"),
        (&images[..images.len() - 1], &labels, "3 elements for shape [2, 2, 1]"),
        (&[0, 0, 0x0d, 1, 0, 0, 0, 1, 0, 0, 0, 0], &labels, "elements of type 0x0d"),
        (&labels, &labels, "images: has one axis"),
        (&images, &idx(&[3], &[0, 1, 2]), "labels: has shape [3], but there are 2 images"),
        (&[0, 0, 8, 3, 0], &labels, "1 bytes for 3 axes"),
    ];
    let out = root.path().join("out");
    for (images, labels, wanted) in cases {
        let images = write(root.path().join("images"), images);
        let labels = write(root.path().join("labels"), labels);
        let kept = Kept { not_finite: NotFinite::Error, every: 0, shards: 1, normalize: true, out: out.clone() };
        let error = import_idx(&ImportIdx { images, labels, kept }).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted) && error.to_string().contains("\nhint: "), "{error}");
    }
    for (table, target, wanted) in [
        ("a,b\n1,2\n3,x\n", "b", "line 3, column \"b\": \"x\" is no number"),
        ("a,b\n1,nan\n", "b", "line 2, column \"b\": \"nan\" is no number"),
        ("a,b\n1,2\n3\n", "b", "line: 3"),
        ("a,b\n1,2\n", "c", "there is no column \"c\"\nhint: its columns: a, b"),
        ("a\n1\n", "a", "1 columns, 1 of them targets"),
        ("a,b\n", "b", "no lines after the header"),
    ] {
        let input = write(root.path().join("table.csv"), table.as_bytes());
        let kept = Kept { not_finite: NotFinite::Error, every: 0, shards: 1, normalize: true, out: out.clone() };
        let import = ImportCsv {
            input,
            targets: vec![target.into()],
            weight: None,
            regression: false,
            categories: Categories::NONE,
            kept,
        };
        let error = import_csv(&import).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted), "{table:?}: {error}");
    }
    assert!(!out.exists());
}

#[test]
fn rows_that_are_not_finite_are_left_out_and_counted() {
    let root = tempfile::tempdir().unwrap();
    let table = "x,y,kind\n1,2,0\n2,nan,1\n3,4,\n4,-inf,1\n5,1e39,0\n6,7,1\n8,9,2\n10,11,0\n";
    let input = write(root.path().join("table.csv"), table.as_bytes());
    let out = root.path().join("out");
    let import = |not_finite| {
        let kept = Kept { not_finite, every: 3, shards: 1, normalize: true, out: out.clone() };
        import_csv(&ImportCsv {
            input: input.clone(),
            targets: vec!["kind".into()],
            weight: None,
            regression: false,
            categories: Categories::NONE,
            kept,
        })
    };
    let error = import(NotFinite::Error).unwrap_err().to_string();
    assert!(error.contains("line 3, column \"y\": \"nan\" is no number\nhint: "), "{error}");
    let imported = import(NotFinite::Skip).unwrap();
    assert_eq!((imported.skipped, imported.classes), (4, Some(3)));
    let told = "4 rows with numbers that are not finite were left out when the data was imported";
    assert!(imported.to_string().ends_with(told), "{imported}");
    // As if they had not been there: the third of the four that are left is kept for validation, and does not count in the scale.
    let rest = write(root.path().join("rest.csv"), b"x,y,kind\n1,2,0\n6,7,1\n8,9,2\n10,11,0\n");
    let kept = Kept { every: 3, ..kept(root.path().join("rest")) };
    let kept = Kept { shards: 1, ..kept };
    import_csv(&ImportCsv {
        input: rest,
        targets: vec!["kind".into()],
        weight: None,
        regression: false,
        categories: Categories::NONE,
        kept,
    })
    .unwrap();
    for split in [Split::Train, Split::Validation] {
        let both = [&out, &root.path().join("rest")].map(|path| rows(path, split, 2, Target::Class(3)).unwrap());
        assert_eq!(both[0], both[1], "{split}");
    }
    let report = verify::verify(&out).unwrap();
    assert!(report.notes.iter().any(|note| note == told), "{report}");
    let wants = Wants::Rows { input: 2, ids: Ids::None, target: Target::Class(3) };
    let dataset = Dataset::open(&DataSpec { wants, ..DataSpec::new(&out) }, Split::Train, 1).unwrap();
    assert_eq!(dataset.left_out().as_deref(), Some(told));
}

#[test]
fn images_are_augmented_before_they_are_scaled_by_epoch_and_number() {
    let root = tempfile::tempdir().unwrap();
    let pixels: Vec<u8> = (0..10 * 30).map(|i| (i * 29 % 250 + 1) as u8).collect();
    let images = write(root.path().join("images"), &idx(&[10, 5, 6], &pixels));
    let labels = write(root.path().join("labels"), &idx(&[10], &[0; 10]));
    let out = root.path().join("out");
    import_idx(&ImportIdx { images, labels, kept: Kept { every: 0, ..kept(out.clone()) } }).unwrap();
    let open = |by: Option<Augment>| {
        let wants = Wants::Rows { input: 30, ids: Ids::None, target: Target::Class(1) };
        let mut dataset = Dataset::open(&DataSpec { wants, ..DataSpec::new(&out) }, Split::Train, 1).unwrap();
        by.into_iter().for_each(|by| dataset.augment(by, &[5, 6, 1], 3).unwrap());
        dataset
    };
    let read = |by, range: std::ops::Range<u64>| {
        let once = std::iter::once(range);
        Loader::start(open(by), Sampler::in_order(10), once, 1).unwrap().next().unwrap().features
    };
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let plain = read(None, 0..10);
    let by = Augment { flip: true, shift: 1, crop: 2 };
    let all = read(Some(by), 0..40);
    assert_eq!(bits(&read(Some(Augment::default()), 0..10)), bits(&plain));
    // What a stored zero becomes: no pixel is one, but padding is.
    let black = bits(&all).into_iter().find(|x| !bits(&plain).contains(x)).unwrap();
    let mut moved = 0;
    for (position, image) in all.chunks_exact(30).enumerate() {
        let original = bits(&plain[position % 10 * 30..][..30]);
        assert!(bits(image).iter().all(|x| *x == black || original.contains(x)), "{position}");
        moved += usize::from(bits(image) != original);
    }
    assert!(moved > 30, "{moved}");
    assert_ne!(bits(&all[..300]), bits(&all[300..600]));
    // However positions are cut into batches, and across the end of an epoch.
    let pieces: Vec<f32> = [0..7, 7..13, 13..40].into_iter().flat_map(|range| read(Some(by), range)).collect();
    assert_eq!(bits(&pieces), bits(&all));
}

#[test]
fn rows_are_verified() {
    let root = tempfile::tempdir().unwrap();
    foreign(&root.path().join("train-0.h5"), &[1.0, 2.0, 3.0, 4.0], &[0, 1], 2);
    let report = verify::verify(root.path()).unwrap();
    assert_eq!((report.files, report.ids, report.numbers), (1, 2, 4));
    foreign(&root.path().join("train-1.h5"), &[1.0, f32::NAN, f32::INFINITY, 4.0], &[0, -1], 2);
    let error = verify::verify(root.path()).unwrap_err().to_string();
    for problem in [
        "train-1.h5: /inputs[0, 1] is NaN",
        "train-1.h5: /inputs has 2 elements that are no numbers in all",
        "train-1.h5: /targets[1] is token id -1",
    ] {
        assert!(error.contains(problem), "{problem:?} is missing: {error}");
    }
}

/// A file of somebody else's make.
fn foreign(path: &Path, inputs: &[f32], targets: &[i32], width: usize) {
    let file = hdf5::File::create(path).unwrap();
    let rows = inputs.len() / width;
    file.new_dataset::<f32>().shape([rows, width]).create("inputs").unwrap().write_raw(inputs).unwrap();
    file.new_dataset::<i32>().shape(targets.len()).create("targets").unwrap().write_raw(targets).unwrap();
}

#[test]
fn rows_that_cannot_be_learned_name_their_place() {
    let refused = |inputs: &[f32], targets: &[i32], input, target| {
        let root = tempfile::tempdir().unwrap();
        foreign(&root.path().join("train-0.h5"), inputs, targets, 2);
        let error = rows(root.path(), Split::Train, input, target).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let good = [1.0, 2.0, 3.0, 4.0];
    let class = Target::Class(3);
    for (error, wanted) in [
        (refused(&[1.0, 2.0, 3.0, f32::NAN], &[0, 1], 2, class), "train-0.h5: /inputs[1, 1] is NaN"),
        (refused(&[f32::INFINITY, 2.0, 3.0, 1.0], &[0, 1], 2, class), "train-0.h5: /inputs[0, 0] is inf"),
        (refused(&good, &[0, 3], 2, class), "/targets[1] is class 3, but the network knows 0 to 2"),
        (refused(&good, &[0, -1], 2, class), "/targets[1] is class -1, but the network knows 0 to 2"),
        (refused(&good, &[0, 1], 3, class), "/inputs has rows of 2, but model.input has 3 elements"),
        (refused(&good, &[0, 1], 2, Target::Values(2)), "/targets has rows of 1, but the network predicts 2"),
        (refused(&good, &[0, 1, 2], 2, class), "/inputs has 2 rows, but /targets has 3"),
    ] {
        assert!(error.contains(wanted) && error.contains("\nhint: "), "{error}");
    }
}
