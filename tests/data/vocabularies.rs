//! Vocabularies of categories and texts of tables: the ids on the command line, in shards, and of
//! later tables.

use std::path::Path;

use hpctrain::data::{
    DataSpec, Dataset, Ids, Lookup, SampleMut, SampleSpec, Split, Target, TextVectorizer,
    Tokenizer, TokenizerKind, inspect, verify,
};

use hpctrain_testkit::launch::{Ended, finish, program};

/// Runs `data import csv` with these arguments in the directory.
fn import(root: &Path, arguments: &[&str]) -> Ended {
    finish(program(["data", "import", "csv"]).args(arguments).current_dir(root))
}

/// Returns the ids of every training row.
fn ids(folder: &Path, input: usize, ids: Ids) -> Vec<Vec<u32>> {
    let samples = SampleSpec::Rows { input, ids, target: Target::Unknown };
    let spec = DataSpec { samples, ..DataSpec::new(folder) };
    let mut dataset = Dataset::open(&spec, Split::Train, 1).unwrap();
    let mut all = vec![vec![0; dataset.sizes().ids]; dataset.samples() as usize];
    for (ids, sample) in all.iter_mut().zip(0..) {
        dataset.read(sample, SampleMut { ids, ..SampleMut::default() }).unwrap();
    }
    all
}

/// Returns the ids of the categories of every training row, counted in each table by itself.
fn categories(folder: &Path, tables: &[usize]) -> Vec<Vec<u32>> {
    let first = |table: usize| tables[..table].iter().sum::<usize>() as u32;
    let rows = ids(folder, 0, Ids::Tables(tables.into()));
    rows.into_iter()
        .map(|row| row.iter().enumerate().map(|(table, id)| id - first(table)).collect())
        .collect()
}

const SITES: &str =
    "site,pet,y\nb,cat,0\na,dog,1\nc,cat,0\na,eel,1\n,cat,0\nc,dog,1\na,cat,0\nd,,1\n";

#[test]
fn categories_have_the_ids_that_options_ask_for() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("t.csv"), SITES).unwrap();
    std::fs::write(root.path().join("sites.txt"), "c\nz\na\n").unwrap();
    let common = ["t.csv", "--target", "y", "--val-every", "0", "--categorical", "site,pet"];
    let hash = |value: &str, oov: u32| 1 + crc32fast::hash(value.as_bytes()) % oov;
    let [b, d, eel] = ["b", "d", "eel"].map(|value| hash(value, 2));
    for (name, options, tables, sites, pets, note) in [
        ("plain", &[][..], [5, 4], [1, 2, 3, 2, 0, 3, 2, 4], [1, 2, 1, 3, 1, 2, 1, 0], ""),
        (
            "counted",
            &["--min-count", "2"],
            [3, 3],
            [0, 1, 2, 1, 0, 2, 1, 0],
            [1, 2, 1, 0, 1, 2, 1, 0],
            "unknown: 2 of 7 values of column \"site\", such as \"b\"; 1 of 7 values of column \"pet\", such as \"eel\"",
        ),
        // Of b and d, which occur once, b appears first.
        (
            "most",
            &["--max-ids", "4"],
            [4, 4],
            [3, 1, 2, 1, 0, 2, 1, 0],
            [1, 2, 1, 3, 1, 2, 1, 0],
            "unknown: 1 of 7 values of column \"site\", such as \"d\"",
        ),
        (
            "oov",
            &["--max-ids", "5", "--oov", "2"],
            [5, 5],
            [b, 3, 4, 3, 0, 4, 3, d],
            [3, 4, 3, eel, 3, 4, 3, 0],
            "unknown: 2 of 7 values of column \"site\", such as \"b\"; 1 of 7",
        ),
        (
            "given",
            &["--vocabulary", "site=sites.txt", "--oov", "2", "--min-count", "2"],
            [6, 5],
            [b, 5, 3, 5, 0, 3, 5, d],
            [3, 4, 3, eel, 3, 4, 3, 0],
            "unknown: 2 of 7 values of column \"site\", such as \"b\"",
        ),
    ] {
        let ended = import(root.path(), &[&common[..], options, &["--out", name]].concat());
        let ended = ended.succeeded();
        let wanted = format!("embedding_tables: ids = {tables:?}");
        assert!(ended.stdout.contains(&wanted), "{name}: {ended}");
        match note {
            "" => assert!(!ended.stdout.contains("unknown"), "{ended}"),
            note => assert!(ended.stdout.contains(note), "{name}: {ended}"),
        }
        let found = categories(&root.path().join(name), &tables);
        let wanted: Vec<Vec<u32>> =
            sites.iter().zip(pets).map(|(site, pet)| vec![*site, pet]).collect();
        assert_eq!(found, wanted, "{name}");
    }

    // A later table has the ids of the first one; unknown values are counted, empty ones are not.
    std::fs::write(root.path().join("later.csv"), "pet,site\ncat,a\nowl,d\n,\nowl,q\n").unwrap();
    // Options that would have no effect beside --like are refused.
    for option in [["--oov", "2"], ["--max-ids", "2"], ["--vocabulary", "site=nofile.txt"]] {
        let like = ["later.csv", "--like", "given", "--out", "later"];
        let refused = import(root.path(), &[&like[..], &option].concat());
        assert_eq!(refused.code(), 2, "{refused}");
        assert!(refused.stderr.contains("cannot be used with"), "{refused}");
    }
    let ended =
        import(root.path(), &["later.csv", "--like", "given", "--out", "later"]).succeeded();
    let last = ended.stdout.trim_end().lines().last().unwrap();
    assert_eq!(
        last,
        "unknown: 2 of 3 values of column \"site\", such as \"d\"; 2 of 3 values of column \"pet\", such as \"owl\""
    );
    let owl = hash("owl", 2);
    assert_eq!(
        categories(&root.path().join("later"), &[6, 5]),
        [vec![5, 3], vec![d, owl], vec![0, 0], vec![hash("q", 2), owl]]
    );
    // A program gets the same ids.
    let lookup = Lookup::read(&root.path().join("sites.txt")).unwrap().with_oov(2);
    assert_eq!(["a", "d", "", "q"].map(|site| lookup.id(site)), [5, d, 0, hash("q", 2)]);
    verify::verify(&root.path().join("later")).unwrap();
}

