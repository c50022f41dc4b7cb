//! Records of runs: evaluations, metrics, leases.

use hpctrain::checkpoint::Checkpoints;
use hpctrain::report;
use hpctrain::run_records::RunRecords;
use hpctrain::telemetry::epoch_loss::EpochLoss;
use hpctrain::telemetry::evaluations::{self, Evaluation, Save};
use hpctrain::telemetry::json_lines::JsonLines;
use hpctrain::telemetry::metrics::Step;

use super::harness::fuzz;
use super::mutate::Form;
use super::samples::sample;

#[test]
fn evaluations_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(evaluations::FILE);
    let seed = std::fs::read(sample().run.path(evaluations::FILE)).unwrap();
    fuzz("eval.jsonl", Form::JsonLines, &[seed], |input| {
        std::fs::write(&path, input).unwrap();
        let Ok(found) = evaluations::read(&path) else { return false };
        let all = found.known();
        for step in [0, 2, 4, u64::MAX] {
            let _ = (evaluations::loss(all, step), evaluations::loss_of_save(all, step, "x"));
            let _ = evaluations::validation_loss(all, step);
        }
        let _ = evaluations::best(all, &[2, 4]);
        let _ = evaluations::stop_reason(all, 1, 0.0);
        let _ = (evaluations::is_settled(all, "x"), evaluations::retries(all, "x"));
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        let _ = checkpoints.removable(&hpctrain::checkpoint::Retention::default(), all);
        evaluations::append(&path, &Evaluation::done(9, 1.0, Default::default())).unwrap();
        evaluations::remove_after(&path, 3, |_| Save::Gone).unwrap();
        evaluations::remove_replaced(&path, 2, "x").unwrap();
        let left = evaluations::read(&path).unwrap();
        assert!(left.known().iter().all(|one| one.step <= 3));
        found.all().is_ok()
    });
}

#[test]
fn metrics_are_read_by_a_run_that_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let seed = std::fs::read(sample().run.path("metrics.jsonl")).unwrap();
    fuzz("metrics.jsonl", Form::JsonLines, &[seed], |input| {
        std::fs::write(&path, input).unwrap();
        let _ = EpochLoss::new(13).with_records(&path);
        let mut lines = JsonLines::open(&path, 3).unwrap();
        lines.write(&Step { step: 4, ..Step::default() }).unwrap();
        // The added line can be read back, whatever precedes it.
        let bytes = std::fs::read(&path).unwrap();
        let lines: Vec<&[u8]> =
            bytes.strip_suffix(b"\n").unwrap().split(|byte| *byte == b'\n').collect();
        let last: Step = serde_json::from_slice(lines.last().unwrap()).unwrap();
        assert_eq!(last.step, 4);
        lines.len() > 1
    });
}

/// The files of a run from which a report is made, one after the other.
#[test]
fn reports_are_made_of_any_run() {
    let dir = tempfile::tempdir().unwrap();
    let seeds = ["config.toml", "metrics.jsonl", "eval.jsonl", "run.json"].map(|file| {
        let seed = std::fs::read(sample().run.path(file)).unwrap();
        std::fs::write(dir.path().join(file), &seed).unwrap();
        (file, seed)
    });
    let forms = [Form::Toml, Form::JsonLines, Form::JsonLines, Form::Json];
    for ((file, seed), form) in seeds.into_iter().zip(forms) {
        let path = dir.path().join(file);
        fuzz(&format!("report of {file}"), form, std::slice::from_ref(&seed), |input| {
            std::fs::write(&path, input).unwrap();
            let Ok(run) = RunRecords::open(dir.path()) else { return false };
            let is_whole = run.notes.is_empty();
            let runs = [run];
            assert!(
                report::page(&runs).unwrap().ends_with("</html>\n")
                    && report::svg::losses(&runs).ends_with("</svg>\n")
            );
            report::csv::write(&runs, std::io::sink()).unwrap();
            is_whole
        });
        std::fs::write(&path, seed).unwrap();
    }
}

#[test]
fn leases_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let leases = Checkpoints::new(dir.path()).leases();
    let own = leases.take("step-00000001.own").unwrap().unwrap();
    let seed = std::fs::read(leases.path("step-00000001.own")).unwrap();
    drop(own);
    let path = leases.path("step-00000002.other");
    fuzz("lease", Form::Json, &[seed], |input| {
        std::fs::write(&path, input).unwrap();
        // A claim that does not block.
        let _ = leases.claim("step-00000002.other", false).map(drop);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, input).unwrap();
        leases.holds("step-00000002").unwrap();
        let _ = std::fs::remove_file(&path);
        true
    });
}
