// One query against a ring of keys and values per key/value head, each of its own length; lanes run over the head size.
#pragma once
#include "exact.h"
#include "nibbles.h"
#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {

constexpr long DECODE_KEYS = 1024;  // per part of a head: threads share long heads
// Each number is used once, so memory bounds the time: loading one takes as long as this many multiply-adds.
constexpr double MEMORY = 16;

// Write a row into its slot. In 8 bits: the nearest multiples of max |x| / 127, as `quantise` in ops/decode/banded.py.
template <class T>
static void put_row(const T* from, T* to, float*, long n) {
  std::memcpy(to, from, n * sizeof(T));
}
template <class T>
static void put_row(const T* from, int8_t* to, float* scale, long n) {
  float most = 0.f;
  bool bad = false;
  for (long d = 0; d < n; d++) {
    const float x = std::fabs(to_float(from[d]));
    most = std::max(most, x), bad = bad || !(x <= std::numeric_limits<float>::max());
  }
  *scale = bad ? std::numeric_limits<float>::quiet_NaN() : most / 127.f;  // NaN times any code is NaN
  const bool codes = !bad && *scale >= std::numeric_limits<float>::min();
  for (long d = 0; d < n; d++) to[d] = codes ? (int8_t)std::nearbyint(to_float(from[d]) / *scale) : 0;
}

static inline float* scale_of(const Decode& c, void* scales, long b, long slot) {
  return scales ? static_cast<float*>(scales) + b * c.slots + slot : nullptr;
}
static inline Marks key_marks(const Decode& c, long b, long slot) {
  return {c.k_scale, nibble_rows(c.D), c.slots, b, slot};
}
static inline Marks value_marks(const Decode& c, long b, long slot) {
  return {c.v_scale, nibble_rows(c.Dv), c.slots, b, slot};
}

template <class T, class S>
static void write_newest(const Decode& c) {
  for (long b = 0; b < c.B; b++)
    for (long g = 0; g < c.Hkv; g++) {
      const long p = c.newest[b], slot = c.first[g] + (p < c.sink_tokens ? p - c.sink_tokens : p % c.capacity[g]);
      if (p < 0) continue;
      S* k = static_cast<S*>(c.k.data) + b * c.k.batch + slot * c.k.row;
      S* v = static_cast<S*>(c.v.data) + b * c.v.batch + slot * c.v.row;
      const T *new_k = row<T>(c.new_k, b, g, 0), *new_v = row<T>(c.new_v, b, g, 0);
      if constexpr (std::is_same<S, nibbles>::value) {
        float x[MOST_ROWS * NIBBLE_ROW];
        std::transform(new_k, new_k + c.D, x, [](T y) { return to_float(y); });
        rotate(x, c.D);
        put_nibbles(x, c.D, k, key_marks(c, b, slot));
        std::transform(new_v, new_v + c.Dv, x, [](T y) { return to_float(y); });
        put_nibbles(x, c.Dv, v, value_marks(c, b, slot));
      } else {
        put_row(new_k, k, scale_of(c, c.k_scale, b, slot), c.D);
        put_row(new_v, v, scale_of(c, c.v_scale, b, slot), c.Dv);
      }
    }
}

// Rings have left the cache by the next token, so prefetch their rows.
template <class T>
SPANFORMER_INLINE void prefetch(const T* from, long n) {
  for (long at = 0; at < n * (long)sizeof(T); at += 64) __builtin_prefetch(reinterpret_cast<const char*>(from) + at);
}

// out[r] = q · row r, for W rows at once: their sums across lanes become one transposition.
template <class T>
SPANFORMER_INLINE void row_dots(const float* q, const T* rows, long stride, long D, float* out) {
  vf acc[W] = {};
  long d = 0;
  prefetch(rows + 2 * W * stride, W * stride);
  for (; d + W <= D; d += W) {
    const vf x = load(q + d);
#pragma GCC unroll 16
    for (int r = 0; r < W; r++) acc[r] = x * load_row(rows + r * stride + d) + acc[r];
  }
  float square[W * W], turned[W * W];
#pragma GCC unroll 16
  for (int r = 0; r < W; r++) store(square + r * W, acc[r]);
  transpose_block(square, W, turned, W, set1(1.f));
  vf total = vf{};
  for (int r = 0; r < W; r++) total += load(turned + r * W);
  store(out, total);
  for (; d < D; d++)
    for (int r = 0; r < W; r++) out[r] += q[d] * to_float(rows[r * stride + d]);
}

