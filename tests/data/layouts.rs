//! Samples are the same in every storage layout of a file.

use std::path::Path;
use std::time::Duration;

use hdf5::{File, H5Type};
use hdf5_sys::h5d::{H5Dclose, H5Dcreate2, H5Dwrite};
use hdf5_sys::h5p::H5P_DEFAULT;
use hdf5_sys::h5s::H5S_ALL;
use hpctrain::data::{
    Batch, DataSpec, Dataset, Ids, SampleMut, SampleSpec, Sampler, Split, Target,
};

const ROWS: usize = 101;
const SHAPE: [usize; 2] = [4, 3];
const ROW: usize = SHAPE[0] * SHAPE[1];

/// Returns element `i` of all; it is an integer, so that every type can represent it.
fn element(i: usize) -> f32 {
    (i * 37 % 251) as f32
}

fn class(row: usize) -> u32 {
    (row * 7 % 10) as u32
}

/// Creates a file with classes, whose inputs `write` writes.
fn file(path: &Path, userblock: u64, write: impl FnOnce(&File)) {
    let file =
        File::with_options().with_fcpl(|fcpl| fcpl.userblock(userblock)).create(path).unwrap();
    write(&file);
    let classes: Vec<u32> = (0..ROWS).map(class).collect();
    file.new_dataset::<u32>().shape(ROWS).create("targets").unwrap().write_raw(&classes).unwrap();
    file.close().unwrap();
}

fn all<T: H5Type>(of: impl Fn(f32) -> T) -> Vec<T> {
    (0..ROWS * ROW).map(|i| of(element(i))).collect()
}

/// Writes inputs of some type and layout: chunks of a shape, compressed or not.
fn inputs<T: H5Type>(
    file: &File,
    chunk: Option<[usize; 3]>,
    compressed: bool,
    of: impl Fn(f32) -> T,
) {
    let mut builder = file.new_dataset_builder().empty::<T>().shape((ROWS, SHAPE[0], SHAPE[1]));
    if let Some(chunk) = chunk {
        builder = builder.chunk(chunk);
    }
    if compressed {
        builder = builder.shuffle().deflate(3);
    }
    builder.create("inputs").unwrap().write_raw(&all(of)).unwrap();
}

fn open(path: &Path) -> Dataset {
    let samples = SampleSpec::Rows { input: ROW, ids: Ids::None, target: Target::Class(10) };
    let open = || {
        Dataset::open(
            &DataSpec { samples: samples.clone(), ..DataSpec::new(path) },
            Split::Train,
            1,
        )
    };
    // A process that another test has just started may briefly hold the locks of files that were
    // being written.
    let locked = (0..20)
        .find_map(|_| open().inspect_err(|_| std::thread::sleep(Duration::from_millis(10))).ok());
    locked.unwrap_or_else(|| open().unwrap())
}

/// Checks every sample of a directory with one or more such files: alone, in runs, and in batches.
fn check(folder: &Path, files: usize, what: &str) {
    let mut dataset = open(folder);
    let samples = files * ROWS;
    assert_eq!(dataset.samples(), samples as u64, "{what}");
    let wanted = |sample: usize| (0..ROW).map(move |i| element(sample % ROWS * ROW + i));
    let sampler = Sampler::new(samples as u64, 3);
    for position in 0..samples as u64 {
        let sample = sampler.index(position) as usize;
        let mut features = vec![-1.0; ROW];
        let mut classes = [99];
        let into =
            SampleMut { features: &mut features, classes: &mut classes, ..SampleMut::default() };
        dataset.read(sample as u64, into).unwrap();
        assert!(features.iter().copied().eq(wanted(sample)), "{what}: {sample}: {features:?}");
        assert_eq!(classes[0], class(sample % ROWS), "{what}: {sample}");
    }
    assert!(dataset.cached() <= dataset.cache_limit(), "{what}");
    for range in [0..samples as u64, 90..samples as u64, 3..5] {
        let batch = Batch::read(&mut open(folder), range.clone(), range.clone()).unwrap();
        let range = range.start as usize..range.end as usize;
        assert!(
            batch.parts.features.iter().copied().eq(range.clone().flat_map(wanted)),
            "{what}: {range:?}"
        );
        assert!(
            batch
                .parts
                .classes
                .iter()
                .copied()
                .eq(range.clone().map(|sample| class(sample % ROWS))),
            "{what}: {range:?}"
        );
    }
    // Adjacent samples among others.
    let numbers = [7, 8, 9, 3, 100, 0, 1, 1];
    let batch = Batch::read(&mut open(folder), 0..8, numbers.into_iter()).unwrap();
    assert!(
        batch.parts.features.iter().copied().eq(numbers.iter().flat_map(|n| wanted(*n as usize))),
        "{what}"
    );
}

