// Prints, for tools/cuda_check.py, what attention and matrix kernels are launched with: NAME THREADS SHARED_BYTES
// BYTES_PER_STEP, separated by tabs. A step is one pass of a main loop by one warp, its bytes those of cache or weights; 0: not
// counted.
#include <cstdio>

#include "../csrc/attention/cuda/attention_simt.cuh"
#include "../csrc/attention/cuda/decode_mma.cuh"
#include "../csrc/attention/cuda/prefill_mma.cuh"
#include "../csrc/quantization/cuda/weight_tiles.cuh"
#include "../csrc/sampling/cuda/sample.cu"

namespace {

using namespace pyengine::cuda;

template <typename T>
const char* type_name();
template <>
const char* type_name<Float16>() {
  return "__half";
}
template <>
const char* type_name<BFloat16>() {
  return "__nv_bfloat16";
}

template <typename T, KvFormat kFormat, int kHeadDim>
void print_mma() {
  using Decode = DecodeShape<T, kFormat, kHeadDim>;
  using Prefill = PrefillShape<T, kFormat, kHeadDim>;
  char arguments[96];
  std::snprintf(arguments, sizeof arguments, "<%s, (pyengine::cuda::KvFormat)%d, %d>", type_name<T>(), int(kFormat), kHeadDim);
  const int step = Decode::kTokens * 2 * kHeadDim * Decode::Tile::kElementBytes;
  std::printf("decode_mma_kernel%s\t%d\t%d\t%d\n", arguments, Decode::kThreads, Decode::kSharedBytes, step);
  std::printf("prefill_mma_kernel%s\t%d\t%d\t0\n", arguments, Prefill::kThreads, Prefill::kSharedBytes);
}

template <int kHeadDim>
void print_formats() {
  print_mma<Float16, KvFormat::kModel, kHeadDim>();
  print_mma<BFloat16, KvFormat::kModel, kHeadDim>();
  print_mma<Float16, KvFormat::kFp8, kHeadDim>();
  print_mma<BFloat16, KvFormat::kFp8, kHeadDim>();
  print_mma<Float16, KvFormat::kInt8, kHeadDim>();
  print_mma<BFloat16, KvFormat::kInt8, kHeadDim>();
}

template <int kHeadDim>
void print_simt() {
  using Shape = SimtShape<kHeadDim>;
  for (int format = 0; format < 3; format++)
    std::printf("attention_simt_kernel<(pyengine::cuda::KvFormat)%d, %d>\t%d\t%d\t0\n", format, kHeadDim, Shape::kThreads,
                Shape::kSharedBytes);
}

template <template <typename> class Weights, typename T>
void print_weight_gemm(const char* name, int bits) {
  const int step = Weights<T>::kStep * GemmShape::kColumns * bits / 8;
  for (const int rows : {1, Weights<T>::kManyRows})
    std::printf("weight_gemm_kernel<pyengine::cuda::%s<%s>, %d>\t%d\t%d\t%d\n", name, type_name<T>(), rows, GemmShape::kThreads,
                GemmShape::kSharedBytes, step);
}

template <typename T>
void print_weight_gemms() {
  print_weight_gemm<GptqWeights, T>("GptqWeights", 4);
  print_weight_gemm<AwqWeights, T>("AwqWeights", 4);
  print_weight_gemm<Fp8Weights, T>("Fp8Weights", 8);
}

void print_int8_gemms() {
  for (const char* type : {"float", "__half", "__nv_bfloat16"})
    for (const int rows : {1, 4})
      std::printf("int8_gemm_kernel<%s, %d>\t%d\t%d\t%d\n", type, rows, GemmShape::kThreads, GemmShape::kSharedBytes,
                  64 * GemmShape::kColumns);
}

}  // namespace

int main() {
  print_formats<64>();
  print_formats<96>();
  print_formats<128>();
  print_formats<192>();
  print_formats<256>();
  print_weight_gemms<Float16>();
  print_weight_gemms<BFloat16>();
  print_int8_gemms();
  print_simt<64>();
  print_simt<128>();
  print_simt<256>();
  std::printf("sample_kernel\t%d\t%zu\t0\n", pyengine::cuda::kThreads, sizeof(pyengine::cuda::Shared));
}
