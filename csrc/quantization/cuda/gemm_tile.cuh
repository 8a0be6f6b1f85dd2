// What the quantised products share: how 64 output columns and 16 to 64 rows are laid out over 8 warps, and how they end.
//
// The warps of a block divide k among them, in pieces that depend on nothing but k, and their sums are added in the order of
// the warps: a row's bits are the same in every batch. Weights go from global memory to registers, each once a block; a lane's
// 8 columns are neighbours, so its loads are wide. Column j of the lanes' 8 makes one mma tile: the columns of a tile are 8
// apart.
#pragma once
#include "../../common/cuda_vector.cuh"
#include "../params.h"

namespace pyengine::cuda {

struct GemmShape {
  static constexpr int kWarps = 8, kThreads = kWarps * 32, kRows = 16, kColumns = 64;
  static constexpr int kPitch = kColumns + 4;  // of sums in shared memory; rows 4 banks apart
  static constexpr int kSharedBytes = kWarps * kRows * kPitch * 4;
};

// Where a thread stands in its block's tile.
struct GemmLane {
  int warp, gid, tig;
  int first_row;  // of the block
  int column;     // of the lane's 8, clamped to the last 8 of the matrix

  PYENGINE_DEVICE GemmLane(const CheckpointLinearParams& p, int row_tiles)
      : warp(threadIdx.x >> 5),
        gid((threadIdx.x & 31) >> 2),
        tig(threadIdx.x & 3),
        first_row(blockIdx.y * GemmShape::kRows * row_tiles),
        column(min(int(blockIdx.x) * GemmShape::kColumns + 8 * gid, p.out_features - 8)) {}

  // Steps of the whole sum that are this warp's.
  PYENGINE_DEVICE int first_step(int steps) const { return warp * steps / GemmShape::kWarps; }
  PYENGINE_DEVICE int end_step(int steps) const { return (warp + 1) * steps / GemmShape::kWarps; }
};

// A piece of an input row, 16 bytes at `index` elements; zero where there is none.
template <typename T>
PYENGINE_DEVICE uint4 load_input(const CheckpointLinearParams& p, int row, int index) {
  if (row >= p.num_tokens || index >= p.in_features) return uint4{0u, 0u, 0u, 0u};
  return load_vector<uint4>(static_cast<const T*>(p.input) + row * p.input_stride + index);
}

// Adds up the warps' sums of 16 rows and writes them. acc[j][e] is row gid + 8 (e >> 1) of tile j, its column 2 tig + (e & 1).
// column_of(j): the lane's column, 0 to 7, that makes tile j. finish(sum, row, column) -> float, without the bias.
template <typename T, typename Sum, typename ColumnOf, typename Finish>
PYENGINE_DEVICE void write_rows(const CheckpointLinearParams& p, const GemmLane& lane, const Sum (&acc)[8][4], int first_row,
                                ColumnOf&& column_of, Finish&& finish) {
  using Shape = GemmShape;
  Sum* sums = reinterpret_cast<Sum*>(shared_memory());  // [kWarps, kRows, kPitch]
#pragma unroll
  for (int e = 0; e < 4; e++) {
    Sum* row = sums + (lane.warp * Shape::kRows + lane.gid + 8 * (e >> 1)) * Shape::kPitch + 8 * (2 * lane.tig + (e & 1));
#pragma unroll
    for (int j = 0; j < 8; j++) row[column_of(j)] = acc[j][e];
  }
  __syncthreads();
  const int r = threadIdx.x / 16, c = threadIdx.x % 16 * 4, row = first_row + r;
  const int column = blockIdx.x * Shape::kColumns + c;
  if (row < p.num_tokens && column < p.out_features) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Sum sum = 0;
#pragma unroll
      for (int w = 0; w < Shape::kWarps; w++) sum += sums[(w * Shape::kRows + r) * Shape::kPitch + c + i];
      x[i] = finish(sum, row, column + i);
      if (p.bias) x[i] += to_float(static_cast<const T*>(p.bias)[column + i]);
    }
    store_elements<4>(static_cast<T*>(p.out) + row * p.out_stride + column, x);
  }
  __syncthreads();  // the sums are read: the next rows' may come
}

// Runs the kernel that fits the number of rows: `few` for up to 16, `many` for more, 16 row_tiles a block.
template <typename Kernel>
const char* launch_gemm(const CheckpointLinearParams& p, Kernel* few, Kernel* many, int row_tiles, void* stream) {
  const bool is_few = p.num_tokens <= GemmShape::kRows;
  const unsigned rows = is_few ? GemmShape::kRows : row_tiles * GemmShape::kRows;
  const dim3 grid((p.out_features + GemmShape::kColumns - 1) / GemmShape::kColumns, (p.num_tokens + rows - 1) / rows);
  return launch(is_few ? few : many, grid, dim3(GemmShape::kThreads), GemmShape::kSharedBytes, stream, p);
}

inline bool starts_at_multiple_of(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// What the kernels rely on beyond the launcher's checks. input_bytes: of one element; depth: k's multiple.
inline const char* check_gemm(const CheckpointLinearParams& p, int input_bytes, int depth) {
  if (p.out_features % 8 != 0) return "out_features must be a multiple of 8";
  if (p.in_features % depth != 0)
    return depth == 32 ? "in_features must be a multiple of 32" : "in_features must be a multiple of 16";
  if (p.input_stride * input_bytes % 16 != 0 || !starts_at_multiple_of(p.input, 16))
    return "rows of the input must start at multiples of 16 bytes";
  if (p.zeros && !starts_at_multiple_of(p.scales, 16)) return "scales must start at a multiple of 16 bytes";
  if (!starts_at_multiple_of(p.weight, 16)) return "the weight must start at a multiple of 16 bytes";
  const int row_bytes = 4 * dtype_size(p.dtype);
  if (!starts_at_multiple_of(p.out, row_bytes) || p.out_stride % 4 != 0)
    return "rows of out must start at multiples of 4 elements";
  return nullptr;
}

}  // namespace pyengine::cuda
