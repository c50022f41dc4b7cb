//! Each way in which data can be unusable, and the error that the user gets.

use std::path::{Path, PathBuf};

use hdf5::types::VarLenUnicode;
use hpctrain::data::import::{
    Categories, ImportCsv, ImportOptions, ImportText, NotFinite, import_csv, import_text,
};
use hpctrain::data::{
    DataSpec, Dataset, Ids, SampleMut, SampleSpec, Split, Target, TokenizerKind, inspect, verify,
};
use hpctrain::error::{Error, Kind};
use hpctrain_testkit::shards;

/// Asserts the kind, that the first line holds every one of `parts`, and the hint `hint`.
#[track_caller]
fn assert_error(error: &Error, parts: &[&str], hint: &str) {
    let text = error.to_string();
    let (message, rest) = text.split_once("\nhint: ").unwrap_or((&text, ""));
    assert_eq!(error.kind(), Kind::Input, "{text}");
    assert!(!message.contains('\n'), "{text}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is missing in: {text}");
    }
    assert!(rest.contains(hint), "{hint:?} is missing in the hint: {text}");
}

/// A directory for shards.
struct Shards(tempfile::TempDir);

impl Shards {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn tokens(&self, name: &str, ids: &[u8], vocabulary: Option<u64>) -> PathBuf {
        let path = self.path(name);
        let file = crate::create_hdf5(&path);
        file.new_dataset::<u8>().shape(ids.len()).create("tokens").unwrap().write_raw(ids).unwrap();
        if let Some(vocabulary) = vocabulary {
            file.new_attr::<u64>()
                .create("vocabulary_size")
                .unwrap()
                .write_scalar(&vocabulary)
                .unwrap();
        }
        path
    }

    /// Writes a shard with the importer.
    fn imported(&self, name: &str, text: &str, tokenizer: TokenizerKind) -> PathBuf {
        let input = self.path("text");
        let out = self.path("out");
        std::fs::write(&input, text).unwrap();
        let mut import = ImportText::new(input, tokenizer, &out);
        import.to.val_fraction = 0.0;
        import_text(&import).unwrap();
        let path = self.path(name);
        std::fs::rename(out.join("train-00000.h5"), &path).unwrap();
        path
    }

    fn open(&self, context: usize) -> Error {
        failure(Dataset::open(&DataSpec::new(self.0.path()), Split::Train, context))
    }
}

fn failure(result: Result<Dataset, Error>) -> Error {
    result.err().expect("opened what it should refuse")
}

#[test]
fn path_is_missing() {
    let e = failure(Dataset::open(&DataSpec::new("/no/such/place"), Split::Train, 4));
    assert_error(&e, &["/no/such/place does not exist"], "data.path");
}

#[test]
fn no_shard_fits_the_pattern() {
    let shards = Shards::new();
    assert_error(&shards.open(4), &["matches train-*.h5"], "nothing; set data.train");
    shards.tokens("part-1.h5", &[0; 9], Some(5));
    std::fs::write(shards.path("notes.txt"), "").unwrap();
    assert_error(&shards.open(4), &["matches train-*.h5"], "notes.txt, part-1.h5; set data.train");
    let e = failure(Dataset::open(&DataSpec::new(shards.0.path()), Split::Validation, 4));
    assert_error(&e, &["matches val-*.h5"], "data.validation");
}

#[test]
fn a_single_file_has_no_validation_split() {
    let path = Shards::new().0.keep().join("a.h5");
    crate::create_hdf5(&path);
    let e = failure(Dataset::open(&DataSpec::new(&path), Split::Validation, 4));
    assert_error(&e, &["a.h5 is a single file"], "directory");
}

#[test]
fn a_file_is_truncated() {
    let shards = Shards::new();
    let path = shards.tokens("train-0.h5", &[1; 5000], Some(5));
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(3000).unwrap();
    assert_error(
        &shards.open(4),
        &["train-0.h5 is a damaged or truncated HDF5 file", "3000"],
        "import it again",
    );
    assert_error(&inspect::inspect(&path).unwrap_err(), &["truncated"], "import it again");
}