// acc[e] += Σ_r p[r] · row r, for N vectors of each row.
template <int N, class T>
SPANFORMER_INLINE void add_rows(const float* p, const T* rows, long stride, long n, float* sum) {
  vf acc[N];
#pragma GCC unroll 8
  for (int e = 0; e < N; e++) acc[e] = load(sum + e * W);
  for (long r = 0; r < n; r++)
#pragma GCC unroll 8
    for (int e = 0; e < N; e++) acc[e] = set1(p[r]) * load_row(rows + r * stride + e * W) + acc[e];
#pragma GCC unroll 8
  for (int e = 0; e < N; e++) store(sum + e * W, acc[e]);
}

struct DecodePart {
  long b, h, from, to;  // distances [from, to), or with `early` the sink tokens [from, to)
  bool early, recent;  // recent: in 8 bits beside a ring in 4
  float top, total;
  float* sum;  // [Dv], rounded up to a multiple of 32
};

template <class T, class S>  // of queries and outputs, of keys and values
class PartDecode {
 public:
  PartDecode(const Decode& call, DecodePart& part) : c(call), x(part), n(part.to - part.from) {
    const long kv = x.h / (c.H / c.Hkv), capacity = c.capacity[kv];
    // Oldest first: slots ascend, and wrap at most once.
    const long slot = x.early ? x.from - c.sink_tokens : (c.newest[x.b] - c.shift - (x.to - 1)) % capacity;
    const long before = x.early ? n : std::min(n, capacity - slot);
    stretches_[0] = {0, before, slot}, stretches_[1] = {before, n, 0};
    K_ = static_cast<const S*>(c.k.data) + x.b * c.k.batch + c.first[kv] * c.k.row;
    V_ = static_cast<const S*>(c.v.data) + x.b * c.v.batch + c.first[kv] * c.v.row;
    first_ = c.first[kv];
    if (std::is_same<S, int8_t>::value) k_scale_ = scale_of(c, c.k_scale, x.b, first_);
    if (std::is_same<S, int8_t>::value) v_scale_ = scale_of(c, c.v_scale, x.b, first_);
  }

  void run() {
    scores();
    if (!x.early) add_distances(), soften();
    float top = -std::numeric_limits<float>::infinity();
    bool bad = false;
    for (long r = 0; r < n; r++) top = std::max(top, score_[r]), bad = bad || score_[r] != score_[r];
    x.top = bad ? std::numeric_limits<float>::quiet_NaN() : top;
    weigh(x.top == -std::numeric_limits<float>::infinity() ? 0.f : x.top);
    std::fill(x.sum, x.sum + nibble_rows(c.Dv) * NIBBLE_ROW, 0.f);
    for (const Stretch& s : stretches_) values(s);
  }

 private:
  struct Stretch {  // of score_: [from, to), whose keys are in slots `slot`, `slot` + 1, …
    long from, to, slot;
  };
  const Decode& c;
  DecodePart& x;
  const long n;
  Stretch stretches_[2];
  const S *K_, *V_;
  long first_;
  const float *k_scale_ = nullptr, *v_scale_ = nullptr;
  float query_[256];  // scaled, for log2
  float score_[DECODE_KEYS];  // oldest first: entry r is at distance x.to − 1 − r

