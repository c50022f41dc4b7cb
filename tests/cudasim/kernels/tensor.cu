// Tensor core products from shared memory, and a pipeline of asynchronous copies.
#include "common.cuh"

// c[m, n] (f32) = a[m, k] b[n, k]^T, bf16, k contiguous in both; multiples of 32, 16, 16. With `trans`, b is [k, n].
// A block of 4 warps computes a tile of 32 x 16.
extern "C" __global__ void __launch_bounds__(128)
    gemm(float* __restrict__ c, const bf16* __restrict__ a, const bf16* __restrict__ b, int m, int n, int k, int trans) {
  __shared__ __align__(16) bf16 sa[32][24];  // 8 columns of padding
  __shared__ __align__(16) bf16 sb[16][24];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row0 = blockIdx.y * 32, col0 = blockIdx.x * 16;
  int wr = warp / 2 * 16, wc = warp % 2 * 8, g = lane / 4, t = lane % 4 * 2;
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int k0 = 0; k0 < k; k0 += 16) {
    int r = threadIdx.x % 64 / 2, h = threadIdx.x % 2 * 8;
    if (threadIdx.x < 64)
      cp_async_16(&sa[r][h], &a[(size_t)(row0 + r) * k + k0 + h]);
    else if (threadIdx.x < 96)
      cp_async_16(&sb[r][h], trans ? &b[(size_t)(k0 + r) * n + col0 + h] : &b[(size_t)(col0 + r) * k + k0 + h]);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    unsigned fa[4], both[4], fb[2];
    ldmatrix_x4(fa, &sa[wr + lane % 16][lane / 16 * 8]);
    // Matrices of b: 8 columns of the tile by 8 of k, for both halves of either.
    if (trans) {
      ldmatrix_x4_trans(both, &sb[lane % 16][lane / 16 * 8]);
      fb[0] = both[warp % 2 * 2];
      fb[1] = both[warp % 2 * 2 + 1];
    } else {
      ldmatrix_x4(both, &sb[lane % 16][lane / 16 * 8]);
      fb[0] = both[warp % 2];
      fb[1] = both[warp % 2 + 2];
    }
    mma_m16n8k16_bf16(acc, fa, fb, acc);
    __syncthreads();
  }
  for (int i = 0; i < 4; i++) c[(size_t)(row0 + wr + g + i / 2 * 8) * n + col0 + wc + t + i % 2] = acc[i];
}

// Reverses each tile of 256 floats, copied through two stages by 64 threads. `waits` = 0 leaves the wait out,
// `barriers` = 0 the barrier behind it: mistakes.
extern "C" __global__ void pipeline(float* __restrict__ out, const float* __restrict__ in, int tiles, int waits,
                                    int barriers) {
  extern __shared__ __align__(16) float stages[];
  size_t base = (size_t)blockIdx.x * tiles * 256;
  cp_async_16(&stages[threadIdx.x * 4], in + base + threadIdx.x * 4);
  cp_async_commit();
  for (int t = 0; t < tiles; t++) {
    if (t + 1 < tiles)
      cp_async_16(&stages[(t + 1) % 2 * 256 + threadIdx.x * 4], in + base + (t + 1) * 256 + threadIdx.x * 4);
    cp_async_commit();
    if (waits) cp_async_wait<1>();
    if (barriers) __syncthreads();
    for (int i = threadIdx.x; i < 256; i += 64) out[base + t * 256 + i] = stages[t % 2 * 256 + 255 - i];
    __syncthreads();
  }
}

// The same name for either element type: y = 2 x, what x's type is made of.
extern "C" __global__ void twice(elem* y, const elem* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_float<elem>(2.0f * to_float(x[i]));
}

// Sums by a function that has shared memory of its own, beside the kernel's.
extern "C" __global__ void sums(float* out, const float* in) {
  __shared__ float own[64];
  own[threadIdx.x] = in[threadIdx.x];
  float all = block_sum(own[threadIdx.x]);
  out[threadIdx.x] = all + block_sum(1.0f);
}

// What the language offers beyond: 64-bit integers, doubles, atomics, cache hints, vector types.
extern "C" __global__ void language(float* f, unsigned* u, double* d, unsigned long long* l, const float4* v) {
  float4 x = __ldg(&v[threadIdx.x]);
  uint2 pair = make_uint2(threadIdx.x, 2);
  atomicAdd(&f[0], x.x + x.y + x.z + x.w);
  atomicAdd(&u[0], pair.x * pair.y);
  __syncthreads();
  if (threadIdx.x == 0) {
    d[0] = 1.0 / 3.0;
    l[0] = 6364136223846793005ull * 1442695040888963407ull;
    __stcs(&f[1], __ldcs(&f[0]) * rsqrtf(4.0f) + __fmaf_rn(2.0f, 3.0f, __expf(0.0f)));
    f[2] = exp2_fast(3.0f) + log2f(8.0f) + tanhf(0.0f) + exp2f(-1.0f);
    u[1] = pack_bf16(1.0f, -2.0f);
  }
  __syncwarp();
}
