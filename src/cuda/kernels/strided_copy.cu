// Copies `count` columns of rows from one matrix to another. Grid: any; block: any.
#include "common.cuh"

extern "C" __global__ void copy_columns(const elem* x, elem* y, int rows, int count, int from, int first, int to, int at) {
  long long n = (long long)rows * count, threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads)
    y[i / count * to + at + i % count] = x[i / count * from + first + i % count];
}
