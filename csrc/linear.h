// Linear attention by chunks of tokens: what its forward and backward passes share.
//   P_ij = (a_i·b_j) e^(G_i − G_j) w_ij        out_i = Σ_j P_ij v_j (/ Σ_j P_ij)        G: running sum of the decay
// Keys in chunks before `first` of a query's chunk come as one state S = Σ_j b_j v_jᵀ; the others are computed pair by
// pair. Without `near` a chunk has pairs with itself alone. A run is a document, counted from the call's first token.
#pragma once
#include <vector>

#include "exact.h"
#include "gemm.h"
#include "pack.h"
#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {

constexpr long CHUNK = 32;  // S of 64 × 64 floats is half of a first-level cache; a longer chunk has more pairs

// One key/value head of one text, and where its chunks begin and end.
struct LinearItem {
  const Linear& c;
  long b, g, shared, skipped, shift, chunks, queries, m_padded, v_padded;
  // skipped: tokens without a query, the first ones. Chunks are laid out so that queries begin with one, so the first
  // chunk may lack `shift` tokens; `queries` is the first chunk that has queries.
  const float *decay, *near;   // of this text and head, or null
  std::vector<long> run;       // [T] or empty
  std::vector<double> sums;    // [T] running sum of the decay from the chunk's first token on, or empty
  std::vector<long> first;     // [chunks] the first key chunk with pairs

  LinearItem(const Linear& call, long item) : c(call), b(item / call.Hkv), g(item % call.Hkv) {
    shared = c.H / c.Hkv;
    skipped = c.T - c.Tq;
    shift = (CHUNK - skipped % CHUNK) % CHUNK;
    queries = (skipped + shift) / CHUNK;
    chunks = (c.T + shift + CHUNK - 1) / CHUNK;
    m_padded = round_up(c.M, PANEL);
    v_padded = round_up(c.Dv, PANEL);
    decay = c.decay ? c.decay + b * c.decay_batch + g * c.decay_head : nullptr;
    near = c.near ? c.near + b * c.near_batch : nullptr;
    if (c.starts) {
      run.resize(c.T);
      for (long t = 0, r = 0; t < c.T; t++) run[t] = r += c.starts[b * c.T + t];
    }
    if (decay) {
      sums.resize(c.T);  // double: only differences are small
      for (long t = 0; t < c.T; t++) sums[t] = (t && (t + shift) % CHUNK ? sums[t - 1] : 0.0) + (double)decay[t * c.decay_row];
    }
    first.resize(chunks);
    for (long n = chunks - 1; n >= 0; n--) {
      first[n] = n;
      for (long h = 0; near && n >= queries && h < shared; h++) {
        const double far = std::ceil((edge(h, n, true) + c.ramp + CHUNK - 1) / CHUNK);
        first[n] = std::min(first[n], far > (double)n ? 0 : std::min(n, n - (long)far + 1));
      }
      if (n + 1 < chunks) first[n] = std::min(first[n], first[n + 1]);
    }
  }
  long head(long h) const { return g * shared + h; }
  long from(long n) const { return std::max(0L, n * CHUNK - shift); }
  long tokens(long n) const { return std::min(c.T, (n + 1) * CHUNK - shift) - from(n); }
  long run_of(long t) const { return run.empty() ? 0 : run[t]; }
  long last_run(long n) const { return n < 0 ? 0 : run_of(from(n) + tokens(n) - 1); }
  float span(long h, long t) const { return near[head(h) * c.near_head + (t - skipped) * c.near_row]; }
  double edge(long h, long n, bool largest) const {  // the largest or smallest span of a chunk's queries; NaN counts as 0
    double found = largest ? -1e30 : 1e30;
    for (long t = from(n); t < from(n) + tokens(n); t++) {
      const double z = span(h, t) == span(h, t) ? (double)span(h, t) : 0.0;
      found = largest ? std::max(found, z) : std::min(found, z);
    }
    return std::min(std::max(found, -c.ramp), 1e15);
  }
  // The last key chunk in which some key of queries in chunk n has weight.
  long last(long h, long n) const {
    if (!near) return n;
    const double skipped = std::floor((edge(h, n, false) - CHUNK + 1) / CHUNK) + 1;
    return skipped > (double)n ? -1 : n - std::max(0L, (long)skipped);
  }
  // W[i][j], the weight of the pair's product, for queries of chunk n and keys of chunk k; 0 for keys beyond the text.
  void weights(long h, long n, long k, float* w) const {
    const long begin = from(n), keys = from(k), nk = tokens(k);
    for (long i = 0; i < tokens(n); i++) {
      float* row = w + i * CHUNK;
      for (long j = 0; j < CHUNK; j++) row[j] = j < nk && keys + j <= begin + i ? 1.f : 0.f;
      if (!sums.empty()) {
        for (long j = 0; j < CHUNK; j++)
          row[j] = row[j] != 0.f ? (float)((sums[begin + i] - sums[keys + j]) * (double)LOG2E) : -200.f;
        for (long j = 0; j < CHUNK; j += W) store(row + j, vexp2(load(row + j)));
        if (sums[begin + i] != sums[begin + i])
          for (long j = 0; j <= i && j < nk; j++) row[j] = NAN;  // vexp2 has no NaN
      }
      if (near) {
        const float z = span(h, begin + i), per = (float)(1.0 / c.ramp);
        for (long j = 0; j < CHUNK; j++)
          row[j] *= std::min(1.f, std::max(0.f, ((float)(begin + i - keys - j) - z) * per));
      }
      if (!run.empty())
        for (long j = 0; j < nk; j++)
          if (run[keys + j] != run[begin + i]) row[j] = 0.f;
    }
  }
  // Where the numbers of a query are in tensors [B, H, Tq].
  long query(long h, long t) const { return (b * c.H + head(h)) * c.Tq + t - skipped; }
  bool triangle(long n, long k) const { return n == k && sums.empty() && !near && run.empty(); }
  // e^(G_i): what is left of the state at row i, 0 where the state is of another document.
  float left(long t, long state_run) const {
    if (run_of(t) != state_run) return 0.f;
    return sums.empty() ? 1.f : (float)std::exp(sums[t]);
  }
  // e^(G_end − G_j): what is left of token t at its chunk's end.
  float joins(long t, long n, long of_run) const {
    if (run_of(t) != of_run) return 0.f;
    return sums.empty() ? 1.f : (float)std::exp(sums[from(n) + tokens(n) - 1] - sums[t]);
  }
  float kept(long n) const { return sums.empty() ? 1.f : (float)std::exp(sums[from(n) + tokens(n) - 1]); }
};

