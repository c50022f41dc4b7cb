// Softmax of rows, and its backward. A warp takes a row: block 128 threads, grid ceil(rows / 4).
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) softmax(const elem* x, elem* y, int rows, int width) {
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  x += (long long)row * width, y += (long long)row * width;
  float top = -infinity(), sum = 0.0f;
  for (int i = lane; i < width; i += 32) top = fmaxf(top, to_float(x[i]));
  top = warp_max(top);
  for (int i = lane; i < width; i += 32) sum += expf(to_float(x[i]) - top);
  sum = warp_sum(sum);
  for (int i = lane; i < width; i += 32) y[i] = from_float<elem>(expf(to_float(x[i]) - top) / sum);
}

// dy = y·(dy - Σ y·dy), in place.
extern "C" __global__ void __launch_bounds__(128) softmax_backward(const elem* y, elem* dy, int rows, int width) {
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  y += (long long)row * width, dy += (long long)row * width;
  float dot = 0.0f;
  for (int i = lane; i < width; i += 32) dot += to_float(y[i]) * to_float(dy[i]);
  dot = warp_sum(dot);
  for (int i = lane; i < width; i += 32) dy[i] = from_float<elem>(to_float(y[i]) * (to_float(dy[i]) - dot));
}
