//! Import of a directory written by Hugging Face's `save_pretrained` as a checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::architecture::Architecture;
use super::name_map::{HEAD, NameMap, transposed};
use super::safetensors::Reader;
use super::staging::ExportStaging;
use super::{CONFIG, INDEX, MODEL, tensors};
use crate::manifest::VERSION;
use crate::shard::{Extent, ShardWriter, file_name};
use crate::{Manifest, Origin};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_base::safe_open;
use hpctrain_base::safe_open::is_plain_name;
use hpctrain_config::telemetry::unix_time;
use hpctrain_config::{Config, Data, Environment, resolve};
use hpctrain_data::Tokenizer;

/// Writes the network in the directory `from` as a checkpoint at step 0, without optimizer state,
/// into the directory `out`, which appears completely or not at all. `tokenizer` is recorded for
/// sampling. Returns the checkpoint's manifest.
///
/// # Errors
/// Returns an error if the network is not supported, if tensors are missing, of another shape or
/// not finite, or if `out` is not empty.
pub fn import(from: &Path, out: &Path, tokenizer: Option<Tokenizer>) -> Result<Manifest> {
    let architecture = Architecture::read(&from.join(CONFIG))?;
    // The training data is unknown.
    let data = Data { path: String::new(), ..Data::default() };
    let config = Config { model: architecture.model(), data, ..Config::default() };
    let plan =
        resolve(config, &Environment { ranks: 1, threads: 1, vocabulary: None, on_gpu: false });
    let plan = plan.map_err(|e| e.at(from.join(CONFIG).display()))?;
    let vocabulary = plan.network.outputs();
    if let Some(tokenizer) =
        tokenizer.as_ref().filter(|tokenizer| tokenizer.vocabulary() > vocabulary)
    {
        let name = tokenizer.name();
        let ids = tokenizer.vocabulary();
        return Err(Error::input(format!(
            "the tokenizer {name} has {ids} ids, the model only {vocabulary}"
        ))
        .hint("give the tokenizer that the model was trained with, or none"));
    }
    let tensors = tensors(&plan.network);
    let source = Source::open(from, NameMap::for_network(&plan.network)?, &tensors)?;

    let staging = ExportStaging::new(out)?;
    let extents: Vec<Extent> = tensors.iter().map(whole_extent).collect();
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
    manifest.add_files(vec![file.written().clone()])?;
    manifest.write(staging.path())?;
    staging.publish()?;
    Ok(manifest)
}

/// Returns the extent of a whole tensor.
fn whole_extent(tensor: &Tensor) -> Extent {
    Extent {
        tensor: tensor.name.clone(),
        shape: tensor.shape.clone(),
        columns: None,
        range: 0..tensor.len(),
    }
}

/// Safetensors files that contain the tensors of a network.
struct Source {
    /// The directory of the files.
    from: PathBuf,
    spelling: NameMap,
    readers: Vec<Reader>,
    /// The number of the reader of every tensor in the files.
    places: BTreeMap<String, usize>,
    /// The prefix of tensor names in the files.
    prefix: &'static str,
}

impl Source {
    /// Opens the files in the directory `from` and checks that they contain these tensors, and no
    /// unexpected ones.
    fn open(from: &Path, spelling: NameMap, tensors: &[Tensor]) -> Result<Self> {
        let Files { names, map } = files(from)?;
        let readers =
            names.iter().map(|name| Reader::open(&from.join(name))).collect::<Result<Vec<_>>>()?;
        let places = match map {
            None => readers.iter().flat_map(Reader::names).map(|name| (name, 0)).collect(),
            Some(map) => placed(from, map, &names, &readers)?,
        };
        let prefix = if places.keys().any(|name| name.starts_with(spelling.prefix)) {
            spelling.prefix
        } else {
            ""
        };
        let source = Self { from: from.to_owned(), spelling, readers, places, prefix };
        let wrong = source.compare(tensors)?;
        if wrong.is_empty() {
            return Ok(source);
        }
        let hint = match source.wrapper(tensors) {
            Some(wrapper) => {
                format!(
                    "all names begin with {wrapper:?}: save the module that it wraps, then import that"
                )
            }
            None => format!("import the {MODEL} that belongs to {CONFIG}"),
        };
        Err(Error::input(format!("{}: {}", from.join(MODEL).display(), wrong.join("; ")))
            .hint(hint))
    }

    /// Returns the prefix that a wrapper such as `torch.compile` (`_orig_mod.`) has given all
    /// names, if without it they are those of the network.
    fn wrapper(&self, tensors: &[Tensor]) -> Option<&str> {
        let ours = &tensors.first()?.name;
        let [full, bare] =
            [self.spelling.prefix, ""].map(|prefix| self.spelling.name(prefix, ours));
        let first = self.places.keys().find(|name| name.ends_with(&bare))?;
        let wrapper = first.strip_suffix(&full).or_else(|| first.strip_suffix(&bare))?;
        (!wrapper.is_empty() && self.places.keys().all(|name| name.starts_with(wrapper)))
            .then_some(wrapper)
    }

    /// Returns the name of a tensor in the files.
    fn name(&self, ours: &str) -> String {
        self.spelling.name(self.prefix, ours)
    }