  void scores() {
    const T* q = row<T>(c.q, x.b, x.h, 0);
    for (long d = 0; d < c.D; d++) query_[d] = to_float(q[d]) * (float)c.scale * LOG2E;
    if constexpr (std::is_same<S, nibbles>::value) return nibble_scores();
    else for (const Stretch& s : stretches_) {
      const S *k = K_ + s.slot * c.k.row, *v = V_ + s.slot * c.v.row;
      long r = s.from;
      for (; r + W <= s.to; r += W, k += W * c.k.row, v += W * c.v.row) {
        prefetch(v, W * c.v.row);
        row_dots(query_, k, c.k.row, c.D, score_ + r);
      }
      for (; r < s.to; r++, k += c.k.row) score_[r] = exact_dot(query_, k, c.D);
      rescale(s, k_scale_);
    }
  }

  void nibble_scores() {
    NibbleQuery q;
    q.set(query_, c.D);
    const Marks marks = key_marks(c, x.b, first_);
    const long bytes = nibble_rows(c.D) * 16, v_bytes = nibble_rows(c.Dv) * 16;
    for (const Stretch& s : stretches_) {
      const nibbles *k = K_ + s.slot * c.k.row, *v = V_ + s.slot * c.v.row;
      long r = s.from, at = s.slot;
      for (; r + W <= s.to; r += W, at += W, k += W * c.k.row, v += W * c.v.row) {
        prefetch(v, (W - 1) * c.v.row + v_bytes);
        prefetch(k + 2 * W * c.k.row, (W - 1) * c.k.row + bytes);
        nibble_dots(q, k, c.k.row, marks, at, score_ + r);
      }
      for (; r < s.to; r++, at++, k += c.k.row) score_[r] = nibble_dot(q, k, marks, at);
    }
  }

  void rescale(const Stretch& s, const float* scale) {
    if (scale)
      for (long r = s.from; r < s.to; r++) score_[r] *= scale[s.slot + r - s.from];
  }

  void add_distances() {
    if (!c.distance_vec) return;
    float few[W];
    const float* table = c.distance_vec + x.h * c.vec_head;
    long d = x.from;  // nearest first, the order of the table
    for (; d + W <= x.to; d += W) {
      row_dots(query_, table + d * c.D, c.D, c.D, few);
      for (long e = 0; e < W; e++) score_[x.to - 1 - d - e] += few[e];
    }
    for (; d < x.to; d++) score_[x.to - 1 - d] += exact_dot(query_, table + d * c.D, c.D);
  }

  void soften() {
    const double z = c.span ? c.span[c.dynamic ? x.b * c.H + x.h : x.h] : (double)FAR;
    if (c.distance_bias)
      for (long d = x.from; d < x.to; d++) score_[x.to - 1 - d] += c.distance_bias[x.h * c.bias_length + d] * LOG2E;
    if (z >= (double)x.to) return;
    for (long d = std::max(x.from, (long)z); d < x.to; d++)
      score_[x.to - 1 - d] += (float)std::log2(std::min(1.0, ramp_at(z, c.ramp, d)));
  }

  void weigh(float top) {
    vf total = vf{};
    long r = 0;
    if (top == top)
      for (; r + W <= n; r += W) {
        const vf e = vexp2(load(score_ + r) - set1(top));
        store(score_ + r, e);
        total += e;
      }
    x.total = sum(total);
    for (; r < n; r++) score_[r] = std::exp2(score_[r] - top), x.total += score_[r];
  }

  void values(const Stretch& s) {
    const S* v = V_ + s.slot * c.v.row;
    const long count = s.to - s.from;
    if constexpr (std::is_same<S, nibbles>::value)
      return add_nibble_values(score_ + s.from, v, c.v.row, value_marks(c, x.b, first_), s.slot, count, c.Dv, x.sum);
    else add_values(s, v, count);
  }
  void add_values(const Stretch& s, const S* v, long count) {
    rescale(s, v_scale_);
    long d = 0;
    for (; d + 8 * W <= c.Dv; d += 8 * W) add_rows<8>(score_ + s.from, v + d, c.v.row, count, x.sum + d);
    for (; d + 2 * W <= c.Dv; d += 2 * W) add_rows<2>(score_ + s.from, v + d, c.v.row, count, x.sum + d);
    for (; d + W <= c.Dv; d += W) add_rows<1>(score_ + s.from, v + d, c.v.row, count, x.sum + d);
    for (; d < c.Dv; d++)
      for (long r = 0; r < count; r++) x.sum[d] += score_[s.from + r] * to_float(v[r * c.v.row + d]);
  }
};

