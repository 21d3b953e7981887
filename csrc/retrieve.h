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

// to[n] = a · scale_n · (q̂ · code_n); room for W more.
template <class Kind>
static void score(const Retrieve& c, long m, const Rounded& q, float* to) {
  thread_local std::vector<int32_t> sums;
  thread_local std::vector<int8_t> spare;
  const long padded = (long)q.whole.size(), whole = c.count * c.D < padded ? 0 : (c.count * c.D - padded) / c.D + 1;
  const int8_t* codes = c.codes + m * c.codes_store;
  sums.resize(c.count + scanning::TILE);
  spare.assign(scanning::TILE * padded, 0);
  for (long row = 0; row < c.count; row += scanning::TILE) {
    const int8_t* rows[scanning::TILE];
    for (long i = 0; i < scanning::TILE; i++) {
      const long n = std::min(row + i, (long)c.count - 1);
      rows[i] = codes + n * c.D;
      if (n < whole) continue;  // a step may read past a row's end, where the query is 0, but not past the last row's
      std::copy(rows[i], rows[i] + c.D, &spare[i * padded]);
      rows[i] = &spare[i * padded];
    }
    scanning::tile<Kind, 1>(rows, q.whole.data(), padded, &sums[row]);
  }
  const float* scales = c.scales + m * c.scales_store;
  for (long n = 0; n < c.count; n++) to[n] = (float)sums[n] * (scales[n] * q.scale);
}

// At most the k-th largest of the scores, by counting them in bins; NaN is none of them.
static float at_most_kth(float* scores, long count, long k) {
  constexpr long BINS = 512;
  for (long n = count; n < round_up(count, W); n++) scores[n] = std::numeric_limits<float>::quiet_NaN();
  vf high = set1(-std::numeric_limits<float>::infinity()), low = high;  // vmax(NaN, x) is x
  for (long n = 0; n < count; n += W) high = vmax(load(scores + n), high), low = vmax(-load(scores + n), low);
  float hi = high[0], lo = -low[0];
  for (long i = 1; i < W; i++) hi = std::max(hi, (float)high[i]), lo = std::min(lo, -(float)low[i]);
  const float width = (hi - lo) / (BINS - 1);
  if (!(width > 0) || !std::isfinite(width)) return hi == lo ? lo : -std::numeric_limits<float>::infinity();
  int32_t counts[BINS + 1] = {};
  for (long n = 0; n < count; n++) {
    const long bin = (long)((scores[n] - lo) / width);
    counts[scores[n] >= lo ? std::max(0L, std::min(BINS - 1, bin)) : BINS]++;
  }
  long bin = BINS - 1;
  for (long above = counts[bin]; above < k && bin > 0;) above += counts[--bin];
  return lo + (float)bin * width - 1e-6f * (std::abs(lo) + std::abs(hi));
}

// The k best rows of store m, and possibly fewer: rows that are not finite are none.
template <class Kind>
static void find(const Retrieve& c, long m, const float* q, std::vector<Entry>& best) {
  thread_local Rounded rounded;
  thread_local std::vector<float> scores;
  thread_local std::vector<int32_t> rows;
  round_query(q, c.D, c.error[m], c.longest[m], rounded);
  scores.resize(c.count + W), rows.resize(c.count + 1);
  score<Kind>(c, m, rounded, scores.data());
  const float limit = at_most_kth(scores.data(), c.count, c.k) - 2 * rounded.bound;
  long found = 0;
  for (long n = 0; n < c.count; n++) rows[found] = (int32_t)n, found += scores[n] >= limit;
  const float* keys = c.keys + m * c.keys_store;
  best.clear();
  for (long i = 0; i < found; i++) best.push_back({dot(q, keys + (long)rows[i] * c.D, c.D), rows[i]});
  if (found <= c.k) return;
  std::nth_element(best.begin(), best.begin() + (c.k - 1), best.end(), scanning::before);
  best.resize(c.k);
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
