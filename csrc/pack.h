// Moving rows between memory (float32 or bfloat16, any row stride) and panels: X[D][PANEL], queries in the lanes.
#pragma once
#include <cmath>
#include <cstdlib>

#include "simd.h"

namespace spanformer {
namespace SPANFORMER_ISA {

struct bf16 {
  uint16_t bits;
};
SPANFORMER_INLINE float to_float(float x) { return x; }
SPANFORMER_INLINE float to_float(int8_t x) { return (float)x; }
SPANFORMER_INLINE float to_float(bf16 x) {
  const uint32_t b = (uint32_t)x.bits << 16;
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}
SPANFORMER_INLINE void put(float* p, float x) { *p = x; }
SPANFORMER_INLINE void put(bf16* p, float x) {  // round to nearest even; a NaN stays one
  uint32_t b;
  std::memcpy(&b, &x, 4);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// W numbers of a row.
SPANFORMER_INLINE vf load_row(const float* p) { return load(p); }
SPANFORMER_INLINE vf load_row(const bf16* p) {
  typedef uint16_t vh __attribute__((vector_size(W * 2)));
  vh x;
  std::memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vu) << 16);
}
SPANFORMER_INLINE vf load_row(const int8_t* p) {
  typedef int8_t vb __attribute__((vector_size(W)));
  vb x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, vi), vf);
}

// Memory that a thread keeps between calls: small calls would otherwise spend their time in the allocator.
class Arena {
 public:
  ~Arena() { std::free(base_); }
  void reserve(size_t floats) {
    if (floats > capacity_) {
      std::free(base_);
      capacity_ = (floats + 1023) / 1024 * 1024;
      base_ = static_cast<float*>(std::aligned_alloc(64, capacity_ * sizeof(float)));
      if (!base_) std::abort();
    }
    used_ = 0;
  }
  float* take(size_t floats) {
    float* p = base_ + used_;
    used_ += (floats + 15) / 16 * 16;
    return p;
  }
  static size_t rounded(size_t floats) { return (floats + 15) / 16 * 16; }

 private:
  float* base_ = nullptr;
  size_t capacity_ = 0, used_ = 0;
};

#if defined(__AVX2__)
// 8 × 8, each row of the source times `by` on the way.
SPANFORMER_INLINE void transpose_8(const float* s, long lds, float* d, long ldd, __m256 by) {
  __m256 r[8], t[8], u[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_mul_ps(_mm256_loadu_ps(s + i * lds), by);
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(d + i * ldd, _mm256_permute2f128_ps(u[i], u[i + 4], 0x20));
    _mm256_storeu_ps(d + (i + 4) * ldd, _mm256_permute2f128_ps(u[i], u[i + 4], 0x31));
  }
}
#endif

// W × W, each row of the source times `by` on the way.
SPANFORMER_INLINE void transpose_block(const float* s, long lds, float* d, long ldd, vf by) {
#if defined(SPANFORMER_USE_AVX2)
  transpose_8(s, lds, d, ldd, (__m256)by);
#else
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) d[j * ldd + i] = s[i * lds + j] * by[j];
#endif
}

// D[c][r] = S[r][c] for rows × columns, both multiples of 8.
static inline void transpose(const float* s, long lds, float* d, long ldd, long rows, long columns) {
#if defined(__AVX2__)
  for (long r = 0; r < rows; r += 8)
    for (long c = 0; c < columns; c += 8) transpose_8(s + r * lds + c, lds, d + c * ldd + r, ldd, _mm256_set1_ps(1.f));
#else
  for (long r = 0; r < rows; r++)
    for (long c = 0; c < columns; c++) d[c * ldd + r] = s[r * lds + c];
#endif
}

// n ≤ PANEL rows of length D into X[D][PANEL], times scale; lanes beyond n are zero.
template <class T>
static inline void pack_panel(const T* rows, long stride, long n, long D, float scale, float* X) {
  long d = 0;
  if constexpr (sizeof(T) == 4) {
    if (n == PANEL)
      for (; d + W <= D; d += W)
        for (int v = 0; v < VECS; v++)
          transpose_block(reinterpret_cast<const float*>(rows) + v * W * stride + d, stride, X + d * PANEL + v * W, PANEL,
                          set1(scale));
  }
  for (; d < D; d++)
    for (long i = 0; i < PANEL; i++) X[d * PANEL + i] = i < n ? to_float(rows[i * stride + d]) * scale : 0.f;
}

// X[D][PANEL] back into n rows, lane i times w[i].
template <class T>
static inline void unpack_panel(const float* X, long n, long D, const float* w, T* rows, long stride) {
  long d = 0;
  if constexpr (sizeof(T) == 4) {
    if (n == PANEL)
      for (; d + W <= D; d += W)
        for (int v = 0; v < VECS; v++)
          transpose_block(X + d * PANEL + v * W, PANEL, reinterpret_cast<float*>(rows) + v * W * stride + d, stride,
                          load(w + v * W));
  }
  for (; d < D; d++)
    for (long i = 0; i < n; i++) put(&rows[i * stride + d], X[d * PANEL + i] * w[i]);
}

// Rows as float32 with `ld` floats between them, zero beyond D: a view where memory allows it, else a copy in `scratch`.
struct View {
  const float* data;
  long ld;
};
template <class T>
static inline View as_float(const T* rows, long stride, long n, long D, long padded, float* scratch) {
  if constexpr (sizeof(T) == 4) {
    if (padded == D) return {reinterpret_cast<const float*>(rows), stride};
  }
  for (long i = 0; i < n; i++) {
    for (long d = 0; d < D; d++) scratch[i * padded + d] = to_float(rows[i * stride + d]);
    for (long d = D; d < padded; d++) scratch[i * padded + d] = 0.f;
  }
  return {scratch, padded};
}

// False if any number of the rows is NaN or infinite.
template <class T>
static inline bool all_finite(const T* rows, long stride, long n, long D) {
  float acc = 0.f;
  vf wide = vf{};
  for (long i = 0; i < n; i++) {
    long d = 0;
    if constexpr (sizeof(T) == 4)
      for (; d + W <= D; d += W) wide = load(reinterpret_cast<const float*>(rows) + i * stride + d) * set1(0.f) + wide;
    for (; d < D; d++) acc += to_float(rows[i * stride + d]) * 0.f;
  }
  return acc + sum(wide) == 0.f;
}

SPANFORMER_INLINE float dot(const float* a, const float* b, long n) {
  vf acc = vf{};
  long d = 0;
  for (; d + W <= n; d += W) acc = load(a + d) * load(b + d) + acc;
  float s = sum(acc);
  for (; d < n; d++) s += a[d] * b[d];
  return s;
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
