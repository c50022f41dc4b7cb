// Sums over rows.
#include "rows.cuh"

// partial[chunk] = Σ of its rows of x. Block and grid as for `sum_rows`.
extern "C" __global__ void __launch_bounds__(256) column_partial(const elem* x, float* partial, int rows, int width) {
  bool by_pack = aligned(x) && width % OWN == 0;
  sum_rows<1>(partial, rows, width, [=](float (&sums)[1][OWN], int row, int column) {
    float v[OWN];
    load_columns(v, x + (long long)row * width, column, width, by_pack);
#pragma unroll
    for (int k = 0; k < OWN; k++) sums[0][k] += v[k];
  });
}

// out += Σ over chunks of partial, of which a chunk has `stride` elements: `width` columns, and as many after them for `second`,
// unless that is null. Block: (32, a power of two up to 32), which takes 32 columns; grid: ceil(columns / 32). Thread row y adds
// the y-th part of the chunks, one after the other; then a warp adds the parts of a column, in pairs, and the pairs in pairs.
extern "C" __global__ void __launch_bounds__(1024)
    column_finish(const float* partial, float* out, float* second, int chunks, int width, int stride) {
  __shared__ float sums[32][33];
  int columns = second ? 2 * width : width, from = blockIdx.x * 32, column = from + threadIdx.x, parts = blockDim.y;
  int each = (chunks + parts - 1) / parts, first = threadIdx.y * each, end = min(first + each, chunks);
  float sum = 0.0f;
  if (column < columns) {
    // The additions keep their order; the loads do not wait for them.
#pragma unroll 8
    for (int chunk = first; chunk < end; chunk++) sum += partial[(long long)chunk * stride + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int of_block = threadIdx.y; of_block < 32 && from + of_block < columns; of_block += parts) {
    float all = warp_sum(threadIdx.x < parts ? sums[threadIdx.x][of_block] : 0.0f);
    int at = from + of_block;
    if (threadIdx.x == 0) *(at < width ? out + at : second + (at - width)) += all;
  }
}
