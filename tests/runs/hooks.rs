//! Hooks of a run: their calls, requests to stop and failures, on one rank and on two.

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;

use hpctrain::comm;
use hpctrain::config::{Config, Sources, load};
use hpctrain::data::{SampleMut, SampleSizes, Source};
use hpctrain::engine::{Splits, on_threads};
use hpctrain::error::{Error, Result};
use hpctrain::evaluate::Metrics;
use hpctrain::run_dir::RunOutcome;
use hpctrain::telemetry::metrics::Step;
use hpctrain::train::{Customization, Hook, Outcome, TrainRequest, train};

/// Samples of points on a line, some of which the network cannot take.
#[derive(Clone, Copy)]
struct Line {
    values: usize,
    /// The number of a sample that is not finite.
    broken: Option<u64>,
    /// If samples have weights, the weight of number 17; the others have weight 0.
    weight: Option<f32>,
}

const LINE: Line = Line { values: 1, broken: None, weight: None };

impl Source for Line {
    fn samples(&self) -> u64 {
        40
    }

    fn sizes(&self) -> SampleSizes {
        SampleSizes {
            features: 1,
            values: self.values,
            weights: usize::from(self.weight.is_some()),
            ..SampleSizes::default()
        }
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        let x = if self.broken == Some(sample) { f32::NAN } else { sample as f32 / 20.0 - 1.0 };
        into.features[0] = x;
        into.values.fill(3.0 * x);
        into.weights.fill(if sample == 17 { self.weight.unwrap_or(0.0) } else { 0.0 });
        Ok(())
    }
}

/// Records its calls, and stops the run or fails as configured.
#[derive(Default)]
struct Notes {
    calls: Vec<String>,
    stops_at: Option<u64>,
    stops_at_epoch: Option<u64>,
    fails_at: Option<u64>,
    fails_at_evaluation: Option<u64>,
    fails_at_end: bool,
}

impl Hook for Notes {
    fn name(&self) -> &str {
        "notes"
    }

    fn step(&mut self, step: &Step) -> Result<ControlFlow<String>> {
        assert!(step.loss.is_finite() && step.step_ms > 0.0);
        self.calls.push(format!("step {}", step.step));
        if self.fails_at == Some(step.step) {
            return Err(Error::input("no more paper").hint("bring some"));
        }
        Ok(if self.stops_at == Some(step.step) {
            Break(format!("enough at {}", step.step))
        } else {
            Continue(())
        })
    }

    fn evaluation(&mut self, step: u64, measures: &Metrics) -> Result<ControlFlow<String>> {
        assert!(measures.metrics.contains_key("mae"));
        self.calls.push(format!("evaluation {step}"));
        match self.fails_at_evaluation == Some(step) {
            true => Err(Error::input("no more ink")),
            false => Ok(Continue(())),
        }
    }

    fn epoch(
        &mut self,
        epoch: u64,
        step: &Step,
        measures: Option<&Metrics>,
    ) -> Result<ControlFlow<String>> {
        let evaluated = if measures.is_some() { ", evaluated" } else { "" };
        self.calls.push(format!("epoch {epoch} with step {}{evaluated}", step.step));
        Ok(if self.stops_at_epoch == Some(epoch) {
            Break(format!("enough of {epoch} epochs"))
        } else {
            Continue(())
        })
    }

    fn checkpoint(&mut self, step: u64, directory: &Path) -> Result<ControlFlow<String>> {
        assert!(directory.join("manifest.json").exists());
        self.calls.push(format!("checkpoint {step}"));
        Ok(Continue(()))
    }

    fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        let how = match outcome.result {
            Ok(ending) => {
                assert!(outcome.directory.join("END").exists());
                format!("{ending:?}")
            }
            Err(e) => e.message().to_string(),
        };
        self.calls.push(format!("end {}: {how}", outcome.step));
        if self.fails_at_end { Err(Error::input("no more time")) } else { Ok(()) }
    }
}

fn config(root: &Path) -> Config {
    config_with(root, &[])
}

