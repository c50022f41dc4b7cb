// libnccl stand-in: messages and collectives of device memory between ranks that are processes or threads of this
// machine. Ranks meet in memory that one of them has made; it has no name, so nothing is left of it when they are gone.
// Work is in order in its stream. A send is not done before its receive has begun, wherever the data would fit.
//
// Communicators that do not block let one ask: what was started gets into its stream only then, on the second time.
// Collectives send everything to everybody who needs it; sums are in the order of ranks.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "fail.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
// From libcuda:
EXPORT int cudasim_enqueue_asked(void* stream, const char* name, std::function<int()>* f);
EXPORT bool cudasim_bound();
EXPORT int cudasim_stream_device(void* stream);
EXPORT uint64_t cudasim_host_waits(int device);
EXPORT bool cudasim_range_ok(const void* p, size_t n, const char* what);
EXPORT void cudasim_open(int device, bool on);
EXPORT void cudasim_goes_on_alone();
EXPORT bool cudasim_take_memory(int device, int64_t bytes);
EXPORT int cuCtxGetDevice(int* device);
EXPORT int cuDeviceGetUuid_v2(unsigned char (*uuid)[16], int device);
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device);

using namespace cudasim;

enum Result { OK = 0, CUDA = 1, SYSTEM = 2, INTERNAL = 3, ARGUMENT = 4, USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum Type { INT8 = 0, UINT8 = 1, FLOAT32 = 7, BFLOAT16 = 9 };

struct ncclUniqueId { char bytes[128]; };
struct Config { size_t size; unsigned magic, version; int blocking; };

namespace {

constexpr int kMaxRanks = 16;
constexpr size_t kPipe = 128 << 10;  // bytes between two ranks
constexpr int kNotReady = 600;       // CUDA_ERROR_NOT_READY
constexpr int kBus = 33;             // CU_DEVICE_ATTRIBUTE_PCI_BUS_ID
constexpr unsigned kMagic = 0xcafebeef;

// Whoever asks finds what went wrong last.
thread_local char last[256] = "";
Result refuse(Result r, const char* format, ...) __attribute__((format(printf, 2, 3)));
Result refuse(Result r, const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(last, sizeof last, format, args);
  va_end(args);
  return r;
}

// Beginning and end of a communicator, and all that it does, want the device chosen.
Result no_device() { return refuse(CUDA, "no context was chosen for this thread"); }

// ---- what ranks share ----------------------------------------------------------------------

// From one rank to another. One message at a time: the receiver begins it.
struct Pipe {
  std::atomic<uint64_t> begun;       // messages that the receiver has begun to wait for
  std::atomic<uint64_t> length;      // of the last of them, in bytes
  std::atomic<bool> differ;          // the sender has another length
  std::atomic<uint64_t> head, tail;  // bytes put in and taken out, ever
  char data[kPipe];
};
// The device of a rank.
struct Seat {
  std::atomic<bool> taken;
  unsigned char uuid[16];  // differs between hosts
  int bus;
};
struct Room {
  std::atomic<int> size, joined;
  Seat seats[kMaxRanks];
  Pipe pipes[kMaxRanks][kMaxRanks];
};

// Where the room is: memory without a name, which this process keeps open.
struct Id {
  char mark[16];
  int process, file;
};
constexpr char kMark[16] = "cudasim-nccl";

struct Mapping {
  Room* room = nullptr;
  ~Mapping() { if (room) munmap(static_cast<void*>(room), sizeof(Room)); }
};

// ---- communicators -------------------------------------------------------------------------

struct Message {
  bool sends;
  int peer;
  char* at;
  size_t length;
  bool begun = false;
  size_t moved = 0;
};
// Messages of a device since it was last asked. Groups may be of one message, or a collective.
struct Counts {
  uint64_t groups, sends, receives, bytes_sent;
  uint64_t host_waits;  // for the device, or questions how far it is, between the first group and the last
};
Counts counts[16];
uint64_t waits_before[16];  // host waits when the last group was started

// A piece of work of one stream.
struct Task {
  std::vector<Message> messages = {};
  std::function<void()> finish = [] {};            // with the device's memory open
  std::vector<std::unique_ptr<char[]>> received = {};  // what goes into sums
  bool alone = false;                                  // a collective
};
struct State {
  Mapping mapping;
  int rank, size, device;
  uint64_t sent[kMaxRanks] = {}, taken[kMaxRanks] = {};  // messages that are done, by peer
  std::atomic<bool> aborted = false;
  std::atomic<int> failed = OK;
};

}  // namespace

// What the program holds. Work in streams may live longer.
struct Comm {
  std::shared_ptr<State> state = std::make_shared<State>();
  bool blocks = true, has_met = false, finalized = false;
  int asks = 0;  // until what was started last is under way
  void* stream = nullptr;
  std::shared_ptr<Task> started = {};
  // From the first messages on: connections take memory and time.
  int64_t memory = 0;
  std::chrono::steady_clock::time_point connected = {};
  ~Comm() { if (memory) cudasim_take_memory(state->device, -memory); }
};

namespace {

// Lets this process's code into the device's memory, from the first time it is asked until it ends.
struct Access {
  int device;
  bool open = false;
  explicit Access(int d) : device(d) {}
  void need() { if (!open) cudasim_open(device, open = true); }
  ~Access() { if (open) cudasim_open(device, false); }
};

void copy_in(Pipe& p, const char* from, size_t n) {
  size_t at = p.head % kPipe, first = std::min(n, kPipe - at);
  memcpy(p.data + at, from, first);
  memcpy(p.data, from + first, n - first);
  p.head += n;
}
void copy_out(Pipe& p, char* to, size_t n) {
  size_t at = p.tail % kPipe, first = std::min(n, kPipe - at);
  memcpy(to, p.data + at, first);
  memcpy(to + first, p.data, n - first);
  p.tail += n;
}

// Moves what can be moved now; whether the message is done.
bool move(State& s, Message& m, Access& access) {
  Room& room = *s.mapping.room;
  Pipe& p = m.sends ? room.pipes[s.rank][m.peer] : room.pipes[m.peer][s.rank];
  uint64_t& done = m.sends ? s.sent[m.peer] : s.taken[m.peer];
  if (!m.begun && !m.sends) {
    p.length = m.length;
    p.begun = done + 1;
    m.begun = true;
  } else if (!m.begun) {
    if (p.begun != done + 1) return false;
    m.begun = true;
    if (p.length != m.length) p.differ = true;
  }
  if (p.differ) {
    fprintf(stderr, "cudasim: nccl: rank %d %s %zu bytes, rank %d has another length\n", s.rank,
            m.sends ? "sends" : "receives", m.length, m.peer);
    s.failed = REMOTE;
    return true;
  }
  size_t room_left = m.sends ? kPipe - (p.head - p.tail) : p.head - p.tail;
  if (size_t n = std::min(m.length - m.moved, room_left)) {
    access.need();
    m.sends ? copy_in(p, m.at + m.moved, n) : copy_out(p, m.at + m.moved, n);
    m.moved += n;
  }
  if (m.moved < m.length) return false;
  done++;
  return true;
}

int run(State& s, Task& t) {
  if (s.aborted || s.failed) return 0;
  Access access(s.device);
  bool waits[2][kMaxRanks] = {};  // messages of one pair go one after the other
  std::erase_if(t.messages, [&](Message& m) {
    bool& before = waits[m.sends][m.peer];
    if (!before) before = !move(s, m, access);
    else return false;
    return !before;
  });
  if (s.failed) return 0;
  if (!t.messages.empty()) return kNotReady;
  access.need();
  t.finish();
  return 0;
}

Result enqueue(Comm* c) {
  std::function<int()> f = [s = c->state, t = std::move(c->started)] {
    static const char* delay = getenv("CUDASIM_NCCL_DELAY");
    if (delay) std::this_thread::sleep_for(std::chrono::duration<double>(atof(delay)));
    return run(*s, *t);
  };
  c->started = nullptr;
  return cudasim_enqueue_asked(c->stream, "nccl", &f) ? CUDA : OK;
}

void count(int device, const std::vector<Message>& messages) {
  Counts& n = counts[device];
  uint64_t waits = cudasim_host_waits(device);
  if (n.groups++) n.host_waits += waits - waits_before[device];
  waits_before[device] = waits;
  for (auto& m : messages) {
    (m.sends ? n.sends : n.receives)++;
    if (m.sends) n.bytes_sent += m.length;
  }
}

// A number with K, M or G.
int64_t size_in(const char* variable) {
  const char* text = getenv(variable);
  if (!text) return 0;
  char* unit = nullptr;
  int64_t n = strtoll(text, &unit, 10);
  return n << (*unit == 'K' ? 10 : *unit == 'M' ? 20 : *unit == 'G' ? 30 : 0);
}

// What the first messages of a communicator cost.
Result connect(Comm* c) {
  if (c->connected != std::chrono::steady_clock::time_point{}) return OK;
  const char* start = getenv("CUDASIM_NCCL_START");
  auto takes = std::chrono::duration<double>(start ? atof(start) : 0);
  c->connected = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(takes);
  int64_t bytes = size_in("CUDASIM_NCCL_MEM");
  if (!bytes) return OK;
  if (!cudasim_take_memory(c->state->device, bytes)) return refuse(CUDA, "Failed to CUDA calloc %ld bytes", bytes);
  c->memory = bytes;
  return OK;
}

Result start(Comm* c, void* stream, std::shared_ptr<Task> task) {
  static FailPoint broken{"nccl"};
  if (broken.hit()) return refuse(SYSTEM, "a failure was asked for");
  if (!cudasim_bound()) return no_device();
  if (cudasim_stream_device(stream) != c->state->device) return refuse(USAGE, "a stream of another device");
  if (Result r = connect(c)) return r;
  count(c->state->device, task->messages);
  c->stream = stream;
  c->started = std::move(task);
  if (c->blocks) return enqueue(c);
  c->asks = 2;
  return IN_PROGRESS;
}

// ---- groups of calls -----------------------------------------------------------------------

struct Grouped { Comm* comm; void* stream; std::shared_ptr<Task> task; };
thread_local int depth = 0;
thread_local std::vector<Grouped> grouped;

Result leave_group() {
  if (--depth > 0) return OK;
  Result worst = OK;
  for (auto& g : std::exchange(grouped, {}))
    if (Result r = start(g.comm, g.stream, g.task); r && (worst == OK || worst == IN_PROGRESS)) worst = r;
  return worst;
}

// Adds to what the group does with this communicator.
Result add(Comm* c, void* stream, Task task) {
  if (!c->has_met || c->finalized || c->asks || c->state->failed) return refuse(ARGUMENT, "the communicator is not ready");
  std::erase_if(task.messages, [](const Message& m) { return m.length == 0; });  // of these nobody would see the end
  for (auto& g : grouped)
    if (g.comm == c) {
      if (g.stream != stream || g.task->alone || task.alone)
        return refuse(USAGE, "several streams, or a collective and something else, in one group");
      for (auto& m : task.messages) g.task->messages.push_back(m);
      return OK;
    }
  depth++;
  grouped.push_back({c, stream, std::make_shared<Task>(std::move(task))});
  return leave_group();
}

size_t width(int type) {
  switch (type) {
    case INT8: case UINT8: return 1;
    case BFLOAT16: return 2;
    case FLOAT32: return 4;
  }
  return 0;
}

Result message(bool sends, void* at, size_t count, int type, int peer, Comm* c, void* stream) {
  size_t n = count * width(type);
  if (!width(type) || peer < 0 || peer >= c->state->size)
    return refuse(ARGUMENT, "a type or a rank that is not supported");
  if (!cudasim_range_ok(at, n, sends ? "ncclSend" : "ncclRecv")) return refuse(ARGUMENT, "not memory of a device");
  if (n == 0) return OK;
  return add(c, stream, {{{sends, peer, static_cast<char*>(at), n}}});
}

// The messages of a collective: `out` bytes to everybody from `from(peer)`, `in` bytes from everybody to `to(peer)`.
// Memory of rank r goes there from `from(r)`, if anything does, and comes from there to `to(r)`.
template <class From, class To> void all_to_all(Comm* c, Task& t, size_t n, From from, To to) {
  for (int peer = 0; peer < c->state->size; peer++)
    if (peer != c->state->rank) {
      if (char* at = from(peer)) t.messages.push_back({true, peer, at, n});
      t.messages.push_back({false, peer, to(peer), n});
    }
}

// A collective that adds `count` elements, those of rank r at `from(r)`, in the order of ranks.
template <class From> Result sum(Comm* c, void* stream, size_t count, int type, int op, char* mine, char* out, From from) {
  if (type != FLOAT32 || op != 0) return refuse(ARGUMENT, "only sums of f32 are simulated");
  Task t{.alone = true};
  std::vector<char*> terms;
  for (int r = 0; r < c->state->size; r++) {
    t.received.push_back(std::make_unique<char[]>(r == c->state->rank ? 0 : count * 4));
    terms.push_back(r == c->state->rank ? mine : t.received[r].get());
  }
  all_to_all(c, t, count * 4, from, [&](int peer) { return terms[peer]; });
  t.finish = [=] {
    for (size_t i = 0; i < count; i++) {
      float s = ((float*)terms[0])[i];
      for (size_t r = 1; r < terms.size(); r++) s += ((float*)terms[r])[i];
      ((float*)out)[i] = s;
    }
  };
  return add(c, stream, std::move(t));
}

bool inside(const void* a, size_t n, const void* b, size_t m, const char* what) {
  return cudasim_range_ok(a, n, what) && cudasim_range_ok(b, m, what);
}

// ---- meeting -------------------------------------------------------------------------------

Result join(Comm* c, int size, const ncclUniqueId& bytes, int rank) {
  Id id;
  memcpy(&id, bytes.bytes, sizeof id);
  if (cuCtxGetDevice(&c->state->device)) return no_device();
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return refuse(ARGUMENT, "rank %d of %d", rank, size);
  if (memcmp(id.mark, kMark, sizeof kMark)) return refuse(ARGUMENT, "the id is none");
  std::string path = "/proc/" + std::to_string(id.process) + "/fd/" + std::to_string(id.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return refuse(SYSTEM, "%s: %s", path.c_str(), strerror(errno));
  void* p = mmap(nullptr, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (p == MAP_FAILED) return refuse(SYSTEM, "mmap: %s", strerror(errno));
  Room* room = c->state->mapping.room = static_cast<Room*>(p);
  c->state->rank = rank;
  c->state->size = size;
  int none = 0;
  if (!room->size.compare_exchange_strong(none, size) && none != size)
    return refuse(ARGUMENT, "%d ranks, but another rank says %d", size, none);
  Seat& seat = room->seats[rank];
  if (seat.taken.exchange(true)) return refuse(USAGE, "rank %d is there twice", rank);
  cuDeviceGetUuid_v2(&seat.uuid, c->state->device);
  cuDeviceGetAttribute(&seat.bus, kBus, c->state->device);
  room->joined++;
  cudasim_goes_on_alone();
  return OK;
}

// Once all are there.
Result meet(Comm* c) {
  Room& room = *c->state->mapping.room;
  if (room.joined < c->state->size) return IN_PROGRESS;
  for (int a = 0; a < c->state->size; a++)
    for (int b = 0; b < a; b++)
      if (!memcmp(room.seats[a].uuid, room.seats[b].uuid, sizeof Seat::uuid))
        return refuse(USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000", b, a, room.seats[a].bus);
  c->has_met = true;
  return OK;
}

}  // namespace

// ---- entry points --------------------------------------------------------------------------
EXPORT Result ncclGetVersion(int* v) {
  const char* told = getenv("CUDASIM_NCCL_VERSION");
  *v = told ? atoi(told) : 22703;
  return OK;
}
EXPORT const char* ncclGetErrorString(Result r) {
  switch (r) {
    case OK: return "no error";
    case CUDA: return "unhandled cuda error";
    case SYSTEM: return "unhandled system error";
    case INTERNAL: return "internal error";
    case ARGUMENT: return "invalid argument";
    case USAGE: return "invalid usage";
    case REMOTE: return "remote process exited or there was a network error";
    case IN_PROGRESS: return "NCCL operation in progress";
  }
  return "unknown result code";
}
EXPORT const char* ncclGetLastError(Comm*) { return last; }

EXPORT Result ncclGetUniqueId(ncclUniqueId* out) {
  Id id = {};
  memcpy(id.mark, kMark, sizeof kMark);
  id.process = getpid();
  id.file = memfd_create(kMark, MFD_CLOEXEC);
  if (id.file < 0 || ftruncate(id.file, sizeof(Room))) return refuse(SYSTEM, "memfd: %s", strerror(errno));
  memset(out, 0, sizeof *out);
  memcpy(out->bytes, &id, sizeof id);
  return OK;
}
EXPORT Result ncclCommInitRankConfig(Comm** out, int size, ncclUniqueId id, int rank, Config* config) {
  if (config && config->magic != kMagic) return refuse(ARGUMENT, "a configuration that was not initialised");
  auto c = std::make_unique<Comm>();
  c->blocks = !config || config->blocking;
  if (Result r = join(c.get(), size, id, rank)) return r;
  Result r = IN_PROGRESS;
  while (c->blocks && (r = meet(c.get())) == IN_PROGRESS) usleep(100);
  *out = c.release();
  return r;
}
EXPORT Result ncclCommInitRank(Comm** out, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}
EXPORT Result ncclCommGetAsyncError(Comm* c, Result* state) {
  *state = Result(c->state->failed.load());
  if (*state == OK && !c->has_met) *state = meet(c);
  if (*state == OK && c->asks && std::chrono::steady_clock::now() < c->connected) *state = IN_PROGRESS;
  if (*state == OK && c->asks) *state = --c->asks ? IN_PROGRESS : c->started ? enqueue(c) : OK;
  return OK;
}
EXPORT Result ncclCommFinalize(Comm* c) {
  if (!cudasim_bound()) return no_device();
  if (!c->has_met || c->finalized || c->asks) return refuse(ARGUMENT, "the communicator is not ready");
  c->finalized = true;
  c->asks = c->blocks ? 0 : 2;
  return c->blocks ? OK : IN_PROGRESS;
}
EXPORT Result ncclCommDestroy(Comm* c) {
  if (!cudasim_bound()) return no_device();
  if (c->asks) return refuse(ARGUMENT, "the communicator is not ready");
  delete c;
  return OK;
}
EXPORT Result ncclCommAbort(Comm* c) {
  if (!cudasim_bound()) return no_device();
  c->state->aborted = true;
  delete c;
  return OK;
}
EXPORT Result ncclCommCount(Comm* c, int* n) { *n = c->state->size; return OK; }
EXPORT Result ncclCommUserRank(Comm* c, int* n) { *n = c->state->rank; return OK; }
EXPORT Result ncclCommCuDevice(Comm* c, int* n) { *n = c->state->device; return OK; }

// The counts of a device since the last call. Its rank starts nothing meanwhile.
EXPORT void cudasim_nccl_counts(int device, Counts* out) { *out = std::exchange(counts[device], {}); }

EXPORT Result ncclGroupStart() { depth++; return OK; }
EXPORT Result ncclGroupEnd() { return depth ? leave_group() : refuse(USAGE, "ncclGroupEnd without ncclGroupStart"); }

EXPORT Result ncclSend(void* at, size_t count, int type, int peer, Comm* c, void* stream) {
  return message(true, at, count, type, peer, c, stream);
}
EXPORT Result ncclRecv(void* at, size_t count, int type, int peer, Comm* c, void* stream) {
  return message(false, at, count, type, peer, c, stream);
}
EXPORT Result ncclAllReduce(char* in, char* out, size_t count, int type, int op, Comm* c, void* stream) {
  size_t n = count * width(type);
  if (!inside(in, n, out, n, "ncclAllReduce")) return refuse(ARGUMENT, "not memory of a device");
  return sum(c, stream, count, type, op, in, out, [=](int) { return in; });
}
EXPORT Result ncclReduce(char* in, char* out, size_t count, int type, int op, int root, Comm* c, void* stream) {
  size_t n = count * width(type);
  bool mine = root == c->state->rank;
  if (!inside(in, n, mine ? out : in, n, "ncclReduce")) return refuse(ARGUMENT, "not memory of a device");
  if (root < 0 || root >= c->state->size) return refuse(ARGUMENT, "a root that is no rank");
  if (mine) return sum(c, stream, count, type, op, in, out, [](int) -> char* { return nullptr; });
  Task t{.alone = true};
  t.messages.push_back({true, root, in, n});
  return add(c, stream, std::move(t));
}
EXPORT Result ncclReduceScatter(char* in, char* out, size_t count, int type, int op, Comm* c, void* stream) {
  size_t n = count * width(type);
  if (!inside(in, n * c->state->size, out, n, "ncclReduceScatter")) return refuse(ARGUMENT, "not memory of a device");
  return sum(c, stream, count, type, op, in + c->state->rank * n, out, [=](int peer) { return in + peer * n; });
}
EXPORT Result ncclAllGather(char* in, char* out, size_t count, int type, Comm* c, void* stream) {
  size_t n = count * width(type);
  if (!inside(in, n, out, n * c->state->size, "ncclAllGather")) return refuse(ARGUMENT, "not memory of a device");
  Task t{.alone = true};
  all_to_all(c, t, n, [=](int) { return in; }, [=](int peer) { return out + peer * n; });
  t.finish = [=, own = out + c->state->rank * n] { if (own != in) memmove(own, in, n); };
  return add(c, stream, std::move(t));
}
EXPORT Result ncclBroadcast(char* in, char* out, size_t count, int type, int root, Comm* c, void* stream) {
  size_t n = count * width(type);
  bool mine = root == c->state->rank;
  if (!inside(mine ? in : out, n, out, n, "ncclBroadcast")) return refuse(ARGUMENT, "not memory of a device");
  if (root < 0 || root >= c->state->size) return refuse(ARGUMENT, "a root that is no rank");
  Task t{.alone = true};
  if (!mine) t.messages.push_back({false, root, out, n});
  for (int peer = 0; mine && peer < c->state->size; peer++)
    if (peer != root) t.messages.push_back({true, peer, in, n});
  t.finish = [=] { if (mine && out != in) memmove(out, in, n); };
  return add(c, stream, std::move(t));
}
