// Exact search by a scan: the k rows of a matrix with the largest scores, for each of many queries.
//
//   score(q, n) = a_q · scale_n · (q · c_n) + bias_n        c_n int8, q int16      (bits = 8)
//   score(q, n) = q · c_n + bias_n                          float32                (bits = 32)
//
// With bias −‖k‖²/2 the order of scores is the order of squared distances. Products of int8 and int16 are summed in int32
// without rounding: ops/search.py chooses the queries' scale so that no sum overflows. Larger scores come first, and of
// equal ones the smaller row: what is found depends neither on threads nor on which queries share a call.
#pragma once
#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>
#include <vector>

#include "work.h"

namespace spanformer {
namespace SPANFORMER_ISA {
namespace scanning {

constexpr long BLOCK = 64;  // rows whose scores are computed for all queries before they are compared
constexpr long TILE = 4;    // rows whose sums are formed together
constexpr long MANY = W == 16 ? 4 : 2;  // queries that share a loaded row
static_assert(BLOCK % W == 0 && BLOCK % TILE == 0, "a block is a whole number of vectors and of tiles");

template <class T>
struct Quad {
  T at[TILE];
};

#if defined(SPANFORMER_USE_AVX512) || defined(SPANFORMER_USE_AVX2)
#if defined(SPANFORMER_USE_AVX512)
SPANFORMER_INLINE __m256i half(vi a) {
  return _mm256_add_epi32(_mm512_castsi512_si256((__m512i)a), _mm512_extracti64x4_epi64((__m512i)a, 1));
}
SPANFORMER_INLINE __m256 half(vf a) {
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)a), _mm512_extractf32x8_ps((__m512)a, 1));
}
#else
SPANFORMER_INLINE __m256i half(vi a) { return (__m256i)a; }
SPANFORMER_INLINE __m256 half(vf a) { return (__m256)a; }
#endif
SPANFORMER_INLINE Quad<int32_t> sums(const vi* a) {
  const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(half(a[0]), half(a[1])), _mm256_hadd_epi32(half(a[2]), half(a[3])));
  Quad<int32_t> r;
  const __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(r.at), t);
  return r;
}
SPANFORMER_INLINE Quad<float> sums(const vf* a) {
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(half(a[0]), half(a[1])), _mm256_hadd_ps(half(a[2]), half(a[3])));
  Quad<float> r;
  _mm_storeu_ps(r.at, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  return r;
}
#else
SPANFORMER_INLINE Quad<int32_t> sums(const vi* a) {
  Quad<int32_t> r;
  for (long n = 0; n < TILE; n++) {
    r.at[n] = 0;
    for (int i = 0; i < W; i++) r.at[n] += a[n][i];
  }
  return r;
}
SPANFORMER_INLINE Quad<float> sums(const vf* a) {
  Quad<float> r;
  for (long n = 0; n < TILE; n++) r.at[n] = sum(a[n]);
  return r;
}
#endif

// One step along a row: STEP numbers of it, times as many of a query, added to W partial sums.
struct Floats {
  typedef float Key;
  typedef float Query;
  typedef float Sum;
  typedef vf Vec;
  static constexpr long STEP = W;
  static inline __attribute__((always_inline)) vf key(const float* p) { return load(p); }
  static inline __attribute__((always_inline)) vf query(const float* p) { return load(p); }
  static inline __attribute__((always_inline)) vf add(vf sum, vf key, vf query) { return sum + key * query; }
};

typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef int16_t vs_any __attribute__((vector_size(W * 4), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(W * 2)));

template <bool VNNI>
struct Bytes {
  typedef int8_t Key;
  typedef int16_t Query;
  typedef int32_t Sum;
  typedef vi Vec;
  static constexpr long STEP = 2 * W;
  static inline __attribute__((always_inline)) vs key(const int8_t* p) {
#if defined(SPANFORMER_USE_AVX512)
    return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(SPANFORMER_USE_AVX2)
    return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vb r;
    std::memcpy(&r, p, sizeof r);
    return __builtin_convertvector(r, vs);
#endif
  }
  static inline __attribute__((always_inline)) vs query(const int16_t* p) {
    return *reinterpret_cast<const vs_any*>(p);
  }
  static inline __attribute__((always_inline)) vi add(vi sum, vs key, vs query) {
#if defined(SPANFORMER_USE_AVX512)
    if (VNNI) {  // as assembly: the file is compiled for processors without it, too
      __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(key), "v"(query));
      return sum;
    }
    return (vi)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)key, (__m512i)query));