#[test]
fn a_file_is_not_hdf5() {
    let shards = Shards::new();
    for garbage in ["", "what is this", "a longer text than the eight bytes of a signature"] {
        std::fs::write(shards.path("train-0.h5"), garbage).unwrap();
        assert_error(&shards.open(4), &["train-0.h5 is not an HDF5 file"], "data import");
    }
}

#[test]
fn datasets_are_lacking() {
    let shards = Shards::new();
    let file = crate::create_hdf5(shards.path("train-0.h5"));
    assert_error(
        &shards.open(4),
        &["train-0.h5: has neither /tokens nor /inputs and /targets"],
        "no dataset",
    );
    file.create_group("g").unwrap().new_dataset::<u8>().shape(3).create("ids").unwrap();
    file.new_dataset::<u8>().shape((3, 4)).create("inputs").unwrap();
    file.flush().unwrap();
    drop(file);
    assert_error(&shards.open(4), &["train-0.h5: has no dataset /targets"], "/g/ids, /inputs");
}

#[test]
fn a_name_leads_to_a_group() {
    let shards = Shards::new();
    crate::create_hdf5(shards.path("train-0.h5")).create_group("tokens").unwrap();
    assert_error(&shards.open(4), &["train-0.h5", "/tokens is a group, not a dataset"], "");
}

#[test]
fn ids_are_not_integers() {
    let shards = Shards::new();
    let file = crate::create_hdf5(shards.path("train-0.h5"));
    file.new_dataset::<f32>().shape(9).create("tokens").unwrap();
    file.close().unwrap();
    assert_error(&shards.open(4), &["train-0.h5: /tokens is of type float32"], "integer");
}

#[test]
fn shapes_are_wrong() {
    let shards = Shards::new();
    let write = |datasets: &[(&str, (usize, usize))]| {
        let file = crate::create_hdf5(shards.path("train-0.h5"));
        for (name, shape) in datasets {
            file.new_dataset::<u8>().shape(*shape).create(*name).unwrap();
        }
        file.new_attr::<u64>().create("vocabulary_size").unwrap().write_scalar(&5u64).unwrap();
    };
    write(&[("tokens", (5, 2))]);
    assert_error(
        &shards.open(4),
        &["train-0.h5: /tokens has documents of 2 ids, but one sample takes 4 + 1"],
        "context",
    );
    let file = crate::create_hdf5(shards.path("train-0.h5"));
    file.new_dataset::<u8>().shape((5, 2, 3)).create("tokens").unwrap();
    file.close().unwrap();
    assert_error(
        &shards.open(4),
        &["train-0.h5: /tokens has shape 5 x 2 x 3", "one dimension"],
        "shape",
    );
    write(&[("inputs", (5, 4)), ("targets", (6, 4))]);
    assert_error(&shards.open(4), &["train-0.h5: /inputs is 5 x 4, but /targets is 6 x 4"], "row");
    write(&[("inputs", (5, 4)), ("targets", (5, 4))]);
    assert_error(&shards.open(8), &["samples of 4 ids", "context is 8"], "set the context to 4");
    write(&[("inputs", (0, 4)), ("targets", (0, 4))]);
    assert_error(&shards.open(4), &["train-0.h5: /inputs has no samples"], "");
}

