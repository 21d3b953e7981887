// The gradient of whole-number static spans at both ends of the ramp, with the conventions of the paper's code
// (attention/span_edge_gradient.py).
#pragma once
#include "exact.h"
#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {

// Σ over queries of exp(s − lse)·(g·v − g·out + g_lse), with the key at distance `far` beyond the span z of head h.
template <class T>
static double span_edge_sum(const Call& c, long b, long h, double far) {
  const double at = c.span[h] + far;
  const long d = (long)at, kv = h / (c.H / c.Hkv);
  if ((double)d != at || (c.reach && d >= c.reach[h])) return 0;  // not a whole number, or beyond the cap
  const float* table = c.distance_vec && d < c.vec_length ? c.distance_vec + h * c.vec_head + d * c.D : nullptr;
  const float bias = c.distance_bias && d < c.bias_length ? c.distance_bias[h * c.bias_length + d] : 0.f;
  const long back = c.Tk - c.Tq - c.shift - d;
  double total = 0;
  for (long i = std::max(0L, -back); i < c.Tq; i++) {
    const long n = (b * c.H + h) * c.Tq + i;
    if (c.lse[n] == -std::numeric_limits<float>::infinity()) continue;
    const T *q = row<T>(c.q, b, h, i), *g = row<T>(c.g, b, h, i);
    float score = exact_dot(q, row<T>(c.k, b, kv, i + back), c.D);
    if (table) score += exact_dot(q, table, c.D);
    const float gain = exact_dot(g, row<T>(c.v, b, kv, i + back), c.Dv) - exact_dot(g, row<T>(c.out, b, h, i), c.Dv);
    total += std::exp(score * (float)c.scale + bias - c.lse[n]) * (gain + (c.g_lse ? c.g_lse[n] : 0.f));
  }
  return total;
}

template <class T>
static void span_edge_all(const Call& c) {  // fills d_span [H]
  std::vector<double> sums(c.B * c.H);
  for_items(c.B * c.H, c.threads, 4.0 * c.B * c.H * c.Tq * (c.D + c.Dv), [&](long n) {
    sums[n] = span_edge_sum<T>(c, n / c.H, n % c.H, 0) + span_edge_sum<T>(c, n / c.H, n % c.H, c.ramp);
  });
  for (long h = 0; h < c.H; h++) {
    double total = 0;
    for (long b = 0; b < c.B; b++) total += sums[b * c.H + h];
    c.d_span[h] = (float)(total / c.ramp);
  }
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
