// The offsets of the fields of each struct of call.h as text, one field per line: "Call.scale float at byte 96".
// ops/c_layout.py compares it with its own table when it loads the library.
#pragma once
#include <cstddef>
#include <string>
#include <type_traits>

#include "call.h"

namespace spanformer {

template <class T>
std::string kind_of() {
  return std::is_same<T, int64_t>::value  ? "int"
         : std::is_same<T, double>::value ? "float"
         : std::is_same<T, Rows>::value   ? "rows"
         : std::is_pointer<T>::value      ? "address"
                                          : "unknown";
}

#define AT(STRUCT, FIELD) \
  text += #STRUCT "." #FIELD " " + kind_of<decltype(STRUCT::FIELD)>() + " at byte " + \
          std::to_string(offsetof(STRUCT, FIELD)) + "\n";
#define CALL(FIELD) AT(Call, FIELD)
#define DECODE(FIELD) AT(Decode, FIELD)
#define LINEAR(FIELD) AT(Linear, FIELD)
#define DELTA(FIELD) AT(Delta, FIELD)
#define GLA(FIELD) AT(Gla, FIELD)
#define SCAN(FIELD) AT(Scan, FIELD)
#define RESCORE(FIELD) AT(Rescore, FIELD)
#define RETRIEVE(FIELD) AT(Retrieve, FIELD)
#define BUCKET(FIELD) AT(BucketDecode, FIELD)

// clang-format off
inline std::string layout() {
  std::string text;
  CALL(dtype) CALL(threads) CALL(B) CALL(H) CALL(Hkv) CALL(Tq) CALL(Tk) CALL(D) CALL(Dv) CALL(causal) CALL(shift)
  CALL(max_future) CALL(scale) CALL(ramp) CALL(dropout) CALL(q) CALL(k) CALL(v) CALL(out) CALL(lse) CALL(reach)
  CALL(span) CALL(dynamic) CALL(distance_bias) CALL(bias_length) CALL(distance_vec) CALL(vec_length) CALL(vec_head)
  CALL(key_bias) CALL(key_bias_batch) CALL(key_bias_head) CALL(key_bias_group) CALL(key_span) CALL(key_span_batch)
  CALL(key_span_head) CALL(q_positions) CALL(k_positions) CALL(q_positions_batch) CALL(k_positions_batch)
  CALL(q_documents) CALL(k_documents) CALL(q_documents_batch) CALL(k_documents_batch) CALL(q_orders)
  CALL(k_orders) CALL(orders) CALL(q_orders_order) CALL(q_orders_batch) CALL(k_orders_order) CALL(k_orders_batch)
  CALL(sink_logits)
  CALL(block_offsets) CALL(block_columns) CALL(block_mask_ids) CALL(block_masks) CALL(block_size) CALL(block_rows)
  CALL(block_head) CALL(seed) CALL(drop_heads) CALL(drop_queries) CALL(drop_keys) CALL(drop_queries_batch)
  CALL(drop_keys_batch) CALL(g) CALL(dq) CALL(dk) CALL(dv) CALL(g_lse) CALL(d_span) CALL(d_distance_bias)
  CALL(d_distance_vec) CALL(d_key_bias) CALL(d_sink_logits) CALL(d_key_span)
  text += "Call " + std::to_string(sizeof(Call)) + " bytes\n";
  DECODE(threads) DECODE(q) DECODE(out) DECODE(lse) DECODE(new_k) DECODE(new_v) DECODE(span) DECODE(dtype)
  DECODE(bits) DECODE(B) DECODE(H) DECODE(Hkv) DECODE(D) DECODE(Dv) DECODE(shift) DECODE(sink_tokens) DECODE(scale)
  DECODE(ramp) DECODE(k) DECODE(v) DECODE(k_scale) DECODE(v_scale) DECODE(slots) DECODE(first)
  DECODE(capacity) DECODE(newest) DECODE(oldest) DECODE(reach) DECODE(dynamic) DECODE(distance_bias)
  DECODE(bias_length) DECODE(distance_vec) DECODE(vec_length) DECODE(vec_head) DECODE(sink_logits)
  DECODE(recent) DECODE(recent_tokens) DECODE(recent_since)
  text += "Decode " + std::to_string(sizeof(Decode)) + " bytes\n";
  LINEAR(dtype) LINEAR(threads) LINEAR(B) LINEAR(H) LINEAR(Hkv) LINEAR(Tq) LINEAR(T) LINEAR(M) LINEAR(Dv) LINEAR(normalize) LINEAR(elu)
  LINEAR(ramp) LINEAR(eps) LINEAR(a) LINEAR(b) LINEAR(v) LINEAR(out) LINEAR(den) LINEAR(decay) LINEAR(decay_batch)
  LINEAR(decay_head) LINEAR(decay_row) LINEAR(near) LINEAR(near_batch)
  LINEAR(near_head) LINEAR(near_row) LINEAR(starts) LINEAR(s0) LINEAR(z0) LINEAR(s1) LINEAR(z1) LINEAR(g) LINEAR(da)
  LINEAR(db) LINEAR(dv) LINEAR(g_den) LINEAR(g_s1) LINEAR(g_z1) LINEAR(d_decay) LINEAR(d_near) LINEAR(d_s0)
  LINEAR(d_z0)
  text += "Linear " + std::to_string(sizeof(Linear)) + " bytes\n";
  DELTA(dtype) DELTA(threads) DELTA(B) DELTA(H) DELTA(Hkv) DELTA(T) DELTA(D) DELTA(Dv) DELTA(segment) DELTA(q) DELTA(k)
  DELTA(v) DELTA(out) DELTA(beta) DELTA(decay) DELTA(starts) DELTA(state) DELTA(final_state) DELTA(marks)
  DELTA(conv) DELTA(eps) DELTA(conv_q) DELTA(conv_k) DELTA(conv_v) DELTA(tail_q) DELTA(tail_k) DELTA(tail_v)
  DELTA(padding) DELTA(gate) DELTA(norm) DELTA(g) DELTA(dq) DELTA(dk) DELTA(dv) DELTA(d_gate) DELTA(g_state) DELTA(d_beta)
  DELTA(d_decay) DELTA(d_state) DELTA(d_conv_q) DELTA(d_conv_k) DELTA(d_conv_v) DELTA(d_norm)
  text += "Delta " + std::to_string(sizeof(Delta)) + " bytes\n";
  GLA(dtype) GLA(threads) GLA(B) GLA(H) GLA(Hkv) GLA(T) GLA(D) GLA(Dv) GLA(segment) GLA(q) GLA(k) GLA(v) GLA(out)
  GLA(gates) GLA(starts) GLA(state) GLA(final_state) GLA(marks) GLA(eps) GLA(gate) GLA(norm) GLA(g)
  GLA(dq) GLA(dk) GLA(dv) GLA(d_gate) GLA(g_state) GLA(d_gates) GLA(d_state) GLA(d_norm)
  text += "Gla " + std::to_string(sizeof(Gla)) + " bytes\n";
  SCAN(threads) SCAN(bits) SCAN(B) SCAN(N) SCAN(Q) SCAN(D) SCAN(k) SCAN(keys) SCAN(keys_batch) SCAN(keys_row) SCAN(scales)
  SCAN(bias) SCAN(row_batch) SCAN(counts) SCAN(queries) SCAN(padded) SCAN(query_scales) SCAN(scores) SCAN(ids)
  text += "Scan " + std::to_string(sizeof(Scan)) + " bytes\n";
  RESCORE(threads) RESCORE(bits) RESCORE(Q) RESCORE(D) RESCORE(m) RESCORE(keys) RESCORE(keys_row)
  RESCORE(scales) RESCORE(queries) RESCORE(ids) RESCORE(out)
  text += "Rescore " + std::to_string(sizeof(Rescore)) + " bytes\n";
  RETRIEVE(threads) RETRIEVE(B) RETRIEVE(G) RETRIEVE(H) RETRIEVE(Hkv) RETRIEVE(D) RETRIEVE(Dv) RETRIEVE(k) RETRIEVE(count)
  RETRIEVE(at) RETRIEVE(scale) RETRIEVE(groups) RETRIEVE(codes) RETRIEVE(codes_store) RETRIEVE(scales)
  RETRIEVE(scales_store) RETRIEVE(error) RETRIEVE(longest) RETRIEVE(keys) RETRIEVE(keys_store) RETRIEVE(values)
  RETRIEVE(values_store) RETRIEVE(q) RETRIEVE(new_k) RETRIEVE(new_v) RETRIEVE(out) RETRIEVE(lse) RETRIEVE(share)
  text += "Retrieve " + std::to_string(sizeof(Retrieve)) + " bytes\n";
  BUCKET(write) BUCKET(dtype) BUCKET(threads) BUCKET(N) BUCKET(R) BUCKET(C) BUCKET(buckets) BUCKET(slots) BUCKET(D)
  BUCKET(Dv) BUCKET(gap) BUCKET(reach) BUCKET(itself) BUCKET(scale) BUCKET(ramp) BUCKET(span) BUCKET(q) BUCKET(k)
  BUCKET(v) BUCKET(ids) BUCKET(documents) BUCKET(keys) BUCKET(values) BUCKET(marks) BUCKET(counts) BUCKET(out)
  BUCKET(lse)
  text += "BucketDecode " + std::to_string(sizeof(BucketDecode)) + " bytes\n";
  return text;
}
// clang-format on

#undef AT
#undef CALL
#undef DECODE
#undef LINEAR
#undef DELTA
#undef GLA
#undef SCAN
#undef RESCORE
#undef RETRIEVE
#undef BUCKET

}  // namespace spanformer
