//! From a checkpoint to a directory that `GPT2LMHeadModel.from_pretrained` reads.

use std::path::Path;

use super::config::Architecture;
use super::safetensors::Writer;
use super::staging::Staging;
use super::{CONFIG, MODEL, PREFIX, linear, shape_there, tensors, transposed};
use crate::checkpoint::Reader;
use crate::config::{Facts, resolve};
use crate::error::{Error, Result};
use crate::layout::Tensor;
use crate::nn::gpt::Gpt;

/// What an export has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    /// Tensors.
    pub tensors: usize,
    /// Their elements.
    pub elements: u64,
    /// Tensors among them that the model does not have: its biases, which are zero.
    pub added: usize,
}

/// Writes the parameters of a checkpoint to the directory `out`, which appears whole or not at all. In memory it has
/// one tensor at a time.
///
/// # Errors
/// The checkpoint is damaged, there are files in `out`, or the file system refused.
pub fn export(reader: &mut Reader, out: &Path) -> Result<Exported> {
    let gpt = network(reader)?;
    // Their network has biases whether ours has or not.
    let there = tensors(&Gpt { bias: true, ..gpt.clone() });
    let staging = Staging::new(out)?;
    let table: Vec<(String, Vec<usize>)> =
        there.iter().map(|tensor| (format!("{PREFIX}{}", tensor.name), shape_there(tensor))).collect();
    let mut writer = Writer::create(&staging.path().join(MODEL), &table)?;
    let mut exported = Exported { tensors: there.len(), elements: 0, added: 0 };
    for tensor in &there {
        let mut values = vec![0.0; tensor.len()];
        exported.elements += values.len() as u64;
        if is_left_out(tensor, &gpt) {
            exported.added += 1;
        } else {
            reader.read(&tensor.name, 0, 0..tensor.len(), &mut values)?;
        }
        match linear(tensor) {
            Some([_, columns]) => writer.tensor(&transposed(&values, columns))?,
            None => writer.tensor(&values)?,
        }
    }
    writer.finish()?;
    write_config(&staging.path().join(CONFIG), &Architecture::of(&gpt, reader.manifest().tokenizer.as_ref()))?;
    staging.publish()?;
    Ok(exported)
}

/// The network in a checkpoint.
fn network(reader: &Reader) -> Result<Gpt> {
    let mut config = reader.manifest().config.clone();
    // The layout that trained it needs other ranks than one.
    (config.parallel, config.batch.micro) = Default::default();
    let on_gpu = config.needs_gpu();
    let gpt = resolve(config, &Facts { ranks: 1, threads: 1, vocabulary: None, on_gpu })?.gpt;
    for tensor in tensors(&gpt) {
        let found = reader.manifest().tensors.get(&tensor.name).map(|entry| &entry.shape);
        if found != Some(&tensor.shape) {
            let is = found.map_or_else(|| "missing".into(), |shape| format!("{shape:?}"));
            let message = format!("{} is {is}, by the configuration {:?}", tensor.name, tensor.shape);
            return Err(
                Error::input(format!("{}: {message}", reader.dir().display())).hint("export another checkpoint")
            );
        }
    }
    Ok(gpt)
}

/// Whether our network does without a tensor of theirs.
fn is_left_out(tensor: &Tensor, gpt: &Gpt) -> bool {
    !gpt.bias && tensor.name.ends_with(".bias")
}

fn write_config(path: &Path, architecture: &Architecture) -> Result<()> {
    let text = serde_json::to_string_pretty(architecture).map_err(|e| Error::internal(e.to_string()))? + "\n";
    let written = std::fs::File::create(path).and_then(|mut file| {
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|e| Error::io("write", path, e))
}
