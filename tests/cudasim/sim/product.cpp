// Products in blocks of kRows x kCols, whose sums stay in registers while k passes. Both operands are first packed into
// strips of f32 as wide as a block, zeros at their ends.
#include "product.h"

#include <cstring>
#include <vector>

// One version for processors with AVX2, one for those without, chosen when the library is loaded. No fused
// multiply-add in either: they give the same bits.
#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

namespace cudasim {
namespace {

constexpr int kRows = 16, kCols = 6;
typedef float Vec __attribute__((vector_size(32), aligned(4), may_alias));

// sums[c][r] of a strip of A (k x kRows) and one of B (k x kCols).
CLONES void block(int64_t k, const float* a, const float* b, float* sums) {
  Vec s[kCols][2] = {};
  for (int64_t q = 0; q < k; q++, a += kRows, b += kCols) {
    Vec lo = *reinterpret_cast<const Vec*>(a), hi = *reinterpret_cast<const Vec*>(a + 8);
    for (int c = 0; c < kCols; c++) {
      s[c][0] += lo * b[c];
      s[c][1] += hi * b[c];
    }
  }
  memcpy(sums, s, sizeof s);
}

inline float widen(uint16_t h) {
  uint32_t u = uint32_t(h) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline float widen(float f) { return f; }

// Strips of `width` lines: strip[s][q][line]. A line is a row of A or a column of B, `next` apart; q advances by `step`.
template <class T>
void pack(const T* p, int64_t lines, int64_t next, int64_t k, int64_t step, int width, float* out) {
  for (int64_t first = 0; first < lines; first += width, out += k * width) {
    const T* from = p + first * next;
    int64_t there = lines - first < width ? lines - first : width;
    if (next == 1) {
      for (int64_t q = 0; q < k; q++)
        for (int64_t l = 0; l < there; l++) out[q * width + l] = widen(from[q * step + l]);
    } else {
      for (int64_t l = 0; l < there; l++)
        for (int64_t q = 0; q < k; q++) out[q * width + l] = widen(from[l * next + q * step]);
    }
    for (int64_t q = 0; there < width && q < k; q++)
      for (int64_t l = there; l < width; l++) out[q * width + l] = 0;
  }
}

// To so many bits of mantissa: to the nearest, ties away from zero, as `cvt.rna` does.
inline float rounded(float f, int mantissa) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7f800000) == 0x7f800000) return f;  // not finite
  int dropped = kMantissa - mantissa;
  u = (u + (1u << (dropped - 1))) >> dropped << dropped;
  memcpy(&f, &u, 4);
  return f;
}

float* packed(const Matrix& m, int64_t lines, int64_t next, int64_t k, int64_t step, int width, int mantissa,
              std::vector<float>& space) {
  size_t size = size_t((lines + width - 1) / width * width * k);
  if (space.size() < size) space.resize(size);
  if (m.bf16) pack(static_cast<const uint16_t*>(m.p), lines, next, k, step, width, space.data());
  else pack(static_cast<const float*>(m.p), lines, next, k, step, width, space.data());
  if (mantissa < kMantissa)
    for (size_t i = 0; i < size; i++) space[i] = rounded(space[i], mantissa);
  return space.data();
}

}  // namespace

void product(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, int mantissa, float* out) {
  static std::vector<float> space_a, space_b;  // device work runs one piece at a time
  const float* pa = packed(a, m, a.row, k, a.column, kRows, mantissa, space_a);
  const float* pb = packed(b, n, b.column, k, b.row, kCols, mantissa, space_b);
  for (int64_t j = 0; j < n; j += kCols, pb += k * kCols) {
    int64_t cols = n - j < kCols ? n - j : kCols;
    for (int64_t i = 0; i < m; i += kRows) {
      int64_t rows = m - i < kRows ? m - i : kRows;
      float sums[kCols][kRows];
      block(k, pa + i * k, pb, sums[0]);
      for (int64_t c = 0; c < cols; c++) memcpy(out + i + (j + c) * m, sums[c], rows * sizeof(float));
    }
  }
}

void row_sums(int64_t rows, int64_t k, const Matrix& a, float* out) {
  for (int64_t i = 0; i < rows; i++) {
    float s = 0;
    for (int64_t q = 0; q < k; q++) s += load(a.p, a.bf16, i * a.row + q * a.column);
    out[i] = s;
  }
}

float load(const void* p, bool bf16, int64_t i) {
  return bf16 ? widen(static_cast<const uint16_t*>(p)[i]) : static_cast<const float*>(p)[i];
}

void store(void* p, bool bf16, int64_t i, float v) {
  if (!bf16) {
    static_cast<float*>(p)[i] = v;
    return;
  }
  uint32_t u;
  memcpy(&u, &v, 4);
  bool nan = (u & 0x7fffffff) > 0x7f800000;
  static_cast<uint16_t*>(p)[i] = nan ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

}  // namespace cudasim
