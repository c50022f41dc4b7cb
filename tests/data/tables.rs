//! Tables as other programs write them: delimiters, quotes, decimal commas, missing values, classes
//! that are words, columns with the same name.

use std::path::Path;

use hpctrain::data::import::{
    Categories, ImportCsv, ImportOptions, Missing, NotFinite, TableFormat, column_texts, import_csv,
};
use hpctrain::data::{DataSpec, Dataset, Ids, SampleMut, SampleSpec, Split, Target};
use hpctrain::error::Result;

/// Returns the rows of a split: numbers, and the class of each.
fn rows(folder: &Path, split: Split, inputs: usize, classes: usize) -> Vec<(Vec<f32>, u32)> {
    let samples =
        SampleSpec::Rows { input: inputs, ids: Ids::None, target: Target::Class(classes) };
    let mut dataset =
        Dataset::open(&DataSpec { samples, ..DataSpec::new(folder) }, split, 1).unwrap();
    let mut all = Vec::new();
    for sample in 0..dataset.samples() {
        let mut features = vec![0.0; inputs];
        let mut class = [0];
        dataset
            .read(
                sample,
                SampleMut { features: &mut features, classes: &mut class, ..SampleMut::default() },
            )
            .unwrap();
        all.push((features, class[0]));
    }
    all
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

/// Imports a table into the folder `name`, with all rows for training.
fn import(
    root: &Path,
    name: &str,
    table: &[u8],
    with: impl FnOnce(&mut ImportCsv),
) -> Result<String> {
    let input = root.join(name).with_extension("csv");
    std::fs::write(&input, table).unwrap();
    let kept = ImportOptions {
        not_finite: NotFinite::Error,
        every: 0,
        shards: 1,
        normalize: false,
        out: root.join(name),
    };
    let mut import = ImportCsv { targets: vec!["y".into()], ..ImportCsv::new(input, kept) };
    with(&mut import);
    import_csv(&import).map(|imported| imported.to_string())
}

#[test]
fn tables_in_other_forms_are_the_same_rows() {
    let root = tempfile::tempdir().unwrap();
    let wanted = [(vec![1.5, -2.0], 0), (vec![3.0, 0.25], 1)];
    let forms: [(&str, &[u8], TableFormat); 8] = [
        ("comma", b"a,b,y\n1.5,-2,0\n3,0.25,1\n", TableFormat::default()),
        ("windows", b"\xef\xbb\xbfa,b,y\r\n1.5,-2,0\r\n3,0.25,1\r\n", TableFormat::default()),
        ("semicolon", b"a;b;y\n1.5;-2;0\n3;0.25;1", TableFormat::default()),
        ("tab", b"a\tb\ty\n1.5\t-2\t0\n3\t0.25\t1\n", TableFormat::default()),
        ("bar", b"\"a\"|\"b\"|\"y\"\n\"1.5\"|-2|0\n 3 | 0.25 |1\n", TableFormat::default()),
        (
            "decimals",
            b"a;b;y\n1,5;-2;0\n3,0;,25;1\n",
            TableFormat { decimal_comma: true, ..TableFormat::default() },
        ),
        (
            "quoted",
            b"a,b,y\n\"1,5\",-2,0\n3,\"0,25\",1\n",
            TableFormat { decimal_comma: true, delimiter: Some(b','), ..TableFormat::default() },
        ),
        (
            "bare",
            b"1.5,-2,0\n3,0.25,1\n",
            TableFormat { no_header: true, ..TableFormat::default() },
        ),
    ];
    for (name, table, format) in forms {
        let bare = format.no_header;
        import(root.path(), name, table, |import| {
            import.format = format;
            if bare {
                import.targets = vec!["3".into()];
            }
        })
        .unwrap();
        assert_eq!(rows(&root.path().join(name), Split::Train, 2, 2), wanted, "{name}");
    }
}

#[test]
fn a_quoted_cell_may_hold_delimiters_quotes_and_line_breaks() {
    let root = tempfile::tempdir().unwrap();
    let table = "note,a,y\n\"x, \"\"y\"\"\nz\",1,0\nplain,2,1\n";
    import(root.path(), "quotes", table.as_bytes(), |import| import.drop = owned(&["note"]))
        .unwrap();
    assert_eq!(
        rows(&root.path().join("quotes"), Split::Train, 1, 2),
        [(vec![1.0], 0), (vec![2.0], 1)]
    );
    let cells = column_texts(
        &root.path().join("quotes.csv"),
        &TableFormat::default(),
        &owned(&["y", "note"]),
    )
    .unwrap();
    let cells: Vec<Vec<String>> = cells.map(|cells| cells.unwrap()).collect();
    assert_eq!(cells, [owned(&["0", "x, \"y\"\nz"]), owned(&["1", "plain"])]);
}

#[test]
fn missing_values_are_refused_skipped_or_filled() {
    let root = tempfile::tempdir().unwrap();
    let table = b"a,b,y\n1,10,0\nNA,20,1\n3,,1\n8,60,0\n";
    let all = |name: &str, missing: &str| {
        let summary = import(root.path(), name, table, |import| {
            import.missing = Some(missing.parse().unwrap())
        })?;
        Ok::<_, hpctrain::error::Error>((
            summary,
            rows(&root.path().join(name), Split::Train, 2, 2),
        ))
    };
    let error = import(root.path(), "refused", table, |_| {}).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    assert!(
        text.contains("line 3, column \"a\": \"NA\" is a missing value\nhint: ")
            && text.contains("--missing mean"),
        "{text}"
    );
    let (summary, skipped) = all("skipped", "skip").unwrap();
    assert_eq!(skipped, [(vec![1.0, 10.0], 0), (vec![8.0, 60.0], 0)]);
    assert!(summary.contains("2 rows"), "{summary}");
    let (_, filled) = all("number", "-1").unwrap();
    assert_eq!(filled[1..3], [(vec![-1.0, 20.0], 1), (vec![3.0, -1.0], 1)]);
    let (_, filled) = all("mean", "mean").unwrap();
    assert_eq!(filled[1..3], [(vec![4.0, 20.0], 1), (vec![3.0, 30.0], 1)]);
    // A later table gets the means of the first.
    let like = |name: &str, missing: Option<Missing>| {
        let categories = Categories::Like(root.path().join("mean"));
        import(root.path(), name, b"b,a,y\n?,100,1\n7,?,0\n", |import| {
            (import.targets, import.categories, import.missing) = (vec![], categories, missing);
            import.format.na = owned(&["?"]);
        })
        .unwrap();
        rows(&root.path().join(name), Split::Train, 2, 2)
    };
    assert_eq!(like("later", None), [(vec![100.0, 30.0], 1), (vec![4.0, 7.0], 0)]);
    assert_eq!(
        like("zeros", Some(Missing::Number(0.0))),
        [(vec![100.0, 0.0], 1), (vec![0.0, 7.0], 0)]
    );
    // A target is not filled, and a column without any value has no mean.
    for (name, table, missing, wanted) in [
        (
            "target",
            "a,y\n1,0\n2,\n",
            "mean",
            "line 3, column \"y\": \"\" is a missing value\nhint: targets and weights are not",
        ),
        (
            "empty",
            "a,b,y\n1,,0\n2,,1\n",
            "mean",
            "column \"b\" has no value in any training row\nhint: drop it with --drop",
        ),
        ("nothing", "a,y\n,0\n,1\n", "skip", "every line has a missing value"),
    ] {
        let import = import(root.path(), name, table.as_bytes(), |import| {
            import.missing = Some(missing.parse().unwrap())
        });
        let text = import.unwrap_err().to_string();
        assert!(text.contains(wanted), "{text}");
        assert!(!root.path().join(name).exists(), "{name}");
    }
}

/// Means and scale are those of the training rows, as if an imputer and then a scaler were fitted
/// to them.
#[test]
fn means_are_those_of_the_training_rows() {
    let root = tempfile::tempdir().unwrap();
    let table = b"a,y\n2,0\n,1\n1000,1\n4,0\n6,1\n,0\n";
    import(root.path(), "split", table, |import| {
        import.missing = Some(Missing::Mean);
        (import.options.every, import.options.normalize) = (3, true);
    })
    .unwrap();
    // The training rows are 2, missing, 4, 6, with mean 4; the third and the sixth row are kept.
    let std = 2f32.sqrt();
    let train = rows(&root.path().join("split"), Split::Train, 1, 2);
    let found: Vec<f32> = train.iter().map(|(x, _)| x[0]).collect();
    for (found, wanted) in found.iter().zip([-2.0 / std, 0.0, 0.0, 2.0 / std]) {
        assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
    }
    let validation = rows(&root.path().join("split"), Split::Validation, 1, 2);
    assert_eq!(validation[1], (vec![0.0], 0));
}

#[test]
fn words_are_classes_in_the_order_of_their_names() {
    let root = tempfile::tempdir().unwrap();
    let table = b"a,y\n1,dog\n2, cat \n3,\"eel\"\n4,dog\n";
    let summary = import(root.path(), "words", table, |_| {}).unwrap();
    assert!(
        summary.contains("3 classes") && summary.contains("classes: 0 cat, 1 dog, 2 eel"),
        "{summary}"
    );
    let of = |name: &str, classes| {
        rows(&root.path().join(name), Split::Train, 1, classes)
            .iter()
            .map(|(_, class)| *class)
            .collect::<Vec<_>>()
    };
    assert_eq!(of("words", 3), [1, 0, 2, 1]);
    // A later table has the class numbers of the first, and no other classes.
    let like =
        |import: &mut ImportCsv| import.categories = Categories::Like(root.path().join("words"));
    let summary = import(root.path(), "later", b"a,y\n1,eel\n2,cat\n", like).unwrap();
    assert!(summary.contains("3 classes"), "{summary}");
    assert_eq!(of("later", 3), [2, 0]);
    let error = import(root.path(), "other", b"a,y\n1,eel\n2,ant\n", like).unwrap_err().to_string();
    assert!(
        error
            .contains("line 3, column \"y\": \"ant\" is none of the classes cat, dog, eel\nhint: "),
        "{error}"
    );
    // Names that are numbers are ordered as numbers.
    let summary =
        import(root.path(), "numbers", b"a,y\n1,10\n2,9\n3,10\n", |import| import.classes = true)
            .unwrap();
    assert!(summary.contains("classes: 0 9, 1 10"), "{summary}");
    assert_eq!(of("numbers", 2), [1, 0, 1]);
    let error =
        import(root.path(), "mixed", b"a,y\n1,10\n2,nine\n", |_| {}).unwrap_err().to_string();
    assert!(
        error.contains("\"nine\" is not a number, unlike the targets before it\nhint: ")
            && error.contains("--classes"),
        "{error}"
    );
    let error = import(root.path(), "forced", b"a,y\n1,ten\n", |import| import.regression = true)
        .unwrap_err()
        .to_string();
    assert!(error.contains("line 2, column \"y\": \"ten\" is not a number"), "{error}");
}

/// A word for missing numbers before any other target may also be the name of a class: the import
/// does not guess.
#[test]
fn a_word_for_missing_numbers_is_not_guessed() {
    let root = tempfile::tempdir().unwrap();
    let names = b"a,y\n1,NA\n2,DE\n3,NA\n";
    let numbers = b"a,y\n1,NA\n2,1\n3,0\n";
    for (name, table) in [("names", &names[..]), ("numbers", &numbers[..])] {
        let error = import(root.path(), name, table, |import| import.missing = Some(Missing::Skip))
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("\"NA\" is a missing number, or the name of a class\nhint: choose"),
            "{error}"
        );
    }
    import(root.path(), "countries", names, |import| import.classes = true).unwrap();
    let countries: Vec<u32> = rows(&root.path().join("countries"), Split::Train, 1, 2)
        .iter()
        .map(|(_, class)| *class)
        .collect();
    assert_eq!(countries, [1, 0, 1]);
    import(root.path(), "skipped", numbers, |import| {
        (import.missing, import.format.na) = (Some(Missing::Skip), owned(&["NA"]));
    })
    .unwrap();
    assert_eq!(
        rows(&root.path().join("skipped"), Split::Train, 1, 2),
        [(vec![2.0], 1), (vec![3.0], 0)]
    );
}

