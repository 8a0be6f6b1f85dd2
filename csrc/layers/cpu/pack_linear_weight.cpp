// Packs a weight matrix into panels of 16 output columns, k by k, once when a model is loaded.
#include "../../cpu/parallel.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

// packed[k][j] = weight[first + j][k] for one panel; bits only, whatever the type.
template <class Bits>
void pack_panel(const PackLinearParams& p, int64_t panel) {
  const Bits* weight = static_cast<const Bits*>(p.weight);
  Bits* packed = static_cast<Bits*>(p.packed) + panel * p.in_features * kLinearPanel;
  const int64_t first = panel * kLinearPanel;
  for (int k = 0; k < p.in_features; k++) {
    for (int j = 0; j < kLinearPanel; j++) {
      packed[int64_t{k} * kLinearPanel + j] = first + j < p.out_features ? weight[(first + j) * p.weight_stride + k] : Bits{0};
    }
  }
}

}  // namespace

const char* pack_linear_weight(const PackLinearParams& p) {
  const int64_t panels = (int64_t{p.out_features} + kLinearPanel - 1) / kLinearPanel;
  switch (dtype_size(p.dtype)) {
    case 4:
      parallel_for(panels, [&](int64_t panel, int) { pack_panel<uint32_t>(p, panel); });
      return nullptr;
    case 2:
      parallel_for(panels, [&](int64_t panel, int) { pack_panel<uint16_t>(p, panel); });
      return nullptr;
    default:
      return "the weight must be fp32, fp16 or bf16";
  }
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
