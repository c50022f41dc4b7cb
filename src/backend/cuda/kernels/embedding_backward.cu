// Gradients of both tables, without atomics: every element of a table is the work of one thread, which adds the rows
// that used it in their order.
#include "common.cuh"

// The token table. Block: 256 threads; grid: (rows, ceil(width / 256)). The block of the first row with a token
// adds up all rows with it; the blocks of the others find an earlier one and end.
extern "C" __global__ void __launch_bounds__(256) embedding_backward_tokens(const unsigned* tokens, const elem* dy,
                                                                            float* dtable, int rows, int width) {
  __shared__ unsigned found[8];
  int row = blockIdx.x, column = blockIdx.y * 256 + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned token = tokens[row];
  int earlier = 0;
  for (int i = threadIdx.x; i < row; i += 256) earlier |= tokens[i] == token;
  if (__syncthreads_or(earlier)) return;
  float sum = 0.0f;
  for (int base = row; base < rows; base += 256) {
    int i = base + threadIdx.x;
    unsigned votes = __ballot_sync(0xffffffffu, i < rows && tokens[i] == token);
    if (lane == 0) found[warp] = votes;
    __syncthreads();
    for (int group = 0; group < 8; group++) {
      for (unsigned left = found[group]; left; left &= left - 1) {
        int use = base + group * 32 + __ffs(left) - 1;
        if (column < width) sum += to_float(dy[(long long)use * width + column]);
      }
    }
    __syncthreads();
  }
  if (column < width) dtable[(long long)token * width + column] += sum;
}

// The position table. Block: any; grid: any.
extern "C" __global__ void embedding_backward_positions(const elem* dy, float* dtable, int rows, int time, int width) {
  long long n = (long long)time * width, threads = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
    float sum = 0.0f;
    for (long long at = i; at < (long long)rows * width; at += n) sum += to_float(dy[at]);
    dtable[i] += sum;
  }
}
