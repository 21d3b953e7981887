// out = softmax(scores)·V by blocks of queries, each against its own band of keys, with a running maximum and sum.
#pragma once
#include "exact.h"
#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {

constexpr long FORWARD_QUERIES = 128;  // per item
constexpr long SUMMED = 16;            // weights summed together before they are added to the chunk's sum
constexpr long FORWARD_KEYS = 256;     // per chunk: its K and V stay in the cache for all panels of the item

struct ForwardScratch {
  float *QT, *OT, *S, *mask, *rel, *top, *total, *K, *V;
  explicit ForwardScratch(const Call& c) {
    const long q = FORWARD_QUERIES, k = FORWARD_KEYS, copy = c.dtype == kFloat32 ? 0 : k;
    const size_t sizes[] = {(size_t)(q * c.D), (size_t)(q * c.Dv), (size_t)(k * PANEL), (size_t)(k * PANEL),
                            (size_t)((k + PANEL) * PANEL), (size_t)q, (size_t)q, (size_t)(copy * c.D), (size_t)(copy * c.Dv)};
    float** parts[] = {&QT, &OT, &S, &mask, &rel, &top, &total, &K, &V};
    size_t all = 0;
    for (size_t n : sizes) all += Arena::rounded(n);
    arena().reserve(all);
    for (int t = 0; t < 9; t++) *parts[t] = arena().take(sizes[t]);
  }
};

// One run of keys for one panel: extends top, total and OT; returns false if a score is NaN or infinite.
static inline bool forward_run(const Scene& s, const Tile& t, bool masked, const float* QT, View K, View V,
                               const Dropper& drop, float* OT, float* top, float* total, bool fresh,
                               const ForwardScratch& w) {
  score(s, t, masked, QT, K, w.mask, w.rel);
  long plain_a, plain_b;
  plain_rows(s, t, plain_a, plain_b);
  const float* table = s.heads[t.p.h].bias;
  vf x[VECS], old[VECS], finite[VECS] = {};
  for (int v = 0; v < VECS; v++) x[v] = old[v] = load(top + v * W);
  auto edge = [&](long r) __attribute__((always_inline)) {
    const float* bias = table + (t.p.at - t.ja - r);
    for (int v = 0; v < VECS; v++) {
      const vf y = load(t.S + r * PANEL + v * W) + load(bias + v * W);
      store(t.S + r * PANEL + v * W, y);
      x[v] = vmax(x[v], y);
      finite[v] = y * set1(0.f) + finite[v];
    }
  };
  for (long r = 0; r < plain_a; r++) edge(r);
  for (long r = plain_a; r < plain_b; r++)
    for (int v = 0; v < VECS; v++) {
      const vf y = load(t.S + r * PANEL + v * W);
      x[v] = vmax(x[v], y);
      finite[v] = y * set1(0.f) + finite[v];
    }
  for (long r = plain_b; r < t.n; r++) edge(r);
  vi bad{};
  for (int v = 0; v < VECS; v++) bad |= finite[v] != vf{};
  if (any(bad)) return false;

  // A lane whose keys are all hidden so far has the maximum HIDDEN; s − HIDDEN would give weight, so raise it.
  vf lifted[VECS], added[VECS] = {};
  for (int v = 0; v < VECS; v++) lifted[v] = vmax(x[v], set1(HIDDEN_AT_MOST));
  for (long r = 0; r < t.n;) {
    vf some[VECS] = {};  // sum short runs first: the error of a sum grows with its length
    for (const long end = std::min(r + SUMMED, t.n); r < end; r++)
      for (int v = 0; v < VECS; v++) {
        const vf e = vexp2(load(t.S + r * PANEL + v * W) - lifted[v]);
        some[v] += e;
        store(t.S + r * PANEL + v * W, e);
      }
    for (int v = 0; v < VECS; v++) added[v] += some[v];
  }
  vi moved{};
  for (int v = 0; v < VECS; v++) moved |= x[v] != old[v];
  if (any(moved)) {
    vf shrink[VECS];
    for (int v = 0; v < VECS; v++) {
      shrink[v] = vexp2(old[v] - x[v]);
      store(total + v * W, load(total + v * W) * shrink[v]);
      store(top + v * W, x[v]);
    }
    if (!fresh)
      for (long d = 0; d < s.c.Dv; d++)
        for (int v = 0; v < VECS; v++) store(OT + d * PANEL + v * W, load(OT + d * PANEL + v * W) * shrink[v]);
  }
  for (int v = 0; v < VECS; v++) store(total + v * W, load(total + v * W) + added[v]);
  if (drop.on()) {
    vu of_query[VECS];
    for (int v = 0; v < VECS; v++)
      for (int e = 0; e < W; e++) of_query[v][e] = drop.of_query(t.p.i + v * W + e);
    for (long r = 0; r < t.n; r++) {
      const uint32_t of_key = drop.of_key(t.ja + r);
      for (int v = 0; v < VECS; v++)
        store(t.S + r * PANEL + v * W, load(t.S + r * PANEL + v * W) * drop.factors(of_query[v], of_key));
    }
  }
  if (fresh)
    product<BY_COLUMN, false, VECS, true>(s.c.Dv, t.n, V.data, V.ld, t.S, PANEL, OT, PANEL, halves(s, t));
  else
    product<BY_COLUMN, true, VECS, true>(s.c.Dv, t.n, V.data, V.ld, t.S, PANEL, OT, PANEL, halves(s, t));
  return true;
}

