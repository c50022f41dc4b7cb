// Sums in f64 in an order that depends on the length alone: of chunks, then of their sums.
#pragma once
#include "common.cuh"

// *out = Σ term(i), i in first..end. Block: 256 threads.
template <class F>
__device__ __forceinline__ void block_sum_f64(double* out, long long first, long long end, F term) {
  __shared__ double of_warp[8];
  double sum = 0.0;
  for (long long i = first + threadIdx.x; i < end; i += 256) sum += term(i);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0.0;
  for (int i = 0; i < 8; i++) sum += of_warp[i];
  *out = sum;
}

// partial[block] = Σ term(i) over the block's chunk of 0..n. Block: 256 threads; grid: ceil(n / 16384).
template <class F>
__device__ __forceinline__ void sum_chunk(double* partial, long long n, F term) {
  const long long chunk = 16384;  // SUM_CHUNK of reduce.rs
  long long first = blockIdx.x * chunk, end = first + chunk < n ? first + chunk : n;
  block_sum_f64(partial + blockIdx.x, first, end, term);
}
