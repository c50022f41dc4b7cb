//! Imports of data of other programs.

use std::io::{Cursor, Write as _};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use hpctrain::data::import::{
    Arrays, Categories, CategoryIds, ImportCsv, ImportIdx, ImportImages, ImportNumpy,
    ImportOptions, ImportedSamples, Missing, NotFinite, TableFormat, import_csv, import_idx,
    import_images, import_numpy,
};
use hpctrain::error::Result;
use image::{ImageFormat, RgbImage};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::harness::{Terms, fuzz, fuzz_on};
use super::mutate::Form;

/// Returns the options of an import into `out`.
fn kept(out: &Path, not_finite: NotFinite) -> ImportOptions {
    ImportOptions { not_finite, every: 3, shards: 1, normalize: true, out: out.into() }
}

/// Returns whether an import accepted its files; removes what it has written.
fn taken(out: &Path, imported: Result<ImportedSamples>) -> bool {
    let _ = std::fs::remove_dir_all(out);
    match imported {
        Ok(imported) => {
            assert!(imported.shards.iter().map(|(_, rows)| rows).sum::<usize>() > 0);
            true
        }
        Err(e) => {
            assert_eq!(e.exit_code(), 2, "{e}");
            false
        }
    }
}

fn npy(descr: &str, fortran: bool, shape: &str, elements: &[u8]) -> Vec<u8> {
    let order = if fortran { "True" } else { "False" };
    let header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), elements]
        .concat()
}

/// Returns arrays as NumPy writes them.
fn arrays() -> Vec<Vec<u8>> {
    let floats: Vec<u8> = (0..24).flat_map(|i| (i as f32).to_le_bytes()).collect();
    vec![
        npy("<f4", false, "(6, 4)", &floats),
        npy("<f4", true, "(6, 2, 2)", &floats),
        npy(">i2", false, "(6, 2, 4)", &floats),
        npy("|u1", false, "(6, 16)", &floats),
    ]
}

#[test]
fn arrays_are_read() {
    let root = tempfile::tempdir().unwrap();
    let x = root.path().join("x.npy");
    let y = root.path().join("y.npy");
    let out = root.path().join("out");
    std::fs::write(&y, npy("|u1", false, "(6,)", &[0, 1, 2, 0, 1, 2])).unwrap();
    fuzz("npy", Form::Bytes, &arrays(), |input| {
        std::fs::write(&x, input).unwrap();
        let arrays = Arrays::Files { features: x.clone(), labels: Some(y.clone()), weights: None };
        let options = kept(&out, NotFinite::Skip);
        taken(&out, import_numpy(&ImportNumpy { arrays, regression: false, options }))
    });
}

fn archive(method: CompressionMethod, x: &[u8]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(method);
    for (name, content) in
        [("x.npy", x), ("y.npy", &npy("|u1", false, "(6,)", &[0, 1, 2, 0, 1, 2])[..])]
    {
        zip.start_file(name, options).unwrap();
        zip.write_all(content).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

#[test]
fn archives_are_read() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("x.npz"), root.path().join("out"));
    let import = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        let labels = Some("y".to_string());
        let arrays =
            Arrays::Archive { path: path.clone(), features: "x".into(), labels, weights: None };
        let options = kept(&out, NotFinite::Skip);
        taken(&out, import_numpy(&ImportNumpy { arrays, regression: false, options }))
    };
    let stored = CompressionMethod::Stored;
    let deflated = CompressionMethod::Deflated;
    let seeds: Vec<_> =
        arrays().iter().flat_map(|x| [archive(stored, x), archive(deflated, x)]).collect();
    fuzz_on(Terms::one_of(2), "npz", Form::Bytes, &seeds, import);
    // Mutated before they are packed, so that the checksums of the archive match.
    fuzz_on(Terms::one_of(2), "npy in npz", Form::Bytes, &arrays(), |input| {
        import(&archive(deflated, input))
    });
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(content).unwrap();
    gzip.finish().unwrap()
}

