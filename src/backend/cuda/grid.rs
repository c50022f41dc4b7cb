//! The cut of a kernel into blocks and threads.

/// Threads of a block where the kernel leaves it open.
const THREADS: u32 = 256;

/// Blocks of a grid where the kernel leaves it open, at most: enough to fill any device several times.
const MOST_BLOCKS: usize = 4096;

/// Blocks, threads of a block, and bytes of shared memory that a block gets besides those that the kernel declares.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks.
    pub blocks: (u32, u32, u32),
    /// Threads of a block.
    pub threads: (u32, u32, u32),
    /// Bytes.
    pub shared: u32,
}

impl Grid {
    /// A grid of blocks in a row.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self::plane(blocks, 1, (threads, 1, 1))
    }

    /// A grid of blocks in rows.
    pub fn plane(x: usize, y: usize, threads: (u32, u32, u32)) -> Self {
        Self { blocks: (x as u32, y as u32, 1), threads, shared: 0 }
    }

    /// For kernels that walk over `items` in strides of the grid.
    pub fn over(items: usize) -> Self {
        Self::new(items.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS), THREADS)
    }
}