#[test]
fn unusable_vocabularies_are_refused() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("t.csv"), SITES).unwrap();
    std::fs::write(root.path().join("sites.txt"), "a\nb\na\n").unwrap();
    std::fs::write(root.path().join("pets.txt"), "cat\n").unwrap();
    for (options, wanted) in [
        (
            &["--vocabulary", "site=sites.txt"][..],
            "sites.txt: lines 1 and 3 are both \"a\"\nhint: ",
        ),
        (&["--vocabulary", "site=gone.txt"], "gone.txt does not exist\nhint: give a text file"),
        (
            &["--vocabulary", "y=pets.txt"],
            "--vocabulary names column \"y\", which is not categorical\nhint: name it with --categorical y",
        ),
        (
            &["--vocabulary", "pet=pets.txt", "--vocabulary", "pet=sites.txt"],
            "--vocabulary names column \"pet\" twice\nhint: ",
        ),
        (&["--vocabulary", "pets.txt"], "expected a column and a file, such as site=sites.txt"),
        (
            &["--min-count", "9"],
            "column \"site\": no value occurs 9 times\nhint: the most frequent one occurs 3 times",
        ),
        (&["--max-ids", "3", "--oov", "2"], "of which none is for a value\nhint: "),
        (&["--min-count", "2", "--hash", "9"], "cannot be used with"),
        (&["--oov", "0"], "0 is not in 1.."),
    ] {
        let common = ["t.csv", "--target", "y", "--categorical", "site,pet", "--out", "out"];
        let ended = import(root.path(), &[&common[..], options].concat());
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains(wanted), "{wanted}: {ended}");
        assert!(!root.path().join("out").exists());
    }
    // Options that would have no effect.
    let all = ["t.csv", "--target", "y", "--drop", "site", "--categorical", "pet"];
    let more = ["--vocabulary", "pet=pets.txt", "--max-ids", "5", "--out", "out"];
    let ended = import(root.path(), &[&all[..], &more].concat());
    assert!(ended.code() == 2 && ended.stderr.contains("every categorical column has"), "{ended}");
}

const NOTES: &str = "note,kind,title\nabca,x,b\n,y,cc\n\"ba, b\",x,a\n";

