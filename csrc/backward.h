// Backward pass; weights are recomputed from lse. An item is a segment of keys of one key/value head, and only this item
// writes dK and dV there. Several segments add to one block of dQ, always in the same order (the nearest keys first), so
// results do not depend on the number of threads and no copy of dQ is needed.
#pragma once
#include <memory>
#include <thread>

#include "exact.h"
#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {

constexpr long BACK_QUERIES = 64;  // per block
constexpr long BACK_KEYS = 192;     // per chunk, a multiple of ROWS

// Sums over distances, d first … first + count − 1, for one segment and head; `width` numbers per distance. With explicit
// positions, sums over the table's rows.
struct DistanceSums {
  long h, first, count;
  float* data;
};

struct Segment {
  long b, kv, index, ka, kb;
};

struct Visit {
  long block;
  int turn;  // number of segments that add to the block's dQ before this one
};

struct Plan {  // the segments that visit each block of queries
  const Scene& s;
  long size, segments, blocks, group;
  std::vector<long> nearest;  // [B, H, blocks]: the highest segment that visits the block, −1 for none
  std::vector<std::vector<Visit>> visits;  // [B, H, segments] if the rule stores blocks; otherwise visited() computes it
  std::vector<Segment> items;
  std::unique_ptr<std::atomic<int>[]> turns;  // [B, H, blocks]: number of segments that have added their dQ
  double cost = 0;

  explicit Plan(const Scene& scene) : s(scene), group(scene.c.H / scene.c.Hkv) {
    const Call& c = s.c;
    // Depends on the shape only: the sums and their order must not depend on the number of threads.
    size = std::clamp(round_up(c.Tk * c.B * c.Hkv / 8, 64), 128L, c.Tk < 4096 ? 512L : 1024L);
    // With the far blocks of a pattern, all segments may visit a block of queries, so limit their number.
    if (s.sparse()) size = std::max(size, round_up(c.Tk / 8, 64));
    if (c.d_distance_vec) size = std::max(size, round_up(c.Tk / 8, 64));  // each segment has its own sum of vectors
    segments = (c.Tk + size - 1) / size;
    blocks = (c.Tq + BACK_QUERIES - 1) / BACK_QUERIES;
    const long cells = c.B * c.H * blocks;
    nearest.assign(cells, -1);
    turns.reset(new std::atomic<int>[cells]);
    for (long x = 0; x < cells; x++) turns[x].store(0, std::memory_order_relaxed);
    if (s.sparse()) {
      visits.resize(c.B * c.H * segments);
      for (long b = 0; b < c.B; b++)
        for (long h = 0; h < c.H; h++) plan_visits(b, h);
    }
    struct Owner {
      long b, kv;
      double cost;
    };
    std::vector<Owner> owners;
    for (long b = 0; b < c.B; b++)
      for (long kv = 0; kv < c.Hkv; kv++) {
        Owner o{b, kv, 0};
        for (long h = kv * group; h < (kv + 1) * group; h++)
          for (long t = 0; t < segments; t++) {
            if (s.sparse()) {
              o.cost += (double)of(b, h, t).size() * BACK_QUERIES * s.tile;
              continue;
            }
            long first, last;
            visited(b, h, t * size, std::min((long)c.Tk, (t + 1) * size), first, last);
            for (long x = first; x < last; x++) nearest[(b * c.H + h) * blocks + x] = t;
            o.cost += (double)(last - first) * BACK_QUERIES * size;
          }
        owners.push_back(o);
        cost += o.cost * (c.D + c.Dv);
      }
    std::stable_sort(owners.begin(), owners.end(), [](const Owner& x, const Owner& y) { return x.cost > y.cost; });
    for (const Owner& o : owners)
      for (long t = segments - 1; t >= 0; t--)
        items.push_back({o.b, o.kv, t, t * size, std::min((long)c.Tk, (t + 1) * size)});
  }

  const std::vector<Visit>& of(long b, long h, long t) const { return visits[(b * s.c.H + h) * segments + t]; }

