// CUDA IPC: handles, the files that they name, and the entry points.
#include "ipc.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "fail.h"
#include "stream.h"

namespace cudasim {
namespace {

constexpr size_t kPage = 4096;
static_assert(sizeof(SharedPage) <= kPage);

struct Contents {
  char mark[12];
  IpcKind kind;
  int process, file;
  int physical;  // device
  uint64_t id, length, host;
};
constexpr char kMark[12] = "cudasim-ipc";
static_assert(sizeof(Contents) <= sizeof(IpcHandle));

Contents contents(const IpcHandle& h) {
  Contents c;
  memcpy(&c, h.bytes, sizeof c);
  return c;
}

bool lives(int process) { return !kill(process, 0) || errno == EPERM; }

SharedPage* map_page(int file, uint64_t length) {
  void* p = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(length));
  return p == MAP_FAILED ? nullptr : static_cast<SharedPage*>(p);
}

}  // namespace

SharedFile& SharedFile::operator=(SharedFile&& o) noexcept {
  std::swap(file, o.file);
  std::swap(process, o.process);
  std::swap(length, o.length);
  std::swap(page, o.page);
  return *this;
}
SharedFile::~SharedFile() { unmap(); }

void SharedFile::unmap() {
  if (page && process != getpid())
    for (auto& user : page->users) {
      int self = getpid();
      if (user.compare_exchange_strong(self, 0)) break;
    }
  if (page) munmap(static_cast<void*>(page), kPage);
  if (file >= 0) close(file);
  page = nullptr;
  file = -1;
}

bool SharedFile::create(uint64_t bytes) {
  file = memfd_create(kMark, MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, off_t(bytes + kPage)) || !(page = map_page(file, bytes))) {
    say("cannot make memory for other processes: %s", strerror(errno));
    unmap();
    return false;
  }
  process = getpid();
  length = bytes;
  if (getrandom(&page->id, sizeof page->id, 0) < 0) page->id = uint64_t(process) << 32 | unsigned(file);
  return true;
}

IpcHandle SharedFile::handle(IpcKind kind, int physical) const {
  Contents c = {{}, kind, process, file, physical, page->id, length, host_hash()};
  memcpy(c.mark, kMark, sizeof kMark);
  IpcHandle h = {};
  memcpy(h.bytes, &c, sizeof c);
  return h;
}

CUresult ipc_check(const IpcHandle& h, IpcKind kind) {
  Contents c = contents(h);
  if (memcmp(c.mark, kMark, sizeof kMark) || c.kind != kind) return CUDA_ERROR_INVALID_VALUE;
  if (c.host != host_hash()) {
    say("a handle of another host's process %d", c.process);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return c.process == getpid() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
int ipc_device(const IpcHandle& h) { return contents(h).physical; }
uint64_t ipc_id(const IpcHandle& h) { return contents(h).id; }

CUresult SharedFile::open(const IpcHandle& h, IpcKind kind, int* data) {
  TRY(ipc_check(h, kind));
  Contents c = contents(h);
  std::string path = "/proc/" + std::to_string(c.process) + "/fd/" + std::to_string(c.file);
  int found = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat about;
  // A descriptor that was used again may be of any file: mapping beyond its end would fault.
  if (found >= 0 && !fstat(found, &about) && about.st_size == off_t(c.length + kPage)) page = map_page(found, c.length);
  if (!page || page->id != c.id) {
    say("process %d no longer has what its handle names, or does not let this process open it", c.process);
    if (page) munmap(static_cast<void*>(page), kPage);
    page = nullptr;
    if (found >= 0) close(found);
    return CUDA_ERROR_INVALID_HANDLE;
  }
  process = c.process;
  length = c.length;
  for (auto& user : page->users) {
    int before = user;
    if ((before == 0 || !lives(before)) && user.compare_exchange_strong(before, getpid())) break;
  }
  if (data) *data = found;
  else close(found);
  return CUDA_SUCCESS;
}

int SharedFile::user() const {
  for (auto& user : page->users)
    if (int process = user; process && lives(process)) return process;
  return 0;
}

}  // namespace cudasim

// ---- entry points --------------------------------------------------------------------------
using namespace cudasim;

EXPORT CUresult cuIpcGetMemHandle(IpcHandle* out, CUdeviceptr p) {
  CONTEXT();
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  return mem_export(p, out);
}
EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* out, IpcHandle h, unsigned flags) {
  CONTEXT();
  static FailPoint refused{"ipc"};
  if (refused.hit()) return CUDA_ERROR_MAP_FAILED;
  if (!out || flags != 1) return CUDA_ERROR_INVALID_VALUE;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
  goes_on_alone(true);
  return mem_import(d, h, out);
}
EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr* out, IpcHandle h, unsigned flags) {
  return cuIpcOpenMemHandle_v2(out, h, flags);
}
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr p) {
  CONTEXT();
  TRY(capture_refuses(nullptr));
  count_host_wait();
  drain_device(d);
  return mem_close(p);
}
EXPORT CUresult cuIpcGetEventHandle(IpcHandle* out, Event* e) {
  BOUND();
  if (!out || !e) return CUDA_ERROR_INVALID_VALUE;
  if (e->s->shared.file < 0) return CUDA_ERROR_INVALID_HANDLE;  // not of this process, or not for others
  *out = e->s->shared.handle(IpcKind::Event, current()->physical);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuIpcOpenEventHandle(Event** out, IpcHandle h) {
  BOUND();
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  auto e = std::make_unique<Event>();
  TRY(e->s->shared.open(h, IpcKind::Event));
  share_event(*e->s);
  e->s->timed = false;
  *out = e.release();
  return CUDA_SUCCESS;
}
