//! Whole screens of a made-up run, compared with the files in `screens/`. With `UPDATE_SCREENS=1`
//! the tests write these files.

use super::*;

use std::fs;
use std::path::PathBuf;

use hpctrain_checkpoint::run_dir::markers::{End, Markers, RunStatus};
use hpctrain_config::Config;
use hpctrain_config::telemetry::evaluations::Evaluation;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::rank_times::RankTimes;

/// Creates a run of four ranks, of which rank 2 is slow.
fn made_up_run() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gpt-char");
    fs::create_dir_all(path.join("logs")).unwrap();
    let mut config = Config::default();
    config.run.steps = 2000;
    let write = |name: &str, text: String| fs::write(path.join(name), text).unwrap();
    write("config.toml", config.to_toml().unwrap());
    let step = |step: u64| Step {
        step,
        epoch: step as f64 * 0.01,
        loss: 1.0 + 3.2 * (-(step as f64) / 300.0).exp() + 0.02 * ((step * 37 % 11) as f64 - 5.0),
        grad_norm: 1.0 + 2.0 / step as f64,
        step_ms: 61.5,
        compute_ms: 50.0,
        comm_exposed_ms: 8.0,
        loader_ms: 0.5,
        optimizer_ms: 3.0,
        tokens_per_second: 16_650.0 + (step % 7) as f64,
        tflops_per_rank: Some(0.0868),
        mfu: Some(0.187),
        energy_kwh: Some(0.012),
        peak_bytes: 114_085_069,
        ..Step::default()
    };
    let lines = |records: &mut dyn Iterator<Item = serde_json::Value>| {
        records.map(|record| format!("{record}\n")).collect::<String>()
    };
    let json = |record: &dyn Fn() -> serde_json::Result<serde_json::Value>| record().unwrap();
    write(
        "metrics.jsonl",
        lines(&mut (1..=1234).map(|at| json(&|| serde_json::to_value(step(at))))),
    );
    let evaluation = |at: u64| {
        let mut one = Evaluation::done(at, 1.1 + 3.2 * (-(at as f64) / 300.0).exp(), [].into());
        one.perplexity = one.loss.map(f64::exp);
        one.time = 1.7e9;
        one
    };
    write(
        "eval.jsonl",
        lines(&mut (1..=4).map(|at| json(&|| serde_json::to_value(evaluation(at * 250))))),
    );
    let times = RankTimes::new(1220, 20, vec![50.0, 51.5, 83.25, 49.0]);
    write("rank_times.jsonl", lines(&mut [json(&|| serde_json::to_value(&times))].into_iter()));
    write(
        "logs/rank-00000.log",
        "[2026-11-28T23:13:08Z INFO  hpctrain_train::run::prepare] rank 0 of 4 on node1\n\
         [2026-11-28T23:13:43Z INFO  hpctrain_train::run] step 1000: validation loss 1.2142, perplexity 3.37\n\
         [2026-11-28T23:13:47Z WARN  hpctrain_train::run] rank 2 (host node1) computes 1.7 times as long as the median rank over the last 20 steps\n"
            .into(),
    );
    let end = End { step: 1234, status: RunStatus::Preempted, reason: Some("SIGTERM came".into()) };
    Markers::new(&path).end(&end).unwrap();
    dir
}

/// Compares a screen with the file of this name.
#[track_caller]
fn compare(name: &str, screen: &str) {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("screens").join(name);
    if std::env::var_os("UPDATE_SCREENS").is_some() {
        fs::write(&file, screen).unwrap();
    }
    assert_eq!(screen, fs::read_to_string(&file).unwrap(), "{}", file.display());
}

/// Returns the screen of a run after these keys.
fn screen(path: &Path, columns: u16, rows: u16, keys: &str, is_ascii: bool) -> String {
    let mut view = RunView::open(path).unwrap();
    while view.refresh() {}
    let mut choices = Choices { is_ascii, ..Choices::new() };
    for key in keys.chars() {
        assert!(!choices.press(KeyCode::Char(key).into()), "{key}");
    }
    let Ok(mut terminal) = Terminal::new(TestBackend::new(columns, rows));
    let Ok(_) = terminal.draw(|frame| screen::draw(frame, &view, choices, false));
    text(terminal.backend().buffer())
}

#[test]
fn screens_are_as_in_the_files() {
    let dir = made_up_run();
    let path = dir.path().join("gpt-char");
    for (name, columns, rows, keys, is_ascii) in [
        ("loss", 80, 24, "1", false),
        ("loss-zoomed-logarithmic", 80, 24, "1zl", false),
        ("mfu-wide", 132, 30, "3", false),
        ("ranks", 80, 24, "6", false),
        ("log", 80, 24, "7", false),
        ("loss-ascii", 80, 24, "1", true),
        ("small", 60, 12, "2", false),
    ] {
        compare(&format!("{name}.txt"), &screen(&path, columns, rows, keys, is_ascii));
    }
    assert!(screen(&path, 80, 24, "1", true).is_ascii());
}

#[test]
fn every_size_can_be_drawn() {
    let dir = made_up_run();
    let path = dir.path().join("gpt-char");
    let empty = tempfile::tempdir().unwrap();
    fs::write(empty.path().join("config.toml"), Config::default().to_toml().unwrap()).unwrap();
    for path in [&path, empty.path()] {
        for (columns, rows) in [(1, 1), (39, 24), (40, 10), (40, 100), (300, 10), (500, 80)] {
            for panel in "1234567".chars() {
                let screen = screen(path, columns, rows, &panel.to_string(), false);
                assert_eq!(screen.lines().count(), usize::from(rows));
            }
        }
    }
    let first = screen(empty.path(), 80, 24, "1", false);
    assert!(first.contains("no step is recorded yet"), "{first}");
}

#[test]
fn keys_choose_panels() {
    let mut choices = Choices::new();
    for (code, panel) in [
        (KeyCode::Tab, PANELS[1].0),
        (KeyCode::Left, PANELS[0].0),
        (KeyCode::BackTab, PANELS[6].0),
        (KeyCode::Right, PANELS[0].0),
        (KeyCode::Char('6'), Panel::Ranks),
        (KeyCode::Char('9'), Panel::Ranks),
        (KeyCode::Char('c'), Panel::Ranks),
    ] {
        assert!(!choices.press(code.into()));
        assert_eq!(choices.panel, panel, "{code:?}");
    }
    for end in [
        KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL),
        KeyCode::Esc.into(),
        KeyCode::Char('q').into(),
    ] {
        assert!(choices.press(end), "{end:?}");
    }
}
