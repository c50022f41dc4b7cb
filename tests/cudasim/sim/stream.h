// Events, and what streams (stream.cpp) and their capture (graph.cpp) know of each other.
#pragma once
#include <chrono>

#include "core.h"

namespace cudasim {

struct EventState {
  uint64_t recorded = 0, done = 0;  // generations
  Stream* stream = nullptr;
  bool timed = true;
  std::chrono::steady_clock::time_point when;
  std::shared_ptr<Graph> capture;  // last recorded in a captured stream: marks a point of this graph
  size_t captured = 0;             // how much of its stream's captured work lies before it
};
struct Event { std::shared_ptr<EventState> s = std::make_shared<EventState>(); };

CUresult capture_work(Stream*, Item);           // adds to the graph
CUresult capture_event(Stream*, EventState&);   // the event marks this point of the captured stream
CUresult capture_join(Stream*, EventState&);    // the stream waits for it, and so belongs to the capture
void capture_abandon(Stream*);                  // the stream is destroyed

}  // namespace cudasim
