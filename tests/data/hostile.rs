//! Malicious files that try to exhaust memory, to block a program forever, or to control a
//! terminal.

use std::io::{Cursor, Write};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use hdf5::types::VarLenUnicode;
use hdf5_sys::h5p::H5P_DEFAULT;
use hpctrain::data::import::{
    Arrays, Categories, CategoryIds, ImportCsv, ImportIdx, ImportImages, ImportNumpy,
    ImportOptions, NotFinite, import_csv, import_idx, import_images, import_numpy,
};
use hpctrain::data::{DataSpec, Dataset, Ids, SampleSpec, Split, Target, inspect, verify};
use hpctrain::error::Error;
use hpctrain_testkit::shards;
use image::GrayImage;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use rustix::fs::{CWD, FileType, mknodat};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use hpctrain_testkit::launch::{finish, program};

fn kept(out: PathBuf) -> ImportOptions {
    ImportOptions { not_finite: NotFinite::Error, every: 0, shards: 1, normalize: false, out }
}

/// Checks for an error of one line with a hint, and exit code 2.
#[track_caller]
fn assert_refused(error: &Error, words: &str) {
    let text = error.to_string();
    assert!(
        text.contains(words) && text.matches('\n').count() == 1 && text.contains("\nhint: "),
        "{text}"
    );
    assert_eq!(error.exit_code(), 2, "{text}");
}

/// Creates a pipe without a writer: opening it blocks.
fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, 0o600.into(), 0).unwrap();
}

/// Returns the beginning of an IDX file of bytes.
fn idx(shape: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, shape.len() as u8];
    bytes.extend(shape.iter().flat_map(|extent| extent.to_be_bytes()));
    bytes
}

fn npy(shape: &str, elements: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n");
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), elements]
        .concat()
}

/// Writes `begin` and then `count` zeros through a compressor that writes to `out`.
fn zeros<W: Write>(mut out: W, begin: &[u8], count: usize) -> W {
    out.write_all(begin).unwrap();
    let block = vec![0; 1 << 20];
    let mut left = count;
    while left > 0 {
        let now = left.min(block.len());
        out.write_all(&block[..now]).unwrap();
        left -= now;
    }
    out
}

fn gzipped(begin: &[u8], count: usize) -> Vec<u8> {
    zeros(GzEncoder::new(Vec::new(), Compression::best()), begin, count).finish().unwrap()
}

#[test]
fn gzipped_files_are_unpacked_as_far_as_they_declare() {
    let root = tempfile::tempdir().unwrap();
    let images = root.path().join("images.gz");
    let labels = root.path().join("labels.gz");
    std::fs::write(&labels, gzipped(&idx(&[3]), 3)).unwrap();
    let refused = |content: &[u8]| {
        std::fs::write(&images, content).unwrap();
        let images = images.clone();
        let labels = labels.clone();
        import_idx(&ImportIdx { images, labels, options: kept(root.path().join("out")) })
            .unwrap_err()
    };
    // 200 MB behind a header that declares 12 bytes.
    assert_refused(
        &refused(&gzipped(&idx(&[3, 2, 2]), 200_000_000)),
        "it decodes to more than the 12 bytes that its header declares",
    );
    // 4 GiB are declared, and some of them are there.
    assert_refused(
        &refused(&gzipped(&idx(&[65536, 256, 256]), 1 << 20)),
        "it decodes to 4294967296 bytes from ",
    );
    assert_refused(&refused(&gzipped(&idx(&[3, 2, 2]), 11)), "11 elements for shape [3, 2, 2]");
    for shape in [&[0, u32::MAX, u32::MAX, u32::MAX][..], &[u32::MAX; 9]] {
        assert_refused(&refused(&idx(shape)), "is too large for any memory");
    }
    std::fs::write(&images, gzipped(&idx(&[3, 2, 2]), 12)).unwrap();
    import_idx(&ImportIdx { images, labels, options: kept(root.path().join("good")) }).unwrap();
}