  // Each block of queries is visited by the segments that contain its stored blocks, the highest first.
  void plan_visits(long b, long h) {
    std::vector<long> tiles, first(segments), last(segments), seen;
    for (long t = 0; t < segments; t++) visited(b, h, t * size, std::min((long)s.c.Tk, (t + 1) * size), first[t], last[t]);
    for (long x = 0; x < blocks; x++) {
      s.tiles_of(b, h, x * BACK_QUERIES, std::min((long)s.c.Tq, (x + 1) * BACK_QUERIES), tiles);
      seen.clear();
      for (const long tile : tiles) {
        const long from = std::max(0L, tile * s.tile), to = std::min((long)s.c.Tk, (tile + 1) * s.tile);
        for (long t = from / size; from < to && t <= (to - 1) / size; t++)
          if (x >= first[t] && x < last[t] && (seen.empty() || seen.back() != t)) seen.push_back(t);
      }
      for (size_t n = 0; n < seen.size(); n++)
        visits[(b * s.c.H + h) * segments + seen[n]].push_back({x, (int)(seen.size() - 1 - n)});
      if (!seen.empty()) nearest[(b * s.c.H + h) * blocks + x] = seen.back();
    }
  }

  // The blocks of queries [first, last) of head h that may see keys [ka, kb).
  void visited(long b, long h, long ka, long kb, long& first, long& last) const {
    const long limit = s.longest(b, h), band_first = std::max(s.heads[h].first, 1 - limit);
    const long band_last = std::min(s.heads[h].last, limit - 1);
    long from = 0, to = s.c.Tq;
    if (band_last < band_first)
      to = 0;
    else if (!s.positioned)
      from = std::max(from, ka + band_first - s.offset[b]), to = std::min(to, kb + band_last - s.offset[b]);
    first = from / BACK_QUERIES, last = to > from ? (to + BACK_QUERIES - 1) / BACK_QUERIES : first;
  }
};

struct BackwardScratch {
  float *QT, *GT, *dQT, *P, *dS, *mask, *rel, *dQ, *lse, *delta, *dz, *Q, *G, *K, *V, *dK, *dV;
  long D, Dv;  // head sizes rounded up to a panel, because the lanes of dK and dV run over them
  BackwardScratch(const Call& c, long segment) : D(round_up(c.D, PANEL)), Dv(round_up(c.Dv, PANEL)) {
    const long q = BACK_QUERIES, k = BACK_KEYS, rel_rows = k + PANEL;
    const bool plain = c.dtype == kFloat32;
    const long sizes[] = {q * c.D, q * c.Dv, q * c.D, k * q, k * q, k * PANEL, rel_rows * PANEL, q * c.D, q, q, q,
                          plain && D == c.D ? 0 : q * D, plain && Dv == c.Dv ? 0 : q * Dv, plain ? 0 : segment * c.D,
                          plain ? 0 : segment * c.Dv, segment * D, segment * Dv};
    float** parts[] = {&QT, &GT, &dQT, &P, &dS, &mask, &rel, &dQ, &lse, &delta, &dz, &Q, &G, &K, &V, &dK, &dV};
    size_t all = 0;
    for (long n : sizes) all += Arena::rounded(n);
    arena().reserve(all);
    for (size_t t = 0; t < sizeof sizes / sizeof *sizes; t++) *parts[t] = arena().take(sizes[t]);
  }
};

template <class T>
class SegmentBackward {
 public:
  SegmentBackward(const Plan& plan, const Segment& x, DistanceSums* bias, DistanceSums* vec, double* d_span)
      : plan_(plan), s(plan.s), c(s.c), x_(x), w(c, plan.size), bias_(bias), vec_(vec), d_span_(d_span) {}

  void run() {
    if (!seen()) return clear();
    const long n = x_.kb - x_.ka;
    const T *k = row<T>(c.k, x_.b, x_.kv, x_.ka), *v = row<T>(c.v, x_.b, x_.kv, x_.ka);
    K_ = as_float(k, c.k.row, n, c.D, c.D, w.K), V_ = as_float(v, c.v.row, n, c.Dv, c.Dv, w.V);
    exact_ = !all_finite(K_.data, K_.ld, n, c.D) || !all_finite(V_.data, V_.ld, n, c.Dv) || (s.positioned && c.distance_vec);
    std::memset(w.dK, 0, sizeof(float) * n * w.D), std::memset(w.dV, 0, sizeof(float) * n * w.Dv);
    for (long g = 0; g < plan_.group; g++) head(g);
    for (long j = 0; j < n; j++) {
      T *dk = row_of<T>(c.dk, x_.b, x_.kv, x_.ka + j), *dv = row_of<T>(c.dv, x_.b, x_.kv, x_.ka + j);
      for (long d = 0; d < c.D; d++) put(&dk[d], w.dK[j * w.D + d] * (float)c.scale);
      for (long d = 0; d < c.Dv; d++) put(&dv[d], w.dV[j * w.Dv + d]);
    }
  }

