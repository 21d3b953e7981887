// Gated linear attention, chunk after chunk: S_t = diag(e^(g_t)) S_{t−1} + k_t v_tᵀ, out_t = S_tᵀ q_t
// (Yang et al., 2024, https://arxiv.org/abs/2312.06635).
//
// Within a chunk, G the running sum of g and S the state before it, channel d of the keys by channel:
//   P_ij = Σ_d q_id k_jd e^(G_id − G_jd), j ≤ i;    out = (Q e^G) S + P V;    S ← e^(G_C) S + (K e^(G_C − G))ᵀ V
// and with E the gradient of the state after it:
//   dV = Pᵀ dO + (K e^(G_C − G)) E,   dP = dO Vᵀ,   dQ_i = e^(G_i) (S dO_i) + Σ_j dP_ij k_j e^(G_i − G_j),
//   dK_j = e^(G_C − G_j) (E v_j) + Σ_i dP_ij q_i e^(G_i − G_j),   dG = q dQ − k dK, and Σ_e E_de S_de after it at the last
//   token; dg is its reversed running sum;   E ← e^(G_C) E + (Q e^G)ᵀ dO
//
// P is no product of two matrices unless e^(−G) is formed, which overflows. Instead, a chunk is halved again and again: a
// pair in different halves of a block has e^(G_i − G_j) = e^(G_i − G_m) e^(G_m − G_j) with m the last token of the left
// half, and both exponents are ≤ 0. Every pair i > j is in one level of halving. All these factors are products of
// e^(g): the first token of a document has 0 in its place, which ends all that comes across.
#pragma once
#include "state.h"

namespace spanformer {
namespace SPANFORMER_ISA {
namespace matrix {

constexpr long HALF = C / 2;  // pairs of one level: HALF rows on the right of their block, HALF columns on the left
static_assert(HALF % W == 0, "half a chunk is a whole number of vectors");

template <class T>
class GlaItem : Item<T, Gla> {
  using Base = Item<T, Gla>;
  using Base::c_, Base::b_, Base::g_, Base::group_, Base::stack_, Base::D_, Base::V_, Base::chunks_, Base::segment_;
  using Base::n_, Base::S_, Base::E_, Base::X_, Base::Vv_, Base::norms_;

 public:
  GlaItem(const Gla& c, long item) : Base(c, item) {}

  void forward() {
    reserve(0);
    this->restore(c_.state ? c_.state + this->at_state() : nullptr, S_);
    if (c_.T == 1 && !c_.marks) {
      this->take_rows(0, 1);
      steps(0, 1);
    } else {
      for (long t = 0; t < chunks_; t++) {
        if (c_.marks && t % segment_ == 0) this->save(S_, this->mark(t / segment_));
        const long n = this->tokens(t), clean = read_clean(t);
        if (clean > 0) {
          outputs(t);
          next_state();
        }
        if (clean < n) this->take_rows(t * C, n);
        steps(clean, n, t * C);
      }
    }
    this->save(S_, c_.final_state + this->at_state());
  }

  void backward() {
    const long held = std::min(chunks_, segment_);
    reserve(held);
    std::vector<char> bad(held);
    this->restore(c_.g_state ? c_.g_state + this->at_state() : nullptr, E_);
    for (long s = (chunks_ - 1) / segment_; s >= 0; s--) {
      const long from = s * segment_, to = std::min(chunks_, from + segment_);
      this->restore(this->mark(s), S_);
      for (long t = from; t < to; t++) {
        std::memcpy(states_ + (t - from) * D_ * V_, S_, sizeof(float) * D_ * V_);
        const long clean = read_clean(t);
        if (clean > 0) next_state();
        bad[t - from] = clean < this->tokens(t);
        if (bad[t - from]) this->take_rows(t * C, this->tokens(t));
        steps(clean, this->tokens(t), t * C);
      }
      for (long t = to - 1; t >= from; t--) {
        const float* before = states_ + (t - from) * D_ * V_;
        bad[t - from] ? write_nan(t) : backward_chunk(t, before, t + 1 < to ? before + D_ * V_ : S_);
      }
    }
    if (c_.d_state) this->save(E_, c_.d_state + this->at_state());
    for (const GatedNorm& norm : norms_) norm.end();
  }

