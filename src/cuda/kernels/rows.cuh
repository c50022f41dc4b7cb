// Sums over rows in a fixed order: first of chunks of rows, here, then of the chunks, by `column_finish`.
#pragma once
#include "vector.cuh"

// Rows of a chunk: CHUNK_ROWS of reduce.rs.
constexpr int CHUNK = 128;
// Columns of a thread: as many as it reads at a time.
constexpr int OWN = Pack<elem>::SIZE;

// The thread's columns of a row, from `column` on; zeros beyond the width. With `by_pack`, the row is aligned and its width a
// multiple of OWN.
__device__ __forceinline__ void load_columns(float (&v)[OWN], const elem* row, int column, int width, bool by_pack) {
  if (by_pack) {
    load_pack(v, row + column);
  } else {
#pragma unroll
    for (int k = 0; k < OWN; k++) v[k] = column + k < width ? to_float(row[column + k]) : 0.0f;
  }
}

// partial[chunk][s] = Σ over the chunk's rows of the s-th term, each of `width`; add(sums, row, column) adds those of one row
// in the thread's columns. Block: (32, 8), grid: (chunks, ceil(width / (32·OWN))). Thread row y adds every eighth row; the
// eight sums meet in order.
template <int SUMS, class F>
__device__ __forceinline__ void sum_rows(float* partial, int rows, int width, F add) {
  constexpr int COLUMNS = 32 * OWN;
  __shared__ float shared[SUMS][8][COLUMNS];
  int from = blockIdx.y * COLUMNS, column = from + threadIdx.x * OWN, first = blockIdx.x * CHUNK;
  int end = first + CHUNK < rows ? first + CHUNK : rows;
  float sums[SUMS][OWN] = {};
  if (column < width) {
#pragma unroll 4
    for (int row = first + threadIdx.y; row < end; row += 8) add(sums, row, column);
  }
#pragma unroll
  for (int s = 0; s < SUMS; s++)
#pragma unroll
    for (int k = 0; k < OWN; k++) shared[s][threadIdx.y][threadIdx.x * OWN + k] = sums[s][k];
  __syncthreads();
  for (int i = threadIdx.y * 32 + threadIdx.x; i < SUMS * COLUMNS; i += 256) {
    int s = i / COLUMNS, of_block = i % COLUMNS;
    if (from + of_block >= width) continue;
    float sum = 0.0f;
#pragma unroll
    for (int y = 0; y < 8; y++) sum += shared[s][y][of_block];
    partial[((long long)blockIdx.x * SUMS + s) * width + from + of_block] = sum;
  }
}