 private:
  const Plan& plan_;
  const Scene& s;
  const Call& c;
  const Segment& x_;
  BackwardScratch w;
  DistanceSums *bias_, *vec_;  // [group] or null
  double* d_span_;             // [group] static span sums or null
  View K_, V_, Q_, G_;
  bool exact_ = false;
  long h_ = 0, g_ = 0;
  float* d_key_ = nullptr;   // d_key_bias of this head
  float* d_key_span_ = nullptr;  // d_key_span of this head

  bool seen() const {  // seen by any query of any head
    for (long h = x_.kv * plan_.group; h < (x_.kv + 1) * plan_.group; h++) {
      long first, last;
      plan_.visited(x_.b, h, x_.ka, x_.kb, first, last);
      if (s.sparse() ? !plan_.of(x_.b, h, x_.index).empty() : last > first) return true;
    }
    return false;
  }
  void clear() {
    for (long j = x_.ka; j < x_.kb; j++) {
      std::memset(row_of<T>(c.dk, x_.b, x_.kv, j), 0, sizeof(T) * c.D);
      std::memset(row_of<T>(c.dv, x_.b, x_.kv, j), 0, sizeof(T) * c.Dv);
    }
    for (long h = x_.kv * plan_.group; h < (x_.kv + 1) * plan_.group; h++) {
      cleared(c.d_key_bias, h);
      cleared(c.d_key_span, h);
    }
  }

  // The row of a [B, H, Tk] gradient for head h, set to zero in this segment.
  float* cleared(float* gradient, long h) const {
    if (!gradient) return nullptr;
    float* row = gradient + (x_.b * c.H + h) * c.Tk;
    std::memset(row + x_.ka, 0, sizeof(float) * (x_.kb - x_.ka));
    return row;
  }

  void head(long g) {
    g_ = g, h_ = x_.kv * plan_.group + g;
    d_key_ = cleared(c.d_key_bias, h_), d_key_span_ = cleared(c.d_key_span, h_);
    if (s.sparse()) {
      for (const Visit& v : plan_.of(x_.b, h_, x_.index)) visit(v.block, v.turn);
      return;
    }
    long first, last;
    plan_.visited(x_.b, h_, x_.ka, x_.kb, first, last);
    for (long block = first; block < last; block++)
      visit(block, (int)(plan_.nearest[(x_.b * c.H + h_) * plan_.blocks + block] - x_.index));
  }

  void visit(long block, int turn) {
    const long i0 = block * BACK_QUERIES, i1 = std::min((long)c.Tq, i0 + BACK_QUERIES);
    const bool finite = load_block(i0, i1);
    std::memset(w.dz, 0, sizeof(float) * BACK_QUERIES);
    if (exact_ || !finite)
      exact_block(i0, i1);
    else
      fast_block(i0, i1);
    add_to_dq(block, turn, i0, i1);
  }