// Rows of a tensor from token t on, `padded` wide.
template <class T>
static inline View rows_at(const Rows& r, long b, long h, long t, long n, long size, long padded, float* scratch) {
  return as_float(row_of<const T>(r, b, h, t), r.row, n, size, padded, scratch);
}

// Features of tokens from t on: rows of a or b, or elu + 1 of them (e^x for x ≤ 0, x + 1 above; NaN stays NaN).
template <class T>
static inline View features_at(const Linear& c, const Rows& r, long b, long h, long t, long n, long padded, float* scratch) {
  if (!c.elu) return rows_at<T>(r, b, h, t, n, c.M, padded, scratch);
  const long wide = round_up(c.M, PANEL);
  for (long i = 0; i < n; i++) {
    const T* from = row_of<const T>(r, b, h, t + i);
    float* to = scratch + i * wide;
    for (long d = 0; d < c.M; d++) to[d] = to_float(from[d]);
    for (long d = c.M; d < wide; d++) to[d] = 0.f;
    for (long d = 0; d < wide; d += W) {
      const vf x = load(to + d), low = x < vf{} ? x : vf{}, y = (x > vf{} ? x : vf{}) + vexp2(low * set1(LOG2E));
      store(to + d, x == x ? y : x);
    }
    for (long d = c.M; d < wide; d++) to[d] = 0.f;
  }
  return {scratch, wide};
}

// A gradient of features as one of a or b: the slope of elu + 1 is its value up to 1, and 1 above.
static inline void through_features(const Linear& c, const float* features, float* gradient) {
  if (!c.elu) return;
  for (long d = 0; d < c.M; d++) gradient[d] *= std::min(features[d], 1.f);
}

