// Common parts of the forward and the backward of attention: tiles in shared memory and their matmuls.
//
// Causal attention without a matrix of time × time in memory, after FlashAttention-2 (Dao, 2023): a block owns a
// tile of queries (or keys) and walks over the keys (or queries), recomputing scores from the rows.
//
// Compiled for one head width, -DHEAD=n (1 to 256), and one element type. Two ways, chosen here alone:
//   tensor cores   bf16; operands in bf16, sums in float
//   plain          f32; all in float
// Blocks are of 128 threads in both, and grids (⌈time / tile⌉, heads, batch).
//
// Layouts: qkv and dqkv rows × (heads + 2·kv_heads)·HEAD, y and dy rows × heads·HEAD, all row-major; rows = batch·time;
// a row of qkv is the queries of all heads, then the keys, then the values. heads / kv_heads neighbouring heads of
// queries share one of keys and values. lse and delta are batch × heads × time floats. With tensor cores, qkv, dy, y
// and dqkv must be aligned to 16 bytes. Heads whose width is a multiple of 8 are copied to shared memory
// asynchronously, others through registers.
#pragma once
#include "common.cuh"

#ifndef HEAD
#error "compile with -DHEAD=<width of a head>"
#endif

#ifdef BF16
#define TENSOR_CORES
#endif

constexpr int THREADS = 128;

// Softmax in base 2, the hardware's: e^(scale·s) = 2^(scale·log2(e)·s).
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float softmax_scale() { return 1.0f / sqrtf(static_cast<float>(HEAD)); }

__device__ __forceinline__ int tiles_for(int rows, int tile) { return (rows + tile - 1) / tile; }

// The rows of one sequence that one head of queries sees.
struct Place {
  size_t row;       // the sequence's first row
  size_t head;      // of the queries
  size_t heads;
  size_t kv_heads;
  size_t stride;    // between rows of qkv and dqkv
  size_t width;     // between rows of y and dy
  size_t softmax;   // the head's first element in lse and delta

  __device__ __forceinline__ Place(int time, int heads, int kv_heads, int head)
      : row(static_cast<size_t>(blockIdx.z) * time),
        head(head),
        heads(heads),
        kv_heads(kv_heads),
        stride((static_cast<size_t>(heads) + 2 * kv_heads) * HEAD),
        width(static_cast<size_t>(heads) * HEAD),
        softmax((static_cast<size_t>(blockIdx.z) * heads + head) * time) {}

  // Returns the offset in qkv or dqkv.
  template <class T>
  __device__ __forceinline__ T* queries(T* qkv) const {
    return qkv + row * stride + head * HEAD;
  }
  template <class T>
  __device__ __forceinline__ T* keys(T* qkv) const {
    // 64-bit divisions would take a hundred instructions.
    const unsigned group = unsigned(heads) / unsigned(kv_heads);
    return qkv + row * stride + (heads + unsigned(head) / group) * HEAD;
  }
  template <class T>
  __device__ __forceinline__ T* values(T* qkv) const {
    return keys(qkv) + kv_heads * HEAD;
  }
  // The same rows of y or dy.
  template <class T>
  __device__ __forceinline__ T* single(T* y) const {
    return y + row * width + head * HEAD;
  }
};

#ifdef TENSOR_CORES

// Matmuls use whole blocks of 16 columns. Columns beyond the head are zero.
constexpr int BLOCKS = (HEAD + 15) / 16;

// A tile in shared memory has rows of ROW elements in chunks of 16 bytes; columns past the last block are neither written nor
// read. The chunks of a row are permuted by its number, so that the eight rows which ldmatrix reads at a time lie in different
// banks without padding: a row of 32 elements takes half of the banks, a longer one all of them. `column` is a multiple of 8.
constexpr int ROW = HEAD <= 32 ? 32 : HEAD <= 64 ? 64 : HEAD <= 128 ? 128 : 256;
__device__ __forceinline__ int in_tile(int row, int column) {
  return row * ROW + ((column / 8) ^ (ROW == 32 ? row / 2 % 4 : row % 8)) * 8;
}

