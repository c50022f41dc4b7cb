//! The runs of a directory as a table.

use std::cmp::Ordering;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering as Order};
use std::time::{Duration, SystemTime};

use clap::ValueEnum;
use serde::Serialize;

use super::summary::{RunLayout, RunSummary, is_run};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn_scoped;
use hpctrain_config::telemetry::{bytes, grouped};
use hpctrain_data::inspect::table;

/// The maximum number of threads that read runs: network file systems have a high latency per file.
const READERS: usize = 8;

/// The column by which runs are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SortBy {
    /// By name.
    Name,
    /// Running ones first.
    State,
    /// Most steps first.
    Step,
    /// Lowest training loss first.
    Loss,
    /// Lowest loss of the last evaluation first.
    Evaluated,
    /// Lowest loss of any evaluation first.
    Best,
    /// Fastest first.
    Speed,
    /// Newest first.
    Age,
    /// Largest first.
    Size,
}

/// The runs of a directory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listing {
    /// The path of the directory.
    pub root: PathBuf,
    /// The runs in it.
    pub runs: Vec<RunSummary>,
    /// The number of other directories in it.
    pub other_directories: usize,
}

impl Listing {
    /// Lists the runs in `root`.
    ///
    /// # Errors
    /// Returns an error if `root` is not a directory, is itself a run, or cannot be listed.
    pub fn scan(root: &Path, by: SortBy) -> Result<Self> {
        let entries = match fs::read_dir(root) {
            Ok(entries) => entries,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(Error::input(format!("{} is not a directory", root.display())).hint(
                    "give the directory that contains runs: run.root, which is runs by default",
                ));
            }
            Err(e) => return Err(Error::io("list the runs in", root, e)),
        };
        if is_run(root) {
            let above = root
                .parent()
                .filter(|above| !above.as_os_str().is_empty())
                .unwrap_or(Path::new("."));
            return Err(Error::input(format!("{} is a run itself", root.display()))
                .hint(format!("give the directory that contains it: {}", above.display())));
        }
        let mut paths = Vec::new();
        let mut others = 0;
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("list the runs in", root, e))?;
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            match entry.path() {
                path if is_run(&path) => paths.push(path),
                path => others += usize::from(path.is_dir() && !is_hidden),
            }
        }
        let mut runs = read(&paths, SystemTime::now());
        sort(&mut runs, by);
        Ok(Self { root: root.to_path_buf(), runs, other_directories: others })
    }

    /// Formats the runs as a table.
    pub fn to_table(&self) -> String {
        let root = self.root.display();
        let others = match self.other_directories {
            0 => String::new(),
            1 => "\none other directory is not a run\n".into(),
            others => format!("\n{others} other directories are not runs\n"),
        };
        if self.runs.is_empty() {
            return format!("no run in {root}{others}");
        }
        let heading =
            ["run", "state", "step", "loss", "evaluated", "best", "speed", "age", "layout", "size"];
        let mut rows = vec![heading.map(str::to_owned)];
        rows.extend(self.runs.iter().map(row));
        let mut text = table(&rows);
        for run in &self.runs {
            let why =
                run.reason.iter().map(|why| format!("{}: {}: {why}\n", run.name, run.state.name()));
            let notes = run.notes.iter().map(|note| format!("{}: {note}\n", run.name));
            text.extend(why.chain(notes));
        }
        text + &others
    }
}

/// Reads the summaries of runs with several threads.
fn read(paths: &[PathBuf], now: SystemTime) -> Vec<RunSummary> {
    let next = AtomicUsize::new(0);
    let some = || read_rest(paths, &next, now);
    std::thread::scope(|scope| {
        // If a thread cannot be started, the others read its share.
        let readers =
            (1..READERS.min(paths.len())).map_while(|_| spawn_scoped(scope, "runs", some).ok());
        let readers: Vec<_> = readers.collect();
        let mut all = some();
        // A thread that panics ends the process.
        readers.into_iter().for_each(|reader| all.extend(reader.join().unwrap_or_default()));
        all
    })
}

/// Reads the summaries of the runs that no other thread takes first; `next` is the index of the
/// next one.
fn read_rest(paths: &[PathBuf], next: &AtomicUsize, now: SystemTime) -> Vec<RunSummary> {
    let mut found = Vec::new();
    while let Some(path) = paths.get(next.fetch_add(1, Order::Relaxed)) {
        found.push(RunSummary::read(path, now));
    }
    found
}

