// The products on AMX, for tiles of up to 16 rows.
#pragma once
#include "../../cpu/amx.h"
#include "w8a16_tile.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kW8A16TileRows = 16;

// Registers: 0, 1 sums of the high halves, 2, 3 of the low ones, for 16 columns each; 4, 5 rows; 6, 7 columns.
//
// While a call's products are under way, the integers of an earlier call are scaled and added: tiles and vectors are units of
// their own. A stored tile must have reached the cache before vectors read it, or they wait for it again and again; three
// calls later it has.
class W8A16TileProducts {
 public:
  explicit W8A16TileProducts(int num_rows) {
    TileConfig config;
    for (int i = 0; i < 6; i++) config.set(i, num_rows, 64);
    for (int i = 6; i < 8; i++) config.set(i, 16, 64);
    configure_tiles(config);
  }
  void release() const { release_tiles(); }

  void run(const W8A16TileArgs& args) {
    zero_tile_register<0>();
    zero_tile_register<1>();
    zero_tile_register<2>();
    zero_tile_register<3>();
    const int oldest = (calls_ - kDelay) & (kCalls - 1);
    const Call earlier = waiting_[oldest];
    int row = 0;
    for (int step = 0; step < args.num_steps; step++) {
      multiply_step(args, step);
      const int end = (step + 1) * earlier.num_rows / args.num_steps;
      add(earlier, integers_[oldest], row, end);
      row = end;
    }
    const int slot = calls_++ & (kCalls - 1);
    store_tile_register<0>(integers_[slot][0], 64);
    store_tile_register<2>(integers_[slot][1], 64);
    store_tile_register<1>(integers_[slot][2], 64);
    store_tile_register<3>(integers_[slot][3], 64);
    waiting_[oldest] = {};
    waiting_[slot] = {args.factors, args.sums, args.ld, args.num_rows, args.first};
  }
  // Sums are complete after this.
  void finish() {
    for (int i = 0; i < kDelay; i++, calls_++) {
      Call& call = waiting_[(calls_ - kDelay) & (kCalls - 1)];
      add(call, integers_[(calls_ - kDelay) & (kCalls - 1)], 0, call.num_rows);
      call = {};
    }
  }

 private:
  static constexpr int kDelay = 3, kCalls = 4;
  using Integers = int32_t[4][kW8A16TileRows * 16];  // high and low halves' sums of the first 16 columns, and of the others

  struct Call {
    const float* factors = nullptr;
    float* sums = nullptr;
    int64_t ld = 0;
    int num_rows = 0;
    bool first = false;
  };

  static inline __attribute__((always_inline)) void multiply_step(const W8A16TileArgs& args, int step) {
    const uint8_t* high = args.rows + step * w8a16_record_bytes(args.num_rows);
    const int8_t* weight = args.weight + step * kW8A16StepBytes;
    const int8_t* fetch = args.fetch + step * args.fetch_lines * 64;
    for (int i = 0; i < args.fetch_lines; i++) __builtin_prefetch(fetch + 64 * i, 0, 3);
    load_tile_register<4>(high, kW8A16Step);
    load_tile_register<6>(weight, 64);
    load_tile_register<5>(high + args.num_rows * kW8A16Step, kW8A16Step);
    load_tile_register<7>(weight + 1024, 64);
    multiply_int8_tiles<0, 4, 6>();
    multiply_uint8_int8_tiles<2, 5, 6>();
    multiply_int8_tiles<1, 4, 7>();
    multiply_uint8_int8_tiles<3, 5, 7>();
  }

  // Rows [row, end) of an earlier call.
  static inline __attribute__((always_inline)) void add(const Call& call, const Integers& integers, int row, int end) {
    if (row >= end) return;
    const __m512 scale[2] = {_mm512_loadu_ps(call.factors), _mm512_loadu_ps(call.factors + 16)};
    const __mmask16 keep = call.first ? 0 : 0xffff;
    for (; row < end; row++) {
      float* sums = call.sums + row * call.ld;
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m512i high = _mm512_load_si512(&integers[2 * h][row * 16]);
        const __m512i low = _mm512_load_si512(&integers[2 * h + 1][row * 16]);
        const __m512 value = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
        _mm512_storeu_ps(sums + 16 * h, _mm512_fmadd_ps(value, scale[h], _mm512_maskz_loadu_ps(keep, sums + 16 * h)));
      }
    }
  }

  alignas(64) Integers integers_[kCalls];
  Call waiting_[kCalls];
  unsigned calls_ = kDelay;
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