  // delta = Σ out·g − g_lse and lse of each query; false if any number of the block is NaN or infinite.
  bool load_block(long i0, long i1) {
    const long n = i1 - i0;
    const T *q = row<T>(c.q, x_.b, h_, i0), *g = row<T>(c.g, x_.b, h_, i0), *o = row<T>(c.out, x_.b, h_, i0);
    const float* lse = c.lse + (x_.b * c.H + h_) * c.Tq + i0;
    const float* g_lse = c.g_lse ? c.g_lse + (x_.b * c.H + h_) * c.Tq + i0 : nullptr;
    bool finite = true;
    for (long t = 0; t < BACK_QUERIES; t++) {
      if (t >= n) {  // lanes without a query get no weight
        w.lse[t] = -HIDDEN, w.delta[t] = 0.f;
        continue;
      }
      float delta;
      if constexpr (sizeof(T) == 4)
        delta = dot(reinterpret_cast<const float*>(o) + t * c.out.row, reinterpret_cast<const float*>(g) + t * c.g.row, c.Dv);
      else
        delta = exact_dot(o + t * c.out.row, g + t * c.g.row, c.Dv);
      const bool nothing = lse[t] == -std::numeric_limits<float>::infinity();
      w.delta[t] = nothing ? 0.f : delta - (g_lse ? g_lse[t] : 0.f);
      w.lse[t] = nothing ? -HIDDEN : lse[t] * LOG2E;
      finite = finite && std::isfinite(w.delta[t]) && std::isfinite(w.lse[t]);
    }
    finite = finite && all_finite(q, c.q.row, n, c.D) && all_finite(g, c.g.row, n, c.Dv);
    Q_ = as_float(q, c.q.row, n, c.D, w.D, w.Q), G_ = as_float(g, c.g.row, n, c.Dv, w.Dv, w.G);
    return finite;
  }

  void fast_block(long i0, long i1) {
    const long panels = (i1 - i0 + PANEL - 1) / PANEL;
    Panel panel[BACK_QUERIES / PANEL];
    long from = x_.kb, to = x_.ka;
    for (long p = 0; p < panels; p++) {
      const long i = i0 + p * PANEL, n = std::min((long)PANEL, i1 - i);
      panel[p] = s.panel(x_.b, h_, i, n);
      pack_panel(row<T>(c.q, x_.b, h_, i), c.q.row, n, c.D, (float)c.scale * LOG2E, w.QT + p * PANEL * c.D);
      pack_panel(row<T>(c.g, x_.b, h_, i), c.g.row, n, c.Dv, 1.f, w.GT + p * PANEL * c.Dv);
      long ja, jb;
      s.hull(panel[p], ja, jb);
      if (ja < jb) from = std::min(from, std::max(ja, x_.ka)), to = std::max(to, std::min(jb, x_.kb));
    }
    std::memset(w.dQT, 0, sizeof(float) * panels * PANEL * c.D);
    s.stretches(x_.b, h_, i0, i1, from, to, BACK_KEYS, [&](long jc, long je) { chunk(panel, panels, i1 - i0, jc, je); });
    float by[PANEL];
    std::fill(by, by + PANEL, (float)c.scale);
    for (long p = 0; p < panels; p++)
      unpack_panel(w.dQT + p * PANEL * c.D, std::min((long)PANEL, i1 - i0 - p * PANEL), c.D, by, w.dQ + p * PANEL * c.D, c.D);
  }

  void chunk(const Panel* panel, long panels, long queries, long jc, long je) {
    const long keys = je - jc;
    long low[BACK_QUERIES / PANEL], high[BACK_QUERIES / PANEL];  // rows of the tile that each panel has written
    for (long p = 0; p < panels; p++) {
      low[p] = high[p] = 0;
      s.runs(panel[p], jc, je, [&](long ja, long jb, bool masked) {
        long a = ja - jc, b = jb - jc;
        if (!s.general) a = a / ROWS * ROWS, b = std::min(keys, round_up(b, ROWS));  // the table hides later rows
        if (high[p] == 0)
          low[p] = a;
        else
          zero(p, high[p], a);
        high[p] = b;
        run(panel[p], p, jc, a, b, masked);
      });
    }
    gather(panel, low, high, panels, queries, jc, keys, w.P, G_, w.dV + (jc - x_.ka) * w.Dv, w.Dv);
    gather(panel, low, high, panels, queries, jc, keys, w.dS, Q_, w.dK + (jc - x_.ka) * w.D, w.D);
  }

  void zero(long p, long from, long to) {
    for (long r = from; r < to; r++) {
      std::memset(w.P + r * BACK_QUERIES + p * PANEL, 0, sizeof(float) * PANEL);
      std::memset(w.dS + r * BACK_QUERIES + p * PANEL, 0, sizeof(float) * PANEL);
    }
  }