#[test]
fn texts_become_ids() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("t.csv"), NOTES).unwrap();
    let text = |column: &'static str, tokenizer: &'static str, out: &'static str| {
        let common = ["t.csv", "--target", "kind", "--val-every", "0", "--text", column];
        [&common[..], &["--tokenizer", tokenizer, "--length", "4", "--out", out]].concat()
    };
    let with_drop = |arguments: Vec<&'static str>, drop: &'static str| {
        import(root.path(), &[&arguments[..], &["--drop", drop]].concat())
    };
    let ended = with_drop(text("note", "char", "chars"), "title").succeeded();
    for wanted in [
        "model.input = [4], 2 classes; embedding: ids = 7",
        "texts of up to 5 tokens, 1 of 3 truncated to 4",
        "classes: 0 x, 1 y",
    ] {
        assert!(ended.stdout.contains(wanted), "{wanted}: {ended}");
    }
    // The characters are " ,abc", of which the truncated row has " ,ab"; 0 is padding.
    let chars = root.path().join("chars");
    assert_eq!(ids(&chars, 4, Ids::Input(7)), [vec![4, 5, 6, 4], vec![0; 4], vec![5, 4, 3, 2]]);
    verify::verify(&chars).unwrap();
    let inspected = inspect::inspect(&chars).unwrap().to_string();
    assert!(inspected.contains("tokenizer char"), "{inspected}");

    // Several columns follow one another.
    let both = [&text("note", "byte", "bytes")[..], &["--text", "title"]].concat();
    let ended = import(root.path(), &both).succeeded();
    assert!(ended.stdout.contains("model.input = [8], 2 classes; embedding: ids = 258"), "{ended}");
    let byte = |c: char| c as u32 + 2;
    let bytes = ids(&root.path().join("bytes"), 8, Ids::Input(258));
    assert_eq!(
        bytes[0],
        ['a', 'b', 'c', 'a', 'b', '\u{fffe}', '\u{fffe}', '\u{fffe}'].map(|c| if c == '\u{fffe}' {
            0
        } else {
            byte(c)
        })
    );
    assert_eq!(bytes[1][4..], [byte('c'), byte('c'), 0, 0]);

    // A later table has the same characters, without targets.
    std::fs::write(root.path().join("new.csv"), "title,note\n?,cé\n?,zéa\n").unwrap();
    let ended = import(root.path(), &["new.csv", "--like", "chars", "--out", "new"]).succeeded();
    assert!(
        ended.stdout.ends_with("unknown: 3 of 5 characters of column \"note\", such as \"é\"\n"),
        "{ended}"
    );
    assert_eq!(
        ids(&root.path().join("new"), 4, Ids::Input(7)),
        [vec![6, 1, 0, 0], vec![1, 1, 4, 0]]
    );
    // Rows to predict may have no text at all; those of a first table may not.
    std::fs::write(root.path().join("empty.csv"), "note,kind\n\"\",x\n").unwrap();
    import(root.path(), &["empty.csv", "--like", "chars", "--out", "empty"]).succeeded();
    assert_eq!(ids(&root.path().join("empty"), 4, Ids::Input(7)), [vec![0; 4]]);
    let first = ["empty.csv", "--target", "kind", "--val-every", "0", "--text", "note"];
    let more = ["--tokenizer", "char", "--length", "4", "--out", "first"];
    let ended = import(root.path(), &[&first[..], &more].concat());
    assert!(ended.code() == 2 && ended.stderr.contains("no text in column \"note\""), "{ended}");
    // A program gets the same ids.
    let tokenizer = Tokenizer::for_text(&TokenizerKind::Char, " ,abc").unwrap();
    let vectorizer = TextVectorizer::new(tokenizer, 4).unwrap();
    assert_eq!(vectorizer.ids_of("zéa").unwrap(), [1, 1, 4, 0]);

    for (arguments, drop, wanted) in [
        (
            text("note", "byte", "out"),
            "",
            "inputs besides the text: columns title\nhint: a network that takes text has no other inputs: --drop 'title'",
        ),
        (text("memo", "byte", "out"), "title", "there is no column \"memo\""),
        (text("kind", "byte", "out"), "title", "--target and --text both name column \"kind\""),
        (text("note", "gone.json", "out"), "title", "gone.json does not exist"),
        (text("note", "words", "out"), "title", "char, byte, gpt2, or the path"),
        (
            vec!["t.csv", "--target", "kind", "--text", "note", "--out", "out"],
            "title",
            "--tokenizer",
        ),
    ] {
        let ended = match drop {
            "" => import(root.path(), &arguments),
            drop => with_drop(arguments, drop),
        };
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains(wanted), "{wanted}: {ended}");
        assert!(!root.path().join("out").exists());
    }
}
