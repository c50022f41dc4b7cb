//! `hpctrain checkpoint`: lists, inspects, verifies, compares, prunes, exports and imports
//! checkpoints, without MPI.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use toml::{Table, Value};

use super::{json, report};
use crate::checkpoint::export::onnx::OnnxOptions;
use crate::checkpoint::tools::describe::{Description, describe};
use crate::checkpoint::tools::diff::CheckpointDifference;
use crate::checkpoint::tools::verify::{Verified, VerifiedFile, verify};
use crate::checkpoint::tools::{diff, list, prune, resolve_path};
use crate::checkpoint::{Reader, Retention, export, huggingface, name_of};
use crate::config::{Model, written};
use crate::data::{Tokenizer, TokenizerKind};
use crate::error::{Error, Result};
use crate::job::fail;
use crate::telemetry::{grouped, say};

/// List, inspect, verify, compare, prune, export and import checkpoints
#[derive(Args)]
pub struct CheckpointArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the checkpoints of a run
    List {
        /// A run, such as runs/x
        run: PathBuf,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Show the contents of a checkpoint
    Inspect {
        /// A checkpoint, such as runs/x/checkpoints/latest, or a run: its latest
        checkpoint: PathBuf,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Read all data of a checkpoint and compare it with its checksums
    Verify {
        /// A checkpoint, or a run: all of its checkpoints
        path: PathBuf,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Compare two checkpoints bit by bit; exits with code 0 if they are identical, 1 if they
    /// differ
    Diff(DiffArgs),
    /// Remove the checkpoints of a run that the options do not keep
    ///
    /// Damaged checkpoints do not count as kept. Leased checkpoints, which a process is reading,
    /// are not removed.
    Prune(PruneArgs),
    /// Export a model for other programs: to Hugging Face format, safetensors or ONNX
    ///
    /// The parameters are those that evaluations use: the running average (EMA), if there is one.
    Export(ExportArgs),
    /// Convert a GPT-2 or Llama model written by Hugging Face's save_pretrained to a checkpoint
    Import(ImportArgs),
}

#[derive(Args)]
struct DiffArgs {
    /// A checkpoint, or a run: its latest
    a: PathBuf,
    /// Another checkpoint or run
    b: PathBuf,
    /// Compare only parameters, not optimizer state and progress
    #[arg(long)]
    weights_only: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct PruneArgs {
    /// A run, such as runs/x
    run: PathBuf,
    /// Keep the K newest checkpoints
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    keep: u32,
    /// Keep checkpoints whose step is a multiple of N; 0 disables this
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_every: u64,
    /// Keep the B checkpoints with the lowest validation losses
    #[arg(long, value_name = "B", default_value_t = 1)]
    keep_best: usize,
    /// List the checkpoints that would be removed, without removing them
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ExportArgs {
    /// A checkpoint, or a run: its latest
    checkpoint: PathBuf,
    /// Directory for the files; it must not exist or be empty
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Format of the model
    #[arg(long, value_enum, default_value_t = ExportFormat::Huggingface)]
    format: ExportFormat,
    /// ONNX: omit the normalization of features, so that the graph takes normalized numbers
    /// [default: the graph takes features as the data has them]
    #[arg(long)]
    normalized_inputs: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ExportFormat {
    /// A GPT or Llama for transformers: model.safetensors, config.json, tokenizer.json and their
    /// settings. A GPT without biases gets biases of zero
    Huggingface,
    /// A layer-list or custom model for PyTorch: model.safetensors, config.json and
    /// preprocessing.json
    Safetensors,
    /// A layer-list model as a graph for inference: model.onnx, config.json and preprocessing.json
    Onnx,
}

#[derive(Args)]
struct ImportArgs {
    /// Directory with config.json and model.safetensors
    dir: PathBuf,
    /// Directory for the checkpoint; it must not exist or be empty
    #[arg(long, value_name = "CHECKPOINT")]
    out: PathBuf,
    /// Tokenizer of the model; data for training or evaluation must use the same one [default: the
    /// tokenizer.json in DIR, if there is one]
    #[arg(long, value_name = "none|byte|gpt2|FILE")]
    tokenizer: Option<ImportTokenizer>,
}

/// A tokenizer whose vocabulary does not depend on a text.
#[derive(Clone)]
enum ImportTokenizer {
    None,
    Named(TokenizerKind),
}

impl FromStr for ImportTokenizer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("none", _) => Ok(Self::None),
            (_, Ok(kind)) if kind != TokenizerKind::Char => Ok(Self::Named(kind)),
            _ => Err("none, byte, gpt2, or the path of a tokenizer.json".into()),
        }
    }
}

/// Runs the subcommand and returns the exit code.
pub fn run(args: &CheckpointArgs) -> i32 {
    match &args.command {
        Command::List { run, json } => report(list_all(run, *json)),
        Command::Inspect { checkpoint, json } => report(inspect(checkpoint, *json)),
        Command::Verify { path, json } => report(verify_all(path, *json)),
        Command::Diff(args) => compare(args).unwrap_or_else(|e| fail(&e)),
        Command::Prune(args) => report(prune_run(args)),
        Command::Export(args) => report(export_model(args)),
        Command::Import(args) => report(import(args)),
    }
}

fn list_all(run: &Path, as_json: bool) -> Result<()> {
    let found = list::list(&resolve_path::run(run)?)?;
    if as_json {
        return json(&found);
    }
    say(found.to_table().trim_end());
    Ok(())
}

fn inspect(path: &Path, as_json: bool) -> Result<()> {
    let dir = resolve_path::checkpoint(path)?;
    let reader = Reader::open(&dir)?;
    if as_json {
        return json(&Description::new(&dir, reader.manifest()));
    }
    say(describe(&dir, reader.manifest()).trim_end());
    Ok(())
}

/// The object of `checkpoint verify --json`.
#[derive(Serialize)]
struct VerifyReport {
    damaged: usize,
    files: Vec<VerifiedFile>,
}

fn verify_all(path: &Path, as_json: bool) -> Result<()> {
    let dirs = match resolve_path::run(path) {
        Ok(run) => run.steps()?.into_iter().map(|step| run.path(step)).collect(),
        Err(_) => vec![resolve_path::checkpoint(path)?],
    };
    let mut all = Verified::default();
    let mut read = Vec::new();
    for dir in &dirs {
        let _lease = resolve_path::lease(dir);
        let Verified { files, damaged } =
            verify(dir, &mut |file| if as_json { read.push(file) } else { say(file) });
        all = Verified { files: all.files + files, damaged: all.damaged + damaged };
    }
    if as_json {
        json(&VerifyReport { damaged: all.damaged, files: read })?;
    }
    match (all.damaged, dirs.len()) {
        (0, 0) => Err(Error::input(format!("there is no checkpoint in {}", path.display()))
            .hint("give another run")),
        (0, _) => Ok(()),
        (damaged, _) => Err(Error::input(format!(
            "{}: {damaged} of {} files are damaged",
            path.display(),
            all.files
        ))
        .hint("--resume auto skips damaged checkpoints; restore a copy if you have one")),
    }
}

/// The object of `checkpoint diff --json`.
#[derive(Serialize)]
struct Differences {
    tensors: usize,
    elements: u64,
    differences: Vec<CheckpointDifference>,
}

/// Compares two checkpoints; returns 1 if they differ, else 0.
fn compare(args: &DiffArgs) -> Result<i32> {
    let dirs = [resolve_path::checkpoint(&args.a)?, resolve_path::checkpoint(&args.b)?];
    let _leases = dirs.each_ref().map(|dir| resolve_path::lease(dir));
    let [mut a, mut b] = [Reader::open(&dirs[0])?, Reader::open(&dirs[1])?];
    let mut differences = Vec::new();
    let found = diff::diff(&mut a, &mut b, args.weights_only, &mut |difference| match args.json {
        true => differences.push(difference),
        false => say(difference),
    })?;
    if args.json {
        json(&Differences { tensors: found.tensors, elements: found.elements, differences })?;
        return Ok(i32::from(found.differences > 0));
    }
    let tensors = found.tensors;
    let elements = grouped(found.elements);
    match found.differences {
        0 => say(format_args!("identical: {tensors} tensors, {elements} elements")),
        n => say(format_args!("{n} differences in {tensors} tensors, {elements} elements")),
    }
    Ok(i32::from(found.differences > 0))
}

/// The object of `checkpoint prune --json`.
#[derive(Serialize)]
struct Pruned {
    dry_run: bool,
    #[serde(flatten)]
    done: prune::Pruning,
}

fn prune_run(args: &PruneArgs) -> Result<()> {
    let checkpoints = resolve_path::run(&args.run)?;
    let retention = Retention {
        newest: args.keep as usize,
        multiples: args.keep_every,
        best: args.keep_best,
        sdc_checked: None,
    };
    let (done, verb) = match args.dry_run {
        true => (prune::plan(&checkpoints, &retention)?, "would remove"),
        false => (prune::prune(&checkpoints, &retention)?, "removed"),
    };
    if args.json {
        return json(&Pruned { dry_run: args.dry_run, done });
    }
    for step in &done.removed {
        say(format_args!("{verb} {}", name_of(*step)));
    }
    for step in &done.held {
        say(format_args!("kept {}: leased", name_of(*step)));
    }
    if done == prune::Pruning::default() {
        say("nothing to remove");
    }
    Ok(())
}

fn export_model(args: &ExportArgs) -> Result<()> {
    if args.normalized_inputs && args.format != ExportFormat::Onnx {
        return Err(Error::input("--normalized-inputs is an option of --format onnx")
            .hint("omit it: the other formats have parameters only, and preprocessing.json"));
    }
    let dir = resolve_path::checkpoint(&args.checkpoint)?;
    let _lease = resolve_path::lease(&dir);
    let mut reader = Reader::open(&dir)?;
    let out = args.out.display();
    match args.format {
        ExportFormat::Huggingface => {
            let huggingface::Exported { tensors, elements, added } =
                huggingface::export(&mut reader, &args.out)?;
            let zero = if added == 0 {
                String::new()
            } else {
                format!(", {added} of them biases of zero")
            };
            let tokenizer = match &reader.manifest().tokenizer {
                Some(tokenizer) => format!("tokenizer {}", tokenizer.name()),
                None => "no tokenizer".into(),
            };
            let elements = grouped(elements);
            say(format_args!("{out}: {tensors} tensors{zero}, {elements} elements, {tokenizer}"));
        }
        ExportFormat::Safetensors => {
            let exported = export::safetensors(&mut reader, &args.out)?;
            let elements = grouped(exported.elements);
            say(format_args!("{out}: {} tensors, {elements} elements", exported.tensors));
        }
        ExportFormat::Onnx => {
            let options =
                OnnxOptions { normalized_inputs: args.normalized_inputs, ..OnnxOptions::default() };
            let exported = export::onnx::onnx(&mut reader, &args.out, options)?;
            say(format_args!(
                "{out}: {} tensors, {} elements, opset {}",
                exported.tensors,
                grouped(exported.elements),
                export::onnx::OPSET
            ));
            say(format_args!("{} to {}", exported.inputs.join(", "), exported.outputs.join(", ")));
        }
    }
    Ok(())
}

fn import(args: &ImportArgs) -> Result<()> {
    let tokenizer = match &args.tokenizer {
        None => huggingface::tokenizer(&args.dir)?,
        Some(ImportTokenizer::None) => None,
        Some(ImportTokenizer::Named(kind)) => Some(Tokenizer::for_text(kind, "")?),
    };
    let manifest = huggingface::import(&args.dir, &args.out, tokenizer.clone())?;
    let out = args.out.display();
    let model = &manifest.config.model;
    say(format_args!(
        "{out}: {} tensors, {} parameters",
        manifest.tensors.len(),
        grouped(manifest.parameters())
    ));
    match tokenizer {
        Some(tokenizer) => {
            let name = match (&args.tokenizer, tokenizer) {
                (Some(ImportTokenizer::Named(TokenizerKind::File(path))), _) => {
                    path.display().to_string()
                }
                (None, Tokenizer::Char { .. } | Tokenizer::HuggingFace(_)) => {
                    args.dir.join("tokenizer.json").display().to_string()
                }
                (_, tokenizer) => tokenizer.name().into(),
            };
            say(format_args!(
                "import text for it: hpctrain data import text FILE --tokenizer {name} --out DIR"
            ));
        }
        None => say(
            "its data: shards of token ids in DIR, made with the tokenizer of the model; --tokenizer names one for text",
        ),
    }
    say(format_args!(
        "train it: hpctrain train --resume {out} --weights-only --set data.path=DIR{}",
        settings(model)?
    ));
    say(format_args!("measure it: hpctrain eval --checkpoint {out} --data DIR"));
    Ok(())
}

/// Returns the keys of `model` that differ from the defaults as `--set` arguments.
fn settings(model: &Model) -> Result<String> {
    let mut text = String::new();
    add_settings(&mut text, "model", &written(model)?, &written(&Model::default())?);
    Ok(text)
}

/// Adds `--set` arguments for the keys of a section and its subsections that differ from the
/// defaults.
fn add_settings(text: &mut String, section: &str, table: &Table, defaults: &Table) {
    for (key, value) in table.iter().filter(|(key, value)| defaults.get(*key) != Some(value)) {
        let name = format!("{section}.{key}");
        match (value, defaults.get(key)) {
            (Value::Table(inner), Some(Value::Table(defaults))) => {
                add_settings(text, &name, inner, defaults)
            }
            (Value::String(value), _) => *text += &format!(" --set {name}={value}"),
            _ => *text += &format!(" --set {name}={value}"),
        }
    }
}
