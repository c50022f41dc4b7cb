//! Rows with targets: import, reading, and the errors of data that cannot be trained on.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use hpctrain::data::import::{
    Categories, CategoryIds, ImportCsv, ImportIdx, ImportOptions, NotFinite, import_csv, import_idx,
};
use hpctrain::data::{
    Augment, Axes, DataSpec, Dataset, Ids, InputScale, Loader, SampleMut, SampleSpec, Sampler,
    Split, Target, ValidationSource, verify,
};

use hpctrain_testkit::launch::{finish, program};

fn idx(shape: &[u32], elements: &[u8]) -> Vec<u8> {
    let axes = shape.iter().flat_map(|extent| extent.to_be_bytes());
    [0, 0, 8, shape.len() as u8].into_iter().chain(axes).chain(elements.iter().copied()).collect()
}

fn write(path: PathBuf, bytes: &[u8]) -> PathBuf {
    std::fs::write(&path, bytes).unwrap();
    path
}

fn kept(out: PathBuf) -> ImportOptions {
    ImportOptions { not_finite: NotFinite::Error, every: 5, shards: 2, normalize: true, out }
}

/// A row: inputs, classes, values.
type SampleRow = (Vec<f32>, Vec<u32>, Vec<f32>);

/// Returns every row of a split, or the error.
fn rows(
    path: &Path,
    split: Split,
    input: usize,
    target: Target,
) -> hpctrain::error::Result<Vec<SampleRow>> {
    let samples = SampleSpec::Rows { input, ids: Ids::None, target };
    let mut dataset = Dataset::open(&DataSpec { samples, ..DataSpec::new(path) }, split, 1)?;
    let sizes = dataset.sizes();
    let mut all = Vec::new();
    for sample in 0..dataset.samples() {
        let mut features = vec![0.0; sizes.features];
        let mut classes = vec![0; sizes.classes];
        let mut values = vec![0.0; sizes.values];
        let into = SampleMut {
            features: &mut features,
            classes: &mut classes,
            values: &mut values,
            ..SampleMut::default()
        };
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
    let imported = import_idx(&ImportIdx { images, labels, options: kept(out.clone()) }).unwrap();
    assert_eq!((imported.shape, imported.classes), (vec![2, 3, 1], Some(10)));
    let count: Vec<usize> = imported.shards.iter().map(|(_, rows)| *rows).collect();
    assert_eq!(count, [5, 4, 2]);

    // The fifth and the tenth row are kept for validation.
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
            let off = features
                .iter()
                .zip(numbers(*row))
                .map(|(x, pixel)| (f64::from(*x) - (pixel - mean) / std).abs());
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
        let kept = ImportOptions {
            not_finite: NotFinite::Error,
            every: 3,
            shards: 1,
            normalize: false,
            out: root.path().join(name),
        };
        let imported =
            import_csv(&ImportCsv { targets, regression, ..ImportCsv::new(input.clone(), kept) })
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
    assert_eq!(
        validation,
        [(vec![2.0], vec![], vec![40.0, 3.0]), (vec![2.0], vec![], vec![1.0, 6.0])]
    );
    assert_eq!(import("forced", &["kind"], true).1.classes, None);
}

/// A row of a table: numbers, ids of categories, class.
type TableRow = (Vec<f32>, Vec<u32>, u32);

/// Returns every training row of a table.
fn table_rows(
    path: &Path,
    input: usize,
    tables: &[usize],
) -> hpctrain::error::Result<Vec<TableRow>> {
    let samples =
        SampleSpec::Rows { input, ids: Ids::Tables(tables.into()), target: Target::Class(2) };
    let mut dataset = Dataset::open(&DataSpec { samples, ..DataSpec::new(path) }, Split::Train, 1)?;
    let mut all = Vec::new();
    for sample in 0..dataset.samples() {
        let mut features = vec![0.0; input];
        let mut ids = vec![0; tables.len()];
        let mut classes = [0];
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
        let kept = ImportOptions {
            not_finite: NotFinite::Error,
            every: 0,
            shards: 1,
            normalize,
            out: root.path().join(name),
        };
        import_csv(&ImportCsv {
            targets: vec!["y".into()],
            categories,
            ..ImportCsv::new(input, kept)
        })
    };
    let named = |columns: &[&str], hash: Option<u32>| {
        let columns = columns.iter().map(|name| name.to_string()).collect();
        let ids = hash.map_or(CategoryIds::APPEARANCE, CategoryIds::Hashed);
        Categories::Named { columns, ids }
    };
    let table = "city,age,y, device\nRome,10,0,pc\nOslo,20,1,phone\n,30,1,pc\nRome,20,0, tablet \n";
    let imported = import("first", table, named(&["device", "city"], None), true).unwrap();
    assert_eq!((&imported.shape[..], &imported.tables[..]), (&[1][..], &[4, 3][..]));
    assert!(imported.to_string().ends_with("; embedding_tables: ids = [4, 3]"), "{imported}");
    // The numbers 10, 20, 30, 20; the ids of the second table begin at 4.
    let at = |age: f32| vec![(age - 20.0) / 50f32.sqrt()];
    let rows = table_rows(&root.path().join("first"), 1, &[4, 3]).unwrap();
    let want = [
        (at(10.0), vec![1, 5], 0),
        (at(20.0), vec![2, 6], 1),
        (at(30.0), vec![1, 4], 1),
        (at(20.0), vec![3, 5], 0),
    ];
    assert_eq!(rows, want);

    // Another order of columns, one more column, and new values: the scale and the ids are those of
    // the first table.
    let later = "y,device,note,age,city\n1,phone,?,40,Rome\n0,radio,?,10,Oslo\n";
    let like = || Categories::Like(root.path().join("first"));
    assert_eq!(import("later", later, like(), true).unwrap().tables, [4, 3]);
    let rows = table_rows(&root.path().join("later"), 1, &[4, 3]).unwrap();
    assert_eq!(rows, [(at(40.0), vec![2, 5], 1), (at(10.0), vec![0, 6], 0)]);
    let error = import("lacking", "y,age,city\n1,2,Rome\n", like(), true).unwrap_err().to_string();
    assert!(
        error.contains("there is no column \"device\"\nhint: its columns: y, age, city"),
        "{error}"
    );

    // The target of the first table, named or not; without its column rows are to be predicted.
    let unnamed = |name: &str, table: &str, categories: Categories| {
        let input = write(root.path().join(name).with_extension("csv"), table.as_bytes());
        let kept = ImportOptions {
            not_finite: NotFinite::Error,
            every: 2,
            shards: 1,
            normalize: true,
            out: root.path().join(name),
        };
        import_csv(&ImportCsv { categories, ..ImportCsv::new(input, kept) })
    };
    let again = unnamed("again", later, like()).unwrap();
    assert!(again.has_targets && again.shards.len() == 2, "{again}");
    let new = unnamed("new", "device,age,city\nphone,40,Rome\nradio,10,Oslo\n", like()).unwrap();
    assert!(!new.has_targets && new.shards.len() == 1, "{new}");
    assert!(
        new.to_string()
            .contains("model.input = [1], without targets: for hpctrain predict; embedding_tables"),
        "{new}"
    );
    let error = table_rows(&root.path().join("new"), 1, &[4, 3]).unwrap_err().to_string();
    assert!(error.contains("has no dataset /targets"), "{error}");
    let alone = unnamed("alone", "a,b\n1,2\n3,4\n", Categories::NONE).unwrap();
    assert_eq!((alone.has_targets, &alone.shape[..], alone.shards[0].1), (false, &[2][..], 2));
    verify::verify(&root.path().join("new")).unwrap();

    let imported =
        import("hashed", table, named(&["city", "device", "age"], Some(50)), true).unwrap();
    assert_eq!((&imported.shape[..], &imported.tables[..]), (&[0][..], &[50, 50, 50][..]));
    let rows = table_rows(&root.path().join("hashed"), 0, &[50, 50, 50]).unwrap();
    assert!(
        rows[0].1 != rows[1].1 && rows[0].1[0] == rows[3].1[0] && rows[2].1[0] == 0,
        "{rows:?}"
    );
    assert!(rows.iter().all(|(_, ids, _)| ids[0] < 50
        && (50..100).contains(&ids[1])
        && (100..150).contains(&ids[2])));

    for (categories, wanted) in [
        (named(&["town"], None), "there is no column \"town\""),
        (named(&["city", "city"], None), "--categorical names column \"city\" twice\nhint: "),
        (named(&["y"], None), "--target and --categorical both name column \"y\"\nhint: "),
        (named(&["city"], Some(1)), "values hashed to 1 ids\nhint: "),
        (named(&[], None), "line 2, column \"city\": \"Rome\" is not a number\nhint: "),
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
        let file = crate::create_hdf5(&path);
        file.new_dataset::<i32>()
            .shape([2, 2])
            .create("categories")
            .unwrap()
            .write_raw(ids)
            .unwrap();
        file.new_dataset::<i32>().shape(2).create("targets").unwrap().write_raw(&[0, 1]).unwrap();
        path
    };
    let good = file("good.h5", &[0, 1, 2, 0]);
    assert_eq!(
        table_rows(&good, 0, &[3, 2]).unwrap(),
        [(vec![], vec![0, 4], 0), (vec![], vec![2, 3], 1)]
    );
    assert!(verify::verify(&good).unwrap().to_string().contains("6 ids"));
    for (path, tables, wanted) in [
        (&good, &[2, 2][..], "/categories[1, 0] is id 2, but table 0 has 2 rows\nhint: "),
        (&good, &[3, 1], "/categories[0, 1] is id 1, but table 1 has 1 rows"),
        (
            &good,
            &[3, 1, 5],
            "/categories has rows of 2, but the network has 3 embedding tables\nhint: ",
        ),
        (
            &file("bad.h5", &[0, 1, -2, 0]),
            &[3, 2],
            "/categories[1, 0] is id -2, but table 0 has 3 rows",
        ),
    ] {
        let error = table_rows(path, 0, tables).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted), "{error}");
    }
    let error = table_rows(&good, 3, &[3, 2]).unwrap_err().to_string();
    assert!(
        error.contains("has no dataset /inputs\nhint: the file holds /categories, /targets"),
        "{error}"
    );
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
        let kept = ImportOptions {
            not_finite: NotFinite::Error,
            every: 0,
            shards: 1,
            normalize: true,
            out: out.clone(),
        };
        let error = import_idx(&ImportIdx { images, labels, options: kept }).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.to_string().contains(wanted) && error.to_string().contains("\nhint: "),
            "{error}"
        );
    }
    for (table, target, wanted) in [
        ("a,b\n1,2\n3,x\n", "b", "line 3, column \"b\": \"x\" is not a number"),
        (
            "a,b\n1,nan\n",
            "b",
            "line 2, column \"b\": \"nan\" is a missing number, or the name of a class",
        ),
        ("a,b\n1,2\n3\n", "b", "line: 3"),
        ("a,b\n1,2\n", "c", "there is no column \"c\"\nhint: its columns: a, b"),
        ("a\n1\n", "a", "1 columns, 1 of them targets"),
        ("a,b\n", "b", "no lines after the header"),
    ] {
        let input = write(root.path().join("table.csv"), table.as_bytes());
        let kept = ImportOptions {
            not_finite: NotFinite::Error,
            every: 0,
            shards: 1,
            normalize: true,
            out: out.clone(),
        };
        let import = ImportCsv { targets: vec![target.into()], ..ImportCsv::new(input, kept) };
        let error = import_csv(&import).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted), "{table:?}: {error}");
    }
    assert!(!out.exists());
}

