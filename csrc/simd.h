// Vectors of W floats by compiler vector extensions, with intrinsics only where the compiler needs them.
// The namespace is named after the instruction set that this is compiled for.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SPANFORMER_INLINE static inline __attribute__((always_inline))

namespace spanformer {
namespace SPANFORMER_ISA {

#if !defined(SPANFORMER_WIDTH)  // tests may set it, to run the code of wide vectors on a machine without them
#if defined(__AVX512F__)
#define SPANFORMER_WIDTH 16
#elif defined(__AVX2__)
#define SPANFORMER_WIDTH 8
#else
#define SPANFORMER_WIDTH 4
#endif
#endif
#if SPANFORMER_WIDTH == 16 && defined(__AVX512F__)
#define SPANFORMER_USE_AVX512 1
#elif SPANFORMER_WIDTH == 8 && defined(__AVX2__)
#define SPANFORMER_USE_AVX2 1
#endif
constexpr int W = SPANFORMER_WIDTH;

// A panel is a block of queries, one per lane; ROWS is the number of accumulator rows of a panel that fit into the
// registers (6 × 2 vectors of 16 with AVX2, 12 × 2 of 32 with AVX-512, 6 × 4 of 32 with NEON).
constexpr int PANEL = W == 16 ? 32 : 16;
constexpr int VECS = PANEL / W;
constexpr int ROWS = W == 16 ? 12 : 6;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));

SPANFORMER_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
SPANFORMER_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }

SPANFORMER_INLINE vf set1(float x) {
#if defined(SPANFORMER_USE_AVX512)
  return (vf)_mm512_set1_ps(x);
#elif defined(SPANFORMER_USE_AVX2)
  return (vf)_mm256_set1_ps(x);
#else
  vf r;
  for (int i = 0; i < W; i++) r[i] = x;
  return r;
#endif
}
SPANFORMER_INLINE vf vmax(vf a, vf b) {
#if defined(SPANFORMER_USE_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(SPANFORMER_USE_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
SPANFORMER_INLINE bool any(vi m) {
#if defined(SPANFORMER_USE_AVX512)
  return _mm512_test_epi32_mask((__m512i)m, (__m512i)m) != 0;
#elif defined(SPANFORMER_USE_AVX2)
  return _mm256_movemask_epi8((__m256i)m) != 0;
#else
  int32_t r = 0;
  for (int i = 0; i < W; i++) r |= m[i];
  return r != 0;
#endif
}
SPANFORMER_INLINE uint32_t lanes(vi m) {  // one bit for each lane that is not 0
#if defined(SPANFORMER_USE_AVX512)
  return _mm512_test_epi32_mask((__m512i)m, (__m512i)m);
#elif defined(SPANFORMER_USE_AVX2)
  return (uint32_t)_mm256_movemask_ps((__m256)m);
#else
  uint32_t r = 0;
  for (int i = 0; i < W; i++) r |= (uint32_t)(m[i] != 0) << i;
  return r;
#endif
}
SPANFORMER_INLINE float sum(vf x) {  // in a fixed order
  float u[W];
  std::memcpy(u, &x, sizeof u);
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) u[i] += u[i + n];
  return u[0];
}
SPANFORMER_INLINE vf lanes() {  // 0, 1, …, W − 1
  vf r;
  for (int i = 0; i < W; i++) r[i] = (float)i;
  return r;
}

// 2^x for x up to about 0; exactly 0 at and below −127, where the exponent's bits are all zero, so that a hidden score
// has weight 0.
SPANFORMER_INLINE vf vexp2(vf x) {
  x = vmax(x, set1(-127.f));
  const vf magic = set1(12582912.f);  // 1.5 · 2^23: adding it rounds to the nearest integer, kept in the low bits
  const vf t = x + magic;
  const vf f = x - (t - magic);
  vf p = set1(1.5403530393381609954e-4f);
  p = p * f + set1(1.3333558146428443423e-3f);
  p = p * f + set1(9.6181291076284771620e-3f);
  p = p * f + set1(5.5504108664821579953e-2f);
  p = p * f + set1(2.4022650695910071233e-1f);
  p = p * f + set1(6.9314718055994530942e-1f);
  p = p * f + set1(1.0f);
  return (vf)((vi)p + ((vi)t << 23));
}

// log2 x for positive, normal x.
SPANFORMER_INLINE vf vlog2(vf x) {
  vi e = ((vi)x >> 23) - 127;
  vf m = (vf)(((vi)x & 0x007fffff) | 0x3f800000);  // [1, 2)
  const vi big = m > set1(1.41421356f);
  m = big ? m * set1(0.5f) : m;
  e = e - big;  // a true lane is −1
  const vf t = (m - set1(1.f)) / (m + set1(1.f)), u = t * t;  // log m = 2 artanh t
  vf p = set1(0.41198583f);
  p = p * u + set1(0.57707802f);
  p = p * u + set1(0.96179669f);
  p = p * u + set1(2.88539008f);
  return p * t + __builtin_convertvector(e, vf);
}

SPANFORMER_INLINE vu vmix(vu x) {  // murmur3's finaliser, as ops/dropout.py
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}
SPANFORMER_INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