/// Sorts by a column. Runs without a value come last, and equal ones are sorted by name.
fn sort(runs: &mut [RunSummary], by: SortBy) {
    runs.sort_by(|a, b| {
        let by_state = if by == SortBy::State { a.state.cmp(&b.state) } else { Ordering::Equal };
        by_state.then(ascending(sort_key(a, by), sort_key(b, by))).then(a.name.cmp(&b.name))
    });
}

/// Returns the number by which runs are sorted, ascending; none by name and state.
fn sort_key(run: &RunSummary, by: SortBy) -> Option<f64> {
    match by {
        SortBy::Name | SortBy::State => None,
        SortBy::Step => run.step.map(|step| -(step as f64)),
        SortBy::Loss => run.loss,
        SortBy::Evaluated => run.evaluated_loss,
        SortBy::Best => run.best_loss,
        SortBy::Speed => run.per_second.map(|speed| -speed),
        SortBy::Age => run.age_seconds,
        SortBy::Size => Some(-(run.bytes as f64)),
    }
}

/// Returns the order of two numbers, with a missing one last.
fn ascending(a: Option<f64>, b: Option<f64>) -> Ordering {
    match (a, b) {
        (Some(a), Some(b)) => a.total_cmp(&b),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => Ordering::Equal,
    }
}

fn row(run: &RunSummary) -> [String; 10] {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let loss = |loss: Option<f64>| or_none(loss.map(|loss| format!("{loss:.4}")));
    let steps = run.steps.map(|steps| format!("/{steps}")).unwrap_or_default();
    let best = run.best_loss.zip(run.best_step).map(|(loss, step)| format!("{loss:.4} at {step}"));
    [
        run.name.clone(),
        run.state.name().into(),
        or_none(run.step.map(|step| format!("{step}{steps}"))),
        loss(run.loss),
        loss(run.evaluated_loss),
        or_none(best),
        or_none(
            run.per_second.map(|speed| format!("{} {}/s", grouped(speed.round() as u64), run.unit)),
        ),
        or_none(run.age_seconds.map(age)),
        or_none(run.layout.as_ref().map(RunLayout::describe)),
        bytes(usize::try_from(run.bytes).unwrap_or(usize::MAX)),
    ]
}

