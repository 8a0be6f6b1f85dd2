// The products on AMX, for tiles of up to 16 rows.
#pragma once
#include "../../cpu/amx.h"
#include "w8a16_tile.h"

namespace pyengine::cpu {
namespace PE_ISA {

constexpr int kW8A16TileRows = 16;

// Registers: 0, 1 sums of the high and the low halves for 16 columns, 2, 3 for the next 16; 4, 5 rows; 6, 7 columns.
//
// A call's sums stay in the registers until the next call's first products want them: each is stored just before, while the
// others' products go on, and what was stored is scaled and added beside the later products. Tiles and vectors are units of
// their own.
class W8A16TileProducts {
 public:
  explicit W8A16TileProducts(int tile_rows) {
    TileConfig config;
    for (int i = 0; i < 6; i++) config.set(i, tile_rows, 64);
    for (int i = 6; i < 8; i++) config.set(i, 16, 64);
    configure_tiles(config);
  }
  void release() const { release_tiles(); }

  void run(const W8A16TileArgs& args) {
    const Call earlier = waiting_;
    load_step(args, 0);
    renew_tile_register<0>();
    multiply_int8_tiles<0, 4, 6>();
    renew_tile_register<1>();
    multiply_uint8_int8_tiles<1, 5, 6>();
    renew_tile_register<2>();
    multiply_int8_tiles<2, 4, 7>();
    renew_tile_register<3>();
    multiply_uint8_int8_tiles<3, 5, 7>();
    const int later_steps = args.num_steps - 1;
    int row = 0;
    for (int step = 1; step <= later_steps; step++) {
      load_step(args, step);
      multiply_int8_tiles<0, 4, 6>();
      multiply_uint8_int8_tiles<1, 5, 6>();
      multiply_int8_tiles<2, 4, 7>();
      multiply_uint8_int8_tiles<3, 5, 7>();
      const int end = step * earlier.num_rows / later_steps;
      add(earlier, row, end);
      row = end;
    }
    add(earlier, row, earlier.num_rows);
    waiting_ = {args.factors, args.sums, args.ld, args.num_rows, args.first};
  }
  // Sums are complete after this.
  void finish() {
    renew_tile_register<0>();
    renew_tile_register<1>();
    renew_tile_register<2>();
    renew_tile_register<3>();
    add(waiting_, 0, waiting_.num_rows);
    waiting_ = {};
  }

 private:
  struct Call {
    const float* factors = nullptr;
    float* sums = nullptr;
    int64_t ld = 0;
    int num_rows = 0;
    bool first = false;
  };

  static inline __attribute__((always_inline)) void load_step(const W8A16TileArgs& args, int step) {
    const uint8_t* high = args.rows + step * w8a16_record_bytes(args.num_rows);
    const int8_t* weight = args.weight + step * kW8A16StepBytes;
    const int8_t* fetch = args.fetch + step * args.fetch_lines * 64;
    for (int i = 0; i < args.fetch_lines; i++) __builtin_prefetch(fetch + 64 * i, 0, 2);
    load_tile_register<4>(high, kW8A16Step);
    load_tile_register<6>(weight, 64);
    load_tile_register<5>(high + args.num_rows * kW8A16Step, kW8A16Step);
    load_tile_register<7>(weight + 1024, 64);
  }

  template <int T>
  inline __attribute__((always_inline)) void renew_tile_register() {
    store_tile_register<T>(integers_[T], 64);
    zero_tile_register<T>();
  }

  // Rows [row, end) of an earlier call.
  inline __attribute__((always_inline)) void add(const Call& call, int row, int end) const {
    if (row >= end) return;
    const __m512 scale[2] = {_mm512_loadu_ps(call.factors), _mm512_loadu_ps(call.factors + 16)};
    const __mmask16 keep = call.first ? 0 : 0xffff;
    for (; row < end; row++) {
      float* sums = call.sums + row * call.ld;
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(&integers_[2 * h][row * 16]));
        const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(&integers_[2 * h + 1][row * 16]));
        const __m512 value = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
        _mm512_storeu_ps(sums + 16 * h, _mm512_fmadd_ps(value, scale[h], _mm512_maskz_loadu_ps(keep, sums + 16 * h)));
      }
    }
  }

  alignas(64) int32_t integers_[4][kW8A16TileRows * 16];  // a register's, once stored
  Call waiting_;                                          // whose sums the registers have
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
