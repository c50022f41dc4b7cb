// The only file with inline PTX: thin wrappers around instructions without a CUDA C++ intrinsic (sm_80 and later). The
// CPU simulator has the same functions in its own header.
#pragma once
#ifdef __CUDASIM__
#include <cudasim/ptx_host.h>
#else

// D = A·B + C for one 16×8 tile; A is 16×16 row-major, B 16×8 column-major. The elements of lane l, as pairs of
// neighbours along a row of A, a column of B, a row of C and D:
//   A: registers 0-3 = (row l/4, k 2·(l%4)), (row + 8, k), (row, k + 8), (row + 8, k + 8)
//   B: registers 0-1 = (k 2·(l%4), column l/4), (k + 8, column)
//   C, D: [0..1] = (row l/4, columns 2·(l%4) and the next), [2..3] = the same of row + 8
// Not volatile: an MMA has no effect but its result, so the compiler may schedule it.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                                  const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Four 8×8 matrices of 16-bit elements from shared memory: lane l names row l%8 of matrix l/8 (16 bytes, aligned)
// and receives from each matrix the elements (row l/4, columns 2·(l%4) and the next).
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The same, each matrix transposed on the way: the lane receives (rows 2·(l%4) and the next, column l/4).
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Copies 16 aligned bytes from global to shared memory asynchronously, bypassing the L1 cache. Copies belong to the
// group that the next commit closes; wait<n> returns when all but the n youngest groups of this thread have arrived:
// the block still needs a barrier.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 2^x to about 2 units in the last place; denormals, in and out, are zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even bf16 in one register, `low` in its low half; NaN stays NaN.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Flags in global memory by which kernels of several devices or processes wait for each other. What a thread wrote
// before its release is visible to a thread, on any device, that has acquired the value; between other threads of the
// two blocks a barrier has to order it.
__device__ __forceinline__ unsigned load_acquire_sys(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_sys(unsigned* flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
#endif
