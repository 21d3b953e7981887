// Keys and values in 4 bits: x_d ≈ low_g + step_g · c_d, c_d = 0 … 15. ops/decode/codes.py writes the same codes.
//
// A vector's codes fill a multiple of 32 numbers; byte i of each 16 holds number i in its low half and 16 + i in its high
// one. 32 numbers share a step and a low, in bfloat16: planes of one number for each slot, the steps of all groups before the
// lows. Keys are rotated by blocks of Hadamard's matrix.
#pragma once
#include "exact.h"

namespace spanformer {
namespace SPANFORMER_ISA {

struct nibbles {
  uint8_t two;
};
constexpr long NIBBLE_ROW = 32;  // numbers that share a step
constexpr long MOST_ROWS = 256 / NIBBLE_ROW;  // of a vector; 256 is the largest head size
static inline long nibble_rows(long n) { return (n + NIBBLE_ROW - 1) / NIBBLE_ROW; }

// Steps and lows of consecutive slots: those of group g of slot r are steps[g · plane + r] and lows[g · plane + r].
struct Marks {
  bf16 *steps, *lows;
  long plane;
  // of `slots` slots a row of the batch, from slot `slot` of row b on
  Marks(void* scales, long groups, long slots, long b, long slot)
      : steps(static_cast<bf16*>(scales) + b * 2 * groups * slots + slot), lows(steps + groups * slots), plane(slots) {}
  const bf16* step(long g, long r) const { return steps + g * plane + r; }
  const bf16* low(long g, long r) const { return lows + g * plane + r; }
};

// x [n] times blocks of Hadamard's matrix, as long as the largest power of two that divides n.
static inline void rotate(float* x, long n) {
  const long block = n & -n;
  for (long h = 1; h < block; h *= 2)
    for (long at = 0; at < n; at += 2 * h)
      for (long i = at; i < at + h; i++) {
        const float a = x[i], b = x[i + h];
        x[i] = a + b, x[i + h] = a - b;
      }
  const float by = (float)(1 / std::sqrt((double)block));
  for (long i = 0; i < n; i++) x[i] *= by;
}

// The nearest bfloat16 that is not below x.
static inline float bf16_above(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  b = (b >> 31 ? b : b + 0xffff) & 0xffff0000u;
  std::memcpy(&x, &b, 4);
  return x;
}

static inline void code_group(const float* x, long n, float& low, float& step, uint8_t* codes) {
  const float most = std::numeric_limits<float>::max(), none = std::numeric_limits<float>::quiet_NaN();
  bool bad = false;
  float least = x[0], top = least;
  for (long d = 0; d < n; d++) {
    bad = bad || !(std::fabs(x[d]) <= most);
    least = std::min(least, x[d]), top = std::max(top, x[d]);
  }
  low = -bf16_above(-least);
  step = bf16_above((top - low) / 15.f);
  bad = bad || !(std::fabs(low) <= most) || !(step <= most);
  const bool codes_any = !bad && step >= std::numeric_limits<float>::min();
  for (long d = 0; d < n; d++) codes[d] = codes_any ? (uint8_t)std::min(15.f, std::nearbyint((x[d] - low) / step)) : 0;
  if (bad) low = step = none;  // any number of the group is then NaN
  else if (!codes_any) step = 0.f;
}

// Write a vector of n numbers into a slot.
static inline void put_nibbles(const float* x, long n, nibbles* to, const Marks& marks) {
  for (long g = 0; g < nibble_rows(n); g++) {
    uint8_t codes[NIBBLE_ROW] = {};
    float low, step;
    code_group(x + g * NIBBLE_ROW, std::min(NIBBLE_ROW, n - g * NIBBLE_ROW), low, step, codes);
    put(marks.steps + g * marks.plane, step), put(marks.lows + g * marks.plane, low);
    for (long i = 0; i < 16; i++) to[g * 16 + i].two = (uint8_t)(codes[i] | codes[16 + i] << 4);
  }
}

SPANFORMER_INLINE vi load_pairs(const nibbles* p) {
  typedef uint8_t vb __attribute__((vector_size(W)));
  vb x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vi);
}
SPANFORMER_INLINE vf low_codes(vi pairs) { return __builtin_convertvector(pairs & 15, vf); }
SPANFORMER_INLINE vf high_codes(vi pairs) { return __builtin_convertvector(pairs >> 4, vf); }

// A query for keys in 4 bits: rotated, and the sum of each group, which lows are multiplied by.
struct NibbleQuery {
  float q[MOST_ROWS * NIBBLE_ROW] = {}, sums[MOST_ROWS] = {};
  long rows = 0;
  void set(const float* from, long n) {
    rows = nibble_rows(n);
    std::copy(from, from + n, q);
    rotate(q, n);
    for (long d = 0; d < n; d++) sums[d / NIBBLE_ROW] += q[d];
  }
};

// out[r] = q · key r of W consecutive slots, `stride` bytes apart.
SPANFORMER_INLINE void nibble_dots(const NibbleQuery& query, const nibbles* keys, long stride, const Marks& marks, long at,
                                   float* out) {
  vf acc[W] = {};
  for (long n = 0; n < query.rows; n++) {
    float steps[W];
    store(steps, load_row(marks.step(n, at)));
    const float* q = query.q + n * NIBBLE_ROW;
    const nibbles* from = keys + n * 16;
#pragma GCC unroll 16
    for (int r = 0; r < W; r++) {
      vf a = vf{}, b = vf{};
#pragma GCC unroll 4
      for (int e = 0; e < 16; e += W) {
        const vi pairs = load_pairs(from + r * stride + e);
        a = load(q + e) * low_codes(pairs) + a;
        b = load(q + 16 + e) * high_codes(pairs) + b;
      }
      acc[r] = (a + b) * set1(steps[r]) + acc[r];
    }
  }
  float square[W * W], turned[W * W];
#pragma GCC unroll 16
  for (int r = 0; r < W; r++) store(square + r * W, acc[r]);
  transpose_block(square, W, turned, W, set1(1.f));
  vf total = vf{};
  for (long g = 0; g < query.rows; g++) total = load_row(marks.low(g, at)) * set1(query.sums[g]) + total;
  for (int r = 0; r < W; r++) total += load(turned + r * W);
  store(out, total);
}

static inline float nibble_dot(const NibbleQuery& query, const nibbles* key, const Marks& marks, long at) {
  float total = 0.f;
  for (long g = 0; g < query.rows; g++) {
    const float* q = query.q + g * NIBBLE_ROW;
    const nibbles* from = key + g * 16;
    float part = 0.f;
    for (long i = 0; i < 16; i++) part += q[i] * (float)(from[i].two & 15) + q[16 + i] * (float)(from[i].two >> 4);
    total += to_float(*marks.step(g, at)) * part + to_float(*marks.low(g, at)) * query.sums[g];
  }
  return total;
}

// sum += Σ_r weight[row][r] · codes of value r, for N rows of 32 numbers.
template <int N>
SPANFORMER_INLINE void add_nibbles(const float* weights, long pitch, const nibbles* values, long stride, long n, float* sum) {
  constexpr int E = NIBBLE_ROW / W, HALF = E / 2;
  vf acc[N * E];
#pragma GCC unroll 16
  for (int e = 0; e < N * E; e++) acc[e] = load(sum + e * W);
  for (long r = 0; r < n; r++)
#pragma GCC unroll 4
    for (int row = 0; row < N; row++) {
      const vf w = set1(weights[row * pitch + r]);
#pragma GCC unroll 4
      for (int e = 0; e < HALF; e++) {
        const vi pairs = load_pairs(values + r * stride + row * 16 + e * W);
        vf &a = acc[row * E + e], &b = acc[row * E + HALF + e];
        a = w * low_codes(pairs) + a, b = w * high_codes(pairs) + b;
      }
    }
#pragma GCC unroll 16
  for (int e = 0; e < N * E; e++) store(sum + e * W, acc[e]);
}

// sum += Σ_r p[r] · value r, of n slots from `at` on; sum has room for a multiple of 32.
static inline void add_nibble_values(const float* p, const nibbles* values, long stride, const Marks& marks, long at, long n,
                                     long Dv, float* sum) {
  constexpr long BLOCK = 64;
  const long rows = nibble_rows(Dv);
  float weights[MOST_ROWS * BLOCK];
  for (long r = 0; r < n; r += BLOCK, at += BLOCK, values += BLOCK * stride) {
    const long count = std::min(BLOCK, n - r);
    for (long row = 0; row < rows; row++) {
      const bf16 *step = marks.step(row, at), *low = marks.low(row, at);
      float lows = 0.f;
      for (long i = 0; i < count; i++) {
        weights[row * BLOCK + i] = p[r + i] * to_float(step[i]);
        lows += p[r + i] * to_float(low[i]);
      }
      for (long d = 0; d < NIBBLE_ROW; d++) sum[row * NIBBLE_ROW + d] += lows;
    }
    long row = 0;
    for (; row + 2 <= rows; row += 2)
      add_nibbles<2>(weights + row * BLOCK, BLOCK, values + row * 16, stride, count, sum + row * NIBBLE_ROW);
    for (; row < rows; row++)
      add_nibbles<1>(weights + row * BLOCK, BLOCK, values + row * 16, stride, count, sum + row * NIBBLE_ROW);
  }
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
