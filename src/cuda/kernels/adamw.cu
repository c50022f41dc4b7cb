// AdamW (Loshchilov and Hutter, 2019) over a contiguous range; the new parameters are also written to `copy` unless it
// is null. Every operation is rounded separately, without FMAs, as on the CPU: offloading the optimizer state does not
// change a bit. Grid: any; block: any.
#include "vector.cuh"

extern "C" __global__ void adamw(const float* grad, float* m, float* v, float* p, elem* copy, long long n, float rate,
                                 float root, float decay, float beta1, float beta2, float eps, float grad_scale) {
  auto update = [&](float g, float& m, float& v, float& p) {
    g = __fmul_rn(g, grad_scale);
    m = __fadd_rn(m, __fmul_rn(1.0f - beta1, g - m));
    v = __fadd_rn(v, __fmul_rn(1.0f - beta2, __fadd_rn(__fmul_rn(g, g), -v)));
    p = __fadd_rn(__fmul_rn(p, decay), -(__fmul_rn(rate, m) / __fadd_rn(__fmul_rn(sqrtf(v), root), eps)));
  };
  auto four = [&](long long i, float (&new_p)[4]) {
    float g4[4], m4[4], v4[4];
    load_pack(g4, grad + i), load_pack(m4, m + i), load_pack(v4, v + i), load_pack(new_p, p + i);
#pragma unroll
    for (int k = 0; k < 4; k++) update(g4[k], m4[k], v4[k], new_p[k]);
    store_pack(m + i, m4), store_pack(v + i, v4), store_pack(p + i, new_p);
  };
  each<elem>(
      n, aligned(grad) && aligned(m) && aligned(v) && aligned(p) && aligned(copy),
      [&](long long i) {
        float all[Pack<elem>::SIZE], new_p[4];
#pragma unroll
        for (int part = 0; part < Pack<elem>::SIZE; part += 4) {
          four(i + part, new_p);
#pragma unroll
          for (int k = 0; k < 4; k++) all[part + k] = new_p[k];
        }
        if (copy) store_pack(copy + i, all);
      },
      [&](long long i) {
        update(grad[i], m[i], v[i], p[i]);
        if (copy) copy[i] = from_float<elem>(p[i]);
      });
}
