// The whole backward pass: segments, then the sums over several segments, each in a fixed order.
#pragma once
#include "backward.h"

namespace spanformer {
namespace SPANFORMER_ISA {

// One buffer of sums over distances per segment and head.
class SegmentSums {
 public:
  SegmentSums(const Plan& plan, long width, long folded_length) : plan_(plan), width_(width) {
    const Scene& s = plan.s;
    size_t all = 0;
    for (const Segment& x : plan.items)
      for (long g = 0; g < plan.group; g++) {
        const long h = x.kv * plan.group + g;
        const Head& head = s.heads[h];
        long first, last, lo = 0, hi = folded_length - 1;
        plan.visited(x.b, h, x.ka, x.kb, first, last);
        if (!s.positioned) {
          const long near = first * BACK_QUERIES + s.offset[x.b] - x.kb, far = last * BACK_QUERIES + s.offset[x.b] - x.ka;
          lo = std::max(head.first, near) - PAD, hi = std::min(head.last, far) + PAD;
        }
        const long count = last > first ? std::max(0L, hi - lo + 1) : 0;
        parts_.push_back({h, lo, count, nullptr});
        offsets_.push_back(all);
        all += (size_t)(count * width);
      }
    store_.reset(static_cast<float*>(std::calloc(all + 1, sizeof(float))));
    if (!store_) std::abort();
    for (size_t t = 0; t < parts_.size(); t++) parts_[t].data = store_.get() + offsets_[t];
  }
  DistanceSums* of(long item) { return parts_.data() + item * plan_.group; }

  // out[h or 0][row][0 … size) = scale · the sum of all parts, in the order of the items.
  void reduce(float* out, long length, long size, bool shared, float scale, long threads) const {
    const long heads = shared ? 1 : plan_.s.c.H, step = 256, steps = (length + step - 1) / step;
    for_items(heads * steps, threads, (double)parts_.size() * length * size, [&](long t) {
      const long h = t / steps, from = t % steps * step, to = std::min(length, from + step);
      float* sums = out + h * length * size;
      std::memset(sums + from * size, 0, sizeof(float) * (to - from) * size);
      for (const DistanceSums& p : parts_) {
        if (!shared && p.h != h) continue;
        add(p, from, to, 1, sums, size);
        if (p.first < 0 && !plan_.s.c.causal && !plan_.s.c.max_future) add(p, from, to, -1, sums, size);
      }
      for (long e = from * size; e < to * size; e++) sums[e] *= scale;
    });
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  const Plan& plan_;
  long width_;
  std::vector<DistanceSums> parts_;
  std::vector<size_t> offsets_;
  std::unique_ptr<float, Free> store_;

  void add(const DistanceSums& p, long from, long to, long sign, float* sums, long size) const {
    const long ahead = plan_.s.positioned ? 0 : plan_.s.c.max_future;
    for (long a = sign < 0 ? std::max(from, 1L) : from; a < to; a++) {
      const long at = sign * a - ahead - p.first;
      if (at < 0 || at >= p.count) continue;
      for (long e = 0; e < size; e++) sums[a * size + e] += p.data[at * width_ + e];
    }
  }
};

// d sink = Σ rows exp(sink − lse) · (g_lse − Σ out·g)
template <class T>
static void sink_gradients(const Call& c) {
  for_items(c.H, c.threads, (double)c.B * c.H * c.Tq * c.Dv, [&](long h) {
    double total = 0;
    for (long b = 0; b < c.B; b++)
      for (long i = 0; i < c.Tq; i++) {
        const long at = (b * c.H + h) * c.Tq + i;
        if (c.lse[at] == -std::numeric_limits<float>::infinity()) continue;  // sees no key, and its sink logit is −inf too
        const float delta = exact_dot(row<T>(c.out, b, h, i), row<T>(c.g, b, h, i), c.Dv);
        total += std::exp(c.sink_logits[h] - c.lse[at]) * ((c.g_lse ? c.g_lse[at] : 0.f) - delta);
      }
    c.d_sink_logits[h] = (float)total;
  });
}

template <class T>
static void backward_all(const Call& c) {
  prefer_large_pages(c.dq, c.B * c.H * c.Tq * c.D * (long)sizeof(float));
  prefer_large_pages(c.dk, c.B * c.Hkv * c.Tk * c.D * (long)sizeof(T));
  prefer_large_pages(c.dv, c.B * c.Hkv * c.Tk * c.Dv * (long)sizeof(T));
  const Scene s(c);
  const Plan plan(s);
  const long count = (long)plan.items.size(), group = plan.group;
  std::unique_ptr<SegmentSums> bias, vec;
  if (c.d_distance_bias) bias.reset(new SegmentSums(plan, 1, c.bias_length));
  if (c.d_distance_vec) vec.reset(new SegmentSums(plan, round_up(c.D, PANEL), c.vec_length));
  std::vector<double> span(c.d_span && !c.dynamic ? count * group : 0);
  for_items(count, c.threads, plan.cost, [&](long t) {
    SegmentBackward<T>(plan, plan.items[t], bias ? bias->of(t) : nullptr, vec ? vec->of(t) : nullptr,
                       span.empty() ? nullptr : &span[t * group])
        .run();
  });
  for (long b = 0; b < c.B; b++)  // queries that see no key
    for (long h = 0; h < c.H; h++)
      for (long block = 0; block < plan.blocks; block++)
        if (plan.nearest[(b * c.H + h) * plan.blocks + block] < 0)
          for (long i = block * BACK_QUERIES; i < std::min((long)c.Tq, (block + 1) * BACK_QUERIES); i++) {
            std::memset(row_of<float>(c.dq, b, h, i), 0, sizeof(float) * c.D);
            if (c.d_span && c.dynamic) c.d_span[(b * c.H + h) * c.Tq + i] = 0.f;
          }
  if (c.d_span && !c.dynamic) {
    std::vector<double> total(c.H);
    for (long t = 0; t < count; t++)
      for (long g = 0; g < group; g++) total[plan.items[t].kv * group + g] += span[t * group + g];
    for (long h = 0; h < c.H; h++) c.d_span[h] = (float)total[h];
  }
  if (bias) bias->reduce(c.d_distance_bias, c.bias_length, 1, false, 1.f, c.threads);
  if (vec) vec->reduce(c.d_distance_vec, c.vec_length, c.D, c.vec_head == 0, (float)c.scale, c.threads);
  if (c.d_sink_logits) sink_gradients<T>(c);
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