  // Weights P and score gradients dS of rows [a, b) of the chunk at jc, and their contributions to dQ and the rule's terms.
  void run(const Panel& p, long index, long jc, long a, long b, bool masked) {
    const long n = b - a, ja = jc + a, ld = BACK_QUERIES;
    float *P = w.P + a * ld + index * PANEL, *dS = w.dS + a * ld + index * PANEL;
    const View K{K_.data + (ja - x_.ka) * K_.ld, K_.ld}, V{V_.data + (ja - x_.ka) * V_.ld, V_.ld};
    const Tile tile{p, ja, n, P, ld};
    score(s, tile, masked, w.QT + index * PANEL * c.D, K, w.mask, w.rel);
    product_of_band(n, c.Dv, V.data, V.ld, w.GT + index * PANEL * c.Dv, PANEL, dS, ld, halves(s, tile));
    const Dropper drop(c, p.b, p.h);
    if (drop.on()) drop_gradients(drop, p, ja, n, dS);
    weights(tile, dS, w.lse + index * PANEL, w.delta + index * PANEL);
    const Tile gradient{p, ja, n, dS, ld};
    if (c.d_span && c.dynamic) dynamic_span_sums(gradient, w.dz + index * PANEL);
    if (bias_) bias_sums(gradient);
    if (d_key_)
      for (long r = 0; r < n; r++)
        for (int v = 0; v < VECS; v++) d_key_[ja + r] += sum(load(dS + r * ld + v * W));
    if (d_key_span_) key_span_sums(gradient);
    if (c.distance_vec) vector_sums(gradient, index);
    if (drop.on()) drop_gradients(drop, p, ja, n, P);
    product<BY_COLUMN, true, VECS, true>(c.D, n, K.data, K.ld, dS, ld, w.dQT + index * PANEL * c.D, PANEL, halves(s, tile));
  }

  // Times 1/(1 − p) where dropout keeps the weight, else times 0.
  void drop_gradients(const Dropper& drop, const Panel& p, long ja, long n, float* X) {
    vu of_query[VECS];
    for (int v = 0; v < VECS; v++)
      for (int e = 0; e < W; e++) of_query[v][e] = drop.of_query(p.i + v * W + e);
    for (long r = 0; r < n; r++) {
      const uint32_t of_key = drop.of_key(ja + r);
      for (int v = 0; v < VECS; v++) {
        float* y = X + r * BACK_QUERIES + v * W;
        store(y, load(y) * drop.factors(of_query[v], of_key));
      }
    }
  }

  // S → P = exp(S − lse), dP → dS = P·(dP − delta).
  void weights(const Tile& t, float* dS, const float* lse, const float* delta) {
    long plain_a, plain_b;
    plain_rows(s, t, plain_a, plain_b);
    const Head& head = s.heads[h_];
    vf L[VECS], O[VECS], dz[VECS] = {};
    for (int v = 0; v < VECS; v++) L[v] = load(lse + v * W), O[v] = load(delta + v * W);
    auto edge = [&](long r) __attribute__((always_inline)) {
      const long d = t.p.at - t.ja - r;
      for (int v = 0; v < VECS; v++) {
        float *x = t.S + r * t.ld + v * W, *y = dS + r * t.ld + v * W;
        const vf e = vexp2(load(x) - L[v] + load(head.bias + d + v * W)), g = e * (load(y) - O[v]);
        if (d_span_) dz[v] = g * load(head.slope + d + v * W) + dz[v];
        store(x, e), store(y, g);
      }
    };
    for (long r = 0; r < plain_a; r++) edge(r);
    for (long r = plain_a; r < plain_b; r++)
      for (int v = 0; v < VECS; v++) {
        float *x = t.S + r * t.ld + v * W, *y = dS + r * t.ld + v * W;
        const vf e = vexp2(load(x) - L[v]);
        store(x, e), store(y, e * (load(y) - O[v]));
      }
    for (long r = plain_b; r < t.n; r++) edge(r);
    if (!d_span_) return;
    for (int v = 0; v < VECS; v++) d_span_[g_] += sum(dz[v]);
    if (s.positioned)  // the mask contained the table and the ramp
      for (long r = 0; r < t.n; r++)
        for (long lane = 0; lane < t.p.n; lane++)
          d_span_[g_] += dS[r * t.ld + lane] * head.slope_at(s.head_key(s.pair_distance(x_.b, t.p.i + lane, t.ja + r)));
  }

