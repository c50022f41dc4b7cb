// Injected failures. CUDASIM_FAIL is a list such as "alloc:3,compile": the third device allocation is refused, every
// compilation fails. Without a number, all calls of that kind fail.
#pragma once
#include <cstdlib>
#include <cstring>

namespace cudasim {

// A place that can be made to fail. Counts its own calls.
struct FailPoint {
  const char* kind;
  long calls = 0;

  bool hit() {
    calls++;
    const char* s = getenv("CUDASIM_FAIL");
    size_t len = strlen(kind);
    while (s && *s) {
      bool ours = !strncmp(s, kind, len);
      const char* rest = s + len;
      if (ours && (!*rest || *rest == ',')) return true;
      if (ours && *rest == ':' && atol(rest + 1) == calls) return true;
      s = strchr(s, ',');
      if (s) s++;
    }
    return false;
  }
};

}  // namespace cudasim
