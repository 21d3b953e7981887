// What a layer has around an operation with a matrix state, done chunk by chunk with it, so that nothing of it is stored:
//   before it   x_t ← SiLU(Σ_{m<conv} w_m ⊙ x_{t−m}),  q and k then divided by their length        (ShortConvolution)
//   behind it   out = y / rms(y) ⊙ w ⊙ SiLU(gate)                                                  (GatedNorm)
// Padding is passed over, as if it were not there; x_{t−m} counts as 0 where it belongs to an earlier document.
#pragma once
#include "exact.h"
#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {
namespace matrix {

constexpr float SHORTEST = 1e-6f;  // a vector's length; what is shorter is divided by this

// e^x for x ≤ 0, to half a unit more than rounding: norms that follow amplify what it is off. Coefficients of 2^f by Cephes.
SPANFORMER_INLINE vf exact_exp(vf x) {
  x = vmax(x, set1(-87.f));
  const vf magic = set1(12582912.f), t = x * set1(LOG2E) + magic;  // as vexp2
  const vf f = (x * set1(LOG2E) - (t - magic)) + x * set1(1.92596299e-8f);  // what float lacks of log₂ e
  vf p = set1(1.535336188e-4f);
  p = p * f + set1(1.339887440e-3f);
  p = p * f + set1(9.618437357e-3f);
  p = p * f + set1(5.550332471e-2f);
  p = p * f + set1(2.402264791e-1f);
  p = p * f + set1(6.931472029e-1f);
  p = p * f + set1(1.f);
  return (vf)((vi)p + ((vi)t << 23));
}

struct Silu {
  vf value, slope;
  explicit Silu(vf x) {
    const vf e = exact_exp(x < vf{} ? x : -x), one = set1(1.f);  // no exponent above 0
    const vf sigmoid = (x < vf{} ? e : one) / (one + e);
    value = x * sigmoid;
    slope = sigmoid * (one + x * (one - sigmoid));
  }
};

// The ranks of a text's tokens, which count those that are no padding, and the document of each.
class Tokens {
 public:
  Tokens(const uint8_t* padding, const uint8_t* starts, long tokens) : padded_(padding), count_(tokens) {
    if (starts) {
      run_.resize(tokens);
      for (long t = 1; t < tokens; t++) run_[t] = run_[t - 1] + starts[t];
    }
    if (!padding) return;
    for (long t = 0; t < tokens; t++)
      if (!padding[t]) real_.push_back(t);
    count_ = (long)real_.size();
  }
  long from(long t) const {  // the rank of the first token from t on
    return padded_ ? (long)(std::lower_bound(real_.begin(), real_.end(), t) - real_.begin()) : std::min(count_, t);
  }
  long token(long rank) const { return padded_ ? real_[rank] : rank; }
  // Bit m: whether the token m ranks before this one counts for it. What came before the call belongs to its first document.
  uint64_t earlier(long rank, long conv) const { return run_.empty() ? ~0ull : same(rank, conv, -1); }
  uint64_t later(long rank, long conv) const { return run_.empty() ? ~0ull : same(rank, conv, 1); }

 private:
  bool padded_;
  long count_;
  std::vector<long> run_, real_;
  uint64_t same(long rank, long conv, long way) const {
    const long mine = run_[token(rank)];
    uint64_t found = 0;
    for (long m = 0; m < conv; m++) {
      const long r = rank + way * m;
      if (r < count_ && (r < 0 ? 0 : run_[token(r)]) == mine) found |= 1ull << m;
    }
    return found;
  }
};

// One head of q, k or v.
struct ConvolvedHead {
  Rows from, gradient;
  long b, h, size, width, conv;  // width: size in whole panels; conv: at most 64
  float unit;                    // the length that rows are given, or 0: they keep theirs
  const float *weight, *tail;    // [conv][size] of this head, the newest token's last; [conv − 1][size], or null for zeros
  float* d_given;                // [conv][size]
};

template <class T>
class ShortConvolution : ConvolvedHead {
 public:
  explicit ShortConvolution(const ConvolvedHead& head) : ConvolvedHead(head) {}
  size_t scratch(long chunk) const { return (size_t)width * (conv + 1 + 2 * (conv - 1 + chunk)); }
  void begin(float* memory, long chunk) {
    w_ = memory, slope_ = w_ + conv * width, raw_ = slope_ + width, d_sum_ = raw_ + (conv - 1 + chunk) * width;
    for (long m = 0; m < conv; m++)
      for (long d = 0; d < width; d++) w_[m * width + d] = d < size ? weight[m * size + d] : 0.f;
    std::memset(d_sum_, 0, sizeof(float) * (conv - 1) * width);
    if (d_given) d_weight_.assign(conv * width, 0.0);
  }

