// Sums over rows in a fixed order: first of chunks of rows, then of the chunks.
#include "common.cuh"

// partial[chunk] = Σ of its rows of x. Block: (32, 8), grid: (ceil(width / 32), chunks).
extern "C" __global__ void __launch_bounds__(256)
    column_partial(const elem* x, float* partial, int rows, int width, int chunk) {
  __shared__ float sums[8][33];
  int column = blockIdx.x * 32 + threadIdx.x, first = blockIdx.y * chunk;
  int end = first + chunk < rows ? first + chunk : rows;
  float sum = 0.0f;
  if (column < width)
    for (int row = first + threadIdx.y; row < end; row += 8) sum += to_float(x[(long long)row * width + column]);
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += sums[i][threadIdx.x];
    partial[(long long)blockIdx.y * width + column] = sum;
  }
}

// out += Σ over chunks of partial, of which a chunk has `stride` elements. Block: any; grid: any.
extern "C" __global__ void column_finish(const float* partial, float* out, int chunks, int width, int stride) {
  for (int column = blockIdx.x * blockDim.x + threadIdx.x; column < width; column += gridDim.x * blockDim.x) {
    float sum = 0.0f;
    for (int chunk = 0; chunk < chunks; chunk++) sum += partial[(long long)chunk * stride + column];
    out[column] += sum;
  }
}
