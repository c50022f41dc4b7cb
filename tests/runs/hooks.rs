//! Hooks of a run: their calls, requests to stop and failures, on one rank and on two.

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use hpctrain::backend::{Activation, Kernels};
use hpctrain::comm;
use hpctrain::config::{Config, Sources, load};
use hpctrain::data::{SampleMut, SampleSizes, Source};
use hpctrain::engine::{Splits, on_threads};
use hpctrain::error::{Error, Result};
use hpctrain::evaluate::{Metrics, Policy, SidecarOptions};
use hpctrain::layout::TensorShards;
use hpctrain::nn::autograd::{Tape, Var};
use hpctrain::nn::layers::{Layer, Layers};
use hpctrain::nn::loss::{CustomLoss, CustomMetric, LossFunction, MetricFunction};
use hpctrain::nn::{Blocks, CustomModel, Input, ModelBuilder, Network};
use hpctrain::run_dir::RunOutcome;
use hpctrain::servers;
use hpctrain::telemetry::metrics::Step;
use hpctrain::train::{Customization, Hook, Outcome, TrainRequest, evaluate_run, train};
use hpctrain_testkit::runs::{json, tensors};

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
        // A custom loss has no built-in metrics.
        assert!(["mae", "own squared"].iter().any(|name| measures.metrics.contains_key(*name)));
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
    run_served(ranks, 0, data, more, hook)
}

