// Compiled once per instruction set; SPANFORMER_ISA is the name of its namespace.
#include "buckets.h"
#include "decode.h"
#include "delta.h"
#include "forward.h"
#include "gla.h"
#include "gradients.h"
#include "linear_backward.h"
#include "retrieve.h"
#include "scan.h"
#include "span_edge_gradient.h"

namespace spanformer {
namespace SPANFORMER_ISA {

extern const Kernel kernel;
const Kernel kernel = {
    [](const Call& c) { c.dtype == kFloat32 ? forward_all<float>(c) : forward_all<bf16>(c); },
    [](const Call& c) { c.dtype == kFloat32 ? backward_all<float>(c) : backward_all<bf16>(c); },
    [](const Call& c) { c.dtype == kFloat32 ? span_edge_all<float>(c) : span_edge_all<bf16>(c); },
    [](const Decode& c) {
      if (c.bits == 4)
        c.dtype == kFloat32 ? decode_all<float, nibbles>(c) : decode_all<bf16, nibbles>(c);
      else if (c.bits == 8)
        c.dtype == kFloat32 ? decode_all<float, int8_t>(c) : decode_all<bf16, int8_t>(c);
      else
        c.dtype == kFloat32 ? decode_all<float, float>(c) : decode_all<bf16, bf16>(c);
    },
    [](const Linear& c) { c.dtype == kFloat32 ? linear_forward_all<float>(c) : linear_forward_all<bf16>(c); },
    [](const Linear& c) { c.dtype == kFloat32 ? linear_backward_all<float>(c) : linear_backward_all<bf16>(c); },
    [](const Delta& c) { c.dtype == kFloat32 ? delta_forward<float>(c) : delta_forward<bf16>(c); },
    [](const Delta& c) { c.dtype == kFloat32 ? delta_backward<float>(c) : delta_backward<bf16>(c); },
    [](const Gla& c) { c.dtype == kFloat32 ? gla_forward<float>(c) : gla_forward<bf16>(c); },
    [](const Gla& c) { c.dtype == kFloat32 ? gla_backward<float>(c) : gla_backward<bf16>(c); },
    [](const Scan& c) { scan_all(c); },
    [](const Rescore& c) { rescore_all(c); },
    [](const Retrieve& c) { retrieve_all(c); },
    [](const BucketDecode& c) { c.dtype == kFloat32 ? bucket_decode_all<float>(c) : bucket_decode_all<bf16>(c); },
};

}  // namespace SPANFORMER_ISA
}  // namespace spanformer
