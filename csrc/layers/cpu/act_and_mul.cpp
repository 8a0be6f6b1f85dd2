// Gated activations: out = act(gate) * up, gate and up being the halves of each input row.
#include <cmath>

#include "../../cpu/parallel.h"
#include "../../cpu/with_type.h"
#include "../params.h"
#include "activations.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int kElementsPerUnit = 4096;  // of a row, for a thread

// x Phi(x); the error function element by element: models that use it are rare.
struct Gelu {
  static VecF apply(VecF x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; i++) lanes[i] = 0.5f * lanes[i] * erfcf(-0.7071067812f * lanes[i]);
    return load(lanes);
  }
};

template <class Act, class T>
const char* run(const ActAndMulParams& p) {
  const int64_t units_per_row = (p.d + kElementsPerUnit - 1) / kElementsPerUnit;
  const int64_t rows_per_unit = p.d < kElementsPerUnit ? kElementsPerUnit / (p.d + 1) + 1 : 1;
  const int64_t row_units = (p.num_tokens + rows_per_unit - 1) / rows_per_unit;
  parallel_for(row_units * units_per_row, [&](int64_t unit, int) {
    const int begin = static_cast<int>(unit % units_per_row) * kElementsPerUnit;
    const int end = p.d - begin < kElementsPerUnit ? p.d : begin + kElementsPerUnit;
    const int64_t first = unit / units_per_row * rows_per_unit;
    const int64_t last = first + rows_per_unit < p.num_tokens ? first + rows_per_unit : p.num_tokens;
    for (int64_t token = first; token < last; token++) {
      const T* gate = static_cast<const T*>(p.input) + token * p.input_stride;
      T* out = static_cast<T*>(p.out) + token * p.out_stride;
      int i = begin;
      for (; i + kLanes <= end; i += kLanes) store(out + i, Act::apply(load(gate + i)) * load(gate + p.d + i));
      if (i < end) {
        store_partial(out + i, Act::apply(load_partial(gate + i, end - i)) * load_partial(gate + p.d + i, end - i), end - i);
      }
    }
  });
  return nullptr;
}

template <class Act>
const char* run_any_type(const ActAndMulParams& p) {
  return with_float_type(p.dtype, [&](auto type) { return run<Act, decltype(type)>(p); });
}

}  // namespace

const char* act_and_mul(const ActAndMulParams& p) {
  switch (p.activation) {
    case GatedActivation::kSilu:
      return run_any_type<Silu>(p);
    case GatedActivation::kGeluTanh:
      return run_any_type<GeluTanh>(p);
    case GatedActivation::kGelu:
      return run_any_type<Gelu>(p);
  }
  return "unknown gated activation";
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
