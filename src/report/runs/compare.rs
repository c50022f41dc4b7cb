//! Comparison of two runs: differences in configuration, version and data, the first step that
//! differs bitwise, and the losses.

use serde::Serialize;

use crate::run_records::RunRecords;
use hpctrain_checkpoint::Manifest;
use hpctrain_checkpoint::run_dir::RunDirectory;
use hpctrain_config::telemetry::evaluations::{self, LossSplit};
use hpctrain_config::telemetry::grouped;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_data::inspect::table;

/// The maximum number of rows of a table of losses.
const ROWS: usize = 10;

/// The maximum number of characters of a value in a table.
const WIDEST: usize = 60;

/// The comparison of two runs. Unknown numbers are null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The first run.
    pub a: RunFacts,
    /// The second run.
    pub b: RunFacts,
    /// The keys of the configuration that differ, except the name of the run.
    pub settings: Vec<SettingDifference>,
    /// Whether both train the same network with the same loss function.
    pub same_network: bool,
    /// Whether both train on the same data, if known.
    pub same_data: Option<bool>,
    /// The number of steps that both have recorded.
    pub common_steps: usize,
    /// The first of them that differs bitwise in loss, gradient norm or learning rate.
    pub first_difference: Option<FirstDifference>,
    /// The training losses at some of them.
    pub at_steps: Vec<AtStep>,
    /// The losses of evaluations at the same steps.
    pub at_evaluations: Vec<AtStep>,
    /// The training losses after the same numbers of tokens or samples.
    pub at_tokens: Vec<AtTokens>,
    /// Notes on unreadable records.
    pub notes: Vec<String>,
}

/// Facts about a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunFacts {
    /// The directory of the run.
    pub path: String,
    /// The version of the program that wrote its run summary or its newest checkpoint.
    pub version: Option<String>,
    /// The digest of its training data.
    pub data: Option<String>,
    /// The last step.
    pub step: Option<u64>,
    /// The last training loss.
    pub loss: Option<f64>,
    /// The number of tokens or samples seen.
    pub tokens: Option<u64>,
    /// The median throughput in tokens or samples per second.
    pub per_second: Option<f64>,
    /// The goodput, from 0 to 1, once the run has finished.
    pub goodput: Option<f64>,
    /// The unit of both: `tokens` or `samples`.
    pub unit: &'static str,
}

/// A key of the configuration with its values; `None` if omitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SettingDifference {
    /// The key.
    pub key: String,
    /// The value in A.
    pub a: Option<String>,
    /// The value in B.
    pub b: Option<String>,
}

/// The first record that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FirstDifference {
    /// The step.
    pub step: u64,
    /// The name of the number that differs.
    pub number: &'static str,
    /// The value in A.
    pub a: f64,
    /// The value in B.
    pub b: f64,
}

/// Losses at a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AtStep {
    /// The step.
    pub step: u64,
    /// The loss of A.
    pub a: Option<f64>,
    /// The loss of B.
    pub b: Option<f64>,
}

/// Losses after a number of tokens or samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AtTokens {
    /// The number of tokens or samples seen.
    pub tokens: u64,
    /// The first step of A that has seen them, and its loss.
    pub a: (u64, f64),
    /// The first step of B that has seen them, and its loss.
    pub b: (u64, f64),
}