// X[size][CHUNK] in panels of PANEL tokens, from rows.
static inline void pack_rows(View rows, long n, long size, float* X) {
  for (long p = 0; p < CHUNK; p += PANEL)
    pack_panel(rows.data + std::min(p, n) * rows.ld, rows.ld, std::max(0L, std::min((long)PANEL, n - p)), size, 1.f,
               X + p * size);
}

// C[i][j] = A_i·X_j for the rows of A and the CHUNK tokens of X; of a triangle only j ≤ i is needed.
static inline void multiply_tokens(long n, long size, View A, const float* X, bool triangle, float* C) {
  for (long p = 0; p < CHUNK; p += PANEL) {
    const long skip = triangle ? std::min(p, n) : 0;
    for (long i = 0; i < skip; i++) std::memset(C + i * CHUNK + p, 0, sizeof(float) * PANEL);
    product<BY_ROW, false>(n - skip, size, A.data + skip * A.ld, A.ld, X + p * size, PANEL, C + skip * CHUNK + p, CHUNK);
  }
}

// C (+)= A·B for C [n][width], panel after panel.
template <Layout LAYOUT, bool ADD>
static inline void multiply(long n, long K, const float* A, long lda, const float* B, long ldb, float* C, long ldc,
                            long width) {
  for (long p = 0; p < width; p += PANEL) product<LAYOUT, ADD>(n, K, A, lda, B + p, ldb, C + p, ldc);
}

// C += P·B for P [n][CHUNK]; of a triangle the upper half of the keys joins the lower rows only.
static inline void add_pairs(long n, long keys, const float* P, bool triangle, const float* B, long ldb, float* C,
                             long ldc, long width) {
  const long half = triangle ? std::min(n, CHUNK / 2) : 0;
  if (half) multiply<BY_ROW, true>(half, std::min(keys, half), P, CHUNK, B, ldb, C, ldc, width);
  multiply<BY_ROW, true>(n - half, keys, P + half * CHUNK, CHUNK, B, ldb, C + half * ldc, ldc, width);
}

// C += Pᵀ·B: the same for keys.
static inline void add_pairs_of_keys(long n, long keys, const float* P, bool triangle, const float* B, long ldb, float* C,
                                     long ldc, long width) {
  const long half = triangle ? std::min(keys, CHUNK / 2) : keys;
  multiply<BY_COLUMN, true>(half, n, P, CHUNK, B, ldb, C, ldc, width);
  if (keys > half)
    multiply<BY_COLUMN, true>(keys - half, n - half, P + half * CHUNK + half, CHUNK, B + half * ldb, ldb, C + half * ldc,
                              ldc, width);
}

// P ← P ⊙ W; of a triangle W is 1 on and below the diagonal.
static inline void weigh(long n, const float* w, bool triangle, float* P) {
  for (long i = 0; i < n; i++) {
    if (triangle)
      for (long j = i + 1; j < CHUNK; j++) P[i * CHUNK + j] = 0.f;
    else
      for (long j = 0; j < CHUNK; j += W) store(P + i * CHUNK + j, load(P + i * CHUNK + j) * load(w + i * CHUNK + j));
  }
}

SPANFORMER_INLINE void scale_row(float* x, float by, long n) {
  long d = 0;
  for (; d + W <= n; d += W) store(x + d, load(x + d) * set1(by));
  for (; d < n; d++) x[d] *= by;
}
SPANFORMER_INLINE void add_row(float* x, const float* y, float by, long n) {
  long d = 0;
  for (; d + W <= n; d += W) store(x + d, load(y + d) * set1(by) + load(x + d));
  for (; d < n; d++) x[d] += y[d] * by;
}
SPANFORMER_INLINE float row_sum(const float* x, long n) {  // n a multiple of W
  vf total = vf{};
  for (long d = 0; d < n; d += W) total += load(x + d);
  return sum(total);
}
template <class T>
static inline void write_row(T* to, const float* from, long n) {
  for (long d = 0; d < n; d++) put(to + d, from[d]);
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