#[test]
fn rows_that_are_not_finite_are_skipped_and_counted() {
    let root = tempfile::tempdir().unwrap();
    let table = "x,y,kind\n1,2,0\n2,nan,1\n3,4,\n4,-inf,1\n5,1e39,0\n6,7,1\n8,9,2\n10,11,0\n";
    let input = write(root.path().join("table.csv"), table.as_bytes());
    let out = root.path().join("out");
    let import = |not_finite| {
        let kept =
            ImportOptions { not_finite, every: 3, shards: 1, normalize: true, out: out.clone() };
        import_csv(&ImportCsv {
            targets: vec!["kind".into()],
            ..ImportCsv::new(input.clone(), kept)
        })
    };
    let error = import(NotFinite::Error).unwrap_err().to_string();
    assert!(error.contains("line 3, column \"y\": \"nan\" is a missing value\nhint: "), "{error}");
    let imported = import(NotFinite::Skip).unwrap();
    assert_eq!((imported.skipped, imported.classes), (4, Some(3)));
    let note = "4 rows with numbers that are missing or not finite were skipped when the data was imported";
    assert!(imported.to_string().ends_with(note), "{imported}");
    // As if they were not in the table: the third of the four remaining rows is kept for
    // validation, and does not count in the scale.
    let rest = write(root.path().join("rest.csv"), b"x,y,kind\n1,2,0\n6,7,1\n8,9,2\n10,11,0\n");
    let kept = ImportOptions { every: 3, ..kept(root.path().join("rest")) };
    let kept = ImportOptions { shards: 1, ..kept };
    import_csv(&ImportCsv { targets: vec!["kind".into()], ..ImportCsv::new(rest, kept) }).unwrap();
    for split in [Split::Train, Split::Validation] {
        let both = [&out, &root.path().join("rest")]
            .map(|path| rows(path, split, 2, Target::Class(3)).unwrap());
        assert_eq!(both[0], both[1], "{split}");
    }
    let report = verify::verify(&out).unwrap();
    assert!(report.notes.iter().any(|found| found == note), "{report}");
    let samples = SampleSpec::Rows { input: 2, ids: Ids::None, target: Target::Class(3) };
    let dataset =
        Dataset::open(&DataSpec { samples, ..DataSpec::new(&out) }, Split::Train, 1).unwrap();
    assert_eq!(dataset.skipped_note().as_deref(), Some(note));
}

