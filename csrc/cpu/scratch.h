// Memory that belongs to a thread and grows with what is asked of it.
#pragma once
#include <cstddef>

namespace pyengine::cpu {

// `bytes` of the calling thread's own memory, aligned to 64 bytes, contents undefined. Valid until the thread's next call, so a
// kernel takes all it needs in a tile at once. Throws std::bad_alloc.
void* thread_scratch(size_t bytes);
// A second such buffer, for what a caller shares with its tiles: `thread_scratch` leaves it alone. Late workers may read it
// (run_restartable_tiles): before it is freed, also at the thread's end, they are waited for.
void* shared_scratch(size_t bytes);

}  // namespace pyengine::cpu
