// Sum of one share of a message over all ranks, in the order of the tree of `comm/algorithms/halving_doubling.rs`. Grid: any; block: any.
#include "vector.cuh"

// A binary counter of partial sums: level l holds the sum of 2^l neighbours. Fewer than 2^LEVELS ranks.
#define LEVELS 8

// `own` is term `rank` of `ranks`, and becomes the sum; the other terms are at `terms` in the order of ranks, `stride` elements apart.
// Terms are added in float.
template <class T>
__device__ __forceinline__ void fold(const T* terms, T* own, long long n, long long stride, int rank, int ranks) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    float level[LEVELS];
    for (int k = 0; k < ranks; k++) {
      float sum = to_float(k == rank ? own[i] : terms[(k - (k > rank)) * stride + i]);
#pragma unroll
      for (int l = 0; l < LEVELS; l++) {
        if (!(k >> l & 1)) {
          level[l] = sum;
          break;
        }
        sum = level[l] + sum;
      }
    }
    // The remaining partial sums are added from the right.
    float sum = 0;
    bool any = false;
#pragma unroll
    for (int l = 0; l < LEVELS; l++) {
      if (!(ranks >> l & 1)) continue;
      sum = any ? level[l] + sum : level[l];
      any = true;
    }
    own[i] = from_float<T>(sum);
  }
}

extern "C" __global__ void fold_terms(const float* terms, float* own, long long n, long long stride, int rank, int ranks) {
  fold(terms, own, n, stride, rank, ranks);
}

// The sum is rounded to bf16.
extern "C" __global__ void fold_terms_bf16(const bf16* terms, bf16* own, long long n, long long stride, int rank, int ranks) {
  fold(terms, own, n, stride, rank, ranks);
}