#[test]
fn images_are_augmented_before_they_are_scaled_by_epoch_and_number() {
    let root = tempfile::tempdir().unwrap();
    let pixels: Vec<u8> = (0..10 * 30).map(|i| (i * 29 % 250 + 1) as u8).collect();
    let images = write(root.path().join("images"), &idx(&[10, 5, 6], &pixels));
    let labels = write(root.path().join("labels"), &idx(&[10], &[0; 10]));
    let out = root.path().join("out");
    import_idx(&ImportIdx {
        images,
        labels,
        options: ImportOptions { every: 0, ..kept(out.clone()) },
    })
    .unwrap();
    let open = |by: Option<Augment>| {
        let samples = SampleSpec::Rows { input: 30, ids: Ids::None, target: Target::Class(1) };
        let mut dataset =
            Dataset::open(&DataSpec { samples, ..DataSpec::new(&out) }, Split::Train, 1).unwrap();
        by.into_iter().for_each(|by| dataset.augment(by, &[5, 6, 1], 3).unwrap());
        dataset
    };
    let read = |by, range: std::ops::Range<u64>| {
        let once = std::iter::once(range);
        Loader::start(open(by), Sampler::in_order(10), once, 1)
            .unwrap()
            .next()
            .unwrap()
            .parts
            .features
    };
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let plain = read(None, 0..10);
    let by = Augment { flip: true, shift: 1, crop: 2 };
    let all = read(Some(by), 0..40);
    assert_eq!(bits(&read(Some(Augment::default()), 0..10)), bits(&plain));
    // The value of a stored zero, which no pixel is but padding is.
    let black = bits(&all).into_iter().find(|x| !bits(&plain).contains(x)).unwrap();
    let mut moved = 0;
    for (position, image) in all.chunks_exact(30).enumerate() {
        let original = bits(&plain[position % 10 * 30..][..30]);
        assert!(bits(image).iter().all(|x| *x == black || original.contains(x)), "{position}");
        moved += usize::from(bits(image) != original);
    }
    assert!(moved > 30, "{moved}");
    assert_ne!(bits(&all[..300]), bits(&all[300..600]));
    // Batches may be cut anywhere, and extend across the end of an epoch.
    let pieces: Vec<f32> =
        [0..7, 7..13, 13..40].into_iter().flat_map(|range| read(Some(by), range)).collect();
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
        "train-1.h5: /inputs has 2 elements in all that are not finite numbers",
        "train-1.h5: /targets[1] is token id -1",
    ] {
        assert!(error.contains(problem), "{problem:?} is missing: {error}");
    }
}

