// Layer normalisation (Ba et al., 2016), and RMS normalisation (Zhang and Sennrich, 2019): the same with a mean of zero.
// A warp takes a row: block 128 threads, grid ceil(rows / 4).
#include "vector.cuh"

// Normalises a row; `bias` may be null. Writes the mean and 1/deviation to `stats`.
__device__ __forceinline__ void normalise(const elem* x, const elem* weight, const elem* bias, elem* y, float* stats,
                                          int width, float epsilon, float mean) {
  int lane = threadIdx.x % 32;
  bool alike = aligned(x) && aligned(y) && aligned(weight) && (!bias || aligned(bias)) && width % Pack<elem>::SIZE == 0;
  float squares = 0.0f;
  each_of_row(
      x, width, lane, 32,
      [&](int i) {
        float v[Pack<elem>::SIZE];
        load_pack(v, x + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) squares += (v[k] - mean) * (v[k] - mean);
      },
      [&](int i) {
        float apart = to_float(x[i]) - mean;
        squares += apart * apart;
      });
  float rstd = rsqrtf(warp_sum(squares) / width + epsilon);
  auto one = [&](int i) {
    float v = (to_float(x[i]) - mean) * rstd * to_float(weight[i]);
    y[i] = from_float<elem>(bias ? v + to_float(bias[i]) : v);
  };
  if (alike) {
    for (int i = lane * Pack<elem>::SIZE; i < width; i += 32 * Pack<elem>::SIZE) {
      float v[Pack<elem>::SIZE], w[Pack<elem>::SIZE], b[Pack<elem>::SIZE] = {};
      load_pack(v, x + i), load_pack(w, weight + i);
      if (bias) load_pack(b, bias + i);
#pragma unroll
      for (int k = 0; k < Pack<elem>::SIZE; k++) v[k] = (v[k] - mean) * rstd * w[k] + b[k];
      store_pack(y + i, v);
    }
  } else {
    for (int i = lane; i < width; i += 32) one(i);
  }
  if (lane == 0) stats[0] = mean, stats[1] = rstd;
}

template <bool CENTRED>
__device__ __forceinline__ void norm(const elem* x, const elem* weight, const elem* bias, elem* y, float* stats, int rows,
                                     int width, float epsilon) {
  int row = blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= rows) return;
  x += (long long)row * width, y += (long long)row * width;
  float sum = 0.0f;
  if (CENTRED) {
    each_of_row(
        x, width, threadIdx.x % 32, 32,
        [&](int i) {
          float v[Pack<elem>::SIZE];
          load_pack(v, x + i);
#pragma unroll
          for (int k = 0; k < Pack<elem>::SIZE; k++) sum += v[k];
        },
        [&](int i) { sum += to_float(x[i]); });
    sum = warp_sum(sum);
  }
  normalise(x, weight, bias, y, stats + 2 * (long long)row, width, epsilon, sum / width);
}

// stream += x, then the norm of the stream.
template <bool CENTRED>
__device__ __forceinline__ void add_norm(const elem* x, elem* stream, const elem* weight, const elem* bias, elem* y,
                                         float* stats, int rows, int width, float epsilon) {
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  x += (long long)row * width, y += (long long)row * width, stream += (long long)row * width;
  float sum = 0.0f;
  if (aligned(x) && aligned(stream) && width % Pack<elem>::SIZE == 0) {
    for (int i = lane * Pack<elem>::SIZE; i < width; i += 32 * Pack<elem>::SIZE) {
      float a[Pack<elem>::SIZE], s[Pack<elem>::SIZE];
      load_pack(a, x + i), load_pack(s, stream + i);
#pragma unroll
      for (int k = 0; k < Pack<elem>::SIZE; k++) s[k] += a[k];
      store_pack(stream + i, s);
      // The stored values are normalised.
      load_pack(s, stream + i);
#pragma unroll
      for (int k = 0; k < Pack<elem>::SIZE; k++) sum += s[k];
    }
  } else {
    for (int i = lane; i < width; i += 32) {
      stream[i] = from_float<elem>(to_float(stream[i]) + to_float(x[i]));
      sum += to_float(stream[i]);
    }
  }
  __syncwarp();
  float mean = CENTRED ? warp_sum(sum) / width : 0.0f;
  normalise(stream, weight, bias, y, stats + 2 * (long long)row, width, epsilon, mean);
}

extern "C" __global__ void __launch_bounds__(128) layer_norm(const elem* x, const elem* weight, const elem* bias, elem* y,
                                                             float* stats, int rows, int width, float epsilon) {
  norm<true>(x, weight, bias, y, stats, rows, width, epsilon);
}

extern "C" __global__ void __launch_bounds__(128) rms_norm(const elem* x, const elem* weight, const elem* bias, elem* y,
                                                           float* stats, int rows, int width, float epsilon) {
  norm<false>(x, weight, bias, y, stats, rows, width, epsilon);
}

extern "C" __global__ void __launch_bounds__(128)
    add_layer_norm(const elem* x, elem* stream, const elem* weight, const elem* bias, elem* y, float* stats, int rows,
                   int width, float epsilon) {
  add_norm<true>(x, stream, weight, bias, y, stats, rows, width, epsilon);
}

extern "C" __global__ void __launch_bounds__(128)
    add_rms_norm(const elem* x, elem* stream, const elem* weight, const elem* bias, elem* y, float* stats, int rows,
                 int width, float epsilon) {
  add_norm<false>(x, stream, weight, bias, y, stats, rows, width, epsilon);
}
