// The gated delta rule, chunk after chunk: S_t = e^(g_t) S_{t−1} + k_t u_tᵀ with u_t = β_t (v_t − (e^(g_t) S_{t−1})ᵀ k_t),
// out_t = S_tᵀ q_t (Yang, Kautz, Hatamizadeh 2025, https://arxiv.org/abs/2412.06464).
//
// Within a chunk of C tokens, G the running sum of g, S the state before it, L_ij = e^(G_i − G_j) for j ≤ i:
//   w_i = v_i − e^(G_i) Sᵀk_i − Σ_{j<i} M_ij u_j,   u = β w,   M_ij = L_ij k_i·k_j      (forward substitution)
//   out = e^G (Q S) + P U,   P_ij = L_ij q_i·k_j;        S ← e^(G_C) S + Σ_j e^(G_C − G_j) k_j u_jᵀ
// and with E the gradient of the state after it, x the gradient of u, y = β x the one of w and v:
//   x_j = (Pᵀ dO)_j + e^(G_C − G_j) Eᵀ k_j − Σ_{i>j} M_ij y_i                          (backward substitution)
//   N_ij = −L_ij y_i·u_j,  Z_ij = L_ij dO_i·u_j;         dQ = e^G (dO Sᵀ) + Z K,         dβ = x·w
//   dK = rows + columns,   rows = −e^G (Y Sᵀ) + N K,    columns = e^(G_C − G) (U Eᵀ) + Nᵀ K + Zᵀ Q
//   dG = q·dQ + k·(rows − columns), and ⟨E, S after⟩ at the last token; dg is its reversed running sum
//   E ← e^(G_C) E + Σ_i e^(G_i) (q_i dO_iᵀ − k_i y_iᵀ)
// All exponents are ≤ 0. Where a document begins, L, e^G and e^(G_C − G) are 0 across the border.
// Keys and the queries of their heads lie in one stack (K, Q, Q, …), so that one product serves them all.
#pragma once
#include "state.h"

namespace spanformer {
namespace SPANFORMER_ISA {
namespace matrix {

// A chunk's decays: between its tokens, from the state before it, and to the one after it.
struct Decays {
  float L[C * C];       // e^(G_i − G_j), 0 for j > i
  float enter[C];       // e^(G_i): of the state before
  float leave[C];       // e^(G_C − G_i): of what goes on
  float whole;          // e^(G_C)

  template <class Begins>  // begins(i): whether token i begins a document
  void fill(long n, const float* g, Begins begins) {
    double G[C], sum = 0;
    long border[C], count = 0;  // how many documents have begun within the chunk
    for (long i = 0; i < C; i++) {
      count += i < n && begins(i);
      if (i < n && g) sum += g[i];
      G[i] = sum, border[i] = count;
    }
    float x[C];
    for (long i = 0; i < C; i++) {
      for (long j = 0; j < C; j++) x[j] = j > i ? 0.f : (float)((G[i] - G[j]) * (double)LOG2E);  // never above 0
      for (long j = 0; j < C; j += W) store(L + i * C + j, vexp2(load(x + j)));
      for (long j = 0; j < C; j++)
        if (j > i || border[j] != border[i]) L[i * C + j] = 0.f;
      L[i * C + i] = 1.f;  // also where G is infinite
    }
    for (long i = 0; i < C; i++) x[i] = (float)(G[i] * (double)LOG2E);
    for (long i = 0; i < C; i += W) store(enter + i, vexp2(load(x + i)));
    for (long i = 0; i < C; i++) x[i] = (float)((G[C - 1] - G[i]) * (double)LOG2E);
    for (long i = 0; i < C; i += W) store(leave + i, vexp2(load(x + i)));
    for (long i = 0; i < C; i++) {
      if (border[i] > 0) enter[i] = 0.f;
      if (border[i] != count) leave[i] = 0.f;
    }
    whole = enter[C - 1];
  }
};

// What the sweep back needs of a chunk again.
struct Recalled {
  float *S, *U, *Wv, *M;  // the state before it [D][V], u and w [C][V], −M [C][C]
  bool bad;               // some number of it is NaN or infinite
};

template <class T>
class DeltaItem : Item<T, Delta> {
  using Base = Item<T, Delta>;
  using Base::c_, Base::b_, Base::g_, Base::group_, Base::stack_, Base::D_, Base::V_, Base::chunks_, Base::segment_;
  using Base::n_, Base::S_, Base::E_, Base::X_, Base::Vv_, Base::norms_;

