// The forward of causal attention: y = softmax(q·kᵀ / √HEAD, keys up to the query)·v for each head, and
// lse = log of the softmax's denominator (of the scaled scores, nothing subtracted). Overwrites y and lse.
// Layouts and the two ways of computing are in attention.cuh.
//
// A block owns a tile of queries of one head and loops over tiles of keys and values. The softmax is computed online,
// with a running maximum and sum for each query: the sum is rescaled when the maximum grows.
#include "attention.cuh"

#ifdef TENSOR_CORES

// A warp owns two times 16 queries up to HEAD 128: each fragment of keys and values read from shared memory is used by
// two MMAs, else reading would take longer than multiplying. Registers limit the other sizes.
constexpr int M = HEAD <= 128 ? 2 : 1;
constexpr int TILE = 64 * M;                // queries of a block
constexpr int STEP = HEAD <= 64 ? 64 : 32;  // keys per step
constexpr bool HELD = HEAD <= 64;           // queries stay in registers

// Block 128 threads, grid (⌈time / TILE⌉, heads, batch), dynamic shared memory 2·ROW·(TILE + 4·STEP) bytes: 24 576 up to
// HEAD 32, 49 152 up to 64, 65 536 up to 128, 98 304 above.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const elem* __restrict__ qkv, elem* __restrict__ y, float* __restrict__ lse, int batch, int time,
                  int heads, int kv_heads) {
  extern __shared__ __align__(128) bf16 shared[];
  bf16* const q_tile = shared;
  bf16* const k_tiles = q_tile + TILE * ROW;      // two, in turn
  bf16* const v_tiles = k_tiles + 2 * STEP * ROW;

  const Place place(time, heads, kv_heads, blockIdx.y);
  const bf16 *q = place.queries(qkv), *k = place.keys(qkv), *v = place.values(qkv);
  const size_t stride = place.stride;
  const float scale = softmax_scale(), scale2 = scale * LOG2_E;

  // Later queries see more keys: the long blocks of a head start first, and the short ones fill the gaps.
  const int first = (gridDim.x - 1 - blockIdx.x) * TILE;
  const int steps = tiles_for(min(first + TILE, time), STEP);
  const int lane = threadIdx.x % 32, warp_first = first + threadIdx.x / 32 * 16 * M;

  fetch<TILE>(q_tile, q, stride, first, time);
  fetch<STEP>(k_tiles, k, stride, 0, time);
  fetch<STEP>(v_tiles, v, stride, 0, time);
  cp_async_commit();

  Own<M, HELD> own(q_tile);
  float o[M][2 * BLOCKS][4] = {}, top[M][2], total[M][2];
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) top[m][half] = -infinity(), total[m][half] = 0.0f;

  for (int step = 0; step < steps; step++) {
    // One barrier ensures both that this step's tiles have arrived and that the last step's may be overwritten.
    cp_async_wait<0>();
    __syncthreads();
    const int key0 = step * STEP, now = step % 2 * STEP * ROW, next = STEP * ROW - now;
    if (step + 1 < steps) {
      fetch<STEP>(k_tiles + next, k, stride, key0 + STEP, time);
      fetch<STEP>(v_tiles + next, v, stride, key0 + STEP, time);
      cp_async_commit();
    }
    if (step == 0) own.hold();
    if (key0 >= warp_first + 16 * M) continue;  // all after the warp's last query

    float s[M][STEP / 8][4];
    multiply_rows(s, own, k_tiles + now);

    // No query comes after the last key of the sequence: this masks keys that do not exist as well.
    if (key0 + STEP - 1 > warp_first) mask_keys(s, key0 - warp_first);

#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // The four lanes of a row share it. Every query sees key 0, so the maximum is finite from step 0 on.
        float high = s[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) high = fmaxf(high, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        high = fmaxf(top[m][half], warp_max<4>(high));
        float fade = exp2_fast((top[m][half] - high) * scale2), sum = 0.0f;
        top[m][half] = high;
#pragma unroll
        for (int n = 0; n < STEP / 8; n++)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; i++) {
            s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale2, -high * scale2));
            sum += s[m][n][i];
          }
        total[m][half] = total[m][half] * fade + sum;  // of this lane's keys: the lanes meet at the end
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; n++) o[m][n][2 * half] *= fade, o[m][n][2 * half + 1] *= fade;
      }
    multiply_add(o, s, v_tiles + now);
  }

  float inverse[M][2];
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = warp_sum<4>(total[m][half]);
      int query = warp_first + 16 * m + 8 * half + lane / 4;
      inverse[m][half] = 1.0f / sum;
      if (lane % 4 == 0 && query < time) lse[place.softmax + query] = top[m][half] * scale + logf(sum);
    }
  store(place.single(y), place.width, warp_first, time, o, inverse);
}

