// Small matrix products whose right side is one panel wide: C[m][n] (+)= Σ_k A[m·sm + k·sk] · B[k·ldb + n].
// A is read one scalar at a time and broadcast, so keys and values need no packing. A's layout is either BY_ROW
// (a row of A is a row of memory, lda apart) or BY_COLUMN (a column of A is).
#pragma once
#include "simd.h"

namespace spanformer {
namespace SPANFORMER_ISA {

enum Layout { BY_ROW, BY_COLUMN };

template <Layout LAYOUT, int M, bool ADD>
SPANFORMER_INLINE void product_rows(long K, const float* __restrict A, long lda, const float* __restrict B, long ldb,
                                    float* __restrict C, long ldc) {
  const long sm = LAYOUT == BY_ROW ? lda : 1, sk = LAYOUT == BY_ROW ? 1 : lda;
  vf c[M][VECS];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < VECS; n++) c[m][n] = ADD ? load(C + m * ldc + n * W) : vf{};
  for (long k = 0; k < K; k++) {
    vf b[VECS];
#pragma GCC unroll 4
    for (int n = 0; n < VECS; n++) b[n] = load(B + k * ldb + n * W);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const vf a = set1(A[m * sm + k * sk]);
#pragma GCC unroll 4
      for (int n = 0; n < VECS; n++) c[m][n] = a * b[n] + c[m][n];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < VECS; n++) store(C + m * ldc + n * W, c[m][n]);
}

template <Layout LAYOUT, int M, bool ADD>
static inline void product_dispatch(long r, long K, const float* A, long lda, const float* B, long ldb, float* C,
                                    long ldc) {
  if constexpr (M > 0) {
    if (r == M)
      product_rows<LAYOUT, M, ADD>(K, A, lda, B, ldb, C, ldc);
    else
      product_dispatch<LAYOUT, M - 1, ADD>(r, K, A, lda, B, ldb, C, ldc);
  }
}

// Any number of rows, split evenly: a last group of one row would wait on the latency of its own sums.
template <Layout LAYOUT, bool ADD>
static inline void product(long M, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc) {
  if (M <= 0) return;
  const long groups = (M + ROWS - 1) / ROWS, base = M / groups, extra = M % groups;
  for (long t = 0, m = 0; t < groups; t++) {
    const long r = base + (t < extra);
    product_dispatch<LAYOUT, ROWS, ADD>(r, K, A + m * (LAYOUT == BY_ROW ? lda : 1), lda, B, ldb, C + m * ldc, ldc);
    m += r;
  }
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
