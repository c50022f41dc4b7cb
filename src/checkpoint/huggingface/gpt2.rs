//! `config.json` of a GPT-2: the keys that describe the network, and those for which only one value
//! is supported.

use serde::{Deserialize, Serialize};

use super::architecture::Tokens;
use hpctrain_config::{LayerList, Model, ModelKind};
use hpctrain_nn::gpt::{EPSILON, Gpt};

/// The keys that determine the network's computation. Omitted keys have the defaults of
/// `transformers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpt2Architecture {
    /// The model classes.
    #[serde(default)]
    architectures: Vec<String>,
    /// The model family.
    model_type: String,
    /// The number of token ids.
    vocab_size: usize,
    /// The maximal sequence length.
    #[serde(default = "Gpt2Architecture::context")]
    n_positions: usize,
    /// The maximal sequence length under its old name.
    #[serde(default)]
    n_ctx: Option<usize>,
    /// The width of the residual stream.
    n_embd: usize,
    /// The number of blocks.
    n_layer: usize,
    /// The number of heads in a block.
    n_head: usize,
    /// The hidden width of the MLP; null means `4 * n_embd`.
    #[serde(default)]
    n_inner: Option<usize>,
    /// The nonlinearity of the MLP.
    #[serde(default = "Gpt2Architecture::activation")]
    activation_function: String,
    /// The constant added to the variance in layer norms.
    #[serde(default = "Gpt2Architecture::epsilon")]
    layer_norm_epsilon: f64,
    /// Dropout at the end of residual branches.
    #[serde(default = "Gpt2Architecture::dropout")]
    resid_pdrop: f32,
    /// Dropout after the embedding.
    #[serde(default = "Gpt2Architecture::dropout")]
    embd_pdrop: f32,
    /// Dropout of attention weights, which hpctrain does not have.
    #[serde(default = "Gpt2Architecture::dropout")]
    attn_pdrop: f32,
    /// Whether attention scores are divided by the square root of the head width.
    #[serde(default = "Gpt2Architecture::yes")]
    scale_attn_weights: bool,
    /// Whether attention scores are also divided by the number of the layer.
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
    /// Whether blocks have cross-attention.
    #[serde(default)]
    add_cross_attention: bool,
    /// Whether the LM head is the token embedding.
    #[serde(default = "Gpt2Architecture::yes")]
    tie_word_embeddings: bool,
    /// The dtype of the tensors in the file.
    #[serde(default, skip_deserializing)]
    torch_dtype: &'static str,
    /// The tokens that begin and end a text, if the tokenizer has them.
    #[serde(flatten, skip_deserializing)]
    tokens: Tokens,
}

impl Gpt2Architecture {
    fn context() -> usize {
        1024
    }

    fn activation() -> String {
        "gelu_new".into()
    }

    fn epsilon() -> f64 {
        1e-5
    }

    fn dropout() -> f32 {
        0.1
    }

    fn yes() -> bool {
        true
    }

    /// Creates the architecture of a network.
    pub fn new(gpt: &Gpt, tokens: Tokens) -> Self {
        Self {
            architectures: vec!["GPT2LMHeadModel".into()],
            model_type: "gpt2".into(),
            vocab_size: gpt.vocabulary,
            n_positions: gpt.context,
            n_ctx: Some(gpt.context),
            n_embd: gpt.width,
            n_layer: gpt.layers,
            n_head: gpt.heads,
            n_inner: None,
            activation_function: Self::activation(),
            layer_norm_epsilon: Self::epsilon(),
            resid_pdrop: gpt.dropout,
            embd_pdrop: gpt.dropout,
            attn_pdrop: 0.0,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            add_cross_attention: false,
            tie_word_embeddings: true,
            torch_dtype: "float32",
            tokens,
        }
    }

    /// Returns a description of the first value that hpctrain does not support, if any.
    pub fn differs(&self) -> Option<String> {
        let Self { n_inner, n_embd, activation_function, layer_norm_epsilon, .. } = self;
        // Both names mean GELU with the tanh approximation.
        if !["gelu_new", "gelu_pytorch_tanh"].contains(&activation_function.as_str()) {
            return Some(format!(
                "activation_function is {activation_function:?}, must be \"gelu_new\""
            ));
        }
        if *layer_norm_epsilon as f32 != EPSILON {
            return Some(format!("layer_norm_epsilon is {layer_norm_epsilon}, must be {EPSILON}"));
        }
        if let Some(inner) = n_inner.filter(|inner| Some(*inner) != n_embd.checked_mul(4)) {
            return Some(format!("n_inner is {inner}, must be four times n_embd = {n_embd}"));
        }
        let switches = [
            ("scale_attn_weights", self.scale_attn_weights, true),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, false),
            ("add_cross_attention", self.add_cross_attention, false),
            ("tie_word_embeddings", self.tie_word_embeddings, true),
        ];
        let other = switches.into_iter().find(|(_, there, here)| there != here);
        other.map(|(key, there, here)| format!("{key} is {there}, must be {here}"))
    }

    /// Returns the `[model]` section that describes the architecture.
    pub fn model(&self) -> Model {
        Model {
            kind: ModelKind::Gpt,
            layers: LayerList::Count(self.n_layer),
            heads: self.n_head,
            width: self.n_embd,
            context: self.n_positions,
            vocabulary: Some(self.vocab_size),
            bias: Some(true),
            dropout: self.resid_pdrop,
            ..Model::default()
        }
    }
}
