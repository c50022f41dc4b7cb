//! From a directory that Hugging Face's `save_pretrained` wrote to a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::architecture::Architecture;
use super::safetensors::Reader;
use super::spelling::{HEAD, Spelling, transposed};
use super::staging::Staging;
use super::{CONFIG, INDEX, MODEL, tensors};
use crate::checkpoint::manifest::VERSION;
use crate::checkpoint::shard::{Extent, ShardWriter, file_name};
use crate::checkpoint::{Manifest, Origin};
use crate::config::{Config, Data, Facts, resolve};
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::layout::Tensor;
use crate::regular_files::{self, is_plain_name};
use crate::telemetry::unix_time;

/// Writes the network in the directory `from` as a checkpoint at step 0, without optimizer state, into the directory
/// `out`, which appears whole or not at all. `tokenizer` is written down for sampling. Returns the checkpoint's manifest.
///
/// # Errors
/// It is another network, tensors are missing or of another shape, or there are files in `out`.
pub fn import(from: &Path, out: &Path, tokenizer: Option<Tokenizer>) -> Result<Manifest> {
    let architecture = Architecture::read(&from.join(CONFIG))?;
    // Its training data is not known.
    let data = Data { path: String::new(), ..Data::default() };
    let config = Config { model: architecture.model(), data, ..Config::default() };
    let plan = resolve(config, &Facts { ranks: 1, threads: 1, vocabulary: None, on_gpu: false });
    let plan = plan.map_err(|e| e.at(from.join(CONFIG).display()))?;
    let vocabulary = plan.network.outputs();
    if let Some(tokenizer) = tokenizer.as_ref().filter(|tokenizer| tokenizer.vocabulary() > vocabulary) {
        let (name, ids) = (tokenizer.name(), tokenizer.vocabulary());
        return Err(Error::input(format!("the tokenizer {name} has {ids} ids, the model only {vocabulary}"))
            .hint("give the tokenizer that the model was trained with, or none"));
    }
    let tensors = tensors(&plan.network);
    let source = Source::open(from, Spelling::of(&plan.network)?, &tensors)?;

    let staging = Staging::new(out)?;
    let extent = |tensor: &Tensor| Extent {
        tensor: tensor.name.clone(),
        shape: tensor.shape.clone(),
        columns: None,
        range: 0..tensor.len(),
    };
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
        data: None,
        preprocessing: None,
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

/// Files whose tensors are those of a network.
struct Source {
    spelling: Spelling,
    readers: Vec<Reader>,
    /// The reader of every tensor there.
    places: BTreeMap<String, usize>,
    /// Prefix of our names there.
    prefix: &'static str,
}

impl Source {
    /// Opens the files in the directory `from` and checks that they have these tensors, and no others that count.
    fn open(from: &Path, spelling: Spelling, tensors: &[Tensor]) -> Result<Self> {
        let readers = files(from)?.iter().map(|name| Reader::open(&from.join(name))).collect::<Result<Vec<_>>>()?;
        let mut places = BTreeMap::new();
        for (number, reader) in readers.iter().enumerate() {
            places.extend(reader.names().into_iter().map(|name| (name, number)));
        }
        let prefix = if places.keys().any(|name| name.starts_with(spelling.prefix)) { spelling.prefix } else { "" };
        let source = Self { spelling, readers, places, prefix };
        let wrong = source.compare(tensors)?;
        if wrong.is_empty() {
            return Ok(source);
        }
        Err(Error::input(format!("{}: {}", from.join(MODEL).display(), wrong.join("; ")))
            .hint(format!("import the {MODEL} that belongs to {CONFIG}")))
    }

    /// The name of one of our tensors there.
    fn name(&self, ours: &str) -> String {
        self.spelling.name(self.prefix, ours)
    }

    /// Everything that is not as the network wants it.
    fn compare(&self, tensors: &[Tensor]) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        let wanted: BTreeMap<String, Vec<usize>> =
            tensors.iter().map(|tensor| (self.name(&tensor.name), self.spelling.shape(tensor))).collect();
        let missing: Vec<&str> =
            wanted.keys().filter(|name| !self.places.contains_key(*name)).map(String::as_str).collect();
        if !missing.is_empty() {
            wrong.push(format!("there is no tensor {}", missing.join(", ")));
        }
        for (name, shape) in &wanted {
            if let Some(found) = self.places.get(name).and_then(|&number| self.readers[number].shape(name))
                && found != shape
            {
                wrong.push(format!("{name} is {found:?}, by {CONFIG} {shape:?}"));
            }
        }
        let known = |name: &&str| wanted.contains_key(*name) || *name == HEAD || self.spelling.is_buffer(name);
        let extra: Vec<&str> = self.places.keys().map(String::as_str).filter(|name| !known(name)).collect();
        if !extra.is_empty() {
            wrong.push(format!("{} has no tensor {}", self.spelling.family, extra.join(", ")));
        }
        if self.places.contains_key(HEAD) && !wanted.contains_key(HEAD) && missing.is_empty() && !self.is_tied()? {
            wrong.push(format!("{HEAD} is not {} again", self.name(self.spelling.table)));
        }
        Ok(wrong)
    }

    fn read(&self, name: &str) -> Result<Vec<f32>> {
        let place = self.places.get(name).ok_or_else(|| Error::internal(format!("{name} was not looked for")))?;
        self.readers[*place].read(name)
    }

    /// Whether the output matrix is the token table.
    fn is_tied(&self) -> Result<bool> {
        let bits = |name: &str| Ok(self.read(name)?.into_iter().map(f32::to_bits).collect::<Vec<_>>());
        Ok(bits(HEAD)? == bits(&self.name(self.spelling.table))?)
    }

    /// The values of a tensor in our order.
    fn tensor(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let values = self.read(&self.name(&tensor.name))?;
        Ok(match self.spelling.turned(tensor) {
            // There it has as many columns as here rows.
            Some([rows, _]) => transposed(&values, rows),
            None => values,
        })
    }
}

/// Names of the files that the numbers are in: one, or those that an index names.
fn files(from: &Path) -> Result<Vec<String>> {
    let index = from.join(INDEX);
    if !index.exists() {
        let path = from.join(MODEL);
        return match path.exists() {
            true => Ok(vec![MODEL.into()]),
            false => Err(Error::input(format!("{} does not exist", path.display()))
                .hint("save the model as safetensors: model.save_pretrained(dir)")),
        };
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = regular_files::read(&index).map_err(|e| Error::io("read", &index, e))?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|e| Error::input(format!("{}: {e}", index.display())).hint("copy it again"))?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
    // An index is data of others: it names files beside it, nothing else.
    match names.iter().find(|name| !is_plain_name(name) || !from.join(name).is_file()) {
        Some(absent) => Err(Error::input(format!("{}: there is no file {absent}", index.display()))
            .hint("copy all files of the model into one directory")),
        None => Ok(names.into_iter().collect()),
    }
}
