// Softmax cross-entropy of rows of logits, with the gradient in their place. Block: 512 threads; grid: rows.
#include "vector.cuh"

// The greatest value so far and the sum of exp(x - greatest): Milakov and Gimelshein, "Online normalizer calculation
// for softmax", 2018.
struct Running {
  float top, sum;
};

__device__ __forceinline__ void add_to(Running& r, float x) {
  if (x > r.top) {
    r.sum *= expf(r.top - x);
    r.top = x;
  }
  r.sum += expf(x - r.top);
}

__device__ __forceinline__ Running merge(Running a, Running b) {
  float top = fmaxf(a.top, b.top);
  if (top == -infinity()) return Running{top, 0.0f};
  return Running{top, a.sum * expf(a.top - top) + b.sum * expf(b.top - top)};
}

extern "C" __global__ void __launch_bounds__(512) cross_entropy(elem* logits, const unsigned* targets, float* losses,
                                                                int classes, float scale, int gradient) {
  __shared__ Running parts[16];
  elem* row = logits + (long long)blockIdx.x * classes;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Running mine{-infinity(), 0.0f};
  each_of_row(
      row, classes, threadIdx.x, 512,
      [&](int i) {
        float v[Pack<elem>::SIZE], top = -infinity();
        load_pack(v, row + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) top = fmaxf(top, v[k]);
        if (top > mine.top) {
          mine.sum *= expf(mine.top - top);
          mine.top = top;
        }
        // A pack of -inf alone would make NaN of nothing.
        if (mine.top == -infinity()) return;
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) mine.sum += expf(v[k] - mine.top);
      },
      [&](int i) { add_to(mine, to_float(row[i])); });
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    Running other{__shfl_xor_sync(0xffffffffu, mine.top, apart), __shfl_xor_sync(0xffffffffu, mine.sum, apart)};
    // The lower lane first, so that both get the same bits.
    mine = lane & apart ? merge(other, mine) : merge(mine, other);
  }
  if (lane == 0) parts[warp] = mine;
  __syncthreads();
  Running all = parts[0];
  for (int i = 1; i < 16; i++) all = merge(all, parts[i]);
  unsigned target = targets[blockIdx.x];
  float at_target = to_float(row[target]), log_sum = all.top + logf(all.sum);
  if (threadIdx.x == 0) losses[blockIdx.x] = log_sum - at_target;
  if (!gradient) return;
  __syncthreads();  // all have read the target's logit
  float factor = scale / all.sum;
  each_of_row(
      row, classes, threadIdx.x, 512,
      [&](int i) {
        float v[Pack<elem>::SIZE];
        load_pack(v, row + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++)
          v[k] = expf(v[k] - all.top) * factor - (i + k == int(target) ? scale : 0.0f);
        store_pack(row + i, v);
      },
      [&](int i) {
        float v = expf(to_float(row[i]) - all.top) * factor - (i == int(target) ? scale : 0.0f);
        row[i] = from_float<elem>(v);
      });
}