#[test]
fn siblings_differ() {
    let shards = Shards::new();
    let first = shards.imported("train-0.h5", "abcabcabc", TokenizerKind::Char);
    let first = first.to_str().unwrap();
    let differs = |parts: &[&str]| {
        assert_error(&shards.open(4), &[&[first, "train-1.h5"], parts].concat(), "must agree");
    };
    shards.imported("train-1.h5", "abcdabcd", TokenizerKind::Char);
    differs(&["vocabulary_size differs", "train-1.h5 has 4", "train-0.h5 has 3"]);
    shards.imported("train-1.h5", "abdabdabd", TokenizerKind::Char);
    differs(&[
        "tokenizer differs",
        "train-1.h5 has char with 'd' as id 2",
        "train-0.h5 has char with 'c' as id 2",
    ]);
    shards.imported("train-1.h5", "abcabcabc", TokenizerKind::Gpt2);
    differs(&["dtype differs", "train-1.h5 has /tokens uint16", "train-0.h5 has /tokens uint8"]);
    shards.tokens("train-1.h5", &[1; 9], None);
    differs(&["vocabulary_size differs", "train-1.h5 has none"]);
    shards.tokens("train-1.h5", &[1; 9], Some(3));
    differs(&["tokenizer differs", "train-1.h5 has none", "train-0.h5 has char"]);
    let file = crate::create_hdf5(shards.path("train-1.h5"));
    for name in ["inputs", "targets"] {
        file.new_dataset::<u8>().shape((5, 4)).create(name).unwrap();
    }
    file.close().unwrap();
    differs(&["datasets differs", "/inputs, /targets"]);
}

#[test]
fn sample_shapes_of_siblings_differ() {
    let shards = Shards::new();
    for (shard, context) in [(0, 4), (1, 5)] {
        let file = crate::create_hdf5(shards.path(&format!("train-{shard}.h5")));
        for name in ["inputs", "targets"] {
            file.new_dataset::<u8>().shape((3, context)).create(name).unwrap();
        }
    }
    let parts = [
        "sample shape differs",
        "train-1.h5 has /inputs 5, /targets 5",
        "train-0.h5 has /inputs 4",
    ];
    assert_error(&shards.open(4), &parts, "must agree");
}

/// Imports four training shards and one for validation: one set of text, and one of rows.
fn imports(folder: &Path) -> [DataSpec; 2] {
    let text = folder.join("text");
    let table = folder.join("table.csv");
    std::fs::write(&text, "abcde".repeat(100)).unwrap();
    let out = folder.join("tokens");
    let mut import = ImportText::new(text, TokenizerKind::Char, &out);
    (import.to.shards, import.to.val_fraction) = (4, 0.2);
    import_text(&import).unwrap();
    let rows: String = (0..40).map(|i| format!("{i},{}\n", i % 3)).collect();
    std::fs::write(&table, format!("x,y\n{rows}")).unwrap();
    let of_rows = folder.join("rows");
    let kept = ImportOptions {
        not_finite: NotFinite::Error,
        every: 5,
        shards: 4,
        normalize: true,
        out: of_rows.clone(),
    };
    let targets = vec!["y".to_owned()];
    let categories = Categories::NONE;
    import_csv(&ImportCsv { targets, categories, ..ImportCsv::new(table, kept) }).unwrap();
    let samples = SampleSpec::Rows { input: 1, ids: Ids::None, target: Target::Class(3) };
    [DataSpec::new(out), DataSpec { samples, ..DataSpec::new(of_rows) }]
}

