//! Hardware utilisation of training: model FLOP/s per rank, and model FLOPs utilisation (MFU) if
//! the peak of every rank's device is known.

use hpctrain_base::error::Result;
use hpctrain_comm::Group;
use hpctrain_device::Backend;
use hpctrain_nn::Network;

/// Converts throughput into rates of arithmetic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Efficiency {
    /// Model FLOPs per prediction (token or sample): [`Network::training_flops`].
    flops_per_prediction: f64,
    ranks: f64,
    /// Peak FLOP/s of all ranks together; none if it is unknown for one of them.
    peak: Option<f64>,
}

impl Efficiency {
    /// Sums the peaks of the ranks that train. Collective over these ranks. `peak` is this rank's
    /// peak in FLOP/s, if it is known.
    ///
    /// # Errors
    /// Returns an error if a message between ranks failed.
    pub fn gather<B: Backend>(
        world: &Group<B>,
        network: &Network,
        peak: Option<f64>,
    ) -> Result<Self> {
        let peaks = world.all_gather_u64(&[peak.unwrap_or(f64::NAN).to_bits()])?;
        let sum: f64 = peaks.iter().flatten().map(|bits| f64::from_bits(*bits)).sum();
        Ok(Self::new(network, world.size(), Some(sum).filter(|sum| sum.is_finite())))
    }

    /// Creates the conversion for `ranks` ranks with a total peak of `peak` FLOP/s.
    pub fn new(network: &Network, ranks: usize, peak: Option<f64>) -> Self {
        let flops_per_prediction = network.training_flops() / network.context() as f64;
        Self { flops_per_prediction, ranks: ranks as f64, peak }
    }

    /// Returns the model TFLOP/s per rank at a throughput in predictions per second.
    pub fn tflops_per_rank(&self, per_second: f64) -> f64 {
        self.flops_per_prediction * per_second / self.ranks / 1e12
    }

    /// Returns the model FLOPs utilisation, from 0 to 1, at a throughput in predictions per second;
    /// `None` without a known peak.
    pub fn mfu(&self, per_second: f64) -> Option<f64> {
        self.peak.map(|peak| self.flops_per_prediction * per_second / peak)
    }
}

/// Formats a rate: `0.0951` TFLOP/s as `95.1 GFLOP/s`, `541.2` as `541 TFLOP/s`.
pub fn readable_rate(tflops: f64) -> String {
    let (value, unit) = if tflops < 1.0 { (tflops * 1e3, "GFLOP/s") } else { (tflops, "TFLOP/s") };
    if value < 100.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_nn::gpt::Gpt;

    /// GPT-2 124M with a vocabulary padded to 50,304.
    fn gpt2() -> Network {
        Network::Gpt(Gpt {
            layers: 12,
            heads: 12,
            width: 768,
            context: 1024,
            vocabulary: 50304,
            bias: true,
            dropout: 0.0,
        })
    }

    #[test]
    fn the_published_rate_of_gpt2_has_its_mfu() {
        // 541,338 tokens/s on an H100 (docs/gpu-verification.md).
        let one = Efficiency::new(&gpt2(), 1, Some(989e12));
        let by_hand =
            6.0 * (50304.0 * 768.0 + 12.0 * 12.0 * 768.0 * 768.0) + 12.0 * 12.0 * 768.0 * 1024.0;
        assert!((one.tflops_per_rank(1e6) / (by_hand / 1e6) - 1.0).abs() < 1e-12);
        assert!((one.mfu(541_338.0).unwrap() - 0.468).abs() < 5e-4, "{:?}", one.mfu(541_338.0));
    }

    #[test]
    fn ranks_share_the_work() {
        let one = Efficiency::new(&gpt2(), 1, Some(1e15));
        let eight = Efficiency::new(&gpt2(), 8, Some(8e15));
        assert!((eight.tflops_per_rank(8e5) / one.tflops_per_rank(1e5) - 1.0).abs() < 1e-12);
        assert!((eight.mfu(8e5).unwrap() / one.mfu(1e5).unwrap() - 1.0).abs() < 1e-12);
        assert_eq!(Efficiency::new(&gpt2(), 8, None).mfu(8e5), None);
    }

    #[test]
    fn rates_read_well() {
        assert_eq!(
            [0.0951, 0.9, 41.26, 463.1].map(readable_rate),
            ["95.1 GFLOP/s", "900 GFLOP/s", "41.3 TFLOP/s", "463 TFLOP/s"]
        );
    }
}
