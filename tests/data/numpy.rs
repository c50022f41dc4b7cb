//! Import of NumPy arrays into shards, and errors for malformed ones.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use hpctrain::data::import::{Arrays, ImportNumpy, ImportOptions, NotFinite, import_numpy};
use hpctrain::data::{DataSpec, Dataset, Ids, SampleMut, SampleSpec, Split, Target};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Returns a file as `numpy.save` writes it.
fn npy(descr: &str, fortran: bool, shape: &str, elements: &[u8]) -> Vec<u8> {
    let order = if fortran { "True" } else { "False" };
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    while !(header.len() + 11).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), elements]
        .concat()
}

fn f32s(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn kept(out: PathBuf) -> ImportOptions {
    ImportOptions { not_finite: NotFinite::Error, every: 0, shards: 1, normalize: false, out }
}

/// Returns the features, classes and values of all training rows.
fn rows(path: &Path, input: usize, target: Target) -> Vec<(Vec<f32>, Vec<u32>, Vec<f32>)> {
    let samples = SampleSpec::Rows { input, ids: Ids::None, target };
    let mut dataset =
        Dataset::open(&DataSpec { samples, ..DataSpec::new(path) }, Split::Train, 1).unwrap();
    let sizes = dataset.sizes();
    let row = |sample| {
        let mut features = vec![0.0; sizes.features];
        let mut classes = vec![0; sizes.classes];
        let mut values = vec![0.0; sizes.values];
        let into = SampleMut {
            features: &mut features,
            classes: &mut classes,
            values: &mut values,
            ..SampleMut::default()
        };
        dataset.read(sample, into).unwrap();
        (features, classes, values)
    };
    (0..4).map(row).collect()
}

#[test]
fn files_and_archives_of_any_order_hold_the_same_rows() {
    let root = tempfile::tempdir().unwrap();
    let numbers: Vec<f32> = (0..8).map(|i| i as f32 / 2.0).collect();
    let columns: Vec<f32> = (0..8).map(|i| numbers[i % 4 * 2 + i / 4]).collect();
    let big: Vec<u8> = numbers.iter().flat_map(|x| f64::from(*x).to_be_bytes()).collect();
    let labels = npy("<i8", false, "(4,)", &[3i64, 0, 2, 1].map(i64::to_le_bytes).concat());
    let want: Vec<_> =
        (0..4).map(|i| (numbers[2 * i..][..2].to_vec(), vec![[3, 0, 2, 1][i]], vec![])).collect();
    for (name, features) in [
        ("c", npy("<f4", false, "(4, 2)", &f32s(&numbers))),
        ("fortran", npy("<f4", true, "(4, 2)", &f32s(&columns))),
        ("big", npy(">f8", false, "(4, 2)", &big)),
    ] {
        let paths = ["x", "y"].map(|array| root.path().join(format!("{name}-{array}.npy")));
        std::fs::write(&paths[0], &features).unwrap();
        std::fs::write(&paths[1], &labels).unwrap();
        let archive = root.path().join(format!("{name}.npz"));
        let mut zip = ZipWriter::new(std::fs::File::create(&archive).unwrap());
        for (array, bytes, method) in [
            ("x", &features, CompressionMethod::Stored),
            ("label", &labels, CompressionMethod::Deflated),
        ] {
            let options = SimpleFileOptions::default().compression_method(method);
            zip.start_file(format!("{array}.npy"), options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap();
        let [features, labels] = paths;
        let of_archive = Arrays::Archive {
            path: archive,
            features: "x".into(),
            labels: Some("label".into()),
            weights: None,
        };
        for (kind, arrays) in [
            ("npy", Arrays::Files { features, labels: Some(labels), weights: None }),
            ("npz", of_archive),
        ] {
            let out = root.path().join(format!("{name}-{kind}"));
            let imported = import_numpy(&ImportNumpy {
                arrays,
                regression: false,
                options: kept(out.clone()),
            })
            .unwrap();
            assert_eq!((imported.shape, imported.classes), (vec![2], Some(4)));
            assert_eq!(rows(&out, 2, Target::Class(4)), want, "{name} {kind}");
        }
    }
}

#[test]
fn labels_are_classes_or_numbers() {
    let root = tempfile::tempdir().unwrap();
    let features = root.path().join("x.npy");
    std::fs::write(&features, npy("|u1", false, "(4, 1, 2)", &[1, 2, 3, 4, 5, 6, 7, 8])).unwrap();
    let import = |name: &str, labels: Vec<u8>, regression| {
        let (path, out) = (root.path().join("y.npy"), root.path().join(name));
        std::fs::write(&path, labels).unwrap();
        let arrays =
            Arrays::Files { features: features.clone(), labels: Some(path), weights: None };
        let imported =
            import_numpy(&ImportNumpy { arrays, regression, options: kept(out.clone()) }).unwrap();
        assert_eq!(imported.shape, [1, 2, 1]);
        (imported.classes, out)
    };
    let whole = || npy("<f4", false, "(4, 1)", &f32s(&[0.0, 1.0, 2.0, 1.0]));
    assert_eq!(import("whole", whole(), false).0, Some(3));
    assert_eq!(import("forced", whole(), true).0, None);
    assert_eq!(import("negative", npy("|i1", false, "(4,)", &[0, 1, 255, 1]), false).0, None);
    let (classes, out) = import(
        "two",
        npy("<f4", false, "(4, 2)", &f32s(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])),
        false,
    );
    assert_eq!(classes, None);
    assert_eq!(rows(&out, 2, Target::Values(2))[1], (vec![3.0, 4.0], vec![], vec![2.0, 3.0]));
}

#[test]
fn what_does_not_fit_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let features = root.path().join("x.npy");
    let labels = root.path().join("y.npy");
    let out = root.path().join("out");
    let good = || npy("<f4", false, "(2, 2)", &f32s(&[1.0, 2.0, 3.0, 4.0]));
    let classes = || npy("|u1", false, "(2,)", &[0, 1]);
    for (x, y, wanted) in [
        (
            good(),
            npy("|u1", false, "(3,)", &[0, 1, 2]),
            "y.npy has shape [3], but there are 2 rows",
        ),
        (npy("|u1", false, "()", &[1]), classes(), "x.npy is a single number"),
        (npy("<f4", false, "(2, 0)", &[]), classes(), "x.npy has shape [2, 0]"),
        (
            good()[..100].to_vec(),
            classes(),
            "x.npy: not a NumPy array of numbers: a header of 118 bytes in 90",
        ),
        (npy("<U3", false, "(1,)", &[0; 12]), classes(), "elements of type '<U3'"),
        (
            npy("<f4", false, "(2, 2)", &f32s(&[1.0, 2.0, f32::NAN, 4.0])),
            classes(),
            "x.npy: row 1, element 0 is NaN",
        ),
        (
            npy("<f8", false, "(2, 1)", &[1e300f64, 0.0].map(f64::to_le_bytes).concat()),
            classes(),
            "row 0, element 0 is inf",
        ),
        (
            good(),
            npy("<f4", false, "(2,)", &f32s(&[0.5, f32::INFINITY])),
            "y.npy: row 1, element 0 is inf",
        ),
    ] {
        std::fs::write(&features, x).unwrap();
        std::fs::write(&labels, y).unwrap();
        let arrays = Arrays::Files {
            features: features.clone(),
            labels: Some(labels.clone()),
            weights: None,
        };
        let error =
            import_numpy(&ImportNumpy { arrays, regression: false, options: kept(out.clone()) })
                .unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.to_string().contains(wanted) && error.to_string().contains("\nhint: "),
            "{error}"
        );
    }
    // More columns than an attribute has space for, imported without scaling.
    let [x, y] = ["wide-x.npy", "wide-y.npy"].map(|name| root.path().join(name));
    std::fs::write(&x, npy("<f4", false, "(2, 17000)", &f32s(&[0.5; 34_000]))).unwrap();
    std::fs::write(&y, npy("<f4", false, "(2,)", &f32s(&[0.5, 1.5]))).unwrap();
    let wide = |normalize: bool| {
        let arrays = Arrays::Files { features: x.clone(), labels: Some(y.clone()), weights: None };
        let kept = ImportOptions { normalize, ..kept(root.path().join("wide")) };
        import_numpy(&ImportNumpy { arrays, regression: false, options: kept })
    };
    let error = wide(true).unwrap_err().to_string();
    assert!(
        error.contains("rows have 17000 columns")
            && error.contains("\nhint: import them with --raw"),
        "{error}"
    );
    wide(false).unwrap();
    let arrays =
        Arrays::Files { features: features.clone(), labels: Some(labels.clone()), weights: None };
    let skipping = ImportOptions { not_finite: NotFinite::Skip, ..kept(root.path().join("rest")) };
    let imported =
        import_numpy(&ImportNumpy { arrays, regression: false, options: skipping }).unwrap();
    assert_eq!((imported.skipped, imported.classes, imported.shards[0].1), (1, None, 1));
    let archive = root.path().join("a.npz");
    let refused = |features: &str| {
        let arrays = Arrays::Archive {
            path: archive.clone(),
            features: features.into(),
            labels: Some("y".into()),
            weights: None,
        };
        import_numpy(&ImportNumpy { arrays, regression: false, options: kept(out.clone()) })
            .unwrap_err()
            .to_string()
    };
    assert!(refused("x").contains("a.npz does not exist\nhint: "));
    std::fs::write(&archive, b"PK, but no archive").unwrap();
    assert!(refused("x").contains("a.npz: not an NPZ archive: "));
    let mut zip = ZipWriter::new(std::fs::File::create(&archive).unwrap());
    for name in ["x.npy", "y.npy", "é.npy"] {
        zip.start_file(
            name,
            SimpleFileOptions::default().compression_method(CompressionMethod::Stored),
        )
        .unwrap();
        zip.write_all(&classes()).unwrap();
    }
    zip.finish().unwrap();
    assert!(
        refused("z").contains("a.npz: holds no array \"z\"\nhint: it holds x, y, é;"),
        "{}",
        refused("z")
    );
    // A name that is declared to be UTF-8 but is not: the entry is listed nevertheless.
    let mut bytes = std::fs::read(&archive).unwrap();
    let odd: Vec<usize> =
        (0..bytes.len() - 2).filter(|&i| bytes[i..].starts_with("é.".as_bytes())).collect();
    assert_eq!(odd.len(), 2);
    odd.iter().for_each(|&i| bytes[i + 1] = b'(');
    std::fs::write(&archive, &bytes).unwrap();
    assert!(refused("z").contains("hint: it holds x, y, ├(;"), "{}", refused("z"));
    // A bit of the first array's elements.
    let at = bytes.windows(6).position(|six| six == b"\x93NUMPY").unwrap() + 128;
    bytes[at] ^= 1;
    std::fs::write(&archive, bytes).unwrap();
    assert!(refused("x").contains("a.npz: x: not a NumPy array of numbers: "), "{}", refused("x"));
    assert!(!out.exists());
}

