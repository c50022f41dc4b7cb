//! `hpctrain predict` from tables, arrays and folders of images, to CSV, JSON lines and HDF5: it
//! gives the same outputs as imported shards.

use std::path::{Path, PathBuf};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::launch::{Ended, finish, mpirun, program};
use hpctrain_testkit::runs::{Run, RunFiles};

/// Runs `data import` with these arguments in the directory.
fn import(root: &Path, arguments: &str) {
    finish(program(["data", "import"]).args(arguments.split_whitespace()).current_dir(root))
        .succeeded();
}

/// Trains a few steps on the data in `name`.
fn train(root: &Path, name: &str, settings: &[&str]) -> RunFiles {
    let path = format!("data.path={}", root.join(name).display());
    let always = [&path, "model.kind=layers", "run.steps=6", "batch.global=8", "eval.every=3"];
    Run::new(Alone, root, &format!("{name}-run"), &[&always[..], settings].concat()).succeeds()
}

/// Runs `predict` with these arguments in the directory.
fn predict(transport: Transport, root: &Path, run: &RunFiles, arguments: &[&str]) -> Ended {
    let mut command = match transport {
        Mpirun(ranks) => {
            let mut command = mpirun(ranks);
            command.arg(hpctrain_testkit::program()).arg("predict");
            command
        }
        _ => program(["predict"]),
    };
    finish(command.arg("--checkpoint").arg(&run.0).args(arguments).current_dir(root))
}

/// Returns the outputs and the classes of an HDF5 file.
fn arrays(path: PathBuf) -> (Vec<f32>, Option<Vec<u32>>) {
    let file = hdf5::File::open(path).unwrap();
    let classes = file.dataset("classes").ok().map(|classes| classes.read_raw().unwrap());
    (file.dataset("outputs").unwrap().read_raw().unwrap(), classes)
}

/// Returns the cells of a table without quotes.
fn cells(path: PathBuf) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| line.split(',').map(str::to_owned).collect()).collect()
}

/// Returns the names of all files in a directory, including hidden ones.
fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

const FLOWERS: [&str; 3] = ["setosa", "vera", "virginica"];

/// Returns a table of flowers in the style of a spreadsheet: semicolons, decimal commas, missing
/// numbers, names of classes.
fn flowers(rows: std::ops::Range<usize>, with_names: bool) -> String {
    let mut table = String::from(if with_names {
        "id;long;wide;colour;kind\n"
    } else {
        "wide;colour;id;long\n"
    });
    for row in rows {
        let long = row * 7 % 13;
        let wide = row * 5 % 11;
        let long = if row % 9 == 4 { "NA".to_owned() } else { format!("{},5", long) };
        let wide = format!("{},25", wide);
        let colour = ["red", "blue", ""][row % 3];
        let kind = FLOWERS[row * 7 % 13 / 5];
        table += &match with_names {
            true => format!("{row};{long};{wide};{colour};{kind}\n"),
            false => format!("{wide};{colour};f{row};{long}\n"),
        };
    }
    table
}