// Copies a chunk of which `columns` belong to the head, any number of them: the others are zero.
__device__ __forceinline__ void copy_chunk(bf16* to, const bf16* from, int columns) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned low = 2 * i < columns ? from[2 * i].bits : 0, high = 2 * i + 1 < columns ? from[2 * i + 1].bits : 0;
    words[i] = low | high << 16;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Starts to copy `ROWS` rows from `first` on into a tile. Past the last of `rows` it repeats that one: results
// of the copies are masked or not stored, and they keep garbage (infinities, NaN) out of the products.
template <int ROWS>
__device__ __forceinline__ void fetch(bf16* tile, const bf16* matrix, size_t stride, int first, int rows) {
  constexpr int CHUNKS = 2 * BLOCKS, ALL = ROWS * CHUNKS;
#pragma unroll
  for (int i = 0; i < (ALL + THREADS - 1) / THREADS; i++) {
    int chunk = i * THREADS + threadIdx.x, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
    if (ALL % THREADS != 0 && chunk >= ALL) break;
    bf16* to = tile + in_tile(row, column);
    const bf16* from = matrix + min(first + row, rows - 1) * stride + column;
    if (HEAD % 16 == 0 || (HEAD % 8 == 0 && column < HEAD))
      cp_async_16(to, from);
    else
      copy_chunk(to, from, HEAD - column);
  }
}

// Where a lane reads in the 16×16 block (i, j) of a tile, given where it reads in block (0, 0): the number of the
// row within eight, and with it the permutation, stays; and 16·j has no bit in common with a column below 16, so
// adding it before the permutation is flipping it after. One operation, and the part that depends on i is a constant.
__device__ __forceinline__ const bf16* in_block(const bf16* tile, int i, int j, int in_first) {
  return tile + (in_first ^ 16 * j) + 16 * i * ROW;
}

// The rows of a tile that a warp owns, 16·M of them, as left operand of products. Held in registers where there
// is room for them, otherwise read from shared memory at each use.
template <int M, bool HELD>
struct Own {
  const bf16* tile;
  int in_first;
  unsigned held[HELD ? M : 1][HELD ? BLOCKS : 1][4];

  __device__ __forceinline__ Own(const bf16* tile)
      : tile(tile + threadIdx.x / 32 * 16 * M * ROW), in_first(in_tile(threadIdx.x % 16, threadIdx.x % 32 / 16 * 8)) {}
  // Call when the tile has arrived.
  __device__ __forceinline__ void hold() {
    if (HELD)
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
          ldmatrix_x4(held[HELD ? m : 0][HELD ? k : 0], in_block(tile, m, k, in_first));
  }
  // Columns 16·k to 16·k + 15 of the m-th 16 rows.
  __device__ __forceinline__ void get(unsigned (&a)[4], int m, int k) const {
    if (HELD)
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = held[HELD ? m : 0][HELD ? k : 0][i];
    else
      ldmatrix_x4(a, in_block(tile, m, k, in_first));
  }
};

// c = A·Tᵀ: the warp's own rows against the 8·N rows of a tile. Accumulators are as mma has them: c[m][n][0..1] are
// row lane/4, columns 8·n + 2·(lane%4) and the next, c[m][n][2..3] the same of row lane/4 + 8.
template <int M, int N, bool HELD>
__device__ __forceinline__ void multiply_rows(float (&c)[M][N][4], const Own<M, HELD>& own, const bf16* tile) {
  // Four matrices a time: rows 0-7 and 8-15 of the tile's 16, each in two halves of the 16 columns.
  int lane = threadIdx.x % 32, in_first = in_tile(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[m][n][i] = 0.0f;
#pragma unroll
  for (int k = 0; k < BLOCKS; k++) {
    unsigned a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) own.get(a[m], m, k);
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
      unsigned r[4];
      ldmatrix_x4(r, in_block(tile, n, k, in_first));
      unsigned b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16_bf16(c[m][2 * n], a[m], b0, c[m][2 * n]);
        mma_m16n8k16_bf16(c[m][2 * n + 1], a[m], b1, c[m][2 * n + 1]);
      }
    }
  }
}