#[test]
fn shards_of_an_import_are_missing_or_too_many() {
    let dir = tempfile::tempdir().unwrap();
    for (spec, source) in imports(dir.path()).into_iter().zip(["text", "table.csv"]) {
        let at = |name: &str| spec.path.join(name);
        let open = |spec: &DataSpec| Dataset::open(spec, Split::Train, 4);
        let all = open(&spec).unwrap().samples();
        let third = at("train-00002.h5");
        let aside = dir.path().join("aside");
        std::fs::rename(&third, &aside).unwrap();
        let missing = format!("train-00002.h5 is missing of the 4 train shards of {source}");
        assert_error(&failure(open(&spec)), &[spec.path.to_str().unwrap(), &missing], "data.train");
        let verified = verify::verify(&spec.path).unwrap_err().to_string();
        assert!(verified.contains(&missing), "{verified}");
        // Validation is complete, and so are shards that are named explicitly.
        Dataset::open(&spec, Split::Validation, 4).unwrap();
        let named = DataSpec { train: "train-0000[013].h5".parse().unwrap(), ..spec.clone() };
        assert_eq!(open(&named).unwrap().samples(), all / 4 * 3);
        let one = DataSpec { path: at("train-00003.h5"), ..spec.clone() };
        assert_eq!(open(&one).unwrap().samples(), all / 4);
        std::fs::rename(at("train-00000.h5"), dir.path().join("first")).unwrap();
        let missing = "train-00000.h5, train-00002.h5 are missing of the 4 train shards";
        assert_error(&failure(open(&spec)), &[missing], "data.train");
        std::fs::rename(dir.path().join("first"), at("train-00000.h5")).unwrap();

        // A copy under another name, in addition to all shards and instead of another.
        std::fs::rename(&aside, &third).unwrap();
        std::fs::copy(at("train-00001.h5"), at("train-00004.h5")).unwrap();
        let duplicate = "train-00001.h5 and train-00004.h5 are both number 1 of the 4 train shards";
        assert_error(&failure(open(&spec)), &[duplicate], "again");
        std::fs::rename(at("train-00004.h5"), &third).unwrap();
        let duplicate = "train-00001.h5 and train-00002.h5 are both number 1 of the 4 train shards";
        assert_error(&failure(open(&spec)), &[duplicate], "again");

        // Shards with other names.
        std::fs::remove_file(&third).unwrap();
        for number in [0, 1, 3] {
            std::fs::rename(
                at(&format!("train-0000{number}.h5")),
                at(&format!("part-0000{number}-of-4.h5")),
            )
            .unwrap();
        }
        let parts = DataSpec { train: "part-*".parse().unwrap(), ..spec.clone() };
        assert_error(&failure(open(&parts)), &["part-00002-of-4.h5 is missing"], "data.train");
    }
}

#[test]
fn a_shard_is_of_another_import() {
    let a = tempfile::tempdir().unwrap();
    let b = tempfile::tempdir().unwrap();
    let [_, spec] = imports(a.path());
    // The same table with one number changed.
    let rows: String = (0..40).map(|i| format!("{},{}\n", i + 1, i % 3)).collect();
    let table = b.path().join("table.csv");
    std::fs::write(&table, format!("x,y\n{rows}")).unwrap();
    let out = b.path().join("rows");
    let kept = ImportOptions {
        not_finite: NotFinite::Error,
        every: 5,
        shards: 4,
        normalize: false,
        out: out.clone(),
    };
    let targets = vec!["y".to_owned()];
    let categories = Categories::NONE;
    import_csv(&ImportCsv { targets, categories, ..ImportCsv::new(table, kept) }).unwrap();
    let raw = DataSpec { path: out.clone(), ..spec.clone() };
    Dataset::open(&raw, Split::Train, 1).unwrap();
    std::fs::copy(out.join("train-00003.h5"), spec.path.join("train-00003.h5")).unwrap();
    // Without the scale of the other shards it would not match them at all.
    let file = shards::edit(spec.path.join("train-00003.h5"));
    let scale = shards::open(spec.path.join("train-00000.h5")).dataset("inputs").unwrap();
    for name in ["mean", "std"] {
        let numbers: Vec<f32> = scale.attr(name).unwrap().read_raw().unwrap();
        let attribute = file
            .dataset("inputs")
            .unwrap()
            .new_attr::<f32>()
            .shape(numbers.len())
            .create(name)
            .unwrap();
        attribute.write_raw(&numbers).unwrap();
    }
    file.close().unwrap();
    let e = failure(Dataset::open(&spec, Split::Train, 1));
    assert_error(
        &e,
        &["train-00003.h5 is of another import, not number 3 of the 4 train shards of table.csv"],
        "again",
    );
}

