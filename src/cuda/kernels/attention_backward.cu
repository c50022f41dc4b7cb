// The backward of causal attention, in three kernels after one another. With p = e^(scale·s - lse), s = q·kᵀ:
//   attention_delta         delta = Σ y·dy of each query and head; overwrites delta
//   attention_backward_kv   dv = pᵀ·dy, dk = scale·dsᵀ·q; overwrites the keys' and values' parts of dqkv
//   attention_backward_q    dq = scale·ds·k; overwrites the queries' part of dqkv
// where ds = p ∘ (dy·vᵀ - delta). Layouts and the two ways of computing are in attention.cuh.
//
// A block owns the rows whose gradient it sums, and sums in the order of the rows it walks over: two runs give the
// same bits. The usual single kernel computes s and dy·vᵀ once instead of twice, but then blocks must add to each
// other's dq, in the order of their arrival.
#include "attention.cuh"

// Block 128 threads, grid (⌈time / 16⌉, heads, batch), no dynamic shared memory. Eight lanes share a query.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_delta(const elem* __restrict__ y, const elem* __restrict__ dy, float* __restrict__ delta, int batch,
                int time, int heads, int kv_heads) {
  const Place place(time, heads, kv_heads, blockIdx.y);
  const int query = blockIdx.x * 16 + threadIdx.x / 8, lane = threadIdx.x % 8;
  // Lanes past the end stay for the sum.
  const elem* y_row = place.single(y) + min(query, time - 1) * place.width;
  const elem* dy_row = place.single(dy) + min(query, time - 1) * place.width;
  float sum = 0.0f;
#if defined(TENSOR_CORES) && HEAD % 8 == 0
#pragma unroll
  for (int i = 8 * lane; i < HEAD; i += 64) {
    const uint4 a = *reinterpret_cast<const uint4*>(y_row + i), b = *reinterpret_cast<const uint4*>(dy_row + i);
    const unsigned x[4] = {a.x, a.y, a.z, a.w}, dx[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      sum = fmaf(low_float(x[pair]), low_float(dx[pair]), sum);
      sum = fmaf(high_float(x[pair]), high_float(dx[pair]), sum);
    }
  }
#else
  for (int i = lane; i < HEAD; i += 8) sum = fmaf(to_float(y_row[i]), to_float(dy_row[i]), sum);
#endif
  sum = warp_sum<8>(sum);
  if (lane == 0 && query < time) delta[place.softmax + query] = sum;
}

#ifdef TENSOR_CORES

// A warp owns 16·M rows, keys in one kernel and queries in the other: two times 16, so that a fragment read from shared
// memory is used by two MMAs, if the registers have room for the gradients.
constexpr int M = HEAD <= 64 ? 2 : 1;
constexpr int TILE = 64 * M;                 // rows of a block
constexpr int STEP = HEAD <= 128 ? 32 : 16;  // rows per step

// Above HEAD 128 the registers have no room for the gradients of keys and of values together: of two neighbouring blocks with the
// same keys, the first sums the keys' gradient and the second the values'.
constexpr int PARTS = HEAD <= 128 ? 1 : 2;