impl Comparison {
    /// Compares two runs.
    pub fn new(a: &RunRecords, b: &RunRecords) -> Self {
        let common: Vec<(&Step, &Step)> = common(&a.steps, &b.steps, |step| step.step).collect();
        let [facts_a, facts_b] = [a, b].map(RunFacts::new);
        let same_data = facts_a.data.as_ref().zip(facts_b.data.as_ref()).map(|(a, b)| a == b);
        let mut keys: Vec<&String> = a.settings.keys().chain(b.settings.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        let settings = keys.into_iter().filter_map(|key| {
            let [a, b] = [a, b].map(|run| run.settings.get(key).cloned());
            (a != b && key != "run.name").then(|| SettingDifference { key: key.clone(), a, b })
        });
        let finite = |loss: f64| Some(loss).filter(|loss| loss.is_finite());
        let at_step =
            |(a, b): &(&Step, &Step)| AtStep { step: a.step, a: finite(a.loss), b: finite(b.loss) };
        let notes = [("A", a), ("B", b)];
        Self {
            a: facts_a,
            b: facts_b,
            settings: settings.collect(),
            same_network: (&a.config.model, &a.config.loss) == (&b.config.model, &b.config.loss),
            same_data,
            common_steps: common.len(),
            first_difference: common.iter().find_map(|(a, b)| first_difference(a, b)),
            at_steps: some(&common).map(at_step).collect(),
            at_evaluations: at_evaluations(a, b),
            at_tokens: at_tokens(&a.steps, &b.steps),
            notes: notes
                .iter()
                .flat_map(|(run, records)| {
                    records.notes.iter().map(move |note| format!("{run}: {note}"))
                })
                .collect(),
        }
    }

    /// Formats the comparison as tables.
    pub fn to_text(&self) -> String {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let number = |number: Option<u64>| or_none(number.map(grouped));
        let loss = |loss: Option<f64>| or_none(loss.map(|loss| format!("{loss:.4}")));
        let both = |name: &str, facts: &dyn Fn(&RunFacts) -> String| {
            [name.to_owned(), facts(&self.a), facts(&self.b)]
        };
        let mut text = table(&[
            ["", "A", "B"].map(str::to_owned),
            both("run", &|facts| facts.path.clone()),
            both("version", &|facts| or_none(facts.version.clone())),
            both("data", &|facts| or_none(facts.data.clone())),
            both("step", &|facts| number(facts.step)),
            both("loss", &|facts| loss(facts.loss)),
            both("seen", &|facts| {
                or_none(facts.tokens.map(|tokens| format!("{} {}", grouped(tokens), facts.unit)))
            }),
            both("speed", &|facts| or_none(facts.speed())),
            both("goodput", &|facts| {
                or_none(facts.goodput.map(|share| format!("{:.1} %", 100.0 * share)))
            }),
        ]);
        if let (Some(a), Some(b)) = (self.a.per_second, self.b.per_second) {
            text += &format!("B has {:.2} times the speed of A\n", b / a);
        }
        if !self.settings.is_empty() {
            let mut rows = vec![["setting", "A", "B"].map(str::to_owned)];
            let value = |value: &Option<String>| value.as_deref().map_or("-".into(), shortened);
            rows.extend(
                self.settings.iter().map(|one| [one.key.clone(), value(&one.a), value(&one.b)]),
            );
            text += &format!("\n{}", table(&rows));
        }
        text += "\n";
        text += &match (&self.first_difference, self.common_steps) {
            (_, 0) => "no step is recorded in both\n".into(),
            (None, 1) => "bitwise identical in the one common step\n".into(),
            (None, steps) => {
                format!("bitwise identical in all {} common steps\n", grouped(steps as u64))
            }
            (Some(FirstDifference { step, number, a, b }), _) => {
                format!(
                    "the first bitwise difference is at step {step}: {number} {a:e} in A, {b:e} in B\n"
                )
            }
        };
        if !self.same_network {
            text += "the networks or their loss functions differ: losses may not be comparable\n";
        }
        if self.same_data == Some(false) {
            text += "the training data differ\n";
        }
        text += &losses("step", "training loss", &self.at_steps);
        text += &losses("step", "evaluated loss", &self.at_evaluations);
        if self.at_tokens.iter().any(|at| at.a.0 != at.b.0) {
            let mut rows =
                vec![[self.a.unit, "step A", "step B", "loss A", "loss B"].map(str::to_owned)];
            rows.extend(self.at_tokens.iter().map(|AtTokens { tokens, a, b }| {
                [
                    grouped(*tokens),
                    a.0.to_string(),
                    b.0.to_string(),
                    loss(Some(a.1)),
                    loss(Some(b.1)),
                ]
            }));
            text += &format!("\n{}", table(&rows));
        }
        for note in &self.notes {
            text += &format!("\nnote: {note}");
        }
        text
    }
}

impl RunFacts {
    fn new(run: &RunRecords) -> Self {
        let manifest = run.checkpoints.iter().rev().find_map(|saved| {
            let path = RunDirectory::at(&run.path).checkpoints().path(saved.step);
            Manifest::read(&path).ok()
        });
        let card = run.summary.as_ref();
        let version = card.map(|card| card.version.clone());
        let data = card.and_then(|card| card.data.clone());
        let last = run.steps.last();
        let mut speeds: Vec<f64> = run.steps.iter().map(|step| step.tokens_per_second).collect();
        speeds.sort_by(f64::total_cmp);
        Self {
            path: run.path.display().to_string(),
            version: version
                .or_else(|| manifest.as_ref().map(|manifest| manifest.origin.hpctrain.clone())),
            data: data.or_else(|| Some(manifest.as_ref()?.data.as_ref()?.fingerprint.digest())),
            step: last.map(|step| step.step),
            loss: last.map(|step| step.loss).filter(|loss| loss.is_finite()),
            tokens: last.map(|step| step.tokens),
            per_second: speeds.get(speeds.len() / 2).copied(),
            goodput: card.and_then(|card| card.goodput).map(|goodput| goodput.share),
            unit: if run.is_language() { "tokens" } else { "samples" },
        }
    }

