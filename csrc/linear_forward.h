// Linear attention, forward: each key/value head of each text is one item, its chunks in order.
#pragma once
#include "linear.h"

namespace spanformer {
namespace SPANFORMER_ISA {

// A state's sums over a long text, with what rounding has lost of each (Kahan): what a chunk adds would otherwise be
// rounded by the size of the whole sum, thousands of times. -ffp-contract=fast does not reorder sums.
struct Sums {
  std::vector<float> lost;  // empty for a text of one chunk, such as a token that is decoded
  long size;                // a multiple of W
  Sums(long n, bool one_chunk) : lost(one_chunk ? 0 : n), size(n) {}
  void clear() { std::fill(lost.begin(), lost.end(), 0.f); }
  void scale(float by, float* x) {
    if (by == 0.f) {  // not 0 · x: a NaN of another document ends with it
      std::memset(x, 0, sizeof(float) * size);
      return clear();
    }
    float* __restrict l = lost.data();
    for (long n = 0; n < size; n += W) {
      const vf old = load(x + n), now = old * set1(by);
      if (!lost.empty()) store(l + n, load(l + n) * set1(by) + (old * set1(by) - now));
      store(x + n, now);
    }
  }
  void add(const float* __restrict more, float* __restrict x) {
    float* __restrict l = lost.data();
    if (lost.empty())
      for (long n = 0; n < size; n += W) store(x + n, load(x + n) + load(more + n));
    else
      for (long n = 0; n < size; n += W) {
        const vf old = load(x + n), y = load(more + n) + load(l + n), now = old + y;
        store(l + n, y - (now - old));
        store(x + n, now);
      }
  }
};

struct LinearScratch {
  float *S, *Z, *A, *B, *V, *BT, *P, *weights, *N, *joined, *added, *added_z;
  explicit LinearScratch(const Linear& c) {
    const size_t m = round_up(c.M, PANEL), v = round_up(c.Dv, PANEL), n = CHUNK;
    const size_t sizes[] = {m * v, m, n * m, n * m, n * v, m * n, n * n, n * n, n * v, n * v, m * v, m};
    float** parts[] = {&S, &Z, &A, &B, &V, &BT, &P, &weights, &N, &joined, &added, &added_z};
    size_t all = 0;
    for (size_t x : sizes) all += Arena::rounded(x);
    arena().reserve(all);
    for (int t = 0; t < 12; t++) *parts[t] = arena().take(sizes[t]);
    std::memset(added, 0, sizeof(float) * m * v);  // products write M rows alone
  }
};

static inline void read_state(const float* s, const float* z, long m, long dv, long v_padded, float* S, float* Z) {
  std::memset(S, 0, sizeof(float) * round_up(m, PANEL) * v_padded);
  std::memset(Z, 0, sizeof(float) * round_up(m, PANEL));
  if (!s) return;
  for (long r = 0; r < m; r++) std::memcpy(S + r * v_padded, s + r * dv, sizeof(float) * dv);
  std::memcpy(Z, z, sizeof(float) * m);
}

// S ← kept·S + Σ_j joins_j b_j v_jᵀ over the tokens of chunk n.
template <class T>
static void absorb_keys(const LinearItem& it, long n, long& state_run, Sums& s, Sums& z, const LinearScratch& w) {
  const Linear& c = it.c;
  const long from = it.from(n), nk = it.tokens(n), newest = it.last_run(n);
  const View B = features_at<T>(c, c.b, it.b, it.g, from, nk, c.M, w.B);
  View V = rows_at<T>(c.v, it.b, it.g, from, nk, c.Dv, it.v_padded, w.V);
  const float kept = state_run == newest ? it.kept(n) : 0.f;
  if (kept != 1.f) {
    s.scale(kept, w.S);
    z.scale(kept, w.Z);
  }
  std::memset(w.added_z, 0, sizeof(float) * it.m_padded);
  for (long j = 0; j < nk; j++) {
    const float by = it.joins(from + j, n, newest);
    if (by != 0.f) add_row(w.added_z, B.data + j * B.ld, by, c.M);
  }
  if (!it.sums.empty() || !it.run.empty()) {
    for (long j = 0; j < nk; j++) {
      const float by = it.joins(from + j, n, newest);
      for (long d = 0; d < it.v_padded; d++) w.joined[j * it.v_padded + d] = by == 0.f ? 0.f : by * V.data[j * V.ld + d];
    }
    V = {w.joined, it.v_padded};
  }
  multiply<BY_COLUMN, false>(c.M, nk, B.data, B.ld, V.data, V.ld, w.added, it.v_padded, it.v_padded);
  s.add(w.added, w.S);
  z.add(w.added_z, w.Z);
  state_run = newest;
}

// A copy of a chunk's rows with 0 in the place of those that are not finite, which `bad` marks: 0 · NaN would reach
// earlier rows.
static inline View finite_rows(View rows, long n, long size, long padded, float* scratch, bool* bad) {
  for (long j = 0; j < n; j++) {
    const float* from = rows.data + j * rows.ld;
    const bool good = all_finite(from, rows.ld, 1, size);
    bad[j] |= !good;
    for (long d = 0; d < padded; d++) scratch[j * padded + d] = good && d < size ? from[d] : 0.f;
  }
  return {scratch, padded};
}

// Rows that see a key which is not finite become NaN.
static void spoil_rows(const LinearItem& it, long h, long n, long k, const bool* bad, const LinearScratch& w, float* den) {
  it.weights(h, n, k, w.weights);
  for (long i = 0; i < it.tokens(n); i++)
    for (long j = 0; j < it.tokens(k); j++)
      if (bad[j] && w.weights[i * CHUNK + j] != 0.f) {
        den[i] = NAN;
        for (long d = 0; d < it.c.Dv; d++) w.N[i * it.v_padded + d] = NAN;
      }
}

// Divides a query's numerator N and writes it, and what it is divided by.
template <class T>
static void give_row(const Linear& c, long b, long head, long query, float den, float* N, long padded, T* out) {
  if (c.normalize == kRms)
    den = std::sqrt(dot(N, N, padded) / (float)c.Dv + (float)c.eps);
  else if (c.eps > 0 && den < (float)c.eps)
    den = c.normalize == kClamped ? (float)c.eps : 0.f;
  if (c.normalize) scale_row(N, den == 0.f ? 0.f : 1.f / den, padded);
  write_row(out, N, c.Dv);
  c.den[(b * c.H + head) * c.Tq + query] = den;
}

template <class T>
static void linear_forward_chunk(const LinearItem& it, long h, long n, long state_run, const LinearScratch& w) {
  const Linear& c = it.c;
  const long from = it.from(n), ni = it.tokens(n), head = it.head(h), vp = it.v_padded;
  const View A = features_at<T>(c, c.a, it.b, head, from - it.skipped, ni, c.M, w.A);
  float den[CHUNK];
  multiply<BY_ROW, false>(ni, c.M, A.data, A.ld, w.S, vp, w.N, vp, vp);
  for (long i = 0; i < ni; i++) {
    const float by = it.left(from + i, state_run);
    den[i] = by == 0.f ? 0.f : by * dot(A.data + i * A.ld, w.Z, c.M);
    if (by == 0.f)
      std::memset(w.N + i * vp, 0, sizeof(float) * vp);
    else if (by != 1.f)
      scale_row(w.N + i * vp, by, vp);
  }
  for (long k = it.first[n]; k <= it.last(h, n); k++) {
    const long nk = it.tokens(k);
    View B = features_at<T>(c, c.b, it.b, it.g, it.from(k), nk, c.M, w.B);
    View V = rows_at<T>(c.v, it.b, it.g, it.from(k), nk, c.Dv, vp, w.V);
    const bool triangle = it.triangle(n, k), finite = all_finite(B.data, B.ld, nk, c.M) && all_finite(V.data, V.ld, nk, c.Dv);
    bool bad[CHUNK] = {};
    if (!finite) {
      B = finite_rows(B, nk, c.M, c.M, w.B, bad);
      V = finite_rows(V, nk, c.Dv, vp, w.V, bad);
    }
    pack_rows(B, nk, c.M, w.BT);
    multiply_tokens(ni, c.M, A, w.BT, triangle, w.P);
    if (!triangle) it.weights(h, n, k, w.weights);
    weigh(ni, w.weights, triangle, w.P);
    for (long i = 0; i < ni; i++) den[i] += row_sum(w.P + i * CHUNK, CHUNK);
    add_pairs(ni, nk, w.P, triangle, V.data, V.ld, w.N, vp, vp);
    if (!finite) spoil_rows(it, h, n, k, bad, w, den);
  }
  for (long i = 0; i < ni; i++)
    give_row(c, it.b, head, from - it.skipped + i, den[i], w.N + i * vp, vp, row_of<T>(c.out, it.b, head, from - it.skipped + i));
}

// One token: the recurrence itself, in one pass over the state.
template <class T>
static void linear_step(const Linear& c, long index) {
  const long b = index / c.Hkv, g = index % c.Hkv, shared = c.H / c.Hkv, at = index * c.M;
  const long mp = round_up(c.M, PANEL), vp = round_up(c.Dv, PANEL);
  arena().reserve((1 + shared) * (mp + vp) + 2 * PANEL);
  float *spare = arena().take((1 + shared) * mp), *more = arena().take(vp), *N = arena().take(shared * vp);
  const View B = features_at<T>(c, c.b, b, g, 0, 1, c.M, spare);
  const View V = rows_at<T>(c.v, b, g, 0, 1, c.Dv, c.Dv, more);
  const float kept = c.decay ? std::exp(c.decay[b * c.decay_batch + g * c.decay_head]) : 1.f;
  const bool empty = !c.s0 || kept == 0.f;  // not 0 · x: a state may hold NaN
  for (long r = 0; r < c.M; r++) {
    const float* from = c.s0 + (at + r) * c.Dv;
    float *to = c.s1 + (at + r) * c.Dv, x = B.data[r];
    if (empty)
      for (long d = 0; d < c.Dv; d++) to[d] = x * V.data[d];
    else
      for (long d = 0; d < c.Dv; d++) to[d] = kept * from[d] + x * V.data[d];
    c.z1[at + r] = empty ? x : kept * c.z0[at + r] + x;
  }
  std::memset(N, 0, sizeof(float) * shared * vp);
  for (long h = 0; h < shared; h++) {
    const View A = features_at<T>(c, c.a, b, g * shared + h, 0, 1, c.M, spare + (1 + h) * mp);
    for (long r = 0; r < c.M; r++) {
      const float *s = c.s1 + (at + r) * c.Dv, x = A.data[r];
      for (long d = 0; d < c.Dv; d++) N[h * vp + d] += x * s[d];
    }
    const float den = dot(A.data, c.z1 + at, c.M);
    give_row(c, b, g * shared + h, 0, den, N + h * vp, vp, row_of<T>(c.out, b, g * shared + h, 0));
  }
}

template <class T>
static void linear_forward_item(const Linear& c, long index) {
  if (c.T == 1 && !c.near) return linear_step<T>(c, index);
  const LinearItem it(c, index);
  const LinearScratch w(c);
  const long at = index * c.M;
  read_state(c.s0 ? c.s0 + at * c.Dv : nullptr, c.z0 ? c.z0 + at : nullptr, c.M, c.Dv, it.v_padded, w.S, w.Z);
  Sums s(it.m_padded * it.v_padded, it.chunks == 1), z(it.m_padded, it.chunks == 1);
  long state_run = 0, absorbed = 0;
  for (long n = it.queries; n < it.chunks; n++) {
    for (; absorbed < it.first[n]; absorbed++) absorb_keys<T>(it, absorbed, state_run, s, z, w);
    for (long h = 0; h < it.shared; h++) linear_forward_chunk<T>(it, h, n, state_run, w);
  }
  if (!c.s1) return;
  for (; absorbed < it.chunks; absorbed++) absorb_keys<T>(it, absorbed, state_run, s, z, w);
  for (long r = 0; r < c.M; r++) std::memcpy(c.s1 + (at + r) * c.Dv, w.S + r * it.v_padded, sizeof(float) * c.Dv);
  std::memcpy(c.z1 + at, w.Z, sizeof(float) * c.M);
}

template <class T>
static void linear_forward_all(const Linear& c) {
  prefer_large_pages(c.out, c.B * c.H * c.Tq * c.Dv * (long)sizeof(T));
  for_items(c.B * c.Hkv, c.threads, (double)c.B * c.H * c.T * c.M * c.Dv,
            [&](long index) { linear_forward_item<T>(c, index); });
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