  // Rows of tokens t … t + n − 1, whose ranks are first … last − 1.
  void forward(const Tokens& tokens, long first, long last, long t, long n, float* to) {
    read(tokens, first, last);
    if (last - first < n) std::memset(to, 0, sizeof(float) * n * width);
    for (long r = first; r < last; r++) {
      const uint64_t seen = tokens.earlier(r, conv);
      float* x = to + (tokens.token(r) - t) * width;
      for (long d = 0; d < width; d += W) store(x + d, Silu(sum_at(r - first, seen, d)).value);
      if (unit == 0.f) continue;
      const vf by = set1(unit / std::max(std::sqrt(dot(x, x, width)), SHORTEST));
      for (long d = 0; d < width; d += W) store(x + d, load(x + d) * by);
    }
  }

  // From the gradient g of those rows to the one of `from`; chunks come in reverse.
  void backward(const Tokens& tokens, long first, long last, long t, long n, const float* g) {
    std::memmove(d_sum_ + (last - first) * width, d_sum_, sizeof(float) * (conv - 1) * width);
    read(tokens, first, last);
    for (long r = first; r < last; r++)
      through_silu(r - first, tokens.earlier(r, conv), g + (tokens.token(r) - t) * width);
    add_weights(tokens, first, last);
    give(tokens, first, last, t, n);
  }
  void give_nan(const Tokens& tokens, long first, long last, long t, long n) {
    std::fill(d_sum_, d_sum_ + (last - first + conv - 1) * width, std::numeric_limits<float>::quiet_NaN());
    std::fill(d_weight_.begin(), d_weight_.end(), std::numeric_limits<double>::quiet_NaN());
    give(tokens, first, last, t, n);
  }
  void end() const {
    for (long m = 0; m < conv; m++)
      for (long d = 0; d < size; d++) d_given[m * size + d] = (float)d_weight_[m * width + d];
  }

 private:
  float *w_, *slope_, *raw_, *d_sum_;  // raw_ [conv − 1 + chunk][width]; d_sum_: of the chunk, and of conv − 1 tokens after it
  std::vector<double> d_weight_;       // [conv][width]

