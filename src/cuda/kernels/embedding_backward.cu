// Gradients of both tables, without atomics: one thread computes an element of a table, and adds the rows that used it
// in order.
#include "rows.cuh"

// The token table. `order` has the row numbers sorted by token (stable). Block: (128, 4); grid: (rows, ceil(width /
// (128·OWN))). The block at the first row of a token sums all its rows; the others return. Thread row y adds the y-th
// 128 of each 512 rows, and the four sums are added in order. The table has `words` rows, of tokens from `first` on;
// other tokens are ignored.
extern "C" __global__ void __launch_bounds__(512)
    embedding_backward_tokens(const unsigned* tokens, const unsigned* order, const elem* dy, float* dtable, int rows,
                              int width, int first, int words) {
  __shared__ unsigned uses[4][128];
  __shared__ float parts[3][128][OWN];
  unsigned token = tokens[order[blockIdx.x]], place = token - unsigned(first);
  if (place >= unsigned(words)) return;
  if (blockIdx.x > 0 && tokens[order[blockIdx.x - 1]] == token) return;
  int group = threadIdx.y, column = (blockIdx.y * 128 + threadIdx.x) * OWN;
  bool by_pack = aligned(dy) && width % OWN == 0;
  float sums[OWN] = {};
  for (int base = blockIdx.x;; base += 512) {
    int at = base + group * 128 + threadIdx.x;
    unsigned row = at < rows ? order[at] : 0;
    uses[group][threadIdx.x] = row;
    int count = __syncthreads_count(at < rows && tokens[row] == token), own = min(max(count - group * 128, 0), 128);
    if (column < width) {
#pragma unroll 8
      for (int use = 0; use < own; use++) {
        float v[OWN];
        load_columns(v, dy + (long long)uses[group][use] * width, column, width, by_pack);
#pragma unroll
        for (int k = 0; k < OWN; k++) sums[k] += v[k];
      }
    }
    if (count < 512) break;
    __syncthreads();  // all have read the uses
  }
  if (group > 0)
#pragma unroll
    for (int k = 0; k < OWN; k++) parts[group - 1][threadIdx.x][k] = sums[k];
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    for (int other = 0; other < 3; other++) sums[k] += parts[other][threadIdx.x][k];
    if (column + k < width) dtable[(long long)place * width + column + k] += sums[k];
  }
}

// The position table. Block: any; grid: any.
extern "C" __global__ void embedding_backward_positions(const elem* dy, float* dtable, int rows, int time, int width) {
  long long n = (long long)time * width, all = (long long)rows * width;
  each<elem>(
      n, aligned(dy) && n % OWN == 0,
      [&](long long i) {
        float sums[OWN] = {};
#pragma unroll 4
        for (long long at = i; at < all; at += n) {
          float v[OWN];
          load_pack(v, dy + at);
#pragma unroll
          for (int k = 0; k < OWN; k++) sums[k] += v[k];
        }
#pragma unroll
        for (int k = 0; k < OWN; k++) dtable[i + k] += sums[k];
      },
      [&](long long i) {
        float sum = 0.0f;
        for (long long at = i; at < all; at += n) sum += to_float(dy[at]);
        dtable[i] += sum;
      });
}