#elif defined(SPANFORMER_USE_AVX2)
    return (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)key, (__m256i)query));
#else
    for (int i = 0; i < W; i++) sum[i] += (int32_t)key[2 * i] * query[2 * i] + (int32_t)key[2 * i + 1] * query[2 * i + 1];
    return sum;
#endif
  }
};

static inline bool has_vnni() {
#if defined(SPANFORMER_USE_AVX512)
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has;
#else
  return false;
#endif
}

// The sums of TILE rows and COUNT queries, to to[query · BLOCK + row]; a query has `padded` numbers.
template <class Kind, long COUNT>
static inline void tile(const typename Kind::Key* const* rows, const typename Kind::Query* queries, long padded,
                        typename Kind::Sum* to) {
  typename Kind::Vec acc[COUNT][TILE] = {};
  for (long d = 0; d < padded; d += Kind::STEP) {
    const auto r0 = Kind::key(rows[0] + d), r1 = Kind::key(rows[1] + d);
    const auto r2 = Kind::key(rows[2] + d), r3 = Kind::key(rows[3] + d);
    for (long q = 0; q < COUNT; q++) {
      const auto x = Kind::query(queries + q * padded + d);
      acc[q][0] = Kind::add(acc[q][0], r0, x);
      acc[q][1] = Kind::add(acc[q][1], r1, x);
      acc[q][2] = Kind::add(acc[q][2], r2, x);
      acc[q][3] = Kind::add(acc[q][3], r3, x);
    }
  }
  for (long q = 0; q < COUNT; q++) {
    const auto found = sums(acc[q]);
    std::memcpy(to + q * BLOCK, found.at, sizeof found.at);
  }
}

// Short rows: a block's rows side by side, so that no sum runs across a vector. A vector holds, of W rows, a pair of
// numbers of each: of numbers 4j … 4j + 3 the even ones, then the odd ones, which takes a shift each. Sums of whole
// numbers do not depend on the order, so both ways give the same.
constexpr long SHORT = 128;  // numbers of a row, padded
constexpr long SIDE = 4;     // vectors of rows that share a query's pair

static inline void lay_side_by_side(const int8_t* const* rows, long padded, int32_t* to) {
  for (long i = 0; i < TILE; i++)
    for (long d = 0; d < padded; d += 4) std::memcpy(to + d / 2 * BLOCK + i, rows[i] + d, 4);
}

static inline void split_pairs(long padded, int32_t* all) {
  for (long d = 0; d < padded; d += 4) {
    int32_t* even = all + d / 2 * BLOCK;
    for (long i = 0; i < BLOCK; i += W) {
      vs x;
      std::memcpy(&x, even + i, sizeof x);
      const vs low = (x << 8) >> 8, high = x >> 8;
      std::memcpy(even + i, &low, sizeof low);
      std::memcpy(even + BLOCK + i, &high, sizeof high);
    }
  }
}

// The sums of a block's rows, laid side by side, and COUNT queries, whose pairs are in the same order.
SPANFORMER_INLINE vs side(const int16_t* from, long n) { return *reinterpret_cast<const vs_any*>(from + 2 * n * W); }
template <class Kind, long COUNT>
static inline void side_tile(const int32_t* rows, const int32_t* const* queries, long padded, int32_t* to) {
  for (long i = 0; i < BLOCK; i += SIDE * W) {
    vi acc[COUNT][SIDE] = {};
    for (long p = 0; p < padded / 2; p++) {
      const int16_t* from = reinterpret_cast<const int16_t*>(rows + p * BLOCK + i);
      const vs r[SIDE] = {side(from, 0), side(from, 1), side(from, 2), side(from, 3)};
      for (long q = 0; q < COUNT; q++) {
        const vs x = (vs)(vi{} + queries[q][p]);
        for (long n = 0; n < SIDE; n++) acc[q][n] = Kind::add(acc[q][n], r[n], x);
      }
    }
    for (long q = 0; q < COUNT; q++) std::memcpy(to + q * BLOCK + i, acc[q], sizeof acc[q]);
  }
}

