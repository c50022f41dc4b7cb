// The backward of layer and RMS normalisation, and sums over rows in a fixed order.
#include "vector.cuh"

// dx += (g - mean(g) - hat·mean(g·hat))·rstd with g = dy·weight; mean(g), which comes through the mean of the row, only
// where that was subtracted. A warp takes a row: block 128 threads, grid ceil(rows / 4).
template <bool CENTRED>
__device__ __forceinline__ void norm_backward(const elem* dy, const elem* x, const elem* weight, const float* stats,
                                              elem* dx, int rows, int width) {
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  dy += (long long)row * width, x += (long long)row * width, dx += (long long)row * width;
  float mean = stats[2 * (long long)row], rstd = stats[2 * (long long)row + 1], g_sum = 0.0f, gh_sum = 0.0f;
  const int size = Pack<elem>::SIZE;
  if (aligned(dy) && aligned(x) && aligned(weight) && aligned(dx) && width % size == 0) {
    for (int i = lane * size; i < width; i += 32 * size) {
      float d[size], v[size], w[size];
      load_pack(d, dy + i), load_pack(v, x + i), load_pack(w, weight + i);
#pragma unroll
      for (int k = 0; k < size; k++) g_sum += d[k] * w[k], gh_sum += d[k] * w[k] * ((v[k] - mean) * rstd);
    }
    g_sum = CENTRED ? warp_sum(g_sum) / width : 0.0f, gh_sum = warp_sum(gh_sum) / width;
    for (int i = lane * size; i < width; i += 32 * size) {
      float d[size], v[size], w[size], out[size];
      load_pack(d, dy + i), load_pack(v, x + i), load_pack(w, weight + i), load_pack(out, dx + i);
#pragma unroll
      for (int k = 0; k < size; k++) out[k] += (d[k] * w[k] - g_sum - (v[k] - mean) * rstd * gh_sum) * rstd;
      store_pack(dx + i, out);
    }
  } else {
    for (int i = lane; i < width; i += 32) {
      float g = to_float(dy[i]) * to_float(weight[i]);
      g_sum += g, gh_sum += g * ((to_float(x[i]) - mean) * rstd);
    }
    g_sum = CENTRED ? warp_sum(g_sum) / width : 0.0f, gh_sum = warp_sum(gh_sum) / width;
    for (int i = lane; i < width; i += 32) {
      float g = to_float(dy[i]) * to_float(weight[i]), hat = (to_float(x[i]) - mean) * rstd;
      dx[i] = from_float<elem>(to_float(dx[i]) + (g - g_sum - hat * gh_sum) * rstd);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
    layer_norm_backward(const elem* dy, const elem* x, const elem* weight, const float* stats, elem* dx, int rows,
                        int width) {
  norm_backward<true>(dy, x, weight, stats, dx, rows, width);
}

extern "C" __global__ void __launch_bounds__(128)
    rms_norm_backward(const elem* dy, const elem* x, const elem* weight, const float* stats, elem* dx, int rows, int width) {
  norm_backward<false>(dy, x, weight, stats, dx, rows, width);
}

// Sums of a chunk of rows for both parameters: partial[chunk] = (Σ dy·hat, Σ dy), each of `width`. Block: (32, 8),
// grid: (ceil(width / 32), chunks). Thread row y adds every eighth row; the eight sums meet in order.
extern "C" __global__ void __launch_bounds__(256)
    norm_partial(const elem* dy, const elem* x, const float* stats, float* partial, int rows, int width,
                       int chunk) {
  __shared__ float sums[2][8][33];
  int column = blockIdx.x * 32 + threadIdx.x, first = blockIdx.y * chunk;
  int end = first + chunk < rows ? first + chunk : rows;
  float dweight = 0.0f, dbias = 0.0f;
  if (column < width) {
    for (int row = first + threadIdx.y; row < end; row += 8) {
      long long at = (long long)row * width + column;
      float d = to_float(dy[at]);
      dweight += d * ((to_float(x[at]) - stats[2 * (long long)row]) * stats[2 * (long long)row + 1]);
      dbias += d;
    }
  }
  sums[0][threadIdx.y][threadIdx.x] = dweight, sums[1][threadIdx.y][threadIdx.x] = dbias;
  __syncthreads();
  if (threadIdx.y < 2 && column < width) {
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += sums[threadIdx.y][i][threadIdx.x];
    partial[((long long)blockIdx.y * 2 + threadIdx.y) * width + column] = sum;
  }
}