// c += P·T, where P comes from accumulators of 8·K columns, rounded to bf16, and T is a tile of 8·K rows. A lane's
// accumulators are exactly its part of the left operand: P never leaves the registers.
template <int M, int K>
__device__ __forceinline__ void multiply_add(float (&c)[M][2 * BLOCKS][4], const float (&p)[M][K][4],
                                             const bf16* tile) {
  // Four matrices a time: columns 0-7 and 8-15 of the tile's 16, each in two halves of the 16 rows.
  int lane = threadIdx.x % 32, in_first = in_tile(lane % 16, lane / 16 * 8);
#pragma unroll
  for (int k = 0; k < K / 2; k++) {
    unsigned a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) {
      a[m][0] = pack_bf16(p[m][2 * k][0], p[m][2 * k][1]);
      a[m][1] = pack_bf16(p[m][2 * k][2], p[m][2 * k][3]);
      a[m][2] = pack_bf16(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
      a[m][3] = pack_bf16(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
      unsigned r[4];
      ldmatrix_x4_trans(r, in_block(tile, k, n, in_first));
      unsigned b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
#pragma unroll
      for (int m = 0; m < M; m++) {
        mma_m16n8k16_bf16(c[m][2 * n], a[m], b0, c[m][2 * n]);
        mma_m16n8k16_bf16(c[m][2 * n + 1], a[m], b1, c[m][2 * n + 1]);
      }
    }
  }
}

// The causal mask: -∞ where the key comes after the query. Rows are queries and columns keys, or the other way
// round; column 0 is `ahead` positions after row 0 (mask_keys), row 0 after column 0 (mask_queries).
template <int M, int N>
__device__ __forceinline__ void mask_keys(float (&s)[M][N][4], int ahead) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (ahead + 8 * n + 2 * (lane % 4) + i % 2 > 16 * m + 8 * (i / 2) + lane / 4) s[m][n][i] = -infinity();
}
template <int M, int N>
__device__ __forceinline__ void mask_queries(float (&s)[M][N][4], int ahead) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (ahead + 16 * m + 8 * (i / 2) + lane / 4 > 8 * n + 2 * (lane % 4) + i % 2) s[m][n][i] = -infinity();
}

// Writes the accumulators of a warp, times a factor for each of its rows, to the rows from `first` on that exist.
template <int M>
__device__ __forceinline__ void store(bf16* matrix, size_t stride, int first, int rows,
                                      const float (&c)[M][2 * BLOCKS][4], const float (&factor)[M][2]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = first + 16 * m + 8 * half + lane / 4;
      if (row >= rows) continue;
      bf16* to = matrix + row * stride + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; n++) {
        unsigned pair = pack_bf16(c[m][n][2 * half] * factor[m][half], c[m][n][2 * half + 1] * factor[m][half]);
        // Columns of the head from the pair on.
        int columns = HEAD - 8 * n - (HEAD % 8 == 0 ? 0 : 2 * (lane % 4));
        if (HEAD % 2 == 0) {
          if (columns > 0) *reinterpret_cast<unsigned*>(to + 8 * n) = pair;
        } else {
          if (columns > 0) to[8 * n] = bf16{static_cast<unsigned short>(pair)};
          if (columns > 1) to[8 * n + 1] = bf16{static_cast<unsigned short>(pair >> 16)};
        }
      }
    }
}

#else  // plain

// Rows of a tile, of queries and of keys; and of a 128-thread block: thread i works on rows i/8, i/8 + 16, ...
// and on columns i%8, i%8 + 8, ... of scores, or on chunks of four i%8, i%8 + 8, ... of a row. The eight threads of
// a row are neighbours in a warp.
constexpr int TILE = HEAD <= 128 ? 32 : 16;
constexpr int OWN_ROWS = TILE / 16;
constexpr int OWN_SCORES = TILE / 8;

// Rows are padded with zeros to whole chunks, and lie an odd number of chunks apart: eight rows, eight banks.
constexpr int CHUNKS = (HEAD + 3) / 4;
constexpr int STRIDE = (CHUNKS | 1) * 4;
constexpr int OWN_CHUNKS = (CHUNKS + 7) / 8;

// Scores and the like: a row of TILE, apart by an odd number of chunks too.
constexpr int SCORE_STRIDE = TILE + 4;