struct Entry {
  float score;
  int64_t row;
};
static inline bool before(const Entry& a, const Entry& b) {
  return a.score > b.score || (a.score == b.score && a.row < b.row);
}

// A score that k rows of a matrix reach, for each query: what is below it is none of the k best. Parts of the matrix
// share it, so that only the first ones have to keep more than they need. What is found does not depend on when.
typedef std::vector<std::atomic<float>> Reached;

// The k first of the entries that were added, in no order, and up to k others.
class Best {
 public:
  explicit Best(long k) : k_(k) {}
  float least() const { return last_.score; }
  void share(std::atomic<float>& reached) const {
    float seen = reached.load(std::memory_order_relaxed);
    while (seen < least() && !reached.compare_exchange_weak(seen, least(), std::memory_order_relaxed)) {
    }
  }
  void add(const Entry& e) {
    if (!before(e, last_)) return;
    held_.push_back(e);
    if ((long)held_.size() == 2 * k_ + BLOCK) cut();
  }
  const std::vector<Entry>& held() const { return held_; }

 private:
  void cut() {
    std::nth_element(held_.begin(), held_.begin() + (k_ - 1), held_.end(), before);
    held_.resize(k_);
    last_ = held_.back();
  }
  long k_;
  Entry last_{-std::numeric_limits<float>::infinity(), -1};  // what is not before it is none of the k
  std::vector<Entry> held_;
};

// Rows [from, to) of matrix b for all its queries.
template <class Kind>
class Part {
  typedef typename Kind::Key Key;
  typedef typename Kind::Sum Sum;

 public:
  Part(const Scan& c, long b, long from, long to, Reached& reached)
      : c_(c), b_(b), from_(from), to_(to), reached_(&reached), found_(c.Q, Best(c.k)) {}
  void run() {
    keys_ = static_cast<const Key*>(c_.keys) + b_ * c_.keys_batch;
    queries_ = static_cast<const typename Kind::Query*>(c_.queries) + b_ * c_.Q * c_.padded;
    sums_.resize(c_.Q * BLOCK);
    if (side_by_side()) pair_queries();
    spare_.resize(TILE * c_.padded);
    for (long row = from_; row < to_; row += BLOCK) block(row, std::min(BLOCK, to_ - row));
  }
  const Best& best(long q) const { return found_[q]; }

 private:
  void block(long row, long n) {
    long q = 0;
    if (side_by_side()) q = short_rows(row, n);
    for (; q + MANY <= c_.Q; q += MANY)
      for (long r = 0; r < n; r += TILE) tile<Kind, MANY>(rows(row + r), query(q), c_.padded, &sums_[q * BLOCK + r]);
    for (; q < c_.Q; q++)
      for (long r = 0; r < n; r += TILE) tile<Kind, 1>(rows(row + r), query(q), c_.padded, &sums_[q * BLOCK + r]);
    const float* bias = c_.bias ? c_.bias + b_ * c_.row_batch + row : nullptr;
    const float* scales = c_.scales ? c_.scales + b_ * c_.row_batch + row : nullptr;
    for (long i = 0; i < BLOCK; i++) {
      bias_[i] = bias && i < n ? bias[i] : 0.f;
      scale_[i] = i >= n ? 0.f : scales ? scales[i] : 1.f;
    }
    for (q = 0; q < c_.Q; q++) select(q, row, n);
  }

  // With vectors of 8 or 4 lanes, rows by themselves are faster: there are too few registers.
  bool side_by_side() const {
    return W == 16 && std::is_same<Key, int8_t>::value && c_.padded <= SHORT && c_.Q >= MANY;
  }

