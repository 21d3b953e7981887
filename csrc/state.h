// What operations with a matrix state S [D][Dv] share: chunks of C tokens, the stack of keys and queries, the states from
// which a backward pass starts over. One item is one key/value head of one text, done by one thread from its first token
// to its last.
#pragma once
#include <limits>
#include <utility>

#include "gemm.h"
#include "layer.h"

namespace spanformer {
namespace SPANFORMER_ISA {
namespace matrix {

constexpr long C = 32;  // tokens of a chunk, counted from the call's first: what a row is does not depend on later ones
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
static_assert(C % PANEL == 0, "a chunk is a whole number of panels");
constexpr long STRIP = 8;  // rows of a triangle that one product takes: what lies above the diagonal is mostly left out

template <Layout LAYOUT, bool ADD>
static inline void wide_product(long M, long K, const float* A, long lda, const float* B, float* X, long width) {
  for (long n = 0; n < width; n += PANEL) product<LAYOUT, ADD>(M, K, A, lda, B + n, width, X + n, width);
}

// rows × columns to columns × rows
static inline void turn(const float* s, long rows, long columns, float* d) { transpose(s, columns, d, rows, rows, columns); }

static inline void add_row(float by, const float* x, float* to, long width) {
  const vf f = set1(by);
  for (long d = 0; d < width; d += W) store(to + d, f * load(x + d) + load(to + d));
}
static inline void scale_rows(long rows, const float* by, float sign, float* X, long width) {
  for (long i = 0; i < rows; i++) {
    const vf f = set1(by[i] * sign);
    for (long d = 0; d < width; d += W) store(X + i * width + d, load(X + i * width + d) * f);
  }
}
static inline void scale_all(float by, float* X, long count) {
  const vf f = set1(by);
  for (long d = 0; d < count; d += W) store(X + d, load(X + d) * f);
}

template <class T, class Args>
class Item {
 protected:
  Item(const Args& c, long item)
      : c_(c), b_(item / c.Hkv), g_(item % c.Hkv), group_(c.H / c.Hkv), stack_((1 + c.H / c.Hkv) * C),
        D_(round_up(c.D, PANEL)), V_(round_up(c.Dv, PANEL)), chunks_((c.T + C - 1) / C), segment_(c.segment / C) {
    for (long h = g_ * group_; c.gate.data && h < (g_ + 1) * group_; h++)
      norms_.emplace_back(GatedHead{c.gate, c.d_gate, c.norm, c.d_norm ? c.d_norm + (b_ * c.H + h) * c.Dv : nullptr, b_, h,
                                    c.Dv, V_, (float)c.eps});
  }

  const Args& c_;
  const long b_, g_, group_, stack_, D_, V_, chunks_, segment_;
  long n_ = 0;          // tokens of the chunk
  float *S_, *E_;       // the state, and its gradient
  float *X_, *Vv_;      // keys and queries of a chunk, one below the other [stack][D]; values [C][V]
  std::vector<GatedNorm> norms_;  // of each query head, or none

  using Part = std::pair<float**, size_t>;
  void reserve(const std::vector<Part>& parts, size_t more = 0) {
    size_t all = more;
    for (const Part& part : parts) all += Arena::rounded(part.second);
    for (const GatedNorm& norm : norms_) all += Arena::rounded(norm.scratch());
    arena().reserve(all);
    for (const Part& part : parts) *part.first = arena().take(part.second);
    for (GatedNorm& norm : norms_) norm.begin(arena().take(norm.scratch()));
  }

  long at_state() const { return (b_ * c_.Hkv + g_) * c_.D * c_.Dv; }
  long at_token(long t) const { return (b_ * c_.Hkv + g_) * c_.T + t; }
  float* mark(long segment) const {
    const long segments = (chunks_ + segment_ - 1) / segment_;
    return c_.marks + ((b_ * c_.Hkv + g_) * segments + segment) * c_.D * c_.Dv;
  }
  bool begins(long t) const { return t > 0 && c_.starts && c_.starts[b_ * c_.T + t]; }

  void save(const float* from, float* to) const {
    for (long d = 0; d < c_.D; d++) std::memcpy(to + d * c_.Dv, from + d * V_, sizeof(float) * c_.Dv);
  }
  void restore(const float* from, float* to) const {  // zeros where there is none
    std::memset(to, 0, sizeof(float) * D_ * V_);
    for (long d = 0; from && d < c_.D; d++) std::memcpy(to + d * V_, from + d * c_.Dv, sizeof(float) * c_.Dv);
  }

