// Dropout (Srivastava et al., 2014) with a mask computed from a counter: element i of the global batch is word i % 4 of
// block i / 4 of the stream, as on the CPU. Grid: any; block: any.
#include "common.cuh"

// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
__device__ __forceinline__ uint4 philox(unsigned long long block, unsigned long long key) {
  unsigned k0 = unsigned(key), k1 = unsigned(key >> 32);
  uint4 c = make_uint4(unsigned(block), unsigned(block >> 32), 0u, 0u);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    unsigned long long p0 = (unsigned long long)0xD2511F53u * c.x, p1 = (unsigned long long)0xCD9E8D57u * c.z;
    c = make_uint4(unsigned(p1 >> 32) ^ c.y ^ k0, unsigned(p1), unsigned(p0 >> 32) ^ c.w ^ k1, unsigned(p0));
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c;
}

extern "C" __global__ void dropout(elem* x, long long n, unsigned long long offset, unsigned long long key,
                                   unsigned dropped_below, float kept) {
  // A thread takes the elements of one block of the stream.
  long long blocks = (long long)((offset + n + 3) / 4 - offset / 4), threads = (long long)gridDim.x * blockDim.x;
  for (long long b = blockIdx.x * (long long)blockDim.x + threadIdx.x; b < blocks; b += threads) {
    unsigned long long block = offset / 4 + b;
    uint4 c = philox(block, key);
    unsigned words[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      long long i = (long long)(block * 4 + k - offset);
      if (i >= 0 && i < n) x[i] = from_float<elem>(to_float(x[i]) * (words[k] < dropped_below ? 0.0f : kept));
    }
  }
}
