//! Import of texts: several files, JSON lines, tokenizers of files, ids of other programs.

use std::path::{Path, PathBuf};
use std::slice::from_ref;

use hpctrain::data::import::{
    IdVocabulary, ImportIds, ImportText, StreamShards, import_ids, import_text,
};
use hpctrain::data::{
    DataSpec, Dataset, SampleMut, Split, Tokenizer, TokenizerKind, inspect, verify,
};
use hpctrain::error::Result;

use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::shards;

/// Returns all ids of the training shards below `out`.
fn ids(out: &Path) -> Vec<u32> {
    let mut all = Vec::new();
    for shard in 0.. {
        let path = out.join(format!("train-{shard:05}.h5"));
        if !path.exists() {
            break;
        }
        all.extend(shards::open(path).dataset("tokens").unwrap().read_raw::<u32>().unwrap());
    }
    all
}

/// Imports all of `inputs` into a new folder of `root`.
fn import(
    root: &Path,
    name: &str,
    inputs: &[PathBuf],
    change: impl FnOnce(&mut ImportText),
) -> Result<PathBuf> {
    let out = root.join(name);
    let mut import =
        ImportText { inputs: inputs.to_vec(), ..ImportText::new("", TokenizerKind::Byte, &out) };
    import.to.val_fraction = 0.0;
    change(&mut import);
    import_text(&import).map(|_| out)
}

/// Writes a `tokenizer.json` that this program does not recognise: GPT-2's with another normalizer.
fn foreign(folder: &Path) -> PathBuf {
    let mut value: serde_json::Value =
        serde_json::from_str(&Tokenizer::Gpt2.file().unwrap()).unwrap();
    value["normalizer"] = serde_json::json!({ "type": "NFC" });
    value["truncation"] = serde_json::json!({ "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0 });
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, value.to_string()).unwrap();
    path
}

/// Returns a megabyte of prose, code, other scripts, and noise.
fn mixed() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut text = String::new();
    let words = [
        "naïve",
        "e\u{301}",
        "中文字",
        "данные",
        "🦀",
        "\u{3000}",
        "\n\n\n",
        "\t",
        "  ",
        "0x1F",
        "don't",
        "\r\n",
        "ﬁ",
    ];
    for round in 0.. {
        for name in ["docs/data.md", "src/data/import/text.rs", "docs/models.md", "Cargo.toml"] {
            text += &std::fs::read_to_string(root.join(name)).unwrap();
        }
        (0..9000).for_each(|i| text += words[(i * 7919 + round * 31 + i * i % 101) % words.len()]);
        if text.len() > 1 << 20 {
            return text;
        }
    }
    unreachable!()
}

#[test]
fn ids_are_those_of_the_crate_tokenizers() {
    let root = tempfile::tempdir().unwrap();
    let text = mixed();
    let path = root.path().join("mixed.txt");
    std::fs::write(&path, &text).unwrap();
    let file = foreign(root.path());
    let out = import(root.path(), "out", &[path], |import| {
        import.tokenizer = TokenizerKind::File(file.clone())
    })
    .unwrap();
    let mut theirs = tokenizers::Tokenizer::from_file(&file).unwrap();
    theirs.with_truncation(None).unwrap();
    let whole = theirs.encode_fast(&text[..], false).unwrap();
    let got = ids(&out);
    assert!(got == whole.get_ids(), "{} ids, {} by the crate", got.len(), whole.len());

    // The data set has its tokenizer, the text can be decoded, and all checksums match.
    let dataset = Dataset::open(&DataSpec::new(&out), Split::Train, 8).unwrap();
    assert_eq!((dataset.vocabulary(), dataset.tokenizer().unwrap().name()), (50257, "huggingface"));
    assert_eq!(dataset.tokenizer(), Some(&Tokenizer::read(&file).unwrap()));
    assert_eq!(
        dataset.tokenizer().unwrap().decode(&got[..2000]),
        theirs.decode(&got[..2000], false).unwrap()
    );
    assert!(
        inspect::inspect(&out)
            .unwrap()
            .to_string()
            .contains("tokenizer huggingface, vocabulary 50257")
    );
    verify::verify(&out).unwrap();
}

