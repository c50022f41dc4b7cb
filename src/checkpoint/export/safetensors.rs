//! Export of the tensors as a safetensors file.

use std::path::Path;

use super::{ExportedTensor, refused, write_config};
use crate::Reader;
use crate::huggingface::safetensors::Writer;
use crate::huggingface::staging::ExportStaging;
use crate::huggingface::{Exported, MODEL, checked_network, tensors};
use hpctrain_base::error::Result;
use hpctrain_nn::Network;

/// Writes the parameters of a layer-list model or a custom model to `model.safetensors` in the
/// directory `out`, which appears completely or not at all. The names are those of the checkpoint,
/// the shapes those of PyTorch; tensors of custom models are written as they are. Keeps one tensor
/// at a time in memory.
///
/// # Errors
/// Returns an error if the checkpoint is damaged, the model is a GPT or a Llama, `out` is not
/// empty, or the files cannot be written.
pub fn safetensors(reader: &mut Reader, out: &Path) -> Result<Exported> {
    let all = exported_tensors(reader)?;
    let staging = ExportStaging::new(out)?;
    let table: Vec<(String, Vec<usize>)> =
        all.iter().map(|tensor| (tensor.name.clone(), tensor.shape())).collect();
    let mut writer = Writer::create(&staging.path().join(MODEL), &table)?;
    let mut exported = Exported { tensors: all.len(), elements: 0, added: 0 };
    for tensor in &all {
        exported.elements += tensor.len() as u64;
        writer.tensor(&tensor.read(reader)?)?;
    }
    writer.finish()?;
    write_config(reader, staging.path())?;
    staging.publish()?;
    Ok(exported)
}

/// Returns the tensors of the checkpoint's model.
fn exported_tensors(reader: &Reader) -> Result<Vec<ExportedTensor>> {
    // Only the program that defines a custom model can build it, but its tensors are described.
    if reader.manifest().config.model.own.is_some() {
        let entries = reader.manifest().tensors.iter();
        let as_stored = entries.map(|(name, entry)| ExportedTensor {
            name: name.clone(),
            stored: entry.shape.clone(),
            is_convolution: false,
        });
        return Ok(as_stored.collect());
    }
    let network = checked_network(reader)?;
    match &network {
        Network::Gpt(_) | Network::Llama(_) => Err(refused(&network, "safetensors")
            .hint("use --format huggingface, which writes model.safetensors too")),
        Network::Layers(_) | Network::Custom(_) => {
            Ok(ExportedTensor::all(&network, tensors(&network)))
        }
    }
}