#[test]
fn older_shards_of_rows_say_nothing_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let [_, spec] = imports(dir.path());
    for number in 0..4 {
        let file = shards::edit(spec.path.join(format!("train-0000{number}.h5")));
        file.attr("format_version").unwrap().write_scalar(&1u32).unwrap();
        for name in ["shard", "num_shards", "import"] {
            file.delete_attr(name).unwrap();
        }
        file.unlink("checksums").unwrap();
        file.close().unwrap();
    }
    let all = Dataset::open(&spec, Split::Train, 1).unwrap().samples();
    std::fs::remove_file(spec.path.join("train-00002.h5")).unwrap();
    assert_eq!(Dataset::open(&spec, Split::Train, 1).unwrap().samples(), all / 4 * 3);
    let report = verify::verify(&spec.path).unwrap();
    assert!(report.notes.iter().any(|note| note.ends_with("train-00000.h5 has no checksums")));
}

#[test]
fn the_format_is_of_the_future() {
    let shards = Shards::new();
    let path = shards.imported("train-0.h5", "abcabc", TokenizerKind::Char);
    let file = shards::edit(&path);
    file.attr("format_version").unwrap().write_scalar(&2u32).unwrap();
    file.close().unwrap();
    assert_error(
        &shards.open(2),
        &["train-0.h5: format_version is 2", "reads up to 1"],
        "newer hpctrain",
    );
}

#[test]
fn the_tokenizer_is_damaged() {
    let shards = Shards::new();
    let path = shards.imported("train-0.h5", "abcabc", TokenizerKind::Char);
    let file = shards::edit(&path);
    let json: VarLenUnicode = r#"{"kind":"char","chars":["a"]}"#.parse().unwrap();
    file.dataset("tokenizer").unwrap().write_scalar(&json).unwrap();
    file.close().unwrap();
    assert_error(
        &shards.open(2),
        &["train-0.h5", "vocabulary_size is 3", "tokenizer has 1 ids"],
        "import",
    );
}

#[test]
fn a_shard_is_shorter_than_a_window() {
    let shards = Shards::new();
    shards.tokens("train-0.h5", &[1; 9], Some(5));
    shards.tokens("train-1.h5", &[1; 8], Some(5));
    assert_error(
        &shards.open(8),
        &["train-1.h5: /tokens has 8 tokens", "8 + 1"],
        "smaller context",
    );
    assert_error(&shards.open(0), &["0 tokens"], "context");
}

#[test]
fn the_vocabulary_is_unknown_or_too_small() {
    let shards = Shards::new();
    let path = shards.tokens("train-0.h5", &[1; 9], None);
    assert_error(&shards.open(4), &["train-0.h5", "vocabulary is unknown"], "model.vocabulary");
    let mut spec = DataSpec::new(&path);
    spec.vocabulary = Some(1 << 31);
    assert_error(&failure(Dataset::open(&spec, Split::Train, 4)), &["2147483648"], "");
    shards.tokens("train-0.h5", &[1; 9], Some(50));
    spec.vocabulary = Some(40);
    let e = failure(Dataset::open(&spec, Split::Train, 4));
    assert_error(
        &e,
        &["train-0.h5: vocabulary_size is 50, but model.vocabulary is 40"],
        "50 or more",
    );
}

