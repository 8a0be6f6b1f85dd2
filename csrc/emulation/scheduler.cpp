// Fibers, barriers, warp collectives and the launch loop. Never compiled with -fsanitize=thread.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>

#include "context_switch.h"
#include "runtime.h"

namespace pyengine::emulation {

Thread* current_thread = nullptr;
Statistics statistics{};
Runtime runtime{};

Options& options() {
  static Options o;
  return o;
}
std::vector<std::string>& reports() {
  static std::vector<std::string> r;
  return r;
}

namespace {

constexpr size_t kStackBytes = 64 * 1024;

uint64_t next_random() {
  uint64_t& x = runtime.random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

int pick(uint32_t candidates) {
  switch (options().thread_order) {
    case Order::kForward:
      return __builtin_ctz(candidates);
    case Order::kReverse:
      return 31 - __builtin_clz(candidates);
    case Order::kRandom:
      break;
  }
  const int start = static_cast<int>(next_random() & 31);
  const uint32_t above = candidates >> start;
  return above ? start + __builtin_ctz(above) : __builtin_ctz(candidates);
}

void make_ready(Thread* t) {
  t->state = kRunning;
  runtime.warps[t->warp].ready |= 1u << t->lane;
  runtime.ready_warps |= 1u << t->warp;
}

Thread* take_ready() {
  const int w = pick(runtime.ready_warps);
  Warp& warp = runtime.warps[w];
  const int lane = pick(warp.ready);
  warp.ready &= ~(1u << lane);
  if (!warp.ready) runtime.ready_warps &= ~(1u << w);
  return &runtime.threads[w * kWarpSize + lane];
}

[[noreturn]] void return_to_launch() {
  statistics.switches++;
  void* unused;
  pyengine_emulation_switch(&unused, runtime.main_stack_pointer);
  __builtin_unreachable();
}

[[noreturn]] void fail_deadlock() {
  std::string text = "deadlock: no thread can run;";
  int named = 0;
  for (int i = 0; i < runtime.num_threads && named < 4; i++) {
    const Thread& t = runtime.threads[i];
    if (t.state != kAtBarrier && t.state != kAtCollective) continue;
    text += " {" + describe(&t) + (t.state == kAtBarrier ? " at the barrier " : " at the warp collective ") + t.wait_file +
            ":" + std::to_string(t.wait_line) + "}";
    named++;
  }
  fail(text);
}

bool revive_yielded() {
  bool any = false;
  for (int w = 0; w < runtime.num_warps; w++) {
    Warp& warp = runtime.warps[w];
    if (!warp.yielded) continue;
    warp.ready |= warp.yielded;
    warp.yielded = 0;
    runtime.ready_warps |= 1u << w;
    any = true;
  }
  return any;
}

// Gives the CPU to a thread that can run; returns when the caller is chosen again.
void reschedule() {
  if (!runtime.ready_warps) {
    if (!revive_yielded()) fail_deadlock();
    if (++runtime.idle_rounds > 1000000) fail("livelock: every thread only waits in a loop");
  }
  Thread* from = current_thread;
  Thread* to = take_ready();
  if (to == from) return;
  statistics.switches++;
  current_thread = to;
  pyengine_emulation_switch(&from->stack_pointer, to->stack_pointer);
}

void thread_main() {
  runtime.body(runtime.argument);
  Thread* me = current_thread;
  if (!me->copies.empty() || me->open_group) fail("a thread exits with cp.async copies that it did not wait for");
  me->state = kDone;
  runtime.warps[me->warp].alive &= ~(1u << me->lane);
  if (++runtime.num_done == runtime.num_threads) return_to_launch();
  reschedule();
  __builtin_unreachable();
}

// All threads have arrived: what each warp did before happens before what any of them does next.
void release_barrier() {
  statistics.barriers++;
  runtime.idle_rounds = 0;
  uint32_t joined[kMaxWarps] = {};
  for (int w = 0; w < runtime.num_warps; w++)
    for (int v = 0; v < runtime.num_warps; v++) joined[v] = std::max(joined[v], runtime.clock[w][v]);
  for (int w = 0; w < runtime.num_warps; w++) {
    std::memcpy(runtime.clock[w], joined, sizeof joined);
    runtime.clock[w][w]++;
    runtime.warps[w].epoch++;
  }
  for (Thread* t : runtime.barrier.arrived) make_ready(t);
  runtime.barrier.arrived.clear();
}

void begin_block(uint64_t index, int num_threads) {
  const dim3 grid = runtime.block.grid, dim = runtime.block.dim;
  runtime.block.idx = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y), unsigned(index / grid.x / grid.y)};
  if (runtime.block.shared_bytes) std::memset(runtime.block.shared, 0xFF, runtime.block.shared_bytes);
  runtime.num_done = 0;
  runtime.ready_warps = 0;
  runtime.idle_rounds = 0;
  runtime.barrier.arrived.clear();
  std::memset(runtime.clock, 0, sizeof runtime.clock);
  for (int w = 0; w < runtime.num_warps; w++) {
    const int lanes = std::min(kWarpSize, num_threads - w * kWarpSize);
    Warp& warp = runtime.warps[w];
    warp.alive = warp.ready = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
    warp.yielded = 0;
    warp.num_collectives = 0;
    warp.epoch = 1;
    runtime.ready_warps |= 1u << w;
    runtime.clock[w][w] = 1;
  }
  for (int i = 0; i < num_threads; i++) {
    Thread& t = runtime.threads[i];
    t.idx = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
    t.linear = i;
    t.lane = i % kWarpSize;
    t.warp = i / kWarpSize;
    t.block = &runtime.block;
    t.state = kRunning;
    t.copies.clear();
    t.copy_groups.clear();
    t.open_group = 0;
    t.wait_file = "?";
    t.stack_pointer = make_stack(runtime.stacks + size_t(i) * kStackBytes, kStackBytes, thread_main);
  }
  sanitizer_begin_block();
}

void* map_region(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return p;
}

std::vector<uint32_t> block_sequence(uint64_t num_blocks) {
  std::vector<uint32_t> order(num_blocks);
  const bool reverse = options().block_order == Order::kReverse;
  for (uint64_t i = 0; i < num_blocks; i++) order[i] = static_cast<uint32_t>(reverse ? num_blocks - 1 - i : i);
  if (options().block_order == Order::kRandom)
    for (uint64_t i = num_blocks; i > 1; i--) std::swap(order[i - 1], order[next_random() % i]);
  return order;
}

// What a CUDA launch would refuse.
void check_launch(dim3 grid, dim3 block, size_t shared_bytes) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads) throw std::runtime_error("invalid block size");
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
    throw std::runtime_error("invalid grid size");
  if (shared_bytes > options().max_shared_bytes) throw std::runtime_error("too much dynamic shared memory");
}

}  // namespace

