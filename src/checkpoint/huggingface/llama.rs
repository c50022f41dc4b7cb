//! `config.json` of a Llama: the keys that describe the network, and those for which only one value
//! is supported.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::architecture::Tokens;
use hpctrain_config::{LayerList, Model, ModelKind, RopeScaling, RopeType};
use hpctrain_nn::FrequencyScaling;
use hpctrain_nn::llama::Llama;

/// The keys that determine the network's computation. Omitted keys have the defaults of
/// `transformers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LlamaArchitecture {
    /// The model classes.
    #[serde(default)]
    architectures: Vec<String>,
    /// The model family.
    model_type: String,
    /// The number of token ids.
    vocab_size: usize,
    /// The maximal sequence length.
    #[serde(default = "LlamaArchitecture::context")]
    max_position_embeddings: usize,
    /// The width of the residual stream.
    hidden_size: usize,
    /// The hidden width of the MLP.
    intermediate_size: usize,
    /// The number of blocks.
    num_hidden_layers: usize,
    /// The number of query heads in a block.
    num_attention_heads: usize,
    /// The number of key and value heads; null means as many as query heads.
    #[serde(default)]
    num_key_value_heads: Option<usize>,
    /// The width of a head; null means `hidden_size / num_attention_heads`.
    #[serde(default)]
    head_dim: Option<usize>,
    /// The nonlinearity of the MLP's gates.
    #[serde(default = "LlamaArchitecture::activation")]
    hidden_act: String,
    /// The constant added to the mean square in norms.
    #[serde(default = "LlamaArchitecture::epsilon")]
    rms_norm_eps: f64,
    /// The base of the rotary angles, unless one of the following has it.
    #[serde(default)]
    rope_theta: Option<f64>,
    /// Parameters of RoPE under their name in `transformers` 4, which has them only for scaled
    /// RoPE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_scaling: Option<Rope>,
    /// Parameters of RoPE under their name in `transformers` 5.
    #[serde(default)]
    rope_parameters: Option<Rope>,
    /// The original context of scaled RoPE, which `transformers` 5 prefers to the one in the
    /// parameters.
    #[serde(default, skip_serializing)]
    original_max_position_embeddings: Option<usize>,
    /// Whether attention's linear layers have biases.
    #[serde(default)]
    attention_bias: bool,
    /// Whether the MLP's linear layers have biases.
    #[serde(default)]
    mlp_bias: bool,
    /// Whether the LM head is the token embedding.
    #[serde(default)]
    tie_word_embeddings: bool,
    /// Dropout of attention weights, which hpctrain does not have.
    #[serde(default)]
    attention_dropout: f32,
    /// The dtype of the tensors in the file.
    #[serde(default, skip_deserializing)]
    torch_dtype: &'static str,
    /// The tokens that begin and end a text, if the tokenizer has them.
    #[serde(flatten, skip_deserializing)]
    tokens: Tokens,
}

/// Parameters of rotary position embeddings (RoPE).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Rope {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_theta: Option<f64>,
    /// The type of frequency scaling.
    #[serde(default)]
    rope_type: Option<String>,
    /// The type under its old name.
    #[serde(default, rename = "type", skip_serializing)]
    old_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    factor: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    low_freq_factor: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    high_freq_factor: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    original_max_position_embeddings: Option<usize>,
    /// Unsupported parameters.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

impl Rope {
    /// The supported types.
    const TYPES: [RopeType; 3] = [RopeType::Default, RopeType::Linear, RopeType::Llama3];

    /// Creates the parameters of a network.
    fn new(llama: &Llama) -> Self {
        let mut rope = Self { rope_theta: Some(llama.rope_theta), ..Self::default() };
        let rope_type = match llama.rope_scaling {
            FrequencyScaling::Unscaled => RopeType::Default,
            FrequencyScaling::Linear { factor } => {
                rope.factor = Some(factor);
                RopeType::Linear
            }
            FrequencyScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                rope.factor = Some(factor);
                rope.low_freq_factor = Some(low_freq_factor);
                rope.high_freq_factor = Some(high_freq_factor);
                rope.original_max_position_embeddings = Some(original_max_position_embeddings);
                RopeType::Llama3
            }
        };
        rope.rope_type = Some(rope_type.name().into());
        rope
    }

    /// Returns the name of the type.
    fn type_name(&self) -> &str {
        let given = self.rope_type.as_deref().or(self.old_type.as_deref());
        given.unwrap_or(RopeType::Default.name())
    }

    /// Returns the type; `None` if it is not supported.
    fn known_type(&self) -> Option<RopeType> {
        Self::TYPES.into_iter().find(|known| known.name() == self.type_name())
    }

    /// Returns a description of the first unsupported value, if any.
    fn differs(&self) -> Option<String> {
        if self.known_type().is_none() {
            let known = Self::TYPES.map(|known| format!("{:?}", known.name())).join(", ");
            return Some(format!("rope_type is {:?}, must be one of {known}", self.type_name()));
        }
        let other = self.others.iter().find(|(_, value)| !value.is_null());
        other.map(|(name, value)| format!("{name} is {value}, which is not supported"))
    }

    /// Returns a description of the first contradiction between `rope_scaling` and
    /// `rope_parameters`, if any.
    fn contradiction(old: &Self, new: &Self) -> Option<String> {
        let contradicts = |key: &str, old: String, new: String| {
            Some(format!("{key} is {old} in rope_scaling and {new} in rope_parameters"))
        };
        if old.type_name() != new.type_name() {
            return contradicts(
                "rope_type",
                format!("{:?}", old.type_name()),
                format!("{:?}", new.type_name()),
            );
        }
        if let (Some(old), Some(new)) = (old.rope_theta, new.rope_theta)
            && old != new
        {
            return contradicts("rope_theta", old.to_string(), new.to_string());
        }
        let text = |number: Option<f64>| {
            number.map_or_else(|| "missing".into(), |number| number.to_string())
        };
        let mut pairs = old.numbers().into_iter().zip(new.numbers());
        let ((key, old), (_, new)) = pairs.find(|((_, old), (_, new))| old != new)?;
        contradicts(key, text(old), text(new))
    }

    /// Returns the keys and values of the numbers that describe the scaling.
    fn numbers(&self) -> [(&'static str, Option<f64>); 4] {
        let length = self.original_max_position_embeddings.map(|length| length as f64);
        [
            ("factor", self.factor),
            ("low_freq_factor", self.low_freq_factor),
            ("high_freq_factor", self.high_freq_factor),
            ("original_max_position_embeddings", length),
        ]
    }
}

