// y += x. Grid: any; block: any.
#include "vector.cuh"

template <class T>
__device__ __forceinline__ void add_to(const T* x, T* y, long long n) {
  each<T>(
      n, aligned(x) && aligned(y),
      [&](long long i) {
        float a[Pack<T>::SIZE], b[Pack<T>::SIZE];
        load_pack(a, x + i), load_pack(b, y + i);
#pragma unroll
        for (int k = 0; k < Pack<T>::SIZE; k++) b[k] += a[k];
        store_pack(y + i, b);
      },
      [&](long long i) { y[i] = from_float<T>(to_float(y[i]) + to_float(x[i])); });
}

// Activations and their gradients.
extern "C" __global__ void add(const elem* x, elem* y, long long n) { add_to(x, y, n); }

// Gradients of parameters, and sums of messages.
extern "C" __global__ void add_f32(const float* x, float* y, long long n) { add_to(x, y, n); }
