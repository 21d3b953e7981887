// A slow version, pair by pair, for the cases that the fast one skips: rows that see NaN or infinity (0 · NaN must not
// leak from a hidden key), and distance vectors with explicit positions.
#pragma once
#include "scores.h"

namespace spanformer {
namespace SPANFORMER_ISA {

template <class T>
static inline const T* row(const Rows& r, long b, long h, long t) {
  return static_cast<const T*>(r.data) + b * r.batch + h * r.head + t * r.row;
}
template <class T>
static inline T* row_of(const Rows& r, long b, long h, long t) {
  return static_cast<T*>(r.data) + b * r.batch + h * r.head + t * r.row;
}
template <class A, class B>
static inline float exact_dot(const A* a, const B* b, long n) {
  float part[8] = {};  // eight independent sums, to hide latency
  long d = 0;
  for (; d + 8 <= n; d += 8)
    for (long e = 0; e < 8; e++) part[e] += to_float(a[d + e]) * to_float(b[d + e]);
  for (; d < n; d++) part[0] += to_float(a[d]) * to_float(b[d]);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

struct Pair {
  bool visible;
  float score;  // log2
  long row;     // row of distance_vec, −1 if none
  float slope;  // d score / d span, natural
  float key_slope;  // d score / d span of the key
};

template <class T>
static Pair exact_pair(const Scene& s, long b, long h, long i, long j) {
  const Call& c = s.c;
  const Head& head = s.heads[h];
  Pair p{false, 0.f, -1, 0.f, 0.f};
  const long d = s.positioned ? s.pair_distance(b, i, j) : i + s.offset[b] - j;
  const long key = s.positioned ? s.head_key(d) : d, entry = row_of_table(c, d);
  if (c.distance_vec && entry >= 0 && entry < c.vec_length) p.row = entry;
  const float table = head.at(key);
  if (table <= HIDDEN_AT_MOST) return p;
  if (c.q_documents && s.q_document(b, i) != s.k_document(b, j)) return p;
  if (c.q_orders && s.in_other_order(b, h, i, j)) return p;
  if (c.block_offsets && !s.in_blocks(h, s.q_position(b, i), s.k_position(b, j))) return p;
  float bias = 0.f;
  if (const float* kb = s.key_bias(b, h)) bias = kb[j] * LOG2E;
  if (bias <= HIDDEN_AT_MOST) return p;
  float soft = 0.f;
  if (c.dynamic) {
    const double m = ramp_at(s.dynamic_span(b, h, i), c.ramp, s.length(d));
    if (!(m > 0)) return p;
    if (m < 1) soft = (float)std::log2(m), p.slope = (float)(1 / (m * c.ramp));
  } else if (c.span) {
    p.slope = head.slope_at(key);
  }
  if (const float* e = s.key_span(b, h)) {
    const double m = ramp_at(e[j], c.ramp, s.length(d));
    if (!(m > 0)) return p;
    if (m < 1) soft += (float)std::log2(m), p.key_slope = (float)(1 / (m * c.ramp));
  }
  const T* q = row<T>(c.q, b, h, i);
  float dots = exact_dot(q, row<T>(c.k, b, h / (c.H / c.Hkv), j), c.D);
  if (p.row >= 0) dots += exact_dot(q, s.vectors(h) + p.row * c.D, c.D);
  p.visible = true;
  p.score = dots * (float)c.scale * LOG2E + bias + soft + table;
  return p;
}

template <class T>
static void exact_forward(const Scene& s, const Panel& p) {
  const Call& c = s.c;
  const long kv = p.h / (c.H / c.Hkv);
  const Dropper drop(c, p.b, p.h);
  long ja, jb;
  s.hull(p, ja, jb);
  std::vector<float> score(jb - ja), acc(c.Dv);
  for (long i = p.i; i < p.i + p.n; i++) {
    float top = c.sink_logits ? c.sink_logits[p.h] * LOG2E : -std::numeric_limits<float>::infinity();
    bool bad = top != top;
    for (long j = ja; j < jb; j++) {
      const Pair pair = exact_pair<T>(s, p.b, p.h, i, j);
      score[j - ja] = pair.visible ? pair.score : HIDDEN;
      if (!pair.visible) continue;
      bad = bad || pair.score != pair.score;
      top = std::max(top, pair.score);
    }
    const bool nothing = top == -std::numeric_limits<float>::infinity() && !bad;
    if (nothing) top = 0.f;
    float total = c.sink_logits ? std::exp2(c.sink_logits[p.h] * LOG2E - top) : 0.f;
    std::fill(acc.begin(), acc.end(), 0.f);
    for (long j = ja; j < jb; j++) {
      if (score[j - ja] == HIDDEN) continue;
      const float e = bad ? std::numeric_limits<float>::quiet_NaN() : std::exp2(score[j - ja] - top);
      total += e;
      const float w = drop.on() ? e * drop.factor(drop.of_query(i), drop.of_key(j)) : e;
      const T* v = row<T>(c.v, p.b, kv, j);
      for (long d = 0; d < c.Dv; d++) acc[d] += w * to_float(v[d]);
    }
    T* out = row_of<T>(c.out, p.b, p.h, i);
    for (long d = 0; d < c.Dv; d++) put(&out[d], total == 0.f ? 0.f : acc[d] / total);
    c.lse[(p.b * c.H + p.h) * c.Tq + i] =
        total == 0.f ? -std::numeric_limits<float>::infinity() : (top + std::log2(total)) * LN2;
  }
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