template <class T>
static void forward_finish(const Scene& s, const Panel& p, float* OT, const float* top, const float* total, bool fresh) {
  const Call& c = s.c;
  float by[PANEL], log_sum[PANEL];
  for (int v = 0; v < VECS; v++) {
    vf l = load(total + v * W), m = l > vf{} ? load(top + v * W) : set1(HIDDEN), share = set1(1.f);
    if (c.sink_logits) {
      const vf sink = set1(c.sink_logits[p.h] * LOG2E), joint = vmax(m, sink);
      share = vexp2(m - joint), m = joint;
      l = l * share + vexp2(sink - joint);
    }
    const vi some = l > vf{};
    const vf sum = some ? l : set1(1.f);
    store(by + v * W, some ? share / sum : vf{});
    const vf infinite = set1(std::numeric_limits<float>::infinity());
    store(log_sum + v * W, some ? (m + vlog2(sum)) * set1(LN2) : -infinite);
  }
  std::memcpy(c.lse + (p.b * c.H + p.h) * c.Tq + p.i, log_sum, sizeof(float) * p.n);
  if (fresh) std::memset(OT, 0, sizeof(float) * c.Dv * PANEL);
  T* out = row_of<T>(c.out, p.b, p.h, p.i);
  unpack_panel(OT, p.n, c.Dv, by, out, c.out.row);
  if (!all_finite(out, c.out.row, p.n, c.Dv)) exact_forward<T>(s, p);  // some V is not finite: find the queries that see it
}

// A block of queries [i0, i1) of one head.
template <class T>
class BlockForward {
 public:
  BlockForward(const Scene& scene, long b, long h, long i0, long i1)
      : s(scene), c(s.c), w(c), drop(c, b, h), b_(b), h_(h), kv_(h / (c.H / c.Hkv)), i0_(i0), i1_(i1) {}

  void run() {
    if (c.sink_logits && !(c.sink_logits[h_] * LOG2E < std::numeric_limits<float>::infinity())) return spoil();
    const long panels = (i1_ - i0_ + PANEL - 1) / PANEL;
    long from = c.Tk, to = 0, longest = 0;
    for (long p = 0; p < panels; p++) {
      const long i = i0_ + p * PANEL;
      panel_[p] = s.panel(b_, h_, i, std::min((long)PANEL, i1_ - i));
      long ja, jb;
      s.hull(panel_[p], ja, jb);
      if (ja < jb) from = std::min(from, ja), to = std::max(to, jb), longest = std::max(longest, jb - ja);
    }
    if (longest <= FORWARD_KEYS && sizeof(T) == 4) {  // short spans: one panel at a time, all in the L1 cache
      for (long p = 0; p < panels; p++) {
        start(p, 0);
        keys(p, 0, 0, c.Tk, {row_float(c.k, 0), c.k.row}, {row_float(c.v, 0), c.v.row});
        finish(p, 0);
      }
      return;
    }
    for (long p = 0; p < panels; p++) start(p, p);
    s.stretches(b_, h_, i0_, i1_, from, to, FORWARD_KEYS, [&](long jc, long je) {
      const View K = as_float(row<T>(c.k, b_, kv_, jc), c.k.row, je - jc, c.D, c.D, w.K);
      const View V = as_float(row<T>(c.v, b_, kv_, jc), c.v.row, je - jc, c.Dv, c.Dv, w.V);
      for (long p = 0; p < panels; p++) keys(p, p, jc, je, K, V);
    });
    for (long p = 0; p < panels; p++) finish(p, p);
  }