// Block 128 threads, grid (⌈time / TILE⌉·PARTS, kv_heads, batch) with TILE = 128 up to HEAD 64 and 64 above, dynamic shared
// memory 2·ROW·(2·TILE + 4·STEP) + 16·STEP bytes: 25 088 up to HEAD 32, 49 664 up to 64, 66 048 up to 128, 98 560 above.
//
// Scores are computed as keys × queries: the accumulators of pᵀ and dsᵀ can then be left operands directly, like those
// of p in the forward, without shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_kv(const elem* __restrict__ qkv, const elem* __restrict__ dy, const float* __restrict__ lse,
                      const float* __restrict__ delta, elem* __restrict__ dqkv, int batch, int time, int heads,
                      int kv_heads) {
  extern __shared__ __align__(128) bf16 shared[];
  bf16* const k_tile = shared;
  bf16* const v_tile = k_tile + TILE * ROW;
  bf16* const q_tiles = v_tile + TILE * ROW;       // two, in turn
  bf16* const dy_tiles = q_tiles + 2 * STEP * ROW;
  // lse (in base 2) and delta of each query, in turn as well
  float* const row_tiles = reinterpret_cast<float*>(dy_tiles + 2 * STEP * ROW);

  // The key head, and the query heads that share it, one after the other.
  const int group = heads / kv_heads, head0 = blockIdx.y * group;
  const Place place(time, heads, kv_heads, head0);
  const size_t stride = place.stride;
  const float scale = softmax_scale(), scale2 = scale * LOG2_E;

  // All queries see the first keys, few see the last: long blocks first. Queries before the block's first key see none
  // of its keys.
  const int first = blockIdx.x / PARTS * TILE, steps_of_head = tiles_for(time - first, STEP), steps = steps_of_head * group;
  const int lane = threadIdx.x % 32, warp_first = first + threadIdx.x / 32 * 16 * M;
  const bool of_keys = blockIdx.x % PARTS == 0, of_values = blockIdx.x % PARTS == PARTS - 1;

  // Thread i loads lse or delta of query i%STEP. Queries that do not exist have p = 2^(s - ∞) = 0.
  static_assert(2 * STEP <= THREADS, "a thread for each lse and delta");
  const bool is_lse = threadIdx.x < STEP;
  const float* const row_values = (is_lse ? lse : delta) + place.softmax;
  auto row_value = [=](int step) {
    int query = first + step % steps_of_head * STEP + threadIdx.x % STEP;
    float x = query < time ? row_values[static_cast<size_t>(step / steps_of_head) * time + query] : infinity();
    return is_lse ? x * LOG2_E : query < time ? x : 0.0f;
  };
  auto fetch_queries = [=](int step) {
    const Place of(time, heads, kv_heads, head0 + step / steps_of_head);
    const int query0 = first + step % steps_of_head * STEP, turn = step % 2;
    fetch<STEP>(q_tiles + turn * STEP * ROW, of.queries(qkv), stride, query0, time);
    fetch<STEP>(dy_tiles + turn * STEP * ROW, of.single(dy), of.width, query0, time);
  };

  fetch<TILE>(k_tile, place.keys(qkv), stride, first, time);
  if (of_keys) fetch<TILE>(v_tile, place.values(qkv), stride, first, time);
  fetch_queries(0);
  cp_async_commit();
  float row_next = row_value(0);

  Own<M, false> own_k(k_tile), own_v(v_tile);
  float sums[PARTS == 1 ? 2 : 1][M][2 * BLOCKS][4] = {};
  auto &dk = sums[0], &dv = sums[PARTS == 1 ? 1 : 0];

  for (int step = 0; step < steps; step++) {
    const int query0 = first + step % steps_of_head * STEP, turn = step % 2;
    const bf16 *q_tile = q_tiles + turn * STEP * ROW, *dy_tile = dy_tiles + turn * STEP * ROW;
    float* const rows = row_tiles + turn * 2 * STEP;
    if (threadIdx.x < 2 * STEP) rows[threadIdx.x] = row_next;
    // One barrier ensures both that this step's tiles have arrived and that the last step's may be overwritten.
    cp_async_wait<0>();
    __syncthreads();
    if (step + 1 < steps) {
      fetch_queries(step + 1);
      cp_async_commit();
      row_next = row_value(step + 1);  // arrives while this step computes
    }
    if (query0 + STEP <= warp_first) continue;  // all before the warp's first key

    float p[M][STEP / 8][4], ds[M][STEP / 8][4] = {};
    multiply_rows(p, own_k, q_tile);
    if (of_keys) multiply_rows(ds, own_v, dy_tile);
    if (query0 < warp_first + 16 * M - 1) mask_queries(p, warp_first - query0);
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) {
      const int column = 8 * n + 2 * (lane % 4);
      const float lse2[2] = {rows[column], rows[column + 1]};
      const float deltas[2] = {rows[STEP + column], rows[STEP + column + 1]};
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          p[m][n][i] = exp2_fast(fmaf(p[m][n][i], scale2, -lse2[i % 2]));
          ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - deltas[i % 2]);
        }
    }
    if (of_values) multiply_add(dv, p, dy_tile);
    if (of_keys) multiply_add(dk, ds, q_tile);
  }

  float one[M][2], scales[M][2];
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) one[m][half] = 1.0f, scales[m][half] = scale;
  if (of_keys) store(place.keys(dqkv), stride, warp_first, time, dk, scales);
  if (of_values) store(place.values(dqkv), stride, warp_first, time, dv, one);
}

