// Two processes or devices add up what both have, several times, each with a grid of the same shape.
#include "common.cuh"
#include "ptx.cuh"

// Waits until the same block of the other grid is here too.
__device__ void meet(const unsigned* here, unsigned* there, unsigned value) {
  __syncthreads();
  if (threadIdx.x == 0) {
    store_release_sys(there + blockIdx.x, value);
    while (load_acquire_sys(here + blockIdx.x) < value) {
    }
  }
  __syncthreads();
}
// 64 threads. The other process writes to the flags `here`, this one to those `there`; zero before the first of the rounds 1, 2, ...
extern "C" __global__ void exchange(float* mine, const float* other, const unsigned* here, unsigned* there, float* sum,
                                    unsigned round) {
  __shared__ float kept[64];
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  mine[i] += round;
  kept[63 - threadIdx.x] = mine[i];
  meet(here, there, 2 * round - 1);
  sum[i] += kept[63 - threadIdx.x] + other[i];
  meet(here, there, 2 * round);  // before either changes its memory again
}
// A thread that waits, by __nanosleep, for one with a higher number.
extern "C" __global__ void wait_within_block(float* p) {
  __shared__ int ready;
  if (threadIdx.x == 0) ready = 0;
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) atomicExch(&ready, 1);
  while (!atomicAdd(&ready, 0)) __nanosleep(20);
  p[threadIdx.x] = 1.f;
}