 private:
  const Scene& s;
  const Call& c;
  const ForwardScratch w;
  const Dropper drop;
  const long b_, h_, kv_, i0_, i1_;
  Panel panel_[FORWARD_QUERIES / PANEL];
  bool fresh_[FORWARD_QUERIES / PANEL], exact_[FORWARD_QUERIES / PANEL];

  void spoil() {  // every query sees a sink logit of NaN or +inf
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (long i = i0_; i < i1_; i++) {
      T* out = row_of<T>(c.out, b_, h_, i);
      for (long d = 0; d < c.Dv; d++) put(&out[d], nan);
      c.lse[(b_ * c.H + h_) * c.Tq + i] = nan;
    }
  }

  const float* row_float(const Rows& r, long j) const {
    return reinterpret_cast<const float*>(row<T>(r, b_, kv_, j));
  }

  void start(long p, long slot) {
    const Panel& x = panel_[p];
    fresh_[p] = true, exact_[p] = s.positioned && c.distance_vec;
    pack_panel(row<T>(c.q, b_, h_, x.i), c.q.row, x.n, c.D, (float)c.scale * LOG2E, w.QT + slot * PANEL * c.D);
    for (long t = 0; t < PANEL; t++) w.top[slot * PANEL + t] = HIDDEN, w.total[slot * PANEL + t] = 0.f;
  }

  // Keys [jc, je), whose first row K and V point at.
  void keys(long p, long slot, long jc, long je, View K, View V) {
    const Panel& x = panel_[p];
    s.runs(x, jc, je, [&](long ja, long jb, bool masked) {
      if (exact_[p]) return;
      const Tile tile{x, ja, jb - ja, w.S, PANEL};
      exact_[p] = !forward_run(s, tile, masked, w.QT + slot * PANEL * c.D, {K.data + (ja - jc) * K.ld, K.ld},
                               {V.data + (ja - jc) * V.ld, V.ld}, drop, w.OT + slot * PANEL * c.Dv, w.top + slot * PANEL,
                               w.total + slot * PANEL, fresh_[p], w);
      fresh_[p] = false;
    });
  }

  void finish(long p, long slot) {
    if (exact_[p])
      exact_forward<T>(s, panel_[p]);
    else
      forward_finish<T>(s, panel_[p], w.OT + slot * PANEL * c.Dv, w.top + slot * PANEL, w.total + slot * PANEL, fresh_[p]);
  }
};

// Approximate number of pairs of queries [i0, i1) and keys of a head, for distributing the work only.
static double pairs(const Scene& s, long b, long h, long i0, long i1) {
  long ja, jb;
  s.hull(s.panel(b, h, i0, std::min((long)PANEL, i1 - i0)), ja, jb);
  if (s.sparse()) {
    std::vector<long> tiles;
    s.tiles_of(b, h, i0, i1, tiles);
    return (double)(tiles.size() * s.tile + 1) * (double)(i1 - i0);
  }
  return (double)(jb - ja + 1) * (double)(i1 - i0);
}

template <class T>
static void forward_all(const Call& c) {
  if (!c.B || !c.Tq) return;
  prefer_large_pages(c.out, c.B * c.H * c.Tq * c.Dv * (long)sizeof(T));
  const Scene s(c);
  struct Item {
    long b, h, i0, i1;
    double cost;
  };
  std::vector<Item> items;
  items.reserve(c.B * c.H * ((c.Tq + FORWARD_QUERIES - 1) / FORWARD_QUERIES));
  double all = 0;
  for (long b = 0; b < c.B; b++)
    for (long h = 0; h < c.H; h++)
      for (long i = 0; i < c.Tq; i += FORWARD_QUERIES) {
        const long end = std::min((long)c.Tq, i + FORWARD_QUERIES);
        items.push_back({b, h, i, end, pairs(s, b, h, i, end)});
        all += items.back().cost * (c.D + c.Dv);
      }
  std::stable_sort(items.begin(), items.end(), [](const Item& x, const Item& y) { return x.cost > y.cost; });
  for_items(items.size(), c.threads, all, [&](long t) {
    const Item& x = items[t];
    BlockForward<T>(s, x.b, x.h, x.i0, x.i1).run();
  });
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
