// Quantised weights on their way from the checkpoint's layout to the tensor core's B operand, in registers.
//
// A lane holds 8 neighbouring columns and, in each step, kDepth values of k of each. The contraction may run in any order so
// long as input and weight follow the same one: the values that a lane's words hold come in pairs as they are cheap to take
// out, and `order` puts the input's values in the same pairs. Pair i of mma step h is 2 h (k = 2 tig, 2 tig + 1) or 2 h + 1 (+
// 8).
#pragma once
#include "gemm_tile.cuh"

namespace pyengine::cuda {

// T's codes for 4 bits: with these bits in the mantissa of kMagic the value is kMagic + q.
template <typename T>
struct FourBits;
template <>
struct FourBits<Float16> {
  static constexpr uint32_t kMagic = 0x64006400u, kOne = 0x3C003C00u, kMinusZero = 0x80008000u;
  static constexpr float kMagicValue = 1024.0f;
};
template <>
struct FourBits<BFloat16> {
  static constexpr uint32_t kMagic = 0x43004300u, kOne = 0x3F803F80u, kMinusZero = 0x80008000u;
  static constexpr float kMagicValue = 128.0f;
};

// Scales and zeros of a lane's 8 columns in one group, and values with both applied: (q - zero) exactly, then one rounding.
template <typename T>
struct GroupScales {
  uint32_t scale[8], zero[8];  // pairs of equal T; zero: -(magic + zero)

  PYENGINE_DEVICE void load(const CheckpointLinearParams& p, int group, int column, int offset, bool awq) {
    const T* scales = static_cast<const T*>(p.scales) + int64_t(group) * p.out_features + column;
    float s[8];
    load_elements<8>(s, scales);
    const uint32_t word = p.zeros[int64_t(group) * (p.out_features / 8) + column / 8];
#pragma unroll
    for (int j = 0; j < 8; j++) {  // j: position in the word, and tile
      const float z = FourBits<T>::kMagicValue + static_cast<float>((word >> (4 * j) & 15u) + offset);
      const float own = awq ? s[j < 4 ? 2 * j : 2 * j - 7] : s[j];
      scale[j] = pack2<T>(own, own);
      zero[j] = pack2<T>(-z, -z);
    }
  }
  // bits: two values in the low four bits of each half.
  PYENGINE_DEVICE uint32_t apply(uint32_t bits, int j) const {
    const uint32_t difference = fma2<T>(bits | FourBits<T>::kMagic, FourBits<T>::kOne, zero[j]);
    return fma2<T>(difference, scale[j], FourBits<T>::kMinusZero);
  }
};

// GPTQ: one word has 8 values of k of one column. Pair i is values i and i + 4.
template <typename T>
struct GptqWeights {
  using Type = T;
  static constexpr int kDepth = 8, kStep = 4 * kDepth, kManyRows = 4;
  uint32_t word[8];  // by column
  GroupScales<T> scales;
  int group;

  PYENGINE_DEVICE GptqWeights() : group(-1) {}
  PYENGINE_DEVICE void take(const GptqWeights& other) {
#pragma unroll
    for (int i = 0; i < 8; i++) word[i] = other.word[i];
  }
  PYENGINE_DEVICE static float finish(const CheckpointLinearParams&, float sum, int) { return sum; }
  PYENGINE_DEVICE void load(const CheckpointLinearParams& p, int step, const GemmLane& lane) {
    const int32_t* from = static_cast<const int32_t*>(p.weight) + int64_t(step * 4 + lane.tig) * p.out_features + lane.column;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 v = load_vector<uint4>(from + 4 * i);
      word[4 * i] = v.x;
      word[4 * i + 1] = v.y;
      word[4 * i + 2] = v.z;
      word[4 * i + 3] = v.w;
    }
  }
  PYENGINE_DEVICE void start(const CheckpointLinearParams& p, int step, const GemmLane& lane) {
    if (step * kStep / p.group_size == group) return;
    group = step * kStep / p.group_size;
    scales.load(p, group, lane.column, 1, false);
  }
  PYENGINE_DEVICE uint32_t pair(int i, int j) const { return scales.apply(word[j] >> (4 * i) & 0x000f000fu, j); }
  PYENGINE_DEVICE static void order(const uint4& x, uint32_t (&pairs)[4]) {
    pairs[0] = permute_bytes(x.x, x.z, 0x5410u);  // values 0 and 4
    pairs[1] = permute_bytes(x.x, x.z, 0x7632u);
    pairs[2] = permute_bytes(x.y, x.w, 0x5410u);
    pairs[3] = permute_bytes(x.y, x.w, 0x7632u);
  }
  PYENGINE_DEVICE static int column_of(int j) { return j; }
};

