// Common parts of every kernel: the element type and sums in a fixed order. Compiled at run time by NVRTC, once for
// each element type, without CUDA's or C++'s headers.
#pragma once
#include "ptx.cuh"

// The upper half of a float: same range, 8 significant bits.
typedef struct {
  unsigned short bits;
} bf16;

// Element of tensors. Arithmetic is in float all the same.
#ifdef BF16
typedef bf16 elem;
#else
typedef float elem;
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// Rounds to nearest even; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) { return bf16{static_cast<unsigned short>(pack_bf16(x, 0.0f))}; }

template <class T>
__device__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return to_bf16(x);
}

// The halves of a result of pack_bf16.
__device__ __forceinline__ float low_float(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Reductions. Every warp lane receives the result, with the same bits in each and in every run: a butterfly adds the
// same pairs in every lane. WIDTH neighbouring lanes (a power of two) form a group; all 32 take part.
template <int WIDTH = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int apart = WIDTH / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
  return x;
}

template <int WIDTH = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int apart = WIDTH / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
  return x;
}

// The sum over a one-dimensional block of whole warps, up to 1024 threads; all of them call it. Holds two barriers.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float partial[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = warp_sum(x);
  __syncthreads();  // a sum before this one has been read by all
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
}
