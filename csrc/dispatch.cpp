// The library's plain C interface, and the choice of an instruction set at run time.
#include <cstdlib>
#include <cstring>

#include "call.h"

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

[[maybe_unused]] bool wanted(const char* name) {  // SPANFORMER_ISA=portable|avx2|avx512 asks for one, where the machine has it
  const char* asked = std::getenv("SPANFORMER_ISA");
  return !asked || !*asked || !std::strcmp(asked, name);
}

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#if defined(SPANFORMER_HAVE_AVX512)
  if (wanted("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return {"avx512", &avx512::kernel};
#endif
#if defined(SPANFORMER_HAVE_AVX2)
  if (wanted("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"avx2", &avx2::kernel};
#endif
  return {"portable", &portable::kernel};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace
}  // namespace spanformer

#define SPANFORMER_EXPORT extern "C" __attribute__((visibility("default")))

// Raised whenever Call, Decode or the functions change: ops/kernel.py refuses a library of another version.
SPANFORMER_EXPORT int spanformer_abi_version() { return 5; }
SPANFORMER_EXPORT int spanformer_sizeof_call() { return sizeof(spanformer::Call); }
SPANFORMER_EXPORT int spanformer_sizeof_decode() { return sizeof(spanformer::Decode); }
SPANFORMER_EXPORT const char* spanformer_isa() { return spanformer::chosen().name; }
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
SPANFORMER_EXPORT void spanformer_kinks(const void* bytes) {
  spanformer::Call call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->kinks(call);
}
SPANFORMER_EXPORT void spanformer_decode(const void* bytes) {
  spanformer::Decode call;
  std::memcpy(&call, bytes, sizeof call);
  spanformer::chosen().kernel->decode(call);
}
