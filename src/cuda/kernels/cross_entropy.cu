// Softmax cross-entropy of rows of logits, which are overwritten by the gradient. Block: 512 threads; grid: rows. Rows
// of `classes` elements are `stride` elements apart; padding is neither read nor written.
#include "vector.cuh"

// e^x for x ≤ 0. bf16 logits do not need the precision of the slower function.
__device__ __forceinline__ float exponential(float x) {
#ifdef BF16
  return exp2_fast(x * 1.4426950408889634f);
#else
  return expf(x);
#endif
}

// The lowest finite number instead of -inf: exp(x - greatest) is then 0 for logits of -inf, even if all are -inf.
__device__ __forceinline__ float lowest() { return __uint_as_float(0xff7fffffu); }

// The greatest value so far and the sum of exp(x - greatest) (Milakov and Gimelshein, "Online normalizer calculation
// for softmax", 2018).
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
  return Running{top, a.sum * exponential(a.top - top) + b.sum * exponential(b.top - top)};
}

// Returns the values of a row, with the same bits in every thread of a block of 512. Calls `pack(i, v)` with the
// elements from i on and `one(i)` for single elements, once for each that the thread reads.
template <class P, class S>
__device__ __forceinline__ Running of_row(const elem* row, int classes, P pack, S one) {
  __shared__ Running parts[16];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Running mine{lowest(), 0.0f};
  each_of_row(
      row, classes, threadIdx.x, 512,
      [&](int i) {
        float v[Pack<elem>::SIZE], top = lowest();
        load_pack(v, row + i);
        pack(i, v);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) top = fmaxf(top, v[k]);
        if (top > mine.top) {
          mine.sum *= exponential(mine.top - top);
          mine.top = top;
        }
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) mine.sum += exponential(v[k] - mine.top);
      },
      [&](int i) {
        one(i);
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
  return all;
}

// `of_classes`, a weight for each class, and `of_rows`, one for each row, may be null. `smoothing` is the fraction of
// the target that is spread over all classes. With `keep` the dynamic shared memory holds (classes + a pack's)
// elements, and the row is read once.
extern "C" __global__ void __launch_bounds__(512)
    cross_entropy(elem* logits, const unsigned* targets, const float* of_classes, const float* of_rows, float* losses,
                  int classes, int stride, float scale, float smoothing, int gradient, int keep) {
  extern __shared__ __align__(16) elem shared[];
  elem* row = logits + (long long)blockIdx.x * stride;
  // With the alignment of the row. For the gradient a thread reads only the elements that it has stored itself.
  elem* kept = keep ? shared + (reinterpret_cast<unsigned long long>(row) & 15) / sizeof(elem) : row;
  Running all = of_row(
      row, classes,
      [&](int i, const float (&v)[Pack<elem>::SIZE]) {
        if (keep) store_pack(kept + i, v);
      },
      [&](int i) {
        if (keep) kept[i] = row[i];
      });
  unsigned target = targets[blockIdx.x];
  float at_target = to_float(row[target]), log_sum = all.top + logf(all.sum);
  float weight = (of_classes ? of_classes[target] : 1.0f) * (of_rows ? of_rows[blockIdx.x] : 1.0f);
  float rest = 1.0f - smoothing, spread = smoothing / classes;
  float loss = log_sum - rest * at_target;
  if (smoothing > 0.0f) {
    float sum = 0.0f;
    // The last element was stored before the barrier in `of_row`.
    for (int i = threadIdx.x; i < classes; i += 512) sum += to_float(kept[i]) - all.top;
    // Computed from differences to the largest: a common shift of all logits loses no precision.
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

// Computes the statistics of each row over some classes, from class `first` on, that the losses need: LogitsPart::STATS
// numbers.
extern "C" __global__ void __launch_bounds__(512)
    softmax_part(const elem* logits, const unsigned* targets, float* stats, int classes, int stride, int first) {
  const elem* row = logits + (long long)blockIdx.x * stride;
  float sum = 0.0f;
  // Packs are summed before they are added to the sum, which rounds less often.
  Running all = of_row(
      row, classes,
      [&](int, const float (&v)[Pack<elem>::SIZE]) {
        float of_pack = 0.0f;
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) of_pack += v[k];
        sum += of_pack;
      },
      [&](int i) { sum += to_float(row[i]); });
  sum = block_sum(sum);
  if (threadIdx.x > 0) return;
  unsigned column = targets[blockIdx.x] - unsigned(first);
  stats += 4ll * blockIdx.x;
  stats[0] = all.top, stats[1] = all.sum;
  stats[2] = column < unsigned(classes) ? to_float(row[column]) : 0.0f;
  stats[3] = sum;
}

// Like cross_entropy, with the logits of `classes` classes of `all_classes`, from `first` on, and the statistics of
// softmax_part for each of the `parts`. Every thread merges them in the same order, so that all parts compute the same
// bits of the losses.
extern "C" __global__ void __launch_bounds__(512)
    cross_entropy_part(const float* stats, elem* logits, const unsigned* targets, const float* of_classes,
                       const float* of_rows, float* losses, int parts, int classes, int stride, int first,
                       int all_classes, float scale, float smoothing, int gradient) {
  Running all{lowest(), 0.0f};
  float at_target = 0.0f, sum = 0.0f;
  for (int part = 0; part < parts; part++) {
    const float* of_part = stats + 4ll * ((long long)part * gridDim.x + blockIdx.x);
    all = merge(all, Running{of_part[0], of_part[1]});
    at_target += of_part[2], sum += of_part[3];
  }
  unsigned target = targets[blockIdx.x];
  float weight = (of_classes ? of_classes[target] : 1.0f) * (of_rows ? of_rows[blockIdx.x] : 1.0f);
  float rest = 1.0f - smoothing, spread = smoothing / all_classes;
  float loss = logf(all.sum) - rest * (at_target - all.top);
  if (smoothing > 0.0f) loss -= spread * fmaf(-float(all_classes), all.top, sum);
  if (threadIdx.x == 0) losses[blockIdx.x] = loss * weight;
  if (!gradient) return;
  scale *= weight;
  elem* row = logits + (long long)blockIdx.x * stride;
  unsigned column = target - unsigned(first);
  float factor = scale / all.sum;
  each_of_row(
      row, classes, threadIdx.x, 512,
      [&](int i) {
        float v[Pack<elem>::SIZE];
        load_pack(v, row + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++)
          v[k] = exponential(v[k] - all.top) * factor - scale * spread - (unsigned(i + k) == column ? scale * rest : 0.0f);
        store_pack(row + i, v);
      },
      [&](int i) {
        float v = exponential(to_float(row[i]) - all.top) * factor - scale * spread -
                  (unsigned(i) == column ? scale * rest : 0.0f);
        row[i] = from_float<elem>(v);
      });
}

// 1 for every row whose target is among the k largest logits, else 0. A warp takes a row: block 128 threads, grid
// ceil(rows / 4).
extern "C" __global__ void __launch_bounds__(128)
    hits(const elem* logits, const unsigned* targets, float* hits, int rows, int classes, int stride, int k) {
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  logits += (long long)row * stride;
  int target = int(targets[row]);
  float own = to_float(logits[target]), larger = 0.0f;
  for (int i = lane; i < classes; i += 32) {
    float x = to_float(logits[i]);
    // NaN counts as larger than all logits.
    bool is_less = i < target ? x < own : x <= own;
    if (i != target && !is_less) larger += 1.0f;
  }
  larger = warp_sum(larger);
  if (lane == 0) hits[row] = larger < k ? 1.0f : 0.0f;
}