#[test]
fn archives_are_unpacked_as_far_as_they_declare() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("x.npz");
    let archive = |content: &[u8], count: usize| {
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        zip.start_file("x.npy", options).unwrap();
        zeros(&mut zip, content, count);
        zip.finish().unwrap().into_inner()
    };
    let import = |content: &[u8], out: &str| {
        std::fs::write(&path, content).unwrap();
        let arrays = Arrays::Archive {
            path: path.clone(),
            features: "x".into(),
            labels: None,
            weights: None,
        };
        import_numpy(&ImportNumpy {
            arrays,
            regression: false,
            options: kept(root.path().join(out)),
        })
    };
    // An archive whose headers are correct.
    let error = import(&archive(&npy("(20000, 10000)", &[]), 200_000_000), "out").unwrap_err();
    assert_refused(&error, "x.npz: x: not a NumPy array of numbers: it decodes to 200");
    assert_refused(&error, "more than 256 times as many");
    // An archive whose headers are not: both declare the sizes of a small array.
    let mut bytes = archive(&npy("(3, 4)", &[]), 100_000_000);
    let content = npy("(3, 4)", &[]).len() as u32;
    let size = (content + 100_000_000).to_le_bytes();
    let at: Vec<usize> = (0..bytes.len() - 4).filter(|at| bytes[*at..*at + 4] == size).collect();
    assert!(!at.is_empty());
    at.iter().for_each(|at| bytes[*at..*at + 4].copy_from_slice(&(content + 12).to_le_bytes()));
    assert_refused(&import(&bytes, "out").unwrap_err(), "not a NumPy array of numbers: ");
    for shape in
        ["(0, 4611686018427387904, 4)", "(4611686018427387904, 4, 0)", "(18446744073709551615,)"]
    {
        assert_refused(
            &import(&archive(&npy(shape, &[]), 0), "out").unwrap_err(),
            "bytes of elements for shape",
        );
    }
    import(&archive(&npy("(3, 4)", &[]), 12), "good").unwrap();
}

#[test]
fn images_are_decoded_if_they_are_in_proportion() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("photos");
    std::fs::create_dir_all(folder.join("cat")).unwrap();
    let put = |name: &str, side: u32| {
        let mut bytes = Cursor::new(Vec::new());
        let best =
            PngEncoder::new_with_quality(&mut bytes, CompressionType::Best, FilterType::NoFilter);
        GrayImage::new(side, side).write_with_encoder(best).unwrap();
        std::fs::write(folder.join("cat").join(name), bytes.into_inner()).unwrap();
    };
    let refused = |size: Option<[u32; 2]>| {
        let kept = kept(root.path().join("out"));
        import_images(&ImportImages {
            folder: folder.clone(),
            no_target: false,
            size,
            grey: true,
            options: kept,
        })
        .unwrap_err()
    };
    put("1.png", 12_000);
    assert_refused(&refused(Some([8, 8])), "cat/1.png: it decodes to 144000000 bytes from ");
    // Each is within the limit, but not all of them together.
    (1..=20).for_each(|number| put(&format!("{number}.png"), 2000));
    assert_refused(&refused(None), "photos: it decodes to 80000000 bytes from ");
    std::fs::remove_dir_all(folder.join("cat")).unwrap();
    std::fs::create_dir_all(folder.join("cat")).unwrap();
    pipe(&folder.join("cat/1.png"));
    assert_refused(&refused(None), "it is a pipe, a socket or a device, not a regular file");
}

/// Writes classes of `samples` rows of 4 numbers, whose inputs `write` writes.
fn rows(path: &Path, samples: usize, write: impl FnOnce(&hdf5::File)) {
    let file = crate::create_hdf5(path);
    file.new_dataset::<u8>()
        .shape(samples)
        .create("targets")
        .unwrap()
        .write_raw(&vec![0u8; samples])
        .unwrap();
    write(&file);
}

