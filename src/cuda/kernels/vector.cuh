// Vectorised access to 16 bytes of elements at a time, the best size for one thread.
#pragma once
#include "common.cuh"

// Elements in 16 bytes.
template <class T>
struct Pack {
  static const int SIZE = 16 / sizeof(T);
};

// Whether a pointer may be read 16 bytes at a time.
__device__ __forceinline__ bool aligned(const void* p) { return (reinterpret_cast<unsigned long long>(p) & 15) == 0; }

__device__ __forceinline__ void load_pack(float (&x)[4], const float* from) {
  float4 v = *reinterpret_cast<const float4*>(from);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ __forceinline__ void load_pack(float (&x)[8], const bf16* from) {
  uint4 v = *reinterpret_cast<const uint4*>(from);
  unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = low_float(words[i]), x[2 * i + 1] = high_float(words[i]);
}
__device__ __forceinline__ void store_pack(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_pack(bf16* to, const float (&x)[8]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Calls `pack(i)` for every full pack of [0, n) and `one(i)` for every other element, spread over the threads of the
// grid; with `by_pack` false for every element alone.
template <class T, class P, class S>
__device__ __forceinline__ void each(long long n, bool by_pack, P pack, S one) {
  const int size = Pack<T>::SIZE;
  long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x, threads = (long long)gridDim.x * blockDim.x;
  long long packs = by_pack ? n / size : 0;
  for (long long i = thread; i < packs; i += threads) pack(i * size);
  for (long long i = packs * size + thread; i < n; i += threads) one(i);
}

// The same over the elements of one row, spread over `threads` threads of which this is number `thread`. The row
// need not begin at a multiple of 16 bytes: elements before the first one go one by one.
template <class T, class P, class S>
__device__ __forceinline__ void each_of_row(const T* row, int n, int thread, int threads, P pack, S one) {
  const int size = Pack<T>::SIZE;
  int lead = int((16 - (reinterpret_cast<unsigned long long>(row) & 15)) & 15) / int(sizeof(T));
  if (lead > n) lead = n;
  int packs = (n - lead) / size, rest = lead + packs * size;
  for (int i = thread; i < lead; i += threads) one(i);
  for (int i = thread; i < packs; i += threads) pack(lead + i * size);
  for (int i = rest + thread; i < n; i += threads) one(i);
}
