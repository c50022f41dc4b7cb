// Events, and what streams (stream.cpp) and their capture (graph.cpp) know of each other.
#pragma once
#include <chrono>

#include "core.h"
#include "ipc.h"

namespace cudasim {

struct EventState {
  Counters own, *counters = &own;  // generations; those of an event that processes share are in their file
  SharedFile shared;
  uint64_t here = 0;         // the last generation that this process has recorded
  Stream* stream = nullptr;  // where it did
  bool timed = true;
  std::chrono::steady_clock::time_point when;
  std::shared_ptr<Graph> capture;  // last recorded in a captured stream: marks a point of this graph
  size_t captured = 0;             // how much of its stream's captured work lies before it
};
void share_event(EventState&);  // its generations are in its file from now on
struct Event { std::shared_ptr<EventState> s = std::make_shared<EventState>(); };

CUresult capture_work(Stream*, Item);           // adds to the graph
CUresult capture_event(Stream*, EventState&);   // the event marks this point of the captured stream
CUresult capture_join(Stream*, EventState&);    // the stream waits for it, and so belongs to the capture
void capture_abandon(Stream*);                  // the stream is destroyed

}  // namespace cudasim