  void read(const Tokens& tokens, long first, long last) {
    for (long r = first - conv + 1; r < last; r++) {
      float* to = raw_ + (r - first + conv - 1) * width;
      if (r >= 0) {
        const T* x = row<T>(from, b, h, tokens.token(r));
        for (long d = 0; d < size; d++) to[d] = to_float(x[d]);
      } else {
        for (long d = 0; d < size; d++) to[d] = tail ? tail[(r + conv - 1) * size + d] : 0.f;
      }
      for (long d = size; d < width; d++) to[d] = 0.f;
    }
  }
  vf sum_at(long i, uint64_t seen, long d) const {
    const float* x = raw_ + (i + conv - 1) * width + d;
    vf total = vf{};
    for (long m = 0; m < conv; m++)
      if (seen >> m & 1) total = load(w_ + (conv - 1 - m) * width + d) * load(x - m * width) + total;
    return total;
  }
  void through_silu(long i, uint64_t seen, const float* g) {
    float* to = d_sum_ + i * width;
    vf squares = vf{}, inner = vf{};
    for (long d = 0; d < width; d += W) {
      const Silu silu(sum_at(i, seen, d));
      store(to + d, silu.value);
      store(slope_ + d, silu.slope);
      squares = silu.value * silu.value + squares;
      inner = silu.value * load(g + d) + inner;
    }
    float by = 1.f, along = 0.f;
    if (unit != 0.f) {
      const float length = std::sqrt(sum(squares));
      by = unit / std::max(length, SHORTEST);
      along = length > SHORTEST ? sum(inner) / (length * length) : 0.f;
    }
    for (long d = 0; d < width; d += W)
      store(to + d, (load(g + d) - load(to + d) * set1(along)) * set1(by) * load(slope_ + d));
  }
  void add_weights(const Tokens& tokens, long first, long last) {
    uint64_t seen[64];  // a chunk has 32 tokens
    for (long r = first; r < last; r++) seen[r - first] = tokens.earlier(r, conv);
    for (long m = 0; m < conv; m++)
      for (long d = 0; d < width; d += W) {
        vf total = vf{};
        for (long i = 0; i < last - first; i++)
          if (seen[i] >> m & 1)
            total = load(d_sum_ + i * width + d) * load(raw_ + (i + conv - 1 - m) * width + d) + total;
        double* to = d_weight_.data() + (conv - 1 - m) * width + d;
        for (int e = 0; e < W; e++) to[e] += total[e];
      }
  }
  void give(const Tokens& tokens, long first, long last, long t, long n) {
    for (long i = 0, r = first; i < n; i++) {
      T* to = row_of<T>(gradient, b, h, t + i);
      if (r == last || tokens.token(r) != t + i) {  // padding
        for (long d = 0; d < size; d++) put(&to[d], 0.f);
        continue;
      }
      const uint64_t seen = tokens.later(r, conv);
      for (long d = 0; d < width; d += W) {
        const float* g = d_sum_ + (r - first) * width + d;
        vf total = vf{};
        for (long m = 0; m < conv; m++)
          if (seen >> m & 1) total = load(w_ + (conv - 1 - m) * width + d) * load(g + m * width) + total;
        store(slope_ + d, total);
      }
      for (long d = 0; d < size; d++) put(&to[d], slope_[d]);
      r++;
    }
  }
};

// The outputs of one query head.
struct GatedHead {
  Rows gate, d_gate;  // float32
  const float* w;     // [size]
  float* d_given;     // [size], or null
  long b, h, size, width;
  float eps;
};

// Rows y become y / rms(y) ⊙ w ⊙ SiLU(gate).
class GatedNorm : GatedHead {
 public:
  explicit GatedNorm(const GatedHead& head) : GatedHead(head) {}
  size_t scratch() const { return 3 * (size_t)width; }
  void begin(float* memory) {
    w_ = memory, gate_ = w_ + width, spare_ = gate_ + width;
    for (long d = 0; d < width; d++) w_[d] = d < size ? w[d] : 0.f, gate_[d] = 0.f;
    if (d_given) d_w_.assign(width, 0.0);
  }
  void forward(long t, long n, float* y) {
    for (long i = 0; i < n; i++, y += width) {
      read(t + i);
      const vf by = set1(inverse_rms(y));
      for (long d = 0; d < width; d += W) store(y + d, load(y + d) * by * load(w_ + d) * Silu(load(gate_ + d)).value);
    }
  }
  // g: the gradient of those rows, which becomes the one of y.
  void backward(long t, long n, const float* y, float* g) {
    for (long i = 0; i < n; i++, y += width, g += width) {
      read(t + i);
      const vf by = set1(inverse_rms(y));
      vf inner = vf{};
      for (long d = 0; d < width; d += W) {
        const Silu silu(load(gate_ + d));
        const vf given = load(g + d), unit = load(y + d) * by, weighed = given * load(w_ + d);
        store(gate_ + d, weighed * unit * silu.slope);
        const vf of_w = given * silu.value * unit, of_unit = weighed * silu.value;
        store(spare_ + d, of_w);
        store(g + d, of_unit);
        inner = of_unit * unit + inner;
      }
      float* to = row_of<float>(d_gate, b, h, t + i);
      for (long d = 0; d < size; d++) to[d] = gate_[d], d_w_[d] += spare_[d];
      const vf along = set1(sum(inner) / (float)size) * by;
      for (long d = 0; d < width; d += W) store(g + d, (load(g + d) - load(y + d) * along) * by);
    }
  }
  void give_nan(long t, long n) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (long i = 0; i < n; i++) std::fill_n(row_of<float>(d_gate, b, h, t + i), size, nan);
    std::fill(d_w_.begin(), d_w_.end(), (double)nan);
  }
  void end() const {
    for (long d = 0; d < size; d++) d_given[d] = (float)d_w_[d];
  }

 private:
  float *w_, *gate_, *spare_;
  std::vector<double> d_w_;
  void read(long t) { std::memcpy(gate_, row<float>(gate, b, h, t), sizeof(float) * size); }
  float inverse_rms(const float* y) const { return 1.f / std::sqrt(dot(y, y, width) / (float)size + eps); }
};

}  // namespace matrix
}  // namespace SPANFORMER_ISA
}  // namespace spanformer
