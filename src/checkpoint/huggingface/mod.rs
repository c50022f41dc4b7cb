//! Hugging Face's directories of GPT-2: `config.json` and `model.safetensors`.
//!
//! Their tensors have the names of ours behind `transformer.`; the matrices of linear maps are [in, out] there,
//! [out, in] here. Their network always has biases, and ties the output to the token table as ours does.

mod config;
mod export;
mod import;
mod safetensors;
mod staging;

pub use export::{Exported, export};
pub use import::import;

use crate::backend::cpu::Cpu;
use crate::layout::Tensor;
use crate::nn::gpt::Gpt;

/// File with the architecture.
const CONFIG: &str = "config.json";

/// File with the numbers.
const MODEL: &str = "model.safetensors";

/// What the names of tensors begin with in a model with an output head.
const PREFIX: &str = "transformer.";

/// Key of the output matrix, which is the token table again.
const HEAD: &str = "lm_head.weight";

/// Every tensor of a network, with the names and shapes that they have here.
fn tensors(gpt: &Gpt) -> Vec<Tensor> {
    gpt.blocks::<Cpu>().iter().flat_map(|block| block.tensors()).collect()
}

/// Rows and columns of the matrix of a linear map, which is the other way round there.
fn linear(tensor: &Tensor) -> Option<[usize; 2]> {
    let maps = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"];
    match tensor.shape[..] {
        [rows, columns] if maps.iter().any(|map| tensor.name.ends_with(map)) => Some([rows, columns]),
        _ => None,
    }
}

/// The shape of a tensor there.
fn shape_there(tensor: &Tensor) -> Vec<usize> {
    linear(tensor).map_or_else(|| tensor.shape.clone(), |[rows, columns]| vec![columns, rows])
}

/// A matrix of `columns` columns, row by row, turned into its transpose.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_maps_are_turned() {
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let gpt = Gpt { layers: 1, heads: 1, width: 4, context: 8, vocabulary: 5, bias: true, dropout: 0.0 };
        let turned: Vec<String> =
            tensors(&gpt).iter().filter(|tensor| linear(tensor).is_some()).map(|tensor| tensor.name.clone()).collect();
        assert_eq!(
            turned,
            ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"]
        );
        assert_eq!(shape_there(&tensors(&gpt)[2]), [4, 12]);
    }
}