#else  // plain

// Block 128 threads, grid (⌈time / TILE⌉, heads, batch), dynamic shared memory 4·(3·TILE·STRIDE + TILE·(TILE + 4))
// bytes, where TILE = 32 up to HEAD 128 and 16 above, STRIDE = 4·(⌈HEAD / 4⌉ | 1); at most 55 296 bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const elem* __restrict__ qkv, elem* __restrict__ y, float* __restrict__ lse, int batch, int time,
                  int heads, int kv_heads) {
  extern __shared__ __align__(16) float shared[];
  float* const q_tile = shared;
  float* const k_tile = q_tile + TILE * STRIDE;
  float* const v_tile = k_tile + TILE * STRIDE;
  float* const p = v_tile + TILE * STRIDE;

  const Own own;
  const Place place(time, heads, kv_heads, blockIdx.y);
  const elem *k = place.keys(qkv), *v = place.values(qkv);
  const size_t stride = place.stride;
  const float scale = softmax_scale(), scale2 = scale * LOG2_E;
  const int first = (gridDim.x - 1 - blockIdx.x) * TILE;  // long blocks first

  fetch(q_tile, place.queries(qkv), stride, first, time);
  float4 o[OWN_ROWS][OWN_CHUNKS] = {};
  float top[OWN_ROWS], total[OWN_ROWS];
  for (int i = 0; i < OWN_ROWS; i++) top[i] = -infinity(), total[i] = 0.0f;

  // Tiles of keys are as long as those of queries, so the last one to see is the one at `first`.
  for (int key0 = 0; key0 <= first; key0 += TILE) {
    __syncthreads();
    fetch(k_tile, k, stride, key0, time);
    fetch(v_tile, v, stride, key0, time);
    __syncthreads();

    float s[OWN_ROWS][OWN_SCORES];
    multiply_rows(s, q_tile, k_tile);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const int query = first + own.row + 16 * i;
      float high = top[i];
#pragma unroll
      for (int j = 0; j < OWN_SCORES; j++) {
        if (key0 + own.column + 8 * j > query) s[i][j] = -infinity();
        high = fmaxf(high, s[i][j]);
      }
      // Every query sees key 0: the maximum is finite from the first tile on.
      high = warp_max<8>(high);
      float fade = exp2_fast((top[i] - high) * scale2), sum = 0.0f;
      top[i] = high;
#pragma unroll
      for (int j = 0; j < OWN_SCORES; j++) {
        float x = exp2_fast((s[i][j] - high) * scale2);
        p[(own.row + 16 * i) * SCORE_STRIDE + own.column + 8 * j] = x;
        sum += x;
      }
      total[i] = total[i] * fade + sum;  // of this thread's keys: the eight meet at the end
#pragma unroll
      for (int j = 0; j < OWN_CHUNKS; j++) o[i][j].x *= fade, o[i][j].y *= fade, o[i][j].z *= fade, o[i][j].w *= fade;
    }
    __syncwarp();
    multiply_add(o, p, v_tile);
  }

  float inverse[OWN_ROWS];
#pragma unroll
  for (int i = 0; i < OWN_ROWS; i++) {
    float sum = warp_sum<8>(total[i]);
    int query = first + own.row + 16 * i;
    inverse[i] = 1.0f / sum;
    if (own.column == 0 && query < time) lse[place.softmax + query] = top[i] * scale + logf(sum);
  }
  store(place.single(y), place.width, first, time, o, inverse);
}

#endif