  // n rows of memory into C rows of the scratch, zero beyond
  void take(const Rows& r, long h, long t, long n, long size, float* to, long width) const {
    for (long i = 0; i < n; i++) {
      const T* from = row<T>(r, b_, h, t + i);
      float* x = to + i * width;
      if constexpr (sizeof(T) == 4)
        std::memcpy(x, from, sizeof(float) * size);
      else
        for (long d = 0; d < size; d++) x[d] = to_float(from[d]);
      for (long d = size; d < width; d++) x[d] = 0.f;
    }
    if (n < C) std::memset(to + n * width, 0, sizeof(float) * (C - n) * width);
  }
  void give(const Rows& r, long h, long t, long n, long size, const float* from, long width) const {
    for (long i = 0; i < n; i++) {
      T* to = row_of<T>(r, b_, h, t + i);
      for (long d = 0; d < size; d++) put(&to[d], from[i * width + d]);
    }
  }
  void take_rows(long t, long n) {
    n_ = n;
    take(c_.k, g_, t, n, c_.D, X_, D_);
    for (long r = 0; r < group_; r++) take(c_.q, g_ * group_ + r, t, n, c_.D, X_ + (1 + r) * C * D_, D_);
    take(c_.v, g_, t, n, c_.Dv, Vv_, V_);
  }
  long tokens(long chunk) const { return std::min<long>(C, c_.T - chunk * C); }

  // outputs of query head r of the group, from y
  void give_out(long r, long t, long n, float* y) {
    if (!norms_.empty()) norms_[r].forward(t, n, y);
    give(c_.out, g_ * group_ + r, t, n, c_.Dv, y, V_);
  }
  // outputs of token i of the chunk, which is token t of the text, from the state after it
  void give_step(long i, long t, float* scratch) {
    for (long r = 0; c_.out.data && r < group_; r++) {
      const float* q = X_ + ((1 + r) * C + i) * D_;
      std::memset(scratch, 0, sizeof(float) * V_);
      for (long d = 0; d < c_.D; d++) add_row(q[d], S_ + d * V_, scratch, V_);
      give_out(r, t, 1, scratch);
    }
  }

  // What came after a number that is not finite has no gradient, and neither has what came before it.
  void give_nan(long chunk, float* scratch) {
    const long t = chunk * C, n = tokens(chunk);
    std::fill(scratch, scratch + C * std::max(D_, V_), NOT_A_NUMBER);
    for (long h = 0; h < group_; h++) give(c_.dq, g_ * group_ + h, t, n, c_.D, scratch, D_);
    give(c_.dk, g_, t, n, c_.D, scratch, D_);
    give(c_.dv, g_, t, n, c_.Dv, scratch, V_);
    for (GatedNorm& norm : norms_) norm.give_nan(t, n);
    std::fill(E_, E_ + D_ * V_, NOT_A_NUMBER);
  }
};

}  // namespace matrix

template <class Item, class T, class Args>
static void matrix_forward(const Args& c) {
  prefer_large_pages(c.out, c.B * c.H * c.T * c.Dv * (long)sizeof(T));
  for_items(c.B * c.Hkv, c.threads, (double)c.B * c.H * c.T * c.D * c.Dv, [&](long item) { Item(c, item).forward(); });
}

template <class Item, class T, class Args>
static void matrix_backward(const Args& c) {
  prefer_large_pages(c.dq, c.B * c.H * c.T * c.D * (long)sizeof(T));
  prefer_large_pages(c.dk, c.B * c.Hkv * c.T * c.D * (long)sizeof(T));
  prefer_large_pages(c.dv, c.B * c.Hkv * c.T * c.Dv * (long)sizeof(T));
  if (c.d_gate.data) prefer_large_pages(c.d_gate, c.B * c.H * c.T * c.Dv * (long)sizeof(float));
  for_items(c.B * c.Hkv, c.threads, (double)c.B * c.H * c.T * c.D * c.Dv, [&](long item) { Item(c, item).backward(); });
}
}  // namespace SPANFORMER_ISA
}  // namespace spanformer