#[test]
fn chunks_compression_and_types_make_no_difference() {
    let root = tempfile::tempdir().unwrap();
    for (what, chunk, compressed) in [
        ("contiguous", None, false),
        ("rows", Some([1, 4, 3]), false),
        ("chunked", Some([8, 4, 3]), false),
        ("compressed", Some([8, 4, 3]), true),
        ("compressed rows", Some([1, 4, 3]), true),
        ("narrow", Some([16, 2, 2]), true),
        ("whole", Some([ROWS, 4, 3]), true),
    ] {
        let folder = root.path().join(what);
        std::fs::create_dir(&folder).unwrap();
        for name in ["train-0.h5", "train-1.h5"] {
            file(&folder.join(name), 0, |file| inputs(file, chunk, compressed, |x| x));
        }
        check(&folder, 2, what);
    }
    macro_rules! types {
        ($($type:ident)*) => {$(
            for (chunk, compressed) in [(None, false), (Some([8, 4, 3]), true)] {
                let path = root.path().join(format!("{}-{compressed}.h5", stringify!($type)));
                file(&path, 0, |file| inputs(file, chunk, compressed, |x| x as $type));
                check(&path, 1, stringify!($type));
            }
        )*};
    }
    types!(u8 i16 u16 i32 u32 i64 u64 f32 f64);
}

#[test]
fn offsets_are_those_of_the_file() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("userblock.h5");
    file(&path, 512, |file| inputs(file, None, false, |x| x as u8));
    check(&path, 1, "user block");

    // The elements are in another file, behind a link: the same offset would be wrong in this one.
    let other = root.path().join("other.h5");
    file(&other, 0, |file| {
        file.new_dataset::<u8>()
            .shape(1000)
            .create("before")
            .unwrap()
            .write_raw(&[7u8; 1000])
            .unwrap();
        inputs(file, None, false, |x| x);
    });
    let path = root.path().join("linked.h5");
    file(&path, 0, |file| {
        let name = other.to_str().unwrap();
        file.link_external(name, "/inputs", "/inputs").unwrap();
    });
    check(&path, 1, "external link");

    let raw = root.path().join("raw");
    std::fs::write(&raw, [&[9; 16], bytemuck::cast_slice::<f32, u8>(&all(|x| x))].concat())
        .unwrap();
    let path = root.path().join("external.h5");
    file(&path, 0, |file| {
        let builder = file.new_dataset_builder().empty::<f32>().shape((ROWS, SHAPE[0], SHAPE[1]));
        builder.external(raw.to_str().unwrap(), 16, ROWS * ROW * 4).create("inputs").unwrap();
    });
    check(&path, 1, "external file");
}

#[test]
fn another_byte_order_is_converted() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("big.h5");
    file(&path, 0, |file| {
        let space = hdf5::Dataspace::try_new((ROWS, SHAPE[0], SHAPE[1])).unwrap();
        let numbers = all(|x| x);
        hdf5::sync::sync(|| {
            // SAFETY: all ids are open, the name ends with a zero, and there is a number for each
            // element of the space.
            unsafe {
                let big = *hdf5::globals::H5T_IEEE_F32BE;
                let id = file.id();
                let defaults = H5P_DEFAULT;
                let dataset = H5Dcreate2(
                    id,
                    c"inputs".as_ptr(),
                    big,
                    space.id(),
                    defaults,
                    defaults,
                    defaults,
                );
                let native = *hdf5::globals::H5T_NATIVE_FLOAT;
                assert!(
                    H5Dwrite(dataset, native, H5S_ALL, H5S_ALL, defaults, numbers.as_ptr().cast())
                        >= 0
                );
                H5Dclose(dataset);
            }
        });
    });
    check(&path, 1, "big-endian");
}

#[test]
fn what_was_never_written_is_refused_unless_it_is_a_part() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("empty.h5");
    file(&path, 0, |file| {
        file.new_dataset::<f32>().shape((ROWS, ROW)).create("inputs").unwrap();
    });
    let samples = SampleSpec::Rows { input: ROW, ids: Ids::None, target: Target::Class(10) };
    let opened = Dataset::open(&DataSpec { samples, ..DataSpec::new(&path) }, Split::Train, 1);
    let error = opened.err().unwrap().to_string();
    assert!(error.contains("empty.h5: /inputs was never written"), "{error}");

    // Missing chunks among others hold the fill value.
    let path = root.path().join("part.h5");
    file(&path, 0, |file| {
        let inputs =
            file.new_dataset::<f32>().shape((ROWS, ROW)).chunk((10, ROW)).fill_value(7.0f32);
        inputs
            .create("inputs")
            .unwrap()
            .write_slice(&vec![1.5f32; ROW], ndarray::s![12, ..])
            .unwrap();
    });
    let batch = Batch::read(&mut open(&path), 9..13, 9..13).unwrap();
    let rows: Vec<&[f32]> = batch.parts.features.chunks(ROW).collect();
    assert_eq!(rows, [&[7.0; ROW], &[7.0; ROW], &[7.0; ROW], &[1.5; ROW]].map(|row| &row[..]));
}

#[test]
fn a_file_that_shrinks_ends_with_its_name() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("train.h5");
    file(&path, 0, |file| inputs(file, None, false, |x| x));
    let mut dataset = open(&path);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(3000).unwrap();
    let error = Batch::read(&mut dataset, 0..ROWS as u64, 0..ROWS as u64).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(
        error.to_string().contains("train.h5") && error.to_string().contains("\nhint: "),
        "{error}"
    );
}
