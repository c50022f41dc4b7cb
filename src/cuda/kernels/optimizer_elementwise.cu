// Elementwise optimizers over a contiguous range; `copy` and rounding as in adamw.cu. Rules with one state buffer do
// not access `second`. Grid: any; block: any.
#include "common.cuh"

// In the order of `Elementwise`.
enum Rule { ADAM, ADAGRAD, RMSPROP, LION };

// Adam: a = beta1, b = beta2, rate and root corrected. RMSProp: a = alpha, b = momentum. Lion: a = beta1, b = beta2, and
// `decay` is the factor by which a parameter is kept. Elsewhere `decay` is added to the gradient.
extern "C" __global__ void elements(const float* grad, float* first, float* second, float* p, elem* copy, long long n,
                                    int rule, float rate, float root, float decay, float a, float b, float eps,
                                    float grad_scale) {
  long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
    float g = __fmul_rn(grad[i], grad_scale), x = p[i], s = first[i];
    if (rule == LION) {
      float way = __fadd_rn(s, __fmul_rn(1.0f - a, g - s)), sign = way > 0.0f ? 1.0f : way < 0.0f ? -1.0f : 0.0f;
      x = __fadd_rn(__fmul_rn(x, decay), -__fmul_rn(rate, sign));
      first[i] = __fadd_rn(s, __fmul_rn(1.0f - b, g - s));
    } else {
      g = __fadd_rn(g, __fmul_rn(decay, x));
      float square = __fmul_rn(g, g);
      if (rule == ADAM) {
        float m = __fadd_rn(s, __fmul_rn(1.0f - a, g - s));
        float v = __fadd_rn(second[i], __fmul_rn(1.0f - b, __fadd_rn(square, -second[i])));
        x = __fadd_rn(x, -(__fmul_rn(rate, m) / __fadd_rn(__fmul_rn(sqrtf(v), root), eps)));
        first[i] = m, second[i] = v;
      } else if (rule == ADAGRAD) {
        s = __fadd_rn(s, square);
        x = __fadd_rn(x, -(__fmul_rn(rate, g) / __fadd_rn(sqrtf(s), eps)));
        first[i] = s;
      } else {
        s = __fadd_rn(s, __fmul_rn(1.0f - a, __fadd_rn(square, -s)));
        float m = __fadd_rn(__fmul_rn(b, second[i]), g / __fadd_rn(sqrtf(s), eps));
        x = __fadd_rn(x, -__fmul_rn(rate, m));
        first[i] = s, second[i] = m;
      }
    }
    p[i] = x;
    if (copy) copy[i] = from_float<elem>(x);
  }
}
