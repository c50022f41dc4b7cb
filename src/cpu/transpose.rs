//! Transposition in blocks of eight rows by eight columns.

use std::array::from_fn;
use std::ops::Range;

use super::math::simd;

/// Rows and columns of a block.
const BLOCK: usize = 8;

type Block = [[f32; BLOCK]; BLOCK];

/// Transposes some columns of `x`, whose rows have `width` elements, to rows of `y` with leading
/// dimension `stride`.
pub fn transpose(x: &[f32], width: usize, columns: Range<usize>, y: &mut [f32], stride: usize) {
    // The compiler emits no shuffles for the scalar loop, which takes twice as long.
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = pulp::x86::V3::try_new() {
        return pulp::Simd::vectorize(
            avx2,
            #[inline(always)]
            || {
                blocks(
                    x,
                    width,
                    columns,
                    y,
                    stride,
                    #[inline(always)]
                    |block| transpose_block_avx2(avx2, block),
                );
            },
        );
    }
    simd(
        #[inline(always)]
        || blocks(x, width, columns, y, stride, |block| from_fn(|i| from_fn(|j| block[j][i]))),
    );
}

/// Transposes a square matrix whose size is a multiple of the block size.
pub fn transpose_square<const N: usize>(x: &[[f32; N]; N], y: &mut [[f32; N]; N]) {
    const { assert!(N.is_multiple_of(BLOCK)) };
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = pulp::x86::V3::try_new() {
        return pulp::Simd::vectorize(
            avx2,
            #[inline(always)]
            || {
                square_blocks(
                    x,
                    y,
                    #[inline(always)]
                    |block| transpose_block_avx2(avx2, block),
                );
            },
        );
    }
    square_blocks(x, y, |block| from_fn(|i| from_fn(|j| block[j][i])));
}

/// Computes [`transpose_square`], transposing blocks with `turn`.
#[inline(always)]
fn square_blocks<const N: usize>(
    x: &[[f32; N]; N],
    y: &mut [[f32; N]; N],
    transpose_block: impl Fn(Block) -> Block,
) {
    for (band, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        for (column, y) in y.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let mut block = [[0.0; BLOCK]; BLOCK];
            for i in 0..BLOCK {
                block[i] = x[i].as_chunks().0[column];
            }
            let block = transpose_block(block);
            for i in 0..BLOCK {
                y[i].as_chunks_mut().0[band] = block[i];
            }
        }
    }
}

/// Computes [`transpose`], transposing whole blocks with `turn`.
#[inline(always)]
fn blocks(
    x: &[f32],
    width: usize,
    columns: Range<usize>,
    y: &mut [f32],
    stride: usize,
    transpose_block: impl Fn(Block) -> Block,
) {
    for (band, x) in x.chunks(BLOCK * width).enumerate() {
        let row = band * BLOCK;
        let high = x.len() / width;
        for column in columns.clone().step_by(BLOCK) {
            let wide = BLOCK.min(columns.end - column);
            let to = (column - columns.start) * stride + row;
            let from = |i: usize| x[i * width + column..].first_chunk::<BLOCK>();
            if (high, wide) == (BLOCK, BLOCK) {
                let block = transpose_block(from_fn(|i| from(i).copied().unwrap_or_default()));
                for (i, line) in block.iter().enumerate() {
                    y[to + i * stride..][..BLOCK].copy_from_slice(line);
                }
            } else {
                for (i, j) in (0..high).flat_map(|i| (0..wide).map(move |j| (i, j))) {
                    y[to + j * stride + i] = x[i * width + column + j];
                }
            }
        }
    }
}

/// Transposes a block in registers by exchanging elements, then pairs of elements, then halves of
/// rows.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_block_avx2(avx2: pulp::x86::V3, block: Block) -> Block {
    use std::arch::x86_64::__m256;
    let avx = avx2.avx;
    let rows: [__m256; BLOCK] = bytemuck::cast(block);
    let pairs: [__m256; BLOCK] = from_fn(|i| {
        let one = rows[i & 6];
        let two = rows[i | 1];
        if i % 2 == 0 { avx._mm256_unpacklo_ps(one, two) } else { avx._mm256_unpackhi_ps(one, two) }
    });
    let fours: [__m256; BLOCK] = from_fn(|i| {
        let one = pairs[i / 4 * 4 + i / 2 % 2];
        let two = pairs[i / 4 * 4 + i / 2 % 2 + 2];
        if i % 2 == 0 {
            avx._mm256_shuffle_ps::<0x44>(one, two)
        } else {
            avx._mm256_shuffle_ps::<0xee>(one, two)
        }
    });
    let columns: [__m256; BLOCK] = from_fn(|i| {
        let one = fours[i % 4];
        let two = fours[i % 4 + 4];
        if i < 4 {
            avx._mm256_permute2f128_ps::<0x20>(one, two)
        } else {
            avx._mm256_permute2f128_ps::<0x31>(one, two)
        }
    });
    bytemuck::cast(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_finds_its_place() {
        for (rows, width, columns, stride) in [
            (8, 8, 0..8, 8),
            (1, 1, 0..1, 1),
            (33, 21, 3..20, 40),
            (64, 64, 0..64, 80),
            (7, 100, 60..100, 16),
        ] {
            let x: Vec<f32> = (0..rows * width).map(|i| i as f32).collect();
            let mut y = vec![-1.0; columns.len() * stride];
            transpose(&x, width, columns.clone(), &mut y, stride);
            for (column, line) in columns.zip(y.chunks(stride)) {
                assert!(
                    line[..rows].iter().enumerate().all(|(row, y)| *y == x[row * width + column])
                );
                assert!(line[rows..].iter().all(|y| *y == -1.0));
            }
        }
    }

    #[test]
    fn squares_are_turned_over() {
        let x: [[f32; 24]; 24] = from_fn(|i| from_fn(|j| (100 * i + j) as f32));
        let mut y = [[-1.0; 24]; 24];
        transpose_square(&x, &mut y);
        assert!(
            y.iter().enumerate().all(|(i, row)| row.iter().enumerate().all(|(j, y)| *y == x[j][i]))
        );
    }
}