#[test]
fn chunks_are_unpacked_if_they_are_in_proportion() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("train-00000.h5");
    let opened = |input| {
        let samples = SampleSpec::Rows { input, ids: Ids::None, target: Target::Class(2) };
        Dataset::open(&DataSpec { samples, ..DataSpec::new(root.path()) }, Split::Train, 1)
            .map(drop)
    };
    // A chunk of 128 MiB of zeros.
    rows(&path, 8, |file| {
        let inputs = file
            .new_dataset::<u8>()
            .chunk((8, 16 << 20))
            .deflate(9)
            .shape((8, 16 << 20))
            .create("inputs");
        inputs.unwrap().write_raw(&vec![0u8; 128 << 20]).unwrap();
    });
    assert_refused(
        &opened(16 << 20).unwrap_err(),
        "inputs: a row or chunk of it: it decodes to 134217728 bytes from ",
    );
    // A chunk of 4 KiB that unpacks to 256 MiB.
    let bomb =
        zeros(ZlibEncoder::new(Vec::new(), Compression::best()), &[], 256 << 20).finish().unwrap();
    rows(&path, 8, |file| {
        let inputs = file
            .new_dataset::<u8>()
            .chunk((8, 512))
            .deflate(9)
            .shape((8, 512))
            .create("inputs")
            .unwrap();
        inputs.write_raw(&[1u8; 4096]).unwrap();
        let mut bytes = bomb.clone();
        let place = [0u64; 2];
        let write = || {
            let buffer = bytes.as_mut_ptr().cast();
            // SAFETY: HDF5 reads `bytes.len()` bytes, and two numbers for the offset of the chunk.
            hdf5::h5check(unsafe {
                hdf5_sys::h5d::H5Dwrite_chunk(
                    inputs.id(),
                    H5P_DEFAULT,
                    0,
                    place.as_ptr(),
                    bytes.len(),
                    buffer,
                )
            })
        };
        hdf5::sync::sync(write).unwrap();
    });
    assert_refused(&opened(512).unwrap_err(), "inputs has 2");
    assert_refused(&opened(512).unwrap_err(), "compressed bytes for 1 chunks of 4096");
    // Checksums that are far larger than the file.
    rows(&path, 8, |file| {
        file.new_dataset::<u8>()
            .shape((8, 4))
            .create("inputs")
            .unwrap()
            .write_raw(&[1u8; 32])
            .unwrap();
        let text = |text: &str| text.parse::<VarLenUnicode>().unwrap();
        file.new_attr::<VarLenUnicode>()
            .create("format")
            .unwrap()
            .write_scalar(&text("hpctrain-samples"))
            .unwrap();
        file.new_attr::<u32>().create("format_version").unwrap().write_scalar(&2u32).unwrap();
        let sums = file.create_group("checksums").unwrap();
        let sums =
            sums.new_dataset::<u32>().chunk(1024).shape(1usize << 40).create("inputs").unwrap();
        sums.new_attr::<u64>().create("checksum_block").unwrap().write_scalar(&1u64).unwrap();
    });
    assert_refused(
        &opened(4).unwrap_err(),
        "checksums cannot be read: it decodes to 4398046511104 bytes from 0",
    );
    // A file with normal proportions.
    rows(&path, 8, |file| {
        let inputs = file
            .new_dataset::<u8>()
            .chunk((8, 4))
            .deflate(9)
            .shape((8, 4))
            .create("inputs")
            .unwrap();
        inputs.write_raw(&[1u8; 32]).unwrap();
    });
    opened(4).unwrap();
}