  void pair_queries() {
    pairs_.resize(c_.Q * c_.padded / 2);
    side_.resize(BLOCK * c_.padded / 2);
    for (long q = 0; q < c_.Q; q++)
      for (long d = 0; d < c_.padded; d += 4) {
        const typename Kind::Query* from = query(q) + d;
        const typename Kind::Query order[4] = {from[0], from[2], from[1], from[3]};
        std::memcpy(&pairs_[(q * c_.padded + d) / 2], order, 2 * sizeof(int32_t));
      }
  }

  // The sums of as many queries as groups of MANY hold; returns their number.
  long short_rows(long row, long n) {
    if constexpr (std::is_same<Key, int8_t>::value) {
      for (long r = 0; r < BLOCK; r += TILE) lay_side_by_side(rows(row + std::min(r, n - 1)), c_.padded, &side_[r]);
      split_pairs(c_.padded, side_.data());
      long q = 0;
      for (; q + MANY <= c_.Q; q += MANY) {
        const int32_t* at[MANY];
        for (long i = 0; i < MANY; i++) at[i] = &pairs_[(q + i) * c_.padded / 2];
        side_tile<Kind, MANY>(side_.data(), at, c_.padded, &sums_[q * BLOCK]);
      }
      return q;
    }
    return 0;
  }

  // A step may read past a row's end, where the queries are 0; past the matrix's end there is nothing to read.
  const Key* const* rows(long row) {
    const long end = (c_.N - 1) * c_.keys_row + c_.D;
    for (long i = 0; i < TILE; i++) {
      const long n = std::min(row + i, to_ - 1);
      at_[i] = keys_ + n * c_.keys_row;
      if (n * c_.keys_row + c_.padded <= end && !finite_needed()) continue;
      Key* copy = &spare_[i * c_.padded];
      std::copy(at_[i], at_[i] + c_.D, copy);
      std::fill(copy + c_.D, copy + c_.padded, Key(0));
      at_[i] = copy;
    }
    return at_;
  }
  // 0 times the next row is 0, unless that row holds an infinity or NaN.
  bool finite_needed() const { return !std::is_same<Key, int8_t>::value && c_.D % Kind::STEP; }

  const typename Kind::Query* query(long q) const { return queries_ + q * c_.padded; }

  void select(long q, long row, long n) {
    Best& best = found_[q];
    const float a = c_.query_scales ? c_.query_scales[b_ * c_.Q + q] : 1.f;
    const Sum* from = &sums_[q * BLOCK];
    std::atomic<float>& reached = (*reached_)[b_ * c_.Q + q];
    const float was = best.least();
    float score[BLOCK], least = std::max(was, reached.load(std::memory_order_relaxed));
    for (long i = 0; i < BLOCK; i += W) {
      typename Kind::Vec x;
      std::memcpy(&x, from + i, sizeof x);
      const vf s = __builtin_convertvector(x, vf) * (load(scale_ + i) * set1(a)) + load(bias_ + i);
      uint32_t good = lanes((vi)(s >= set1(least)));
      if (!good) continue;
      store(score + i, s);
      for (; good; good &= good - 1) {
        const long j = i + __builtin_ctz(good);
        if (j < n) best.add({score[j], row + j});
      }
      least = std::max(least, best.least());
    }
    if (best.least() > was) best.share(reached);
  }

  const Scan& c_;
  long b_, from_, to_;
  Reached* reached_;
  std::vector<Best> found_;
  const Key* keys_ = nullptr;
  const typename Kind::Query* queries_ = nullptr;
  std::vector<Sum> sums_;
  std::vector<int32_t> pairs_;
  std::vector<int32_t> side_;
  std::vector<Key> spare_;
  const Key* at_[TILE] = {};
  float scale_[BLOCK] = {}, bias_[BLOCK] = {};
};