fn config_with(root: &Path, more: &[&str]) -> Config {
    let settings = [
        "model.kind=layers",
        "model.input=[1]",
        "model.layers=[{kind='dense', units=1}]",
        "loss.kind=mse",
        "run.steps=6",
        "run.name=here",
        "batch.global=4",
        "eval.every=2",
        "checkpoint.every=3",
        "checkpoint.async_save=false",
        "run.device=cpu",
        &format!("run.root={}", root.display()),
    ];
    let overrides: Vec<String> =
        settings.iter().chain(more).map(|setting| setting.to_string()).collect();
    load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap().0
}

fn line(train: Line) -> Splits {
    Splits { name: "a line".into(), train: Box::new(train), validation: Some(Box::new(LINE)) }
}

/// Returns the calls of each rank's hook, created by `hook`, and the outcome of the run.
fn run(
    ranks: usize,
    data: Line,
    hook: impl Fn(usize) -> Notes + Sync,
) -> (Vec<Vec<String>>, Vec<Result<RunOutcome>>) {
    run_with(ranks, data, &[], hook)
}

fn run_with(
    ranks: usize,
    data: Line,
    more: &[&str],
    hook: impl Fn(usize) -> Notes + Sync,
) -> (Vec<Vec<String>>, Vec<Result<RunOutcome>>) {
    let root = tempfile::tempdir().unwrap();
    let config = config_with(root.path(), more);
    let each = on_threads(ranks, |comm| {
        let mut hook = hook(comm.rank());
        let custom =
            Customization { hooks: vec![&mut hook], data: Some(line(data)), network: None };
        let request =
            TrainRequest { threads: Some(1), ..TrainRequest::new(config.clone(), "line") };
        let ended = train(comm, &request, custom, None);
        Ok((hook.calls, ended))
    });
    each.unwrap().into_iter().unzip()
}

#[test]
fn hooks_are_called_on_every_rank() {
    let expected = [
        "step 1",
        "step 2",
        "evaluation 2",
        "step 3",
        "checkpoint 3",
        "step 4",
        "evaluation 4",
        "step 5",
        "step 6",
        "evaluation 6",
        "checkpoint 6",
        "end 6: Finished",
    ];
    for ranks in [1, 2] {
        let (calls, ended) = run(ranks, LINE, |_| Notes::default());
        assert_eq!(
            (calls, ended),
            (
                vec![expected.map(String::from).to_vec(); ranks],
                vec![Ok(RunOutcome::Finished); ranks]
            )
        );
    }
}

/// Epochs of 40 samples in steps of 16.
#[test]
fn hooks_are_called_for_epochs_after_their_evaluations() {
    let settings =
        ["run.steps=0", "run.epochs=3", "batch.global=16", "eval.every=0", "eval.every_epochs=2"];
    let expected = [
        "step 1",
        "step 2",
        "step 3",
        "epoch 1 with step 3",
        "checkpoint 3",
        "step 4",
        "step 5",
        "evaluation 5",
        "epoch 2 with step 5, evaluated",
        "step 6",
        "checkpoint 6",
        "step 7",
        "step 8",
        "epoch 3 with step 8",
        "evaluation 8",
        "checkpoint 8",
        "end 8: Finished",
    ];
    for ranks in [1, 2] {
        let (calls, ended) = run_with(ranks, LINE, &settings, |_| Notes::default());
        assert_eq!(
            (calls, ended),
            (
                vec![expected.map(String::from).to_vec(); ranks],
                vec![Ok(RunOutcome::Finished); ranks]
            )
        );
    }
    // With local SGD, hooks are called for several epochs of a round after its average, and a
    // request to stop ends the run after the next round.
    let local_sgd = [
        "local_sgd.sync_every=4",
        "local_sgd.replicas=2",
        "parallel.virtual_ranks=2",
        "checkpoint.every=0",
    ];
    let hook = |_| Notes { stops_at_epoch: Some(1), ..Notes::default() };
    let (calls, ended) = run_with(2, LINE, &[&settings[..], &local_sgd].concat(), hook);
    assert_eq!(ended, vec![Ok(RunOutcome::Stopped("enough of 1 epochs".into())); 2]);
    let expected = [
        "step 4",
        "epoch 1 with step 3",
        "step 5",
        "step 6",
        "step 7",
        "step 8",
        "epoch 2 with step 5",
    ];
    assert_eq!(calls[0][3..10], expected, "{:?}", calls[0]);
}

