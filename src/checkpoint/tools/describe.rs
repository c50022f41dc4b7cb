//! Description of a checkpoint, as text or as a JSON object.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use super::list::written;
use crate::{Manifest, Origin};
use hpctrain_base::escape::in_one_line;
use hpctrain_config::telemetry::{bytes, grouped};
use hpctrain_config::{Config, network};
use hpctrain_data::inspect::table;
use hpctrain_data::{DataChange, Tokenizer, TrainedOn};

/// Formats a description of the checkpoint in `dir`.
pub fn describe(dir: &Path, manifest: &Manifest) -> String {
    let Manifest { version, id, step, updates, position, seed, config, origin, state, .. } =
        manifest;
    let model = &config.model;
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name:<12} {}", in_one_line(&text));
    };
    line("checkpoint", dir.display().to_string());
    line("format", version.to_string());
    line("id", id.clone());
    line("progress", format!("step {step}, {updates} updates, {position} samples, seed {seed}"));
    let mut nodes = origin.hosts.clone();
    nodes.dedup();
    let hosts = if nodes.is_empty() { String::new() } else { format!(" on {}", nodes.join(", ")) };
    let ranks = format!("{} rank{}{hosts}", origin.ranks, if origin.ranks == 1 { "" } else { "s" });
    line(
        "written",
        format!(
            "{} by hpctrain {}, {ranks}, {}",
            written(origin.time),
            origin.hpctrain,
            origin.mpi
        ),
    );
    let network = network(&mut model.clone(), None)
        .map_or_else(|e| e.message().to_string(), |network| network.describe());
    line("model", format!("{network}, dropout {}", model.dropout));
    let tokenizer = manifest.tokenizer.as_ref();
    line(
        "tokenizer",
        tokenizer
            .map_or_else(|| "none".into(), |t| format!("{}, {} ids", t.name(), t.vocabulary())),
    );
    line("data", manifest.data.as_ref().map_or_else(|| "unknown".into(), data));
    for DataChange { step, before, what } in manifest.data.iter().flat_map(|data| &data.changes) {
        line("", format!("until step {step} {before}: {what}"));
    }
    line("parameters", grouped(manifest.parameters()));
    line(
        "state",
        if state.is_empty() { "none: parameters alone".into() } else { state.join(", ") },
    );

    let mut files = vec![["file", "size"].map(str::to_owned)];
    files.extend(
        manifest.files.iter().map(|(name, file)| [name.clone(), bytes(file.bytes as usize)]),
    );
    let mut tensors = vec![["tensor", "shape", "pieces"].map(str::to_owned)];
    for (name, entry) in &manifest.tensors {
        tensors.push([name.clone(), shape(&entry.shape), entry.pieces.len().to_string()]);
    }
    format!("{out}\n{}\n{}", table(&files), table(&tensors))
}

/// The description of a checkpoint as JSON: its manifest without the offsets of pieces.
#[derive(Serialize)]
pub struct Description<'a> {
    checkpoint: &'a Path,
    format: u32,
    id: &'a str,
    step: u64,
    updates: u64,
    /// The number of samples consumed.
    position: u64,
    seed: u64,
    origin: &'a Origin,
    config: &'a Config,
    tokenizer: Option<&'a str>,
    data: Option<String>,
    data_changes: &'a [DataChange],
    parameters: u64,
    state: &'a [String],
    /// File sizes in bytes, by name.
    files: BTreeMap<&'a str, u64>,
    /// Shapes of tensors, by name.
    tensors: BTreeMap<&'a str, &'a [usize]>,
}

impl<'a> Description<'a> {
    /// Creates the description of the checkpoint in `dir`.
    pub fn new(dir: &'a Path, manifest: &'a Manifest) -> Self {
        let Manifest {
            version,
            id,
            step,
            updates,
            position,
            seed,
            config,
            origin,
            state,
            data,
            ..
        } = manifest;
        Self {
            checkpoint: dir,
            format: *version,
            id,
            step: *step,
            updates: *updates,
            position: *position,
            seed: *seed,
            origin,
            config,
            tokenizer: manifest.tokenizer.as_ref().map(Tokenizer::name),
            data: data.as_ref().map(|data| data.fingerprint.digest()),
            data_changes: data.as_ref().map_or(&[], |data| &data.changes),
            parameters: manifest.parameters(),
            state,
            files: manifest.files.iter().map(|(name, file)| (&name[..], file.bytes)).collect(),
            tensors: manifest
                .tensors
                .iter()
                .map(|(name, tensor)| (&name[..], &tensor.shape[..]))
                .collect(),
        }
    }
}

/// Formats the digest, samples and shards of training data.
fn data(TrainedOn { fingerprint, excluded, .. }: &TrainedOn) -> String {
    let shards = fingerprint.shards.len();
    let noun = if shards == 1 { "shard" } else { "shards" };
    let excluded = excluded.as_ref().map_or(String::new(), |excluded| {
        format!(", without {} ({}, data.exclude)", grouped(excluded.samples), excluded.digest)
    });
    let samples = grouped(fingerprint.samples);
    format!("{}: {samples} samples of {shards} {noun}{excluded}", fingerprint.digest())
}

/// Formats `[3, 4]` as `3 × 4`.
fn shape(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" × ")
}
