//! Grid and block dimensions of kernels.

use hpctrain_base::error::{Error, Result};

/// The default number of threads per block.
const THREADS: u32 = 256;

/// The most blocks of a grid-stride kernel: enough to fill any device several times.
const MOST_BLOCKS: usize = 4096;

/// The dimensions of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// The number of blocks.
    pub blocks: (u32, u32, u32),
    /// The number of threads per block.
    pub threads: (u32, u32, u32),
    /// The bytes of dynamic shared memory per block.
    pub shared: u32,
}

/// The most blocks that CUDA allows in each dimension.
const LIMITS: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];

impl Grid {
    /// Checks that the driver accepts the grid. Sizes that grow with a batch should be along x.
    ///
    /// # Errors
    /// Returns an error if it has more blocks than CUDA allows in a dimension.
    pub fn check(&self, kernel: &str) -> Result<()> {
        let (x, y, z) = self.blocks;
        if [x, y, z].iter().zip(LIMITS).all(|(&blocks, most)| blocks <= most) {
            return Ok(());
        }
        let message = format!(
            "{kernel}: a grid of {x}×{y}×{z} blocks exceeds the limits of {}×{}×{}",
            LIMITS[0], LIMITS[1], LIMITS[2]
        );
        Err(Error::input(message).hint("reduce batch.micro or model.context"))
    }

    /// Returns true if it has no blocks.
    pub fn is_empty(&self) -> bool {
        let (x, y, z) = self.blocks;
        [x, y, z].contains(&0)
    }

    /// Creates a one-dimensional grid.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self::plane(blocks, 1, (threads, 1, 1))
    }

    /// Creates a two-dimensional grid.
    pub fn plane(x: usize, y: usize, threads: (u32, u32, u32)) -> Self {
        Self { blocks: (count(x), count(y), 1), threads, shared: 0 }
    }

    /// Creates a grid for a grid-stride loop over `items`.
    pub fn over(items: usize) -> Self {
        Self::new(items.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS), THREADS)
    }
}

/// Converts a number of blocks, saturating above any limit.
fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_beyond_the_limits_are_errors() {
        let threads = (32, 8, 1);
        assert!(Grid::plane(0x7fff_ffff, 65_535, threads).check("k").is_ok());
        let error =
            Grid::plane(1, 65_536, threads).check("attention_forward").unwrap_err().to_string();
        assert!(
            error.starts_with("attention_forward: a grid of 1×65536×1 blocks exceeds"),
            "{error}"
        );
        assert!(
            Grid::new(1 << 31, 32).check("k").is_err()
                && Grid::new(1 << 33, 32).check("k").is_err()
        );
        assert!(Grid { blocks: (1, 1, 65_536), ..Grid::new(1, 32) }.check("k").is_err());
    }
}