#[test]
fn a_table_is_predicted_as_its_import_is() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    std::fs::write(at("flowers.csv"), flowers(0..60, true)).unwrap();
    std::fs::write(at("new.csv"), flowers(60..83, false)).unwrap();
    let options =
        "--decimal-comma --target kind --drop id --categorical colour --missing mean --out flowers";
    import(root.path(), &format!("csv flowers.csv {options}"));
    import(root.path(), "csv new.csv --decimal-comma --like flowers --out imported");
    let layers = "model.layers=[{kind='embedding_tables', ids=[3], width=2, dense=[{kind='dense', units=2}]}, {kind='flatten'}, {kind='dense', units=8}, {kind='tanh'}, {kind='dense', units=3}]";
    let run = train(root.path(), "flowers", &["model.input=[2]", layers]);
    let before = names(root.path());

    let predicted = |transport, input: &str, out: &str, more: &[&str]| {
        let arguments = [&["--input", input, "--out", out][..], more].concat();
        predict(transport, root.path(), &run, &arguments)
    };
    predicted(Alone, "imported", "imported.h5", &[]).succeeded();
    let comma = &["--decimal-comma"];
    let ended = predicted(Alone, "new.csv", "new.h5", comma).succeeded();
    assert!(ended.stdout.contains("new.h5: outputs of 23 rows"), "{ended}");
    // The table was read in the way of the network's import, so nothing had to be converted.
    assert!(!ended.stderr.contains("warn"), "{ended}");
    let (outputs, classes) = arrays(at("new.h5"));
    let (wanted, of_imported) = arrays(at("imported.h5"));
    assert_eq!(
        outputs.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        wanted.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    );
    assert_eq!(classes, of_imported);
    let names_of: Vec<hdf5::types::VarLenUnicode> =
        hdf5::File::open(at("new.h5")).unwrap().dataset("class_names").unwrap().read_raw().unwrap();
    assert_eq!(names_of.iter().map(|name| name.as_str()).collect::<Vec<_>>(), FLOWERS);

    // CSV and JSON have the names of classes with probabilities, next to columns of the input.
    predicted(Alone, "new.csv", "new-out.csv", &["--decimal-comma", "--keep", "id,colour"])
        .succeeded();
    let table = cells(at("new-out.csv"));
    assert_eq!(table[0], ["id", "colour", "class", "p_setosa", "p_vera", "p_virginica"]);
    assert_eq!(table.len(), 24);
    for (row, line) in table[1..].iter().enumerate() {
        let logits: Vec<f64> = outputs[3 * row..][..3].iter().map(|x| f64::from(*x)).collect();
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        assert_eq!(line[0], format!("f{}", 60 + row));
        assert_eq!(line[1], ["red", "blue", ""][row % 3]);
        assert_eq!(line[2], FLOWERS[classes.as_ref().unwrap()[row] as usize]);
        for (cell, logit) in line[3..].iter().zip(&logits) {
            assert!((cell.parse::<f64>().unwrap() - logit.exp() / sum).abs() < 1e-6, "{line:?}");
        }
    }
    predicted(Alone, "new.csv", "new.jsonl", comma).succeeded();
    let text = std::fs::read_to_string(at("new.jsonl")).unwrap();
    for ((row, line), cells) in text.lines().enumerate().zip(&table[1..]) {
        let object: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (object["row"].as_u64(), object["class"].as_str()),
            (Some(row as u64), Some(&cells[2][..]))
        );
        for (name, cell) in FLOWERS.iter().zip(&cells[3..]) {
            assert_eq!(object["probabilities"][name].as_f64(), cell.parse().ok());
        }
    }
    // Outputs are the same on any ranks and in any layout.
    for (transport, name, setting) in [
        (Mpirun(2), "two.csv", "eval.batch=5"),
        (Mpirun(2), "stages.csv", "parallel.pipeline=2"),
        (Mpirun(3), "three.csv", "eval.batch=4"),
    ] {
        let more = ["--decimal-comma", "--keep", "id,colour", "--set", setting];
        predicted(transport, "new.csv", name, &more).succeeded();
        let found = cells(at(name));
        assert_eq!(found.len(), table.len());
        for (found, wanted) in found[1..].iter().zip(&table[1..]) {
            assert_eq!(found[..3], wanted[..3], "{setting}");
            for (found, wanted) in found[3..].iter().zip(&wanted[3..]) {
                let [found, wanted] = [found, wanted].map(|cell| cell.parse::<f64>().unwrap());
                assert!((found - wanted).abs() < 1e-5, "{setting}: {found} {wanted}");
            }
        }
    }
    predicted(Mpirun(2), "new.csv", "ids.h5", &["--decimal-comma", "--keep", "id"]).succeeded();
    let ids: Vec<hdf5::types::VarLenUnicode> =
        hdf5::File::open(at("ids.h5")).unwrap().dataset("rows/id").unwrap().read_raw().unwrap();
    assert_eq!(
        ids.iter().map(|id| id.to_string()).collect::<Vec<_>>(),
        (60..83).map(|row| format!("f{row}")).collect::<Vec<_>>()
    );

    // Errors name the problem once, and leave no files behind.
    let outputs = names(root.path());
    std::fs::write(at("lacking.csv"), "wide;id\n1,5;2\n").unwrap();
    std::fs::write(at("rows.txt"), "1 2\n").unwrap();
    for (input, out, more, wanted) in [
        ("new.csv", "o.csv", &[][..], "line 2, column \"long\": \"4,5\" is not a number"),
        ("lacking.csv", "o.csv", comma, "there is no column \"long\""),
        ("new.csv", "o.csv", &["--decimal-comma", "--keep", "name"], "there is no column \"name\""),
        // This is checked before the numbers are read.
        ("new.csv", "o.csv", &["--keep", "name"], "there is no column \"name\""),
        (
            "new.csv",
            "o.csv",
            &["--decimal-comma", "--missing", "skip"],
            "every row gets a prediction",
        ),
        ("new.csv", "o.txt", comma, "o.txt: unknown file extension"),
        ("new.csv", "new.jsonl", comma, "new.jsonl exists"),
        ("rows.txt", "o.csv", &[], "rows.txt: the format of a file with such a name is not known"),
        ("imported", "o.csv", &["--keep", "id"], "imported is not a table"),
        ("nowhere.csv", "o.csv", &[], "nowhere.csv"),
    ] {
        for transport in [Alone, Mpirun(2)] {
            let ended = predicted(transport, input, out, more);
            assert_eq!(ended.code(), 2, "{ended}");
            assert!(ended.stderr.contains(wanted), "{wanted}: {ended}");
            assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended}");
        }
    }
    let mut all = outputs;
    all.extend(["lacking.csv", "rows.txt"].map(str::to_owned));
    all.sort();
    assert_eq!(names(root.path()), all);
    assert!(before.iter().all(|name| all.contains(name)));
}