/// Creates a file like those of another program.
fn foreign(path: &Path, inputs: &[f32], targets: &[i32], width: usize) {
    let file = crate::create_hdf5(path);
    let rows = inputs.len() / width;
    file.new_dataset::<f32>()
        .shape([rows, width])
        .create("inputs")
        .unwrap()
        .write_raw(inputs)
        .unwrap();
    file.new_dataset::<i32>()
        .shape(targets.len())
        .create("targets")
        .unwrap()
        .write_raw(targets)
        .unwrap();
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
        (
            refused(&[1.0, 2.0, 3.0, f32::NAN], &[0, 1], 2, class),
            "train-0.h5: /inputs[1, 1] is NaN",
        ),
        (
            refused(&[f32::INFINITY, 2.0, 3.0, 1.0], &[0, 1], 2, class),
            "train-0.h5: /inputs[0, 0] is inf",
        ),
        (refused(&good, &[0, 3], 2, class), "/targets[1] is class 3, but the network knows 0 to 2"),
        (
            refused(&good, &[0, -1], 2, class),
            "/targets[1] is class -1, but the network knows 0 to 2",
        ),
        (
            refused(&good, &[0, 1], 3, class),
            "/inputs has rows of 2, but model.input has 3 elements",
        ),
        (
            refused(&good, &[0, 1], 2, Target::Values(2)),
            "/targets has rows of 1, but the network predicts 2",
        ),
        (refused(&good, &[0, 1, 2], 2, class), "/inputs has 2 rows, but /targets has 3"),
    ] {
        assert!(error.contains(wanted) && error.contains("\nhint: "), "{error}");
    }
    // PyTorch's mark of a target without a loss.
    let error = refused(&good, &[0, -100], 2, class);
    assert!(
        error.contains("is class -100") && error.contains("hint: targets without a loss"),
        "{error}"
    );
}

