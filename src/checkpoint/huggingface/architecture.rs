//! `config.json`: which family it is of.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{gpt2, llama};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;
use hpctrain_config::Model;
use hpctrain_data::Tokenizer;
use hpctrain_nn::Network;

/// Tokens that begin and end a text: null where there are none, else a reader would take its
/// family's own for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Tokens {
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
}

impl Tokens {
    /// Those of a tokenizer.
    pub fn of(tokenizer: Option<&Tokenizer>) -> Self {
        let [bos_token_id, eos_token_id] = tokenizer.map_or([None, None], Tokenizer::ends);
        Self { bos_token_id, eos_token_id }
    }
}

/// Description of a network in `config.json`.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Architecture {
    Gpt2(gpt2::Gpt2Architecture),
    Llama(Box<llama::LlamaArchitecture>),
}

impl Architecture {
    /// The architecture of a network of ours, whose text `tokenizer` turned into token ids.
    ///
    /// # Errors
    /// It is of no family that is known there.
    pub fn of(network: &Network, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let tokens = Tokens::of(tokenizer);
        match network {
            Network::Gpt(gpt) => Ok(Self::Gpt2(gpt2::Gpt2Architecture::of(gpt, tokens))),
            Network::Llama(llama) => {
                Ok(Self::Llama(Box::new(llama::LlamaArchitecture::of(llama, tokens))))
            }
            Network::Layers(_) | Network::Own(_) => Err(unknown()),
        }
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// It is missing, or of another network than those here.
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
            Err(Error::input(format!("{}: {what}", path.display()))
                .hint("import a GPT-2 or a Llama as it is here"))
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

    /// The `[model]` section that describes it.
    pub fn model(&self) -> Model {
        match self {
            Self::Gpt2(gpt2) => gpt2.model(),
            Self::Llama(llama) => llama.model(),
        }
    }
}

/// Of networks that have no form there.
pub fn unknown() -> Error {
    Error::input("a network by layers has no form in Hugging Face's files")
        .hint("read its checkpoint with any HDF5 library: docs/checkpoint-format.md")
}