  void dynamic_span_sums(const Tile& t, float* dz) {
    if (s.positioned) {
      for (long r = 0; r < t.n; r++)
        for (long lane = 0; lane < t.p.n; lane++) {
          const double m = ramp_at(t.p.z[lane], c.ramp, s.length(s.pair_distance(x_.b, t.p.i + lane, t.ja + r)));
          if (m > 0 && m < 1) dz[lane] += (float)(t.S[r * t.ld + lane] / (m * c.ramp));
        }
      return;
    }
    vf acc[VECS];
    for (int v = 0; v < VECS; v++) acc[v] = load(dz + v * W);
    for (long r = 0; r < t.n; r++)
      for (int v = 0; v < VECS && softened(t, r, t.p.z_least); v++) acc[v] += on_ramp(s, t, r, v, dynamic_ramp(s, t, r, v));
    for (int v = 0; v < VECS; v++) store(dz + v * W, acc[v]);
  }

  void key_span_sums(const Tile& t) {
    const float* spans = s.key_span(x_.b, h_);
    for (long r = 0; r < t.n; r++) {
      const float e = spans[t.ja + r];
      if (s.positioned) {
        for (long lane = 0; lane < t.p.n; lane++) {
          const double m = ramp_at(e, c.ramp, s.length(s.pair_distance(x_.b, t.p.i + lane, t.ja + r)));
          if (m > 0 && m < 1) d_key_span_[t.ja + r] += (float)(t.S[r * t.ld + lane] / (m * c.ramp));
        }
        continue;
      }
      for (int v = 0; v < VECS && softened(t, r, e); v++)
        d_key_span_[t.ja + r] += sum(on_ramp(s, t, r, v, ramp_of(s, t, r, v, set1(e))));
    }
  }

  void bias_sums(const Tile& t) {
    const DistanceSums& sums = bias_[g_];
    for (long r = 0; r < t.n; r++) {
      if (s.positioned) {
        for (long lane = 0; lane < t.p.n; lane++) add_bias(t.p.i + lane, t.ja + r, t.S[r * t.ld + lane]);
        continue;
      }
      float* at = sums.data + (t.p.at - t.ja - r - sums.first);
      for (int v = 0; v < VECS; v++) store(at + v * W, load(at + v * W) + load(t.S + r * t.ld + v * W));
    }
  }
  void add_bias(long i, long j, float value) {
    const DistanceSums& sums = bias_[g_];
    const long at = s.positioned ? row_of_table(c, s.pair_distance(x_.b, i, j)) : i + s.offset[x_.b] - j;
    const long d = at - sums.first;
    if (d >= 0 && d < sums.count) sums.data[d] += value;
  }

  void vector_sums(const Tile& t, long index) {
    const Distances ds(t.p, t.ja, t.n);
    for (long r = 0; r < t.n; r++)
      for (int v = 0; v < VECS; v++) store(w.rel + (t.n - 1 - r) * PANEL + v * W, load(t.S + r * t.ld + v * W));
    std::memset(w.rel + t.n * PANEL, 0, sizeof(float) * (ds.rows - t.n) * PANEL);
    unskew(w.rel, ds.rows);
    vector_parts(s, h_, ds, [&](long at, long count, const float* r, long stride) {
      product<BY_COLUMN, true>(c.D, count, r, stride, w.rel + at * PANEL, PANEL, w.dQT + index * PANEL * c.D, PANEL);
    });
    if (!vec_) return;
    float* sums = vec_[g_].data + (ds.least - vec_[g_].first) * w.D;
    for (long d = 0; d < w.D; d += PANEL)
      product<BY_ROW, true>(ds.rows, t.p.n, w.rel, PANEL, Q_.data + index * PANEL * Q_.ld + d, Q_.ld, sums + d, w.D);
  }

