//! Counter-based random numbers: a value is a function of (key, counter), never of a state.
//!
//! Initial weights, dropout masks and sampled tokens are therefore independent of ranks, threads
//! and restarts.

/// Computes Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
/// 2, 3", 2011): four 32-bit words for a 128-bit counter and a 64-bit key.
#[inline(always)]
pub fn philox(counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    // Words of 64 bits, whose upper half is zero, so that vectors need not be widened for every
    // multiplication.
    const LOW: u64 = 0xFFFF_FFFF;
    let [mut c0, mut c1, mut c2, mut c3] = counter.map(u64::from);
    for _ in 0..10 {
        let a = (c0 & LOW) * 0xD251_1F53;
        let b = (c2 & LOW) * 0xCD9E_8D57;
        let [k0, k1] = key.map(u64::from);
        (c0, c1, c2, c3) = ((b >> 32) ^ c1 ^ k0, b & LOW, (a >> 32) ^ c3 ^ k1, a & LOW);
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    [c0, c1, c2, c3].map(|word| word as u32)
}

/// A stream of random words, identified by a key.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    key: [u32; 2],
}

impl Stream {
    /// Creates the stream of `key`.
    pub fn new(key: u64) -> Self {
        Self { key: [key as u32, (key >> 32) as u32] }
    }

    /// Returns words `4·block .. 4·block + 4` of the stream.
    #[inline(always)]
    pub fn block(self, block: u64) -> [u32; 4] {
        philox([block as u32, (block >> 32) as u32, 0, 0], self.key)
    }

    /// Returns `N` blocks from `first` on, transposed for vector code: element `i` has the i-th
    /// words of all blocks.
    #[inline(always)]
    pub fn blocks<const N: usize>(self, first: u64) -> [[u32; N]; 4] {
        let mut words = [[0; N]; 4];
        for i in 0..N {
            let block = self.block(first.wrapping_add(i as u64));
            for (words, word) in words.iter_mut().zip(block) {
                words[i] = word;
            }
        }
        words
    }

    /// Fills a slice with the beginning of a standard normal sequence (Box and Muller, 1958).
    pub fn fill_normal(self, out: &mut [f32]) {
        self.fill_normal_from(0, out);
    }

    /// Fills a slice with the elements of the sequence of [`Stream::fill_normal`] from `first` on.
    pub fn fill_normal_from(self, first: usize, out: &mut [f32]) {
        let before = first % 4;
        let (head, rest) = out.split_at_mut(out.len().min((4 - before) % 4));
        if !head.is_empty() {
            head.copy_from_slice(&self.normals(first as u64 / 4)[before..][..head.len()]);
        }
        let block = first.div_ceil(4) as u64;
        for (block, quad) in (block..).zip(rest.chunks_mut(4)) {
            quad.copy_from_slice(&self.normals(block)[..quad.len()]);
        }
    }

    /// Returns the normal numbers of a block.
    fn normals(self, block: u64) -> [f32; 4] {
        // In (0, 1]: the logarithm is finite.
        let unit = |word: u32| (word as f32 + 1.0) * 2f32.powi(-32);
        let words = self.block(block);
        let pair = |radius: u32, angle: u32| {
            let (sin, cos) = (std::f32::consts::TAU * unit(angle)).sin_cos();
            let radius = (-2.0 * unit(radius).ln()).sqrt();
            [radius * cos, radius * sin]
        };
        let [a, b] = pair(words[0], words[1]);
        let [c, d] = pair(words[2], words[3]);
        [a, b, c, d]
    }

    /// Returns element `index` of a uniform sequence in [0, 1).
    pub fn uniform(self, index: u64) -> f64 {
        f64::from(self.block(index)[0]) / 4_294_967_296.0
    }
}

/// Derives an independent key from a parent key and a list of names or numbers (SplitMix64
/// finaliser).
pub fn derive(key: u64, parts: &[u64]) -> u64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    parts.iter().fold(mix(key.wrapping_add(0x9E37_79B9_7F4A_7C15)), |key, &part| {
        mix(key.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ mix(part.wrapping_add(0x9E37_79B9_7F4A_7C15)))
    })
}

/// Hashes a name to a number to pass to [`derive()`] (FNV-1a).
pub fn name(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_begin_anywhere() {
        let stream = Stream::new(11);
        let mut whole = [0.0; 23];
        stream.fill_normal(&mut whole);
        for (first, len) in [(0, 23), (1, 1), (3, 9), (4, 4), (5, 2), (6, 17), (22, 1), (23, 0)] {
            let mut part = vec![0.0; len];
            stream.fill_normal_from(first, &mut part);
            assert_eq!(part, whole[first..first + len], "{first}");
        }
    }

    /// The known answers published with Random123.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normal_has_its_moments() {
        let mut values = vec![0.0; 100_001];
        Stream::new(7).fill_normal(&mut values);
        let mean = |f: fn(f64) -> f64| {
            values.iter().map(|&x| f(f64::from(x))).sum::<f64>() / values.len() as f64
        };
        assert!(mean(|x| x).abs() < 0.01 && (mean(|x| x * x) - 1.0).abs() < 0.02);
        assert!((mean(|x| x.powi(4)) - 3.0).abs() < 0.1 && values.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn derived_keys_differ() {
        let keys = [
            derive(0, &[]),
            derive(0, &[0]),
            derive(0, &[0, 0]),
            derive(0, &[1, 0]),
            derive(1, &[0]),
            name("a"),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b));
        }
    }
}