std::string describe(const Thread* t) {
  const uint3 b = runtime.block.idx;
  return "block (" + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) + ") thread " +
         std::to_string(t->linear) + " (warp " + std::to_string(t->warp) + " lane " + std::to_string(t->lane) + ")";
}

void fail(const std::string& what) {
  if (!current_thread) throw std::runtime_error(what);
  runtime.failed = true;
  runtime.failure = what + " [" + describe(current_thread) + "]";
  return_to_launch();
}

void yield() {
  runtime.warps[current_thread->warp].yielded |= 1u << current_thread->lane;
  current_thread->state = kYielded;
  reschedule();
  current_thread->state = kRunning;
}

void block_barrier(const char* file, int line) {
  Barrier& b = runtime.barrier;
  auto place = [](const char* f, int l) { return std::string(f) + ":" + std::to_string(l); };
  if (b.arrived.empty()) {
    b.file = file;
    b.line = line;
  } else if (b.file != file || b.line != line) {
    fail("__syncthreads reached from two places: " + place(b.file, b.line) + " and " + place(file, line));
  }
  if (runtime.num_done) fail("__syncthreads after a thread of the block has exited, at " + place(file, line));
  current_thread->state = kAtBarrier;
  current_thread->wait_file = file;
  current_thread->wait_line = line;
  b.arrived.push_back(current_thread);
  if (static_cast<int>(b.arrived.size()) == runtime.num_threads) release_barrier();
  reschedule();
}