 public:
  DeltaItem(const Delta& c, long item)
      : Base(c, item), tokens_(c.conv ? text(c.padding) : nullptr, c.conv ? text(c.starts) : nullptr, c.T) {
    if (!c.conv) return;
    convolutions_.emplace_back(convolution(c.k, c.dk, c.conv_k, c.tail_k, c.d_conv_k, g_, c.Hkv, c.D, D_, 1.f));
    for (long h = g_ * group_; h < (g_ + 1) * group_; h++)
      convolutions_.emplace_back(convolution(c.q, c.dq, c.conv_q, c.tail_q, c.d_conv_q, h, c.H, c.D, D_, 1.f));
    convolutions_.emplace_back(convolution(c.v, c.dv, c.conv_v, c.tail_v, c.d_conv_v, g_, c.Hkv, c.Dv, V_, 0.f));
  }

  void forward() {
    reserve(0);
    this->restore(c_.state ? c_.state + this->at_state() : nullptr, S_);
    if (c_.T == 1 && !c_.marks) {
      read_rows(0, 1, true);
      steps(0, 1);
    } else {
      for (long t = 0; t < chunks_; t++) {
        if (c_.marks && t % segment_ == 0) this->save(S_, this->mark(t / segment_));
        read(t * C, this->tokens(t), true);
        if (forward_chunk(t, Recalled{S_, U_, Wv_, M_, false}, true)) write_out(t * C, n_);
      }
    }
    this->save(S_, c_.final_state + this->at_state());
  }

  void backward() {
    reserve(std::min(chunks_, segment_));
    this->restore(c_.g_state ? c_.g_state + this->at_state() : nullptr, E_);
    for (long s = (chunks_ - 1) / segment_; s >= 0; s--) {
      const long from = s * segment_, to = std::min(chunks_, from + segment_);
      this->restore(this->mark(s), S_);
      for (long t = from; t < to; t++) {
        Recalled& r = recalled_[t - from];
        std::memcpy(r.S, S_, sizeof(float) * D_ * V_);
        read(t * C, this->tokens(t), false);
        r.bad = !forward_chunk(t, r, false);
      }
      for (long t = to - 1; t >= from; t--) {
        const Recalled& r = recalled_[t - from];
        r.bad ? write_nan(t) : backward_chunk(t, r, t + 1 < to ? recalled_[t + 1 - from].S : S_);
      }
    }
    if (c_.d_state) this->save(E_, c_.d_state + this->at_state());
    for (const ShortConvolution<T>& x : convolutions_) x.end();
    for (const GatedNorm& norm : norms_) norm.end();
  }

 private:
  float *KT_, *XX_, *XS_, *U_, *Wv_, *M_, *turned_, *UT_, *dX_, *dK_, *dU_;
  float beta_[C];
  Decays decays_;
  std::vector<Recalled> recalled_;
  Tokens tokens_;
  std::vector<ShortConvolution<T>> convolutions_;  // of k, of each q, and of v; or none

  const uint8_t* text(const uint8_t* ids) const { return ids ? ids + b_ * c_.T : nullptr; }
  ConvolvedHead convolution(const Rows& from, const Rows& to, const float* weight, const float* tail, float* d_weight, long h,
                            long heads, long size, long width, float unit) const {
    const long at = b_ * heads + h;
    return {from, to, b_, h, size, width, c_.conv, unit, weight + h * c_.conv * size,
            tail ? tail + at * (c_.conv - 1) * size : nullptr, d_weight ? d_weight + at * c_.conv * size : nullptr};
  }

  void reserve(long held) {
    const size_t d = D_, v = V_, s = stack_;
    std::vector<typename Base::Part> parts = {{&X_, s * d}, {&Vv_, C * v}, {&KT_, d * C}, {&XX_, s * C}, {&XS_, s * v},
                                              {&S_, d * v}, {&U_, C * v}, {&Wv_, C * v}, {&M_, C * C}};
    if (held) {
      const size_t wide = s * std::max(d, v);
      for (typename Base::Part part : {typename Base::Part{&E_, d * v}, {&turned_, d * v}, {&UT_, v * C}, {&dX_, wide},
                                       {&dK_, C * d}, {&dU_, C * v}})
        parts.push_back(part);
      recalled_.resize(held);
      for (Recalled& r : recalled_)
        for (typename Base::Part part : {typename Base::Part{&r.S, d * v}, {&r.U, C * v}, {&r.Wv, C * v}, {&r.M, C * C}})
          parts.push_back(part);
    }
    size_t more = 0;
    for (const ShortConvolution<T>& x : convolutions_) more += Arena::rounded(x.scratch(C));
    Base::reserve(parts, more);
    for (ShortConvolution<T>& x : convolutions_) x.begin(arena().take(x.scratch(C)), C);
  }

