// Sum of one share of a message over all ranks, in the order of the tree of `comm/algorithms/halving_doubling.rs`. Grid: any; block: any.

// A binary counter of partial sums: level l holds the sum of 2^l neighbours. Fewer than 2^LEVELS ranks.
#define LEVELS 8

// `own` is term `rank` of `ranks`, and becomes the sum; the other terms are at `terms` in the order of ranks, `stride` words apart.
extern "C" __global__ void fold_terms(const float* terms, float* own, long long n, long long stride, int rank, int ranks) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    float level[LEVELS];
    for (int k = 0; k < ranks; k++) {
      float sum = k == rank ? own[i] : terms[(k - (k > rank)) * stride + i];
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
    own[i] = sum;
  }
}
