// One new query of each head over a store of keys and values, joined in place with what was attended to nearby.
//
//   c_n = s_n · code_n        |q·k_n − q̂·c_n| ≤ bound        t = the k-th largest q̂·c_n
//
// The k-th largest q·k is at least t − bound, so every row with q̂·c_n ≥ t − 2·bound, and no other, may be one of the k
// best: their products in float32 decide. A row whose scale is not finite is never found.
#pragma once
#include <cmath>

#include "scan.h"

namespace spanformer {
namespace SPANFORMER_ISA {
namespace retrieving {

using scanning::Entry;
constexpr float ROUNDING = 1.f / (1 << 22);  // of a float32 score, relative to ‖q‖·‖k‖, as in ops/search.py
constexpr long STEP = 32;                    // numbers of a query that the scan reads at a time

static inline float dot(const float* a, const float* b, long size) {
  vf acc = set1(0.f);
  long d = 0;
  for (; d + W <= size; d += W) acc += load(a + d) * load(b + d);
  float s = sum(acc);
  for (; d < size; d++) s += a[d] * b[d];
  return s;
}
static inline void add_scaled(float* to, float a, const float* x, long size) {
  long d = 0;
  for (; d + W <= size; d += W) store(to + d, load(to + d) + set1(a) * load(x + d));
  for (; d < size; d++) to[d] += a * x[d];
}

// q̂ = scale · whole numbers of 16 bits, without overflow of a sum; how far a score may be off.
struct Rounded {
  std::vector<int16_t> whole;
  float scale = 0, bound = 0;
};
static void round_query(const float* q, long size, float error, float longest, Rounded& r) {
  const float most = (float)std::min((1L << 15) - 1, ((1L << 31) - 1) / (127 * size));
  float largest = 0;
  double length = 0, off = 0;
  bool finite = true;
  for (long d = 0; d < size; d++) {
    finite = finite && std::isfinite(q[d]);
    largest = std::max(largest, std::abs(q[d]));
    length += (double)q[d] * q[d];
  }
  r.whole.assign(round_up(size, STEP), 0);
  r.scale = finite ? largest / most : std::numeric_limits<float>::quiet_NaN();
  for (long d = 0; d < size && r.scale > 0; d++) {
    const float x = std::min(most, std::max(-most, std::nearbyint(q[d] / r.scale)));
    r.whole[d] = (int16_t)x;
    off += ((double)q[d] - (double)x * r.scale) * ((double)q[d] - (double)x * r.scale);
  }
  const double far = (double)longest + error;
  r.bound = (float)(std::sqrt(length) * (error + ROUNDING * far) + std::sqrt(off) * far);
}

// The k best rows of store m, and possibly fewer: rows that are not finite are none.
template <class Kind>
static void find(const Retrieve& c, long m, const float* q, std::vector<Entry>& best) {
  thread_local Rounded rounded;
  thread_local std::vector<float> scores;
  round_query(q, c.D, c.error[m], c.longest[m], rounded);
  scores.resize(c.count);
  Scan scan = {};
  scan.B = scan.Q = 1, scan.N = c.count, scan.D = c.D, scan.k = std::min(c.k, c.count);
  scan.keys = c.codes + m * c.codes_store, scan.keys_row = c.D;
  scan.scales = c.scales + m * c.scales_store;
  scan.queries = rounded.whole.data(), scan.padded = (long)rounded.whole.size(), scan.query_scales = &rounded.scale;
  scanning::Part<Kind> part(scan, 0, 0, c.count);
  part.keep(scores.data());
  part.run();
  best = part.best(0).held();
  float limit = -std::numeric_limits<float>::infinity();
  if ((long)best.size() >= scan.k) {
    std::nth_element(best.begin(), best.begin() + (scan.k - 1), best.end(), scanning::before);
    limit = best[scan.k - 1].score - 2 * rounded.bound;
  }
  best.clear();
  const float* keys = c.keys + m * c.keys_store;
  for (long n = 0; n < c.count; n++)
    if (scores[n] >= limit) best.push_back({dot(q, keys + n * c.D, c.D), n});
  if ((long)best.size() > scan.k) {
    std::nth_element(best.begin(), best.begin() + (scan.k - 1), best.end(), scanning::before);
    best.resize(scan.k);
  }
}

template <class Kind>
static void attend(const Retrieve& c, long item) {
  thread_local std::vector<Entry> best;
  thread_local std::vector<float> read;
  const long shared = c.H / c.Hkv, m = item / shared, b = m / c.G, h = c.groups[m % c.G] * shared + item % shared;
  const float* q = static_cast<const float*>(c.q.data) + b * c.q.batch + h * c.q.head;
  float* out = static_cast<float*>(c.out.data) + b * c.out.batch + h * c.out.head;
  float *lse = c.lse + b * c.H + h, *share = c.share + item;
  *share = 0;
  find<Kind>(c, m, q, best);
  if (best.empty()) return;
  const float scale = (float)c.scale, infinity = std::numeric_limits<float>::infinity();
  float most = -infinity, lowest = infinity, total = 0;
  for (const Entry& e : best) most = std::max(most, scale * e.score), lowest = std::min(lowest, scale * e.score);
  read.assign(c.Dv, 0.f);
  const float* values = c.values + m * c.values_store;
  for (const Entry& e : best) {
    const float a = std::exp(scale * e.score - most);
    total += a;
    add_scaled(read.data(), a, values + e.row * c.Dv, c.Dv);
  }
  const float far = most + std::log(total), top = std::max(far, *lse);
  const float joined = top + std::log(std::exp(far - top) + std::exp(*lse - top));
  const float near = std::exp(*lse - joined), factor = std::exp(far - joined) / total;
  for (long d = 0; d < c.Dv; d++) out[d] = near * out[d] + factor * read[d];
  *lse = joined;
  if ((long)best.size() == c.k && c.count > c.k)
    *share = 1.f / (1.f + std::exp(joined - lowest - std::log((float)(c.count - c.k))));
}

// The new token of store m: its key, value and code.
static void write(const Retrieve& c, long m) {
  const long b = m / c.G, g = c.groups[m % c.G];
  const float* k = static_cast<const float*>(c.new_k.data) + b * c.new_k.batch + g * c.new_k.head;
  const float* v = static_cast<const float*>(c.new_v.data) + b * c.new_v.batch + g * c.new_v.head;
  std::copy(k, k + c.D, c.keys + m * c.keys_store + c.at * c.D);
  std::copy(v, v + c.Dv, c.values + m * c.values_store + c.at * c.Dv);
  float largest = 0;
  bool finite = true;
  for (long d = 0; d < c.D; d++) finite = finite && std::isfinite(k[d]), largest = std::max(largest, std::abs(k[d]));
  const float scale = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
  int8_t* code = c.codes + m * c.codes_store + c.at * c.D;
  double error = 0, length = 0;
  for (long d = 0; d < c.D; d++) {
    code[d] = scale > 0 ? (int8_t)std::min(127.f, std::max(-127.f, std::nearbyint(k[d] / scale))) : 0;
    const double off = (double)k[d] - (double)code[d] * scale;
    error += off * off, length += (double)k[d] * k[d];
  }
  c.scales[m * c.scales_store + c.at] = scale;
  if (!finite) return;
  c.error[m] = std::max(c.error[m], (float)std::sqrt(error));
  c.longest[m] = std::max(c.longest[m], (float)std::sqrt(length));
}

}  // namespace retrieving

static void retrieve_all(const Retrieve& c) {
  if (c.at >= 0)
    for (long m = 0; m < c.B * c.G; m++) retrieving::write(c, m);
  const long items = c.B * c.G * (c.H / c.Hkv);
  if (c.count > 0)
    for_items(items, c.threads, (double)items * c.count * c.D, [&](long item) {
      if (scanning::has_vnni())
        retrieving::attend<scanning::Bytes<true>>(c, item);
      else
        retrieving::attend<scanning::Bytes<false>>(c, item);
    });
  else
    std::fill(c.share, c.share + items, 0.f);
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
