// Sums over rows.
#include "rows.cuh"

// partial[chunk] = Σ of its rows of x. Block and grid as of `sum_rows`.
extern "C" __global__ void __launch_bounds__(256) column_partial(const elem* x, float* partial, int rows, int width) {
  bool by_pack = aligned(x) && width % OWN == 0;
  sum_rows<1>(partial, rows, width, [=](float (&sums)[1][OWN], int row, int column) {
    float v[OWN];
    load_columns(v, x + (long long)row * width, column, width, by_pack);
#pragma unroll
    for (int k = 0; k < OWN; k++) sums[0][k] += v[k];
  });
}

// out += Σ over chunks of partial, of which a chunk has `stride` elements. Block: (32, 8); grid: ceil(width / 32). Thread row
// y adds the y-th eighth of the chunks; the eight sums meet in order.
extern "C" __global__ void __launch_bounds__(256)
    column_finish(const float* partial, float* out, int chunks, int width, int stride) {
  __shared__ float sums[8][33];
  int column = blockIdx.x * 32 + threadIdx.x, each = (chunks + 7) / 8, first = threadIdx.y * each;
  int end = first + each < chunks ? first + each : chunks;
  float sum = 0.0f;
  if (column < width) {
    // The additions keep their order, and the loads need not wait for them.
#pragma unroll 8
    for (int chunk = first; chunk < end; chunk++) sum += partial[(long long)chunk * stride + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= width) return;
  sum = 0.0f;
#pragma unroll
  for (int y = 0; y < 8; y++) sum += sums[y][threadIdx.x];
  out[column] += sum;
}
