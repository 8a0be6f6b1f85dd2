// What the extension module `_emulated` offers beside the ops: streams, scheduling options, checked memory, findings.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "emulation.h"
#include "streams.h"

namespace pyengine::emulation {

inline Order order_of(const std::string& name) {
  if (name == "forward") return Order::kForward;
  if (name == "reverse") return Order::kReverse;
  if (name == "random") return Order::kRandom;
  throw std::invalid_argument("order must be forward, reverse or random, not " + name);
}

inline void define_streams(pybind11::module_& m) {
  using pybind11::arg;
  m.def("emulated_stream_create", &stream_create, "A new stream's id; 0 is the compute stream.");
  m.def("emulated_set_stream", &set_current_stream, arg("stream"),
        "Where ops are queued from now on; returns the stream before.");
  m.def("emulated_stream_synchronize", &stream_synchronize, arg("stream"));
  m.def("emulated_stream_wait_event", &stream_wait_event, arg("stream"), arg("event"),
        "What is queued on the stream from now on runs after the event.");
  m.def("emulated_event_record", &event_record, arg("stream"),
        "A new event's id: the end of what is queued on the stream now.");
  m.def("emulated_event_release", &event_release, arg("event"));
  m.def("emulated_event_query", &event_query, arg("event"), "Whether the event fired. Each asking may let queued work run.");
  m.def("emulated_event_synchronize", &event_synchronize, arg("event"));
  m.def("emulated_seed_streams", &seed_streams, arg("seed"), "Restart the random order of copies.");
}

inline void define_emulation(pybind11::module_& m) {
  using pybind11::arg;
  define_streams(m);
  m.def(
      "emulated_set_schedule",
      [](const std::string& threads, const std::string& blocks, uint64_t seed) {
        options().thread_order = order_of(threads);
        options().block_order = order_of(blocks);
        options().seed = seed;
      },
      arg("thread_order") = "forward", arg("block_order") = "forward", arg("seed") = 1,
      "The order in which a launch's threads and blocks run: forward, reverse or random.");
  m.def(
      "emulated_statistics",
      [] {
        pybind11::dict d;
        d["launches"] = statistics.launches;
        d["switches"] = statistics.switches;
        d["warp_collectives"] = statistics.warp_collectives;
        d["barriers"] = statistics.barriers;
        d["mma"] = statistics.mma;
        return d;
      },
      "Counts since the module was loaded.");
  m.def(
      "emulated_allocate",
      [](size_t bytes, const std::string& name, bool initialised) {
        return reinterpret_cast<uintptr_t>(allocate(bytes, name.c_str(), initialised));
      },
      arg("bytes"), arg("name"), arg("initialised"), "Address of a new checked buffer, filled with 0xFF bytes.");
  m.def("emulated_release", [](uintptr_t buffer) { release(reinterpret_cast<void*>(buffer)); }, arg("buffer"));
  m.def(
      "emulated_mark_initialised", [](uintptr_t p, size_t bytes) { mark_initialised(reinterpret_cast<void*>(p), bytes); },
      arg("address"), arg("bytes"));
  m.def(
      "emulated_take_reports",
      [] {
        std::vector<std::string> taken;
        taken.swap(reports());
        return taken;
      },
      "What the sanitizer build found since the last call.");
#ifdef PYENGINE_SANITIZER
  m.attr("is_sanitizer") = true;
#else
  m.attr("is_sanitizer") = false;
#endif
}

}  // namespace pyengine::emulation
