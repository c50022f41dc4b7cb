// Stochastic gradient descent with momentum and coupled weight decay; `copy` and roundings as in adamw.cu.
// Grid: any; block: any.
#include "common.cuh"

extern "C" __global__ void sgd(const float* grad, float* m, float* p, elem* copy, long long n, float lr, float momentum,
                               int nesterov, float weight_decay, float grad_scale) {
  long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
    float g = __fadd_rn(__fmul_rn(grad[i], grad_scale), __fmul_rn(weight_decay, p[i]));
    m[i] = __fadd_rn(__fmul_rn(momentum, m[i]), g);
    p[i] = __fadd_rn(p[i], -__fmul_rn(lr, nesterov ? __fadd_rn(g, __fmul_rn(momentum, m[i])) : m[i]));
    if (copy) copy[i] = from_float<elem>(p[i]);
  }
}