 private:
  float *alpha_, *enter_, *leave_;        // e^(g_i), e^(G_i), e^(G_C − G_i): [C][D]
  float *right_, *left_;                  // of a level: e^(G_i − G_m) and e^(G_m − G_j), [HALF][D]
  float *Qr_, *Kl_, *KT_, *pairs_, *sum_; // scaled rows of the level, [HALF][D]; keys turned; [HALF][HALF]; products
  float *P_, *Y_, *scaled_;               // [C][C] for each head; outputs or their gradients [C][V] for each; [C][D]
  float *states_, *turned_, *dP_, *dQ_, *dK_, *dV_;

  void reserve(long held) {
    const size_t d = D_, v = V_, s = stack_, heads = group_ * C;
    std::vector<typename Base::Part> parts = {
        {&X_, s * d},       {&Vv_, C * v},      {&S_, d * v},       {&alpha_, C * d}, {&enter_, C * d},
        {&leave_, C * d},   {&right_, HALF * d}, {&left_, HALF * d}, {&Qr_, HALF * d}, {&Kl_, HALF * d},
        {&KT_, d * HALF},   {&pairs_, HALF * HALF}, {&sum_, HALF * d}, {&P_, heads * C}, {&Y_, heads * v},
        {&scaled_, heads * d}};
    if (held)
      for (typename Base::Part part :
           {typename Base::Part{&E_, d * v}, {&states_, held * d * v}, {&turned_, std::max<size_t>(d, C) * v},
            {&dP_, heads * C}, {&dQ_, heads * d}, {&dK_, C * std::max(d, v)}, {&dV_, C * v}})
        parts.push_back(part);
    Base::reserve(parts);
  }

  const float* gates(long t) const { return c_.gates + this->at_token(t) * c_.D; }

  void read(long t, long n) {
    this->take_rows(t, n);
    for (long i = 0; i < C; i++) {
      float* a = alpha_ + i * D_;
      const bool none = i < n && this->begins(t + i);
      for (long d = 0; d < D_; d++) a[d] = i < n && d < c_.D ? gates(t + i)[d] * LOG2E : 0.f;
      for (long d = 0; d < D_; d += W) store(a + d, none ? vf{} : vexp2_or_nan(load(a + d)));
    }
    for (long d = 0; d < D_; d += W) {
      vf in = set1(1.f), out = set1(1.f);
      for (long i = 0; i < C; i++) {
        in = in * load(alpha_ + i * D_ + d);
        store(enter_ + i * D_ + d, in);
      }
      for (long i = C - 1; i >= 0; i--) {
        store(leave_ + i * D_ + d, out);
        out = out * load(alpha_ + i * D_ + d);
      }
    }
  }
  static vf vexp2_or_nan(vf x) { return x - x == vf{} ? vexp2(x) : set1(NOT_A_NUMBER); }

  // Reads the chunk's tokens before the first that is not finite, and returns how many they are.
  long read_clean(long chunk) {
    const long t = chunk * C, n = this->tokens(chunk);
    if (!all_finite(S_, V_, D_, V_)) return 0;
    read(t, n);
    long i = 0;
    while (i < n && all_finite(X_ + i * D_, D_, 1, D_) && all_finite(Vv_ + i * V_, V_, 1, V_) &&
           all_finite(alpha_ + i * D_, D_, 1, D_))
      i++;
    if (0 < i && i < n) read(t, i);
    return i;
  }

  // A level's pairs: row p of the right halves is token 2s⌊p/s⌋ + s + p mod s, of the left halves s less.
  static long token(long p, long s) { return p / s * 2 * s + p % s; }

