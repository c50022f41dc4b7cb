// Softmax cross-entropy of rows of logits, with the gradient in their place. Block: 512 threads; grid: rows.
#include "vector.cuh"

// e^x, of x ≤ 0. bf16 logits do not deserve the digits that the slower function has.
__device__ __forceinline__ float exponential(float x) {
#ifdef BF16
  return exp2_fast(x * 1.4426950408889634f);
#else
  return expf(x);
#endif
}

// The greatest value so far and the sum of exp(x - greatest): Milakov and Gimelshein, "Online normalizer calculation
// for softmax", 2018.
struct Running {
  float top, sum;
};

__device__ __forceinline__ void add_to(Running& r, float x) {
  if (x > r.top) {
    r.sum *= exponential(r.top - x);
    r.top = x;
  }
  r.sum += exponential(x - r.top);
}

__device__ __forceinline__ Running merge(Running a, Running b) {
  float top = fmaxf(a.top, b.top);
  if (top == -infinity()) return Running{top, 0.0f};
  return Running{top, a.sum * exponential(a.top - top) + b.sum * exponential(b.top - top)};
}

// `of_classes`, a factor for each class, and `of_rows`, one for each row, may be null. `smoothing` is the part of the
// target that is spread over all classes. With `keep` there are (classes + a pack's) elements of dynamic shared memory: the row is
// read once.
extern "C" __global__ void __launch_bounds__(512)
    cross_entropy(elem* logits, const unsigned* targets, const float* of_classes, const float* of_rows, float* losses,
                  int classes, float scale, float smoothing, int gradient, int keep) {
  __shared__ Running parts[16];
  extern __shared__ __align__(16) elem shared[];
  elem* row = logits + (long long)blockIdx.x * classes;
  // As aligned as the row is. A thread reads only the elements that it has kept itself.
  elem* kept = keep ? shared + (reinterpret_cast<unsigned long long>(row) & 15) / sizeof(elem) : row;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Running mine{-infinity(), 0.0f};
  each_of_row(
      row, classes, threadIdx.x, 512,
      [&](int i) {
        float v[Pack<elem>::SIZE], top = -infinity();
        load_pack(v, row + i);
        if (keep) store_pack(kept + i, v);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) top = fmaxf(top, v[k]);
        if (top > mine.top) {
          mine.sum *= exponential(mine.top - top);
          mine.top = top;
        }
        // A pack of -inf alone would make NaN of nothing.
        if (mine.top == -infinity()) return;
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) mine.sum += exponential(v[k] - mine.top);
      },
      [&](int i) {
        if (keep) kept[i] = row[i];
        add_to(mine, to_float(row[i]));
      });
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
  float weight = (of_classes ? of_classes[target] : 1.0f) * (of_rows ? of_rows[blockIdx.x] : 1.0f);
  float rest = 1.0f - smoothing, spread = smoothing / classes;
  float loss = log_sum - rest * at_target;
  if (smoothing > 0.0f) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < classes; i += 512) sum += to_float(row[i]) - all.top;
    // Of the differences from the largest: a common shift of all logits costs no digits.
    loss = logf(all.sum) - rest * (at_target - all.top) - spread * block_sum(sum);
  }
  if (threadIdx.x == 0) losses[blockIdx.x] = loss * weight;
  if (!gradient) return;
  scale *= weight;
  __syncthreads();  // all have read the target's logit
  float factor = scale / all.sum;
  each_of_row(
      row, classes, threadIdx.x, 512,
      [&](int i) {
        float v[Pack<elem>::SIZE];
        load_pack(v, kept + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++)
          v[k] = exponential(v[k] - all.top) * factor - scale * spread - (i + k == int(target) ? scale * rest : 0.0f);
        store_pack(row + i, v);
      },
      [&](int i) {
        float v = exponential(to_float(kept[i]) - all.top) * factor - scale * spread - (i == int(target) ? scale * rest : 0.0f);
        row[i] = from_float<elem>(v);
      });
}

// 1 for every row whose target is among the k largest logits, else 0. A warp takes a row: block 128 threads, grid
// ceil(rows / 4).
extern "C" __global__ void __launch_bounds__(128)
    hits(const elem* logits, const unsigned* targets, float* hits, int rows, int classes, int k) {
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  logits += (long long)row * classes;
  int target = int(targets[row]);
  float own = to_float(logits[target]), larger = 0.0f;
  for (int i = lane; i < classes; i += 32) {
    float x = to_float(logits[i]);
    // A logit that is no number is larger than all.
    bool is_less = i < target ? x < own : x <= own;
    if (i != target && !is_less) larger += 1.0f;
  }
  larger = warp_sum(larger);
  if (lane == 0) hits[row] = larger < k ? 1.0f : 0.0f;
}