#[test]
fn rows_without_labels_stay_together_and_in_order() {
    let root = tempfile::tempdir().unwrap();
    let features = root.path().join("x.npy");
    let numbers: Vec<f32> = (0..12).map(|i| i as f32).collect();
    std::fs::write(&features, npy("<f4", false, "(6, 2)", &f32s(&numbers))).unwrap();
    let archive = root.path().join("x.npz");
    let mut zip = ZipWriter::new(std::fs::File::create(&archive).unwrap());
    zip.start_file("x.npy", SimpleFileOptions::default()).unwrap();
    zip.write_all(&std::fs::read(&features).unwrap()).unwrap();
    zip.finish().unwrap();
    let of_archive =
        Arrays::Archive { path: archive, features: "x".into(), labels: None, weights: None };
    for (name, arrays) in
        [("npy", Arrays::Files { features, labels: None, weights: None }), ("npz", of_archive)]
    {
        let kept = ImportOptions { every: 2, ..kept(root.path().join(name)) };
        let imported =
            import_numpy(&ImportNumpy { arrays, regression: false, options: kept }).unwrap();
        assert!(
            imported
                .to_string()
                .ends_with("6 samples; model.input = [2], without targets: for hpctrain predict"),
            "{imported}"
        );
        let samples = SampleSpec::Rows { input: 2, ids: Ids::None, target: Target::Unknown };
        let spec = DataSpec { samples, ..DataSpec::new(root.path().join(name)) };
        let mut dataset = Dataset::open(&spec, Split::Train, 1).unwrap();
        assert_eq!(dataset.samples(), 6);
        let mut found = vec![0.0; 12];
        dataset
            .read_run(0, 6, 0, SampleMut { features: &mut found, ..SampleMut::default() })
            .unwrap();
        assert_eq!(found, numbers);
        let error = DataSpec {
            samples: SampleSpec::Rows { input: 2, ids: Ids::None, target: Target::Class(2) },
            ..spec
        };
        let error = Dataset::open(&error, Split::Train, 1).err().unwrap().to_string();
        assert!(error.contains("has no dataset /targets\nhint: "), "{error}");
    }
}
