//! `config.json`: detection of the model family.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{gpt2, llama};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;
use hpctrain_config::Model;
use hpctrain_data::Tokenizer;
use hpctrain_nn::Network;

/// The tokens that begin and end a text. Absent ones are written as null, because a reader would
/// otherwise use the defaults of the model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Tokens {
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
}

impl Tokens {
    /// Returns the tokens of a tokenizer.
    pub fn new(tokenizer: Option<&Tokenizer>) -> Self {
        let [bos_token_id, eos_token_id] = tokenizer.map_or([None, None], Tokenizer::ends);
        Self { bos_token_id, eos_token_id }
    }
}

/// The description of a network in `config.json`.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Architecture {
    Gpt2(gpt2::Gpt2Architecture),
    Llama(Box<llama::LlamaArchitecture>),
}

impl Architecture {
    /// Creates the architecture of a network whose text is tokenized by `tokenizer`.
    ///
    /// # Errors
    /// Returns an error if Hugging Face has no such model family.
    pub fn new(network: &Network, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let tokens = Tokens::new(tokenizer);
        match network {
            Network::Gpt(gpt) => Ok(Self::Gpt2(gpt2::Gpt2Architecture::new(gpt, tokens))),
            Network::Llama(llama) => {
                Ok(Self::Llama(Box::new(llama::LlamaArchitecture::new(llama, tokens))))
            }
            Network::Layers(_) | Network::Custom(_) => Err(unsupported()),
        }
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// Returns an error if the file is missing or malformed, or describes a network that hpctrain
    /// does not support.
    pub fn read(path: &Path) -> Result<Self> {
        let text = safe_open::read(path).map_err(|e| {
            Error::io("read", path, e)
                .hint("give a directory with config.json and model.safetensors")
        })?;
        #[derive(Deserialize)]
        struct Family {
            model_type: Option<String>,
            quantization_config: Option<serde_json::Value>,
        }
        let malformed = |e| {
            Error::input(format!("{}: {e}", path.display()))
                .hint("give the config.json of a GPT-2 or a Llama")
        };
        let refused = |what: String| {
            Err(Error::input(format!("{}: {what}", path.display())).hint(
                "import a GPT-2 or a Llama with the supported values, or train such a model here",
            ))
        };
        let Family { model_type, quantization_config } =
            serde_json::from_slice(&text).map_err(malformed)?;
        if let Some(quantized) = quantization_config {
            let kind = quantized
                .get("quant_method")
                .and_then(serde_json::Value::as_str)
                .unwrap_or("of an unknown kind");
            let message =
                format!("{}: quantization_config is {kind}: weights are quantized", path.display());
            return Err(Error::input(message)
                .hint("import the model that was quantized, or save it again as float32, float16 or bfloat16"));
        }
        let read = match model_type.as_deref() {
            Some("gpt2") => Self::Gpt2(serde_json::from_slice(&text).map_err(malformed)?),
            Some("llama") => Self::Llama(serde_json::from_slice(&text).map_err(malformed)?),
            Some(other) => {
                return refused(format!("model_type is {other:?}, not \"gpt2\" or \"llama\""));
            }
            None => return refused("model_type is missing".into()),
        };
        let differs = match &read {
            Self::Gpt2(gpt2) => gpt2.differs(),
            Self::Llama(llama) => llama.differs(),
        };
        differs.map_or(Ok(read), refused)
    }

    /// Returns the `[model]` section that describes the network.
    pub fn model(&self) -> Model {
        match self {
            Self::Gpt2(gpt2) => gpt2.model(),
            Self::Llama(llama) => llama.model(),
        }
    }
}

/// Returns the error for networks that Hugging Face's formats cannot describe.
pub fn unsupported() -> Error {
    Error::input("a layer-list model cannot be written in Hugging Face's formats")
        .hint("export it with --format onnx or --format safetensors")
}
