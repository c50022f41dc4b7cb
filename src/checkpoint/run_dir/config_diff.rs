//! Differences between the configuration of a run so far and the one of its next start, by their
//! effect.

use std::collections::BTreeSet;
use std::fmt;

use toml::{Table, Value};

use hpctrain_config::Config;

/// The effect of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decides {
    /// The numerical results of training: losses, parameters.
    Curve,
    /// The length of the run, which shapes the curve too, but may change when a run goes on.
    Length,
    /// The order of additions: the last bits.
    Rounding,
    /// The placement of work: no effect on results.
    Layout,
    /// None of these.
    Else,
}

/// The effect of a key of the resolved configuration.
fn decides(section: &str, key: &str) -> Decides {
    match (section, key) {
        ("run", "steps" | "epochs") | ("lr_schedule", "decay") => Decides::Length,
        ("model", "place") | ("parallel", "loss_chunk_tokens") => Decides::Rounding,
        ("run", "seed")
        | ("batch", "global")
        | ("model" | "loss" | "lr_schedule" | "precision" | "local_sgd", _) => Decides::Curve,
        ("data", "prefetch" | "local_cache" | "verify") => Decides::Else,
        ("offload", _) => Decides::Layout,
        ("data" | "optimizer", _) => Decides::Curve,
        ("parallel", "virtual_ranks" | "virtual_tensor_ranks")
        | ("batch", "micro")
        | ("comm", "algorithm" | "deterministic") => Decides::Rounding,
        ("device", "matmul_autotune") => Decides::Rounding,
        ("parallel", _) => Decides::Layout,
        _ => Decides::Else,
    }
}

/// Differences by their effect on a run that goes on, a line each.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    /// The run does not go on as it began.
    pub curve: Vec<String>,
    /// Sums may differ in their last bits.
    pub rounding: Vec<String>,
    /// Another layout, with the same numbers.
    pub layout: Vec<String>,
}

impl Changes {
    /// The differences from one resolved configuration to another.
    pub fn between(before: &Config, now: &Config) -> Self {
        let of = |wanted: &[Decides]| {
            let all =
                differences(before, now, |section, key| wanted.contains(&decides(section, key)));
            all.iter().map(KeyDifference::to_string).collect()
        };
        Self {
            curve: of(&[Decides::Curve, Decides::Length]),
            rounding: of(&[Decides::Rounding]),
            layout: of(&[Decides::Layout]),
        }
    }
}

/// Reasons why a run of one resolved configuration is not one of another; empty if it may well be.
/// Length, rounding, layout and precision do not count.
pub fn of_run(before: &Config, now: &Config) -> Vec<String> {
    let wanted = |section: &str, key: &str| {
        section != "precision" && decides(section, key) == Decides::Curve
    };
    differences(before, now, wanted).iter().map(KeyDifference::to_string).collect()
}

/// A key with another value in one configuration than in another.
pub struct KeyDifference {
    /// `section.key`.
    pub key: String,
    /// Its value before, or in the first, in TOML.
    pub before: String,
    /// Its value now, or in the second.
    pub now: String,
}

impl fmt::Display for KeyDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {}, is {}", self.key, self.before, self.now)
    }
}

/// The keys that differ.
pub fn differences(
    before: &Config,
    now: &Config,
    wanted: impl Fn(&str, &str) -> bool,
) -> Vec<KeyDifference> {
    let [before, now] = [before, now].map(|config| config.to_table().unwrap_or_default());
    let empty = Table::new();
    let section = |table: &Table, name: &str| {
        table.get(name).and_then(Value::as_table).unwrap_or(&empty).clone()
    };
    let mut changes = Vec::new();
    for name in now.keys() {
        let before = section(&before, name);
        let now = section(&now, name);
        let keys: BTreeSet<&String> =
            before.keys().chain(now.keys()).filter(|key| wanted(name, key)).collect();
        for key in keys {
            let told =
                |value: Option<&Value>| value.map_or_else(|| "left out".into(), Value::to_string);
            if before.get(key) != now.get(key) {
                let [before, now] = [before.get(key), now.get(key)].map(told);
                changes.push(KeyDifference { key: format!("{name}.{key}"), before, now });
            }
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(change: impl Fn(&mut Config)) -> (Changes, Vec<String>) {
        let before = Config::default();
        let mut now = Config::default();
        change(&mut now);
        (Changes::between(&before, &now), of_run(&before, &now))
    }

    #[test]
    fn what_shapes_the_curve_is_told() {
        assert_eq!(changed(|_| {}), (Changes::default(), vec![]));
        type Change = fn(&mut Config);
        let curve: [(&str, Change); 7] = [
            ("loss.label_smoothing", |now| now.loss.label_smoothing = 0.5),
            ("model.dropout was 0.0, is 0.5", |now| now.model.dropout = 0.5),
            (
                "model.rope_scaling was { rope_type = \"default\" }, is { factor = 8.0, rope_type = \"linear\" }",
                |now| {
                    now.model.rope_scaling.rope_type = hpctrain_config::RopeType::Linear;
                    now.model.rope_scaling.factor = Some(8.0);
                },
            ),
            ("optimizer.lr was 0.001, is 0.5", |now| now.optimizer.lr = 0.5),
            ("run.seed", |now| now.run.seed = 7),
            ("data.shuffle was true, is false", |now| now.data.shuffle = false),
            ("batch.global", |now| now.batch.global = 7),
        ];
        for (words, change) in curve {
            let (changes, of_run) = changed(change);
            assert!(
                changes.curve.len() == 1 && changes.curve[0].starts_with(words),
                "{words}: {changes:?}"
            );
            assert_eq!(of_run, changes.curve);
            assert!(changes.rounding.is_empty() && changes.layout.is_empty());
        }
        // The same run, longer or on other machines.
        let (changes, of_run) = changed(|now| {
            now.run.steps = 7;
            now.precision.dtype = hpctrain_config::Compute::Bf16;
        });
        assert!(changes.curve.len() == 2 && of_run.is_empty(), "{changes:?}");
    }

    #[test]
    fn layouts_and_orders_of_sums_are_told_apart() {
        let (changes, of_run) = changed(|now| {
            now.parallel.virtual_ranks = Some(8);
            now.device.matmul_autotune = true;
            now.device.ranks_per_gpu = 2;
            now.parallel.zero = hpctrain_parallel::Zero::Three;
            now.offload.optimizer = true;
            now.model.place.tables = hpctrain_config::EmbeddingPlacement::Host;
            now.checkpoint.keep = 9;
            now.data.local_cache = Some("/tmp".into());
        });
        let matmul = "device.matmul_autotune was false, is true";
        let place = "model.place was { tables = \"device\" }, is { tables = \"host\" }";
        let ranks = "parallel.virtual_ranks was left out, is 8";
        assert_eq!(changes.rounding, [matmul, place, ranks]);
        let offload = "offload.optimizer was false, is true";
        assert_eq!(changes.layout, [offload, "parallel.zero was 0, is 3"]);
        assert!(changes.curve.is_empty() && of_run.is_empty(), "{changes:?}");
    }
}
