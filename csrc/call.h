// The C ABI: one attention call as a struct of plain numbers, every field 8 bytes wide. ops/c_layout.py has the same
// table: add or move a field there and in layout.h too.
// Strides count elements; the last axis of q, k, v, out and their gradients is contiguous.
#pragma once
#include <cstdint>

namespace spanformer {

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

struct Rows {  // a [B, heads, T, size] tensor
  void* data;
  int64_t batch, head, row;
};

struct Call {
  int64_t dtype, threads;
  int64_t B, H, Hkv, Tq, Tk, D, Dv;
  int64_t causal, shift;  // shift: subtracted from every distance (1 with the conventions of the original code)
  int64_t max_future;  // tables begin at distance −max_future; 0 and not causal: they are read at |d|
  double scale, ramp, dropout;
  Rows q, k, v, out;
  float* lse;            // [B, H, Tq] contiguous, natural log
  const int64_t* reach;  // [H] or null
  const float* span;     // null, [H] (dynamic = 0) or contiguous [B, H, Tq] (dynamic = 1)
  int64_t dynamic;
  const float* distance_bias;  // [H, bias_length] contiguous or null
  int64_t bias_length;
  const float* distance_vec;  // [1 or H, vec_length, D] contiguous or null; vec_head is 0 if heads share it
  int64_t vec_length, vec_head;
  const float* key_bias;  // [1 or B, H / key_bias_group, Tk] or null
  int64_t key_bias_batch, key_bias_head, key_bias_group;
  const float* key_span;  // [1 or B, 1 or H, Tk] or null; a stride is 0 if rows or heads share them
  int64_t key_span_batch, key_span_head;
  const int64_t *q_positions, *k_positions;  // [1 or B, T] or null; the batch stride is 0 if rows share them
  int64_t q_positions_batch, k_positions_batch;
  const int64_t *q_documents, *k_documents;
  int64_t q_documents_batch, k_documents_batch;
  // Positions in `orders` other orders, [orders, 1 or B, T] or null: a pair within reach in one of them is hidden.
  const int64_t *q_orders, *k_orders;
  int64_t orders, q_orders_order, q_orders_batch, k_orders_order, k_orders_batch;
  const float* sink_logits;  // [H] or null
  const int64_t *block_offsets, *block_columns, *block_mask_ids;
  const uint8_t* block_masks;  // [M, size, size]
  int64_t block_size, block_rows, block_head;
  const int64_t* seed;  // [1] or null
  // Dropout counters of heads [B, H], queries [1 or B, Tq] and keys [1 or B, Tk]; null: b·H + h, and the indices.
  const int64_t *drop_heads, *drop_queries, *drop_keys;
  int64_t drop_queries_batch, drop_keys_batch;
  // backward only
  Rows g, dq, dk, dv;
  const float* g_lse;     // [B, H, Tq] contiguous or null
  float* d_span;          // like span
  float* d_distance_bias; // like distance_bias
  float* d_distance_vec;  // like distance_vec
  float* d_key_bias;      // [B, H, Tk] contiguous
  float* d_sink_logits;         // [H]
  float* d_key_span;      // [B, H, Tk] contiguous
};

// One query per batch row against a ring of keys and values per key/value head.
// Head g of row b has `capacity[g]` slots from slot `first[g]` of that row on; the key at position p is in slot
// first[g] + p mod capacity[g]. The newest position of row b is newest[b] (−1: the row is empty). The first `sink_tokens`
// positions are in the slots just before first[g]: every query sees them, regardless of reach and span.
// Fields that change with every token come first, so that ops/kernel.py rewrites only those.
struct Decode {
  int64_t threads;
  Rows q, out;          // [B, H, 1, ·]
  float* lse;           // [B, H]
  Rows new_k, new_v;    // [B, Hkv, 1, ·] to write at the newest positions first; null: already written
  const float* span;
  int64_t dtype, bits;  // bits of keys and values: 8, 4, or 0 for the dtype
  int64_t B, H, Hkv, D, Dv;
  int64_t shift, sink_tokens;
  double scale, ramp;
  Rows k, v;                   // [B, slots, ·]: batch and row strides are used, the head stride is not
  // 8 bits: float [B, slots]. 4 bits: bfloat16 [B, 2 · groups, slots], steps before lows (nibbles.h). Else null.
  void *k_scale, *v_scale;
  int64_t slots;
  const int64_t *first, *capacity, *newest;  // [Hkv], [Hkv], [B]
  const int64_t* oldest;       // [B, Hkv] earlier positions are no longer held; null: all that fit are held
  const int64_t* reach;
  int64_t dynamic;
  const float* distance_bias;
  int64_t bias_length;
  const float* distance_vec;
  int64_t vec_length, vec_head;
  const float* sink_logits;
  // The newest recent_tokens of each row in 8 bits too, from position recent_since[b] on, in rings of their own; or null.
  const Decode* recent;
  int64_t recent_tokens;
  const int64_t* recent_since;
};

enum Normalize : int64_t { kSum = 1, kRms = 2, kClamped = 3 };

// Linear attention: features of queries and keys, and a state in the place of pairs (linear.h).
struct Linear {
  int64_t dtype, threads;
  int64_t B, H, Hkv, Tq, T, M, Dv;  // Tq: queries, of the last tokens; M: features
  int64_t normalize;            // 0: rows are not divided; by the denominator (rows below eps are 0), by their root mean
                                // square (eps is added to the mean square), or by the denominator, which is at least eps
  int64_t elu;                  // features are elu + 1 of a and b, and not a and b themselves
  double ramp, eps;
  Rows a, b, v, out;
  float* den;               // [B, H, Tq] contiguous: the denominator, or the root mean square
  const float* decay;       // [1 or B, Hkv, 1 or T] or null; a stride is 0 where texts or tokens share it
  int64_t decay_batch, decay_head, decay_row;
  const float* near;        // [1 or B, H, 1 or Tq] or null; a stride is 0 where texts or tokens share it
  int64_t near_batch, near_head, near_row;
  const uint8_t* starts;    // [B, T] contiguous or null: 1 where a document begins
  const float *s0, *z0;     // [B, Hkv, M, Dv] and [B, Hkv, M] contiguous or null: the state before the first token
  float *s1, *z1;           // after the last; null: not wanted
  // backward only
  Rows g, da, db, dv;
  const float* g_den;         // [B, H, Tq] contiguous or null
  const float *g_s1, *g_z1;   // like s1 and z1, or null
  float *d_decay, *d_near;    // [B, Hkv, T], [B, H, Tq] contiguous or null
  float *d_s0, *d_z0;         // like s0 and z0, or null
};

// The gated delta rule over one text a row, head by head (csrc/delta.h). Numbers beside q, k, v and out are float32 and
// contiguous.
struct Delta {
  int64_t dtype, threads;
  int64_t B, H, Hkv, T, D, Dv;
  int64_t segment;  // tokens between two marks, a multiple of the chunk
  Rows q, k, v, out;
  const float *beta, *decay;  // [B, Hkv, T]; decay may be null
  const uint8_t* starts;      // [B, T] or null: 1 where a document begins; the first token's is not read
  const float* state;         // [B, Hkv, D, Dv] before the first token, or null for zeros
  float* final_state;         // [B, Hkv, D, Dv]
  float* marks;               // [B, Hkv, ceil(T / segment), D, Dv]: the states before each segment; null: no backward pass
  // of a layer (csrc/layer.h)
  int64_t conv;                           // tokens that the convolution reads; 0: q, k and v are taken as they are
  double eps;                             // added to a mean square
  const float *conv_q, *conv_k, *conv_v;  // [H or Hkv, conv, D or Dv], the newest token's last
  const float *tail_q, *tail_k, *tail_v;  // [B, H or Hkv, conv − 1, D or Dv] tokens before the first, or null for zeros
  const uint8_t* padding;                 // [B, T] or null; read by the convolution alone
  Rows gate;                              // [B, H, T, Dv] float32; null: out is y
  const float* norm;                      // [Dv]
  // backward only
  Rows g, dq, dk, dv, d_gate;
  const float* g_state;  // like state, or null for zeros
  float *d_beta, *d_decay, *d_state;        // like beta, decay and state; the last two may be null
  float *d_conv_q, *d_conv_k, *d_conv_v;    // [B, H or Hkv, conv, D or Dv]
  float* d_norm;                            // [B, H, Dv]
};

// Gated linear attention (csrc/gla.h), as `Delta` with a gate for each channel of the keys.
struct Gla {
  int64_t dtype, threads;
  int64_t B, H, Hkv, T, D, Dv;
  int64_t segment;
  Rows q, k, v, out;
  const float* gates;  // [B, Hkv, T, D]
  const uint8_t* starts;
  const float* state;
  float *final_state, *marks;
  double eps;
  Rows gate;
  const float* norm;
  // backward only
  Rows g, dq, dk, dv, d_gate;
  const float* g_state;
  float *d_gates, *d_state, *d_norm;  // d_gates like gates; d_state may be null
};

// The k rows of each matrix with the largest scores, for each of its queries (csrc/scan.h).
struct Scan {
  int64_t threads, bits;      // bits of a number of keys: 8 with a scale for each row, or 32
  int64_t B, N, Q, D, k;      // matrices, rows allocated, queries of each, numbers of a row, rows to find
  const void* keys;           // [B, N, D]
  int64_t keys_batch, keys_row;
  const float *scales, *bias;  // [B, N] with batch stride row_batch; either may be null
  int64_t row_batch;
  const int64_t* counts;      // [B] rows in use
  const void* queries;        // [B, Q, padded] contiguous, int16 for keys of 8 bits, else float32; 0 from D on
  int64_t padded;             // D rounded up to a multiple of 32
  const float* query_scales;  // [B, Q] or null
  float* scores;              // [B, Q, k]
  int64_t* ids;               // [B, Q, k]; −1 where fewer than k were found
};

// Squared distances of each query to chosen rows, in float64.
struct Rescore {
  int64_t threads, bits;  // 8 with a scale for each row, 16 or 32
  int64_t Q, D, m;
  const void* keys;
  int64_t keys_row;
  const float* scales;   // [N] or null
  const float* queries;  // [Q, D] contiguous
  const int64_t* ids;    // [Q, m]; infinity for −1
  double* out;           // [Q, m]
};

// One new query of each head over a store of keys and values in float32, joined in place with what was attended to nearby;
// the new token is stored first (csrc/retrieve.h). Store m is KV head groups[m % G] of row m / G.
struct Retrieve {
  int64_t threads, B, G, H, Hkv, D, Dv;  // G: KV heads that have a store
  int64_t k, count, at;    // rows to read, rows to search, row of the new token (−1: it is not stored)
  double scale;
  const int64_t* groups;   // [G]
  int8_t* codes;           // [B · G, ·, D] contiguous rows, as keys and values
  int64_t codes_store;
  float* scales;           // [B · G, ·]
  int64_t scales_store;
  float *error, *longest;  // [B · G] the largest ‖k − code · scale‖ and ‖k‖
  float* keys;
  int64_t keys_store;
  float* values;
  int64_t values_store;
  Rows q, new_k, new_v, out;
  float* lse;              // [B, H]
  float* share;            // [B · G · H / Hkv] certificates
};

// One query per row over the rings of its buckets (csrc/buckets.h). All tensors are contiguous.
struct BucketDecode {
  int64_t write;        // 0: attend; 1: put the new tokens into the rings
  int64_t dtype, threads;
  int64_t N, R, C, buckets, slots, D, Dv;  // rows, rounds, slots of a ring, rings and slots of a round, head sizes
  int64_t gap, reach, itself;  // between the places of two buckets; ranks that are seen; whether the token is
  double scale, ramp;
  const float* span;           // [N] or null
  const void *q, *k, *v;       // [N, ·]
  const int64_t *ids, *documents;  // [N, R] buckets of the query; [N] or null
  void *keys, *values;         // [N, R, slots, ·]
  int64_t *marks, *counts;     // [N, R, slots, R + 1], [N, R, buckets]
  void* out;                   // [N, Dv]
  float* lse;                  // [N]
};

struct Kernel {  // one instruction set's code
  void (*forward)(const Call&);
  void (*backward)(const Call&);
  void (*span_edge_gradient)(const Call&);  // writes d_span only
  void (*decode)(const Decode&);
  void (*linear_forward)(const Linear&);
  void (*linear_backward)(const Linear&);
  void (*delta_forward)(const Delta&);
  void (*delta_backward)(const Delta&);
  void (*gla_forward)(const Gla&);
  void (*gla_backward)(const Gla&);
  void (*scan)(const Scan&);
  void (*rescore)(const Rescore&);
  void (*retrieve)(const Retrieve&);
  void (*bucket_decode)(const BucketDecode&);
};

}  // namespace spanformer