// AWQ: one word has 8 columns of one k. Pair i is values 2 i and 2 i + 1.
template <typename T>
struct AwqWeights {
  using Type = T;
  static constexpr int kDepth = 8, kStep = 4 * kDepth, kManyRows = 4;
  uint32_t word[8];  // by k
  GroupScales<T> scales;
  int group;

  PYENGINE_DEVICE AwqWeights() : group(-1) {}
  PYENGINE_DEVICE void take(const AwqWeights& other) {
#pragma unroll
    for (int i = 0; i < 8; i++) word[i] = other.word[i];
  }
  PYENGINE_DEVICE static float finish(const CheckpointLinearParams&, float sum, int) { return sum; }
  PYENGINE_DEVICE void load(const CheckpointLinearParams& p, int step, const GemmLane& lane) {
    const int words = p.out_features / 8;
    const int32_t* from =
        static_cast<const int32_t*>(p.weight) + int64_t(step * kStep + lane.tig * kDepth) * words + lane.column / 8;
#pragma unroll
    for (int i = 0; i < 8; i++) word[i] = from[int64_t(i) * words];
  }
  PYENGINE_DEVICE void start(const CheckpointLinearParams& p, int step, const GemmLane& lane) {
    if (step * kStep / p.group_size == group) return;
    group = step * kStep / p.group_size;
    scales.load(p, group, lane.column, 0, true);
  }
  PYENGINE_DEVICE uint32_t pair(int i, int j) const {
    const uint32_t halves = permute_bytes(word[2 * i], word[2 * i + 1], j < 4 ? 0x5410u : 0x7632u);
    return scales.apply(halves >> (4 * (j % 4)) & 0x000f000fu, j);
  }
  PYENGINE_DEVICE static void order(const uint4& x, uint32_t (&pairs)[4]) {
    pairs[0] = x.x;
    pairs[1] = x.y;
    pairs[2] = x.z;
    pairs[3] = x.w;
  }
  PYENGINE_DEVICE static int column_of(int j) { return j < 4 ? 2 * j : 2 * j - 7; }  // kAwqOrder
};

// FP8 e4m3, 16 values of k in 16 bytes. A code becomes T by moving its bits and a multiplication by a power of two, exactly;
// pair 2 q is bytes 0 and 2 of word q, pair 2 q + 1 bytes 1 and 3.
template <typename T>
struct Fp8Weights {
  using Type = T;
  static constexpr int kDepth = 16, kStep = 4 * kDepth, kManyRows = 2;  // more would spill
  uint4 codes[8];                                                       // by column

  PYENGINE_DEVICE Fp8Weights() {}
  PYENGINE_DEVICE void take(const Fp8Weights& other) {
#pragma unroll
    for (int j = 0; j < 8; j++) codes[j] = other.codes[j];
  }
  PYENGINE_DEVICE static float finish(const CheckpointLinearParams& p, float sum, int column) {
    return sum * static_cast<const float*>(p.scales)[p.one_scale ? 0 : column];
  }
  PYENGINE_DEVICE void load(const CheckpointLinearParams& p, int step, const GemmLane& lane) {
    const int k = min(step * kStep + lane.tig * kDepth, p.in_features - kDepth);  // beyond the end the input is zero
    const uint8_t* from = static_cast<const uint8_t*>(p.weight) + int64_t(lane.column) * p.in_features + k;
#pragma unroll
    for (int j = 0; j < 8; j++) codes[j] = load_vector<uint4>(from + int64_t(j) * p.in_features);
  }
  PYENGINE_DEVICE void start(const CheckpointLinearParams&, int, const GemmLane&) {}
  PYENGINE_DEVICE uint32_t pair(int i, int j) const {
    const uint32_t words[4] = {codes[j].x, codes[j].y, codes[j].z, codes[j].w};
    const uint32_t v = select_bytes(words[i / 2], i % 2 ? 0x3414u : 0x2404u);  // in the high byte of each half
    constexpr bool kBf16 = std::is_same_v<T, BFloat16>;
    const uint32_t bits = (v & 0x80008000u) | ((v & 0x7f007f00u) >> (kBf16 ? 4 : 1));
    return fma2<T>(bits, kBf16 ? 0x7B807B80u : 0x5C005C00u, 0x80008000u);  // times 2^120 or 2^8
  }
  PYENGINE_DEVICE static void order(const uint4& x, uint32_t (&pairs)[4]) {
    pairs[0] = permute_bytes(x.x, x.y, 0x5410u);  // values 0 and 2
    pairs[1] = permute_bytes(x.x, x.y, 0x7632u);
    pairs[2] = permute_bytes(x.z, x.w, 0x5410u);
    pairs[3] = permute_bytes(x.z, x.w, 0x7632u);
  }
  PYENGINE_DEVICE static int column_of(int j) { return j; }
};

}  // namespace pyengine::cuda