    /// Returns a description of every difference from the network's tensors.
    fn compare(&self, tensors: &[Tensor]) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        let wanted: BTreeMap<String, Vec<usize>> = tensors
            .iter()
            .map(|tensor| (self.name(&tensor.name), self.spelling.shape(tensor)))
            .collect();
        let missing: Vec<&str> = wanted
            .keys()
            .filter(|name| !self.places.contains_key(*name))
            .map(String::as_str)
            .collect();
        if !missing.is_empty() {
            wrong.push(format!("there is no tensor {}", first_few(&missing)));
        }
        let mut shapes = Vec::new();
        for (name, shape) in &wanted {
            if let Some(found) =
                self.places.get(name).and_then(|&number| self.readers[number].shape(name))
                && found != shape
            {
                shapes.push(format!("{name} is {found:?}, by {CONFIG} {shape:?}"));
            }
        }
        if !shapes.is_empty() {
            let shapes: Vec<&str> = shapes.iter().map(String::as_str).collect();
            wrong.push(first_few(&shapes));
        }
        let known = |name: &&str| {
            wanted.contains_key(*name) || *name == HEAD || self.spelling.is_buffer(name)
        };
        let extra: Vec<&str> =
            self.places.keys().map(String::as_str).filter(|name| !known(name)).collect();
        if !extra.is_empty() {
            wrong.push(format!("{} has no tensor {}", self.spelling.family, first_few(&extra)));
        }
        if self.places.contains_key(HEAD)
            && !wanted.contains_key(HEAD)
            && missing.is_empty()
            && !self.is_tied()?
        {
            wrong.push(format!(
                "{HEAD} differs from {}, to which {CONFIG} ties it",
                self.name(self.spelling.table)
            ));
        }
        Ok(wrong)
    }

    fn read(&self, name: &str) -> Result<Vec<f32>> {
        let place = self
            .places
            .get(name)
            .ok_or_else(|| Error::internal(format!("unknown tensor {name}")))?;
        self.readers[*place].read(name)
    }

    /// Returns true if the LM head equals the token embedding.
    fn is_tied(&self) -> Result<bool> {
        let bits =
            |name: &str| Ok(self.read(name)?.into_iter().map(f32::to_bits).collect::<Vec<_>>());
        Ok(bits(HEAD)? == bits(&self.name(self.spelling.table))?)
    }

    /// Returns the values of a tensor in hpctrain's layout.
    fn tensor(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let name = self.name(&tensor.name);
        let values = self.read(&name)?;
        if let Some(place) = values.iter().position(|value| !value.is_finite()) {
            let value = values[place];
            let at = self.from.display();
            let count = values.iter().filter(|value| !value.is_finite()).count();
            return Err(Error::input(format!(
                "{at}: {name} has {count} of {} values that are not finite, the first of them {value} at {place}",
                values.len()
            ))
            .hint("the model is damaged, or its training diverged: import an earlier one"));
        }
        Ok(match self.spelling.transposed_shape(tensor) {
            // The file's matrix has as many columns as this one has rows.
            Some([rows, _]) => transposed(&values, rows),
            None => values,
        })
    }
}

/// Formats the first few items of a list, and the number of the others.
fn first_few(all: &[&str]) -> String {
    const SHOWN: usize = 3;
    match all.len().saturating_sub(SHOWN) {
        0 => all.join(", "),
        others => format!("{} and {others} more", all[..SHOWN].join(", ")),
    }
}

/// The files that contain the tensors.
struct Files {
    names: Vec<String>,
    /// The file of each tensor by the index; `None` for a single file.
    map: Option<BTreeMap<String, String>>,
}

/// Finds the single file, or the files that an index names. The single file takes precedence, as in
/// `transformers`: an index next to it is a remnant of an earlier model that was saved in several
/// files.
fn files(from: &Path) -> Result<Files> {
    let index = from.join(INDEX);
    let model = from.join(MODEL);
    if model.exists() {
        if index.exists() {
            log::warn!(
                "{} is not used: {MODEL} is there, too, and takes precedence as in transformers",
                index.display()
            );
        }
        return Ok(Files { names: vec![MODEL.into()], map: None });
    }
    if !index.exists() {
        return Err(Error::input(format!("{} does not exist", model.display()))
            .hint("save the model as safetensors: model.save_pretrained(dir)"));
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = safe_open::read(&index).map_err(|e| Error::io("read", &index, e))?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|e| Error::input(format!("{}: {e}", index.display())).hint("copy it again"))?;
    let names: BTreeSet<&String> = weight_map.values().collect();
    // An index may come from others: it may only name files next to it.
    match names.iter().find(|name| !is_plain_name(name) || !from.join(name).is_file()) {
        Some(absent) => {
            Err(Error::input(format!("{}: there is no file {absent}", index.display()))
                .hint("copy all files of the model into one directory"))
        }
        None => Ok(Files { names: names.into_iter().cloned().collect(), map: Some(weight_map) }),
    }
}

/// Returns the number of the reader of each tensor according to an index.
fn placed(
    from: &Path,
    map: BTreeMap<String, String>,
    names: &[String],
    readers: &[Reader],
) -> Result<BTreeMap<String, usize>> {
    let mut places = BTreeMap::new();
    for (tensor, file) in map {
        let number = names.iter().position(|name| *name == file);
        let number = number.filter(|&number| readers[number].shape(&tensor).is_some());
        let number = number.ok_or_else(|| {
            let index = from.join(INDEX);
            Error::input(format!("{}: {file} has no tensor {tensor}", index.display())).hint(
                "copy the index and all files of the model again: they are of different models",
            )
        })?;
        places.insert(tensor, number);
    }
    Ok(places)
}