#[test]
fn documents_follow_each_other() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    std::fs::create_dir(at("texts")).unwrap();
    for (name, text) in [("texts/a", "abé"), ("texts/b", ""), ("texts/c", "ca"), ("last", "b")] {
        std::fs::write(at(name), text).unwrap();
    }
    std::fs::write(
        at("lines.jsonl"),
        "{\"text\": \"abé\"}\n{\"text\": \"\"}\n{\"text\":\"ca\", \"id\": 1}\n{\"text\":\"b\"}\n",
    )
    .unwrap();
    let files = [at("texts"), at("last")];
    let lines = [at("lines.jsonl")];
    let text = |import: &mut ImportText, tokenizer, end: Option<&str>| {
        import.tokenizer = tokenizer;
        import.end_of_text = end.map(str::to_owned);
    };
    // Sorted: a, b, c, |, é.
    let expected = [0, 1, 4, 3, 3, 2, 0, 3, 1, 3];
    let out =
        import(root.path(), "a", &files, |import| text(import, TokenizerKind::Char, Some("|")))
            .unwrap();
    assert_eq!(ids(&out), expected);
    let of_lines = |import: &mut ImportText| {
        text(import, TokenizerKind::Char, Some("|"));
        import.field = Some("text".into());
        import.to.shards = 2;
    };
    assert_eq!(ids(&import(root.path(), "b", &lines, of_lines).unwrap()), expected);
    let out =
        import(root.path(), "c", &files, |import| text(import, TokenizerKind::Byte, None)).unwrap();
    assert_eq!(ids(&out), "abécab".bytes().map(u32::from).collect::<Vec<_>>());
    let gpt2 = |import: &mut ImportText| text(import, TokenizerKind::Gpt2, Some("<|endoftext|>"));
    let ab = Tokenizer::Gpt2.encode("abé").unwrap();
    let found = ids(&import(root.path(), "d", &files, gpt2).unwrap());
    assert_eq!(found[..ab.len() + 2], [&ab[..], &[50256, 50256]].concat());
    // A tokenizer from a file keeps the token that ends a text.
    let file = foreign(root.path());
    let by_file =
        |import: &mut ImportText| text(import, TokenizerKind::File(file), Some("<|endoftext|>"));
    let out = import(root.path(), "e", &files, by_file).unwrap();
    assert_eq!(ids(&out), found);
    let dataset = Dataset::open(&DataSpec::new(&out), Split::Train, 2).unwrap();
    assert_eq!(dataset.tokenizer().unwrap().ends(), [None, Some(50256)]);

    let refused = |change: &dyn Fn(&mut ImportText)| {
        import(root.path(), "x", &files, change).unwrap_err().to_string()
    };
    for (tokenizer, end, wanted) in [
        (
            TokenizerKind::Char,
            "<|endoftext|>",
            "--end-of-text: \"<|endoftext|>\" is not one character",
        ),
        (
            TokenizerKind::Byte,
            "<|endoftext|>",
            "--end-of-text: \"<|endoftext|>\" is 13 tokens of the tokenizer byte",
        ),
        (
            TokenizerKind::Gpt2,
            "the end",
            "--end-of-text: \"the end\" is 2 tokens of the tokenizer gpt2\nhint: ",
        ),
    ] {
        let error = refused(&|import| text(import, tokenizer.clone(), Some(end)));
        assert!(error.contains(wanted), "{error}");
    }
    let error = refused(&|import| import.field = Some("text".into()));
    assert!(error.contains("texts/a: line 1: column 1: expected value"), "{error}");
    std::fs::write(at("texts/c"), [b'a', 0xff]).unwrap();
    let error = refused(&|import| text(import, TokenizerKind::Char, None));
    assert!(error.contains("texts/c: byte 1 is not UTF-8\nhint: "), "{error}");
}

