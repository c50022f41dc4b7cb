//! Names and layouts of tensors in Hugging Face's files.

use super::architecture::unsupported;
use hpctrain_base::error::Result;
use hpctrain_base::layout::Tensor;
use hpctrain_nn::Network;

/// The name of the LM head.
pub const HEAD: &str = "lm_head.weight";

/// The names and layouts of a model family.
#[derive(Debug, Clone, Copy)]
pub struct NameMap {
    /// The display name of the family.
    pub family: &'static str,
    /// The prefix of the tensor names in a model with an LM head.
    pub prefix: &'static str,
    /// The name of the token embedding, which is also the LM head if the two are tied.
    pub table: &'static str,
    /// Suffixes of the names of matrices that are stored as inputs × outputs in Hugging Face's
    /// files, and as outputs × inputs in hpctrain.
    turned: &'static [&'static str],
    /// Suffixes of the names of buffers in old files, which follow from the architecture.
    buffers: &'static [&'static str],
}

const GPT2: NameMap = NameMap {
    family: "GPT-2",
    prefix: "transformer.",
    table: "wte.weight",
    turned: &["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"],
    buffers: &[".attn.bias", ".attn.masked_bias"],
};

const LLAMA: NameMap = NameMap {
    family: "Llama",
    prefix: "model.",
    table: "embed_tokens.weight",
    turned: &[],
    buffers: &[".rotary_emb.inv_freq"],
};

impl NameMap {
    /// Returns the names and layouts of a network's family.
    ///
    /// # Errors
    /// Returns an error if Hugging Face has no such model family.
    pub fn for_network(network: &Network) -> Result<Self> {
        match network {
            Network::Gpt(_) => Ok(GPT2),
            Network::Llama(_) => Ok(LLAMA),
            Network::Layers(_) | Network::Custom(_) => Err(unsupported()),
        }
    }

    /// Returns the Hugging Face name of a tensor, in a file whose names begin with `prefix`.
    pub fn name(&self, prefix: &str, ours: &str) -> String {
        if ours == HEAD { ours.into() } else { format!("{prefix}{ours}") }
    }

    /// Returns the rows and columns of a matrix that is stored transposed.
    pub fn transposed_shape(&self, tensor: &Tensor) -> Option<[usize; 2]> {
        match tensor.shape[..] {
            [rows, columns] if self.turned.iter().any(|end| tensor.name.ends_with(end)) => {
                Some([rows, columns])
            }
            _ => None,
        }
    }

    /// Returns the shape of a tensor in Hugging Face's files.
    pub fn shape(&self, tensor: &Tensor) -> Vec<usize> {
        self.transposed_shape(tensor)
            .map_or_else(|| tensor.shape.clone(), |[rows, columns]| vec![columns, rows])
    }

    /// Returns true if a tensor of the file is a buffer that follows from the architecture.
    pub fn is_buffer(&self, name: &str) -> bool {
        self.buffers.iter().any(|end| name.ends_with(end))
    }
}

/// Returns the transpose of a row-major matrix with `columns` columns.
pub fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tensors;
    use super::*;
    use hpctrain_nn::gpt::Gpt;

    #[test]
    fn linear_maps_of_gpt2_are_turned() {
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let gpt = Gpt {
            layers: 1,
            heads: 1,
            width: 4,
            context: 8,
            vocabulary: 5,
            bias: true,
            dropout: 0.0,
        };
        let tensors = tensors(&Network::Gpt(gpt));
        let turned = tensors
            .iter()
            .filter(|tensor| GPT2.transposed_shape(tensor).is_some())
            .map(|tensor| &tensor.name);
        assert_eq!(
            turned.collect::<Vec<_>>(),
            [
                "h.0.attn.c_attn.weight",
                "h.0.attn.c_proj.weight",
                "h.0.mlp.c_fc.weight",
                "h.0.mlp.c_proj.weight"
            ]
        );
        assert_eq!(GPT2.shape(&tensors[2]), [4, 12]);
    }
}