#[test]
fn an_id_is_outside_the_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.h5");
    let file = crate::create_hdf5(&path);
    for (name, bad) in [("inputs", -3i64), ("targets", 1 << 40)] {
        let mut ids = [1i64; 12];
        ids[if name == "inputs" { 6 } else { 11 }] = bad;
        file.new_dataset::<i64>().shape((3, 4)).create(name).unwrap().write_raw(&ids).unwrap();
    }
    file.close().unwrap();
    let mut spec = DataSpec::new(&path);
    spec.vocabulary = Some(5);
    let mut dataset = Dataset::open(&spec, Split::Train, 4).unwrap();
    let mut inputs = [0; 4];
    let mut targets = [0; 4];
    dataset.read(0, SampleMut::text(&mut inputs, &mut targets)).unwrap();
    let e = dataset.read(1, SampleMut::text(&mut inputs, &mut targets)).unwrap_err();
    assert_error(
        &e,
        &["a.h5: /inputs[1, 2] is token id -3, outside the vocabulary of 5"],
        "ignore_index",
    );
    let e = dataset.read(2, SampleMut::text(&mut inputs, &mut targets)).unwrap_err();
    assert_error(&e, &["a.h5: /targets[2, 3] is token id"], "");
    let e = dataset.read(3, SampleMut::text(&mut inputs, &mut targets)).unwrap_err();
    assert_eq!(e.kind(), Kind::Internal);
}

fn import_failure(dir: &Path, change: impl FnOnce(&mut ImportText)) -> Error {
    let mut import = ImportText::new(dir.join("input.txt"), TokenizerKind::Char, dir.join("out"));
    change(&mut import);
    import_text(&import).unwrap_err()
}

#[test]
fn imports_refuse_bad_requests() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |parts: &[&str], hint: &str, change: &dyn Fn(&mut ImportText)| {
        assert_error(&import_failure(dir.path(), change), parts, hint);
        assert!(!dir.path().join("out").exists(), "{parts:?}");
    };
    refused(&["input.txt does not exist"], "text file", &|_| {});
    std::fs::write(dir.path().join("input.txt"), "").unwrap();
    refused(&["input.txt: the text is empty"], "some text", &|_| {});
    std::fs::write(dir.path().join("input.txt"), b"ab\xffcd").unwrap();
    refused(&["input.txt: byte 2 is not UTF-8"], "UTF-8", &|_| {});
    refused(&["input.txt: byte 2 is not UTF-8"], "byte", &|import| {
        import.tokenizer = TokenizerKind::Gpt2
    });
    std::fs::write(dir.path().join("input.txt"), "abcdefghij").unwrap();
    refused(&["0 shards"], "1 shard", &|import| import.to.shards = 0);
    refused(&["9 training tokens do not fill 10 shards"], "fewer", &|import| import.to.shards = 10);
    for fraction in [1.0, -0.1, f64::NAN] {
        refused(&["validation fraction"], "0.1", &|import| import.to.val_fraction = fraction);
    }
    refused(&["compression level 10"], "6", &|import| import.to.compress = Some(10));
}

#[test]
fn imports_keep_existing_shards() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("input.txt"), "abcdefghij").unwrap();
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("old.h5"), "precious").unwrap();
    assert_error(
        &import_failure(dir.path(), |_| {}),
        &["out holds shards already, such as old.h5"],
        "another",
    );
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1);
}

#[test]
fn nothing_to_inspect_or_verify() {
    let dir = tempfile::tempdir().unwrap();
    for e in [inspect::inspect(dir.path()).unwrap_err(), verify::verify(dir.path()).unwrap_err()] {
        assert_error(&e, &["no .h5 file in"], "directory of .h5 files");
    }
    let missing = dir.path().join("x");
    for e in [inspect::inspect(&missing).unwrap_err(), verify::verify(&missing).unwrap_err()] {
        assert_error(&e, &["x does not exist"], "HDF5 file");
    }
}

/// A writer holds the lock of its file: what it has written so far may be half of the data.
#[test]
fn a_file_that_is_being_written_is_waited_for() {
    let shards = Shards::new();
    let path = shards.tokens("train-0.h5", &[1, 2, 3], Some(5));
    let writer = std::fs::File::options().write(true).open(&path).unwrap();
    writer.lock().unwrap();
    let error = inspect::inspect(&path).unwrap_err();
    assert_error(
        &error,
        &["train-0.h5 is open for writing in another process"],
        "wait until the writer has closed it",
    );
    assert!(!error.to_string().contains("HDF5_USE_FILE_LOCKING"), "{error}");
}