#[test]
fn files_that_are_not_tokenizers_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let text = root.path().join("text");
    let file = root.path().join("tokenizer.json");
    std::fs::write(&text, "some text").unwrap();
    let refused = |content: &str| {
        std::fs::write(&file, content).unwrap();
        let error = import(root.path(), "x", from_ref(&text), |import| {
            import.tokenizer = TokenizerKind::File(file.clone())
        });
        let error = error.unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let give = "\nhint: give the tokenizer.json of a model";
    for (content, wanted) in [
        ("", "tokenizer.json is not a valid tokenizer.json: EOF while parsing"),
        ("{\"version\": \"1.0\"}", "tokenizer.json: cannot be parsed as a tokenizer.json: "),
        (
            "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": []}}",
            "tokenizer.json: the tokenizer has no ids",
        ),
        (
            "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": [\"a b\"]}}",
            "cannot be parsed as a tokenizer.json: ",
        ),
    ] {
        let error = refused(content);
        assert!(error.contains(wanted) && error.contains(give), "{error}");
    }
    std::fs::remove_file(&file).unwrap();
    let error = import(root.path(), "x", from_ref(&text), |import| {
        import.tokenizer = TokenizerKind::File(file.clone())
    });
    assert!(error.unwrap_err().to_string().contains("tokenizer.json does not exist"));
}

/// The engine of regular expressions gives up by a panic in its crate, and such a tokenizer is
/// untrusted data.
#[test]
fn an_expression_that_backtracks_too_much_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name).display().to_string();
    let mut value: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(foreign(root.path())).unwrap()).unwrap();
    let split = serde_json::json!({
        "type": "Split", "pattern": { "Regex": "(a+)+b|c" }, "behavior": "Isolated", "invert": false,
    });
    value["pre_tokenizer"] =
        serde_json::json!({ "type": "Sequence", "pretokenizers": [split, value["pre_tokenizer"]] });
    std::fs::write(at("tokenizer.json"), value.to_string()).unwrap();
    std::fs::write(at("harmless.txt"), "aab, abc").unwrap();
    std::fs::write(at("long.txt"), "a".repeat(40)).unwrap();
    let imported = |inputs: &[&str], out: &str| {
        let inputs = inputs.iter().map(|name| at(name));
        let words = ["data", "import", "text"].map(str::to_owned).into_iter().chain(inputs);
        let to = ["--val-fraction", "0", "--tokenizer", &at("tokenizer.json"), "--out", &at(out)]
            .map(str::to_owned);
        finish(&mut program(words.chain(to)))
    };
    imported(&["harmless.txt"], "out").succeeded();
    let ended = imported(&["harmless.txt", "long.txt"], "more");
    assert_eq!(ended.code(), 2, "{ended}");
    let expected = format!(
        "error: {}: {} fails: Onig: Regex search error: retry-limit-in-match over\nhint: an expression of its pre_tokenizer",
        at("long.txt"),
        at("tokenizer.json")
    );
    assert!(ended.stderr.starts_with(&expected) && ended.stderr.lines().count() == 2, "{ended}");
    assert!(!Path::new(&at("more")).exists());
}

/// Documents × ids, as other programs pack them.
#[test]
fn documents_of_equal_length_are_read_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("packed.h5");
    // Three documents of nine ids; each has two windows of four ids and the ones that follow them.
    let all: Vec<i64> = (0..27).collect();
    let file = crate::create_hdf5(&path);
    file.new_dataset::<i64>().shape((3, 9)).create("input_ids").unwrap().write_raw(&all).unwrap();
    file.close().unwrap();
    let mut spec = DataSpec::new(&path);
    (spec.tokens, spec.vocabulary) = ("/input_ids".into(), Some(27));
    let mut dataset = Dataset::open(&spec, Split::Train, 4).unwrap();
    assert_eq!((dataset.samples(), dataset.tokens()), (6, 27));
    let mut inputs = [0; 24];
    let mut targets = [0; 24];
    dataset.read_run(0, 6, 0, SampleMut::text(&mut inputs, &mut targets)).unwrap();
    for (sample, (inputs, targets)) in inputs.chunks(4).zip(targets.chunks(4)).enumerate() {
        let first = (sample / 2 * 9 + sample % 2 * 4) as u32;
        assert_eq!(inputs, (first..first + 4).collect::<Vec<_>>());
        assert_eq!(targets, (first + 1..first + 5).collect::<Vec<_>>());
    }
    // The same alone and in another order.
    let mut inputs = [0; 4];
    let mut targets = [0; 4];
    dataset.read(3, SampleMut::text(&mut inputs, &mut targets)).unwrap();
    assert_eq!((inputs, targets), ([13, 14, 15, 16], [14, 15, 16, 17]));
    let error = Dataset::open(&spec, Split::Train, 9).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains(
            "packed.h5: /input_ids has documents of 9 ids, but one sample takes 9 + 1\nhint: "
        ),
        "{error}"
    );
    spec.vocabulary = Some(20);
    let mut dataset = Dataset::open(&spec, Split::Train, 4).unwrap();
    let error =
        dataset.read(5, SampleMut::text(&mut inputs, &mut targets)).unwrap_err().to_string();
    assert!(
        error.contains("/input_ids[2, 2] is token id 20, outside the vocabulary of 20"),
        "{error}"
    );
}

