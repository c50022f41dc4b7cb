// The arithmetic of libcublasLt's stand-in.
#pragma once
#include <cstdint>

namespace cudasim {

// A matrix in memory: element (i, j) at i * row + j * column; bf16 or f32.
struct Matrix {
  const void* p;
  bool bf16;
  int64_t row, column;
};

// out[i + j * m] = sum over q of a(i, q) * b(q, j), each sum in f32 in the order of q: the same bits on every machine
// and for every way that the operands may lie in memory. Operands are first rounded to so many bits of mantissa.
void product(int64_t m, int64_t n, int64_t k, const Matrix& a, const Matrix& b, int mantissa, float* out);

constexpr int kMantissa = 23, kMantissaTf32 = 10, kMantissaBf16 = 7;

// Sums over q: of a's row i (out[i], as op(A) has them), or of b's column j.
void row_sums(int64_t rows, int64_t k, const Matrix& a, float* out);

float load(const void* p, bool bf16, int64_t i);
void store(void* p, bool bf16, int64_t i, float v);  // bf16: rounds to nearest even

}  // namespace cudasim
