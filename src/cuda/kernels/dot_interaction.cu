// The first row of a sample, followed by the dot products of all pairs of its rows. A thread computes an element of the
// output. Grid: any; block: any.
#include "common.cuh"

extern "C" __global__ void pair_products(const elem* x, elem* y, int samples, int rows, int width) {
  int outputs = width + rows * (rows - 1) / 2;
  long long n = (long long)samples * outputs, threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
    const elem* sample = x + i / outputs * rows * width;
    int at = int(i % outputs) - width;
    if (at < 0) {
      y[i] = sample[at + width];
      continue;
    }
    // Pair `at` is row r with row `at` - r(r-1)/2; the root is exact except for rounding.
    int r = int((1.0f + sqrtf(1.0f + 8.0f * at)) * 0.5f);
    while (r * (r - 1) / 2 > at) r--;
    while (r * (r + 1) / 2 <= at) r++;
    const elem *a = sample + r * width, *b = sample + (at - r * (r - 1) / 2) * width;
    float sum = 0.0f;
    for (int k = 0; k < width; k++) sum = fmaf(to_float(a[k]), to_float(b[k]), sum);
    y[i] = from_float<elem>(sum);
  }
}

extern "C" __global__ void pair_products_backward(const elem* x, const elem* dy, elem* dx, int samples, int rows, int width) {
  int outputs = width + rows * (rows - 1) / 2;
  long long n = (long long)samples * rows * width, threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
    long long sample = i / (rows * width);
    int row = int(i / width % rows), column = int(i % width);
    const elem *other = x + sample * rows * width + column, *slopes = dy + sample * outputs + width;
    float sum = row == 0 ? to_float(dy[sample * outputs + column]) : 0.0f;
    for (int j = 0; j < rows; j++) {
      if (j == row) continue;
      int high = max(row, j), low = min(row, j);
      sum = fmaf(to_float(slopes[high * (high - 1) / 2 + low]), to_float(other[j * width]), sum);
    }
    dx[i] = from_float<elem>(sum);
  }
}
