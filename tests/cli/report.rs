//! `hpctrain report`: the page in a browser, the table and the chart, and directories that are not
//! runs.

use std::path::Path;

use serde_json::{Value, json};

use hpctrain_testkit::launch::Transport::{Alone, Simulate};
use hpctrain_testkit::launch::{Ended, finish, program};
use hpctrain_testkit::peers::browse;
use hpctrain_testkit::runs::{Run, RunFiles, copy};

/// A name that would run as a script if it were not escaped.
const EVIL: &str = "<script>window.evil=1<&\"'";

fn report(args: &[&Path], more: &[&str]) -> Ended {
    let mut command = program(["report"]);
    command.args(args).args(more);
    finish(&mut command)
}

/// Returns a line of `restarts.jsonl`.
fn restart(start: u64, code: i32, checkpoint: u64, why: &str) -> String {
    json!({
        "start": start, "time": 1.7e9, "seconds": 3.5, "code": code, "reason": why, "rank": 1, "host": "n1", "checkpoint": checkpoint,
        "steps_lost": 2, "seconds_lost": 0.5, "pause_seconds": 1.0,
    })
    .to_string()
        + "\n"
}

/// Creates a run with everything that a report shows: two ranks, text, restarts, skipped steps,
/// classes, a damaged line, and a last line that is not complete yet.
fn eventful(root: &Path) -> RunFiles {
    let settings = [
        "run.steps=30",
        "eval.every=10",
        "checkpoint.every=10",
        "log.straggler_window=5",
        "log.sample_tokens=20",
    ];
    let run = Run::new(Simulate(2), root, EVIL, &settings).succeeds();
    let mut lines: Vec<Value> =
        run.text("metrics.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (lines[6]["skipped"], lines[6]["loss"]) = (json!(true), Value::Null);
    let mut metrics: Vec<u8> =
        lines.iter().flat_map(|line| format!("{line}\n").into_bytes()).collect();
    let twelfth = metrics.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(11).unwrap().0;
    metrics[twelfth + 5] = 0xff;
    metrics.extend(b"{\"step\":31,\"lo");
    std::fs::write(run.path("metrics.jsonl"), metrics).unwrap();
    let restarts = restart(1, 1, 10, "<b>rank 1 is gone</b>") + &restart(2, 0, 30, "ended");
    std::fs::write(run.path("restarts.jsonl"), restarts).unwrap();
    let classes = json!({
        "names": ["<i>cat</i>", "dog"], "confusion": [[7, 3], [1, 9]], "precision": [0.875, 0.75], "recall": [0.7, 0.9],
        "f1": [0.777_78, 0.818_18], "macro": { "precision": 0.8125, "recall": 0.8, "f1": 0.797_98 }, "roc_auc": 0.8125,
    });
    let text = run.text("eval.jsonl");
    let evaluations = text.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        line["classes"] = classes.clone();
        format!("{line}\n")
    });
    let evaluations: String = evaluations.collect();
    std::fs::write(run.path("eval.jsonl"), evaluations).unwrap();
    run
}

