// LAMB (You et al., 2020) scales a tensor's step by the norm of the step that adamw.cu would take. Roundings as there.
#include "sum.cuh"

// partial[block] = Σ u² over a chunk, where adamw would take lr·u off p. Block: 256 threads; grid: ceil(n / 16384).
extern "C" __global__ void __launch_bounds__(256) step_squares(const float* grad, const float* m, const float* v,
                                                               const float* p, double* partial, long long n, float rate,
                                                               float root, float weight_decay, float beta1, float beta2,
                                                               float eps, float grad_scale) {
  sum_chunk(partial, n, [&](long long i) {
    float g = __fmul_rn(grad[i], grad_scale);
    float mean = __fadd_rn(m[i], __fmul_rn(1.0f - beta1, g - m[i]));
    float square = __fadd_rn(v[i], __fmul_rn(1.0f - beta2, __fadd_rn(__fmul_rn(g, g), -v[i])));
    float step = __fmul_rn(rate, mean) / __fadd_rn(__fmul_rn(sqrtf(square), root), eps);
    double u = __fadd_rn(step, __fmul_rn(weight_decay, p[i]));
    return u * u;
  });
}
