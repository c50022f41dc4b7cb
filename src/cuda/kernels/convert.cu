// Conversions between fp32 master weights and bf16 copies. Grid: any; block: any.
#include "vector.cuh"

// y = x, rounded to nearest even.
extern "C" __global__ void narrow(const float* x, bf16* y, long long n) {
  each<bf16>(
      n, aligned(x) && aligned(y),
      [&](long long i) {
        float low[4], high[4], all[8];
        load_pack(low, x + i), load_pack(high, x + i + 4);
#pragma unroll
        for (int k = 0; k < 4; k++) all[k] = low[k], all[k + 4] = high[k];
        store_pack(y + i, all);
      },
      [&](long long i) { y[i] = to_bf16(x[i]); });
}

// y = x.
extern "C" __global__ void widen(const bf16* x, float* y, long long n) {
  each<bf16>(
      n, aligned(x) && aligned(y),
      [&](long long i) {
        float all[8], low[4], high[4];
        load_pack(all, x + i);
#pragma unroll
        for (int k = 0; k < 4; k++) low[k] = all[k], high[k] = all[k + 4];
        store_pack(y + i, low), store_pack(y + i + 4, high);
      },
      [&](long long i) { y[i] = to_float(x[i]); });
}
