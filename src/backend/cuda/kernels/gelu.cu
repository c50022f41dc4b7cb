// GELU in its tanh form (Hendrycks and Gimpel, 2016). Grid: any; block: any.
#include "vector.cuh"

// tanh(√(2/π)·(x + 0.044715 x³)), and its argument's derivative by x.
__device__ __forceinline__ float inner_tanh(float x, float& slope) {
  const float root = 0.7978845608028654f, cube = 0.044715f;
  slope = root * (1.0f + 3.0f * cube * x * x);
  return tanhf(root * (x + cube * x * x * x));
}

__device__ __forceinline__ float gelu_of(float x) {
  float slope;
  return 0.5f * x * (1.0f + inner_tanh(x, slope));
}

__device__ __forceinline__ float gelu_slope(float x) {
  float slope, t = inner_tanh(x, slope);
  // Far out the square of x is infinite where 1 - t² is zero.
  float bend = t * t < 1.0f ? 0.5f * x * (1.0f - t * t) * slope : 0.0f;
  return 0.5f * (1.0f + t) + bend;
}

extern "C" __global__ void gelu(const elem* x, elem* y, long long n) {
  each<elem>(
      n, aligned(x) && aligned(y),
      [&](long long i) {
        float v[Pack<elem>::SIZE];
        load_pack(v, x + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) v[k] = gelu_of(v[k]);
        store_pack(y + i, v);
      },
      [&](long long i) { y[i] = from_float<elem>(gelu_of(to_float(x[i]))); });
}

// dy *= gelu'(x), in place.
extern "C" __global__ void gelu_backward(const elem* x, elem* dy, long long n) {
  each<elem>(
      n, aligned(x) && aligned(dy),
      [&](long long i) {
        float v[Pack<elem>::SIZE], d[Pack<elem>::SIZE];
        load_pack(v, x + i), load_pack(d, dy + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) d[k] *= gelu_slope(v[k]);
        store_pack(dy + i, d);
      },
      [&](long long i) { dy[i] = from_float<elem>(to_float(dy[i]) * gelu_slope(to_float(x[i]))); });
}
