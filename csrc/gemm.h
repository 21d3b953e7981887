// Small matrix products whose right factor is one panel wide: C[m][n] (+)= Σ_k A[m·sm + k·sk] · B[k·ldb + n].
// A is read one scalar at a time and broadcast, so keys and values need no packing. A is stored BY_ROW (rows are
// contiguous, lda apart) or BY_COLUMN (columns are).
#pragma once
#include "simd.h"

namespace spanformer {
namespace SPANFORMER_ISA {

enum Layout { BY_ROW, BY_COLUMN };

// The half of the panel's lanes that each step k needs: both, except the first `low` steps (lower half only) and those
// from `high` on (upper half only). The corners of the band are such triangles, a sixth of the work of a short span.
struct Halves {
  long low, high;
};

template <Layout LAYOUT, int M, int N, bool ADD, bool HALVES>
SPANFORMER_INLINE void product_rows(long K, const float* __restrict A, long lda, const float* __restrict B, long ldb,
                                    float* __restrict C, long ldc, Halves halves) {
  const long sm = LAYOUT == BY_ROW ? lda : 1, sk = LAYOUT == BY_ROW ? 1 : lda;
  vf c[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) c[m][n] = vf{};
#define SPANFORMER_STEPS(FROM, TO, FIRST, LAST)                                                     \
  for (long k = FROM; k < TO; k++) {                                                                \
    vf b[N];                                                                                        \
    _Pragma("GCC unroll 4") for (int n = FIRST; n < LAST; n++) b[n] = load(B + k * ldb + n * W);    \
    _Pragma("GCC unroll 16") for (int m = 0; m < M; m++) {                                          \
      const vf a = set1(A[m * sm + k * sk]);                                                        \
      _Pragma("GCC unroll 4") for (int n = FIRST; n < LAST; n++) c[m][n] = a * b[n] + c[m][n];      \
    }                                                                                               \
  }
  if constexpr (HALVES) {
    SPANFORMER_STEPS(0, halves.low, 0, N / 2)
    SPANFORMER_STEPS(halves.low, halves.high, 0, N)
    SPANFORMER_STEPS(halves.high, K, N / 2, N)
  } else {
    SPANFORMER_STEPS(0, K, 0, N)
  }
#undef SPANFORMER_STEPS
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      float* to = C + m * ldc + n * W;
      store(to, ADD ? load(to) + c[m][n] : c[m][n]);  // add the old value last: its error does not grow with K
    }
}

template <Layout LAYOUT, int M, int N, bool ADD, bool HALVES>
static inline void product_dispatch(long r, long K, const float* A, long lda, const float* B, long ldb, float* C,
                                    long ldc, Halves halves) {
  if constexpr (M > 0) {
    if (r == M)
      product_rows<LAYOUT, M, N, ADD, HALVES>(K, A, lda, B, ldb, C, ldc, halves);
    else
      product_dispatch<LAYOUT, M - 1, N, ADD, HALVES>(r, K, A, lda, B, ldb, C, ldc, halves);
  }
}

// Any number of rows, N vectors wide, in even groups: a last group of one row would wait for the latency of its sums.
template <Layout LAYOUT, bool ADD, int N = VECS, bool HALVES = false>
static inline void product(long M, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc,
                           Halves halves = {0, 0}) {
  if (M <= 0) return;
  constexpr int MOST = ROWS * VECS / N;
  const long groups = (M + MOST - 1) / MOST, base = M / groups, extra = M % groups;
  for (long t = 0, m = 0; t < groups; t++) {
    const long r = base + (t < extra);
    const float* rows = A + m * (LAYOUT == BY_ROW ? lda : 1);
    product_dispatch<LAYOUT, MOST, N, ADD, HALVES>(r, K, rows, lda, B, ldb, C + m * ldc, ldc, halves);
    m += r;
  }
}

// C[r][lane] = A·B, where rows before halves.low need only the lower half of the lanes and rows from halves.high on only
// the upper half; the other half of such a row is 0.
static inline void product_of_band(long M, long K, const float* A, long lda, const float* B, long ldb, float* C,
                                   long ldc, Halves halves) {
  constexpr int HALF = PANEL / 2;
  product<BY_ROW, false, VECS / 2>(halves.low, K, A, lda, B, ldb, C, ldc);
  product<BY_ROW, false>(halves.high - halves.low, K, A + halves.low * lda, lda, B, ldb, C + halves.low * ldc, ldc);
  product<BY_ROW, false, VECS / 2>(M - halves.high, K, A + halves.high * lda, lda, B + HALF, ldb,
                                   C + halves.high * ldc + HALF, ldc);
  for (long r = 0; r < halves.low; r++) std::memset(C + r * ldc + HALF, 0, sizeof(float) * HALF);
  for (long r = halves.high; r < M; r++) std::memset(C + r * ldc, 0, sizeof(float) * HALF);
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