/// Rows have neither tokens nor a context that could be shortened.
#[test]
fn a_batch_larger_than_a_table_is_reported_in_rows() {
    let root = tempfile::tempdir().unwrap();
    foreign(&root.path().join("train-0.h5"), &[1.0, 2.0, 3.0], &[0, 1, 2], 1);
    let at = |key: &str| format!("{key}={}", root.path().display());
    let settings = [
        &at("data.path")[..],
        &at("run.root"),
        "batch.global=9",
        "model.kind=layers",
        "model.input=[1]",
        "model.layers=[{kind='dense', units=3}]",
    ];
    let mut command = program(["train"]);
    for setting in settings {
        command.args(["--set", setting]);
    }
    let ended = finish(&mut command);
    assert_eq!(ended.code(), 2, "{ended}");
    let refusal = " has 3 training samples, fewer than batch.global = 9\nhint: set batch.global to at \
                   most 3, or let a batch take samples again with data.repeat=true\n";
    assert!(ended.stderr.contains(refusal), "{ended}");
}

/// Creates a file with the given images, and a class for each; `attributes` are set on the inputs.
fn images<T: hdf5::H5Type>(
    path: &Path,
    shape: &[usize],
    pixels: &[T],
    attributes: &[(&str, &[f32])],
) -> PathBuf {
    let file = crate::create_hdf5(path);
    let inputs = file.new_dataset::<T>().shape(shape).create("inputs").unwrap();
    inputs.write_raw(pixels).unwrap();
    for (name, numbers) in attributes {
        inputs
            .new_attr::<f32>()
            .shape(numbers.len())
            .create(*name)
            .unwrap()
            .write_raw(numbers)
            .unwrap();
    }
    let classes: Vec<u8> = (0..shape[0]).map(|row| (row % 3) as u8).collect();
    file.new_dataset::<u8>()
        .shape(shape[0])
        .create("targets")
        .unwrap()
        .write_raw(&classes)
        .unwrap();
    file.close().unwrap();
    path.to_owned()
}

/// Returns the inputs of all samples of a split, images of 2 × 4 × 3.
fn features(
    path: &Path,
    change: impl FnOnce(&mut DataSpec),
    augment: Augment,
) -> hpctrain::error::Result<Vec<f32>> {
    let samples = SampleSpec::Rows { input: 24, ids: Ids::None, target: Target::Class(3) };
    let mut spec = DataSpec { samples, shape: vec![2, 4, 3], ..DataSpec::new(path) };
    change(&mut spec);
    let mut dataset = Dataset::open(&spec, Split::Train, 1)?;
    if augment != Augment::default() {
        dataset.augment(augment, &[2, 4, 3], 5)?;
    }
    let rows = dataset.samples() as usize;
    let mut features = vec![0.0; rows * 24];
    let mut classes = vec![0; rows];
    let into = SampleMut { features: &mut features, classes: &mut classes, ..SampleMut::default() };
    dataset.read_run(0, rows, 3, into)?;
    Ok(features)
}

