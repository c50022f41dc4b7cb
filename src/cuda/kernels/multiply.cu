// y *= x. Grid: any; block: any.
#include "vector.cuh"

template <class T>
__device__ __forceinline__ void multiply_by(const T* x, T* y, long long n) {
  each<T>(
      n, aligned(x) && aligned(y),
      [&](long long i) {
        float a[Pack<T>::SIZE], b[Pack<T>::SIZE];
        load_pack(a, x + i), load_pack(b, y + i);
#pragma unroll
        for (int k = 0; k < Pack<T>::SIZE; k++) b[k] *= a[k];
        store_pack(y + i, b);
      },
      [&](long long i) { y[i] = from_float<T>(to_float(y[i]) * to_float(x[i])); });
}

extern "C" __global__ void multiply(const elem* x, elem* y, long long n) { multiply_by(x, y, n); }

// Losses of rows, and their weights.
extern "C" __global__ void multiply_f32(const float* x, float* y, long long n) { multiply_by(x, y, n); }
