// The backward of layer and RMS normalisation, and sums over rows in a fixed order.
#include "rows.cuh"

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

// The terms of a norm's parameters for one row and column: of the weight, dy·hat; of the bias, dy.
__device__ __forceinline__ void add_terms(float& weight, float& bias, float d, float v, float mean, float rstd) {
  weight += d * ((v - mean) * rstd), bias += d;
}

// Sums of chunks of rows for both parameters: partial[chunk] = (Σ dy·hat, Σ dy). Block and grid as of `sum_rows`.
extern "C" __global__ void __launch_bounds__(256)
    norm_partial(const elem* dy, const elem* x, const float* stats, float* partial, int rows, int width) {
  bool by_pack = aligned(dy) && aligned(x) && width % OWN == 0;
  sum_rows<2>(partial, rows, width, [=](float (&sums)[2][OWN], int row, int column) {
    float d[OWN], v[OWN], mean = stats[2 * (long long)row], rstd = stats[2 * (long long)row + 1];
    load_columns(d, dy + (long long)row * width, column, width, by_pack);
    load_columns(v, x + (long long)row * width, column, width, by_pack);
#pragma unroll
    for (int k = 0; k < OWN; k++) add_terms(sums[0][k], sums[1][k], d[k], v[k], mean, rstd);
  });
}

// Both of the above in one pass, with the same sums in the same order, for aligned rows of 32·OWN·PACKS elements, which
// are read once and held in registers. A warp computes every eighth row of a chunk. Block: (32, 8), grid: chunks.
template <int PACKS>
__device__ __forceinline__ void norm_backward_in_one(const elem* dy, const elem* x, const elem* weight,
                                                     const float* stats, elem* dx, float* partial, int rows,
                                                     int centred) {
  constexpr int WIDTH = 32 * OWN * PACKS;
  __shared__ float shared[8][WIDTH];
  int first = blockIdx.x * CHUNK, end = first + CHUNK < rows ? first + CHUNK : rows;
  float sums[2][PACKS][OWN] = {};
  for (int row = first + threadIdx.y; row < end; row += 8) {
    const long long at = (long long)row * WIDTH + threadIdx.x * OWN;
    float d[PACKS][OWN], v[PACKS][OWN], out[PACKS][OWN];
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      load_pack(d[i], dy + at + 32 * OWN * i), load_pack(v[i], x + at + 32 * OWN * i);
      load_pack(out[i], dx + at + 32 * OWN * i);
    }
    float mean = stats[2 * (long long)row], rstd = stats[2 * (long long)row + 1], g_sum = 0.0f, gh_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      float w[OWN];
      load_pack(w, weight + threadIdx.x * OWN + 32 * OWN * i);
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        add_terms(sums[0][i][k], sums[1][i][k], d[i][k], v[i][k], mean, rstd);
        g_sum += d[i][k] * w[k], gh_sum += d[i][k] * w[k] * ((v[i][k] - mean) * rstd);
      }
    }
    g_sum = centred ? warp_sum(g_sum) / WIDTH : 0.0f, gh_sum = warp_sum(gh_sum) / WIDTH;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      float w[OWN];
      load_pack(w, weight + threadIdx.x * OWN + 32 * OWN * i);
#pragma unroll
      for (int k = 0; k < OWN; k++)
        out[i][k] += (d[i][k] * w[k] - g_sum - (v[i][k] - mean) * rstd * gh_sum) * rstd;
      store_pack(dx + at + 32 * OWN * i, out[i]);
    }
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    if (s > 0) __syncthreads();  // all have read the sums before
#pragma unroll
    for (int i = 0; i < PACKS; i++)
#pragma unroll
      for (int k = 0; k < OWN; k++) shared[threadIdx.y][(32 * i + threadIdx.x) * OWN + k] = sums[s][i][k];
    __syncthreads();
    for (int column = threadIdx.y * 32 + threadIdx.x; column < WIDTH; column += 256) {
      float sum = 0.0f;
#pragma unroll
      for (int y = 0; y < 8; y++) sum += shared[y][column];
      partial[((long long)blockIdx.x * 2 + s) * WIDTH + column] = sum;
    }
  }
}

#define NORM_BACKWARD(PACKS)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) norm_backward_##PACKS(                                       \
      const elem* dy, const elem* x, const elem* weight, const float* stats, elem* dx, float* partial, int rows, \
      int centred) {                                                                                             \
    norm_backward_in_one<PACKS>(dy, x, weight, stats, dx, partial, rows, centred);                               \
  }
NORM_BACKWARD(1)
NORM_BACKWARD(2)
NORM_BACKWARD(3)
NORM_BACKWARD(4)

// Both in one pass for wide rows with any alignment: each thread of a row has PACKS runs of OWN columns in registers,
// and their sums are added in the order of warps. The order depends only on the width. A block computes blockDim.y rows
// of a chunk at a time. Block: (ceil(width / (OWN·PACKS)) rounded up to warps, WIDE / that), grid: chunks.
constexpr int WIDE = 512;

