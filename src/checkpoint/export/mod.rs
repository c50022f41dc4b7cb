//! Export of checkpoints for other programs: the tensors as safetensors in PyTorch's layout, and
//! layer-list models as ONNX graphs. The formats of GPT and Llama are in `huggingface`.
//!
//! An export has the parameters that evaluation and prediction use: the running average (EMA) if
//! the checkpoint has one. Next to the model it writes `config.json`, and `preprocessing.json` and
//! `tokenizer.json` if the checkpoint has a preprocessing and a tokenizer.

pub mod onnx;
mod safetensors;

pub use safetensors::safetensors;

use std::path::Path;

use serde::Serialize;

use crate::Reader;
use crate::huggingface::{CONFIG, TOKENIZER, json, write};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_config::{Loss, Model};
use hpctrain_nn::Network;

/// Name of the file with the preprocessing.
const PREPROCESSING: &str = "preprocessing.json";

/// The content of `config.json`.
#[derive(Serialize)]
struct ExportedConfig<'a> {
    /// The program that wrote it.
    producer: &'static str,
    version: &'static str,
    /// The number of finished steps.
    step: u64,
    /// Which values are exported: `parameters` or `ema`.
    weights: &'static str,
    model: &'a Model,
    loss: &'a Loss,
}

/// Returns which values an export has: `parameters` or `ema`.
fn weights(reader: &Reader) -> &'static str {
    if reader.inference_part() == 0 { "parameters" } else { "ema" }
}

/// Writes configuration, preprocessing and tokenizer into the directory `out`.
fn write_config(reader: &Reader, out: &Path) -> Result<()> {
    let manifest = reader.manifest();
    let config = ExportedConfig {
        producer: "hpctrain",
        version: env!("CARGO_PKG_VERSION"),
        step: manifest.step,
        weights: weights(reader),
        model: &manifest.config.model,
        loss: &manifest.config.loss,
    };
    write(&out.join(CONFIG), json(&config)?)?;
    if let Some(preprocessing) = &manifest.preprocessing {
        write(&out.join(PREPROCESSING), json(preprocessing)?)?;
    }
    if let Some(tokenizer) = &manifest.tokenizer {
        write(&out.join(TOKENIZER), tokenizer.file()?)?;
    }
    Ok(())
}

/// A tensor as it is exported.
struct ExportedTensor {
    name: String,
    /// The extent of every dimension in the checkpoint.
    stored: Vec<usize>,
    /// Whether the tensor has the filters of a convolution, which PyTorch and ONNX have with
    /// channels before rows and columns.
    is_convolution: bool,
}

impl ExportedTensor {
    /// Returns the tensors of a network. A layer-list model has filters as its only tensors with
    /// four axes.
    fn all(network: &Network, tensors: Vec<Tensor>) -> Vec<Self> {
        let is_list = matches!(network, Network::Layers(_));
        let exported = |tensor: Tensor| Self {
            is_convolution: is_list && tensor.shape.len() == 4,
            name: tensor.name,
            stored: tensor.shape,
        };
        tensors.into_iter().map(exported).collect()
    }

    /// Returns the extent of every dimension in the exported file.
    fn shape(&self) -> Vec<usize> {
        match self.stored[..] {
            [filters, rows, columns, channels] if self.is_convolution => {
                vec![filters, channels, rows, columns]
            }
            _ => self.stored.clone(),
        }
    }

    /// Returns the number of elements.
    fn len(&self) -> usize {
        self.stored.iter().product()
    }

    /// Reads the values in the order of the exported file.
    fn read(&self, reader: &mut Reader) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.len()];
        let part = reader.inference_part();
        reader.read(&self.name, part, None, 0..self.len(), &mut values)?;
        match self.stored[..] {
            [_, rows, columns, channels] if self.is_convolution => {
                Ok(channels_before_places(&values, rows * columns, channels))
            }
            _ => Ok(values),
        }
    }
}

/// Returns filters of `places` × `channels` elements with their axes exchanged.
fn channels_before_places(values: &[f32], places: usize, channels: usize) -> Vec<f32> {
    let per_filter = places * channels;
    let reordered = |filter: usize| {
        let of_channel =
            move |channel: usize| (0..places).map(move |place| place * channels + channel);
        (0..channels).flat_map(of_channel).map(move |at| filter * per_filter + at)
    };
    (0..values.len() / per_filter.max(1)).flat_map(reordered).map(|at| values[at]).collect()
}

/// Returns the error of a format that is for other models.
fn refused(network: &Network, format: &str) -> Error {
    let kind = match network {
        Network::Gpt(_) => "a GPT",
        Network::Llama(_) => "a Llama",
        Network::Layers(_) => "a layer-list model",
        Network::Custom(_) => "a custom model",
    };
    Error::input(format!("--format {format} is for layer-list models, but this is {kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_get_channels_before_rows_and_columns() {
        // Two filters of 3 places and 2 channels; the tens are places, the units channels.
        let of_filter = |filter: f32| [0., 1., 10., 11., 20., 21.].map(|x| 100. * filter + x);
        let stored = [of_filter(0.0), of_filter(1.0)].concat();
        let wanted = [0., 10., 20., 1., 11., 21.];
        let both: Vec<f32> = wanted.iter().copied().chain(wanted.map(|x| 100.0 + x)).collect();
        assert_eq!(channels_before_places(&stored, 3, 2), both);
    }
}