/// Creates a dataset of bytes called `inputs` of any shape without the binding, which multiplies
/// extents.
fn create(file: &hdf5::File, chunk: &[u64], shape: &[u64]) {
    use hdf5_sys::h5d::{H5Dclose, H5Dcreate2};
    use hdf5_sys::h5p::{H5Pclose, H5Pcreate, H5Pset_chunk};
    use hdf5_sys::h5s::{H5Sclose, H5Screate_simple};
    hdf5::sync::sync(|| {
        // SAFETY: there is an extent for every axis, and everything opened is closed.
        unsafe {
            let space = H5Screate_simple(shape.len() as i32, shape.as_ptr(), std::ptr::null());
            let list = H5Pcreate(*hdf5::globals::H5P_DATASET_CREATE);
            assert!(space >= 0 && H5Pset_chunk(list, chunk.len() as i32, chunk.as_ptr()) >= 0);
            let kind = *hdf5::globals::H5T_STD_U8LE;
            let set = H5Dcreate2(
                file.id(),
                c"inputs".as_ptr(),
                kind,
                space,
                H5P_DEFAULT,
                list,
                H5P_DEFAULT,
            );
            assert!(set >= 0 && H5Dclose(set) >= 0 && H5Pclose(list) >= 0 && H5Sclose(space) >= 0);
        }
    });
}

#[test]
fn products_of_extents_do_not_overflow() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("train-00000.h5");
    let huge = 1usize << 40;
    for shape in [vec![0, huge, huge], vec![8, huge, huge], vec![8, huge]] {
        rows(&path, shape[0], |file| {
            let chunk: Vec<u64> = shape.iter().map(|_| 1).collect();
            let shape: Vec<u64> = shape.iter().map(|extent| *extent as u64).collect();
            create(file, &chunk, &shape);
        });
        let samples = SampleSpec::Anything;
        let opened =
            Dataset::open(&DataSpec { samples, ..DataSpec::new(root.path()) }, Split::Train, 1)
                .map(drop);
        assert_refused(&opened.unwrap_err(), "inputs");
        assert!(verify::verify(&path).is_err());
        inspect::inspect(&path).unwrap();
    }
}

#[test]
fn what_is_no_regular_file_is_not_waited_for() {
    let root = tempfile::tempdir().unwrap();
    pipe(&root.path().join("train-00000.h5"));
    let opened = Dataset::open(&DataSpec::new(root.path()), Split::Train, 8).map(drop);
    assert_refused(&opened.unwrap_err(), "train-00000.h5 is not an HDF5 file: it is a pipe");
    assert_refused(&inspect::inspect(root.path()).unwrap_err(), "it is a pipe");
    std::fs::remove_file(root.path().join("train-00000.h5")).unwrap();
    // External links lead to it, in the root and in a group; HDF5 opens their targets.
    let (path, target) = (root.path().join("train-00000.h5"), root.path().join("pipe"));
    pipe(&target);
    for name in ["pipe", target.to_str().unwrap()] {
        for place in ["tokens", "group/tokens"] {
            let file = crate::create_hdf5(&path);
            file.create_group("group").unwrap();
            file.link_external(name, "/tokens", place).unwrap();
            file.close().unwrap();
            let words = "tokens is an external link to /tokens of ";
            let spec = DataSpec { tokens: place.into(), ..DataSpec::new(root.path()) };
            assert_refused(&Dataset::open(&spec, Split::Train, 8).map(drop).unwrap_err(), words);
            assert_refused(&inspect::inspect(&path).unwrap_err(), words);
        }
    }
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/zero", root.path().join("train-00000.h5")).unwrap();
    let verified = verify::verify(root.path()).unwrap_err().to_string();
    assert!(verified.contains("it is a pipe, a socket or a device"), "{verified}");
}