// The newest tokens' rings as a call of its own, of which the first fields are those of c.
static inline Decode recent_call(const Decode& c) {
  Decode near = *c.recent;
  near.threads = c.threads, near.q = c.q, near.out = c.out, near.lse = c.lse, near.span = c.span;
  near.new_k = c.new_k, near.new_v = c.new_v;
  return near;
}

template <class T, class S>
static void decode_all(const Decode& c) {
  const Decode near = c.recent ? recent_call(c) : c;
  if (c.new_k.data) write_newest<T, S>(c);
  if (c.new_k.data && c.recent) write_newest<T, int8_t>(near);
  std::vector<DecodePart> parts;
  std::vector<long> first;  // by (b, h)
  double cost = 0;
  for (long b = 0; b < c.B; b++)
    for (long h = 0; h < c.H; h++) {
      const long kv = h / (c.H / c.Hkv), seen = c.newest[b] + 1 - c.shift, few = std::min(seen, (long)c.sink_tokens);
      const long oldest = std::max((long)c.sink_tokens, c.oldest ? (long)c.oldest[b * c.Hkv + kv] : 0L);
      long n = std::min(seen - oldest, (long)c.capacity[kv] - c.shift);
      if (c.reach) n = std::min(n, (long)c.reach[h]);
      if (c.span) n = std::min(n, reach_of_span(c.span[c.dynamic ? b * c.H + h : h], c.ramp));
      first.push_back((long)parts.size());
      const auto cut = [&](long from, long end, bool early, bool recent) {
        for (long d = from; d < end; d += DECODE_KEYS)
          parts.push_back({b, h, d, std::min(end, d + DECODE_KEYS), early, recent, 0, 0, nullptr});
      };
      long m = 0;  // distances below it are in 8 bits
      if (c.recent) m = seen - std::max((long)c.recent_since[b], (long)(c.newest[b] + 1 - c.recent_tokens));
      m = std::max(0L, std::min(m, n));
      cut(0, m, false, true), cut(m, n, false, false), cut(0, few, true, false);
      cost += MEMORY * (double)(std::max(0L, n) + std::max(0L, few)) * (c.D + c.Dv);
    }
  first.push_back((long)parts.size());
  const long room = nibble_rows(c.Dv) * NIBBLE_ROW;
  std::vector<float> sums(parts.size() * room);
  for (size_t t = 0; t < parts.size(); t++) parts[t].sum = &sums[t * room];
  for_items((long)parts.size(), c.threads, cost, [&](long t) {
    parts[t].recent ? PartDecode<T, int8_t>(near, parts[t]).run() : PartDecode<T, S>(c, parts[t]).run();
  });
  for (long b = 0; b < c.B; b++)
    for (long h = 0; h < c.H; h++) {
      const long a = first[b * c.H + h], z = first[b * c.H + h + 1];
      const float none = -std::numeric_limits<float>::infinity(), sink = c.sink_logits ? c.sink_logits[h] * LOG2E : none;
      float top = sink;
      for (long t = a; t < z; t++) top = parts[t].top > top || parts[t].top != parts[t].top ? parts[t].top : top;
      const float lifted = top == none ? 0.f : top;
      float total = c.sink_logits ? std::exp2(sink - lifted) : 0.f;
      T* out = row_of<T>(c.out, b, h, 0);
      for (long t = a; t < z; t++) total += std::exp2(parts[t].top - lifted) * parts[t].total;
      for (long d = 0; d < c.Dv; d++) {
        float y = 0.f;
        for (long t = a; t < z; t++) y += std::exp2(parts[t].top - lifted) * parts[t].sum[d];
        put(&out[d], total == 0.f ? 0.f : y / total);
      }
      c.lse[b * c.H + h] = total == 0.f ? none : (lifted + std::log2(total)) * LN2;
    }
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
