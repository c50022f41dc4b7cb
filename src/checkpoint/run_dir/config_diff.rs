//! Differences between the configuration of a run so far and that of its next start, grouped by
//! their effect.

use std::collections::BTreeSet;
use std::fmt;

use toml::{Table, Value};

use hpctrain_config::{Config, MessageDtype};

/// The effect of a changed key on a resumed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyEffect {
    /// The numerical results of training: losses and parameters.
    Curve,
    /// The length of the run, which also shapes the curve, but may change when a run is resumed.
    Length,
    /// The order of additions, and with it the last bits.
    Rounding,
    /// The placement of work, without effect on results.
    Layout,
    /// None of these.
    Other,
}

/// Returns what a key of the resolved configuration affects.
fn key_effect(section: &str, key: &str) -> KeyEffect {
    match (section, key) {
        ("run", "steps" | "epochs" | "steps_per_epoch") | ("lr_schedule", "decay") => {
            KeyEffect::Length
        }
        ("model", "place") | ("parallel", "loss_chunk_tokens") => KeyEffect::Rounding,
        ("run", "seed")
        | ("batch", "global")
        | ("model" | "loss" | "lr_schedule" | "precision" | "local_sgd", _) => KeyEffect::Curve,
        ("data", "prefetch" | "local_cache" | "verify" | "repeat") => KeyEffect::Other,
        ("offload", _) => KeyEffect::Layout,
        ("data" | "optimizer", _) => KeyEffect::Curve,
        ("parallel", "virtual_ranks" | "virtual_tensor_ranks")
        | ("batch", "micro")
        | ("comm", "algorithm" | "deterministic" | "dtype") => KeyEffect::Rounding,
        ("device", "matmul_autotune") => KeyEffect::Rounding,
        ("parallel", _) => KeyEffect::Layout,
        _ => KeyEffect::Other,
    }
}

/// The differences by their effect on a resumed run, one line each.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    /// The run does not continue as it began.
    pub curve: Vec<String>,
    /// Sums may differ in their last bits.
    pub rounding: Vec<String>,
    /// The layout differs, the results do not.
    pub layout: Vec<String>,
}

impl Changes {
    /// Returns the differences from one resolved configuration to another.
    pub fn between(before: &Config, now: &Config) -> Self {
        let effect = |section: &str, key: &str| match (section, key, now.comm.dtype) {
            // Each micro-batch is rounded.
            ("parallel", "reduce", MessageDtype::Bf16) => KeyEffect::Rounding,
            ("optimizer", "tables", _) if is_exact(before, now) => KeyEffect::Rounding,
            _ => key_effect(section, key),
        };
        let lines = |wanted: &[KeyEffect]| {
            let all =
                differences(before, now, |section, key| wanted.contains(&effect(section, key)));
            all.iter().map(KeyDifference::to_string).collect()
        };
        Self {
            curve: lines(&[KeyEffect::Curve, KeyEffect::Length]),
            rounding: lines(&[KeyEffect::Rounding]),
            layout: lines(&[KeyEffect::Layout]),
        }
    }
}

/// Returns true if sparse and dense updates of embedding tables give the same results.
fn is_exact(before: &Config, now: &Config) -> bool {
    before.sparse_updates_are_exact() && now.sparse_updates_are_exact()
}

/// Returns the reasons why a run of one resolved configuration cannot be the run of another; empty
/// if it can. Length, rounding, layout and precision do not count, nor does a global batch that
/// `batch.per_rank` gave, since a run that is resumed keeps its own.
pub fn run_conflicts(before: &Config, now: &Config) -> Vec<String> {
    let is_kept =
        |section: &str, key: &str| now.batch.of_rank > 0 && (section, key) == ("batch", "global");
    let conflicts = differences(before, now, |section, key| {
        let is_rounding = (section, key) == ("optimizer", "tables") && is_exact(before, now);
        section != "precision"
            && key_effect(section, key) == KeyEffect::Curve
            && !is_kept(section, key)
            && !is_rounding
    });
    conflicts.iter().map(KeyDifference::to_string).collect()
}

/// A key with different values in two configurations.
pub struct KeyDifference {
    /// `section.key`.
    pub key: String,
    /// Its TOML value before, or in the first configuration.
    pub before: String,
    /// Its TOML value now, or in the second configuration.
    pub now: String,
}

impl fmt::Display for KeyDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {}, is {}", self.key, self.before, self.now)
    }
}

/// Returns the `wanted` keys that differ.
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
            let text =
                |value: Option<&Value>| value.map_or_else(|| "omitted".into(), Value::to_string);
            if before.get(key) != now.get(key) {
                let [before, now] = [before.get(key), now.get(key)].map(text);
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
        (Changes::between(&before, &now), run_conflicts(&before, &now))
    }

    #[test]
    fn changes_of_the_curve_are_reported() {
        assert_eq!(changed(|_| {}), (Changes::default(), vec![]));
        type Change = fn(&mut Config);
        let curve: [(&str, Change); 8] = [
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
            ("data.exclude was omitted, is \"x\"", |now| now.data.exclude = Some("x".into())),
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
        // The same run, longer or with another precision.
        let (changes, of_run) = changed(|now| {
            now.run.steps = 7;
            now.precision.dtype = hpctrain_config::Compute::Bf16;
        });
        assert!(changes.curve.len() == 2 && of_run.is_empty(), "{changes:?}");
    }

    #[test]
    fn layout_and_rounding_changes_are_distinguished() {
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
        let ranks = "parallel.virtual_ranks was omitted, is 8";
        assert_eq!(changes.rounding, [matmul, place, ranks]);
        let offload = "offload.optimizer was false, is true";
        assert_eq!(changes.layout, [offload, "parallel.zero was 0, is 3"]);
        assert!(changes.curve.is_empty() && of_run.is_empty(), "{changes:?}");
    }
}
