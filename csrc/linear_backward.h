// Linear attention, backward, in two sweeps over each key/value head of each text. With dN_i = g_i / den_i and
// e_i = g_den_i − g_i·out_i / den_i (without `normalize`: g_i and g_den_i; by the root mean square:
// dN_i = (g_i − out_i (g_i·out_i) / Dv) / den_i and e_i = 0), and with w_ij the weight of a pair:
//   chunks in order, the state recomputed:   da_i = Σ_j (dN_i·v_j + e_i) w_ij b_j + left_i (S dN_i + e_i z)
//   chunks in reverse, U = Σ_i left_i a_i dN_iᵀ:   db_j = Σ_i (dN_i·v_j + e_i) w_ij a_i + joins_j (U v_j + u)
//                                                  dv_j = Σ_i P_ij dN_i + joins_j Uᵀ b_j
//   dG_i = a_i·da_i − b_i·db_i, and the decay's gradient is its sum from the end.
// No state is stored for a chunk, and none is run backwards by subtraction, which cannot undo a decay.
#pragma once
#include "linear_forward.h"

namespace spanformer {
namespace SPANFORMER_ISA {

constexpr long RESTART = 8;  // chunks; the sum over dG is computed anew that often, or its rounding would pile up

struct LinearGradients {
  float *S, *ST, *Z, *A, *B, *V, *BT, *VT, *P, *dP, *weights, *dN, *dA, *dB, *dV, *joined, *added, *added_z;
  float e[CHUNK];
  Sums sums, sums_z;
  std::vector<double> dG, from_end;  // [T]; [chunks] U·S at a chunk's end, NaN where it is not computed
  std::vector<float> states;         // ST and Z at the end of every RESTART-th chunk
  explicit LinearGradients(const Linear& c)
      : sums(round_up(c.M, PANEL) * round_up(c.Dv, PANEL), false),
        sums_z(round_up(c.M, PANEL), false),
        dG(c.d_decay ? c.T : 0) {
    const size_t m = round_up(c.M, PANEL), v = round_up(c.Dv, PANEL), n = CHUNK, wide = std::max(m, v);
    const size_t sizes[] = {m * v, m * v, m,     n * m, n * m, n * v, m * n, v * n,
                            n * n, n * n, n * n, n * v, n * m, n * m, n * v, n * wide, m * v, m};
    float** parts[] = {&S, &ST, &Z, &A, &B, &V, &BT, &VT, &P, &dP, &weights, &dN, &dA, &dB, &dV, &joined, &added, &added_z};
    size_t all = 0;
    for (size_t x : sizes) all += Arena::rounded(x);
    arena().reserve(all);
    for (int t = 0; t < 18; t++) *parts[t] = arena().take(sizes[t]);
    std::memset(added, 0, sizeof(float) * m * v);  // products write rows up to M or Dv alone
  }
};

// dN and e of a chunk's rows; lanes beyond Dv are 0.
template <class T>
static void load_gradient(const LinearItem& it, long h, long n, LinearGradients& w) {
  const Linear& c = it.c;
  const long head = it.head(h), vp = it.v_padded;
  for (long i = 0; i < it.tokens(n); i++) {
    const long t = it.from(n) + i - it.skipped, at = it.query(h, it.from(n) + i);
    const T* g = row_of<const T>(c.g, it.b, head, t);
    float* to = w.dN + i * vp;
    for (long d = 0; d < c.Dv; d++) to[d] = to_float(g[d]);
    for (long d = c.Dv; d < vp; d++) to[d] = 0.f;
    w.e[i] = c.g_den ? c.g_den[at] : 0.f;
    if (!c.normalize) continue;
    const float by = c.den[at] == 0.f ? 0.f : 1.f / c.den[at];
    const T* out = row_of<const T>(c.out, it.b, head, t);
    float inner = 0.f;
    if constexpr (sizeof(T) == 4)
      inner = dot(reinterpret_cast<const float*>(g), reinterpret_cast<const float*>(out), c.Dv);
    else
      for (long d = 0; d < c.Dv; d++) inner += to[d] * to_float(out[d]);
    if (c.normalize == kRms)
      for (long d = 0; d < c.Dv; d++) to[d] -= to_float(out[d]) * (inner / (float)c.Dv);
    else
      w.e[i] = c.normalize == kClamped && c.den[at] <= (float)c.eps ? 0.f : w.e[i] - inner * by;
    scale_row(to, by, vp);
  }
}

// dP ← dN·Vᵀ + e for one block of pairs.
static inline void pair_gradient(long n, long dv, long vp, bool triangle, LinearGradients& w) {
  multiply_tokens(n, dv, View{w.dN, vp}, w.VT, triangle, w.dP);
  for (long i = 0; i < n; i++)
    for (long j = 0; j < CHUNK; j += W) store(w.dP + i * CHUNK + j, load(w.dP + i * CHUNK + j) + set1(w.e[i]));
}

// ST ← kept·ST + Σ_j joins_j v_j b_jᵀ: the state, transposed.
static void absorb_transposed(const LinearItem& it, long n, View B, View V, long& state_run, LinearGradients& w) {
  const long from = it.from(n), nk = it.tokens(n), newest = it.last_run(n), mp = it.m_padded;
  const float kept = state_run == newest ? it.kept(n) : 0.f;
  if (kept != 1.f) {
    w.sums.scale(kept, w.ST);
    w.sums_z.scale(kept, w.Z);
  }
  std::memset(w.added_z, 0, sizeof(float) * mp);
  for (long j = 0; j < nk; j++) {
    const float by = it.joins(from + j, n, newest);
    if (!it.sums.empty() || !it.run.empty()) {
      std::memcpy(w.joined + j * mp, B.data + j * B.ld, sizeof(float) * mp);
      scale_row(w.joined + j * mp, by, mp);
    }
    add_row(w.added_z, B.data + j * B.ld, by, mp);
  }
  if (!it.sums.empty() || !it.run.empty()) B = {w.joined, mp};
  multiply<BY_COLUMN, false>(it.c.Dv, nk, V.data, V.ld, B.data, B.ld, w.added, mp, mp);
  w.sums.add(w.added, w.ST);
  w.sums_z.add(w.added_z, w.Z);
  state_run = newest;
  if (it.c.d_decay && n % RESTART == RESTART - 1) {
    w.states.insert(w.states.end(), w.ST, w.ST + it.v_padded * mp);
    w.states.insert(w.states.end(), w.Z, w.Z + mp);
  }
}

template <class T>
static void query_gradients(const LinearItem& it, long h, long n, long state_run, LinearGradients& w) {
  const Linear& c = it.c;
  const long from = it.from(n), ni = it.tokens(n), head = it.head(h), mp = it.m_padded, vp = it.v_padded;
  load_gradient<T>(it, h, n, w);
  multiply<BY_ROW, false>(ni, c.Dv, w.dN, vp, w.ST, mp, w.dA, mp, mp);
  for (long i = 0; i < ni; i++) {
    const float by = it.left(from + i, state_run);
    add_row(w.dA + i * mp, w.Z, w.e[i], mp);
    if (by != 1.f) scale_row(w.dA + i * mp, by, mp);
  }
  for (long k = it.first[n]; k <= it.last(h, n); k++) {
    const long nk = it.tokens(k);
    const bool triangle = it.triangle(n, k);
    const View B = features_at<T>(c, c.b, it.b, it.g, it.from(k), nk, mp, w.B);
    const View V = rows_at<T>(c.v, it.b, it.g, it.from(k), nk, c.Dv, c.Dv, w.V);
    pack_rows(V, nk, c.Dv, w.VT);
    pair_gradient(ni, c.Dv, vp, triangle, w);
    if (!triangle) it.weights(h, n, k, w.weights);
    weigh(ni, w.weights, triangle, w.dP);
    add_pairs(ni, nk, w.dP, triangle, B.data, B.ld, w.dA, mp, mp);
  }
  const View A = features_at<T>(c, c.a, it.b, head, from - it.skipped, ni, c.M, w.A);
  for (long i = 0; i < ni; i++) {
    if (c.d_decay) w.dG[from + i] += (double)dot(A.data + i * A.ld, w.dA + i * mp, c.M);
    through_features(c, A.data + i * A.ld, w.dA + i * mp);
    write_row(row_of<T>(c.da, it.b, head, from - it.skipped + i), w.dA + i * mp, c.M);
  }
}

// U ← kept·U + Σ_i left_i a_i dN_iᵀ over the queries of chunk n, for the keys of all chunks before first[n].
template <class T>
static void absorb_queries(const LinearItem& it, long n, long& of_run, LinearGradients& w) {
  const Linear& c = it.c;
  const long from = it.from(n), ni = it.tokens(n), vp = it.v_padded, state_run = it.last_run(it.first[n] - 1);
  const float kept = of_run == state_run ? it.kept(n) : 0.f;
  if (kept != 1.f) {
    w.sums.scale(kept, w.S);
    w.sums_z.scale(kept, w.Z);
  }
  of_run = state_run;
  std::memset(w.added_z, 0, sizeof(float) * it.m_padded);
  for (long h = 0; n >= it.queries && h < it.shared; h++) {
    load_gradient<T>(it, h, n, w);
    const View A = features_at<T>(c, c.a, it.b, it.head(h), from - it.skipped, ni, c.M, w.A);
    for (long i = 0; i < ni; i++) {
      const float by = it.left(from + i, state_run);
      if (by != 1.f) scale_row(w.dN + i * vp, by, vp);
      add_row(w.added_z, A.data + i * A.ld, by * w.e[i], c.M);
    }
    if (h == 0)
      multiply<BY_COLUMN, false>(c.M, ni, A.data, A.ld, w.dN, vp, w.added, vp, vp);
    else
      multiply<BY_COLUMN, true>(c.M, ni, A.data, A.ld, w.dN, vp, w.added, vp, vp);
  }
  if (n < it.queries) return;
  w.sums.add(w.added, w.S);
  w.sums_z.add(w.added_z, w.Z);
}

// What a query gains for each token of its span: the ramp's slope is 1 / ramp, and pairs on it lose weight.
static inline void span_gradient(const LinearItem& it, long h, long n, long k, LinearGradients& w) {
  const Linear& c = it.c;
  for (long i = 0; i < it.tokens(n); i++) {
    const long t = it.from(n) + i;
    double total = 0;
    for (long j = 0; j < it.tokens(k); j++) {
      const long key = it.from(k) + j;
      if (key > t || it.run_of(key) != it.run_of(t)) continue;
      const float x = ((float)(t - key) - it.span(h, t)) * (float)(1.0 / c.ramp);
      if (x > 0.f && x < 1.f) total -= (double)w.P[i * CHUNK + j] * w.dP[i * CHUNK + j] / c.ramp;
    }
    c.d_near[it.query(h, t)] += (float)total;
  }
}

template <class T>
static void key_gradients(const LinearItem& it, long k, long until, long of_run, LinearGradients& w) {
  const Linear& c = it.c;
  const long from = it.from(k), nk = it.tokens(k), mp = it.m_padded, vp = it.v_padded;
  const View B = features_at<T>(c, c.b, it.b, it.g, from, nk, mp, w.B);
  const View V = rows_at<T>(c.v, it.b, it.g, from, nk, c.Dv, vp, w.V);
  pack_rows(B, nk, c.M, w.BT);
  pack_rows(V, nk, c.Dv, w.VT);
  transpose(w.S, vp, w.ST, mp, mp, vp);
  multiply<BY_ROW, false>(nk, c.Dv, V.data, V.ld, w.ST, mp, w.dB, mp, mp);
  multiply<BY_ROW, false>(nk, c.M, B.data, B.ld, w.S, vp, w.dV, vp, vp);
  for (long j = 0; j < nk; j++) {
    const float by = it.joins(from + j, k, of_run);
    add_row(w.dB + j * mp, w.Z, 1.f, mp);
    if (by != 1.f) {
      scale_row(w.dB + j * mp, by, mp);
      scale_row(w.dV + j * vp, by, vp);
    }
  }
  for (long n = until; n >= std::max(k, it.queries); n--)
    for (long h = 0; h < it.shared; h++) {
      if (k > it.last(h, n)) continue;
      const long ni = it.tokens(n);
      const bool triangle = it.triangle(n, k);
      const View A = features_at<T>(c, c.a, it.b, it.head(h), it.from(n) - it.skipped, ni, mp, w.A);
      load_gradient<T>(it, h, n, w);
      multiply_tokens(ni, c.M, A, w.BT, triangle, w.P);
      pair_gradient(ni, c.Dv, vp, triangle, w);
      if (c.d_near) span_gradient(it, h, n, k, w);
      if (!triangle) it.weights(h, n, k, w.weights);
      weigh(ni, w.weights, triangle, w.P);
      weigh(ni, w.weights, triangle, w.dP);
      add_pairs_of_keys(ni, nk, w.P, triangle, w.dN, vp, w.dV, vp, vp);
      add_pairs_of_keys(ni, nk, w.dP, triangle, A.data, A.ld, w.dB, mp, mp);
    }
  for (long j = 0; j < nk; j++) {
    if (c.d_decay) w.dG[from + j] -= (double)dot(B.data + j * B.ld, w.dB + j * mp, c.M);
    through_features(c, B.data + j * B.ld, w.dB + j * mp);
    write_row(row_of<T>(c.db, it.b, it.g, from + j), w.dB + j * mp, c.M);
    write_row(row_of<T>(c.dv, it.b, it.g, from + j), w.dV + j * vp, c.Dv);
  }
}

// U·S at the end of a chunk: what all later tokens together gain from the decay of the state there.
static void restart_decay_gradient(const LinearItem& it, long k, LinearGradients& w) {
  if (!it.c.d_decay || k % RESTART != RESTART - 1 || k == it.chunks - 1) return;
  const long vp = it.v_padded, mp = it.m_padded, at = (k / RESTART) * (vp + 1) * mp;
  double total = 0;
  for (long m = 0; m < it.c.M; m++) {
    for (long d = 0; d < it.c.Dv; d++) total += (double)w.S[m * vp + d] * w.states[at + d * mp + m];
    total += (double)w.Z[m] * w.states[at + vp * mp + m];
  }
  w.from_end[k] = total;
}

// The decay's gradient: what dG adds up to from each token on to its document's end.
static void decay_gradient(const LinearItem& it, long index, LinearGradients& w) {
  const Linear& c = it.c;
  double total = 0;
  for (long x = 0; c.g_s1 && x < c.M * c.Dv; x++) total += (double)c.g_s1[index * c.M * c.Dv + x] * c.s1[index * c.M * c.Dv + x];
  for (long x = 0; c.g_z1 && x < c.M; x++) total += (double)c.g_z1[index * c.M + x] * c.z1[index * c.M + x];
  for (long t = c.T - 1; t >= 0; t--) {
    const long k = (t + it.shift) / CHUNK;
    if (t == it.from(k) + it.tokens(k) - 1 && w.from_end[k] == w.from_end[k]) total = w.from_end[k];
    total += w.dG[t];
    const bool begins = t > 0 && it.run_of(t) != it.run_of(t - 1);
    c.d_decay[index * c.T + t] = begins ? 0.f : (float)total;
    if (begins) total = 0;
  }
}

template <class T>
static void linear_backward_item(const Linear& c, long index) {
  const LinearItem it(c, index);
  LinearGradients w(c);
  const long at = index * c.M, mp = it.m_padded, vp = it.v_padded;
  for (long h = 0; c.d_near && h < it.shared; h++)
    std::memset(c.d_near + it.query(h, it.skipped), 0, sizeof(float) * c.Tq);

  read_state(c.s0 ? c.s0 + at * c.Dv : nullptr, c.z0 ? c.z0 + at : nullptr, c.M, c.Dv, vp, w.S, w.Z);
  transpose(w.S, vp, w.ST, mp, mp, vp);
  w.from_end.assign(c.d_decay ? it.chunks : 0, NAN);
  long run = 0, absorbed = 0;
  for (long n = it.queries; n < it.chunks; n++) {
    for (; absorbed < it.first[n]; absorbed++) {
      const long nk = it.tokens(absorbed);
      const View B = features_at<T>(c, c.b, it.b, it.g, it.from(absorbed), nk, mp, w.B);
      const View V = rows_at<T>(c.v, it.b, it.g, it.from(absorbed), nk, c.Dv, c.Dv, w.V);
      absorb_transposed(it, absorbed, B, V, run, w);
    }
    for (long h = 0; h < it.shared; h++) query_gradients<T>(it, h, n, run, w);
  }

  std::memset(w.added, 0, sizeof(float) * mp * vp);
  read_state(c.g_s1 ? c.g_s1 + at * c.Dv : nullptr, c.g_z1 ? c.g_z1 + at : nullptr, c.M, c.Dv, vp, w.S, w.Z);
  w.sums.clear();
  w.sums_z.clear();
  run = it.last_run(it.chunks - 1);
  long until = it.chunks - 1;  // the last query chunk that is not in U
  for (long k = it.chunks - 1; k >= 0; k--) {
    for (; it.first[until] > k; until--) absorb_queries<T>(it, until, run, w);
    restart_decay_gradient(it, k, w);
    key_gradients<T>(it, k, until, run, w);
  }
  for (; until >= 0; until--) absorb_queries<T>(it, until, run, w);
  for (long r = 0; c.d_s0 && r < c.M; r++)
    for (long d = 0; d < c.Dv; d++) c.d_s0[(at + r) * c.Dv + d] = run == 0 ? w.S[r * vp + d] : 0.f;
  for (long r = 0; c.d_z0 && r < c.M; r++) c.d_z0[at + r] = run == 0 ? w.Z[r] : 0.f;
  if (c.d_decay) decay_gradient(it, index, w);
}

template <class T>
static void linear_backward_all(const Linear& c) {
  prefer_large_pages(c.da, c.B * c.H * c.Tq * c.M * (long)sizeof(T));
  prefer_large_pages(c.db, c.B * c.Hkv * c.T * c.M * (long)sizeof(T));
  prefer_large_pages(c.dv, c.B * c.Hkv * c.T * c.Dv * (long)sizeof(T));
  for_items(c.B * c.Hkv, c.threads, 2.0 * c.B * c.H * c.T * c.M * c.Dv,
            [&](long index) { linear_backward_item<T>(c, index); });
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
