//! From a directory that Hugging Face's `save_pretrained` wrote to a checkpoint.

use std::path::Path;

use super::config::Architecture;
use super::safetensors::Reader;
use super::staging::Staging;
use super::{CONFIG, HEAD, MODEL, PREFIX, linear, shape_there, tensors, transposed};
use crate::checkpoint::manifest::VERSION;
use crate::checkpoint::shard::{Extent, ShardWriter, file_name};
use crate::checkpoint::{Manifest, Origin};
use crate::config::{Config, Facts, resolve};
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::layout::Tensor;
use crate::telemetry::unix_time;

/// Buffers of old files, which follow from the architecture.
const BUFFERS: [&str; 2] = [".attn.bias", ".attn.masked_bias"];

/// Writes the GPT-2 in the directory `from` as a checkpoint at step 0, without optimizer state, into the directory
/// `out`, which appears whole or not at all. `tokenizer` is written down for sampling. Returns the checkpoint's manifest.
///
/// # Errors
/// It is another network, tensors are missing or of another shape, or there are files in `out`.
pub fn import(from: &Path, out: &Path, tokenizer: Option<Tokenizer>) -> Result<Manifest> {
    let architecture = Architecture::read(&from.join(CONFIG))?;
    let config = Config { model: architecture.model(), ..Config::default() };
    let plan = resolve(config, &Facts { ranks: 1, threads: 1, vocabulary: None, on_gpu: false });
    let plan = plan.map_err(|e| e.at(from.join(CONFIG).display()))?;
    if let Some(tokenizer) = tokenizer.as_ref().filter(|tokenizer| tokenizer.vocabulary() > plan.gpt.vocabulary) {
        let (name, ids, vocabulary) = (tokenizer.name(), tokenizer.vocabulary(), plan.gpt.vocabulary);
        return Err(Error::input(format!("the tokenizer {name} has {ids} ids, the model only {vocabulary}"))
            .hint("give the tokenizer that the model was trained with, or none"));
    }
    let tensors = tensors(&plan.gpt);
    let path = from.join(MODEL);
    let source = Source::open(&path, &tensors)?;

    let staging = Staging::new(out)?;
    let extent =
        |tensor: &Tensor| Extent { tensor: tensor.name.clone(), shape: tensor.shape.clone(), range: 0..tensor.len() };
    let extents: Vec<Extent> = tensors.iter().map(extent).collect();
    let mut writer = ShardWriter::create(staging.path(), &file_name(0), &[], &extents)?;
    for (index, tensor) in tensors.iter().enumerate() {
        writer.write(index, 0, &source.tensor(tensor)?)?;
    }
    let origin = Origin {
        hpctrain: env!("CARGO_PKG_VERSION").into(),
        mpi: format!("imported from {}", from.display()),
        ranks: 1,
        hosts: vec![],
        time: unix_time(),
    };
    let mut manifest = Manifest {
        version: VERSION,
        id: format!("import-{:.0}", origin.time),
        step: 0,
        updates: 0,
        position: 0,
        seed: plan.config.run.seed,
        config: plan.config,
        tokenizer,
        origin,
        state: vec![],
        files: Default::default(),
        tensors: Default::default(),
    };
    let file = writer.finish()?;
    file.read_back()?;
    manifest.enter(vec![file.written().clone()])?;
    manifest.write(staging.path())?;
    staging.publish()?;
    Ok(manifest)
}

/// A file whose tensors are those of a network.
struct Source {
    reader: Reader,
    /// What comes before our names.
    prefix: &'static str,
}

impl Source {
    /// Opens the file at `path` and checks that it has these tensors, and no others that count.
    fn open(path: &Path, tensors: &[Tensor]) -> Result<Self> {
        if !path.exists() {
            return Err(Error::input(format!("{} does not exist", path.display()))
                .hint("save the model in one file: model.save_pretrained(dir, max_shard_size=\"1TB\")"));
        }
        let reader = Reader::open(path)?;
        let names = reader.names();
        let prefix = if names.iter().any(|name| name.starts_with(PREFIX)) { PREFIX } else { "" };
        let refused = |what: String| {
            Err(Error::input(format!("{}: {what}", path.display()))
                .hint("import the model.safetensors that belongs to config.json"))
        };
        for tensor in tensors {
            let (name, shape) = (format!("{prefix}{}", tensor.name), shape_there(tensor));
            match reader.shape(&name) {
                None => return refused(format!("there is no tensor {name}")),
                Some(found) if found != shape => {
                    return refused(format!("{name} is {found:?}, by config.json {shape:?}"));
                }
                Some(_) => {}
            }
        }
        let known = |name: &str| {
            let ours = name.strip_prefix(prefix).unwrap_or(name);
            name == HEAD
                || BUFFERS.iter().any(|buffer| ours.ends_with(buffer))
                || tensors.iter().any(|tensor| tensor.name == ours)
        };
        if let Some(name) = names.iter().find(|name| !known(name)) {
            return refused(format!("GPT-2 has no tensor {name}"));
        }
        let source = Self { reader, prefix };
        match names.iter().any(|name| name == HEAD) {
            true if !source.is_tied()? => refused(format!("{HEAD} is not {prefix}wte.weight again")),
            _ => Ok(source),
        }
    }

    /// Whether the output matrix is the token table.
    fn is_tied(&self) -> Result<bool> {
        let bits = |name: &str| Ok(self.reader.read(name)?.into_iter().map(f32::to_bits).collect::<Vec<_>>());
        Ok(bits(HEAD)? == bits(&format!("{}wte.weight", self.prefix))?)
    }

    /// The values of a tensor in our order.
    fn tensor(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let values = self.reader.read(&format!("{}{}", self.prefix, tensor.name))?;
        Ok(match linear(tensor) {
            // There it has as many columns as here rows.
            Some([rows, _]) => transposed(&values, rows),
            None => values,
        })
    }
}