impl LlamaArchitecture {
    fn context() -> usize {
        2048
    }

    fn activation() -> String {
        "silu".into()
    }

    fn epsilon() -> f64 {
        1e-6
    }

    /// Creates the architecture of a network.
    pub fn new(llama: &Llama, tokens: Tokens) -> Self {
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
            // The shortest decimal of the f32, not its exact value.
            rms_norm_eps: llama.epsilon.to_string().parse().unwrap_or(f64::from(llama.epsilon)),
            rope_theta: Some(llama.rope_theta),
            rope_scaling: (llama.rope_scaling != FrequencyScaling::Unscaled)
                .then(|| Rope { rope_theta: None, ..Rope::new(llama) }),
            rope_parameters: Some(Rope::new(llama)),
            original_max_position_embeddings: None,
            attention_bias: false,
            mlp_bias: false,
            tie_word_embeddings: llama.tied,
            attention_dropout: 0.0,
            torch_dtype: "float32",
            tokens,
        }
    }

    /// Returns a description of the first value that hpctrain does not support, if any.
    pub fn differs(&self) -> Option<String> {
        if !["silu", "swish"].contains(&self.hidden_act.as_str()) {
            return Some(format!("hidden_act is {:?}, must be \"silu\"", self.hidden_act));
        }
        let own = self.hidden_size.checked_div(self.num_attention_heads);
        if let Some(width) = self.head_dim.filter(|width| Some(*width) != own) {
            return Some(format!("head_dim is {width}, must be hidden_size / num_attention_heads"));
        }
        for (key, there) in [("attention_bias", self.attention_bias), ("mlp_bias", self.mlp_bias)] {
            if there {
                return Some(format!("{key} is true, must be false"));
            }
        }
        for (key, rope) in
            [("rope_scaling", &self.rope_scaling), ("rope_parameters", &self.rope_parameters)]
        {
            if let Some(what) = rope.as_ref().and_then(Rope::differs) {
                return Some(format!("{key}: {what}"));
            }
        }
        if let (Some(old), Some(new)) = (&self.rope_scaling, &self.rope_parameters)
            && let Some(contradiction) = Rope::contradiction(old, new)
        {
            return Some(contradiction);
        }
        match (
            self.original_max_position_embeddings,
            self.rope().and_then(|rope| rope.original_max_position_embeddings),
        ) {
            (Some(outer), Some(inner)) if outer != inner => Some(format!(
                "original_max_position_embeddings is {outer}, but {inner} in the RoPE parameters"
            )),
            _ => None,
        }
    }

    /// Returns the RoPE parameters under whichever name they are given.
    fn rope(&self) -> Option<&Rope> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// Returns the `[model]` section that describes the architecture.
    pub fn model(&self) -> Model {
        let theta = |rope: &Option<Rope>| rope.as_ref()?.rope_theta;
        let rope_theta =
            theta(&self.rope_parameters).or(theta(&self.rope_scaling)).or(self.rope_theta);
        let rope_scaling = self.rope().map_or_else(RopeScaling::default, |rope| RopeScaling {
            rope_type: rope.known_type().unwrap_or(RopeType::Default),
            factor: rope.factor,
            low_freq_factor: rope.low_freq_factor,
            high_freq_factor: rope.high_freq_factor,
            original_max_position_embeddings: rope.original_max_position_embeddings,
        });
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
            rope_scaling,
            norm_epsilon: Some(self.rms_norm_eps),
            tied: Some(self.tie_word_embeddings),
            ..Model::default()
        }
    }
}