#[test]
fn the_page_shows_the_records_in_a_browser() {
    let root = tempfile::tempdir().unwrap();
    let first = eventful(root.path());
    let second = Run::new(Alone, root.path(), "b", &["optimizer.lr=0.02"]).succeeds();
    let page = root.path().join("report.html");
    let ended = report(&[&first.0, &second.0], &["--out", page.to_str().unwrap()]).succeeded();
    assert!(
        ended.stdout.starts_with("report in ") && ended.stderr.contains("line 13 cannot be read"),
        "{ended}"
    );

    let html = std::fs::read_to_string(&page).unwrap();
    assert!(
        !html.contains("<script>window.evil")
            && !html.contains("<b>rank")
            && !html.contains("<i>cat")
    );
    for words in [
        "metrics.jsonl: line 13 cannot be read",
        "1 of 29 updates were skipped",
        "&lt;b&gt;rank 1 is gone&lt;/b&gt;",
        "rank 1",
        "pipeline 1 × replica 2 × shard 1 × tensor 1 = 2 ranks, ZeRO 0",
        "<td class=\"wide differs\"><code>0.02</code></td>",
        "&lt;i&gt;cat&lt;/i&gt;",
        "0.8125",
        "at step 30",
        "(best)",
        "threads of one process",
        "MIT License",
    ] {
        assert!(html.contains(words), "{words:?} is missing");
    }
    // The page references nothing that a browser would fetch.
    assert!(
        !html.contains(" src=")
            && !html.contains("<link rel=\"stylesheet")
            && !html.contains("@import")
    );

    let losses = "(() => { const [x, ...rest] = report.charts.loss.data; return [x, ...rest].map((one) => Array.from(one, (y) => y === undefined ? 'none' : y)); })()";
    let drawn = "document.querySelectorAll('.chart canvas').length";
    let zoomed = "(async () => { report.setRange(5, 15); await new Promise((done) => setTimeout(done, 50)); \
                  return Object.values(report.charts).map((u) => [u.scales.x.min, u.scales.x.max]); })()";
    let smooth = "(async () => { const slider = document.getElementById('smoothing'); slider.value = 0.9; \
                  slider.dispatchEvent(new Event('input')); const u = report.charts.loss; \
                  return [u.series.filter((one) => one.show).length, u.data[2][29]]; })()";
    let evil =
        "[window.evil === undefined, document.querySelectorAll('i, b').length, document.title]";
    let colours = "getComputedStyle(document.body).backgroundColor";
    let mut args = vec!["--widths", "360,768,1440"];
    [losses, drawn, zoomed, smooth, evil, colours]
        .iter()
        .for_each(|expression| args.extend(["--eval", expression]));
    let Some(found) = browse(&page, &args) else { return };
    for key in ["console", "exceptions", "requests"] {
        assert_eq!(found[key], json!([]), "{key}");
    }
    assert_eq!(found["cut_off"], json!({ "360": false, "768": false, "1440": false }));
    let values = &found["values"];

    // The table of the chart has steps, then for each run training losses and evaluation losses.
    let records = |run: &RunFiles| -> Vec<(u64, Value)> {
        let text = std::fs::read(run.path("metrics.jsonl")).unwrap();
        let lines = text
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice::<Value>(line).ok());
        lines.map(|line| (line["step"].as_u64().unwrap(), line["loss"].clone())).collect()
    };
    let steps: Vec<u64> = serde_json::from_value(values[0][0].clone()).unwrap();
    assert_eq!(steps, (1..=30).collect::<Vec<_>>());
    for (column, run) in [(1, &first), (3, &second)] {
        let shown =
            |step: u64| &values[0][column][steps.iter().position(|one| *one == step).unwrap()];
        let records = records(run);
        assert_eq!(records.len(), if column == 1 { 29 } else { 6 });
        for (step, loss) in records {
            match loss.as_f64() {
                Some(loss) => assert!(
                    (shown(step).as_f64().unwrap() / loss - 1.0).abs() < 1e-7,
                    "step {step}"
                ),
                None => assert!(shown(step).is_null() && step == 7),
            }
        }
    }
    assert!(values[0][1][12].is_null(), "the line breaks where a record is damaged");
    let evaluated: Vec<u64> =
        (0..30).filter(|at| values[0][2][*at].is_number()).map(|at| steps[at]).collect();
    assert_eq!(evaluated, [10, 20, 30]);
    assert!(values[1].as_u64().unwrap() >= 7, "{}", values[1]);
    for range in values[2].as_array().unwrap() {
        assert_eq!(range, &json!([5, 15]));
    }
    let losses: Vec<f64> = records(&first).iter().filter_map(|(_, loss)| loss.as_f64()).collect();
    let (mean, weight) = losses
        .iter()
        .fold((0.0, 0.0), |(mean, weight), loss| (0.9 * mean + 0.1 * loss, 0.9 * weight + 0.1));
    let smoothed = values[3][1].as_f64().unwrap();
    assert!(
        (smoothed - mean / weight).abs() < 1e-6 && values[3][0] == 7,
        "{} and {}",
        values[3],
        mean / weight
    );
    assert_eq!(values[4], json!([true, 0, format!("{EVIL}, b – hpctrain report")]));

    let print = "(dispatchEvent(new Event('beforeprint')), [document.documentElement.dataset.theme, \
                 getComputedStyle(document.body).backgroundColor])";
    let dark = browse(&page, &["--dark", "--eval", colours, "--eval", print]).unwrap();
    assert_eq!(dark["values"][1], json!(["light", values[5]]), "printed as on paper");
    assert!(
        dark["values"][0] != values[5] && dark["exceptions"] == json!([]),
        "{} {}",
        dark["values"][0],
        values[5]
    );
}

