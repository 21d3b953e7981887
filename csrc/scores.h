// The scores of one panel of queries against a run of keys, S[key][lane], in log2 and before the band's own table.
#pragma once
#include "gemm.h"
#include "rules.h"

namespace spanformer {
namespace SPANFORMER_ISA {

// Distances of a run of n keys from a panel: row c of a tile in distance order is distance `least` + c.
struct Distances {
  long least, rows;
  Distances(const Panel& p, long ja, long n) : least(p.at - (ja + n - 1)), rows(n + PANEL - 1) {}
};

// Calls part(c, count, vectors, stride) for the ranges of rows whose distance has a vector; `stride` is −D if rows run
// over decreasing |d|.
template <class Part>
static inline void vector_parts(const Scene& s, long h, const Distances& ds, Part part) {
  const long D = s.c.D, length = s.c.vec_length, end = ds.least + ds.rows;
  const float* table = s.vectors(h);
  if (s.c.max_future) {
    const long ahead = s.c.max_future, a = std::max(ds.least, -ahead), b = std::min(end, length - ahead);
    if (b > a) part(a - ds.least, b - a, table + (a + ahead) * D, D);
    return;
  }
  if (!s.c.causal) {
    const long a = std::max(ds.least, 1 - length), b = std::min(end, 0L);
    if (b > a) part(a - ds.least, b - a, table - a * D, -D);
  }
  const long a = std::max(ds.least, 0L), b = std::min(end, length);
  if (b > a) part(a - ds.least, b - a, table + a * D, D);
}

// Changes rel from distance order to rel[c][lane] = rel[c + lane][lane]: by powers of two within a vector, by address
// between vectors. Ascending, so it works in place.
static inline void skew(float* rel, long rows) {
  const vi lane = __builtin_convertvector(lanes(), vi);
  for (int step = 1; step < W; step *= 2) {
    const vi take = (lane & step) != 0;
    for (int v = 0; v < VECS; v++) {
      const long ahead = step == 1 ? v * W : 0;  // the first step applies each vector's own offset
      for (long c = 0; c + ahead + step < rows; c++) {
        const float* from = rel + (c + ahead) * PANEL + v * W;
        store(rel + c * PANEL + v * W, take ? load(from + step * PANEL) : load(from));
      }
    }
  }
}

// The inverse: rel[c][lane] = rel[c − lane][lane], or zero if c < lane. Descending, in place.
static inline void unskew(float* rel, long rows) {
  const vi lane = __builtin_convertvector(lanes(), vi);
  for (int step = 1; step < W; step *= 2) {
    const vi take = (lane & step) != 0;
    for (int v = 0; v < VECS; v++) {
      const long behind = step == 1 ? v * W : 0;
      for (long c = rows - 1; c >= 0; c--) {
        const float* from = rel + (c - behind) * PANEL + v * W;
        const vf here = c >= behind ? load(from) : vf{}, before = c >= behind + step ? load(from - step * PANEL) : vf{};
        store(rel + c * PANEL + v * W, take ? before : here);
      }
    }
  }
}

struct Tile {  // S and its origin
  const Panel& p;
  long ja, n;
  float* S;  // [n][ld]
  long ld;
};

// q·r[d] for every pair of the tile; rel is scratch for [n + PANEL][PANEL].
static inline void add_vectors(const Scene& s, const Tile& t, const float* QT, float* rel) {
  const Distances ds(t.p, t.ja, t.n);
  std::memset(rel, 0, sizeof(float) * ds.rows * PANEL);
  vector_parts(s, t.p.h, ds, [&](long c, long count, const float* r, long stride) {
    product<BY_ROW, false>(count, s.c.D, r, stride, QT, PANEL, rel + c * PANEL, PANEL);
  });
  skew(rel, ds.rows);
  for (long r = 0; r < t.n; r++)
    for (int v = 0; v < VECS; v++) {
      float* x = t.S + r * t.ld + v * W;
      store(x, load(x) + load(rel + (t.n - 1 - r) * PANEL + v * W));
    }
}

static inline void add_key_bias(const float* bias, const Tile& t) {
  for (long r = 0; r < t.n; r++) {
    const float b = bias[t.ja + r];
    const vf add = set1(std::max(b * LOG2E, HIDDEN));  // in this order NaN stays NaN
    for (int v = 0; v < VECS; v++) store(t.S + r * t.ld + v * W, load(t.S + r * t.ld + v * W) + add);
  }
}

// m of every lane for the key at row r of the tile, unclipped; z: spans of the lanes, or the key's span.
SPANFORMER_INLINE vf ramp_of(const Scene& s, const Tile& t, long r, int v, vf z) {
  vf d = lanes() + set1((float)(t.p.at + v * W - (t.ja + r)));
  d = vmax(d, -d);
  // Use the longer of z and ramp first: near m = 0 both differences are then exact, however short the other is. Divide,
  // because × 1/ramp would not give exactly 0 and 1 at the ends of the ramp, and the gradient is non-zero only between.
  const vf ramp = set1((float)s.c.ramp);
  return ((z > ramp ? z : ramp) - d + (z > ramp ? ramp : z)) / ramp;  // NaN stays NaN
}
SPANFORMER_INLINE vf dynamic_ramp(const Scene& s, const Tile& t, long r, int v) {
  return ramp_of(s, t, r, v, load(t.p.z + v * W));
}
// Most rows of a long span need no ramp: all |d| ≤ the shortest span.
SPANFORMER_INLINE bool softened(const Tile& t, long r, float least) {
  const long near = t.p.at - (t.ja + r), far = near + PANEL - 1;
  return !((float)std::max(std::labs(near), std::labs(far)) <= least);  // NaN needs it
}
SPANFORMER_INLINE void soften(const Tile& t, long r, int v, vf m) {
  const vf soft = m >= set1(1.f) ? vf{} : vlog2(vmax(m, set1(1e-30f)));
  float* x = t.S + r * t.ld + v * W;
  store(x, load(x) + (m > vf{} ? soft : set1(HIDDEN)));
}
// The contribution of a tile of dS to the gradient of a span: dS · d log m / d z.
SPANFORMER_INLINE vf on_ramp(const Scene& s, const Tile& t, long r, int v, vf m) {
  const vf part = load(t.S + r * t.ld + v * W) / (m * set1((float)s.c.ramp));
  return ((m > vf{}) & (m < set1(1.f))) ? part : vf{};
}
static inline void add_dynamic_span(const Scene& s, const Tile& t) {
  for (long r = 0; r < t.n; r++)
    for (int v = 0; v < VECS && softened(t, r, t.p.z_least); v++) soften(t, r, v, dynamic_ramp(s, t, r, v));
}
static inline void add_key_span(const Scene& s, const float* spans, const Tile& t) {
  for (long r = 0; r < t.n; r++) {
    const float e = spans[t.ja + r];
    for (int v = 0; v < VECS && softened(t, r, e); v++) soften(t, r, v, ramp_of(s, t, r, v, set1(e)));
  }
}

// Rows [0, plain_a) and [plain_b, n) of a tile need the band's table; every lane sees the others without it.
static inline void plain_rows(const Scene& s, const Tile& t, long& plain_a, long& plain_b) {
  plain_a = 0, plain_b = t.n;
  if (s.positioned) return;  // the mask included the table
  const Head& head = s.heads[t.p.h];
  // all lanes plain: at + lane − j within [plain_first, plain_last] for lanes 0 and PANEL − 1
  const long a = t.p.at + PANEL - 1 - head.plain_last - t.ja, b = t.p.at - head.plain_first - t.ja + 1;
  plain_a = std::clamp(a, 0L, t.n), plain_b = std::clamp(b, 0L, t.n);
  if (plain_b < plain_a || head.plain_last < head.plain_first) plain_a = plain_b = 0;
}

// Rows at both ends of the band that only half of the lanes can see.
static inline Halves halves(const Scene& s, const Tile& t) {
  constexpr long HALF = PANEL / 2;
  if (s.positioned) return {0, t.n};
  const long low = std::clamp(HALF - (t.p.last - t.p.at + t.ja), 0L, t.n);
  const long high = std::clamp(t.p.at - t.p.first + HALF - t.ja, 0L, t.n);
  return low <= high ? Halves{low, high} : Halves{0, t.n};
}

// The tile's scores without the band's table. mask and rel are scratch memory, [n][PANEL] and [n + PANEL][PANEL].
static inline void score(const Scene& s, const Tile& t, bool masked, const float* QT, View K, float* mask, float* rel) {
  product_of_band(t.n, s.c.D, K.data, K.ld, QT, PANEL, t.S, t.ld, halves(s, t));
  if (s.c.distance_vec) add_vectors(s, t, QT, rel);
  if (const float* bias = s.key_bias(t.p.b, t.p.h)) add_key_bias(bias, t);
  if (s.c.dynamic && !s.positioned) add_dynamic_span(s, t);
  if (s.c.key_span && !s.positioned) add_key_span(s, s.key_span(t.p.b, t.p.h), t);
  if (masked) {
    s.fill_mask(t.p, t.ja, t.n, mask);
    for (long r = 0; r < t.n; r++)
      for (int v = 0; v < VECS; v++) {
        float* x = t.S + r * t.ld + v * W;
        store(x, load(x) + load(mask + r * PANEL + v * W));
      }
  }
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