    /// Returns the median throughput with its unit, if any.
    fn speed(&self) -> Option<String> {
        self.per_second.map(|speed| format!("{} {}/s", grouped(speed.round() as u64), self.unit))
    }
}

/// Returns the pairs of entries with the same key of two lists sorted by key.
fn common<'a, T>(
    a: &'a [T],
    b: &'a [T],
    key: impl Fn(&T) -> u64 + 'a,
) -> impl Iterator<Item = (&'a T, &'a T)> {
    let mut rest = b;
    a.iter().filter_map(move |one| {
        rest = &rest[rest.partition_point(|other| key(other) < key(one))..];
        rest.first().filter(|other| key(other) == key(one)).map(|other| (one, other))
    })
}

/// Returns the first number of a step that differs bitwise; NaNs are equal.
fn first_difference(a: &Step, b: &Step) -> Option<FirstDifference> {
    let numbers = [
        ("loss", a.loss, b.loss),
        ("norm", a.grad_norm, b.grad_norm),
        ("learning rate", a.lr, b.lr),
    ];
    let differs =
        |(_, a, b): &(&str, f64, f64)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
    numbers.into_iter().find(differs).map(|(number, of_a, of_b)| FirstDifference {
        step: a.step,
        number,
        a: of_a,
        b: of_b,
    })
}

/// Returns some entries, evenly spaced, including the last.
fn some<T>(all: &[T]) -> impl Iterator<Item = &T> {
    let rows = ROWS.min(all.len());
    (1..=rows).map(move |row| &all[row * all.len() / rows - 1])
}

/// Returns the losses of steps that both have evaluated; the last one of a step evaluated twice.
fn at_evaluations(a: &RunRecords, b: &RunRecords) -> Vec<AtStep> {
    let ((over_a, of_a), (over_b, of_b)) = (evaluated_losses(a), evaluated_losses(b));
    if over_a != over_b {
        return vec![];
    }
    let both: Vec<_> = common(&of_a, &of_b, |one| one.0).collect();
    some(&both).map(|(a, b)| AtStep { step: a.0, a: a.1, b: b.1 }).collect()
}

/// Returns the kind of samples over which a run's losses are compared, and its losses by step.
fn evaluated_losses(run: &RunRecords) -> (LossSplit, Vec<(u64, Option<f64>)>) {
    let over = evaluations::over(&run.evaluations);
    (over, evaluations::losses(&run.evaluations, over).into_iter().collect())
}

/// Returns the losses of the first steps that have seen the same numbers of tokens.
fn at_tokens(a: &[Step], b: &[Step]) -> Vec<AtTokens> {
    let (Some(last_a), Some(last_b)) = (a.last(), b.last()) else { return vec![] };
    let most = last_a.tokens.min(last_b.tokens);
    let at = |steps: &[Step], tokens: u64| {
        let step = &steps[steps.partition_point(|step| step.tokens < tokens).min(steps.len() - 1)];
        (step.step, step.loss)
    };
    let tokens =
        (1..=ROWS as u64).map(|row| (u128::from(most) * u128::from(row) / ROWS as u128) as u64);
    tokens
        .filter(|tokens| *tokens > 0)
        .map(|tokens| AtTokens { tokens, a: at(a, tokens), b: at(b, tokens) })
        .collect()
}

/// Returns a table of losses at steps; empty if there are none.
fn losses(first: &str, noun: &str, at: &[AtStep]) -> String {
    if at.is_empty() {
        return String::new();
    }
    let loss = |loss: Option<f64>| loss.map_or_else(|| "-".into(), |loss| format!("{loss:.4}"));
    let mut rows = vec![[first.to_owned(), format!("{noun} A"), "B".into(), "B - A".into()]];
    rows.extend(at.iter().map(|AtStep { step, a, b }| {
        let difference = a.zip(*b).map_or_else(|| "-".into(), |(a, b)| format!("{:+.4}", b - a));
        [step.to_string(), loss(*a), loss(*b), difference]
    }));
    format!("\n{}", table(&rows))
}