  void read_level(long s) {
    for (long d = 0; d < D_; d += W)
      for (long p = 0; p < HALF; p += s) {
        const long a = token(p, s);
        vf x = set1(1.f);
        for (long w = 0; w < s; w++) {
          x = x * load(alpha_ + (a + s + w) * D_ + d);
          store(right_ + (p + w) * D_ + d, x);
        }
        x = set1(1.f);
        for (long w = s - 1; w >= 0; w--) {
          store(left_ + (p + w) * D_ + d, x);
          store(Kl_ + (p + w) * D_ + d, x * load(X_ + (a + w) * D_ + d));
          x = x * load(alpha_ + (a + w) * D_ + d);
        }
      }
    turn(Kl_, HALF, D_, KT_);
  }
  void read_queries(long s, long h) {
    for (long p = 0; p < HALF; p++) {
      const float* q = X_ + ((1 + h) * C + token(p, s) + s) * D_;
      for (long d = 0; d < D_; d += W) store(Qr_ + p * D_ + d, load(q + d) * load(right_ + p * D_ + d));
    }
  }
  // between a head's [C][C] and a level's [HALF][HALF], which is 0 for rows and columns of different blocks
  void scatter(long s, float* P) const {
    for (long p = 0; p < HALF; p++)
      std::memcpy(P + (token(p, s) + s) * C + token(p / s * s, s), pairs_ + p * HALF + p / s * s, sizeof(float) * s);
  }
  void gather(long s, const float* P) {
    std::memset(pairs_, 0, sizeof(float) * HALF * HALF);
    for (long p = 0; p < HALF; p++)
      std::memcpy(pairs_ + p * HALF + p / s * s, P + (token(p, s) + s) * C + token(p / s * s, s), sizeof(float) * s);
  }
  void level_weights(long s, long h) {
    read_queries(s, h);
    product<BY_ROW, false, HALF / W>(HALF, c_.D, Qr_, D_, KT_, HALF, pairs_, HALF);
    scatter(s, P_ + h * C * C);
  }
  void own_weights() {
    for (long h = 0; h < group_; h++)
      for (long i = 0; i < C; i++) {
        float* P = P_ + (h * C + i) * C;
        for (long j = i + 1; j < C; j++) P[j] = 0.f;
        P[i] = dot(X_ + i * D_, X_ + ((1 + h) * C + i) * D_, D_);
      }
  }
  static void multiply(const float* x, const float* y, float* to, long count) {
    for (long d = 0; d < count; d += W) store(to + d, load(x + d) * load(y + d));
  }

  void weights() {
    own_weights();
    for (long s = HALF; s > 0; s /= 2) {
      read_level(s);
      for (long h = 0; h < group_; h++) level_weights(s, h);
    }
  }
  // y [C][V] of a head, S the state before the chunk
  void sums(long h, const float* S, float* y) {
    const float* P = P_ + h * C * C;
    multiply(X_ + (1 + h) * C * D_, enter_, scaled_, C * D_);
    wide_product<BY_ROW, false>(C, c_.D, scaled_, D_, S, y, V_);
    for (long a = 0; a < C; a += STRIP) wide_product<BY_ROW, true>(STRIP, a + STRIP, P + a * C, C, Vv_, y + a * V_, V_);
  }
  void outputs(long chunk) {
    weights();
    for (long h = 0; h < group_; h++) {
      sums(h, S_, Y_ + h * C * V_);
      this->give_out(h, chunk * C, n_, Y_ + h * C * V_);
    }
  }
  void next_state() {
    for (long d = 0; d < c_.D; d++) scale_all(enter_[(C - 1) * D_ + d], S_ + d * V_, V_);
    multiply(X_, leave_, scaled_, C * D_);
    wide_product<BY_COLUMN, true>(c_.D, C, scaled_, D_, Vv_, S_, V_);
  }

  // The recurrence itself, for a single token and for those that NaN has reached: tokens of the chunk that begins at t.
  void steps(long from, long to, long t = 0) {
    for (long i = from; i < to; i++) {
      if (this->begins(t + i)) std::memset(S_, 0, sizeof(float) * D_ * V_);
      for (long d = 0; d < c_.D; d++) {
        scale_all(std::exp(gates(t + i)[d]), S_ + d * V_, V_);
        add_row(X_[i * D_ + d], Vv_ + i * V_, S_ + d * V_, V_);
      }
      this->give_step(i, t + i, Y_);
    }
  }