#[test]
fn ids_of_other_programs_become_a_stream() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let rows: Vec<u16> = vec![72, 105, 0, 0, 72, 0, 105, 0, 0, 0, 0, 0];
    let header = "{'descr': '<u2', 'fortran_order': False, 'shape': (3, 4), }\n";
    let elements: Vec<u8> = rows.iter().flat_map(|id| id.to_le_bytes()).collect();
    let npy = [
        b"\x93NUMPY\x01\x00",
        &(header.len() as u16).to_le_bytes()[..],
        header.as_bytes(),
        &elements,
    ]
    .concat();
    std::fs::write(at("packed.npy"), npy).unwrap();
    let file = crate::create_hdf5(at("packed.h5"));
    file.new_dataset::<u16>().shape((3, 4)).create("ids").unwrap().write_raw(&rows).unwrap();
    file.new_dataset::<u16>().shape(12).create("stream").unwrap().write_raw(&rows).unwrap();
    file.close().unwrap();
    let import = |name: &str, input: &str, dataset: &str, of: IdVocabulary, pad| {
        let to = StreamShards { val_fraction: 0.0, ..StreamShards::new(at(name)) };
        import_ids(&ImportIds {
            input: at(input),
            dataset: dataset.into(),
            vocabulary: of,
            pad,
            to,
        })
        .map(|_| at(name))
    };
    let bytes = || IdVocabulary::Tokenizer(TokenizerKind::Byte);
    for (name, input, dataset) in [("a", "packed.npy", "/tokens"), ("b", "packed.h5", "ids")] {
        let out = import(name, input, dataset, bytes(), Some(0)).unwrap();
        assert_eq!(ids(&out), [72, 105, 72, 0, 105]);
        let dataset = Dataset::open(&DataSpec::new(&out), Split::Train, 4).unwrap();
        assert_eq!(dataset.tokenizer(), Some(&Tokenizer::Byte));
        verify::verify(&out).unwrap();
    }
    let all: Vec<u32> = rows.iter().map(|id| u32::from(*id)).collect();
    let out = import("c", "packed.h5", "stream", IdVocabulary::Below(106), Some(0)).unwrap();
    assert_eq!(ids(&out), all);
    let dataset = Dataset::open(&DataSpec::new(&out), Split::Train, 4).unwrap();
    assert_eq!((dataset.tokenizer(), dataset.vocabulary()), (None, 106));
    assert_eq!(ids(&import("d", "packed.npy", "", bytes(), None).unwrap()), all);

    let refused = |input: &str, dataset: &str, of| {
        import("x", input, dataset, of, None).unwrap_err().to_string()
    };
    for (error, wanted) in [
        (
            refused("packed.h5", "ids", IdVocabulary::Below(100)),
            "packed.h5: element 1 of document 0 is 105, but there are 100 ids\nhint: ",
        ),
        (
            refused("packed.npy", "", IdVocabulary::Below(100)),
            "packed.npy: element 1 of document 0 is 105, but there are 100 ids",
        ),
        (
            refused("packed.h5", "stream", IdVocabulary::Below(100)),
            "packed.h5: element 1 is 105, but there are 100 ids",
        ),
        (refused("packed.h5", "other", bytes()), "packed.h5: has neither other nor"),
        (refused("nothing.h5", "ids", bytes()), "nothing.h5 does not exist\nhint: "),
        (
            refused("packed.npy", "", IdVocabulary::Tokenizer(TokenizerKind::Char)),
            "a vocabulary of 0 ids is outside",
        ),
    ] {
        assert!(error.contains(wanted), "{error}");
    }
    assert!(!at("x").exists());
}