// Block 128 threads, grid (⌈time / TILE⌉, heads, batch) as above, dynamic shared memory 2·ROW·(2·TILE + 4·STEP)
// bytes: 24 576 up to HEAD 32, 49 152 up to 64, 65 536 up to 128, 98 304 above.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_q(const elem* __restrict__ qkv, const elem* __restrict__ dy, const float* __restrict__ lse,
                     const float* __restrict__ delta, elem* __restrict__ dqkv, int batch, int time, int heads,
                      int kv_heads) {
  extern __shared__ __align__(128) bf16 shared[];
  bf16* const q_tile = shared;
  bf16* const dy_tile = q_tile + TILE * ROW;
  bf16* const k_tiles = dy_tile + TILE * ROW;      // two, in turn
  bf16* const v_tiles = k_tiles + 2 * STEP * ROW;

  const Place place(time, heads, kv_heads, blockIdx.y);
  const bf16 *k = place.keys(qkv), *v = place.values(qkv);
  const size_t stride = place.stride;
  const float scale = softmax_scale(), scale2 = scale * LOG2_E;
  const int first = (gridDim.x - 1 - blockIdx.x) * TILE;  // long blocks first
  const int steps = tiles_for(min(first + TILE, time), STEP);
  const int lane = threadIdx.x % 32, warp_first = first + threadIdx.x / 32 * 16 * M;

  fetch<TILE>(q_tile, place.queries(qkv), stride, first, time);
  fetch<TILE>(dy_tile, place.single(dy), place.width, first, time);
  fetch<STEP>(k_tiles, k, stride, 0, time);
  fetch<STEP>(v_tiles, v, stride, 0, time);
  cp_async_commit();

  float lse2[M][2], deltas[M][2], scales[M][2];
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const size_t at = place.softmax + min(warp_first + 16 * m + 8 * half + lane / 4, time - 1);
      lse2[m][half] = lse[at] * LOG2_E, deltas[m][half] = delta[at], scales[m][half] = scale;
    }

  // Held in registers if there is room: reading them at each use would take longer than the MMAs.
  Own<M, HEAD <= 128> own_q(q_tile), own_dy(dy_tile);
  float dq[M][2 * BLOCKS][4] = {};

  for (int step = 0; step < steps; step++) {
    cp_async_wait<0>();
    __syncthreads();
    const int key0 = step * STEP, now = step % 2 * STEP * ROW, next = STEP * ROW - now;
    if (step + 1 < steps) {
      fetch<STEP>(k_tiles + next, k, stride, key0 + STEP, time);
      fetch<STEP>(v_tiles + next, v, stride, key0 + STEP, time);
      cp_async_commit();
    }
    if (step == 0) own_q.hold(), own_dy.hold();
    if (key0 >= warp_first + 16 * M) continue;  // all after the warp's last query

    float p[M][STEP / 8][4], ds[M][STEP / 8][4];
    multiply_rows(p, own_q, k_tiles + now);
    multiply_rows(ds, own_dy, v_tiles + now);
    if (key0 + STEP - 1 > warp_first) mask_keys(p, key0 - warp_first);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float x = exp2_fast(fmaf(p[m][n][i], scale2, -lse2[m][i / 2]));
          ds[m][n][i] = x * (ds[m][n][i] - deltas[m][i / 2]);
        }
    multiply_add(dq, ds, k_tiles + now);
  }
  store(place.queries(dqkv), stride, warp_first, time, dq, scales);
}

#else  // plain

// The thread's scores, from p = e^(scale·s - lse) and dp = dy·vᵀ.
__device__ __forceinline__ float probability(float s, float scale, float lse) {
  return exp2_fast((s * scale - lse) * LOG2_E);
}