  const float* decay() const { return c_.decay ? c_.decay + this->at_token(0) : nullptr; }

  // keys and values as the operation takes them, and queries
  void read_rows(long t, long n, bool queries) {
    const float* beta = c_.beta + this->at_token(t);
    for (long i = 0; i < C; i++) beta_[i] = i < n ? beta[i] : 0.f;
    if (convolutions_.empty()) return this->take_rows(t, n);
    n_ = n;
    const long first = tokens_.from(t), last = tokens_.from(t + n);
    for (long h = 0; h <= group_ + 1; h++) {
      const bool values = h > group_;
      if (!queries && h > 0 && !values) continue;
      float* to = values ? Vv_ : X_ + h * C * D_;
      const long width = values ? V_ : D_;
      convolutions_[h].forward(tokens_, first, last, t, n, to);
      if (n < C) std::memset(to + n * width, 0, sizeof(float) * (C - n) * width);
    }
  }
  void read(long t, long n, bool queries) {
    read_rows(t, n, queries);
    decays_.fill(n, decay() ? decay() + t : nullptr, [&](long i) { return this->begins(t + i); });
  }

  // X[i][j] ← X[i][j] L_ij for j ≤ i (j < i if STRICT), else 0, times sign
  template <bool STRICT>
  void mask(float* X, float sign) const {
    const vf at = lanes(), by = set1(sign);
    for (long i = 0; i < C; i++) {
      const vf last = set1((float)(STRICT ? i - 1 : i));
      for (long j = 0; j < C; j += W) {
        const vf x = load(X + i * C + j) * load(decays_.L + i * C + j) * by;
        store(X + i * C + j, at + set1((float)j) <= last ? x : vf{});
      }
    }
  }

  // w_i = w_i + Σ_{j<i} M_ij u_j with u = β w; M holds −M
  void solve(const float* M, float* Wv, float* U) const {
    for (long a = 0; a < C; a += STRIP) {
      wide_product<BY_ROW, true>(a ? STRIP : 0, a, M + a * C, C, U, Wv + a * V_, V_);
      for (long i = a; i < a + STRIP; i++) {
        for (long d = 0; d < V_; d += W) {
          vf x = load(Wv + i * V_ + d);
          for (long j = a; j < i; j++) x = set1(M[i * C + j]) * load(U + j * V_ + d) + x;
          store(Wv + i * V_ + d, x);
          store(U + i * V_ + d, x * set1(beta_[i]));
        }
      }
    }
  }
  // x_j = x_j + Σ_{i>j} M_ij y_i with y = β x
  void solve_back(const float* M, float* X, float* Y) const {
    for (long a = C - STRIP; a >= 0; a -= STRIP) {
      const long z = a + STRIP;
      wide_product<BY_COLUMN, true>(z < C ? STRIP : 0, C - z, M + z * C + a, C, Y + z * V_, X + a * V_, V_);
      for (long j = z - 1; j >= a; j--) {
        for (long d = 0; d < V_; d += W) {
          vf x = load(X + j * V_ + d);
          for (long i = j + 1; i < z; i++) x = set1(M[i * C + j]) * load(Y + i * V_ + d) + x;
          store(X + j * V_ + d, x);
          store(Y + j * V_ + d, x * set1(beta_[j]));
        }
      }
    }
  }

  // The chunk that `read` has read: XS_ becomes outputs, S_ the state after it. Returns false where a number is not
  // finite; tokens before that one are then done by chunk, as if no others followed, and it and the others one by one.
  bool forward_chunk(long chunk, const Recalled& r, bool output) {
    const long bad = run_chunk(r, output);
    if (bad >= n_) return true;
    const long t = chunk * C, n = n_;
    if (bad > 0) {
      read(t, bad, output);
      run_chunk(r, output);
      if (output) write_out(t, bad);
    }
    read_rows(t, n, output);
    steps(bad, n, t);
    return false;
  }

