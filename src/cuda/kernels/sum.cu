// Sums and sums of squares.
#include "sum.cuh"

// partial[block] = Σ x, or Σ x² if `squares`, over a chunk. Block: 256 threads; grid: ceil(n / 16384).
extern "C" __global__ void __launch_bounds__(256) sum_partial(const float* x, double* partial, long long n, int squares) {
  sum_chunk(partial, n, [&](long long i) { return squares ? (double)x[i] * x[i] : (double)x[i]; });
}

// *out = Σ partial. Block: 256 threads; grid: 1.
extern "C" __global__ void __launch_bounds__(256) sum_finish(const double* partial, double* out, int count) {
  block_sum_f64(out, 0, count, [&](long long i) { return partial[i]; });
}