  // C[key][d] += Σ_query A[key][query] · X[query][d], over the queries whose panels wrote that row of A.
  void gather(const Panel* panel, const long* low, const long* high, long panels, long queries, long jc, long keys,
              const float* A, View X, float* C, long ldc) {
    for (long r = 0; r < keys; r += ROWS) {
      long pa = panels, pb = 0, near = FAR, far = -FAR;
      for (long p = 0; p < panels; p++)
        if (low[p] < r + ROWS && high[p] > r) {
          pa = std::min(pa, p), pb = p + 1;
          near = std::min(near, panel[p].first), far = std::max(far, panel[p].last);
        }
      if (pb <= pa) continue;
      const long m = std::min((long)ROWS, keys - r);
      long a = pa * PANEL, b = std::min(queries, pb * PANEL);
      if (!s.positioned) {  // the queries whose band reaches any of these keys
        a = std::max(a, jc + r + near - panel[0].at);
        b = std::min(b, jc + r + m + far - panel[0].at);
        if (b <= a) continue;
      }
      for (long p = pa; p < pb; p++)  // rows that a panel did not write hold old numbers
        if (low[p] > r || high[p] < r + m) {
          zero(p, r, std::min(low[p], r + m));
          zero(p, std::max(high[p], r), r + m);
        }
      for (long d = 0; d < ldc; d += PANEL)
        product<BY_ROW, true>(m, b - a, A + r * BACK_QUERIES + a, BACK_QUERIES, X.data + a * X.ld + d, X.ld, C + r * ldc + d, ldc);
    }
  }

  void exact_block(long i0, long i1) {
    const Dropper drop(c, x_.b, h_);
    std::memset(w.dQ, 0, sizeof(float) * (i1 - i0) * c.D);
    for (long i = i0; i < i1; i++) {
      float* dq = w.dQ + (i - i0) * c.D;
      const T *q = row<T>(c.q, x_.b, h_, i), *g = row<T>(c.g, x_.b, h_, i);
      for (long j = x_.ka; j < x_.kb; j++) {
        const Pair pair = exact_pair<T>(s, x_.b, h_, i, j);
        if (!pair.visible) continue;
        const T *k = row<T>(c.k, x_.b, x_.kv, j), *v = row<T>(c.v, x_.b, x_.kv, j);
        const float keep = drop.on() ? drop.factor(drop.of_query(i), drop.of_key(j)) : 1.f;
        const float weight = std::exp2(pair.score - w.lse[i - i0]);
        const float ds = weight * (exact_dot(g, v, c.Dv) * keep - w.delta[i - i0]), by = ds * (float)c.scale;
        for (long d = 0; d < c.D; d++) dq[d] += by * to_float(k[d]);
        for (long d = 0; d < c.D; d++) w.dK[(j - x_.ka) * w.D + d] += ds * to_float(q[d]);
        for (long d = 0; d < c.Dv; d++) w.dV[(j - x_.ka) * w.Dv + d] += weight * keep * to_float(g[d]);
        if (d_span_) d_span_[g_] += ds * pair.slope;
        if (c.d_span && c.dynamic) w.dz[i - i0] += ds * pair.slope;
        if (d_key_) d_key_[j] += ds;
        if (d_key_span_) d_key_span_[j] += ds * pair.key_slope;
        if (bias_) add_bias(i, j, ds);
        if (pair.row < 0) continue;
        const float* r = s.vectors(h_) + pair.row * c.D;
        for (long d = 0; d < c.D; d++) dq[d] += by * r[d];
        if (!vec_) continue;
        const long at = s.positioned ? pair.row : i + s.offset[x_.b] - j;
        float* sums = vec_[g_].data + (at - vec_[g_].first) * w.D;
        for (long d = 0; d < c.D; d++) sums[d] += ds * to_float(q[d]);
      }
    }
  }

  void add_to_dq(long block, int turn, long i0, long i1) {
    std::atomic<int>& turns = plan_.turns[(x_.b * c.H + h_) * plan_.blocks + block];
    for (long spins = 0; turns.load(std::memory_order_acquire) != turn; spins++)
      if (spins > 256) std::this_thread::yield();
    for (long i = i0; i < i1; i++) {
      float* dq = row_of<float>(c.dq, x_.b, h_, i);
      const float* add = w.dQ + (i - i0) * c.D;
      if (turn == 0)
        std::memcpy(dq, add, sizeof(float) * c.D);
      else
        for (long d = 0; d < c.D; d++) dq[d] += add[d];
    }
    if (c.d_span && c.dynamic) {
      float* dz = c.d_span + (x_.b * c.H + h_) * c.Tq;
      for (long i = i0; i < i1; i++) dz[i] = (turn == 0 ? 0.f : dz[i]) + w.dz[i - i0];
    }
    turns.store(turn + 1, std::memory_order_release);
  }
};

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
