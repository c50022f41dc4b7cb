//! Import of text into shards and samples, and files of other programs.

use std::path::Path;
use std::time::Duration;

use hpctrain::data::import::{ImportText, Imported, import_text};
use hpctrain::data::{
    Batch, DataSpec, Dataset, Loader, SampleFields, SampleMut, Sampler, Split, Tokenizer,
    TokenizerKind, bundled, inspect,
};

/// Returns a text of `n` characters that repeats only after 1000.
fn text(n: usize) -> String {
    (0..n).map(|i| char::from(b'a' + (i * i % 1000 % 26) as u8)).collect()
}

fn import(dir: &Path, text: &[u8], change: impl FnOnce(&mut ImportText)) -> Imported {
    let input = dir.join("input.txt");
    std::fs::write(&input, text).unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Char, dir.join("out"));
    import.to.val_fraction = 0.0;
    change(&mut import);
    import_text(&import).unwrap()
}

fn sample(dataset: &mut Dataset, sample: u64) -> (Vec<u32>, Vec<u32>) {
    let mut inputs = vec![u32::MAX; dataset.context()];
    let mut targets = vec![u32::MAX; dataset.context()];
    dataset.read(sample, SampleMut::text(&mut inputs, &mut targets)).unwrap();
    (inputs, targets)
}

#[test]
fn each_tokenizer_gives_the_text_back() {
    let text = "First Citizen:\nnaïve — 🦀 speak!\n".repeat(20);
    for tokenizer in [TokenizerKind::Char, TokenizerKind::Byte, TokenizerKind::Gpt2] {
        let dir = tempfile::tempdir().unwrap();
        let imported =
            import(dir.path(), text.as_bytes(), |import| import.tokenizer = tokenizer.clone());
        let mut dataset =
            Dataset::open(&DataSpec::new(dir.path().join("out")), Split::Train, 1).unwrap();
        let stored = dataset.tokenizer().unwrap().clone();
        assert_eq!(stored.vocabulary(), imported.vocabulary);
        assert_eq!(dataset.vocabulary(), imported.vocabulary);
        assert_eq!(dataset.tokens(), dataset.samples() + 1);
        let mut ids = sample(&mut dataset, 0).0;
        ids.extend((0..dataset.samples()).map(|i| sample(&mut dataset, i).1[0]));
        assert_eq!(stored.decode(&ids), text, "{tokenizer:?}");
    }
}

#[test]
fn fingerprints_of_foreign_files_depend_on_their_content() {
    let dir = tempfile::tempdir().unwrap();
    let write = |folder: &str, name: &str, ids: &[i32], chunk: Option<usize>| {
        std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        let file = crate::create_hdf5(dir.path().join(folder).join(name));
        let builder = file.new_dataset::<i32>().shape(ids.len());
        let builder = chunk.map_or(builder.clone(), |chunk| builder.chunk(chunk).deflate(1));
        builder.create("tokens").unwrap().write_raw(ids).unwrap();
        file.new_attr::<u64>().create("vocabulary_size").unwrap().write_scalar(&9u64).unwrap();
        Dataset::open(&DataSpec::new(dir.path().join(folder)), Split::Train, 10)
            .unwrap()
            .fingerprint()
    };
    let ids: Vec<i32> = (0..1000).map(|i| i * i / 3 % 9).collect();
    let mut other = ids.clone();
    other[700] = (other[700] + 1) % 9;
    for chunk in [None, Some(1000)] {
        let first = write("a", "train-0.h5", &ids, chunk);
        assert_eq!(
            (first.samples, first.shards[0].rows, &first.shards[0].file[..]),
            (99, 1000, "train-0.h5")
        );
        assert_eq!(write("elsewhere", "train-0.h5", &ids, chunk), first);
        assert_eq!(write("renamed", "train-9.h5", &ids, chunk).difference(&first), None);
        let difference = write("b", "train-0.h5", &other, chunk).difference(&first);
        assert_eq!(difference.as_deref(), Some("train-0.h5 has other content"), "{chunk:?}");
    }
}

