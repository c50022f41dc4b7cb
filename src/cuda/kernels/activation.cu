// Elementwise functions and their derivatives; `a` is the parameter of functions that have one. Grid: any;
// block: any.
#include "vector.cuh"

__device__ __forceinline__ float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Relu {
  __device__ __forceinline__ static float value(float x, float) { return x > 0.0f ? x : 0.0f; }
  __device__ __forceinline__ static float slope(float x, float) { return x > 0.0f ? 1.0f : 0.0f; }
};

struct LeakyRelu {
  __device__ __forceinline__ static float value(float x, float a) { return x > 0.0f ? x : a * x; }
  __device__ __forceinline__ static float slope(float x, float a) { return x > 0.0f ? 1.0f : a; }
};

// In its tanh form (Hendrycks and Gimpel, 2016).
struct Gelu {
  // tanh(√(2/π)·(x + 0.044715 x³)), and its argument's derivative by x.
  __device__ __forceinline__ static float inner_tanh(float x, float& slope) {
    const float root = 0.7978845608028654f, cube = 0.044715f;
    slope = root * (1.0f + 3.0f * cube * x * x);
    return tanhf(root * (x + cube * x * x * x));
  }
  __device__ __forceinline__ static float value(float x, float) {
    float slope;
    return 0.5f * x * (1.0f + inner_tanh(x, slope));
  }
  __device__ __forceinline__ static float slope(float x, float) {
    float inner, t = inner_tanh(x, inner);
    // For large |x| the square of x is infinite, and 1 - t² is zero.
    float bend = t * t < 1.0f ? 0.5f * x * (1.0f - t * t) * inner : 0.0f;
    return 0.5f * (1.0f + t) + bend;
  }
};

struct Silu {
  __device__ __forceinline__ static float value(float x, float) { return x * logistic(x); }
  __device__ __forceinline__ static float slope(float x, float) {
    float s = logistic(x);
    return s * (x * (1.0f - s) + 1.0f);
  }
};

struct Tanh {
  __device__ __forceinline__ static float value(float x, float) { return tanhf(x); }
  __device__ __forceinline__ static float slope(float x, float) {
    float y = tanhf(x);
    return 1.0f - y * y;
  }
};

struct Sigmoid {
  __device__ __forceinline__ static float value(float x, float) { return logistic(x); }
  __device__ __forceinline__ static float slope(float x, float) {
    float y = logistic(x);
    return y * (1.0f - y);
  }
};

struct Exp {
  __device__ __forceinline__ static float value(float x, float) { return expf(x); }
  __device__ __forceinline__ static float slope(float x, float) { return expf(x); }
};

struct Ln {
  __device__ __forceinline__ static float value(float x, float) { return logf(x); }
  __device__ __forceinline__ static float slope(float x, float) { return 1.0f / x; }
};

struct Square {
  __device__ __forceinline__ static float value(float x, float) { return x * x; }
  __device__ __forceinline__ static float slope(float x, float) { return 2.0f * x; }
};

struct Abs {
  __device__ __forceinline__ static float value(float x, float) { return fabsf(x); }
  __device__ __forceinline__ static float slope(float x, float) {
    return (x > 0.0f ? 1.0f : 0.0f) - (x < 0.0f ? 1.0f : 0.0f);
  }
};

struct Scaled {
  __device__ __forceinline__ static float value(float x, float a) { return a * x; }
  __device__ __forceinline__ static float slope(float, float a) { return a; }
};

struct Shifted {
  __device__ __forceinline__ static float value(float x, float a) { return x + a; }
  __device__ __forceinline__ static float slope(float, float) { return 1.0f; }
};

// y = f(x)
template <class F>
__device__ __forceinline__ void map(const elem* x, elem* y, long long n, float a) {
  each<elem>(
      n, aligned(x) && aligned(y),
      [&](long long i) {
        float v[Pack<elem>::SIZE];
        load_pack(v, x + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) v[k] = F::value(v[k], a);
        store_pack(y + i, v);
      },
      [&](long long i) { y[i] = from_float<elem>(F::value(to_float(x[i]), a)); });
}

// dy *= f'(x), in place.
template <class F>
__device__ __forceinline__ void scale(const elem* x, elem* dy, long long n, float a) {
  each<elem>(
      n, aligned(x) && aligned(dy),
      [&](long long i) {
        float v[Pack<elem>::SIZE], d[Pack<elem>::SIZE];
        load_pack(v, x + i), load_pack(d, dy + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) d[k] *= F::slope(v[k], a);
        store_pack(dy + i, d);
      },
      [&](long long i) { dy[i] = from_float<elem>(to_float(dy[i]) * F::slope(to_float(x[i]), a)); });
}

// The kernels map_NAME and scale_NAME, as `Names` of ops/activation.rs has them.
#define ACTIVATION(NAME, F)                                                                                          \
  extern "C" __global__ void map_##NAME(const elem* x, elem* y, long long n, float a) { map<F>(x, y, n, a); }        \
  extern "C" __global__ void scale_##NAME(const elem* x, elem* dy, long long n, float a) { scale<F>(x, dy, n, a); }
ACTIVATION(relu, Relu)
ACTIVATION(leaky_relu, LeakyRelu)
ACTIVATION(gelu, Gelu)
ACTIVATION(silu, Silu)
ACTIVATION(tanh, Tanh)
ACTIVATION(sigmoid, Sigmoid)
ACTIVATION(exp, Exp)
ACTIVATION(ln, Ln)
ACTIVATION(square, Square)
ACTIVATION(abs, Abs)
ACTIVATION(scaled, Scaled)
ACTIVATION(shifted, Shifted)