/// Shortens a value to fit into a table.
fn shortened(value: &str) -> String {
    match value.char_indices().nth(WIDEST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_config::Config;

    fn step(step: u64, loss: f64) -> Step {
        Step {
            step,
            loss,
            tokens: 64 * step,
            grad_norm: 1.0,
            tokens_per_second: 1e3,
            ..Step::default()
        }
    }

    fn run(
        dir: &std::path::Path,
        name: &str,
        steps: &[Step],
        change: impl Fn(&mut Config),
    ) -> RunRecords {
        let directory = RunDirectory::at(dir.join(name));
        std::fs::create_dir(directory.path()).unwrap();
        let mut config = Config::default();
        config.run.name = Some(name.into());
        change(&mut config);
        directory.write_config(&config).unwrap();
        let text: String =
            steps.iter().map(|step| serde_json::to_string(step).unwrap() + "\n").collect();
        std::fs::write(directory.metrics_path(), text).unwrap();
        let evaluations = [2, 4].map(|step| {
            format!(
                "{{\"step\":{step},\"loss\":2.5,\"perplexity\":null,\"checkpoint\":null,\"time\":1.0}}\n"
            )
        });
        std::fs::write(directory.evaluations_path(), evaluations.concat()).unwrap();
        RunRecords::open(directory.path()).unwrap()
    }

    #[test]
    fn the_first_bit_that_differs_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let steps: Vec<Step> = (1..=6).map(|n| step(n, 4.0 / n as f64)).collect();
        let a = run(dir.path(), "a", &steps, |_| {});
        // A gap at step 2, one bit at step 5, and twice the tokens per step.
        let mut others: Vec<Step> =
            steps.iter().map(|one| Step { tokens: 128 * one.step, ..*one }).collect();
        others[4].loss = f64::from_bits(others[4].loss.to_bits() + 1);
        others.remove(1);
        let b = run(dir.path(), "b", &others, |config| {
            config.optimizer.lr = 0.5;
            config.batch.micro = Some(3);
        });
        let found = Comparison::new(&a, &b);
        let parting = found.first_difference.as_ref().unwrap();
        assert_eq!((found.common_steps, parting.step, parting.number), (5, 5, "loss"));
        let keys: Vec<_> = found
            .settings
            .iter()
            .map(|one| (&one.key[..], one.a.as_deref(), one.b.as_deref()))
            .collect();
        assert_eq!(
            keys,
            [("batch.micro", None, Some("3")), ("optimizer.lr", Some("0.001"), Some("0.5"))]
        );
        assert_eq!(found.at_steps.iter().map(|at| at.step).collect::<Vec<_>>(), [1, 3, 4, 5, 6]);
        assert_eq!(found.at_evaluations.len(), 2);
        let last = found.at_tokens.last().unwrap();
        assert_eq!((last.tokens, last.a.0, last.b.0), (384, 6, 3));
        assert!(found.same_network && found.same_data.is_none());
        let text = found.to_text();
        assert!(
            text.contains(
                "the first bitwise difference is at step 5: loss 8e-1 in A, 8.00000000000000"
            ),
            "{text}"
        );
        assert!(
            text.contains("B has 1.00 times the speed of A")
                && text.contains("tokens  step A  step B"),
            "{text}"
        );

        let same = Comparison::new(&a, &a).to_text();
        assert!(
            same.contains("bitwise identical in all 6 common steps") && !same.contains("setting"),
            "{same}"
        );
        let other = run(dir.path(), "c", &[], |config| config.model.width = 64);
        let text = Comparison::new(&a, &other).to_text();
        assert!(
            text.contains(
                "no step is recorded in both\nthe networks or their loss functions differ"
            ),
            "{text}"
        );
    }

    #[test]
    fn some_entries_are_evenly_spaced_and_have_the_last() {
        let all: Vec<u64> = (1..=25).collect();
        assert_eq!(some(&all).copied().collect::<Vec<_>>(), [2, 5, 7, 10, 12, 15, 17, 20, 22, 25]);
        assert_eq!(some(&all[..3]).copied().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(some::<u64>(&[]).count(), 0);
    }
}
