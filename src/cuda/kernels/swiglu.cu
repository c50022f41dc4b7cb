// SwiGLU (Shazeer, 2020): y = silu(gate)·up, where a row of x is `width` gates, then as many ups. Grid: any; block: any.
#include "vector.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void swiglu(const elem* x, elem* y, int rows, int width) {
  each<elem>(
      (long long)rows * width, width % Pack<elem>::SIZE == 0 && aligned(x) && aligned(y),
      [&](long long i) {
        const elem* gates = x + i / width * 2 * width + i % width;
        float gate[Pack<elem>::SIZE], up[Pack<elem>::SIZE];
        load_pack(gate, gates), load_pack(up, gates + width);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) up[k] *= gate[k] * sigmoid(gate[k]);
        store_pack(y + i, up);
      },
      [&](long long i) {
        const elem* gates = x + i / width * 2 * width + i % width;
        float gate = to_float(gates[0]);
        y[i] = from_float<elem>(gate * sigmoid(gate) * to_float(gates[width]));
      });
}

__device__ __forceinline__ void gradients(float& gate, float& up, float dy) {
  float s = sigmoid(gate), silu = gate * s;
  gate = dy * up * (s + silu * (1.0f - s));
  up = dy * silu;
}

// Replaces gates and ups by their gradients.
extern "C" __global__ void swiglu_backward(elem* x, const elem* dy, int rows, int width) {
  each<elem>(
      (long long)rows * width, width % Pack<elem>::SIZE == 0 && aligned(x) && aligned(dy),
      [&](long long i) {
        elem* gates = x + i / width * 2 * width + i % width;
        float gate[Pack<elem>::SIZE], up[Pack<elem>::SIZE], d[Pack<elem>::SIZE];
        load_pack(gate, gates), load_pack(up, gates + width), load_pack(d, dy + i);
#pragma unroll
        for (int k = 0; k < Pack<elem>::SIZE; k++) gradients(gate[k], up[k], d[k]);
        store_pack(gates, gate), store_pack(gates + width, up);
      },
      [&](long long i) {
        elem* gates = x + i / width * 2 * width + i % width;
        float gate = to_float(gates[0]), up = to_float(gates[width]);
        gradients(gate, up, to_float(dy[i]));
        gates[0] = from_float<elem>(gate), gates[width] = from_float<elem>(up);
      });
}