/// Formats an age in its largest unit: `12 s`, `3 min`, `5 h`, `2 d`.
fn age(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_secs();
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min", whole / 60),
        3600..86_400 => format!("{} h", whole / 3600),
        _ => format!("{} d", whole / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::RunState;
    use hpctrain_checkpoint::run_dir::RunDirectory;
    use hpctrain_checkpoint::run_dir::markers::{End, RunStatus};
    use hpctrain_config::Config;

    /// Creates a run with these lines of metrics and evaluations.
    fn run(root: &Path, name: &str, metrics: &[u8], evaluations: &str, end: Option<RunStatus>) {
        let directory = RunDirectory::at(root.join(name));
        fs::create_dir(directory.path()).unwrap();
        let mut config = Config::default();
        (config.run.steps, config.parallel.replica) = (100, Some(2));
        directory.write_config(&config).unwrap();
        fs::write(directory.metrics_path(), metrics).unwrap();
        fs::write(directory.evaluations_path(), evaluations).unwrap();
        if let Some(status) = end {
            let why = (status != RunStatus::Finished).then(|| "a <script>\u{1b}[31m".into());
            directory.markers().end(&End { step: 3, status, reason: why }).unwrap();
        }
    }

    fn steps(count: u64, loss: f64) -> Vec<u8> {
        let lines = (1..=count).map(|step| {
            format!(
                "{{\"step\":{step},\"epoch\":0.5,\"tokens\":64,\"loss\":{loss},\"lr\":0.1,\"grad_norm\":1.0,\
                 \"step_ms\":1.0,\"tokens_per_second\":{}.0,\"time\":1.0}}\n",
                1000 + step
            )
        });
        lines.collect::<String>().into_bytes()
    }

    fn evaluations(losses: &[(u64, f64)]) -> String {
        let lines = losses.iter().map(|(step, loss)| {
            format!(
                "{{\"step\":{step},\"loss\":{loss},\"perplexity\":null,\"checkpoint\":null,\"time\":1.0}}\n"
            )
        });
        lines.collect()
    }

    #[test]
    fn every_state_and_damage_has_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        run(
            root,
            "good",
            &steps(100, 2.0),
            &evaluations(&[(50, 1.5), (100, 1.75)]),
            Some(RunStatus::Finished),
        );
        run(root, "stopped", &steps(3, 4.0), "", Some(RunStatus::Failed));
        run(root, "asked", &steps(3, 3.0), "", Some(RunStatus::Preempted));
        let damaged = [
            &steps(2, 5.0)[..],
            b"{\"st\xffep\":3}\n{\"iteration\":4}\n",
            &steps(5, 1.0)[..],
            b"{\"ste",
        ]
        .concat();
        run(root, "killed", &damaged, "", None);
        // Incomplete runs: only a directory of checkpoints, and an empty configuration.
        fs::create_dir_all(root.join("half/checkpoints")).unwrap();
        fs::write(root.join("half/config.toml"), "").unwrap();
        run(root, "other", b"{\"iteration\":1}\n", "", None);
        fs::write(root.join("other/config.toml"), "[run]\nsteps = 7\nflux = 1\n").unwrap();
        fs::create_dir(root.join("data")).unwrap();
        fs::create_dir(root.join(".cache")).unwrap();
        fs::write(root.join("notes.txt"), "").unwrap();

        let listing = Listing::scan(root, SortBy::Loss).unwrap();
        let names: Vec<&str> = listing.runs.iter().map(|run| &run.name[..]).collect();
        assert_eq!(names, ["killed", "good", "asked", "stopped", "half", "other"]);
        assert_eq!(listing.other_directories, 1);
        let named = |name: &str| listing.runs.iter().find(|run| run.name == name).unwrap();
        let states =
            ["good", "stopped", "asked", "killed", "half", "other"].map(|name| named(name).state);
        use RunState::{Failed, Finished, Preempted, Stale};
        assert_eq!(states, [Finished, Failed, Preempted, Stale, Stale, Stale]);
        let good = named("good");
        assert_eq!(
            (good.step, good.steps, good.best_loss, good.best_step),
            (Some(100), Some(100), Some(1.5), Some(50))
        );
        assert_eq!((good.evaluated_loss, good.epoch, good.unit), (Some(1.75), Some(0.5), "tokens"));
        assert_eq!(good.per_second, Some(1051.0));
        assert_eq!(good.layout.as_ref().unwrap().describe(), "replica 2");
        let killed = named("killed").notes.join("\n");
        assert!(killed.contains("metrics.jsonl: a line near its end cannot be read"), "{killed}");
        assert!(named("half").notes[0].contains("half written"), "{:?}", named("half"));
        let other = named("other");
        assert!(
            other.notes.iter().all(|note| note.contains("of another version"))
                && other.notes.len() == 2
        );
        assert_eq!(other.steps, Some(7));

        let text = listing.to_table();
        assert!(
            text.contains("good     finished   100/100  2.0000  1.7500     1.5000 at 50"),
            "{text}"
        );
        assert!(text.contains("\none other directory is not a run\n"), "{text}");
        let json = serde_json::to_value(&listing).unwrap();
        assert_eq!(
            (json["runs"][1]["state"].as_str(), json["runs"][1]["loss"].as_f64()),
            (Some("finished"), Some(2.0))
        );
        let by = |by| Listing::scan(root, by).unwrap().runs[0].name.clone();
        assert_eq!(
            [by(SortBy::Name), by(SortBy::Best), by(SortBy::Step), by(SortBy::State)],
            ["asked", "good", "good", "good"]
        );
    }

    #[test]
    fn other_directories_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path(), "x", b"", "", None);
        let refused = |path: &Path| Listing::scan(path, SortBy::Name).unwrap_err().to_string();
        assert!(refused(&dir.path().join("absent")).contains("is not a directory\nhint: "));
        assert!(refused(&dir.path().join("x/config.toml")).contains("is not a directory\nhint: "));
        let message = refused(&dir.path().join("x"));
        assert!(
            message.contains("x is a run itself\nhint: give the directory that contains it: "),
            "{message}"
        );
        let empty = tempfile::tempdir().unwrap();
        assert!(
            Listing::scan(empty.path(), SortBy::Name).unwrap().to_table().starts_with("no run in ")
        );
    }

    #[test]
    fn ages_have_one_unit() {
        assert_eq!(
            [0.4, 59.9, 60.0, 7200.0, 200_000.0].map(age),
            ["0 s", "59 s", "1 min", "2 h", "2 d"]
        );
    }
}
