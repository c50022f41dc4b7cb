// Entry points of NVML: the energy counters of all devices of the machine, whichever of them the process sees.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <strings.h>

#include "core.h"

namespace {
enum Status { kSuccess = 0, kUninitialized = 1, kNotSupported = 3, kNotFound = 6 };

int initialised = 0;

// Watts of every device; 0: devices have no counter.
double watts() {
  const char* s = getenv("CUDASIM_WATTS");
  return s ? atof(s) : 0;
}

// Devices are numbers from 1 on, since none is a null pointer.
using Handle = void*;
}  // namespace

EXPORT int nvmlInit_v2() { return initialised++, kSuccess; }

EXPORT int nvmlShutdown() { return initialised ? (initialised--, kSuccess) : kUninitialized; }

EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, Handle* device) {
  if (!initialised) return kUninitialized;
  const char* devices = getenv("CUDASIM_DEVICES");
  int count = std::min(devices && *devices ? atoi(devices) : 1, cudasim::kMaxDevices);
  for (long d = 0; d < count; d++) {
    if (strcasecmp(cudasim::uuid_text(int(d)).c_str(), uuid)) continue;
    *device = Handle(d + 1);
    return kSuccess;
  }
  return kNotFound;
}

// Millijoules since the machine was started, as if every device had always drawn the same power.
EXPORT int nvmlDeviceGetTotalEnergyConsumption(Handle, unsigned long long* millijoules) {
  if (!initialised) return kUninitialized;
  if (watts() <= 0) return kNotSupported;
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  *millijoules = (now.tv_sec * 1e3 + now.tv_nsec * 1e-6) * watts();
  return kSuccess;
}

EXPORT const char* nvmlErrorString(int status) { return status == kSuccess ? "Success" : "Error of the simulator"; }