struct Own {
  int row, column;
  __device__ __forceinline__ Own() : row(threadIdx.x / 8), column(threadIdx.x % 8) {}
};

// Copies a tile's rows from `first` on; rows that do not exist are zero.
__device__ __forceinline__ void fetch(float* tile, const elem* matrix, size_t stride, int first, int rows) {
  for (int i = threadIdx.x; i < TILE * CHUNKS * 4; i += THREADS) {
    int row = i / (CHUNKS * 4), column = i % (CHUNKS * 4);
    bool exists = first + row < rows && column < HEAD;
    tile[row * STRIDE + column] = exists ? to_float(matrix[(first + row) * stride + column]) : 0.0f;
  }
}

__device__ __forceinline__ float4 chunk_at(const float* p) { return *reinterpret_cast<const float4*>(p); }

// c = A·Bᵀ, the thread's elements of it.
__device__ __forceinline__ void multiply_rows(float (&c)[OWN_ROWS][OWN_SCORES], const float* a, const float* b) {
  Own own;
  for (int i = 0; i < OWN_ROWS; i++)
    for (int j = 0; j < OWN_SCORES; j++) c[i][j] = 0.0f;
#pragma unroll 4
  for (int k = 0; k < CHUNKS * 4; k += 4) {
    float4 y[OWN_SCORES];
#pragma unroll
    for (int j = 0; j < OWN_SCORES; j++) y[j] = chunk_at(b + (own.column + 8 * j) * STRIDE + k);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      float4 x = chunk_at(a + (own.row + 16 * i) * STRIDE + k);
#pragma unroll
      for (int j = 0; j < OWN_SCORES; j++) {
        c[i][j] = fmaf(x.x, y[j].x, c[i][j]);
        c[i][j] = fmaf(x.y, y[j].y, c[i][j]);
        c[i][j] = fmaf(x.z, y[j].z, c[i][j]);
        c[i][j] = fmaf(x.w, y[j].w, c[i][j]);
      }
    }
  }
}

// c += P·T, the thread's chunks of it; P in shared memory, of which a thread reads only elements that the eight threads of
// its rows wrote: a warp's barrier between is enough.
__device__ __forceinline__ void multiply_add(float4 (&c)[OWN_ROWS][OWN_CHUNKS], const float* p, const float* tile) {
  Own own;
#pragma unroll 4
  for (int k = 0; k < TILE; k++) {
    float x[OWN_ROWS];
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) x[i] = p[(own.row + 16 * i) * SCORE_STRIDE + k];
#pragma unroll
    for (int j = 0; j < OWN_CHUNKS; j++) {
      int chunk = own.column + 8 * j;
      if (chunk >= CHUNKS) continue;
      float4 y = chunk_at(tile + k * STRIDE + 4 * chunk);
#pragma unroll
      for (int i = 0; i < OWN_ROWS; i++) {
        c[i][j].x = fmaf(x[i], y.x, c[i][j].x);
        c[i][j].y = fmaf(x[i], y.y, c[i][j].y);
        c[i][j].z = fmaf(x[i], y.z, c[i][j].z);
        c[i][j].w = fmaf(x[i], y.w, c[i][j].w);
      }
    }
  }
}

// Writes the thread's chunks, times a factor for each of its rows, to the rows from `first` on that exist.
__device__ __forceinline__ void store(elem* matrix, size_t stride, int first, int rows,
                                      const float4 (&c)[OWN_ROWS][OWN_CHUNKS], const float (&factor)[OWN_ROWS]) {
  Own own;
#pragma unroll
  for (int i = 0; i < OWN_ROWS; i++) {
    int row = first + own.row + 16 * i;
    if (row >= rows) continue;
#pragma unroll
    for (int j = 0; j < OWN_CHUNKS; j++) {
      const float parts[4] = {c[i][j].x, c[i][j].y, c[i][j].z, c[i][j].w};
      int column = 4 * (own.column + 8 * j);
#pragma unroll
      for (int part = 0; part < 4; part++)
        if (column + part < HEAD)
          matrix[row * stride + column + part] = from_float<elem>(parts[part] * factor[i]);
    }
  }
}

#endif
