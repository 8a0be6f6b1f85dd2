// What this machine can do at most, for benchmarks/profile_step.py: bytes read a second, and arithmetic from registers alone,
// by instruction set. Usage: limits THREADS. Prints one JSON object. Compiled for the machine it runs on; it ships in nothing.
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int kRounds = 5;         // the best of them counts
constexpr int kAccumulators = 12;  // enough to hide the latency of a multiplication
volatile int64_t g_sink;           // keeps results alive

// Seconds of the fastest round in which `threads` threads run `work(thread)`, starting together.
double best_seconds(int threads, const std::function<void(int)>& work) {
  double best = 1e30;
  for (int round = 0; round < kRounds; round++) {
    std::atomic<int> waiting{threads};
    std::vector<std::chrono::steady_clock::time_point> starts(threads), ends(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; t++) {
      pool.emplace_back([&, t] {
        waiting--;
        while (waiting > 0) std::this_thread::yield();
        starts[t] = std::chrono::steady_clock::now();
        work(t);
        ends[t] = std::chrono::steady_clock::now();
      });
    }
    for (std::thread& thread : pool) thread.join();
    const auto first = *std::min_element(starts.begin(), starts.end()), last = *std::max_element(ends.begin(), ends.end());
    best = std::min(best, std::chrono::duration<double>(last - first).count());
  }
  return best;
}

// XORs `lines` cache lines at each of kStreams places that lie `distance` lines apart: several streams keep more of the
// processor's prefetchers busy, as kernels over panels do, and so does asking ahead of them.
template <int kStreams, bool kPrefetch>
__m256i read_streams(const __m256i* at, size_t lines, size_t distance) {
  constexpr size_t kAhead = 32;  // lines
  __m256i sums[kStreams] = {};
  for (size_t i = 0; i < lines; i++) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; s++) {
      const __m256i* line = at + 2 * (s * distance + i);
      if (kPrefetch) _mm_prefetch(reinterpret_cast<const char*>(line + 2 * kAhead), _MM_HINT_T0);
      sums[s] = _mm256_xor_si256(sums[s], _mm256_xor_si256(_mm256_load_si256(line), _mm256_load_si256(line + 1)));
    }
  }
  for (int s = 1; s < kStreams; s++) sums[0] = _mm256_xor_si256(sums[0], sums[s]);
  return sums[0];
}

// Bytes a second that `threads` threads read, each its own part of an array that no cache holds: the best way counts.
double read_bytes_per_second(int threads) {
  constexpr size_t kBytes = size_t{512} << 20;
  void* pages = mmap(nullptr, kBytes + (4 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    perror("mmap");
    exit(1);
  }
  madvise(pages, kBytes, MADV_HUGEPAGE);
  memset(pages, 1, kBytes);
  const size_t lines = kBytes / 64 / threads / 8 * 8;  // a thread's
  double best = 0;
  const auto measure = [&](auto read, int streams) {
    const double seconds = best_seconds(threads, [&](int t) {
      const __m256i sum = read(static_cast<const __m256i*>(pages) + 2 * t * lines, lines / streams, lines / streams);
      g_sink = _mm256_extract_epi64(sum, 0);
    });
    best = std::max(best, 64.0 * static_cast<double>(lines) * threads / seconds);
  };
  measure(read_streams<1, false>, 1);
  measure(read_streams<1, true>, 1);
  measure(read_streams<4, false>, 4);
  measure(read_streams<4, true>, 4);
  measure(read_streams<8, true>, 8);
  munmap(pages, kBytes + (4 << 20));
  return best;
}

// `step(i)` changes accumulator i in a register; `operations` of one call.
template <class Accumulator, class Step>
double operations_per_second(int threads, double operations, Accumulator start, Step step) {
  constexpr int kIterations = 16'000'000;
  const double seconds = best_seconds(threads, [&](int) {
    Accumulator sums[kAccumulators];
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; j++) sums[j] = start;
    for (int i = 0; i < kIterations; i++) {
#pragma GCC unroll 12
      for (int j = 0; j < kAccumulators; j++) {
        sums[j] = step(sums[j]);
        asm volatile("" : "+v"(sums[j]));  // every step is done, and in a register
      }
    }
    int64_t bits = 0;
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; j++) {
      const Accumulator sum = sums[j];
      int64_t first;
      memcpy(&first, &sum, sizeof first);
      bits ^= first;
    }
    g_sink = bits;
  });
  return operations * kAccumulators * kIterations * threads / seconds;
}

double fp32_avx2(int threads) {
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  return operations_per_second(threads, 16, _mm256_set1_ps(1), [=](__m256 sum) { return _mm256_fmadd_ps(sum, a, b); });
}

// Products of bytes, summed by twos in 16 bits.
double int8_avx2(int threads) {
  const __m256i b = _mm256_set1_epi8(1);
  return operations_per_second(threads, 64, _mm256_set1_epi8(3), [=](__m256i sum) { return _mm256_maddubs_epi16(sum, b); });
}

#ifdef __AVX512F__
double fp32_avx512(int threads) {
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  return operations_per_second(threads, 32, _mm512_set1_ps(1), [=](__m512 sum) { return _mm512_fmadd_ps(sum, a, b); });
}
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
double int8_vnni(int threads) {
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
  const auto step = [=](__m512i sum) { return _mm512_dpbusd_epi32(sum, a, b); };
  return operations_per_second(threads, 128, _mm512_setzero_si512(), step);
}
#endif

#ifdef __AMX_INT8__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Whether the operating system lets this process use AMX tiles.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

double int8_amx(int threads) {
  constexpr int kIterations = 1'000'000;
  const double seconds = best_seconds(threads, [](int) {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    asm volatile("ldtilecfg %0" : : "m"(config));  // gcc 12's intrinsic reads the first bytes only
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int i = 0; i < kIterations; i++) {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_release();
  });
  return 4.0 * 2 * 16 * 16 * 64 * kIterations * threads / seconds;
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? atoi(argv[1]) : 0;
  if (threads < 1) {
    fprintf(stderr, "usage: limits THREADS\n");
    return 1;
  }
  printf("{\"threads\": %d, \"read_bytes_per_s\": %.4g", threads, read_bytes_per_second(threads));
  printf(", \"fp32_ops_per_s\": {\"avx2\": %.4g", fp32_avx2(threads));
#ifdef __AVX512F__
  printf(", \"avx512\": %.4g", fp32_avx512(threads));
#endif
  printf("}, \"int8_ops_per_s\": {\"avx2\": %.4g", int8_avx2(threads));
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
  printf(", \"avx512_vnni\": %.4g", int8_vnni(threads));
#endif
#ifdef __AMX_INT8__
  if (may_use_tiles()) printf(", \"amx\": %.4g", int8_amx(threads));
#endif
  printf("}}\n");
  return 0;
}