void warp_collective(uint32_t mask, const void* kind, void* payload, WarpFunction function, bool orders_memory,
                     const char* file, int line) {
  Thread* me = current_thread;
  Warp& warp = runtime.warps[me->warp];
  auto place = [](const char* f, int l) { return std::string(f) + ":" + std::to_string(l); };
  if (!(mask >> me->lane & 1)) fail("warp collective: the calling lane is not in its mask, at " + place(file, line));
  const int lanes = runtime.num_threads - me->warp * kWarpSize;
  if (lanes < kWarpSize) mask &= (1u << lanes) - 1;
  if (mask & ~warp.alive) fail("warp collective names a lane that has exited, at " + place(file, line));
  warp.payload[me->lane] = payload;
  int i = 0;
  while (i < warp.num_collectives && !(warp.collectives[i].mask & mask)) i++;
  if (i == warp.num_collectives) {
    if (i == 4) fail("too many warp collectives at once");
    warp.collectives[warp.num_collectives++] = {mask, 0, kind, file, line};
  }
  Collective& c = warp.collectives[i];
  if (c.mask != mask || c.kind != kind || c.line != line)
    fail("divergent warp collective: lanes wait at " + place(c.file, c.line) + " and at " + place(file, line));
  c.arrived |= 1u << me->lane;
  me->wait_file = file;
  me->wait_line = line;
  if (c.arrived == mask) {
    statistics.warp_collectives++;
    runtime.idle_rounds = 0;
    function(warp.payload, mask);
    if (orders_memory) warp.epoch++;
    warp.collectives[i] = warp.collectives[--warp.num_collectives];
    warp.ready |= mask;
    runtime.ready_warps |= 1u << me->warp;
    for (uint32_t m = mask; m; m &= m - 1) runtime.threads[me->warp * kWarpSize + __builtin_ctz(m)].state = kRunning;
  } else {
    me->state = kAtCollective;
  }
  reschedule();
}

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* argument) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  check_launch(grid, block, shared_bytes);
  if (!runtime.stacks) {
    runtime.stacks = static_cast<char*>(map_region(kStackBytes * kMaxThreads));
    runtime.shared_region = static_cast<unsigned char*>(map_region(kSharedRegion));
  }
  const int num_threads = static_cast<int>(block.x * block.y * block.z);
  statistics.launches++;
  runtime.failed = false;
  runtime.body = body;
  runtime.argument = argument;
  runtime.num_threads = num_threads;
  runtime.num_warps = (num_threads + kWarpSize - 1) / kWarpSize;
  runtime.random_state = options().seed * 0x9E3779B97F4A7C15ull | 1;
  runtime.block.grid = grid;
  runtime.block.dim = block;
  runtime.block.shared_bytes = shared_bytes;
  runtime.block.shared = runtime.shared_region + kSharedRegion / 2;
  sanitizer_begin_launch();
  for (uint32_t index : block_sequence(uint64_t(grid.x) * grid.y * grid.z)) {
    begin_block(index, num_threads);
    current_thread = take_ready();
    pyengine_emulation_switch(&runtime.main_stack_pointer, current_thread->stack_pointer);
    current_thread = nullptr;
    if (runtime.failed) throw std::runtime_error("emulated kernel: " + runtime.failure);
  }
}

}  // namespace pyengine::emulation
