// Root mean square normalisation (Zhang and Sennrich, 2019), with or without the residual addition before it.
#include "../../cpu/parallel.h"
#include "../../cpu/simd.h"
#include "../../cpu/with_type.h"
#include "../params.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kElementsPerUnit = 4 * 1024;  // a unit of work for a thread

// The sum of squares in a fixed order: four vector sums, then the last elements.
template <class T>
float sum_of_squares(const T* x, int n) {
  VecF sum[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; j++) {
      const VecF v = load(x + i + j * kLanes);
      sum[j] = fma(v, v, sum[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const VecF v = load_partial(x + i, n - i);
    sum[0] = fma(v, v, sum[0]);
  }
  return hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// residual += x, rounded to T: the norm sees what the next layer will see.
template <class T>
void add_residual(const T* x, T* residual, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(residual + i, load(residual + i) + load(x + i));
  if (i < n) {
    store_partial(residual + i, load_partial(residual + i, n - i) + load_partial(x + i, n - i), n - i);
  }
}

template <class T>
void normalize_row(const T* x, const T* weight, float epsilon, int n, T* out) {
  const VecF scale = set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + epsilon));
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < n) {
    store_partial(out + i, load_partial(x + i, n - i) * scale * load_partial(weight + i, n - i), n - i);
  }
}

template <class T>
const char* run(const RmsNormParams& p) {
  const int64_t per_unit = p.hidden_size < kElementsPerUnit ? kElementsPerUnit / (p.hidden_size + 1) + 1 : 1;
  parallel_for((p.num_tokens + per_unit - 1) / per_unit, [&](int64_t unit, int) {
    const int64_t end = (unit + 1) * per_unit < p.num_tokens ? (unit + 1) * per_unit : p.num_tokens;
    for (int64_t token = unit * per_unit; token < end; token++) {
      const T* x = static_cast<const T*>(p.input) + token * p.input_stride;
      if (p.residual != nullptr) {
        T* residual = static_cast<T*>(p.residual) + token * p.residual_stride;
        add_residual(x, residual, p.hidden_size);
        x = residual;
      }
      normalize_row(x, static_cast<const T*>(p.weight), p.epsilon, p.hidden_size,
                    static_cast<T*>(p.out) + token * p.out_stride);
    }
  });
  return nullptr;
}

}  // namespace

const char* rms_norm(const RmsNormParams& p) {
  return with_float_type(p.dtype, [&](auto type) { return run<decltype(type)>(p); });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