/// Runs with the last `servers` of `ranks` as parameter servers.
fn run_served(
    ranks: usize,
    servers: usize,
    data: Line,
    more: &[&str],
    hook: impl Fn(usize) -> Notes + Sync,
) -> (Vec<Vec<String>>, Vec<Result<RunOutcome>>) {
    let root = tempfile::tempdir().unwrap();
    let config = config_with(root.path(), more);
    let each = on_threads(ranks, |comm| {
        let mut hook = hook(comm.rank());
        let custom = Customization {
            hooks: vec![&mut hook],
            data: Some(line(data)),
            ..Customization::default()
        };
        let request =
            TrainRequest { threads: Some(1), ..TrainRequest::new(config.clone(), "line") };
        let ended = servers::train(comm, &request, custom, servers);
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

/// Sleeps in some of its calls.
struct Slow;

impl Hook for Slow {
    fn name(&self) -> &str {
        "slow"
    }

    fn step(&mut self, _: &Step) -> Result<ControlFlow<String>> {
        std::thread::sleep(Duration::from_millis(20));
        Ok(Continue(()))
    }

    fn evaluation(&mut self, _: u64, _: &Metrics) -> Result<ControlFlow<String>> {
        std::thread::sleep(Duration::from_millis(40));
        Ok(Continue(()))
    }
}

#[test]
fn hooks_are_timed() {
    let root = tempfile::tempdir().unwrap();
    let trace = root.path().join("trace.json");
    let mut request = TrainRequest::new(config(root.path()), "line");
    (request.trace, request.profile, request.threads) = (Some(trace.clone()), true, Some(1));
    let mut hook = Slow;
    let custom = Customization {
        hooks: vec![&mut hook],
        data: Some(line(LINE)),
        ..Customization::default()
    };
    train(&comm::single(), &request, custom, None).unwrap();
    // The evaluations are those after steps 2, 4 and 6.
    let times = numbers(&root.path().join("here/metrics.jsonl"), "hooks_ms");
    assert_eq!((times.len(), times[0]), (6, Some(0.0)));
    for (step, least) in [(2, 20.0), (3, 60.0), (4, 20.0), (5, 60.0), (6, 20.0)] {
        let ms = times[step - 1].unwrap();
        assert!(ms >= least, "step {step}: {times:?}");
    }
    let read =
        |path: &Path| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let traced = read(&trace);
    let count = |name: &str| {
        let events = traced["traceEvents"].as_array().unwrap().iter();
        events.filter(|event| event["name"] == name && event["cat"] == "hook").count()
    };
    assert_eq!(
        ["step", "evaluation", "end", "epoch"].map(|event| count(&format!("hook slow {event}"))),
        [6, 3, 1, 0]
    );
    let profile = read(&root.path().join("here/profile.json"));
    let hooks = profile["hooks"].as_array().unwrap();
    let of = |event: &str| hooks.iter().find(|hook| hook["event"] == event).unwrap();
    assert_eq!(
        (of("step")["hook"].as_str(), of("step")["calls"].as_u64()),
        (Some("slow"), Some(6))
    );
    assert!(of("step")["seconds"].as_f64().unwrap() >= 0.12, "{profile}");
    assert!(of("evaluation")["slowest"].as_f64().unwrap() >= 0.04, "{profile}");

    // A run without hooks has none of it.
    let root = tempfile::tempdir().unwrap();
    let mut request = TrainRequest::new(config(root.path()), "line");
    request.profile = true;
    let custom = Customization { data: Some(line(LINE)), ..Customization::default() };
    train(&comm::single(), &request, custom, None).unwrap();
    assert_eq!(numbers(&root.path().join("here/metrics.jsonl"), "hooks_ms"), [None; 6]);
    assert!(read(&root.path().join("here/profile.json"))["hooks"].is_null());
}

/// Returns a number of each line of a file, if the line has it.
fn numbers(path: &Path, key: &str) -> Vec<Option<f64>> {
    let text = std::fs::read_to_string(path).unwrap();
    let values = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    values.map(|line| line[key].as_f64()).collect()
}

/// Another half of the samples.
struct Half;

impl Source for Half {
    fn samples(&self) -> u64 {
        20
    }

    fn sizes(&self) -> SampleSizes {
        LINE.sizes()
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        Line::read(&mut LINE.clone(), sample, into)
    }
}

#[test]
fn an_evaluator_of_custom_data_calls_hooks_and_stops_the_trainer() {
    let root = tempfile::tempdir().unwrap();
    let more = ["eval.inline=false", "checkpoint.every=2", "checkpoint.keep=9"];
    let config = config_with(root.path(), &more);
    let custom = Customization { data: Some(line(LINE)), ..Customization::default() };
    train(&comm::single(), &TrainRequest::new(config, "line"), custom, None).unwrap();
    let run = root.path().join("here");
    let losses = |run: &Path| numbers(&run.join("eval.jsonl"), "loss");
    let evaluate = |ranks: usize, data: fn() -> Splits, stops: bool| {
        let each = on_threads(ranks, |comm| {
            let mut hook = Stops { calls: vec![], stops: stops && comm.rank() + 1 == ranks };
            let custom = Customization {
                hooks: vec![&mut hook],
                data: Some(data()),
                ..Customization::default()
            };
            let policy = Policy::Every;
            let options = SidecarOptions { policy, threads: 1, ..SidecarOptions::new(&run) };
            let ended = evaluate_run(comm, &options, custom);
            Ok((hook.calls, ended))
        });
        each.unwrap()
    };
    // The wrong data is refused before anything is evaluated.
    let other = || Splits { train: Box::new(Half), ..line(LINE) };
    let error = evaluate(1, other, false).remove(0).1.unwrap_err();
    let expected = "a line is other data than that of the run: 20 samples, trained on 40";
    assert!(error.to_string().starts_with(expected), "{error}");
    let without = || Splits { validation: None, ..line(LINE) };
    let error = evaluate(1, without, false).remove(0).1.unwrap_err();
    assert!(error.to_string().contains("a line has no validation samples"), "{error}");
    assert!(!run.join("eval.jsonl").exists());

    let expected = ["evaluation 2", "evaluation 4", "evaluation 6", "end 6: Ok(Finished)"];
    let mut found = vec![];
    for ranks in [1, 2] {
        for (calls, ended) in evaluate(ranks, || line(LINE), ranks == 2) {
            assert_eq!(
                (calls.as_slice(), ended),
                (&expected.map(String::from)[..], Ok(RunOutcome::Finished))
            );
        }
        assert_eq!(run.join("STOP").exists(), ranks == 2);
        found.push(losses(&run));
        std::fs::remove_file(run.join("eval.jsonl")).unwrap();
    }
    assert!(found[0].len() == 3 && found[0] == found[1], "{found:?}");
    assert_eq!(std::fs::read_to_string(run.join("STOP")).unwrap(), "enough at 6\n");
}

/// Notes the evaluations, and asks to stop after each.
struct Stops {
    calls: Vec<String>,
    stops: bool,
}

impl Hook for Stops {
    fn evaluation(&mut self, step: u64, _: &Metrics) -> Result<ControlFlow<String>> {
        self.calls.push(format!("evaluation {step}"));
        Ok(if self.stops { Break(format!("enough at {step}")) } else { Continue(()) })
    }

    fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        self.calls.push(format!("end {}: {:?}", outcome.step, outcome.result));
        Ok(())
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

/// Creates the hook of a rank.
type MakeNotes = fn() -> Notes;

/// Runs with two workers and a server, whose hook is called, and returns its calls.
fn run_on_servers(
    servers: usize,
    more: &[&str],
    hook: impl Fn() -> Notes + Sync,
) -> (Vec<String>, Vec<Result<RunOutcome>>) {
    let more = [more, &["parameter_server.partition='fixed:2'"]].concat();
    let (mut calls, ended) = run_served(2 + servers, servers, LINE, &more, |_| hook());
    let of_coordinator = calls.remove(2);
    assert!(calls.iter().all(Vec::is_empty), "{calls:?}");
    (of_coordinator, ended)
}

#[test]
fn hooks_are_called_once_with_parameter_servers() {
    let each_rank = |more: &[&str], hook: MakeNotes| {
        let (mut calls, ended) = run_with(2, LINE, more, |_| hook());
        (calls.remove(0), ended[0].clone())
    };
    let epochs = ["run.steps=0", "run.epochs=3", "batch.global=16", "eval.every=0"];
    let cases: [(&[&str], MakeNotes); 5] = [
        (&[], Notes::default),
        (&["eval.every_epochs=2", epochs[0], epochs[1], epochs[2], epochs[3]], Notes::default),
        (&[], || Notes { stops_at: Some(2), ..Notes::default() }),
        (&epochs, || Notes { stops_at_epoch: Some(1), ..Notes::default() }),
        (&["eval.inline=false"], Notes::default),
    ];
    for (more, hook) in cases {
        let (expected, outcome) = each_rank(more, hook);
        for servers in [1, 2] {
            let (calls, ended) = run_on_servers(servers, more, hook);
            assert_eq!(calls, expected, "{more:?}");
            assert_eq!(ended, vec![outcome.clone(); 2 + servers]);
        }
    }
    // Asynchronous steps.
    let (calls, ended) = run_on_servers(1, &["parameter_server.staleness='none'"], Notes::default);
    assert_eq!(calls[..3], ["step 1", "step 2", "evaluation 2"]);
    assert_eq!(calls.last().unwrap(), "end 6: Finished");
    assert_eq!(ended, vec![Ok(RunOutcome::Finished); 3]);
}

#[test]
fn a_hook_that_fails_ends_a_run_with_parameter_servers() {
    let failures: [(MakeNotes, &str, &str); 3] = [
        (
            || Notes { fails_at: Some(2), ..Notes::default() },
            "hook notes: no more paper",
            "end 3: hook notes: no more paper",
        ),
        (
            || Notes { fails_at_evaluation: Some(6), ..Notes::default() },
            "hook notes: no more ink",
            "end 6: hook notes: no more ink",
        ),
        (
            || Notes { fails_at_end: true, ..Notes::default() },
            "hook notes: no more time",
            "end 6: Finished",
        ),
    ];
    for (hook, message, last) in failures {
        let (calls, ended) = run_on_servers(1, &[], hook);
        assert_eq!(calls.last().unwrap(), last);
        for ended in ended {
            let error = ended.unwrap_err();
            assert_eq!((error.message(), error.is_shared(), error.exit_code()), (message, true, 2));
        }
    }
}

/// The squared distance of the output from the values, as a custom loss and a custom metric.
struct Squared;

impl LossFunction for Squared {
    fn name(&self) -> String {
        "own squared".into()
    }

    fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
        let values = tape.values(output.width())?;
        let error = tape.subtract(output, &values)?;
        let square = tape.activation(&error, Activation::Square)?;
        tape.sum_columns(&square)
    }
}

impl MetricFunction for Squared {
    fn name(&self) -> String {
        "own squared".into()
    }

    fn forward<B: Kernels>(&self, tape: &mut Tape<'_, B>, output: &Var<B>) -> Result<Var<B>> {
        LossFunction::forward(self, tape, output)
    }
}

/// A custom network of the layers that a configuration could also list.
struct OwnLine {
    name: &'static str,
    units: usize,
}

impl ModelBuilder for OwnLine {
    fn name(&self) -> String {
        self.name.into()
    }

    fn input(&self) -> Input {
        Input::Numbers(vec![1])
    }

    fn outputs(&self) -> usize {
        1
    }

    fn blocks<B: Kernels>(&self) -> Blocks<B> {
        let units = self.units;
        let layers = format!(
            r#"[{{"kind": "dense", "units": {units}}}, {{"kind": "tanh"}},
                {{"kind": "dense", "units": 1}}]"#
        );
        let layers: Vec<Layer> = serde_json::from_str(&layers).unwrap();
        let network = Network::Layers(Layers::new(&[1], &layers).unwrap());
        network.tensor_parallel_blocks(&TensorShards::whole())
    }
}

/// Trains a custom network, which `network` returns for a rank, and returns the outcomes.
fn train_own_network(
    root: &Path,
    name: &str,
    ranks: usize,
    servers: usize,
    network: impl Fn(usize) -> OwnLine + Sync,
) -> Vec<Result<RunOutcome>> {
    let more = [format!("run.name={name}"), "parallel.virtual_ranks=2".into()];
    let config = config_with(root, &[&more[0], &more[1]]);
    let each = on_threads(ranks, |comm| {
        let custom = Customization {
            data: Some(line(LINE)),
            network: Some(CustomModel::new(network(comm.rank()))),
            loss: Some(CustomLoss::new(Squared)),
            metrics: vec![CustomMetric::new(Squared)],
            ..Customization::default()
        };
        let request =
            TrainRequest { threads: Some(1), ..TrainRequest::new(config.clone(), "line") };
        Ok(servers::train(comm, &request, custom, servers))
    });
    each.unwrap()
}

#[test]
fn a_custom_network_has_the_same_bits_with_parameter_servers() {
    let root = tempfile::tempdir().unwrap();
    let own = |_| OwnLine { name: "own line", units: 4 };
    let finished = |ranks| vec![Ok(RunOutcome::Finished); ranks];
    assert_eq!(train_own_network(root.path(), "ranks", 2, 0, own), finished(2));
    let of = |name: &str, step: u64| {
        tensors(&root.path().join(name).join(format!("checkpoints/step-{step:08}")))
    };
    let losses = |name: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(root.path().join(name).join("metrics.jsonl")).unwrap();
        let step = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].clone();
        text.lines().map(step).collect()
    };
    let evaluations = |name: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(root.path().join(name).join("eval.jsonl")).unwrap();
        let step = |line: &str| serde_json::from_str::<Value>(line).unwrap()["metrics"].clone();
        text.lines().map(step).collect()
    };
    assert_eq!(losses("ranks").len(), 6);
    assert!(evaluations("ranks")[0]["own squared"].as_f64().unwrap() > 0.0);
    for (name, ranks, servers) in [("served", 3, 1), ("twice", 4, 2), ("alone", 3, 2)] {
        assert_eq!(train_own_network(root.path(), name, ranks, servers, own), finished(ranks));
        for step in [3, 6] {
            assert_eq!(of(name, step), of("ranks", step), "{name}: step {step}");
        }
        assert_eq!(losses(name), losses("ranks"), "{name}");
        assert_eq!(evaluations(name), evaluations("ranks"), "{name}");
        let manifest = root.path().join(name).join("checkpoints/latest/manifest.json");
        let config = &json(&manifest)["config"];
        assert_eq!(
            (&config["model"]["own"], &config["data"]["path"]),
            (&"own line".into(), &"a line".into())
        );
    }
}

