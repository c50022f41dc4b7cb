//! Autoregressive sampling from a language model.

use hpctrain_base::error::{Error, Result};
use hpctrain_base::random::{Stream, derive, name};
use hpctrain_device::Kernels;
use hpctrain_engine::Model;
use hpctrain_nn::MicroBatch;

/// Settings of sampling.
#[derive(Debug, Clone, Copy)]
pub struct Sampling {
    /// The maximum number of tokens to draw.
    pub tokens: usize,
    /// Divides the logits; 0 selects the likeliest token (greedy decoding).
    pub temperature: f64,
    /// Draws among the `top_k` likeliest tokens only. Default: among all.
    pub top_k: Option<usize>,
    /// The seed of the random stream.
    pub seed: u64,
}

/// Continues `prompt`, which has at least one token; the model sees the last `context` tokens.
/// Stops early when `is_end`, called with the tokens drawn so far, returns true; it must return the
/// same on all ranks.
///
/// While all tokens fit into the context, each step computes only the new position, with the KV
/// cache of the others. Afterwards the window slides: positions change with every token, and each
/// step computes all of them. Each step also computes all positions if some block of the network
/// does not [support a KV cache](hpctrain_nn::Block::supports_kv_cache).
///
/// # Errors
/// Returns an error if the device or a message between ranks fails, or if the model's output is
/// NaN.
pub fn generate<B: Kernels>(
    model: &mut Model<B>,
    prompt: &[u32],
    context: usize,
    sampling: Sampling,
    mut is_end: impl FnMut(&[u32]) -> bool,
) -> Result<Vec<u32>> {
    let stream = Stream::new(derive(sampling.seed, &[name("sample")]));
    let mut tokens = prompt.to_vec();
    let mut cache = model.kv_caches(context.min(prompt.len().saturating_add(sampling.tokens)));
    let mut seen = 0;
    for index in 0..sampling.tokens {
        let cache = cache.as_mut().filter(|_| tokens.len() <= context);
        let window = match cache {
            Some(_) => &tokens[seen..],
            None => &tokens[tokens.len().saturating_sub(context)..],
        };
        let (ids, host_ids) = if model.sharded.stage().takes_embedding_rows() {
            (&[][..], window)
        } else {
            (window, &[][..])
        };
        let micro = MicroBatch::from_text(&model.backend, ids, &[], window.len(), 0)?;
        let micro = MicroBatch { samples: 1, host_ids: host_ids.to_vec(), ..micro };
        let rows = window.len();
        let output = match cache {
            Some(cache) => model.output_cached(&micro, cache)?,
            None => model.output(&micro)?,
        };
        seen = tokens.len();
        let drawn = match output {
            None => None,
            Some(logits) => {
                let last = model.last_logits(&logits, rows)?;
                Some(draw(&last, sampling, stream.uniform(index as u64))?)
            }
        };
        tokens.push(model.broadcast_from_last_stage(drawn)?);
        if is_end(&tokens[prompt.len()..]) {
            break;
        }
    }
    Ok(tokens.split_off(prompt.len()))
}

/// Draws a token id, given the logits and a uniform number in [0, 1).
fn draw(logits: &[f32], sampling: Sampling, uniform: f64) -> Result<u32> {
    if logits.iter().any(|x| x.is_nan()) {
        return Err(Error::numeric("the model's output is not a number"));
    }
    let kept =
        if sampling.temperature == 0.0 { 1 } else { sampling.top_k.unwrap_or(logits.len()).max(1) };
    let order = likeliest(logits, kept);
    let top = f64::from(logits[order[0]]);
    let temperature = if sampling.temperature == 0.0 { 1.0 } else { sampling.temperature };
    let weights: Vec<f64> =
        order.iter().map(|&i| ((f64::from(logits[i]) - top) / temperature).exp()).collect();
    let mut left = uniform * weights.iter().sum::<f64>();
    for (&i, weight) in order.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return Ok(i as u32);
        }
    }
    // Rounding can leave a small remainder after the last weight.
    Ok(order[order.len() - 1] as u32)
}

/// Returns the ids of the `kept` largest logits, the largest first; of equal ones, the lower id
/// comes first.
fn likeliest(logits: &[f32], kept: usize) -> Vec<usize> {
    let before = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if kept < order.len() {
        order.select_nth_unstable_by(kept - 1, before);
        order.truncate(kept);
    }
    order.sort_unstable_by(before);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_k: Option<usize>) -> Sampling {
        Sampling { tokens: 1, temperature, top_k, seed: 0 }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        let at = |uniform, sampling| draw(&logits, sampling, uniform).unwrap();
        assert_eq!(at(0.0, sampling(1.0, None)), 1);
        assert_eq!(at(0.7499, sampling(1.0, None)), 1);
        assert_eq!(at(0.7501, sampling(1.0, None)), 0);
        assert_eq!(at(0.9999, sampling(0.0, None)), 1);
        assert_eq!(at(0.9999, sampling(1.0, Some(1))), 1);
        assert!(draw(&[f32::NAN], sampling(1.0, None), 0.5).is_err());
    }

    #[test]
    fn the_likeliest_are_those_of_a_whole_order() {
        let logits: Vec<f32> = (0..100).map(|i| (i * 37 % 11) as f32 - 5.0).collect();
        let mut order: Vec<usize> = (0..100).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        for kept in [1, 2, 9, 10, 55, 99, 100, 1000] {
            assert_eq!(likeliest(&logits, kept), order[..kept.min(100)], "{kept}");
        }
    }
}