#[test]
fn channels_that_come_first_are_refused_or_moved() {
    let root = tempfile::tempdir().unwrap();
    let place = |name: &str| root.path().join(name);
    let last: Vec<f32> = (0..5 * 24).map(|i| (i * 37 % 101) as f32).collect();
    // The value of channel c of the pixel (y, x).
    let first: Vec<f32> = (0..5 * 24)
        .map(|i| (i / 24, i / 8 % 3, i % 8))
        .map(|(row, channel, pixel)| last[row * 24 + pixel * 3 + channel])
        .collect();
    let scale = [("mean", &[1.0, 20.0, 30.0][..]), ("std", &[2.0, 4.0, 8.0])];
    let [of_last, of_first]: [Vec<f32>; 2] =
        [(0..24).map(|i| (i % 3) as f32).collect(), (0..24).map(|i| (i / 8) as f32).collect()];
    let ones = [1.0; 24];
    let pairs = [
        ("plain", vec![], vec![]),
        ("by-channel", scale.to_vec(), scale.to_vec()),
        (
            "by-element",
            vec![("mean", &of_last[..]), ("std", &ones)],
            vec![("mean", &of_first[..]), ("std", &ones)],
        ),
    ];
    let nchw = |spec: &mut DataSpec| spec.axes = Axes::Nchw;
    let still = Augment::default();
    let moved = Augment { flip: true, shift: 1, crop: 1 };
    for (name, of_last, of_first) in pairs {
        let reference = images(&place(&format!("{name}-last.h5")), &[5, 2, 4, 3], &last, &of_last);
        for (kind, shape) in
            [("first", &[5, 3, 2, 4][..]), ("flat", &[5, 24]), ("one-more", &[5, 1, 3, 2, 4])]
        {
            let path = images(&place(&format!("{name}-{kind}.h5")), shape, &first, &of_first);
            for augment in [still, moved] {
                let wanted = features(&reference, |_| {}, augment).unwrap();
                assert_eq!(
                    features(&path, nchw, augment).unwrap(),
                    wanted,
                    "{name} {kind} {augment:?}"
                );
            }
        }
        let e =
            features(&place(&format!("{name}-first.h5")), |_| {}, still).unwrap_err().to_string();
        assert!(
            e.contains("/inputs has rows of 3 x 2 x 4, but model.input is 2 x 4 x 3\nhint: "),
            "{e}"
        );
        assert!(e.contains("data.image_layout = \"nchw\""), "{e}");
        let e = features(&reference, nchw, still).unwrap_err().to_string();
        assert!(
            e.contains("/inputs has rows of 2 x 4 x 3")
                && e.contains("data.image_layout = \"nhwc\""),
            "{e}"
        );
    }
    let flat = images(&place("flat.h5"), &[5, 24], &last, &[]);
    assert_eq!(features(&flat, |_| {}, still).unwrap(), last);
    let turned = images(&place("turned.h5"), &[5, 4, 2, 3], &last, &[]);
    let e = features(&turned, |_| {}, still).unwrap_err().to_string();
    assert!(e.contains("4 x 2 x 3, but model.input is 2 x 4 x 3\nhint: set model.input"), "{e}");
    let means = [("mean", &[1.0, 2.0, 3.0, 4.0][..]), ("std", &[1.0; 4])];
    let e = features(&images(&place("odd.h5"), &[5, 3, 2, 4], &first, &means), nchw, still)
        .unwrap_err()
        .to_string();
    assert!(e.contains("/inputs has 3 channels and 4 means"), "{e}");
}