#[test]
fn other_custom_networks_on_other_ranks_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let name = |rank: usize| if rank == 0 { "own line" } else { "other line" };
    let other = |rank: usize| OwnLine { name: name(rank), units: 4 };
    for ended in train_own_network(root.path(), "names", 3, 1, other) {
        let error = ended.unwrap_err().to_string();
        assert!(error.contains("own line") && error.contains("other line"), "{error}");
    }
    let wider = |rank: usize| OwnLine { name: "own line", units: 4 + rank };
    for ended in train_own_network(root.path(), "tensors", 3, 1, wider) {
        let error = ended.unwrap_err().to_string();
        let expected = "the custom network \"own line\" of this program has other blocks";
        assert!(error.contains(expected), "{error}");
    }
    let own = |_| OwnLine { name: "own line", units: 4 };
    let ended = train_own_network(root.path(), "none", 2, 2, own);
    let error = ended[0].clone().unwrap_err().to_string();
    assert!(error.contains("2 servers of 2 ranks leave none to train"), "{error}");
}

/// A run whose coordinator, server and workers are separate processes of a program: here, threads.
#[test]
fn processes_of_a_program_train_its_network_on_its_data() {
    let root = tempfile::tempdir().unwrap();
    let own = |_| OwnLine { name: "own line", units: 4 };
    let ranks = train_own_network(root.path(), "ranks", 2, 0, own);
    assert_eq!(ranks, vec![Ok(RunOutcome::Finished); 2]);
    let custom = |name, units| Customization {
        data: Some(line(LINE)),
        network: Some(CustomModel::new(OwnLine { name, units })),
        loss: Some(CustomLoss::new(Squared)),
        metrics: vec![CustomMetric::new(Squared)],
        ..Customization::default()
    };
    let config = config_with(root.path(), &["run.name=apart", "parallel.virtual_ranks=2"]);
    let run = root.path().join("apart");
    let timeout = Duration::from_secs(60);
    let mut notes = Notes::default();
    std::thread::scope(|scope| {
        let worker = |name, units| servers::work_for_run(&run, timeout, custom(name, units));
        let server = scope.spawn(|| servers::serve_run(&run, None, timeout));
        // A worker with another network is refused, and the run goes on with the other one.
        let refused = scope.spawn(move || {
            let ended = worker("other line", 4);
            (ended, worker("own line", 4))
        });
        let request = TrainRequest::new(config, "line");
        let coordinator = Customization { hooks: vec![&mut notes], ..custom("own line", 4) };
        let ended = servers::coordinate(request, coordinator, 1, Some(1));
        assert_eq!(ended, Ok(RunOutcome::Finished));
        server.join().unwrap().unwrap();
        let (refused, worked) = refused.join().unwrap();
        let error = refused.unwrap_err().to_string();
        let expected =
            "the run trains the custom network \"own line\", but this program defines \"other";
        assert!(error.contains(expected) && error.contains("hint: "), "{error}");
        assert_eq!(worked, Ok(0));
    });
    assert_eq!(notes.calls.last().unwrap(), "end 6: Finished");
    assert_eq!(notes.calls.iter().filter(|call| call.starts_with("step ")).count(), 6);
    let last = |name: &str| tensors(&root.path().join(name).join("checkpoints/step-00000006"));
    assert_eq!(last("apart"), last("ranks"));
}