#[test]
fn windows_are_the_text_shard_by_shard() {
    let text = text(1003);
    for compress in [None, Some(4)] {
        let dir = tempfile::tempdir().unwrap();
        let imported = import(dir.path(), text.as_bytes(), |import| {
            (import.to.shards, import.to.val_fraction, import.to.compress) = (3, 0.1, compress);
        });
        // 902 training tokens in shards of 301, 301 and 300, then 101 of validation.
        assert_eq!(
            imported.shards.iter().map(|(_, tokens)| *tokens).collect::<Vec<_>>(),
            [301, 301, 300, 101]
        );
        let spec = DataSpec::new(dir.path().join("out"));
        for (split, starts) in [(Split::Train, &[0, 301, 602][..]), (Split::Validation, &[902])] {
            let mut dataset = Dataset::open(&spec, split, 10).unwrap();
            let tokenizer = dataset.tokenizer().unwrap().clone();
            let windows = starts.iter().zip([30, 30, 29].iter().cycle().take(3));
            let windows: Vec<usize> = match split {
                Split::Train => {
                    windows.flat_map(|(start, n)| (0..*n).map(move |w| start + 10 * w)).collect()
                }
                Split::Validation => (0..10).map(|w| starts[0] + 10 * w).collect(),
            };
            assert_eq!(dataset.samples(), windows.len() as u64);
            for (i, &at) in windows.iter().enumerate().rev() {
                let (inputs, targets) = sample(&mut dataset, i as u64);
                assert_eq!(tokenizer.decode(&inputs), text[at..at + 10], "sample {i}");
                assert_eq!(tokenizer.decode(&targets), text[at + 1..at + 11], "sample {i}");
            }
        }
    }
}

#[test]
fn sample_shards_need_no_window() {
    let dir = tempfile::tempdir().unwrap();
    for shard in 0..2i64 {
        let file = crate::create_hdf5(dir.path().join(format!("train-{shard}.h5")));
        for (name, offset) in [("inputs", 0), ("targets", 100)] {
            let ids: Vec<i64> = (0..20).map(|i| 20 * shard + i + offset).collect();
            file.new_dataset::<i64>().shape((5, 4)).create(name).unwrap().write_raw(&ids).unwrap();
        }
    }
    let mut spec = DataSpec::new(dir.path());
    spec.vocabulary = Some(140);
    let mut dataset = Dataset::open(&spec, Split::Train, 4).unwrap();
    assert_eq!((dataset.samples(), dataset.tokens(), dataset.tokenizer()), (10, 40, None));
    assert_eq!(sample(&mut dataset, 7), (vec![28, 29, 30, 31], vec![128, 129, 130, 131]));
    assert_eq!(sample(&mut dataset, 0), (vec![0, 1, 2, 3], vec![100, 101, 102, 103]));
}

#[test]
fn foreign_files_are_read_by_the_names_of_their_datasets() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("corpus.hdf5");
    let ids: Vec<i16> = (0..50_000).map(|i| (i % 12_345) as i16).collect();
    let file = crate::create_hdf5(&path);
    let group = file.create_group("text").unwrap();
    let builder = group.new_dataset::<i16>().chunk(1000).shuffle().deflate(3);
    builder.shape(ids.len()).create("ids").unwrap().write_raw(&ids).unwrap();
    file.close().unwrap();

    let mut spec = DataSpec::new(&path);
    (spec.tokens, spec.vocabulary) = ("/text/ids".to_owned(), Some(12_345));
    let mut dataset = Dataset::open(&spec, Split::Train, 64).unwrap();
    assert_eq!(dataset.samples(), 49_999 / 64);
    let sampler = Sampler::new(dataset.samples(), 3);
    for i in (0..dataset.samples()).map(|position| sampler.index(position)) {
        let (inputs, targets) = sample(&mut dataset, i);
        let expected: Vec<u32> = ids[64 * i as usize..][..65].iter().map(|&id| id as u32).collect();
        assert_eq!((&inputs[..], &targets[..]), (&expected[..64], &expected[1..]));
    }
    let report = inspect::inspect(&path).unwrap().to_string();
    assert!(
        report.contains("/text/ids  50000  int16  chunks of 1000  shuffle + deflate 3"),
        "{report}"
    );
    assert!(report.contains("corpus.hdf5: not written by hpctrain"), "{report}");
}

#[test]
fn a_larger_vocabulary_may_be_configured() {
    let dir = tempfile::tempdir().unwrap();
    import(dir.path(), b"abcabc", |_| {});
    let mut spec = DataSpec::new(dir.path().join("out"));
    spec.vocabulary = Some(64);
    assert_eq!(Dataset::open(&spec, Split::Train, 2).unwrap().vocabulary(), 64);
}

#[test]
fn imports_of_the_same_text_are_the_same_files() {
    let dir = tempfile::tempdir().unwrap();
    let first =
        import(dir.path(), b"to be or not to be", |import| import.to.out = dir.path().join("a"));
    let second =
        import(dir.path(), b"to be or not to be", |import| import.to.out = dir.path().join("b"));
    for ((a, _), (b, _)) in first.shards.iter().zip(&second.shards) {
        assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap());
    }
}

