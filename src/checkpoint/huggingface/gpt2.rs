//! `config.json` of a GPT-2: the keys that describe our network, and those whose values are fixed
//! here.

use serde::{Deserialize, Serialize};

use super::architecture::Tokens;
use hpctrain_config::{LayerList, Model, ModelKind};
use hpctrain_nn::gpt::{EPSILON, Gpt};

/// The keys that determine the network's computation. Left out, a key has the default of
/// `transformers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpt2Architecture {
    /// Classes that read the model.
    #[serde(default)]
    architectures: Vec<String>,
    /// The family.
    model_type: String,
    /// Token ids.
    vocab_size: usize,
    /// Positions a sequence.
    #[serde(default = "Gpt2Architecture::context")]
    n_positions: usize,
    /// The same under its old name.
    #[serde(default)]
    n_ctx: Option<usize>,
    /// Width of the residual stream.
    n_embd: usize,
    /// Blocks.
    n_layer: usize,
    /// Heads a block.
    n_head: usize,
    /// Width inside the feed-forward part; null is four times the stream's.
    #[serde(default)]
    n_inner: Option<usize>,
    /// The nonlinearity there.
    #[serde(default = "Gpt2Architecture::activation")]
    activation_function: String,
    /// Added to the variance in layer norms.
    #[serde(default = "Gpt2Architecture::epsilon")]
    layer_norm_epsilon: f64,
    /// Dropout at the end of residual branches.
    #[serde(default = "Gpt2Architecture::dropout")]
    resid_pdrop: f32,
    /// Dropout after the embedding.
    #[serde(default = "Gpt2Architecture::dropout")]
    embd_pdrop: f32,
    /// Dropout of attention's weights, which our network has none of.
    #[serde(default = "Gpt2Architecture::dropout")]
    attn_pdrop: f32,
    /// Divide attention's scores by the root of a head's width.
    #[serde(default = "Gpt2Architecture::yes")]
    scale_attn_weights: bool,
    /// Divide them by the number of the layer as well.
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
    /// Attend to another sequence too.
    #[serde(default)]
    add_cross_attention: bool,
    /// The output matrix is the token table.
    #[serde(default = "Gpt2Architecture::yes")]
    tie_word_embeddings: bool,
    /// Type of the tensors in the file.
    #[serde(default, skip_deserializing)]
    torch_dtype: &'static str,
    /// Tokens that begin and end a text, if the tokenizer has some.
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

    /// The architecture of a network of ours.
    pub fn of(gpt: &Gpt, tokens: Tokens) -> Self {
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

    /// The first difference from our network, in words; none if there is none.
    pub fn differs(&self) -> Option<String> {
        let Self { n_inner, n_embd, activation_function, layer_norm_epsilon, .. } = self;
        // Two names of GELU by its tanh approximation.
        if !["gelu_new", "gelu_pytorch_tanh"].contains(&activation_function.as_str()) {
            return Some(format!(
                "activation_function is {activation_function:?}, here it is \"gelu_new\""
            ));
        }
        if *layer_norm_epsilon as f32 != EPSILON {
            return Some(format!(
                "layer_norm_epsilon is {layer_norm_epsilon}, here it is {EPSILON}"
            ));
        }
        if let Some(inner) = n_inner.filter(|inner| Some(*inner) != n_embd.checked_mul(4)) {
            return Some(format!("n_inner is {inner}, here it is four times n_embd = {n_embd}"));
        }
        let switches = [
            ("scale_attn_weights", self.scale_attn_weights, true),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx, false),
            ("add_cross_attention", self.add_cross_attention, false),
            ("tie_word_embeddings", self.tie_word_embeddings, true),
        ];
        let other = switches.into_iter().find(|(_, there, here)| there != here);
        other.map(|(key, there, here)| format!("{key} is {there}, here it is {here}"))
    }

    /// The `[model]` section that describes it.
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
