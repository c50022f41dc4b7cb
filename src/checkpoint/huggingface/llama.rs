//! `config.json` of a Llama: the keys that describe our network, and those whose values are fixed here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::architecture::Tokens;
use crate::config::{LayerList, Model, ModelKind};
use crate::nn::llama::Llama;

/// The keys that determine the network's computation. Left out, a key has the default of `transformers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Architecture {
    /// Classes that read the model.
    #[serde(default)]
    architectures: Vec<String>,
    /// The family.
    model_type: String,
    /// Token ids.
    vocab_size: usize,
    /// Positions a sequence.
    #[serde(default = "Architecture::context")]
    max_position_embeddings: usize,
    /// Width of the residual stream.
    hidden_size: usize,
    /// Gates of a block.
    intermediate_size: usize,
    /// Blocks.
    num_hidden_layers: usize,
    /// Heads of queries a block.
    num_attention_heads: usize,
    /// Heads of keys and values; null is as many.
    #[serde(default)]
    num_key_value_heads: Option<usize>,
    /// Width of a head; null is the width of the stream divided by the number of heads.
    #[serde(default)]
    head_dim: Option<usize>,
    /// The nonlinearity of the gates.
    #[serde(default = "Architecture::activation")]
    hidden_act: String,
    /// Added to the mean square in norms.
    #[serde(default = "Architecture::epsilon")]
    rms_norm_eps: f64,
    /// Base of the angles of positions, unless one of the following has it.
    #[serde(default)]
    rope_theta: Option<f64>,
    /// Parameters of rotary positions under their old name.
    #[serde(default, skip_serializing)]
    rope_scaling: Option<Rope>,
    /// Parameters of rotary positions.
    #[serde(default)]
    rope_parameters: Option<Rope>,
    /// Biases in attention's linear maps.
    #[serde(default)]
    attention_bias: bool,
    /// Biases in the others.
    #[serde(default)]
    mlp_bias: bool,
    /// The output matrix is the token table.
    #[serde(default)]
    tie_word_embeddings: bool,
    /// Dropout of attention's weights, which our network has none of.
    #[serde(default)]
    attention_dropout: f32,
    /// Type of the tensors in the file.
    #[serde(default, skip_deserializing)]
    torch_dtype: &'static str,
    /// Tokens that begin and end a text, if the tokenizer has some.
    #[serde(flatten, skip_deserializing)]
    tokens: Tokens,
}

/// Parameters of rotary positions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Rope {
    #[serde(default)]
    rope_theta: Option<f64>,
    /// The scale of positions.
    #[serde(default)]
    rope_type: Option<String>,
    /// The same under its old name.
    #[serde(default, rename = "type", skip_serializing)]
    old_type: Option<String>,
    /// Parameters that are not known here.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

impl Rope {
    /// The type of positions that are not scaled.
    const PLAIN: &str = "default";

    /// The first difference from our positions, in words.
    fn differs(&self) -> Option<String> {
        let kind = self.rope_type.as_deref().or(self.old_type.as_deref()).unwrap_or(Self::PLAIN);
        if kind != Self::PLAIN {
            return Some(format!("rope_type is {kind:?}, here positions are not scaled"));
        }
        let other = self.others.iter().find(|(_, value)| !value.is_null());
        other.map(|(name, value)| format!("{name} is {value}, which is not known here"))
    }
}

impl Architecture {
    fn context() -> usize {
        2048
    }

    fn activation() -> String {
        "silu".into()
    }

    fn epsilon() -> f64 {
        1e-6
    }

    /// The architecture of a network of ours.
    pub fn of(llama: &Llama, tokens: Tokens) -> Self {
        Self {
            architectures: vec!["LlamaForCausalLM".into()],
            model_type: "llama".into(),
            vocab_size: llama.vocabulary,
            max_position_embeddings: llama.context,
            hidden_size: llama.width,
            intermediate_size: llama.hidden,
            num_hidden_layers: llama.layers,
            num_attention_heads: llama.heads,
            num_key_value_heads: Some(llama.kv_heads),
            head_dim: Some(llama.head_width()),
            hidden_act: Self::activation(),
            // The shortest decimal of the f32, not the f32's own digits.
            rms_norm_eps: llama.epsilon.to_string().parse().unwrap_or(f64::from(llama.epsilon)),
            rope_theta: Some(llama.rope_theta),
            rope_scaling: None,
            rope_parameters: Some(Rope {
                rope_theta: Some(llama.rope_theta),
                rope_type: Some(Rope::PLAIN.into()),
                old_type: None,
                others: BTreeMap::new(),
            }),
            attention_bias: false,
            mlp_bias: false,
            tie_word_embeddings: llama.tied,
            attention_dropout: 0.0,
            torch_dtype: "float32",
            tokens,
        }
    }

    /// The first difference from our network, in words; none if there is none.
    pub fn differs(&self) -> Option<String> {
        if !["silu", "swish"].contains(&self.hidden_act.as_str()) {
            return Some(format!("hidden_act is {:?}, here it is \"silu\"", self.hidden_act));
        }
        let own = self.hidden_size.checked_div(self.num_attention_heads);
        if let Some(width) = self.head_dim.filter(|width| Some(*width) != own) {
            return Some(format!("head_dim is {width}, here it is hidden_size / num_attention_heads"));
        }
        for (key, there) in [("attention_bias", self.attention_bias), ("mlp_bias", self.mlp_bias)] {
            if there {
                return Some(format!("{key} is true, here it is false"));
            }
        }
        for (key, rope) in [("rope_scaling", &self.rope_scaling), ("rope_parameters", &self.rope_parameters)] {
            if let Some(what) = rope.as_ref().and_then(Rope::differs) {
                return Some(format!("{key}: {what}"));
            }
        }
        match (theta(&self.rope_scaling), theta(&self.rope_parameters)) {
            (Some(old), Some(new)) if old != new => {
                Some(format!("rope_theta is {old} in rope_scaling and {new} in rope_parameters"))
            }
            _ => None,
        }
    }

    /// The `[model]` section that describes it.
    pub fn model(&self) -> Model {
        let rope_theta = theta(&self.rope_parameters).or(theta(&self.rope_scaling)).or(self.rope_theta);
        Model {
            kind: ModelKind::Llama,
            layers: LayerList::Count(self.num_hidden_layers),
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            width: self.hidden_size,
            hidden: Some(self.intermediate_size),
            context: self.max_position_embeddings,
            vocabulary: Some(self.vocab_size),
            rope_theta,
            norm_epsilon: Some(self.rms_norm_eps),
            tied: Some(self.tie_word_embeddings),
            ..Model::default()
        }
    }
}

/// The base of angles among parameters of rotary positions.
fn theta(rope: &Option<Rope>) -> Option<f64> {
    rope.as_ref()?.rope_theta
}