#[test]
fn images_in_a_folder_are_predicted_by_name() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let image = |i: usize, size: [u32; 2]| {
        image::RgbImage::from_fn(size[1], size[0], |x, y| {
            image::Rgb([x as usize * 31 + i * 17, y as usize * 29 + i * 5, i * 40].map(|c| c as u8))
        })
    };
    for (class, name) in ["cat", "dog"].iter().enumerate() {
        std::fs::create_dir_all(at("photos").join(name)).unwrap();
        for i in 0..12 {
            image(2 * i + class, [6, 5])
                .save(at("photos").join(name).join(format!("{i:02}.png")))
                .unwrap();
        }
    }
    std::fs::create_dir(at("new")).unwrap();
    for i in 0..7 {
        // Some images have another size.
        image(3 * i, if i % 2 == 0 { [6, 5] } else { [12, 14] })
            .save(at("new").join(format!("p{i}.png")))
            .unwrap();
    }
    import(root.path(), "images photos --out photos-imported");
    import(root.path(), "images new --no-target --size 6x5 --out new-imported");
    let layers = "model.layers=[{kind='conv2d', filters=4, kernel=3}, {kind='relu'}, {kind='flatten'}, {kind='dense', units=2}]";
    let run = train(root.path(), "photos-imported", &["model.input=[6, 5, 3]", layers]);
    for (input, out) in [("new", "folder.csv"), ("new-imported", "shards.csv")] {
        predict(Mpirun(2), root.path(), &run, &["--input", input, "--out", out]).succeeded();
    }
    let [folder, shards] = ["folder.csv", "shards.csv"].map(|name| cells(at(name)));
    assert_eq!(
        (&folder[0][..], &shards[0][..1]),
        (&["file", "class", "p_cat", "p_dog"].map(str::to_owned)[..], &["row".to_owned()][..])
    );
    assert_eq!(folder.len(), 8);
    for (row, (found, wanted)) in folder[1..].iter().zip(&shards[1..]).enumerate() {
        assert_eq!(found[0], format!("p{row}.png"));
        assert_eq!(found[1..], wanted[1..]);
        assert!(["cat", "dog"].contains(&&found[1][..]));
    }
    predict(Alone, root.path(), &run, &["--input", "new", "--out", "names.h5"]).succeeded();
    let file = hdf5::File::open(at("names.h5")).unwrap();
    let names: Vec<hdf5::types::VarLenUnicode> =
        file.dataset("rows/file").unwrap().read_raw().unwrap();
    assert_eq!((names.len(), names[6].as_str()), (7, "p6.png"));
}

