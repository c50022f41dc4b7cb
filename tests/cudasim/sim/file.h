// The version that a library takes from its file's name.
#pragma once
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

namespace cudasim {

// The number behind ".so." in the name of the file that holds a function: 12 of libnvrtc.so.12; 13 without one.
inline int major_of_file(const void* function) {
  Dl_info info;
  const char* at = dladdr(function, &info) && info.dli_fname ? strstr(info.dli_fname, ".so.") : nullptr;
  int major = at ? atoi(at + 4) : 0;
  return major ? major : 13;
}

}  // namespace cudasim