#[test]
fn bytes_without_a_scale_are_reported_and_can_be_divided() {
    let root = tempfile::tempdir().unwrap();
    let pixels: Vec<u8> = (0..5 * 24).map(|i| (i * 37 % 256) as u8).collect();
    let shape = [5, 2, 4, 3];
    let plain = images(&root.path().join("plain.h5"), &shape, &pixels, &[]);
    let scaled = images(
        &root.path().join("scaled.h5"),
        &shape,
        &pixels,
        &[("mean", &[3.0]), ("std", &[7.0])],
    );
    let floats: Vec<f32> = pixels.iter().map(|pixel| f32::from(*pixel)).collect();
    let of_floats = images(&root.path().join("floats.h5"), &shape, &floats, &[]);
    let read = |path: &Path, scale| features(path, |spec| spec.scale = scale, Augment::default());
    let unit: Vec<f32> = floats.iter().map(|x| x / 255.0).collect();
    let standard: Vec<f32> = floats.iter().map(|x| (x - 3.0) / 7.0).collect();
    for (path, scale, wanted) in [
        (&plain, None, &floats),
        (&plain, Some(InputScale::None), &floats),
        (&plain, Some(InputScale::Unit), &unit),
        (&scaled, None, &standard),
        (&scaled, Some(InputScale::None), &floats),
        (&scaled, Some(InputScale::Unit), &unit),
        (&of_floats, None, &floats),
    ] {
        assert_eq!(&read(path, scale).unwrap(), wanted, "{path:?} {scale:?}");
        let samples = SampleSpec::Rows { input: 24, ids: Ids::None, target: Target::Class(3) };
        let spec = DataSpec { samples, scale, ..DataSpec::new(path) };
        let warning = Dataset::open(&spec, Split::Train, 1).unwrap().unscaled();
        assert_eq!(warning.is_some(), *path == plain && scale.is_none(), "{warning:?}");
        assert!(warning.is_none_or(
            |warning| warning.contains("plain.h5") && warning.contains("data.scale = \"unit\"")
        ));
    }
    let e = read(&of_floats, Some(InputScale::Unit)).unwrap_err().to_string();
    assert!(
        e.contains(
            "floats.h5: data.scale = \"unit\" is for unsigned bytes, but /inputs is of type float32"
        ),
        "{e}"
    );
}

#[test]
fn a_fraction_of_the_rows_is_kept_for_validation() {
    let root = tempfile::tempdir().unwrap();
    // Three shards of 20 rows; the first number of each row identifies it.
    let numbers: Vec<f32> = (0..60 * 24).map(|i| (i / 24) as f32).collect();
    for shard in 0..3 {
        let rows = &numbers[shard * 20 * 24..][..20 * 24];
        images(&root.path().join(format!("train-{shard}.h5")), &[20, 24], rows, &[]);
    }
    let single = images(&root.path().join("all.hdf5"), &[60, 24], &numbers, &[]);
    let samples = SampleSpec::Rows { input: 24, ids: Ids::None, target: Target::Class(3) };
    let spec = |path: &Path, val_fraction| DataSpec {
        samples: samples.clone(),
        val_fraction,
        ..DataSpec::new(path)
    };
    let rows = |path: &Path, split| {
        let mut dataset = Dataset::open(&spec(path, 0.1), split, 1).unwrap();
        let count = dataset.samples() as usize;
        let mut features = vec![0.0; count * 24];
        let mut classes = vec![0; count];
        let into =
            SampleMut { features: &mut features, classes: &mut classes, ..SampleMut::default() };
        dataset.read_run(0, count, 0, into).unwrap();
        let rows: Vec<u64> = features.iter().step_by(24).map(|x| *x as u64).collect();
        assert!(
            classes
                .iter()
                .zip(&rows)
                .all(|(class, row)| u64::from(*class) == row % 20 % 3 || path.is_file())
        );
        (rows, dataset.fingerprint())
    };
    for path in [root.path(), &single] {
        let ((train, print), (validation, _)) =
            (rows(path, Split::Train), rows(path, Split::Validation));
        assert_eq!((train.len(), validation.len()), (54, 6));
        // One of every ten consecutive rows.
        assert!(validation.iter().zip(0..).all(|(row, ten)| row / 10 == ten), "{validation:?}");
        let mut all = [train, validation].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..60));
        let other = Dataset::open(&spec(path, 0.2), Split::Train, 1).unwrap().fingerprint();
        assert_eq!(
            other.difference(&print).as_deref(),
            Some("data.val_fraction = 0.2, trained with 0.1")
        );
        assert_ne!(other.digest(), print.digest());
    }
    assert_eq!(spec(root.path(), 0.1).validation_source().unwrap(), ValidationSource::Fraction);
    assert_eq!(spec(root.path(), 0.0).validation_source().unwrap(), ValidationSource::Nowhere);
    let named = DataSpec { validation: "test-*.h5".parse().unwrap(), ..spec(root.path(), 0.0) };
    assert!(named.validation_source().unwrap_err().to_string().contains("matches test-*.h5"));
    images(&root.path().join("val-0.h5"), &[2, 24], &numbers[..48], &[]);
    assert_eq!(spec(root.path(), 0.1).validation_source().unwrap(), ValidationSource::Shards);
}