/// Predicts arrays of numbers by a regression, whose outputs have the names of the targets, and by
/// a network with one logit.
#[test]
fn arrays_and_numbers_are_predicted() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let row = |i: usize| [i as f32 * 0.5 - 3.0, (i * 7 % 11) as f32];
    let lines = (0..40).map(|i| {
        let [a, b] = row(i);
        format!("{a},{b},{},{},{}\n", a + b, a * b, if a + b > 4.0 { "yes" } else { "no" })
    });
    let table: String = std::iter::once("a,b,sum,times,large\n".to_owned()).chain(lines).collect();
    std::fs::write(at("table.csv"), table).unwrap();
    // The header of an array of 5 rows of 2 numbers, as numpy.save writes it.
    let header =
        format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (5, 2), }");
    let numbers = (0..5).flat_map(row).flat_map(f32::to_le_bytes);
    let array: Vec<u8> =
        b"\x93NUMPY\x01\x00v\x00".iter().copied().chain(header.bytes()).chain(numbers).collect();
    std::fs::write(at("rows.npy"), array).unwrap();
    let few: String = std::iter::once("b,a\n".to_owned())
        .chain((0..5).map(|i| format!("{},{}\n", row(i)[1], row(i)[0])))
        .collect();
    std::fs::write(at("few.csv"), few).unwrap();

    import(root.path(), "csv table.csv --target sum --target times --drop large --out numbers");
    let run = train(
        root.path(),
        "numbers",
        &["model.input=[2]", "model.layers=[{kind='dense', units=2}]", "loss.kind=mse"],
    );
    for (input, out) in [("rows.npy", "rows.csv"), ("few.csv", "few-out.csv")] {
        let ended =
            predict(Alone, root.path(), &run, &["--input", input, "--out", out]).succeeded();
        assert!(!ended.stderr.contains("warn"), "{ended}");
    }
    let [rows, few] = ["rows.csv", "few-out.csv"].map(|name| cells(at(name)));
    assert_eq!((&rows[0][..], rows.len()), (&["row", "sum", "times"].map(str::to_owned)[..], 6));
    assert_eq!(rows, few);
    predict(Alone, root.path(), &run, &["--input", "rows.npy", "--out", "rows.h5"]).succeeded();
    let (outputs, classes) = arrays(at("rows.h5"));
    assert_eq!(classes, None);
    let found: Vec<f32> =
        rows[1..].iter().flat_map(|row| &row[1..]).map(|cell| cell.parse().unwrap()).collect();
    assert_eq!(found, outputs);
    predict(Alone, root.path(), &run, &["--input", "rows.npy", "--out", "rows.jsonl"]).succeeded();
    let text = std::fs::read_to_string(at("rows.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(first["outputs"]["times"].as_f64().unwrap() as f32, outputs[1]);

    import(root.path(), "csv table.csv --target large --drop sum,times --out answers");
    let settings = [
        "model.input=[2]",
        "model.layers=[{kind='dense', units=1}]",
        "loss.kind=binary-cross-entropy",
    ];
    let run = train(root.path(), "answers", &settings);
    predict(Alone, root.path(), &run, &["--input", "rows.npy", "--out", "answers.csv"]).succeeded();
    let answers = cells(at("answers.csv"));
    assert_eq!(answers[0], ["row", "class", "p_no", "p_yes"]);
    for line in &answers[1..] {
        let [no, yes] = [&line[2], &line[3]].map(|cell| cell.parse::<f64>().unwrap());
        assert!((no + yes - 1.0).abs() < 1e-6);
        assert_eq!(line[1], if yes > no { "yes" } else { "no" });
    }
}

/// Values that a network does not know are counted, and get the id that the import gave them.
#[test]
fn unknown_values_of_a_table_are_counted() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let line = |i: usize| format!("{},{}\n", ["a", "b", "c"][i * 5 % 3], i % 2);
    let table: String = std::iter::once("site,y\n".to_owned()).chain((0..48).map(line)).collect();
    std::fs::write(at("table.csv"), table).unwrap();
    std::fs::write(at("sites.txt"), "c\na\nb\n").unwrap();
    std::fs::write(at("new.csv"), "site\na\nz\n\"\"\nb\nq\n").unwrap();
    let options = "--target y --categorical site --vocabulary site=sites.txt --oov 2 --out sites";
    import(root.path(), &format!("csv table.csv {options}"));
    import(root.path(), "csv new.csv --like sites --out imported");
    let layers = "model.layers=[{kind='embedding_tables', ids=[6], width=2}, {kind='flatten'}, {kind='dense', units=2}]";
    let run = train(root.path(), "sites", &["model.input=[0]", layers]);
    let note = "unknown: 2 of 4 values of column \"site\", such as \"z\"\n";
    for (transport, out) in [(Alone, "one.csv"), (Mpirun(2), "two.csv")] {
        let ended = predict(transport, root.path(), &run, &["--input", "new.csv", "--out", out])
            .succeeded();
        assert!(ended.stdout.ends_with(note), "{ended}");
        assert_eq!(ended.stdout.matches("unknown").count(), 1, "{ended}");
    }
    predict(Alone, root.path(), &run, &["--input", "imported", "--out", "shards.csv"]).succeeded();
    assert_eq!(cells(at("one.csv")), cells(at("shards.csv")));
    assert_eq!(cells(at("two.csv")), cells(at("shards.csv")));
    // Another table by itself, whose values become ids of the network.
    import(root.path(), "csv new.csv --no-target --categorical site --out own");
    let ended =
        predict(Alone, root.path(), &run, &["--input", "own", "--out", "own.csv"]).succeeded();
    assert!(ended.stderr.contains("it does not know 2 of 4 values, such as \"z\""), "{ended}");
    assert_eq!(cells(at("own.csv")), cells(at("shards.csv")));
}