#[test]
fn idx_files_are_read() {
    let root = tempfile::tempdir().unwrap();
    let images = root.path().join("images");
    let labels = root.path().join("labels");
    let out = root.path().join("out");
    let idx = |shape: &[u32], elements: usize| {
        let mut bytes = vec![0, 0, 8, shape.len() as u8];
        bytes.extend(shape.iter().flat_map(|extent| extent.to_be_bytes()));
        bytes.extend((0..elements).map(|i| (i % 3) as u8));
        bytes
    };
    std::fs::write(&labels, idx(&[6], 6)).unwrap();
    let import = |content: &[u8]| {
        std::fs::write(&images, content).unwrap();
        let images = images.clone();
        let labels = labels.clone();
        taken(
            &out,
            import_idx(&ImportIdx { images, labels, options: kept(&out, NotFinite::Error) }),
        )
    };
    let plain = [idx(&[6, 4, 4], 96), idx(&[6, 2, 3, 2], 72)];
    fuzz_on(Terms::one_of(3), "IDX", Form::Bytes, &plain, import);
    fuzz_on(Terms::one_of(3), "IDX in gzip", Form::Bytes, &plain, |input| import(&gzip(input)));
    fuzz_on(Terms::one_of(3), "gzip of IDX", Form::Bytes, &plain.map(|one| gzip(&one)), import);
}

#[test]
fn tables_are_read() {
    let root = tempfile::tempdir().unwrap();
    let input = root.path().join("x.csv");
    let out = root.path().join("out");
    let first = root.path().join("first");
    let seed =
        b"width,height,\"site, if any\",weight,kind\n1,2.5,a,1,0\n-3,1e3,\"b\"\"b\",0.5,1\n4,5,,1,0\n6,7,a,2,1\n";
    let import = |content: &[u8], like: bool, into: PathBuf| {
        std::fs::write(&input, content).unwrap();
        let columns = vec!["site, if any".to_string()];
        let categories = if like {
            Categories::Like(first.clone())
        } else {
            Categories::Named { columns, ids: CategoryIds::Hashed(7) }
        };
        let kept = kept(&into, NotFinite::Skip);
        let targets = vec!["kind".into()];
        let weight = Some("weight".into());
        import_csv(&ImportCsv {
            targets,
            weight,
            categories,
            ..ImportCsv::new(input.clone(), kept)
        })
    };
    import(seed, false, first.clone()).unwrap();
    let spreadsheet = b"a;b;kind\n1,5;NA;oak\n;2,25;\"elm;\"\n3;4;oak\n";
    let filled = |content: &[u8]| {
        std::fs::write(&input, content).unwrap();
        let format = TableFormat { decimal_comma: true, ..TableFormat::default() };
        let targets = vec!["kind".into()];
        let missing = Some(Missing::Mean);
        let kept = kept(&out, NotFinite::Error);
        import_csv(&ImportCsv { targets, format, missing, ..ImportCsv::new(input.clone(), kept) })
    };
    fuzz("CSV", Form::Bytes, &[seed.to_vec(), spreadsheet.to_vec()], |content| {
        let named = taken(&out, import(content, false, out.clone()));
        let like = taken(&out, import(content, true, out.clone()));
        named && like || taken(&out, filled(content))
    });
}

#[test]
fn images_are_read() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("photos");
    let out = root.path().join("out");
    std::fs::create_dir_all(folder.join("cat")).unwrap();
    let picture =
        RgbImage::from_fn(24, 16, |x, y| image::Rgb([x as u8 * 9, y as u8 * 15, (x * y) as u8]));
    let seeds = [ImageFormat::Png, ImageFormat::Jpeg].map(|format| {
        let mut bytes = Cursor::new(Vec::new());
        picture.write_to(&mut bytes, format).unwrap();
        bytes.into_inner()
    });
    fuzz("images", Form::Bytes, &seeds, |input| {
        std::fs::write(folder.join("cat/1"), input).unwrap();
        let kept = ImportOptions { every: 0, ..kept(&out, NotFinite::Error) };
        let import = ImportImages {
            folder: folder.clone(),
            no_target: false,
            size: Some([8, 8]),
            grey: false,
            options: kept,
        };
        taken(&out, import_images(&import))
    });
}