  long run_chunk(const Recalled& r, bool output) {
    const long rows = output ? stack_ : C;
    turn(X_, C, D_, KT_);
    wide_product<BY_ROW, false>(rows, c_.D, X_, D_, KT_, XX_, C);
    wide_product<BY_ROW, false>(rows, c_.D, X_, D_, S_, XS_, V_);
    mask<true>(XX_, -1.f);
    std::memcpy(r.M, XX_, sizeof(float) * C * C);
    scale_rows(C, decays_.enter, -1.f, XS_, V_);
    for (long i = 0; i < C * V_; i += W) store(r.Wv + i, load(Vv_ + i) + load(XS_ + i));
    solve(r.M, r.Wv, r.U);
    for (long i = 0; i < n_; i++)
      if (!all_finite(r.U + i * V_, V_, 1, V_)) return i;
    if (output)
      for (long h = 1; h <= group_; h++) {
        float *P = XX_ + h * C * C, *O = XS_ + h * C * V_;
        mask<false>(P, 1.f);
        scale_rows(C, decays_.enter, 1.f, O, V_);
        for (long a = 0; a < C; a += STRIP)
          wide_product<BY_ROW, true>(STRIP, a + STRIP, P + a * C, C, r.U, O + a * V_, V_);
      }
    scale_all(decays_.whole, S_, D_ * V_);
    scale_rows(C, decays_.leave, 1.f, X_, D_);
    wide_product<BY_COLUMN, true>(c_.D, C, X_, D_, r.U, S_, V_);
    return n_;
  }

  void write_out(long t, long n) {
    for (long r = 0; r < group_; r++) this->give_out(r, t, n, XS_ + (1 + r) * C * V_);
  }

  // The recurrence itself, for a single token and for those that NaN has reached: tokens of the chunk that begins at t.
  void steps(long from, long to, long t = 0) {
    for (long i = from; i < to; i++) {
      if (this->begins(t + i)) std::memset(S_, 0, sizeof(float) * D_ * V_);
      if (decay()) scale_all(std::exp(decay()[t + i]), S_, c_.D * V_);
      const float *k = X_ + i * D_, *v = Vv_ + i * V_;
      std::memset(U_, 0, sizeof(float) * V_);
      for (long d = 0; d < c_.D; d++) add_row(k[d], S_ + d * V_, U_, V_);
      for (long e = 0; e < c_.Dv; e++) U_[e] = beta_[i] * (v[e] - U_[e]);
      for (long d = 0; d < c_.D; d++) add_row(k[d], U_, S_ + d * V_, V_);
      this->give_step(i, t + i, Wv_);
    }
  }

  void backward_chunk(long chunk, const Recalled& r, const float* after) {
    const long t = chunk * C;
    read(t, this->tokens(chunk), true);
    const float* Q = X_ + C * D_;
    float *Y = XS_, *dO = XS_ + C * V_;  // one stack, as keys and queries
    for (long h = 0; h < group_; h++) this->take(c_.g, g_ * group_ + h, t, n_, c_.Dv, dO + h * C * V_, V_);
    turn(X_, C, D_, KT_);
    wide_product<BY_ROW, false>(group_ * C, c_.D, Q, D_, KT_, XX_ + C * C, C);
    wide_product<BY_ROW, false>(C, c_.D, X_, D_, E_, dU_, V_);
    scale_rows(C, decays_.leave, 1.f, dU_, V_);
    for (long h = 0; h < group_; h++) {
      float* P = XX_ + (1 + h) * C * C;
      mask<false>(P, 1.f);
      if (!norms_.empty()) through_norm(h, t, P, Q + h * C * D_, r, dO + h * C * V_);
      for (long a = 0; a < C; a += STRIP)
        wide_product<BY_COLUMN, true>(STRIP, C - a, P + a * C + a, C, dO + (h * C + a) * V_, dU_ + a * V_, V_);
    }
    solve_back(r.M, dU_, Y);
    give_gradient(group_ + 1, c_.dv, g_, t, c_.Dv, Y, V_);
    for (long i = 0; i < n_; i++) c_.d_beta[this->at_token(t + i)] = dot(dU_ + i * V_, r.Wv + i * V_, V_);
    turn(r.U, C, V_, UT_);
    wide_product<BY_ROW, false>(stack_, c_.Dv, XS_, V_, UT_, XX_, C);
    mask<true>(XX_, -1.f);
    for (long h = 1; h <= group_; h++) mask<false>(XX_ + h * C * C, 1.f);
    turn(r.S, D_, V_, turned_);
    wide_product<BY_ROW, false>(stack_, c_.Dv, XS_, V_, turned_, dX_, D_);
    for (long h = 0; h <= group_; h++) scale_rows(C, decays_.enter, h ? 1.f : -1.f, dX_ + h * C * D_, D_);
    for (long h = 0; h <= group_; h++)
      for (long a = 0; a < C; a += STRIP)
        wide_product<BY_ROW, true>(STRIP, a + STRIP, XX_ + (h * C + a) * C, C, X_, dX_ + (h * C + a) * D_, D_);
    turn(E_, D_, V_, turned_);
    wide_product<BY_ROW, false>(C, c_.Dv, r.U, V_, turned_, dK_, D_);
    scale_rows(C, decays_.leave, 1.f, dK_, D_);
    for (long h = 0; h <= group_; h++)
      for (long a = 0; a < C; a += STRIP)
        wide_product<BY_COLUMN, true>(STRIP, C - a, XX_ + (h * C + a) * C + a, C, X_ + (h * C + a) * D_, dK_ + a * D_, D_);
    for (long h = 0; h < group_; h++) give_gradient(1 + h, c_.dq, g_ * group_ + h, t, c_.D, dX_ + (1 + h) * C * D_, D_);
    if (c_.d_decay) decay_gradient(t, after);
    for (long i = 0; i < C * D_; i += W) store(dK_ + i, load(dK_ + i) + load(dX_ + i));
    give_gradient(0, c_.dk, g_, t, c_.D, dK_, D_);
    for (long h = 0; h <= group_; h++) scale_rows(C, decays_.enter, h ? 1.f : -1.f, X_ + h * C * D_, D_);
    scale_all(decays_.whole, E_, D_ * V_);
    wide_product<BY_COLUMN, true>(c_.D, stack_, X_, D_, XS_, E_, V_);
  }