// Block 128 threads, grid (⌈time / TILE⌉, kv_heads, batch), dynamic shared memory
// 4·(4·TILE·STRIDE + 2·TILE·(TILE + 4) + 2·TILE) bytes, TILE and STRIDE as in attention.cu; at most 77 056 bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_kv(const elem* __restrict__ qkv, const elem* __restrict__ dy, const float* __restrict__ lse,
                      const float* __restrict__ delta, elem* __restrict__ dqkv, int batch, int time, int heads,
                      int kv_heads) {
  extern __shared__ __align__(16) float shared[];
  float* const k_tile = shared;
  float* const v_tile = k_tile + TILE * STRIDE;
  float* const q_tile = v_tile + TILE * STRIDE;
  float* const dy_tile = q_tile + TILE * STRIDE;
  float* const p = dy_tile + TILE * STRIDE;  // keys × queries, as all scores here
  float* const ds = p + TILE * SCORE_STRIDE;
  float* const lses = ds + TILE * SCORE_STRIDE;
  float* const deltas = lses + TILE;

  const Own own;
  const int group = heads / kv_heads, head0 = blockIdx.y * group;
  const Place place(time, heads, kv_heads, head0);
  const size_t stride = place.stride;
  const float scale = softmax_scale();
  const int first = blockIdx.x * TILE;  // the longest blocks come first by themselves
  const int steps_of_head = tiles_for(time - first, TILE);

  fetch(k_tile, place.keys(qkv), stride, first, time);
  fetch(v_tile, place.values(qkv), stride, first, time);
  float4 dk[OWN_ROWS][OWN_CHUNKS] = {}, dv[OWN_ROWS][OWN_CHUNKS] = {};

  // The query heads that share the keys, one after the other.
  for (int step = 0; step < steps_of_head * group; step++) {
    const Place of(time, heads, kv_heads, head0 + step / steps_of_head);
    const int query0 = first + step % steps_of_head * TILE;
    __syncthreads();
    fetch(q_tile, of.queries(qkv), stride, query0, time);
    fetch(dy_tile, of.single(dy), of.width, query0, time);
    if (threadIdx.x < TILE) {
      const int query = query0 + threadIdx.x;
      // A query that does not exist has p = 2^(s - ∞) = 0.
      lses[threadIdx.x] = query < time ? lse[of.softmax + query] : infinity();
      deltas[threadIdx.x] = query < time ? delta[of.softmax + query] : 0.0f;
    }
    __syncthreads();

    float s[OWN_ROWS][OWN_SCORES], dp[OWN_ROWS][OWN_SCORES];
    multiply_rows(s, k_tile, q_tile);
    multiply_rows(dp, v_tile, dy_tile);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++)
#pragma unroll
      for (int j = 0; j < OWN_SCORES; j++) {
        const int row = own.row + 16 * i, column = own.column + 8 * j;
        const float x = first + row <= query0 + column ? probability(s[i][j], scale, lses[column]) : 0.0f;
        p[row * SCORE_STRIDE + column] = x;
        ds[row * SCORE_STRIDE + column] = x * (dp[i][j] - deltas[column]);
      }
    __syncwarp();
    multiply_add(dv, p, dy_tile);
    multiply_add(dk, ds, q_tile);
  }

  float one[OWN_ROWS], scales[OWN_ROWS];
  for (int i = 0; i < OWN_ROWS; i++) one[i] = 1.0f, scales[i] = scale;
  store(place.keys(dqkv), stride, first, time, dk, scales);
  store(place.values(dqkv), stride, first, time, dv, one);
}

// Block 128 threads, grid (⌈time / TILE⌉, heads, batch), dynamic shared memory
// 4·(4·TILE·STRIDE + TILE·(TILE + 4)) bytes; at most 72 192 bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_q(const elem* __restrict__ qkv, const elem* __restrict__ dy, const float* __restrict__ lse,
                     const float* __restrict__ delta, elem* __restrict__ dqkv, int batch, int time, int heads,
                      int kv_heads) {
  extern __shared__ __align__(16) float shared[];
  float* const q_tile = shared;
  float* const dy_tile = q_tile + TILE * STRIDE;
  float* const k_tile = dy_tile + TILE * STRIDE;
  float* const v_tile = k_tile + TILE * STRIDE;
  float* const ds = v_tile + TILE * STRIDE;

  const Own own;
  const Place place(time, heads, kv_heads, blockIdx.y);
  const size_t stride = place.stride;
  const float scale = softmax_scale();
  const int first = (gridDim.x - 1 - blockIdx.x) * TILE;  // long blocks first

  fetch(q_tile, place.queries(qkv), stride, first, time);
  fetch(dy_tile, place.single(dy), place.width, first, time);
  float lses[OWN_ROWS], deltas[OWN_ROWS], scales[OWN_ROWS];
#pragma unroll
  for (int i = 0; i < OWN_ROWS; i++) {
    const size_t at = place.softmax + min(first + own.row + 16 * i, time - 1);
    lses[i] = lse[at], deltas[i] = delta[at], scales[i] = scale;
  }
  float4 dq[OWN_ROWS][OWN_CHUNKS] = {};

  for (int key0 = 0; key0 <= first; key0 += TILE) {
    __syncthreads();
    fetch(k_tile, place.keys(qkv), stride, key0, time);
    fetch(v_tile, place.values(qkv), stride, key0, time);
    __syncthreads();

    float s[OWN_ROWS][OWN_SCORES], dp[OWN_ROWS][OWN_SCORES];
    multiply_rows(s, q_tile, k_tile);
    multiply_rows(dp, dy_tile, v_tile);
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++)
#pragma unroll
      for (int j = 0; j < OWN_SCORES; j++) {
        const int row = own.row + 16 * i, column = own.column + 8 * j;
        const float x = key0 + column <= first + row ? probability(s[i][j], scale, lses[i]) : 0.0f;
        ds[row * SCORE_STRIDE + column] = x * (dp[i][j] - deltas[i]);
      }
    __syncwarp();
    multiply_add(dq, ds, k_tile);
  }
  store(place.queries(dqkv), stride, first, time, dq, scales);
}

#endif
