//! The cut of a kernel into blocks and threads.

use hpctrain_base::error::{Error, Result};

/// Threads of a block where the kernel leaves it open.
const THREADS: u32 = 256;

/// Blocks of a grid where the kernel leaves it open, at most: enough to fill any device several
/// times.
const MOST_BLOCKS: usize = 4096;

/// Blocks, threads of a block, and bytes of shared memory that a block gets besides those that the
/// kernel declares.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks.
    pub blocks: (u32, u32, u32),
    /// Threads of a block.
    pub threads: (u32, u32, u32),
    /// Bytes.
    pub shared: u32,
}

/// Blocks of a grid that CUDA allows, in each direction.
const LIMITS: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];

impl Grid {
    /// An error if the driver would refuse it. Sizes that grow with a batch lie along x.
    ///
    /// # Errors
    /// It has more blocks than CUDA allows in a direction.
    pub fn check(&self, kernel: &str) -> Result<()> {
        let (x, y, z) = self.blocks;
        if [x, y, z].iter().zip(LIMITS).all(|(&blocks, most)| blocks <= most) {
            return Ok(());
        }
        let message = format!(
            "{kernel} on {x}×{y}×{z} blocks, where a GPU takes {}×{}×{}",
            LIMITS[0], LIMITS[1], LIMITS[2]
        );
        Err(Error::input(message).hint("set batch.micro, or the context of the model, lower"))
    }

    /// A grid of blocks in a row.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self::plane(blocks, 1, (threads, 1, 1))
    }

    /// A grid of blocks in rows.
    pub fn plane(x: usize, y: usize, threads: (u32, u32, u32)) -> Self {
        Self { blocks: (count(x), count(y), 1), threads, shared: 0 }
    }

    /// For kernels that walk over `items` in strides of the grid.
    pub fn over(items: usize) -> Self {
        Self::new(items.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS), THREADS)
    }
}

/// So many blocks, or more than any grid may have.
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
        assert!(error.starts_with("attention_forward on 1×65536×1 blocks, where"), "{error}");
        assert!(
            Grid::new(1 << 31, 32).check("k").is_err()
                && Grid::new(1 << 33, 32).check("k").is_err()
        );
        assert!(Grid { blocks: (1, 1, 65_536), ..Grid::new(1, 32) }.check("k").is_err());
    }
}
