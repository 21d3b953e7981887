// One query per row against the rings of its own buckets, one ring for each round, under one softmax (memory/buckets.py).
//
//   seen = ∪_r {slots of ring r whose rank is at most `reach` before that of the query, none of which an earlier round shows}
//
// Slots that are not seen are not read: their values may be NaN.
#pragma once
#include "decode.h"

namespace spanformer {
namespace SPANFORMER_ISA {

// log2 of a pair's weight by how far their places are apart, −∞ where it is not seen.
SPANFORMER_INLINE float bucket_weight(const BucketDecode& c, long n, int64_t apart) {
  const float none = -std::numeric_limits<float>::infinity();
  const int64_t d = apart - (c.itself ? 0 : 1);
  if (apart <= 0 || d >= c.reach) return none;
  if (!c.span) return 0.f;
  const double soft = ramp_at(c.span[n], c.ramp, (long)d);
  return soft <= 0 ? none : (float)std::log2(std::min(1.0, soft));
}

template <class T>
class RowOfBuckets {
 public:
  RowOfBuckets(const BucketDecode& call, long row) : c(call), n(row), ids_(c.ids + n * c.R), places_(c.R) {
    for (long r = 0; r < c.R; r++) {
      const int64_t id = ids_[r], before = id < c.buckets ? c.counts[(n * c.R + r) * c.buckets + id] : 0;
      places_[r] = id * c.gap + before;
    }
  }

  void read() {
    const T *q = static_cast<const T*>(c.q) + n * c.D, *k = static_cast<const T*>(c.k) + n * c.D;
    for (long d = 0; d < c.D; d++) query_[d] = to_float(q[d]) * (float)c.scale * LOG2E;
    for (long r = 0; r < c.R; r++)
      if (ids_[r] < c.buckets) find(r);
    if (c.itself) score_.push_back(exact_dot(query_, k, c.D));
    weigh();
  }

  void write() {
    const T *k = static_cast<const T*>(c.k) + n * c.D, *v = static_cast<const T*>(c.v) + n * c.Dv;
    for (long r = 0; r < c.R; r++) {
      const int64_t id = ids_[r];
      if (id >= c.buckets) continue;
      const long slot = (n * c.R + r) * c.slots + id * c.C + (places_[r] - id * c.gap) % c.C;
      std::memcpy(static_cast<T*>(c.keys) + slot * c.D, k, c.D * sizeof(T));
      std::memcpy(static_cast<T*>(c.values) + slot * c.Dv, v, c.Dv * sizeof(T));
      std::copy(places_.begin(), places_.end(), c.marks + slot * (c.R + 1));
      c.marks[slot * (c.R + 1) + c.R] = c.documents ? c.documents[n] : 0;
      c.counts[(n * c.R + r) * c.buckets + id]++;
    }
  }

 private:
  struct Stretch {  // scores [from, to) are of slots `slot`, `slot` + 1, …
    long from, to, slot;
  };
  const BucketDecode& c;
  const long n;
  const int64_t* ids_;
  std::vector<int64_t> places_;  // of the query: bucket and rank in one number
  std::vector<float> score_;
  std::vector<Stretch> stretches_;
  float query_[256];

  void find(long r) {
    const long first = (n * c.R + r) * c.slots + ids_[r] * c.C;
    for (long slot = first; slot < first + c.C; slot++) {
      const int64_t* marks = c.marks + slot * (c.R + 1);
      const float weight = bucket_weight(c, n, places_[r] - marks[r]);
      bool hidden = weight == -std::numeric_limits<float>::infinity();
      hidden = hidden || (c.documents && marks[c.R] != c.documents[n]);
      for (long e = 0; e < r && !hidden; e++)
        hidden = bucket_weight(c, n, places_[e] - marks[e]) != -std::numeric_limits<float>::infinity();
      if (hidden) continue;
      const long at = (long)score_.size();
      if (stretches_.empty() || stretches_.back().slot + stretches_.back().to - stretches_.back().from != slot)
        stretches_.push_back({at, at, slot});
      stretches_.back().to++;
      score_.push_back(weight);
    }
  }

  void score(const Stretch& s) {
    const T* k = static_cast<const T*>(c.keys) + s.slot * c.D;
    float few[W];
    long r = s.from;
    for (; r + W <= s.to; r += W, k += W * c.D) {
      row_dots(query_, k, c.D, c.D, few);
      for (long e = 0; e < W; e++) score_[r + e] += few[e];
    }
    for (; r < s.to; r++, k += c.D) score_[r] += exact_dot(query_, k, c.D);
  }

  void weigh() {
    for (const Stretch& s : stretches_) score(s);
    const float none = -std::numeric_limits<float>::infinity();
    float top = none, total = 0.f;
    for (const float x : score_) top = x > top || x != x ? x : top;  // NaN, once there, stays
    const float lifted = top == none ? 0.f : top;
    const long count = (long)score_.size();
    vf sums = vf{};
    long at = 0;
    if (lifted == lifted)
      for (; at + W <= count; at += W) {
        const vf e = vexp2(load(&score_[at]) - set1(lifted));
        store(&score_[at], e);
        sums += e;
      }
    total = sum(sums);
    for (; at < count; at++) score_[at] = std::exp2(score_[at] - lifted), total += score_[at];
    std::vector<float> out(c.Dv);
    for (const Stretch& s : stretches_) add(s.from, s.to - s.from, static_cast<const T*>(c.values) + s.slot * c.Dv, &out[0]);
    if (c.itself) add(count - 1, 1, static_cast<const T*>(c.v) + n * c.Dv, &out[0]);
    for (long d = 0; d < c.Dv; d++) put(static_cast<T*>(c.out) + n * c.Dv + d, total == 0.f ? 0.f : out[d] / total);
    c.lse[n] = total == 0.f ? none : (lifted + std::log2(total)) * LN2;
  }

  void add(long from, long count, const T* v, float* out) {
    const float* p = &score_[from];
    long d = 0;
    for (; d + 4 * W <= c.Dv; d += 4 * W) add_rows<4>(p, v + d, c.Dv, count, out + d);
    for (; d + W <= c.Dv; d += W) add_rows<1>(p, v + d, c.Dv, count, out + d);
    for (; d < c.Dv; d++)
      for (long r = 0; r < count; r++) out[d] += p[r] * to_float(v[r * c.Dv + d]);
  }
};

template <class T>
static void bucket_decode_all(const BucketDecode& c) {
  const double cost = MEMORY * (double)(c.N * c.R * c.C) * (c.D + c.Dv);
  for_items(c.N, c.threads, cost, [&](long n) {
    RowOfBuckets<T> row(c, n);
    c.write ? row.write() : row.read();
  });
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