template <class Kind>
static void scan(const Scan& c) {
  // Several parts a thread, so that a thread that waits for a busy core has fewer.
  const long most = std::max(1L, c.threads > 1 ? 4 * c.threads / std::min((long)c.B, 4 * c.threads) : 1L);
  const long size = round_up(std::max(2048L, (c.N + most - 1) / most), BLOCK);
  Reached reached(c.B * c.Q);
  for (auto& each : reached) each.store(-std::numeric_limits<float>::infinity(), std::memory_order_relaxed);
  std::vector<Part<Kind>> parts;
  std::vector<long> first(c.B + 1, 0);
  for (long b = 0; b < c.B; b++) {
    for (long from = 0; from < c.counts[b]; from += size)
      parts.emplace_back(c, b, from, std::min(from + size, (long)c.counts[b]), reached);
    first[b + 1] = (long)parts.size();
  }
  const double cost = (double)c.B * c.N * c.Q * c.D;
  for_items((long)parts.size(), c.threads, cost, [&](long n) { parts[n].run(); });
  for_items(c.B * c.Q, c.threads, (double)parts.size() * c.Q * c.k * 16, [&](long item) {
    const long b = item / c.Q, q = item % c.Q;
    std::vector<Entry> all;
    for (long n = first[b]; n < first[b + 1]; n++) {
      const std::vector<Entry>& held = parts[n].best(q).held();
      all.insert(all.end(), held.begin(), held.end());
    }
    const long count = std::min((long)all.size(), (long)c.k);
    std::partial_sort(all.begin(), all.begin() + count, all.end(), before);
    for (long i = 0; i < c.k; i++) {
      c.scores[item * c.k + i] = i < count ? all[i].score : -std::numeric_limits<float>::infinity();
      c.ids[item * c.k + i] = i < count ? all[i].row : -1;
    }
  });
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;
  if (exponent == 0) {  // zero and subnormal numbers: fraction · 2^−24
    const float x = (float)fraction * 5.9604644775390625e-8f;
    return sign ? -x : x;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
static inline float as_float(float x) { return x; }
static inline float as_float(int8_t x) { return x; }
static inline float as_float(uint16_t x) { return half_to_float(x); }

constexpr long EIGHT = 8;
template <class Key>
SPANFORMER_INLINE void read_eight(const Key* from, float* to) {
  for (long i = 0; i < EIGHT; i++) to[i] = as_float(from[i]);
}
#if defined(__F16C__)
SPANFORMER_INLINE void read_eight(const uint16_t* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#endif

template <class Key>
static double distance(const float* q, const Key* key, double scale, long size) {
  double acc[EIGHT] = {};
  float k[EIGHT];
  long d = 0;
  for (; d + EIGHT <= size; d += EIGHT) {
    read_eight(key + d, k);
    for (long i = 0; i < EIGHT; i++) {
      const double x = (double)q[d + i] - scale * (double)k[i];
      acc[i] += x * x;
    }
  }
  for (; d < size; d++) {
    const double x = (double)q[d] - scale * (double)as_float(key[d]);
    acc[d % EIGHT] += x * x;
  }
  return ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]));
}

template <class Key>
static void rescore(const Rescore& c) {
  for_items(c.Q, c.threads, (double)c.Q * c.m * c.D * 4, [&](long q) {
    for (long n = 0; n < c.m; n++) {
      const int64_t row = c.ids[q * c.m + n];
      double* to = c.out + q * c.m + n;
      if (row < 0) {
        *to = std::numeric_limits<double>::infinity();
        continue;
      }
      const Key* key = static_cast<const Key*>(c.keys) + row * c.keys_row;
      *to = distance(c.queries + q * c.D, key, c.scales ? (double)c.scales[row] : 1.0, c.D);
    }
  });
}

}  // namespace scanning

static void scan_all(const Scan& c) {
  if (c.bits == 32)
    scanning::scan<scanning::Floats>(c);
  else if (scanning::has_vnni())
    scanning::scan<scanning::Bytes<true>>(c);
  else
    scanning::scan<scanning::Bytes<false>>(c);
}

static void rescore_all(const Rescore& c) {
  if (c.bits == 32)
    scanning::rescore<float>(c);
  else if (c.bits == 16)
    scanning::rescore<uint16_t>(c);
  else
    scanning::rescore<int8_t>(c);
}

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