/// Texts of a table are classified: imported, learned on two ranks, and predicted from another
/// table.
#[test]
fn texts_of_a_table_are_classified() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let good = ["a great film", "great and warm", "warm, great fun", "we had great fun"];
    let bad = ["a poor film", "poor and cold", "cold, poor mess", "we saw a poor mess"];
    let line = |i: usize| {
        let (texts, kind) = if i.is_multiple_of(2) { (good, "good") } else { (bad, "bad") };
        format!("{i},\"{}\",{kind}\n", texts[i / 2 % 4])
    };
    let table: String =
        std::iter::once("id,review,kind\n".to_owned()).chain((0..64).map(line)).collect();
    std::fs::write(at("reviews.csv"), table).unwrap();
    let options = "--target kind --drop id --text review --tokenizer gpt2 --length 8 --out reviews";
    import(root.path(), &format!("csv reviews.csv {options}"));
    let settings = [
        format!("data.path={}", at("reviews").display()),
        "model.kind=layers".into(),
        "model.input=[8]".into(),
        "model.layers=[{kind='embedding', ids=50259, width=8}, {kind='reshape', shape=[8, 1, 8]}, {kind='global_avg_pool'}, {kind='dense', units=2}]".into(),
        "run.steps=40".into(),
        "batch.global=16".into(),
        "optimizer.lr=0.05".into(),
        "parallel.virtual_ranks=2".into(),
        "log.sample_tokens=10".into(),
    ];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let [one, two] = [(Alone, "one"), (Mpirun(2), "two")]
        .map(|(transport, name)| Run::new(transport, root.path(), name, &settings).succeeds());
    let losses = |run: &RunFiles| -> Vec<u64> {
        let lines = run.text("metrics.jsonl");
        let loss = |line: &str| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["loss"].as_f64().unwrap().to_bits()
        };
        lines.lines().map(loss).collect()
    };
    assert_eq!(losses(&one), losses(&two));

    // Another table, with other columns beside the text.
    let new = [("warm and great", "good"), ("a poor, cold film", "bad"), ("great fun", "good")];
    let lines = new.map(|(text, _)| format!("?,\"{text}\"\n")).concat();
    std::fs::write(at("new.csv"), format!("note,review\n{lines}")).unwrap();
    let arguments = ["--input", "new.csv", "--out", "new-out.csv", "--keep", "review"];
    let ended = predict(Mpirun(2), root.path(), &two, &arguments).succeeded();
    assert!(!ended.stderr.contains("warn") && !ended.stdout.contains("unknown"), "{ended}");
    let found = std::fs::read_to_string(at("new-out.csv")).unwrap();
    for (line, (text, kind)) in found.lines().skip(1).zip(new) {
        assert!(line.contains(text) && line.contains(&format!(",{kind},")), "{found}");
    }
    assert_eq!(found.lines().count(), 4, "{found}");
    // Shards of texts in another column, or by another tokenizer, are refused.
    let table = std::fs::read_to_string(at("reviews.csv")).unwrap();
    std::fs::write(at("notes.csv"), table.replacen("review", "note", 1)).unwrap();
    for (name, options, wanted) in [
        (
            "notes",
            "notes.csv --text note --tokenizer gpt2",
            "the data has texts of 8 ids in column note, but the network learned from texts of 8 ids in column review\nhint: import the table again",
        ),
        (
            "bytes",
            "reviews.csv --text review --tokenizer byte",
            "the tokenizer of the data is byte, that of the network gpt2",
        ),
    ] {
        let rest = format!("--target kind --drop id --length 8 --out {name}");
        import(root.path(), &format!("csv {options} {rest}"));
        let arguments = ["--input", name, "--out", "other.csv"];
        let ended = predict(Alone, root.path(), &two, &arguments);
        assert!(ended.code() == 2 && ended.stderr.contains(wanted), "{ended}");
    }
}
