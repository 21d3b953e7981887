// The pairs that a head sees. Distances d = i + offset − j index one table per head, in log2, so that the soft span, the
// distance bias, the reach and causality are one vector add. The range of keys of a panel of queries is computed from d.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "call.h"
#include "pack.h"

namespace spanformer {
namespace SPANFORMER_ISA {

constexpr float HIDDEN = -6e37f;  // five of them (key, its span, span, mask, table) still add up to a finite number
constexpr float HIDDEN_AT_MOST = -1e37f;  // lower than any real score
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;
constexpr long PAD = PANEL + 16;  // tables may be read this far past either end
constexpr long FAR = 1L << 40;    // a reach beyond any sequence, as ops/rule.py
constexpr long LONG_TABLE = 1L << 22;  // a longer table must be worth its memory

// Add the ramp to the fraction of z, not to z: adding a short ramp to a long span would round it away.
static inline long reach_of_span(double z, double ramp) {  // number of distances 0, 1, … with m > 0
  if (z + ramp >= (double)FAR) return FAR;
  const double whole = std::floor(z), n = whole + std::ceil(z - whole + ramp);
  return n > 0 ? (long)n : 0;  // NaN sees nothing
}
static inline double ramp_at(double z, double ramp, long d) {  // m before clipping
  return (z - (double)d + ramp) / ramp;
}

static inline long floor_div(long a, long b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

struct Head {
  long first, last;            // the band: first ≤ d ≤ last
  long plain_first, plain_last;  // distances that need no table: visible, without bias
  long table_first, table_last;
  const float *bias = nullptr, *slope = nullptr;  // by d: log2 of the factor of the weight; 1/(m·ramp) on the ramp
  std::vector<float> store;

  // The table's value for any distance (|d| if `folded`).
  float at(long d) const {
    if (d < first || d > last) return HIDDEN;
    return d < table_first || d > table_last ? 0.f : bias[d];
  }
  float slope_at(long d) const { return d < table_first || d > table_last ? 0.f : slope[d]; }
};

// Number of distances that a head reaches, without dynamic spans.
static inline long limit_of(const Call& c, long h) {
  const long limit = c.reach ? std::min(FAR, (long)c.reach[h]) : FAR;
  return c.span && !c.dynamic ? std::min(limit, reach_of_span(c.span[h], c.ramp)) : limit;
}

// The row of distance_bias and distance_vec for a signed distance; it may be outside of them.
static inline long row_of_table(const Call& c, long d) { return c.max_future ? d + c.max_future : c.causal ? d : std::labs(d); }

// The table of a `folded` head runs over |d| (explicit positions, and no table distinguishes −d from d), otherwise over
// signed distances. The table of a `positioned` head is never read past its ends, so it has no padding.
static void make_head(const Call& c, long h, bool folded, bool positioned, long least, long most, Head& head) {
  const bool soft = c.span && !c.dynamic;
  const double z = soft ? c.span[h] : 0;
  const long limit = limit_of(c, h);
  const bool two_sided = !c.causal && !folded;
  head.last = std::min(limit - 1, folded ? std::max(most, -least) : most);
  head.first = two_sided ? std::max(1 - limit, least) : 0;
  const long full = soft ? (long)std::min((double)FAR, std::floor(z)) : FAR;  // m = 1 up to here
  head.plain_last = std::min(head.last, full);
  head.plain_first = two_sided ? std::max(head.first, -full) : 0;
  head.table_first = folded && !c.distance_bias ? head.plain_last + 1 : head.first - PAD;
  head.table_last = folded ? head.last : head.last + PAD;
  if (c.distance_bias) {
    head.plain_first = 1, head.plain_last = 0;
    if (positioned) {
      head.table_last = std::min(head.last, (long)(c.bias_length - 1 - c.max_future));
      head.table_first = folded ? head.table_first : std::max(head.first, (long)-c.max_future);
    }
  } else if (folded && !soft) {
    head.table_first = 0, head.table_last = -1;
  }
  const long n = std::max(0L, head.table_last - head.table_first + 1);
  head.store.resize((size_t)(soft ? 2 * n : n) + 1);  // never empty: pointers are computed from its address
  float *bias = head.store.data() - head.table_first, *slope = soft ? bias + n : nullptr;
  head.bias = bias, head.slope = slope;
  for (long d = head.table_first; d <= head.table_last; d++) {
    const long a = std::labs(d);
    float value = 0.f, inverse = 0.f;
    if (d < head.first || d > head.last) {
      value = HIDDEN;
    } else {
      if (soft && a > full) {
        const double m = ramp_at(z, c.ramp, a);
        if (m < 1) value = (float)std::log2(m), inverse = (float)(1.0 / (m * c.ramp));
      }
      if (c.distance_bias) {
        const long row = row_of_table(c, d);
        const float extra = row >= 0 && row < c.bias_length ? c.distance_bias[h * c.bias_length + row] : 0.f;
        value = std::max(value + extra * LOG2E, HIDDEN);  // in this order NaN stays NaN
        if (value == HIDDEN) inverse = 0.f;
      }
    }
    bias[d] = value;
    if (soft) slope[d] = inverse;
  }
}

struct Panel {  // n ≤ PANEL consecutive queries of one head
  long b, h, i, n;
  long at;           // lane t and key j are at distance at + t − j
  long first, last;  // the band, narrowed to these queries' own spans
  float z[PANEL], z_least;  // dynamic spans
  long position_lo, position_hi, document_lo, document_hi;
};

class Scene {
 public:
  const Call& c;
  std::vector<Head> heads;
  std::vector<long> offset, base;  // by batch row: query 0 less key 0 (less the shift); the position of key 0
  bool positioned = false;         // distances are not i + offset − j; they are looked up pair by pair
  bool folded = false;             // and looked up at |d|
  bool general;                    // some pairs inside the band may be hidden, so runs are found tile by tile
  long tile = 64, tiles = 0;

  explicit Scene(const Call& call) : c(call) {
    for (long b = 0; b < c.B; b++)
      if (!affine(b)) positioned = true;
    long least = 0, most = 0;
    auto extent = [&](long b, long i, long j) {
      const long d = q_position(b, i) - k_position(b, j) - c.shift;
      least = std::min(least, d), most = std::max(most, d);
    };
    for (long b = 0; b < c.B && c.Tq && c.Tk; b++) {
      if (!positioned) {
        extent(b, 0, c.Tk - 1), extent(b, c.Tq - 1, 0);
        continue;
      }
      long q_lo = 0, q_hi = 0, k_lo = 0, k_hi = 0;
      for (long i = 1; i < c.Tq; i++) {
        if (q_position(b, i) < q_position(b, q_lo)) q_lo = i;
        if (q_position(b, i) > q_position(b, q_hi)) q_hi = i;
      }
      for (long j = 1; j < c.Tk; j++) {
        if (k_position(b, j) < k_position(b, k_lo)) k_lo = j;
        if (k_position(b, j) > k_position(b, k_hi)) k_hi = j;
      }
      extent(b, q_lo, k_hi), extent(b, q_hi, k_lo);
    }
    long widest = 0;
    for (long h = 0; h < c.H; h++) widest = std::max(widest, limit_of(c, h));
    // If queries and keys are far apart, the table is as long as their distance.
    const long table = std::min(most, widest) - (c.causal ? 0 : std::max(least, -widest));
    if (table > std::max(LONG_TABLE, 4 * (c.Tq + c.Tk))) positioned = true;
    folded = positioned && !(c.max_future && c.distance_bias);
    heads.resize(c.H);
    for (long h = 0; h < c.H; h++) make_head(c, h, folded, positioned, least, most, heads[h]);
    if (c.dynamic)
      for (long row = 0; row < c.B * c.H; row++) {
        const float* z = c.span + row * c.Tq;
        float most = 0;
        for (long i = 0; i < c.Tq; i++) most = std::max(most, z[i]);
        longest_.push_back(reach_of_span(most, c.ramp));
      }
    if (c.key_span) make_key_spans();
    general = positioned || c.q_documents || c.q_orders || c.block_offsets || c.key_span;
    if (c.block_offsets && !positioned) tile = c.block_size;
    if (general) make_tiles();
    if (sparse()) make_masks();
  }

  long q_position(long b, long i) const {
    return c.q_positions ? c.q_positions[b * c.q_positions_batch + i] : i + c.Tk - c.Tq;
  }
  long k_position(long b, long j) const { return c.k_positions ? c.k_positions[b * c.k_positions_batch + j] : j; }
  long q_document(long b, long i) const { return c.q_documents[b * c.q_documents_batch + i]; }
  long k_document(long b, long j) const { return c.k_documents[b * c.k_documents_batch + j]; }
  long q_order(long e, long b, long i) const { return c.q_orders[e * c.q_orders_order + b * c.q_orders_batch + i]; }
  long k_order(long e, long b, long j) const { return c.k_orders[e * c.k_orders_order + b * c.k_orders_batch + j]; }
  // Number of distances that a query sees, from its head's reach and span.
  long seen_distances(long b, long h, long i) const {
    const long limit = limit_of(c, h);
    return c.dynamic ? std::min(limit, reach_of_span(dynamic_span(b, h, i), c.ramp)) : limit;
  }
  bool in_other_order(long b, long h, long i, long j) const {
    const uint64_t limit = (uint64_t)seen_distances(b, h, i);
    for (long e = 0; e < c.orders; e++)
      if ((uint64_t)(q_order(e, b, i) - k_order(e, b, j) - c.shift) < limit) return true;
    return false;
  }
  const float* key_bias(long b, long h) const {
    return c.key_bias ? c.key_bias + b * c.key_bias_batch + h / c.key_bias_group * c.key_bias_head : nullptr;
  }
  const float* vectors(long h) const { return c.distance_vec + h * c.vec_head; }
  float dynamic_span(long b, long h, long i) const { return c.span[(b * c.H + h) * c.Tq + i]; }
  const float* key_span(long b, long h) const {
    return c.key_span ? c.key_span + b * c.key_span_batch + h * c.key_span_head : nullptr;
  }
  // Maximum number of distances that the head's dynamic spans and key spans reach.
  long longest(long b, long h) const {
    const long limit = c.dynamic ? longest_[b * c.H + h] : FAR;
    return c.key_span ? std::min(limit, lasting_[b * c.H + h]) : limit;
  }
  long pair_distance(long b, long i, long j) const { return q_position(b, i) - k_position(b, j) - c.shift; }
  // The distance that a span applies to.
  long length(long d) const { return c.causal ? d : std::labs(d); }
  // The index into a head's table if positions are explicit.
  long head_key(long d) const { return folded ? length(d) : d; }

  Panel panel(long b, long h, long i, long n) const {
    Panel p;
    p.b = b, p.h = h, p.i = i, p.n = n;
    p.at = i + offset[b];
    p.first = heads[h].first, p.last = heads[h].last;
    if (c.dynamic) {
      float most = 0;
      p.z_least = std::numeric_limits<float>::infinity();
      for (long t = 0; t < PANEL; t++) {
        p.z[t] = dynamic_span(b, h, i + std::min(t, n - 1));
        p.z_least = std::min(p.z_least, p.z[t]), most = std::max(most, p.z[t]);
      }
      const long limit = reach_of_span(most, c.ramp);
      p.last = std::min(p.last, limit - 1);
      p.first = std::max(p.first, 1 - limit);
    }
    if (c.key_span) {
      const long limit = lasting_[b * c.H + h];
      p.last = std::min(p.last, limit - 1);
      p.first = std::max(p.first, 1 - limit);
    }
    if (general) {
      p.position_lo = p.document_lo = std::numeric_limits<long>::max();
      p.position_hi = p.document_hi = std::numeric_limits<long>::min();
      for (long t = 0; t < n; t++) {
        p.position_lo = std::min(p.position_lo, q_position(b, i + t));
        p.position_hi = std::max(p.position_hi, q_position(b, i + t));
        if (!c.q_documents) continue;
        p.document_lo = std::min(p.document_lo, q_document(b, i + t));
        p.document_hi = std::max(p.document_hi, q_document(b, i + t));
      }
    }
    return p;
  }

  // The keys [ja, jb) in the panel's band.
  void hull(const Panel& p, long& ja, long& jb) const {
    if (p.last < p.first)
      ja = jb = 0;
    else if (positioned)
      ja = 0, jb = c.Tk;
    else
      ja = std::max(0L, p.at - p.last), jb = std::max(ja, std::min((long)c.Tk, p.at + p.n - p.first));
  }

  // Calls run(ja, jb, masked) for the ranges of [from, to) with keys that the panel sees; masked ranges have hidden pairs
  // that the band's table does not contain.
  template <class Run>
  void runs(const Panel& p, long from, long to, Run run) const {
    long ja, jb;
    hull(p, ja, jb);
    ja = std::max(ja, from), jb = std::min(jb, to);
    if (jb <= ja) return;
    if (!general) return run(ja, jb, false);
    int held = NOTHING;  // merge neighbouring tiles of the same kind
    long start = ja, end = ja;
    auto flush = [&]() {
      if (held != NOTHING && end > start) run(start, end, held == PARTLY);
    };
    for (long j = ja; j < jb;) {
      const long t = j / tile, next = std::min(jb, (t + 1) * tile);
      long lo = 0, hi = tile;
      const int kind = classify(p, t, lo, hi);
      const long a = std::max(j, t * tile + lo), b = std::min(next, t * tile + hi);
      if (kind != held || a != end) {
        flush();
        held = kind, start = a;
      }
      end = std::max(a, b);
      j = next;
    }
    flush();
  }

  // Calls use(ja, jb) for ranges of at most `most` keys, in ascending order, that cover all keys of [from, to) that
  // queries [i0, i1) see; with blocks, only stored ones.
  template <class Use>
  void stretches(long b, long h, long i0, long i1, long from, long to, long most, Use use) const {
    if (!sparse()) {
      for (long j = from; j < to; j += most) use(j, std::min(to, j + most));
      return;
    }
    thread_local std::vector<long> tiles_seen;
    tiles_of(b, h, i0, i1, tiles_seen);
    long start = 0, end = 0;
    auto flush = [&]() {
      for (; start < end; start += most) use(start, std::min(end, start + most));
    };
    for (const long t : tiles_seen) {
      const long a = std::max(from, t * tile), z = std::min(to, (t + 1) * tile);
      if (z <= a) continue;
      if (a != end || z - start > most) {
        flush();
        start = a;
      }
      end = z;
    }
    flush();
  }

  // Whether stored blocks determine the visible keys.
  bool sparse() const { return c.block_offsets && !positioned; }

  // The tiles of keys that queries [i0, i1) have blocks for, ascending; tiles are blocks here.
  void tiles_of(long b, long h, long i0, long i1, std::vector<long>& out) const {
    out.clear();
    const long lo = std::max(0L, floor_div(q_position(b, i0), tile));
    const long hi = std::min((long)c.block_rows - 1, floor_div(q_position(b, i1 - 1), tile));
    for (long row = lo; row <= hi; row++) {
      const int64_t* o = c.block_offsets + h * c.block_head + row;
      for (long x = o[0]; x < o[1]; x++) out.push_back(c.block_columns[x] - base[b] / tile);
    }
    if (hi > lo) {
      std::sort(out.begin(), out.end());
      out.erase(std::unique(out.begin(), out.end()), out.end());
    }
  }

  // mask[r][lane]: the term to add to the score of key ja + r. With explicit positions it includes the table.
  void fill_mask(const Panel& p, long ja, long n, float* mask) const {
    const bool by_blocks = sparse();
    if (!positioned && !by_blocks) {
      fill_ids(p, ja, n, mask);
      return;
    }
    for (long r = 0; r < n && (!by_blocks || c.q_documents); r++)
      for (long t = 0; t < PANEL; t++) {
        const long i = p.i + std::min(t, p.n - 1), j = ja + r;
        float value = 0.f;
        if (positioned) {
          const long d = pair_distance(p.b, i, j);
          value = heads[p.h].at(head_key(d));
          if (c.dynamic) {
            const double m = ramp_at(p.z[t], c.ramp, length(d));
            value += m >= 1 ? 0.f : m > 0 ? (float)std::log2(m) : HIDDEN;
          }
          if (const float* e = key_span(p.b, p.h)) {
            const double m = ramp_at(e[j], c.ramp, length(d));
            value += m >= 1 ? 0.f : m > 0 ? (float)std::log2(m) : HIDDEN;
          }
        }
        if (c.q_documents && q_document(p.b, i) != k_document(p.b, j)) value = HIDDEN;
        if (c.q_orders && in_other_order(p.b, p.h, i, j)) value = HIDDEN;
        if (c.block_offsets && positioned && !in_blocks(p.h, q_position(p.b, i), k_position(p.b, j))) value = HIDDEN;
        mask[r * PANEL + t] = value;
      }
    if (!by_blocks) return;
    if (!c.q_documents) std::memset(mask, 0, sizeof(float) * n * PANEL);
    for (long j = ja; j < ja + n;) {
      const long next = std::min(ja + n, (j / tile + 1) * tile), column = base[p.b] / tile + j / tile;
      for (long t = 0; t < p.n;) {  // the lanes of one block row
        const long row = floor_div(p.position_lo + t, tile), end = std::min(p.n, (row + 1) * tile - p.position_lo);
        const long id = block_id(p.h, row, column);
        for (long x = j; x < next && id != -1; x++) {
          const uint8_t* seen =
              id < 0 ? nullptr : &by_key_[(size_t)((id * tile + x % tile) * tile + (p.position_lo + t) % tile)];
          float* to = mask + (x - ja) * PANEL;
          for (long l = t; l < end; l++)
            if (!seen || !seen[l - t]) to[l] = HIDDEN;
        }
        t = end;
      }
      j = next;
    }
  }

  // The mask if only documents and other orders hide pairs, lane by lane, so that compilers vectorise it.
  void fill_ids(const Panel& p, long ja, long n, float* mask) const {
    int64_t lane[PANEL];
    std::memset(mask, 0, sizeof(float) * n * PANEL);
    if (c.q_documents) {
      const int64_t* keys = c.k_documents + p.b * c.k_documents_batch + ja;
      for (long t = 0; t < PANEL; t++) lane[t] = q_document(p.b, p.i + std::min(t, p.n - 1));
      for (long r = 0; r < n; r++)
        for (long t = 0; t < PANEL; t++) mask[r * PANEL + t] = lane[t] == keys[r] ? 0.f : HIDDEN;
    }
    if (!c.q_orders) return;
    uint64_t limit[PANEL];
    for (long t = 0; t < PANEL; t++)
      limit[t] = (uint64_t)seen_distances(p.b, p.h, p.i + std::min(t, p.n - 1));
    for (long e = 0; e < c.orders; e++) {
      const int64_t* keys = c.k_orders + e * c.k_orders_order + p.b * c.k_orders_batch + ja;
      for (long t = 0; t < PANEL; t++) lane[t] = q_order(e, p.b, p.i + std::min(t, p.n - 1)) - c.shift;
      for (long r = 0; r < n; r++)
        for (long t = 0; t < PANEL; t++)
          mask[r * PANEL + t] = (uint64_t)(lane[t] - keys[r]) < limit[t] ? HIDDEN : mask[r * PANEL + t];
    }
  }

  bool in_blocks(long h, long qp, long kp) const {
    if (qp < 0 || kp < 0) return false;  // torch.compile does not check positions
    const long id = block_id(h, qp / c.block_size, kp / c.block_size);
    return id == -1 ||
           (id >= 0 && c.block_masks[(id * c.block_size + qp % c.block_size) * c.block_size + kp % c.block_size]);
  }

 private:
  enum { NOTHING, WHOLLY, PARTLY };
  struct Range {
    long lo, hi;
  };
  std::vector<Range> positions_, documents_;  // by batch row and tile of keys
  std::vector<long> longest_;                 // by batch row and head
  std::vector<long> lasting_;                 // the same for the spans of keys
  struct Interval {
    double from, until;  // a query outside this range sees none of the tile's keys
  };
  std::vector<Interval> tile_spans_;  // by batch row, head and tile of keys
  std::vector<uint8_t> by_key_;               // the blocks' masks with keys first, [M, key, query]
  struct Line {
    int32_t lo, hi, count;  // the `count` visible keys are within [lo, hi)
  };
  std::vector<Line> lines_;  // by mask and query

  bool affine(long b) {
    const long q0 = c.Tq ? q_position(b, 0) : 0, k0 = c.Tk ? k_position(b, 0) : 0;
    offset.push_back(q0 - k0 - c.shift), base.push_back(k0);
    if (!c.q_positions) return true;
    for (long i = 0; i < c.Tq; i++)
      if (q_position(b, i) != q0 + i) return false;
    for (long j = 0; j < c.Tk; j++)
      if (k_position(b, j) != k0 + j) return false;
    if (c.block_offsets && k0 % c.block_size) return false;  // tiles of keys must be blocks
    return true;
  }

  void make_tiles() {
    tiles = (c.Tk + tile - 1) / tile;
    auto ranges = [&](std::vector<Range>& out, auto value) {
      out.resize((size_t)(c.B * tiles));
      for (long b = 0; b < c.B; b++)
        for (long t = 0; t < tiles; t++) {
          Range r{std::numeric_limits<long>::max(), std::numeric_limits<long>::min()};
          for (long j = t * tile; j < std::min((long)c.Tk, (t + 1) * tile); j++)
            r.lo = std::min(r.lo, value(b, j)), r.hi = std::max(r.hi, value(b, j));
          out[b * tiles + t] = r;
        }
    };
    if (positioned) ranges(positions_, [&](long b, long j) { return k_position(b, j); });
    if (c.q_documents) ranges(documents_, [&](long b, long j) { return k_document(b, j); });
    if (c.key_span) make_tile_key_spans();
  }

  void make_key_spans() {
    lasting_.assign((size_t)(c.B * c.H), 0);
    for (long row = 0; row < c.B * c.H; row++) {
      const float* e = key_span(row / c.H, row % c.H);
      float most = 0;
      for (long j = 0; j < c.Tk; j++) most = std::max(most, e[j]);
      if (c.Tk) lasting_[row] = reach_of_span(most, c.ramp);
    }
  }

  // Call this after the tiles are set.
  void make_tile_key_spans() {
    tile_spans_.resize((size_t)(c.B * c.H * tiles));
    for (long row = 0; row < c.B * c.H; row++) {
      const float* e = key_span(row / c.H, row % c.H);
      for (long t = 0; t < tiles; t++) {
        Interval interval{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
        for (long j = t * tile; j < std::min((long)c.Tk, (t + 1) * tile); j++) {
          const double at = positioned ? k_position(row / c.H, j) : j, lasts = reach_of_span(e[j], c.ramp);
          interval.from = std::min(interval.from, at - lasts), interval.until = std::max(interval.until, at + lasts);
        }
        tile_spans_[row * tiles + t] = interval;
      }
    }
  }

  bool expired(const Panel& p, long t) const {
    const Interval& interval = tile_spans_[(p.b * c.H + p.h) * tiles + t];
    const long first = positioned ? p.position_lo - c.shift : p.at;
    const long last = positioned ? p.position_hi - c.shift : p.at + p.n - 1;
    return !(first < interval.until && last > interval.from);
  }

  void make_masks() {
    long masks = 0;
    const long heads = c.block_head ? c.H : 1;
    for (long h = 0; h < heads; h++)
      for (long x = c.block_offsets[h * c.block_head]; x < c.block_offsets[h * c.block_head + c.block_rows]; x++)
        masks = std::max(masks, (long)c.block_mask_ids[x] + 1);
    by_key_.resize((size_t)(masks * tile * tile)), lines_.resize((size_t)(masks * tile));
    for (long m = 0; m < masks; m++)
      for (long q = 0; q < tile; q++) {
        const uint8_t* from = c.block_masks + (m * tile + q) * tile;
        Line& line = lines_[m * tile + q];
        line = {(int32_t)tile, 0, 0};
        for (long k = 0; k < tile; k++) {
          by_key_[(size_t)((m * tile + k) * tile + q)] = from[k];
          if (from[k]) line.lo = std::min(line.lo, (int32_t)k), line.hi = (int32_t)k + 1, line.count++;
        }
      }
  }

  // Whether the panel sees all, some or none of tile t, and the range [lo, hi) of its visible keys.
  int classify(const Panel& p, long t, long& lo, long& hi) const {
    int kind = WHOLLY;
    if (c.key_span && expired(p, t)) return NOTHING;
    if (positioned) {  // distances are never all plain here: the mask includes the table
      const Range& r = positions_[p.b * tiles + t];
      const long far = p.position_hi - r.lo - c.shift, near = p.position_lo - r.hi - c.shift;
      if (near > p.last || (c.causal ? far < 0 : folded ? -far > p.last : far < p.first)) return NOTHING;
      kind = PARTLY;
    }
    if (c.q_documents) {
      const Range& r = documents_[p.b * tiles + t];
      if (r.lo > p.document_hi || r.hi < p.document_lo) return NOTHING;
      if (r.lo != r.hi || p.document_lo != p.document_hi) {
        kind = PARTLY;
        // with sorted ids, such as buckets, part of the tile remains
        const long first = t * tile, end = std::min((long)c.Tk, first + tile);
        auto outside = [&](long j) { return k_document(p.b, j) < p.document_lo || k_document(p.b, j) > p.document_hi; };
        hi = end - first;
        while (lo < hi && outside(first + lo)) lo++;
        while (hi > lo && outside(first + hi - 1)) hi--;
        if (hi <= lo) return NOTHING;
      }
    }
    if (c.q_orders) kind = PARTLY;
    if (sparse()) {
      const long column = base[p.b] / tile + t;
      bool even = true;  // every lane sees the same range of keys
      lo = tile, hi = 0;
      for (long at = p.position_lo; at <= p.position_hi;) {
        const long row = floor_div(at, tile), end = std::min(p.position_hi + 1, (row + 1) * tile);
        const long id = block_id(p.h, row, column);
        const int32_t whole = id == -1 ? (int32_t)tile : 0;
        for (long x = at; x < end; x++) {
          const Line line = id >= 0 ? lines_[id * tile + x % tile] : Line{0, whole, whole};
          if (x > p.position_lo) even = even && line.lo == lo && line.hi == hi;
          even = even && line.count == line.hi - line.lo;
          if (line.count) lo = std::min(lo, (long)line.lo), hi = std::max(hi, (long)line.hi);
          if (id < 0) break;  // the other lanes are equal
        }
        at = end;
      }
      if (hi <= lo) return NOTHING;
      if (!even) kind = PARTLY;
    }
    return kind;
  }

  static constexpr long ABSENT = -2;
  long block_id(long h, long row, long column) const {  // −1: full, ≥ 0: a mask, ABSENT: not seen
    if (row < 0 || row >= c.block_rows) return ABSENT;
    const int64_t* o = c.block_offsets + h * c.block_head + row;
    const int64_t *a = c.block_columns + o[0], *z = c.block_columns + o[1], *f = std::lower_bound(a, z, column);
    return f == z || *f != column ? ABSENT : c.block_mask_ids[f - c.block_columns];
  }
};

// Dropout by counters: the same bits as ops/dropout.py.
class Dropper {
 public:
  Dropper(const Call& c, long b, long h) : on_(c.seed != nullptr && c.dropout > 0) {
    if (!on_) return;
    const uint64_t seed = (uint64_t)*c.seed;
    const uint32_t head = (uint32_t)(c.drop_heads ? c.drop_heads[b * c.H + h] : b * c.H + h);
    base_ = mix((uint32_t)seed ^ mix((uint32_t)(seed >> 32) ^ mix(head)));
    if (c.drop_queries) queries_ = c.drop_queries + b * c.drop_queries_batch, last_ = c.Tq - 1;
    if (c.drop_keys) keys_ = c.drop_keys + b * c.drop_keys_batch;
    threshold_ = (int32_t)std::nearbyint(c.dropout * (1 << 24));
    keep_ = (float)(1.0 / (1.0 - c.dropout));
  }
  bool on() const { return on_; }
  uint32_t of_query(long i) const {  // i: of any lane, even one without a query
    return mix(base_ + (uint32_t)(queries_ ? queries_[std::min(i, last_)] : i));
  }
  uint32_t of_key(long j) const { return mix((base_ ^ 0x9E3779B9u) + (uint32_t)(keys_ ? keys_[j] : j)); }
  float factor(uint32_t query, uint32_t key) const { return (int32_t)(mix(query ^ key) >> 8) >= threshold_ ? keep_ : 0.f; }
  vf factors(vu query, uint32_t key) const {
    const vi draw = (vi)(vmix(query ^ key) >> 8);
    return draw >= threshold_ ? set1(keep_) : vf{};
  }

 private:
  bool on_;
  uint32_t base_ = 0;
  int32_t threshold_ = 0;
  float keep_ = 1.f;
  const int64_t *queries_ = nullptr, *keys_ = nullptr;  // dropout counters, if they are not the indices
  long last_ = 0;
};

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