#[test]
fn tables_and_drawings_have_every_step() {
    let root = tempfile::tempdir().unwrap();
    let run = eventful(root.path());
    let [csv, svg] = ["steps.csv", "loss.svg"].map(|name| root.path().join(name));
    report(&[&run.0], &["--csv", csv.to_str().unwrap(), "--svg", svg.to_str().unwrap()])
        .succeeded();
    assert!(!Path::new("report.html").exists());
    let table = std::fs::read_to_string(csv).unwrap();
    let mut rows = csv_rows(&table);
    let head = rows.remove(0);
    let column = |name: &str| head.iter().position(|column| column == name).unwrap();
    assert_eq!((rows.len(), rows[0][column("run")].as_str()), (29, EVIL));
    let lines = std::fs::read(run.path("metrics.jsonl")).unwrap();
    let lines = lines
        .split(|byte| *byte == b'\n')
        .filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    for (line, row) in lines.zip(&rows) {
        assert_eq!(row[column("step")], line["step"].to_string());
        let loss = line["loss"].as_f64().map(f64::to_bits);
        assert_eq!(row[column("loss")].parse().ok().map(f64::to_bits), loss);
    }
    let validated: Vec<&str> = rows
        .iter()
        .filter(|row| !row[column("validation_loss")].is_empty())
        .map(|row| row[column("step")].as_str())
        .collect();
    assert_eq!(validated, ["10", "20", "30"]);
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("<script>"),
        "{svg}"
    );
    assert!(svg.matches("<circle").count() == 3 && svg.contains(" d=\"M"), "{svg}");
}

/// Parses the rows of a CSV table whose quoted cells have doubled quotes and no line breaks.
fn csv_rows(table: &str) -> Vec<Vec<String>> {
    let row = |line: &str| {
        let mut cells = vec![String::new()];
        let mut is_quoted = false;
        let mut rest = line.chars().peekable();
        while let Some(c) = rest.next() {
            match c {
                '"' if is_quoted && rest.peek() == Some(&'"') => {
                    cells.last_mut().unwrap().extend(rest.next())
                }
                '"' => is_quoted = !is_quoted,
                ',' if !is_quoted => cells.push(String::new()),
                c => cells.last_mut().unwrap().push(c),
            }
        }
        cells
    };
    table.lines().map(row).collect()
}

#[test]
fn other_directories_are_refused_and_young_runs_are_not() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &[]).succeeds();
    let page = root.path().join("report.html");
    let out = ["--out", page.to_str().unwrap()];
    let refused = |paths: &[&Path], words: &[&str]| {
        let ended = report(paths, &out);
        assert_eq!(ended.code(), 2, "{ended}");
        assert_eq!(ended.stderr.matches("error:").count(), 1, "{ended}");
        assert_eq!(ended.stderr.lines().count(), 2, "{ended}");
        for word in words.iter().chain(&["\nhint: "]) {
            assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
        }
        assert!(!page.exists());
    };
    refused(&[&root.path().join("y")], &["there is no such directory"]);
    refused(&[root.path()], &["is not a run, but contains runs", "/x"]);
    refused(&[&run.path("config.toml")], &["is a file"]);
    refused(&[&run.0, &run.0], &["is given twice"]);
    let other = root.path().join("other");
    copy(&run.0, &other);
    let config = std::fs::read_to_string(other.join("config.toml")).unwrap();
    std::fs::write(other.join("config.toml"), config.replace("[run]", "[run]\nflux = 1")).unwrap();
    refused(&[&run.0, &other], &["other/config.toml is of another version of hpctrain", "flux"]);
    let within_a_line = config.find("seed = ").unwrap() + 4;
    std::fs::write(other.join("config.toml"), &config[..within_a_line]).unwrap();
    refused(&[&other], &["other/config.toml is not a valid configuration"]);
    std::fs::remove_file(other.join("config.toml")).unwrap();
    refused(&[&other], &["is an incomplete run: it has no config.toml"]);

    // The run has no step yet.
    std::fs::write(other.join("config.toml"), config).unwrap();
    for name in ["metrics.jsonl", "eval.jsonl", "run.json", "END"] {
        std::fs::remove_file(other.join(name)).unwrap();
    }
    report(&[&other], &out).succeeded();
    assert!(std::fs::read_to_string(&page).unwrap().contains("No step has been recorded yet."));
    if let Some(found) = browse(&page, &[]) {
        assert_eq!((&found["exceptions"], &found["console"]), (&json!([]), &json!([])));
    }
    let nowhere = root.path().join("absent/report.html");
    let ended = report(&[&run.0], &["--out", nowhere.to_str().unwrap()]);
    assert!(
        ended.code() == 2
            && ended.stderr.contains("cannot write")
            && ended.stderr.contains("hint:"),
        "{ended}"
    );
}
