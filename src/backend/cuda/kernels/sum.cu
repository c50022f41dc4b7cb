// Sums in f64, in an order that depends on the length alone.
#include "common.cuh"

// Elements that one block adds.
#define CHUNK 16384

__device__ __forceinline__ double block_sum_f64(double x) {
  __shared__ double partial[8];
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0.0;
  for (int i = 0; i < 8; i++) sum += partial[i];
  return sum;
}

// partial[block] = Σ x, or Σ x² if `squares`, over a chunk. Block: 256 threads; grid: ceil(n / CHUNK).
extern "C" __global__ void __launch_bounds__(256) sum_partial(const float* x, double* partial, long long n, int squares) {
  long long first = (long long)blockIdx.x * CHUNK, end = first + CHUNK < n ? first + CHUNK : n;
  double sum = 0.0;
  for (long long i = first + threadIdx.x; i < end; i += 256) sum += squares ? (double)x[i] * x[i] : (double)x[i];
  sum = block_sum_f64(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// *out = Σ partial. Block: 256 threads; grid: 1.
extern "C" __global__ void __launch_bounds__(256) sum_finish(const double* partial, double* out, int count) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += 256) sum += partial[i];
  sum = block_sum_f64(sum);
  if (threadIdx.x == 0) *out = sum;
}
