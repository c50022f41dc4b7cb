// An NCCL that tells its version and does nothing else: as BROKEN_NCCL says, it never returns or crashes.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int ncclGetVersion(int* version) {
  *version = 22703;
  return 0;
}
int ncclGetUniqueId(void* id) {
  const char* how = getenv("BROKEN_NCCL");
  while (how && !strcmp(how, "hang")) pause();
  abort();
}
#define MISSING(name) \
  int name(void) { abort(); }
MISSING(ncclGetErrorString)
MISSING(ncclGetLastError)
MISSING(ncclCommInitRankConfig)
MISSING(ncclCommGetAsyncError)
MISSING(ncclCommFinalize)
MISSING(ncclCommDestroy)
MISSING(ncclCommAbort)
MISSING(ncclGroupStart)
MISSING(ncclGroupEnd)
MISSING(ncclSend)
MISSING(ncclRecv)
MISSING(ncclAllReduce)
MISSING(ncclReduce)
MISSING(ncclReduceScatter)
MISSING(ncclAllGather)
MISSING(ncclBroadcast)
