// What processes of one host share by CUDA IPC: a file without a name, which its maker holds open and others find
// through /proc. Nothing is left of it when they have ended.
#pragma once
#include <atomic>

#include "core.h"

namespace cudasim {

struct IpcHandle { char bytes[64]; };  // CUipcMemHandle, CUipcEventHandle
enum class IpcKind : int { Memory = 1, Event };

struct Counters { std::atomic<uint64_t> recorded = 0, done = 0; };  // generations of an event

// The last page of the file. The memory of an allocation, with the canaries around it, lies before it.
struct SharedPage {
  uint64_t id;               // what a handle must name, as descriptors are used again
  uint64_t offset, size;     // of the allocation, in the file
  uint64_t number;           // of the allocation, in its process
  std::atomic<int> users[64];  // processes that have it open
  Counters counters;
};

class SharedFile {
  void unmap();

 public:
  int file = -1;     // of the maker only
  int process = 0;   // the maker
  uint64_t length = 0;  // bytes before the page
  SharedPage* page = nullptr;

  SharedFile() = default;
  SharedFile(SharedFile&& o) noexcept { *this = std::move(o); }
  SharedFile& operator=(SharedFile&& o) noexcept;
  ~SharedFile();

  bool create(uint64_t length);
  IpcHandle handle(IpcKind, int physical) const;
  // Opens what another process has made. `data` receives its descriptor, to be closed by the caller, if it is given.
  CUresult open(const IpcHandle&, IpcKind, int* data = nullptr);
  int user() const;  // a process that lives and has it open; 0 if there is none
};
CUresult ipc_check(const IpcHandle&, IpcKind);  // a handle of this host, by another process
int ipc_device(const IpcHandle&);               // the device that holds the memory, as the machine counts
uint64_t ipc_id(const IpcHandle&);

}  // namespace cudasim