#[test]
fn a_table_like_one_with_impossible_ids_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let table = root.path().join("t.csv");
    let first = root.path().join("first");
    std::fs::write(&table, "site,clicked\na,0\nb,1\n").unwrap();
    let import = |categories, out: &str| {
        let input = table.clone();
        let kept = kept(root.path().join(out));
        let targets = vec!["clicked".to_string()];
        import_csv(&ImportCsv { targets, categories, ..ImportCsv::new(input, kept) })
    };
    import(
        Categories::Named { columns: vec!["site".into()], ids: CategoryIds::Hashed(5) },
        "first",
    )
    .unwrap();
    import(Categories::Like(first.clone()), "again").unwrap();
    for ids in [0, 1] {
        let file = shards::edit(first.join("train-00000.h5"));
        let columns = file.dataset("columns").unwrap();
        let text = columns
            .read_scalar::<VarLenUnicode>()
            .unwrap()
            .replace("\"hash\":5", &format!("\"hash\":{ids}"));
        let text = text.replace("\"hash\":0", &format!("\"hash\":{ids}"));
        columns.write_scalar(&text.parse::<VarLenUnicode>().unwrap()).unwrap();
        file.close().unwrap();
        let error = import(Categories::Like(first.clone()), "later").unwrap_err();
        assert_refused(&error, &format!("has {ids} ids for the category \"site\""));
        assert!(!root.path().join("later").exists());
    }
}

#[test]
fn texts_of_files_do_not_reach_the_terminal_as_they_are() {
    const TITLE: &str = "\x1b]0;owned\x07\u{9b}31m\u{202e}";
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("train-00000.h5");
    let text = |text: &str| text.parse::<VarLenUnicode>().unwrap();
    rows(&path, 2, |file| {
        file.new_dataset::<u8>()
            .shape((2, 4))
            .create("inputs")
            .unwrap()
            .write_raw(&[1u8; 8])
            .unwrap();
        file.new_dataset::<u8>()
            .shape(2)
            .create(&*format!("a{TITLE}\nb"))
            .unwrap()
            .write_raw(&[1u8; 2])
            .unwrap();
        let attribute = |name: &str, value: &str| {
            file.new_attr::<VarLenUnicode>()
                .create(name)
                .unwrap()
                .write_scalar(&text(value))
                .unwrap();
        };
        attribute("format", "hpctrain-samples");
        attribute("source", &format!("photos{TITLE}\nfake: line"));
        attribute("split", TITLE);
        file.new_attr::<u32>().create("format_version").unwrap().write_scalar(&1u32).unwrap();
        let names = [text(&format!("cat{TITLE}")), text("dog")];
        file.new_dataset::<VarLenUnicode>()
            .shape(2)
            .create("classes")
            .unwrap()
            .write_raw(&names)
            .unwrap();
    });
    let clean = |command: &mut std::process::Command| {
        let ended = finish(command);
        let printed = format!("{}{}", ended.stdout, ended.stderr);
        assert!(
            !printed.chars().any(|c| c.is_control() && c != '\n' || c == '\u{202e}'),
            "{printed:?}"
        );
        assert!(printed.contains("\\u001b]0;owned\\u0007\\u009b31m\\u202e"), "{printed}");
        assert!(!printed.contains("\nfake: line"), "{printed}");
        ended
    };
    let place = path.to_str().unwrap();
    let inspected = clean(&mut program(["data", "inspect", place]));
    assert_eq!(inspected.code(), 0, "{inspected}");
    // Errors escape control characters, too.
    clean(&mut program(["data", "verify", &format!("{place}{TITLE}")]));
    let names = ["data.inputs=/none", "data.targets=/none"].map(|name| ["--set", name]).concat();
    clean(program(["train", "--set", &format!("data.path={place}")]).args(names));
}

/// The program reads a pipe that a user names: `<(zcat table.csv.gz)`.
#[test]
fn pipes_that_a_user_names_are_read() {
    let root = tempfile::tempdir().unwrap();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let name = format!("/proc/self/fd/{}", reader.as_raw_fd());
    let writing = std::thread::spawn(move || writer.write_all(b"x,y\n1,2\n3,4\n").unwrap());
    let kept = kept(root.path().join("out"));
    let input = PathBuf::from(name);
    let targets = vec!["y".into()];
    let categories = Categories::NONE;
    let imported = import_csv(&ImportCsv {
        targets,
        regression: true,
        categories,
        ..ImportCsv::new(input, kept)
    })
    .unwrap();
    writing.join().unwrap();
    assert_eq!(imported.shards[0].1, 2);
}
