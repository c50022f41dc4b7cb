//! Export of a checkpoint to a directory that `AutoModelForCausalLM.from_pretrained` reads.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;

use super::architecture::Architecture;
use super::name_map::{NameMap, transposed};
use super::safetensors::Writer;
use super::staging::ExportStaging;
use super::tokenizer::{GENERATION, GenerationConfig, SETTINGS, TOKENIZER};
use super::{CONFIG, MODEL, tensors};
use crate::Reader;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_config as config;
use hpctrain_nn::Network;
use hpctrain_nn::gpt::Gpt;

/// The counts of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    /// The number of tensors.
    pub tensors: usize,
    /// The number of their elements.
    pub elements: u64,
    /// The number of exported tensors that the model does not have: biases, written as zeros.
    pub added: usize,
}

/// Writes the parameters of a checkpoint and its tokenizer to the directory `out`, which appears
/// completely or not at all. Keeps one tensor at a time in memory.
///
/// # Errors
/// Returns an error if the checkpoint is damaged, the model has no Hugging Face format, `out` is
/// not empty, or the files cannot be written.
pub fn export(reader: &mut Reader, out: &Path) -> Result<Exported> {
    let network = checked_network(reader)?;
    let spelling = NameMap::for_network(&network)?;
    // A GPT-2 of Hugging Face always has biases.
    let there = tensors(&match &network {
        Network::Gpt(gpt) => Network::Gpt(Gpt { bias: true, ..gpt.clone() }),
        Network::Llama(_) | Network::Layers(_) | Network::Custom(_) => network.clone(),
    });
    let ours: BTreeSet<String> = tensors(&network).into_iter().map(|tensor| tensor.name).collect();
    let staging = ExportStaging::new(out)?;
    let named =
        |tensor: &Tensor| (spelling.name(spelling.prefix, &tensor.name), spelling.shape(tensor));
    let table: Vec<(String, Vec<usize>)> = there.iter().map(named).collect();
    let mut writer = Writer::create(&staging.path().join(MODEL), &table)?;
    let mut exported = Exported { tensors: there.len(), elements: 0, added: 0 };
    for tensor in &there {
        let mut values = vec![0.0; tensor.len()];
        exported.elements += values.len() as u64;
        if ours.contains(&tensor.name) {
            reader.read(
                &tensor.name,
                reader.inference_part(),
                None,
                0..tensor.len(),
                &mut values,
            )?;
        } else {
            exported.added += 1;
        }
        match spelling.transposed_shape(tensor) {
            Some([_, columns]) => writer.tensor(&transposed(&values, columns))?,
            None => writer.tensor(&values)?,
        }
    }
    writer.finish()?;
    let tokenizer = reader.manifest().tokenizer.as_ref();
    let write = |name: &str, text: String| write(&staging.path().join(name), text);
    write(CONFIG, json(&Architecture::new(&network, tokenizer)?)?)?;
    write(GENERATION, json(&GenerationConfig::new(tokenizer, network.context()))?)?;
    if let Some(tokenizer) = tokenizer {
        write(TOKENIZER, tokenizer.file()?)?;
        write(SETTINGS, tokenizer.settings(network.context())?)?;
    }
    staging.publish()?;
    Ok(exported)
}

/// Builds the network of a checkpoint and checks the shapes of its tensors.
///
/// # Errors
/// Returns an error if the configuration has no network that this program can build, or if a tensor
/// is missing or has another shape.
pub fn checked_network(reader: &Reader) -> Result<Network> {
    let network = config::network(&mut reader.manifest().config.model.clone(), None)?;
    for tensor in tensors(&network) {
        let found = reader.manifest().tensors.get(&tensor.name).map(|entry| &entry.shape);
        if found != Some(&tensor.shape) {
            let is = found.map_or_else(|| "missing".into(), |shape| format!("{shape:?}"));
            let message =
                format!("{} is {is}, by the configuration {:?}", tensor.name, tensor.shape);
            return Err(Error::input(format!("{}: {message}", reader.dir().display()))
                .hint("export another checkpoint"));
        }
    }
    Ok(network)
}

/// Returns a value as JSON over several lines.
///
/// # Errors
/// Returns an error if the value cannot be written as JSON.
pub fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(value).map_err(|e| Error::internal(e.to_string()))
}

/// Writes a text file durably.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write(path: &Path, text: String) -> Result<()> {
    let written = std::fs::File::create(path).and_then(|mut file| {
        writeln!(file, "{}", text.trim_end())?;
        file.sync_all()
    });
    written.map_err(|e| Error::io("write", path, e))
}
