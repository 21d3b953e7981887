// One query against rings of keys and values, each key/value head's as long as it needs; lanes are the head size.
#pragma once
#include "exact.h"
#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {

constexpr long DECODE_KEYS = 1024;  // per part of a head: long heads are shared between threads

SPANFORMER_INLINE vf load_row(const float* p) { return load(p); }
SPANFORMER_INLINE vf load_row(const bf16* p) {
  typedef uint16_t vh __attribute__((vector_size(W * 2)));
  vh x;
  std::memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vu) << 16);
}

template <class T>
SPANFORMER_INLINE float row_dot(const float* q, const T* k, long D) {
  vf a = vf{}, b = vf{};
  long d = 0;
  for (; d + 2 * W <= D; d += 2 * W) {
    a = load(q + d) * load_row(k + d) + a;
    b = load(q + d + W) * load_row(k + d + W) + b;
  }
  for (; d + W <= D; d += W) a = load(q + d) * load_row(k + d) + a;
  float s = sum(a + b);
  for (; d < D; d++) s += q[d] * to_float(k[d]);
  return s;
}

struct DecodePart {
  long b, h, from, to;  // distances [from, to)
  float top, total;
  float* sum;  // [Dv]
};

template <class T>
static void decode_part(const Decode& c, DecodePart& x) {
  const long kv = x.h / (c.H / c.Hkv), capacity = c.capacity[kv], n = x.to - x.from;
  const T* q = row<T>(c.q, x.b, x.h, 0);
  float query[1024], score[DECODE_KEYS];
  for (long d = 0; d < c.D; d++) query[d] = to_float(q[d]) * (float)c.scale * LOG2E;
  const double z = c.span ? c.span[c.dynamic ? x.b * c.H + x.h : x.h] : 0;
  const T *K = static_cast<const T*>(c.k.data) + x.b * c.k.batch + c.first[kv] * c.k.row;
  const T *V = static_cast<const T*>(c.v.data) + x.b * c.v.batch + c.first[kv] * c.v.row;
  const long start = (c.newest[x.b] - c.shift - x.from) % capacity;
  x.top = -std::numeric_limits<float>::infinity();
  bool bad = false;
  long slot = start;
  for (long r = 0; r < n; r++) {
    const long d = x.from + r;
    float y = row_dot(query, K + slot * c.k.row, c.D);
    if (c.distance_vec && d < c.vec_length) y += dot(query, c.distance_vec + x.h * c.vec_head + d * c.D, c.D);
    if (c.distance_bias && d < c.bias_length) y += c.distance_bias[x.h * c.bias_length + d] * LOG2E;
    if (c.span && (double)d > z) y += (float)std::log2(std::min(1.0, ramp_at(z, c.ramp, d)));
    score[r] = y;
    x.top = std::max(x.top, y), bad = bad || y != y;
    slot = slot == 0 ? capacity - 1 : slot - 1;
  }
  if (bad) x.top = std::numeric_limits<float>::quiet_NaN();
  const float top = x.top == -std::numeric_limits<float>::infinity() ? 0.f : x.top;
  x.total = 0.f;
  long r = 0;
  vf total = vf{};
  for (; r + W <= n; r += W) {
    const vf e = bad ? set1(top) : vexp2(load(score + r) - set1(top));
    store(score + r, e);
    total += e;
  }
  x.total = sum(total);
  for (; r < n; r++) score[r] = std::exp2(score[r] - top), x.total += score[r];
  const long whole = c.Dv / W * W;
  for (long d0 = 0; d0 < whole; d0 += 8 * W) {  // up to eight vectors of the output in registers
    const long vectors = std::min(8L, (whole - d0) / W);
    vf acc[8] = {};
    slot = start;
    if (vectors == 8) {
      vf a0 = vf{}, a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
      for (long r = 0; r < n; r++) {
        const T* v = V + slot * c.v.row + d0;
        const vf p = set1(score[r]);
        a0 = p * load_row(v) + a0, a1 = p * load_row(v + W) + a1;
        a2 = p * load_row(v + 2 * W) + a2, a3 = p * load_row(v + 3 * W) + a3;
        a4 = p * load_row(v + 4 * W) + a4, a5 = p * load_row(v + 5 * W) + a5;
        a6 = p * load_row(v + 6 * W) + a6, a7 = p * load_row(v + 7 * W) + a7;
        slot = slot == 0 ? capacity - 1 : slot - 1;
      }
      acc[0] = a0, acc[1] = a1, acc[2] = a2, acc[3] = a3, acc[4] = a4, acc[5] = a5, acc[6] = a6, acc[7] = a7;
    } else {
      for (long r = 0; r < n; r++) {
        const T* v = V + slot * c.v.row + d0;
        for (long e = 0; e < vectors; e++) acc[e] = set1(score[r]) * load_row(v + e * W) + acc[e];
        slot = slot == 0 ? capacity - 1 : slot - 1;
      }
    }
    for (long e = 0; e < vectors; e++) store(x.sum + d0 + e * W, acc[e]);
  }
  for (long d = whole; d < c.Dv; d++) {
    float acc = 0.f;
    slot = start;
    for (long r = 0; r < n; r++) {
      acc += score[r] * to_float(V[slot * c.v.row + d]);
      slot = slot == 0 ? capacity - 1 : slot - 1;
    }
    x.sum[d] = acc;
  }
}

template <class T>
static void decode_all(const Decode& c) {
  std::vector<DecodePart> parts;
  std::vector<long> first;  // by (b, h)
  double cost = 0;
  for (long b = 0; b < c.B; b++)
    for (long h = 0; h < c.H; h++) {
      long n = std::min((long)c.newest[b] + 1, (long)c.capacity[h / (c.H / c.Hkv)]) - c.shift;
      if (c.reach) n = std::min(n, (long)c.reach[h]);
      if (c.span) n = std::min(n, reach_of_span(c.span[c.dynamic ? b * c.H + h : h], c.ramp));
      first.push_back((long)parts.size());
      for (long d = 0; d < n; d += DECODE_KEYS) parts.push_back({b, h, d, std::min(n, d + DECODE_KEYS), 0, 0, nullptr});
      cost += (double)std::max(0L, n) * (c.D + c.Dv);
    }
  first.push_back((long)parts.size());
  std::vector<float> sums(parts.size() * c.Dv);
  for (size_t t = 0; t < parts.size(); t++) parts[t].sum = &sums[t * c.Dv];
  for_items((long)parts.size(), c.threads, cost, [&](long t) { decode_part<T>(c, parts[t]); });
  for (long b = 0; b < c.B; b++)
    for (long h = 0; h < c.H; h++) {
      const long a = first[b * c.H + h], z = first[b * c.H + h + 1];
      const float none = -std::numeric_limits<float>::infinity(), sink = c.sinks ? c.sinks[h] * LOG2E : none;
      float top = sink;
      for (long t = a; t < z; t++) top = parts[t].top > top || parts[t].top != parts[t].top ? parts[t].top : top;
      const float lifted = top == none ? 0.f : top;
      float total = c.sinks ? std::exp2(sink - lifted) : 0.f;
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
