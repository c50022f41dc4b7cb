//! The order in which a run sees its samples: a pure function, so that no rank keeps state.
//!
//! Each epoch is a permutation of all samples, computed rather than stored: a Feistel network
//! over the smallest even-bit domain that holds them (Luby & Rackoff, "How to construct
//! pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17, 1988), walked
//! along its cycle until it lands on a sample (Black & Rogaway, "Ciphers with arbitrary finite
//! domains", CT-RSA 2002). A resumed run needs one integer, and the order does not depend on the
//! number of ranks.

/// More than the four rounds that theory asks for: small domains have few bits to mix.
const ROUNDS: u64 = 8;

/// The sample at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// The number of the sample.
    pub sample: u64,
    /// The number of completed passes over its data set.
    pub epoch: u64,
}

/// Maps positions of a run to samples of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    samples: u64,
    /// `None` keeps the order of the data set.
    seed: Option<u64>,
}

impl Sampler {
    /// Creates a sampler that shuffles `samples` samples anew in each epoch.
    ///
    /// # Panics
    ///
    /// If there are no samples; an open data set always has one.
    pub fn new(samples: u64, seed: u64) -> Self {
        assert!(samples > 0, "a sampler needs samples");
        Self { samples, seed: Some(seed) }
    }

    /// Creates a sampler that visits `samples` samples in the order of the data set in every epoch.
    ///
    /// # Panics
    ///
    /// If there are no samples; an open data set always has one.
    pub fn in_order(samples: u64) -> Self {
        assert!(samples > 0, "a sampler needs samples");
        Self { samples, seed: None }
    }

    /// Returns the number of samples.
    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the sample at `position`, counted from the start of the run.
    pub fn index(&self, position: u64) -> u64 {
        let epoch = position / self.samples;
        let within = position % self.samples;
        match self.seed {
            Some(seed) => permute(within, self.samples, mix(mix(seed) ^ epoch)),
            None => within,
        }
    }
}

/// Returns the image of `index` under the permutation of `0..size` chosen by `key`.
fn permute(index: u64, size: u64, key: u64) -> u64 {
    let bits = u64::BITS - (size - 1).leading_zeros();
    let half_bits = bits.div_ceil(2);
    let mut image = index;
    // The domain is less than four times the size, so four steps are expected at most; the walk
    // ends because it follows a cycle that contains `index` itself.
    loop {
        image = feistel(image, half_bits, key);
        if image < size {
            return image;
        }
    }
}

/// Computes one pass of a balanced Feistel network over `2 * half_bits` bits.
fn feistel(value: u64, half_bits: u32, key: u64) -> u64 {
    let mask = (1 << half_bits) - 1;
    let mut left = value >> half_bits;
    let mut right = value & mask;
    for round in 0..ROUNDS {
        let mixed = mix(key.wrapping_add(round) ^ mix(right)) & mask;
        (left, right) = (right, left ^ mixed);
    }
    left << half_bits | right
}

/// Computes the output function of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom
/// number generators", OOPSLA 2014).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn epoch(sampler: Sampler, samples: u64, epoch: u64) -> Vec<u64> {
        (0..samples).map(|i| sampler.index(epoch * samples + i)).collect()
    }

    #[test]
    fn every_size_up_to_2000_is_permuted() {
        for samples in 1..=2000 {
            let mut seen = epoch(Sampler::new(samples, 7), samples, 3);
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..samples), "{samples} samples");
        }
    }

    #[test]
    fn order_is_fixed_for_all_time() {
        // A resumed run must see the same samples, also after an update of the program.
        assert_eq!(epoch(Sampler::new(10, 42), 10, 0), [1, 0, 7, 6, 2, 9, 4, 5, 3, 8]);
    }

    #[test]
    fn small_sets_are_shuffled_evenly() {
        // Each of 3 samples should come first in about a third of 3000 epochs.
        let mut first = [0; 3];
        for e in 0..3000 {
            first[Sampler::new(3, 1).index(3 * e) as usize] += 1;
        }
        assert!(first.iter().all(|&n| (850..1150).contains(&n)), "{first:?}");
    }

    proptest! {
        #[test]
        fn large_sizes_stay_distinct_and_in_range(samples in 1u64 << 20..1 << 62, seed: u64) {
            let sampler = Sampler::new(samples, seed);
            let mut seen: Vec<u64> = (0..500).map(|i| sampler.index(i)).collect();
            seen.extend((samples - 500..samples).map(|i| sampler.index(i)));
            prop_assert!(seen.iter().all(|&i| i < samples));
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), 1000);
        }

        #[test]
        fn epochs_and_seeds_differ_and_calls_agree(samples in 50u64..5000, seed: u64) {
            let sampler = Sampler::new(samples, seed);
            prop_assert_eq!(epoch(sampler, samples, 0), epoch(Sampler::new(samples, seed), samples, 0));
            prop_assert_ne!(epoch(sampler, samples, 0), epoch(sampler, samples, 1));
            prop_assert_ne!(epoch(sampler, samples, 0), epoch(Sampler::new(samples, seed ^ 1), samples, 0));
        }

        #[test]
        fn in_order_repeats_the_data_set(samples in 1u64..1000, position: u64) {
            prop_assert_eq!(Sampler::in_order(samples).index(position), position % samples);
        }
    }
}