  // The gradient of a head's outputs becomes the one of its y, which is computed again.
  void through_norm(long h, long t, const float* P, const float* Q, const Recalled& r, float* dO) {
    wide_product<BY_ROW, false>(C, c_.D, Q, D_, r.S, dX_, V_);
    scale_rows(C, decays_.enter, 1.f, dX_, V_);
    for (long a = 0; a < C; a += STRIP)
      wide_product<BY_ROW, true>(STRIP, a + STRIP, P + a * C, C, r.U, dX_ + a * V_, V_);
    norms_[h].backward(t, n_, dX_, dO);
  }
  void give_gradient(long index, const Rows& to, long head, long t, long size, const float* from, long width) {
    if (convolutions_.empty()) return this->give(to, head, t, n_, size, from, width);
    convolutions_[index].backward(tokens_, tokens_.from(t), tokens_.from(t + n_), t, n_, from);
  }

  // In double: the terms of a decay's gradient cancel.
  static double inner(const float* x, const float* y, long n) {
    double part[8] = {};
    for (long d = 0; d < n; d += 8)
      for (long e = 0; e < 8; e++) part[e] += (double)x[d + e] * (double)y[d + e];
    return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
  }
  void decay_gradient(long t, const float* after) const {
    double sum = inner(E_, after, D_ * V_);
    for (long i = n_ - 1; i >= 0; i--) {
      const float *k = X_ + i * D_, *rows = dX_ + i * D_;
      sum += inner(k, rows, D_) - inner(k, dK_ + i * D_, D_);
      for (long h = 1; h <= group_; h++) sum += inner(k + h * C * D_, rows + h * C * D_, D_);
      const bool border = this->begins(t + i);  // nothing comes across: neither state nor gradient
      c_.d_decay[this->at_token(t + i)] = border ? 0.f : (float)sum;
      if (border) sum = 0.0;
    }
  }

  void write_nan(long chunk) {
    this->give_nan(chunk, dX_);
    const long begin = chunk * C, end = begin + this->tokens(chunk);
    for (ShortConvolution<T>& x : convolutions_) x.give_nan(tokens_, tokens_.from(begin), tokens_.from(end), begin, end - begin);
    for (long i = 0, t = this->at_token(chunk * C); i < this->tokens(chunk); i++) {
      c_.d_beta[t + i] = NOT_A_NUMBER;
      if (c_.d_decay) c_.d_decay[t + i] = NOT_A_NUMBER;
    }
  }
};

}  // namespace matrix

template <class T>
static void delta_forward(const Delta& c) { matrix_forward<matrix::DeltaItem<T>, T>(c); }
template <class T>
static void delta_backward(const Delta& c) { matrix_backward<matrix::DeltaItem<T>, T>(c); }

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