template <int PACKS>
__device__ __forceinline__ void norm_backward_wide(const elem* dy, const elem* x, const elem* weight, const float* stats,
                                                   elem* dx, float* partial, int rows, int width, int centred) {
  __shared__ float of_warps[2][2][WIDE / 32];
  __shared__ float of_rows[WIDE * PACKS * OWN];
  bool by_pack = aligned(dy) && aligned(x) && aligned(weight) && aligned(dx) && width % OWN == 0;
  int first = blockIdx.x * CHUNK, end = first + CHUNK < rows ? first + CHUNK : rows;
  int warps = blockDim.x / 32, warp = threadIdx.y * warps + threadIdx.x / 32, turn = 0;
  float sums[2][PACKS][OWN] = {};
  for (int base = first; base < end; base += blockDim.y, turn ^= 1) {
    int row = base + threadIdx.y;
    const long long at = (long long)row * width;
    bool is_row = row < end;
    float d[PACKS][OWN] = {}, v[PACKS][OWN] = {}, out[PACKS][OWN] = {};
    float mean = 0.0f, rstd = 0.0f, g_sum = 0.0f, gh_sum = 0.0f;
    if (is_row) mean = stats[2 * (long long)row], rstd = stats[2 * (long long)row + 1];
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      int column = (i * blockDim.x + threadIdx.x) * OWN;
      if (!is_row || column >= width) continue;
      load_columns(d[i], dy + at, column, width, by_pack), load_columns(v[i], x + at, column, width, by_pack);
      load_columns(out[i], dx + at, column, width, by_pack);
    }
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      int column = (i * blockDim.x + threadIdx.x) * OWN;
      float w[OWN] = {};
      if (column < width) load_columns(w, weight, column, width, by_pack);
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        // Beyond the row dy is zero, and so are all terms.
        add_terms(sums[0][i][k], sums[1][i][k], d[i][k], v[i][k], mean, rstd);
        g_sum += d[i][k] * w[k], gh_sum += d[i][k] * w[k] * ((v[i][k] - mean) * rstd);
      }
    }
    g_sum = warp_sum(g_sum), gh_sum = warp_sum(gh_sum);
    if (threadIdx.x % 32 == 0) of_warps[turn][0][warp] = g_sum, of_warps[turn][1][warp] = gh_sum;
    __syncthreads();  // once a turn: the other half of the sums is written in the next one
    g_sum = 0.0f, gh_sum = 0.0f;
    for (int i = 0; i < warps; i++)
      g_sum += of_warps[turn][0][threadIdx.y * warps + i], gh_sum += of_warps[turn][1][threadIdx.y * warps + i];
    g_sum = centred ? g_sum / width : 0.0f, gh_sum = gh_sum / width;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      int column = (i * blockDim.x + threadIdx.x) * OWN;
      if (!is_row || column >= width) continue;
      float w[OWN];
      load_columns(w, weight, column, width, by_pack);
#pragma unroll
      for (int k = 0; k < OWN; k++)
        out[i][k] += (d[i][k] * w[k] - g_sum - (v[i][k] - mean) * rstd * gh_sum) * rstd;
      if (by_pack) {
        store_pack(dx + at + column, out[i]);
      } else {
#pragma unroll
        for (int k = 0; k < OWN; k++)
          if (column + k < width) dx[at + column + k] = from_float<elem>(out[i][k]);
      }
    }
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    __syncthreads();  // all have read the sums before
    int own = (threadIdx.y * blockDim.x + threadIdx.x) * PACKS * OWN, apart = blockDim.x * PACKS * OWN;
#pragma unroll
    for (int i = 0; i < PACKS; i++)
#pragma unroll
      for (int k = 0; k < OWN; k++) of_rows[own + i * OWN + k] = sums[s][i][k];
    __syncthreads();
    if (threadIdx.y > 0) continue;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      int column = (i * blockDim.x + threadIdx.x) * OWN;
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        float sum = 0.0f;
        for (int y = 0; y < blockDim.y; y++) sum += of_rows[y * apart + own + i * OWN + k];
        if (column + k < width) partial[((long long)blockIdx.x * 2 + s) * width + column + k] = sum;
      }
    }
  }
}

#define NORM_BACKWARD_WIDE(PACKS)                                                                                \
  extern "C" __global__ void __launch_bounds__(WIDE) norm_backward_wide_##PACKS(                                 \
      const elem* dy, const elem* x, const elem* weight, const float* stats, elem* dx, float* partial, int rows, \
      int width, int centred) {                                                                                  \
    norm_backward_wide<PACKS>(dy, x, weight, stats, dx, partial, rows, width, centred);                          \
  }
NORM_BACKWARD_WIDE(1)
NORM_BACKWARD_WIDE(2)
#ifndef BF16
NORM_BACKWARD_WIDE(4)
#endif