#[test]
fn one_rank_that_asks_stops_all() {
    for (ranks, asks) in [(1, 0), (2, 0), (2, 1)] {
        let hook = |rank| Notes { stops_at: (rank == asks).then_some(2), ..Notes::default() };
        let (calls, ended) = run(ranks, LINE, hook);
        assert_eq!(ended, vec![Ok(RunOutcome::Stopped("enough at 2".into())); ranks]);
        for calls in calls {
            // The step that carried the request is the last one.
            let last =
                ["step 3", "evaluation 3", "checkpoint 3", "end 3: Stopped(\"enough at 2\")"];
            assert_eq!(calls[calls.len() - 4..], last, "{calls:?}");
        }
    }
}

#[test]
fn a_hook_that_fails_ends_the_run_on_all_ranks() {
    for (ranks, fails) in [(1, 0), (2, 1)] {
        let hook = |rank| Notes { fails_at: (rank == fails).then_some(2), ..Notes::default() };
        let (calls, ended) = run(ranks, LINE, hook);
        for (calls, ended) in calls.into_iter().zip(ended) {
            let error = ended.unwrap_err();
            assert_eq!(
                (error.message(), error.advice()),
                ("hook notes: no more paper", Some("bring some"))
            );
            assert_eq!((ranks == 1 || error.is_shared(), error.exit_code()), (true, 2));
            assert_eq!(calls.last().unwrap(), "end 3: hook notes: no more paper");
        }
    }
    // After the last evaluation no step follows that could carry the failure.
    let hook = |rank| Notes { fails_at_evaluation: (rank == 1).then_some(6), ..Notes::default() };
    let (calls, ended) = run(2, LINE, hook);
    for (calls, ended) in calls.into_iter().zip(ended) {
        assert_eq!(ended.unwrap_err().to_string(), "rank 1: hook notes: no more ink");
        assert_eq!(calls.last().unwrap(), "end 6: hook notes: no more ink");
    }
}

#[test]
fn a_hook_may_fail_at_the_end() {
    let (calls, ended) = run(2, LINE, |rank| Notes { fails_at_end: rank == 0, ..Notes::default() });
    for (calls, ended) in calls.into_iter().zip(ended) {
        assert_eq!(calls.last().unwrap(), "end 6: Finished");
        assert_eq!(ended.unwrap_err().to_string(), "rank 0: hook notes: no more time");
    }
}

#[test]
fn samples_that_the_network_cannot_take_are_refused() {
    let message = |train| run(1, train, |_| Notes::default()).1.remove(0).unwrap_err().to_string();
    assert_eq!(
        message(Line { values: 2, ..LINE }),
        "40 samples of 0 ids, 1 features, 0 classes and 2 values, but the network takes \
         0 ids, 1 features, 0 classes and 1 values\nhint: make samples() and sizes() of the source match the model and the loss"
    );
    let root = tempfile::tempdir().unwrap();
    let splits = Splits { validation: Some(Box::new(Line { values: 0, ..LINE })), ..line(LINE) };
    let custom = Customization { data: Some(splits), ..Customization::default() };
    let ended =
        train(&comm::single(), &TrainRequest::new(config(root.path()), "line"), custom, None);
    assert!(ended.unwrap_err().to_string().starts_with("a line, validation: 40 samples of 0 ids"));
    let message = message(Line { broken: Some(17), ..LINE });
    assert!(message.starts_with("a line: sample 17: NaN is not a finite number"), "{message}");
}

#[test]
fn samples_of_a_source_may_have_weights() {
    let root = tempfile::tempdir().unwrap();
    let custom = Customization {
        data: Some(line(Line { weight: Some(2.0), ..LINE })),
        ..Customization::default()
    };
    train(&comm::single(), &TrainRequest::new(config(root.path()), "line"), custom, None).unwrap();
    let text = std::fs::read_to_string(root.path().join("here/metrics.jsonl")).unwrap();
    // Only one sample has a weight, and six steps of four use it once.
    assert_eq!(text.lines().filter(|line| line.contains("\"loss\":0.0,")).count(), 5, "{text}");
    for (weight, shown) in [(-0.5, "-0.5"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let ended = run(1, Line { weight: Some(weight), ..LINE }, |_| Notes::default()).1.remove(0);
        let error = ended.unwrap_err().to_string();
        let wanted = format!("a line: sample 17: weight {shown} is not a");
        assert!(error.starts_with(&wanted), "{error}");
    }
}