  void backward_chunk(long chunk, const float* before, const float* after) {
    const long t = chunk * C;
    read(t, this->tokens(chunk));
    for (long h = 0; h < group_; h++) this->take(c_.g, g_ * group_ + h, t, n_, c_.Dv, Y_ + h * C * V_, V_);
    if (!norms_.empty()) through_norms(t, before);
    turn(Vv_, C, V_, turned_);
    wide_product<BY_ROW, false>(group_ * C, c_.Dv, Y_, V_, turned_, dP_, C);
    turn(before, D_, V_, turned_);
    wide_product<BY_ROW, false>(group_ * C, c_.Dv, Y_, V_, turned_, dQ_, D_);
    for (long h = 0; h < group_; h++) multiply(dQ_ + h * C * D_, enter_, dQ_ + h * C * D_, C * D_);
    turn(E_, D_, V_, turned_);
    wide_product<BY_ROW, false>(C, c_.Dv, Vv_, V_, turned_, dK_, D_);
    multiply(dK_, leave_, dK_, C * D_);
    own_weights();
    for (long h = 0; h < group_; h++)
      for (long i = 0; i < C; i++) {
        const float x = dP_[(h * C + i) * C + i];
        add_row(x, X_ + i * D_, dQ_ + (h * C + i) * D_, D_);
        add_row(x, X_ + ((1 + h) * C + i) * D_, dK_ + i * D_, D_);
      }
    for (long s = HALF; s > 0; s /= 2) {
      read_level(s);
      for (long h = 0; h < group_; h++) {
        level_weights(s, h);
        gather(s, dP_ + h * C * C);
        level_gradients(s, h);
      }
    }
    multiply(X_, leave_, scaled_, C * D_);
    wide_product<BY_ROW, false>(C, c_.D, scaled_, D_, E_, dV_, V_);
    for (long h = 0; h < group_; h++)
      for (long a = 0; a < C; a += STRIP)
        wide_product<BY_COLUMN, true>(STRIP, C - a, P_ + (h * C + a) * C + a, C, Y_ + (h * C + a) * V_, dV_ + a * V_, V_);
    for (long h = 0; h < group_; h++) this->give(c_.dq, g_ * group_ + h, t, n_, c_.D, dQ_ + h * C * D_, D_);
    this->give(c_.dk, g_, t, n_, c_.D, dK_, D_);
    this->give(c_.dv, g_, t, n_, c_.Dv, dV_, V_);
    gate_gradient(t, after);
    for (long d = 0; d < c_.D; d++) scale_all(enter_[(C - 1) * D_ + d], E_ + d * V_, V_);
    for (long h = 0; h < group_; h++) multiply(X_ + (1 + h) * C * D_, enter_, scaled_ + h * C * D_, C * D_);
    wide_product<BY_COLUMN, true>(c_.D, group_ * C, scaled_, D_, Y_, E_, V_);
  }
  // The gradients of outputs become those of y, which is computed again.
  void through_norms(long t, const float* before) {
    weights();
    for (long h = 0; h < group_; h++) {
      sums(h, before, dV_);
      norms_[h].backward(t, n_, dV_, Y_ + h * C * V_);
    }
  }
  // pairs_ holds dP of the level; Qr_ and Kl_ its scaled rows
  void level_gradients(long s, long h) {
    wide_product<BY_ROW, false>(HALF, HALF, pairs_, HALF, Kl_, sum_, D_);
    for (long p = 0; p < HALF; p++) add_scaled(sum_ + p * D_, right_ + p * D_, dQ_ + (h * C + token(p, s) + s) * D_);
    wide_product<BY_COLUMN, false>(HALF, HALF, pairs_, HALF, Qr_, sum_, D_);
    for (long p = 0; p < HALF; p++) add_scaled(sum_ + p * D_, left_ + p * D_, dK_ + token(p, s) * D_);
  }
  void add_scaled(const float* x, const float* by, float* to) const {
    for (long d = 0; d < D_; d += W) store(to + d, load(x + d) * load(by + d) + load(to + d));
  }

  void gate_gradient(long t, const float* after) {
    for (long d = 0; d < c_.D; d++) sum_[d] = dot(E_ + d * V_, after + d * V_, V_);
    for (long i = n_ - 1; i >= 0; i--) {
      float* to = c_.d_gates + this->at_token(t + i) * c_.D;
      const bool border = this->begins(t + i);  // nothing comes across: neither state nor gradient
      for (long d = 0; d < c_.D; d++) {
        float x = sum_[d] - X_[i * D_ + d] * dK_[i * D_ + d];
        for (long h = 0; h < group_; h++) x += X_[((1 + h) * C + i) * D_ + d] * dQ_[(h * C + i) * D_ + d];
        to[d] = border ? 0.f : x;
        sum_[d] = border ? 0.f : x;
      }
    }
  }

  void write_nan(long chunk) {
    this->give_nan(chunk, dK_);
    float* to = c_.d_gates + this->at_token(chunk * C) * c_.D;
    std::fill(to, to + this->tokens(chunk) * c_.D, NOT_A_NUMBER);
  }
};

}  // namespace matrix

template <class T>
static void gla_forward(const Gla& c) { matrix_forward<matrix::GlaItem<T>, T>(c); }
template <class T>
static void gla_backward(const Gla& c) { matrix_backward<matrix::GlaItem<T>, T>(c); }

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
