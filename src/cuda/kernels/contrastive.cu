// The supervised contrastive loss (Khosla et al., 2020) of rows of similarities, which are overwritten by the gradient.
// Block: 256 threads; grid: rows.
#include "common.cuh"

// The greatest value of a block of 256 threads; all of them call it.
__device__ __forceinline__ float block_max(float x) {
  __shared__ float partial[8];
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float top = partial[0];
  for (int i = 1; i < 8; i++) top = fmaxf(top, partial[i]);
  return top;
}

extern "C" __global__ void __launch_bounds__(256)
    contrastive(elem* similarities, const unsigned* classes, const float* weights, float* losses, int columns, int first,
                float scale, int gradient) {
  elem* row = similarities + (long long)blockIdx.x * columns;
  int own = first + int(blockIdx.x);
  unsigned target = classes[own];
  // The lowest finite number: differences to it are numbers even in a row without others.
  float top = __uint_as_float(0xff7fffffu), count = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 256) {
    if (j == own) continue;
    top = fmaxf(top, to_float(row[j]));
    count += classes[j] == target ? 1.0f : 0.0f;
  }
  top = block_max(top);
  count = block_sum(count);
  float sum = 0.0f, positives = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 256) {
    if (j == own) continue;
    float x = to_float(row[j]) - top;
    sum += expf(x);
    positives += classes[j] == target ? x : 0.0f;
  }
  sum = block_sum(sum);
  positives = block_sum(positives);
  float weight = weights ? weights[blockIdx.x] : 1.0f;
  if (threadIdx.x == 0) losses[blockIdx.x] = count > 0.0f ? weight * (logf(sum) - positives / count) : 0.0f;
  if (!gradient) return;
  scale *= weight;
  // A thread reads only the elements that it overwrites.
  for (int j = threadIdx.x; j < columns; j += 256) {
    float d = 0.0f;
    if (j != own && count > 0.0f)
      d = expf(to_float(row[j]) - top) * (scale / sum) - (classes[j] == target ? scale / count : 0.0f);
    row[j] = from_float<elem>(d);
  }
}