#[test]
fn columns_have_different_names() {
    let root = tempfile::tempdir().unwrap();
    for (name, table, wanted) in [
        (
            "twice",
            "a,b,a,y\n1,2,3,0\n",
            "columns 1 and 3 are both named \"a\"\nhint: give each column a different name",
        ),
        ("target", "y,b,y\n1,2,0\n", "columns 1 and 3 are both named \"y\""),
        ("unnamed", ",b,y\n1,2,0\n", "column 1 has no name\nhint: "),
        (
            "words",
            "a,y\nred,0\n",
            "line 2, column \"a\": \"red\" is not a number\nhint: mend the line; name a column of words with",
        ),
        (
            "comma",
            "a;y\n1,5;0\n",
            "line 2, column \"a\": \"1,5\" is not a number\nhint: if the comma is before decimals",
        ),
        ("ragged", "a,y\n1,0\n2,3,0\n", "line: 3"),
    ] {
        let error = import(root.path(), name, table.as_bytes(), |_| {}).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted), "{name}: {error}");
    }
    let latin = b"a,y\n1,gr\xfcn\n2,rot\n";
    let error = import(root.path(), "latin", latin, |_| {}).unwrap_err().to_string();
    assert!(error.contains("hint: convert the file to UTF-8: iconv"), "{error}");
    // Drops both columns of one name, and the numbers of the rows.
    let table = b",a,b,a,y\n0,1,2,3,0\n1,4,5,6,1\n";
    import(root.path(), "dropped", table, |import| import.drop = owned(&["", "a"])).unwrap();
    assert_eq!(
        rows(&root.path().join("dropped"), Split::Train, 1, 2),
        [(vec![2.0], 0), (vec![5.0], 1)]
    );
    for (drop, wanted) in
        [("z", "there is no column \"z\""), ("y", "--target and --drop both name column \"y\"")]
    {
        let error =
            import(root.path(), "wrong", table, |import| import.drop = owned(&["", "a", drop]))
                .unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
}