#[test]
fn bytes_need_not_be_text() {
    let dir = tempfile::tempdir().unwrap();
    import(dir.path(), &[0xff, 0, 0xfe, 65], |import| import.tokenizer = TokenizerKind::Byte);
    let mut dataset =
        Dataset::open(&DataSpec::new(dir.path().join("out")), Split::Train, 3).unwrap();
    assert_eq!(sample(&mut dataset, 0), (vec![0xff, 0, 0xfe], vec![0, 0xfe, 65]));
    assert_eq!(dataset.tokenizer(), Some(&Tokenizer::Byte));
}

#[test]
fn bundled_data_is_tiny_shakespeare() {
    let directory = bundled::locate("tiny-shakespeare").unwrap();
    assert_eq!(bundled::locate("tiny-shakespeare").unwrap(), directory);
    let mut train = Dataset::open(&DataSpec::new(&directory), Split::Train, 64).unwrap();
    let validation = Dataset::open(&DataSpec::new(&directory), Split::Validation, 64).unwrap();
    assert_eq!((train.tokens(), validation.tokens(), train.vocabulary()), (1_003_854, 111_540, 65));
    let first = sample(&mut train, 0).0;
    let text = train.tokenizer().unwrap().decode(&first);
    assert!(text.starts_with("First Citizen:\nBefore we proceed any further"), "{text}");
}

/// Returns samples 0 to 9 of context 2, in which sample `i` starts with id `2 i`.
fn ten_samples(dir: &Path) -> Dataset {
    import(dir, &(0..21).collect::<Vec<u8>>(), |import| import.tokenizer = TokenizerKind::Byte);
    Dataset::open(&DataSpec::new(dir.join("out")), Split::Train, 2).unwrap()
}

#[test]
fn the_loader_keeps_the_order_and_reuses_buffers() {
    let dir = tempfile::tempdir().unwrap();
    let sampler = Sampler::new(10, 5);
    let schedule = [0..3, 9..12, 3..4];
    let mut loader =
        Loader::start(ten_samples(dir.path()), sampler, schedule.clone().into_iter(), 2).unwrap();
    for positions in schedule {
        let batch = loader.next().unwrap();
        let first: Vec<u32> =
            positions.clone().map(|position| 2 * sampler.index(position) as u32).collect();
        assert_eq!(batch.positions, positions);
        assert_eq!(batch.parts.ids, first.iter().flat_map(|&id| [id, id + 1]).collect::<Vec<_>>());
        assert_eq!(
            batch.parts.classes,
            first.iter().flat_map(|&id| [id + 1, id + 2]).collect::<Vec<_>>()
        );
        loader.recycle(batch);
    }
    let e = loader.next().unwrap_err();
    assert!(e.to_string().contains("more than its schedule"), "{e}");
    assert_eq!(e.kind(), hpctrain::error::Kind::Internal);
    // Too late to be used, and not an error.
    loader.recycle(Batch { positions: 0..0, parts: SampleFields::default() });
}

#[test]
fn a_full_loader_can_be_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = ten_samples(dir.path());
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let endless = (0..).map(|i| i..i + 4);
        let mut loader = Loader::start(dataset, Sampler::in_order(10), endless, 1).unwrap();
        loader.next().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        drop(loader);
        done.send(()).unwrap();
    });
    finished.recv_timeout(Duration::from_secs(20)).expect("dropping a full loader hangs");
}

#[test]
fn the_loader_counts_the_time_it_waits() {
    let dir = tempfile::tempdir().unwrap();
    let slow = (0..1).map(|i| {
        std::thread::sleep(Duration::from_millis(30));
        i..i + 1
    });
    let mut loader =
        Loader::start(ten_samples(dir.path()), Sampler::in_order(10), slow, 1).unwrap();
    loader.next().unwrap();
    assert!(loader.waited() >= Duration::from_millis(20), "{:?}", loader.waited());
}

#[test]
fn read_failures_arrive_with_the_batch() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.h5");
    let file = crate::create_hdf5(&path);
    file.new_dataset::<u8>()
        .shape(7)
        .create("tokens")
        .unwrap()
        .write_raw(&[0u8, 1, 2, 3, 4, 9, 5])
        .unwrap();
    file.close().unwrap();
    let mut spec = DataSpec::new(&path);
    spec.vocabulary = Some(6);
    let dataset = Dataset::open(&spec, Split::Train, 2).unwrap();
    let mut loader =
        Loader::start(dataset, Sampler::in_order(3), [0..2, 2..3, 0..1].into_iter(), 4).unwrap();
    loader.next().unwrap();
    let e = loader.next().unwrap_err().to_string();
    assert!(e.contains("a.h5: /tokens[5] is token id 9, outside the vocabulary of 6"), "{e}");
    assert!(loader.next().is_err());
}
