// Emulated streams and events. Kernels and copies on stream 0 (the compute stream) run at once. Copies on any other
// stream run late: when an event or a synchronisation forces them, in a random order that a seed fixes, together with a
// random part of what else is queued. Until a copy runs its destination reads as 0xFF bytes (NaN), and its source is read
// only then, so that a missing wait shows in the data.
//
// From Python (functions of the extension module `_emulated`, for the emulated backend):
//   stream = emulated_stream_create()            an id; 0 is the compute stream
//   emulated_set_stream(stream) -> previous id   where swap_blocks is queued from now on
//   event = emulated_event_record(stream)        an id; released with emulated_event_release(event)
//   emulated_stream_wait_event(stream, event)    work queued on `stream` later runs after the event; stream 0 waits at once
//   emulated_event_query(event) -> bool          each asking may let work go on, as time does on a device
//   emulated_event_synchronize(event), emulated_stream_synchronize(stream)
//   emulated_seed_streams(seed)                  restarts the random order
#pragma once
#include <cstddef>
#include <cstdint>

namespace pyengine::emulation {

int64_t stream_create();
// The stream that launchers are given; returns the one before.
int64_t set_current_stream(int64_t stream);
void* current_stream();  // as the opaque pointer that a launcher takes

// Copies in no promised order among each other; batches of one stream run in the order they were queued in.
void stream_copy_batch(void* stream, size_t count, void* const* dst, const void* const* src, const size_t* bytes);
// A kernel is about to run on `stream`: everything queued there runs first.
void stream_before_kernel(void* stream);

int64_t event_record(int64_t stream);
void event_release(int64_t event);
bool event_query(int64_t event);
void event_synchronize(int64_t event);
void stream_wait_event(int64_t stream, int64_t event);
void stream_synchronize(int64_t stream);
void seed_streams(uint64_t seed);

}  // namespace pyengine::emulation
