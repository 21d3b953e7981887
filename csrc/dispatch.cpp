// The library's plain C interface, and the choice of an instruction set at run time.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "call.h"
#include "layout.h"

namespace spanformer {
namespace portable {
extern const Kernel kernel;
}
#if defined(SPANFORMER_HAVE_AVX2)
namespace avx2 {
extern const Kernel kernel;
}
#endif
#if defined(SPANFORMER_HAVE_AVX512)
namespace avx512 {
extern const Kernel kernel;
}
#endif

namespace {

struct Choice {
  const char* name;
  const Kernel* kernel;
};

// The versions that are built in and that this processor runs, the fastest first.
std::vector<Choice> versions() {
  std::vector<Choice> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#if defined(SPANFORMER_HAVE_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", &avx512::kernel});
#endif
#if defined(SPANFORMER_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back({"avx2", &avx2::kernel});
#endif
  found.push_back({"portable", &portable::kernel});
  return found;
}

// SPANFORMER_ISA names one of them; ops/kernel.py refuses a name that is none.
Choice choose() {
  const std::vector<Choice> found = versions();
  const char* asked = std::getenv("SPANFORMER_ISA");
  for (const Choice& x : found)
    if (asked && !std::strcmp(asked, x.name)) return x;
  return found.front();
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

std::string names() {
  std::string all;
  for (const Choice& x : versions()) all += (all.empty() ? "" : ",") + std::string(x.name);
  return all;
}

}  // namespace
}  // namespace spanformer

#define SPANFORMER_EXPORT extern "C" __attribute__((visibility("default")))

// Increase it when the functions or the meaning of fields change: ops/library.py refuses a library of another version.
SPANFORMER_EXPORT int spanformer_abi_version() { return 15; }
// Where the fields of the structs are: ops/c_layout.py compares it with its own table.
SPANFORMER_EXPORT const char* spanformer_layout() {
  static const std::string text = spanformer::layout();
  return text.c_str();
}
SPANFORMER_EXPORT const char* spanformer_isa() { return spanformer::chosen().name; }
// The names that SPANFORMER_ISA may have here, with commas between them.
SPANFORMER_EXPORT const char* spanformer_isas() {
  static const std::string all = spanformer::names();
  return all.c_str();
}
// The arguments arrive as packed bytes, which need not be aligned.
SPANFORMER_EXPORT void spanformer_forward(const void* bytes) {
  spanformer::Call call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->forward(call);
}
SPANFORMER_EXPORT void spanformer_backward(const void* bytes) {
  spanformer::Call call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->backward(call);
}
SPANFORMER_EXPORT void spanformer_span_edge_gradient(const void* bytes) {
  spanformer::Call call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->span_edge_gradient(call);
}
SPANFORMER_EXPORT void spanformer_decode(const void* bytes) {
  spanformer::Decode call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->decode(call);
}
SPANFORMER_EXPORT void spanformer_linear_forward(const void* bytes) {
  spanformer::Linear call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->linear_forward(call);
}
SPANFORMER_EXPORT void spanformer_linear_backward(const void* bytes) {
  spanformer::Linear call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->linear_backward(call);
}
SPANFORMER_EXPORT void spanformer_delta_forward(const void* bytes) {
  spanformer::Delta call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->delta_forward(call);
}
SPANFORMER_EXPORT void spanformer_delta_backward(const void* bytes) {
  spanformer::Delta call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->delta_backward(call);
}
SPANFORMER_EXPORT void spanformer_gla_forward(const void* bytes) {
  spanformer::Gla call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->gla_forward(call);
}
SPANFORMER_EXPORT void spanformer_gla_backward(const void* bytes) {
  spanformer::Gla call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->gla_backward(call);
}
SPANFORMER_EXPORT void spanformer_scan(const void* bytes) {
  spanformer::Scan call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->scan(call);
}
SPANFORMER_EXPORT void spanformer_rescore(const void* bytes) {
  spanformer::Rescore call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->rescore(call);
}
SPANFORMER_EXPORT void spanformer_retrieve(const void* bytes) {
  spanformer::Retrieve call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->retrieve(call);
}
SPANFORMER_EXPORT void spanformer_bucket_decode(const void* bytes) {
  spanformer::BucketDecode call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->bucket_decode(call);
}
