// Running averages over a contiguous range; `copy` and roundings as in adamw.cu. Grid: any; block: any.
#include "common.cuh"

extern "C" __global__ void approach(const float* x, float* y, elem* copy, long long n, float rate) {
  long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
    y[i] = __fadd_rn(y[i], __fmul_rn(rate, x[i] - y[i]));
    if (copy) copy[i] = from_float<elem>(y[i]);
  }
}
