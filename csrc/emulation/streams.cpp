#include "streams.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace pyengine::emulation {

namespace {

struct Event {
  int64_t stream;
  uint64_t position;  // the event fires when the stream has run the operations before this number
};

struct Operation {
  enum class Kind { kCopy, kWaitEvent } kind;
  uint64_t batch;  // copies of one batch may run in any order
  char* dst;
  const char* src;
  size_t bytes;
  Event event;
};

struct Stream {
  std::deque<Operation> queue;
  uint64_t first = 0;  // sequence number of queue.front()
};

struct State {
  std::recursive_mutex mutex;
  std::map<int64_t, Stream> streams = {{0, {}}};
  std::map<int64_t, Event> events;
  int64_t next_stream = 1, next_event = 1, current = 0;
  uint64_t next_batch = 1, random = 1;
};

State& state() {
  static State s;
  return s;
}

uint64_t next_random() {
  uint64_t& x = state().random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

Stream& find_stream(int64_t id) {
  auto it = state().streams.find(id);
  if (it == state().streams.end()) throw std::invalid_argument("emulated stream " + std::to_string(id) + " does not exist");
  return it->second;
}

const Event& find_event(int64_t id) {
  auto it = state().events.find(id);
  if (it == state().events.end()) throw std::invalid_argument("emulated event " + std::to_string(id) + " does not exist");
  return it->second;
}

bool has_fired(const Event& e) { return find_stream(e.stream).first >= e.position; }
void run_until(Stream& stream, uint64_t position);

void run_front(Stream& stream) {
  const Operation op = stream.queue.front();
  if (op.kind == Operation::Kind::kWaitEvent) {
    run_until(find_stream(op.event.stream), op.event.position);
  } else {
    std::memcpy(op.dst, op.src, op.bytes);
  }
  stream.queue.pop_front();
  stream.first++;
}

// Swaps the front copy with another one of its batch.
void shuffle_front(Stream& stream, uint64_t position) {
  size_t copies = 0;
  const size_t limit = std::min<size_t>(stream.queue.size(), position - stream.first);
  while (copies < limit && stream.queue[copies].kind == Operation::Kind::kCopy &&
         stream.queue[copies].batch == stream.queue[0].batch)
    copies++;
  if (copies > 1) std::swap(stream.queue[0], stream.queue[next_random() % copies]);
}

// Whether a copy that is still queued reads from [p, p + bytes).
bool is_queued_source(const Stream& stream, const char* p, size_t bytes) {
  for (const Operation& op : stream.queue)
    if (op.kind == Operation::Kind::kCopy && op.src < p + bytes && p < op.src + op.bytes) return true;
  return false;
}

// The other streams are not idle meanwhile: each runs a random part of what it has.
void run_until(Stream& stream, uint64_t position) {
  while (stream.first < position) {
    for (auto& [id, other] : state().streams)
      if (&other != &stream && !other.queue.empty() && other.queue.front().kind == Operation::Kind::kCopy &&
          next_random() % 4 == 0)
        run_front(other);
    shuffle_front(stream, position);
    run_front(stream);
  }
}

uint64_t end_of(const Stream& stream) { return stream.first + stream.queue.size(); }
int64_t stream_id(void* stream) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(stream)); }

}  // namespace

int64_t stream_create() {
  std::lock_guard lock(state().mutex);
  state().streams[state().next_stream];
  return state().next_stream++;
}

int64_t set_current_stream(int64_t stream) {
  std::lock_guard lock(state().mutex);
  find_stream(stream);
  return std::exchange(state().current, stream);
}

void* current_stream() {
  std::lock_guard lock(state().mutex);
  return reinterpret_cast<void*>(static_cast<intptr_t>(state().current));
}

void stream_copy_batch(void* stream, size_t count, void* const* dst, const void* const* src, const size_t* bytes) {
  std::lock_guard lock(state().mutex);
  const uint64_t batch = state().next_batch++;
  Stream& queue = find_stream(stream_id(stream));
  for (size_t i = 0; i < count; i++) {
    char* to = static_cast<char*>(dst[i]);
    const char* from = static_cast<const char*>(src[i]);
    if (stream_id(stream) == 0) {
      std::memcpy(to, from, bytes[i]);
      continue;
    }
    if (!is_queued_source(queue, to, bytes[i])) std::memset(to, 0xFF, bytes[i]);
    queue.queue.push_back({Operation::Kind::kCopy, batch, to, from, bytes[i], {}});
  }
}

void stream_before_kernel(void* stream) {
  if (stream_id(stream) != 0) stream_synchronize(stream_id(stream));
}

int64_t event_record(int64_t stream) {
  std::lock_guard lock(state().mutex);
  state().events[state().next_event] = {stream, end_of(find_stream(stream))};
  return state().next_event++;
}

void event_release(int64_t event) {
  std::lock_guard lock(state().mutex);
  find_event(event);
  state().events.erase(event);
}

bool event_query(int64_t event) {
  std::lock_guard lock(state().mutex);
  const Event& e = find_event(event);
  if (!has_fired(e) && next_random() % 4 == 0) run_until(find_stream(e.stream), find_stream(e.stream).first + 1);
  return has_fired(e);
}

void event_synchronize(int64_t event) {
  std::lock_guard lock(state().mutex);
  const Event& e = find_event(event);
  run_until(find_stream(e.stream), e.position);
}

void stream_wait_event(int64_t stream, int64_t event) {
  std::lock_guard lock(state().mutex);
  const Event& e = find_event(event);
  if (stream == 0)
    run_until(find_stream(e.stream), e.position);
  else if (!has_fired(e))
    find_stream(stream).queue.push_back({Operation::Kind::kWaitEvent, 0, nullptr, nullptr, 0, e});
}

void stream_synchronize(int64_t stream) {
  std::lock_guard lock(state().mutex);
  run_until(find_stream(stream), end_of(find_stream(stream)));
}

void seed_streams(uint64_t seed) {
  std::lock_guard lock(state().mutex);
  state().random = seed * 0x9E3779B97F4A7C15ull | 1;
}

}  // namespace pyengine::emulation
