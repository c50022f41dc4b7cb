// Stream capture and graphs. A captured stream's work goes to a graph's list instead of its queue; launching the graph
// runs the list. The order in which work of several joined streams was captured is one that the graph allows.
#include <vector>

#include "stream.h"

namespace cudasim {

struct Graph {
  std::vector<Item> work = {};
  std::vector<Stream*> streams = {};  // being captured into it; the first is where capture began
  bool strict = true;                 // mode global or thread-local: calls that might wait are refused
  bool broken = false;                // such a call was made all the same
};

namespace {

std::vector<std::shared_ptr<Graph>> capturing;

void release(const std::shared_ptr<Graph>& g) {
  for (Stream* s : g->streams) s->capture = nullptr;
  g->streams.clear();
  std::erase(capturing, g);
}

}  // namespace

// Which calls a capture forbids: what waits for a captured stream or allocates there, and in strict mode what waits
// or allocates anywhere (no stream given). A forbidden call also ends the capture in an error.
CUresult capture_refuses(Stream* s) {
  if (s && s->capture) {
    s->capture->broken = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (!s)
    for (auto& g : capturing)
      if (g->strict) {
        g->broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
      }
  return CUDA_SUCCESS;
}

CUresult capture_work(Stream* s, Item item) {
  if (s->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  s->capture->work.push_back(std::move(item));
  s->captured++;
  return CUDA_SUCCESS;
}

CUresult capture_event(Stream* s, EventState& e) {
  e.capture = s->capture;
  e.captured = s->captured;
  e.stream = s;
  return CUDA_SUCCESS;
}

CUresult capture_join(Stream* s, EventState& e) {
  if (!s || (s->capture && s->capture != e.capture) || e.capture->streams.empty())
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  if (!s->capture) {
    s->capture = e.capture;
    s->captured = s->joined = 0;
    e.capture->streams.push_back(s);
  }
  if (s != e.stream) {
    e.stream->joined = std::max(e.stream->joined, e.captured);
    s->captured++;  // the wait itself: whoever joins this stream joins what it waited for
  }
  return CUDA_SUCCESS;
}

void capture_abandon(Stream* s) {
  if (auto g = s->capture) release(g);
}

}  // namespace cudasim

// ---- entry points --------------------------------------------------------------------------
using namespace cudasim;
struct GraphHandle { std::shared_ptr<Graph> graph; };

EXPORT CUresult cuStreamBeginCapture_v2(void* h, int mode) {
  BOUND();
  Stream* s = stream_of(h);
  if (!s || uintptr_t(h) <= 2) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;  // the default stream cannot be captured
  if (s->capture) return CUDA_ERROR_INVALID_VALUE;
  s->capture = std::make_shared<Graph>();
  s->capture->streams.push_back(s);
  s->capture->strict = mode != 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  s->captured = s->joined = 0;
  capturing.push_back(s->capture);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamEndCapture(void* h, GraphHandle** out) {
  BOUND();
  *out = nullptr;
  Stream* s = stream_of(h);
  if (!s || !s->capture) return CUDA_ERROR_INVALID_VALUE;
  auto g = s->capture;
  if (g->streams[0] != s) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  bool joined = true;
  for (size_t i = 1; i < g->streams.size(); i++) joined &= g->streams[i]->joined == g->streams[i]->captured;
  release(g);
  if (g->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  *out = new GraphHandle{g};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamIsCapturing(void* h, int* status) {
  BOUND();
  Stream* s = stream_of(h);
  *status = !s || !s->capture ? 0 : s->capture->broken ? 2 : 1;  // NONE, INVALIDATED, ACTIVE
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphGetNodes(GraphHandle* g, void** nodes, size_t* n) {
  ENTER();
  if (nodes) return CUDA_ERROR_NOT_SUPPORTED;
  *n = g->graph->work.size();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphInstantiateWithFlags(GraphHandle** exec, GraphHandle* g, unsigned long long) {
  BOUND();
  *exec = new GraphHandle{g->graph};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGraphUpload(GraphHandle*, void*) { CONTEXT(); return CUDA_SUCCESS; }
EXPORT CUresult cuGraphLaunch(GraphHandle* exec, void* h) {
  CONTEXT();
  Stream* s = stream_of(h);
  if (s->capture) return capture_refuses(s);  // graphs within graphs are not simulated
  return enqueue(s, "graph", [g = exec->graph, at = size_t(0)]() mutable {
    for (; at < g->work.size(); at++) {  // goes on where a kernel has waited for another process
      if (config().trace) say("run   %s (graph)", g->work[at].name.c_str());
      TRY(g->work[at].work());
    }
    return CUDA_SUCCESS;
  });
}
EXPORT CUresult cuGraphExecDestroy(GraphHandle* g) { ENTER(); delete g; return CUDA_SUCCESS; }
EXPORT CUresult cuGraphDestroy(GraphHandle* g) { ENTER(); delete g; return CUDA_SUCCESS; }
