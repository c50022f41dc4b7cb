// Losses of predicted values, which are overwritten by the gradient. A warp computes a row: block 128 threads, grid
// ceil(rows / 4).
#include "common.cuh"

// In the order of `Deviation`.
enum By { SQUARED, ABSOLUTE, HUBER, BINARY, AGREEMENT };

__device__ __forceinline__ float deviation(int by, float reach, float p, float t, float& slope) {
  float apart = p - t, far = fabsf(apart), side = apart > 0.0f ? 1.0f : apart < 0.0f ? -1.0f : 0.0f;
  if (by == SQUARED) {
    slope = 2.0f * apart;
    return apart * apart;
  }
  if (by == ABSOLUTE) {
    slope = side;
    return far;
  }
  if (by == HUBER) {
    slope = far <= reach ? apart : reach * side;
    return far <= reach ? 0.5f * apart * apart : reach * (far - 0.5f * reach);
  }
  if (by == AGREEMENT) {
    slope = 0.0f;
    return (p > 0.0f) == (t > 0.5f) ? 1.0f : 0.0f;
  }
  // max(p, 0) - p·t + ln(1 + e^-|p|): no exponential overflows.
  float small = expf(-fabsf(p)), sigmoid = (p >= 0.0f ? 1.0f : small) / (1.0f + small);
  slope = sigmoid - t;
  return fmaxf(p, 0.0f) - p * t + log1pf(small);
}

// `weights`, one for each row, may be null.
extern "C" __global__ void __launch_bounds__(128)
    regression(elem* predictions, const float* targets, const float* weights, float* losses, int rows, int width, int by,
               float reach, float scale, int gradient) {
  int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  predictions += (long long)row * width, targets += (long long)row * width;
  float weight = weights ? weights[row] : 1.0f, factor = scale / width * weight, total = 0.0f;
  for (int i = lane; i < width; i += 32) {
    float slope;
    total += deviation(by, reach, to_float(predictions[i]), targets[i], slope);
    if (gradient) predictions[i] = from_float<elem>(slope * factor);
  }
  total = warp_sum(total);
  if (lane == 0) losses[row] = total / width * weight;
}
