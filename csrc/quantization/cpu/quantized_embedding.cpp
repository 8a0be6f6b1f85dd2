// Rows of a packed quantised weight as floats: what an embedding looks up.
#include "../../cpu/parallel.h"
#include "../../cpu/scalar_convert.h"
#include "../../cpu/with_type.h"
#include "tile_values.h"

namespace pyengine::cpu {
namespace PE_ISA {
namespace {

constexpr int64_t kRowsPerUnit = 8;

float half_at(const uint8_t* halves, int column) {
  Float16 value;
  memcpy(&value, halves + 2 * column, sizeof value);
  return to_float(value);
}

// 32 values of one column.
template <class F, class Out>
void dequantize_sub_block(const uint8_t* header, const uint8_t* sub_block, int column, Out* out) {
  const uint8_t* at = sub_block + F::kQuantBytes;
  float scale[F::kScales], minimum = 0;
  if constexpr (F::kIsSuper) {
    const int8_t* bytes = reinterpret_cast<const int8_t*>(at) + column;
    for (int s = 0; s < F::kScales; s++) scale[s] = half_at(header, column) * static_cast<float>(bytes[s * kQuantPanel]);
    if constexpr (F::kHasMin) minimum = half_at(header + 32, column) * static_cast<float>(bytes[kQuantPanel]);
  } else {
    scale[0] = half_at(at, column);
    if constexpr (F::kHasMin) minimum = half_at(at + 32, column);
  }
  uint8_t q[kSubBlock];
  get_values<F::kBits>(sub_block, column, q);
  for (int i = 0; i < kSubBlock; i++) {
    float value = scale[i * F::kScales / kSubBlock] * static_cast<float>(q[i] - F::kOffset);
    if constexpr (F::kHasMin) value += minimum;
    from_float(value, out + i);
  }
}

template <class F, class Out>
void dequantize_row(const QuantizedEmbeddingParams& p, int row) {
  const int64_t index = p.indices[row];
  const int num_blocks = p.in_features / F::kBlockSize, column = static_cast<int>(index % kQuantPanel);
  const uint8_t* tile = static_cast<const uint8_t*>(p.weight) + index / kQuantPanel * num_blocks * F::kTileBytes;
  Out* out = static_cast<Out*>(p.out) + row * p.out_stride;
  for (int b = 0; b < num_blocks; b++, tile += F::kTileBytes) {
    for (int i = 0; i < F::kSubBlocks; i++, out += kSubBlock) {
      dequantize_sub_block<F>(tile, tile + F::kHeaderBytes + i * F::kSubBlockBytes, column, out);
    }
  }
}

}  // namespace

const char* quantized_embedding(const QuantizedEmbeddingParams& p) {
  const int64_t units = (p.num_tokens + kRowsPerUnit - 1) / kRowsPerUnit;
  return with_format(p.format, [&](auto format) {
    return with_float_type(p.dtype, [&](auto out) -> const char* {
      parallel_for(units, [&](int64_t unit, int) {
        const int64_t end = (unit + 1) * kRowsPerUnit;
        for (int64_t row = unit * kRowsPerUnit; row < end && row < p.num_tokens; row++) {
          dequantize_row<decltype(format), decltype(out)>(p, static_cast<int>(row));
        }
      });
      return nullptr;
    });
  });
}

}  // namespace PE_ISA
}  // namespace pyengine::cpu
