// Kernels with a mistake each.
extern "C" __global__ void write_at(float* p, long i) {
  if (threadIdx.x == 5 && blockIdx.x == 1) p[i] = 1.f;
}
extern "C" __global__ void bad_barrier(float* p) {  // half a warp waits for a shuffle, half at the barrier
  if (threadIdx.x < 16) p[threadIdx.x] = __shfl_sync(0xffffffffu, p[threadIdx.x], 0);
  else __syncthreads();
}
extern "C" __global__ void missing_barrier(float* out) {  // reads a neighbour's cell without a barrier
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = s[(threadIdx.x + 1) % 64];
}
extern "C" __global__ void failing_assert(int n) { assert(threadIdx.x < n); }
extern "C" __global__ void shared_overrun(float* out) {
  extern __shared__ float s[];
  s[threadIdx.x + 4] = 1.f;
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void static_overrun(float* out, int shift) {
  __shared__ float s[64];
  s[threadIdx.x + shift] = 1.f;
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void misaligned(float* p) {
  float4 v = *reinterpret_cast<float4*>(p + 1 + threadIdx.x);
  p[threadIdx.x] = v.x + v.w;
}
extern "C" __global__ void lost_update(float* sum) { *sum += 1.f; }  // no atomic
extern "C" __global__ void late_read(float* out) {  // right values in either order of threads
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  float v = s[(threadIdx.x + 1) % 64];
  s[threadIdx.x] = v;  // needs a barrier before it
  out[threadIdx.x] = v;
}
extern "C" __global__ void fine(float* p) { p[threadIdx.x] = 1.f; }
extern "C" __global__ void divide(int* p, int by) { p[0] = 1 / by; }
