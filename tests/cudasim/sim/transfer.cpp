// Entry points for memory, copies and fills.
#include <cstring>

#include "core.h"
#include "fail.h"

using namespace cudasim;

// ---- memory --------------------------------------------------------------------------------
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t n) {
  CONTEXT();
  TRY(capture_refuses(nullptr));
  return n ? mem_alloc(d, n, p) : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr p) {
  CONTEXT();
  TRY(capture_refuses(nullptr));
  count_host_wait();
  drain_device(d);
  return p ? mem_free(p) : CUDA_SUCCESS;
}
EXPORT CUresult cuMemAllocAsync(CUdeviceptr* p, size_t n, void* stream) {
  CONTEXT();
  TRY(capture_refuses(stream_of(stream)));
  if (n == 0) { *p = 0; return CUDA_SUCCESS; }
  return mem_alloc(d, n, p, true);
}
EXPORT CUresult cuMemFreeAsync(CUdeviceptr p, void* stream) {
  CONTEXT();
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  TRY(capture_refuses(stream_of(stream)));
  return enqueue(stream_of(stream), "free", [p] { return mem_free(p); });
}
// Memory that a library takes of a device, or gives back: accounted for, and otherwise not there.
EXPORT bool cudasim_take_memory(int d, int64_t bytes) {
  std::lock_guard<Lock> lock(big_lock());
  if (bytes > 0 && device(d)->used + bytes > config().memory) return false;
  device(d)->used += bytes;
  return true;
}
EXPORT CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  CONTEXT();
  *total = config().memory;
  *free = config().memory - d->used;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostAlloc(void** p, size_t n, unsigned) {
  CONTEXT();
  static FailPoint refused{"hostalloc"};
  *p = refused.hit() ? nullptr : host_alloc(n);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAllocHost_v2(void** p, size_t n) { return cuMemHostAlloc(p, n, 0); }
EXPORT CUresult cuMemFreeHost(void* p) {
  BOUND();
  count_host_wait();
  drain_all();
  return host_free(p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemHostRegister_v2(void* p, size_t n, unsigned) { CONTEXT(); return host_register(p, n); }
EXPORT CUresult cuMemHostUnregister(void* p) { CONTEXT(); count_host_wait(); drain_all(); return host_unregister(p); }
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr*, void*, unsigned) {  // kernels reach device memory only
  CONTEXT();
  return CUDA_ERROR_NOT_SUPPORTED;
}

// ---- what a pointer is -----------------------------------------------------------------------
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr p) {
  CONTEXT();
  const Alloc* a = mem_find(p);
  if (!a) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = a->ptr;
  if (size) *size = a->size;
  return CUDA_SUCCESS;
}
static CUresult pointer_attribute(void* out, int attribute, CUdeviceptr p) {
  const Alloc* a = mem_find(p);
  bool pinned = host_is_pinned((void*)p);
  if (!a && !pinned) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {  // CU_POINTER_ATTRIBUTE_...
    case 1: *static_cast<Device**>(out) = a ? device(a->dev) : current(); return CUDA_SUCCESS;  // CONTEXT
    case 2: *static_cast<unsigned*>(out) = a ? 2 : 1; return CUDA_SUCCESS;                      // MEMORY_TYPE
    case 3: if (!a) break; *static_cast<CUdeviceptr*>(out) = p; return CUDA_SUCCESS;            // DEVICE_POINTER
    case 4: if (a) break; *static_cast<void**>(out) = (void*)p; return CUDA_SUCCESS;            // HOST_POINTER
    case 6: return CUDA_SUCCESS;                                                                // SYNC_MEMOPS
    case 7: *static_cast<unsigned long long*>(out) = a ? a->id : 0; return CUDA_SUCCESS;        // BUFFER_ID
    case 8: *static_cast<bool*>(out) = false; return CUDA_SUCCESS;                              // IS_MANAGED
    case 9: *static_cast<int*>(out) = !a ? 0 : a->home >= 0 ? a->home : a->dev; return CUDA_SUCCESS;  // DEVICE_ORDINAL
    case 10: *static_cast<bool*>(out) = a && !a->pooled && !a->opened; return CUDA_SUCCESS;  // IS_LEGACY_CUDA_IPC_CAPABLE
    case 11: if (!a) break; *static_cast<CUdeviceptr*>(out) = a->ptr; return CUDA_SUCCESS;      // RANGE_START_ADDR
    case 12: if (!a) break; *static_cast<size_t*>(out) = a->size; return CUDA_SUCCESS;          // RANGE_SIZE
    case 13: *static_cast<bool*>(out) = true; return CUDA_SUCCESS;                              // MAPPED
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr p) {
  ENTER();
  return pointer_attribute(out, attribute, p);
}
EXPORT CUresult cuPointerGetAttributes(unsigned n, int* attributes, void** out, CUdeviceptr p) {
  ENTER();
  for (unsigned i = 0; i < n; i++)  // what cannot be told of any memory is null, of type 0; that is no error
    if (pointer_attribute(out[i], attributes[i], p))
      switch (attributes[i]) {
        case 2: case 9: *static_cast<int*>(out[i]) = attributes[i] == 9 ? -2 : 0; break;
        case 8: case 10: case 13: *static_cast<bool*>(out[i]) = false; break;
        default: *static_cast<void**>(out[i]) = nullptr;
      }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerSetAttribute(const void*, int attribute, CUdeviceptr p) {
  ENTER();
  return attribute == 6 && mem_find(p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;  // SYNC_MEMOPS: holds anyway
}

// ---- copies and fills ----------------------------------------------------------------------
// Pageable host memory: the copy has left (or reached) it when the call returns.
// Pinned memory: it happens when the stream gets there.
static CUresult copy(const char* name, void* dst, const void* src, size_t n, void* stream, bool wait) {
  int dev = current()->ordinal;
  return enqueue(stream_of(stream), name, [=] { DeviceAccess in(dev); memmove(dst, src, n); return CUDA_SUCCESS; }, wait);
}
static CUresult host_to_device(CUdeviceptr dst, const void* src, size_t n, void* stream) {
  TRY(mem_range(dst, n, "copy to device"));
  // A graph reads its source each time it is launched.
  if (host_is_pinned(src) || !config().lazy || stream_of(stream)->capture) return copy("HtoD", (void*)dst, src, n, stream, false);
  auto staged = std::make_shared<std::vector<char>>((const char*)src, (const char*)src + n);
  int dev = current()->ordinal;
  return enqueue(stream_of(stream), "HtoD", [=] {
    DeviceAccess in(dev);
    memcpy((void*)dst, staged->data(), n);
    return CUDA_SUCCESS;
  });
}
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t n, void* s) {
  CONTEXT();
  return host_to_device(dst, src, n, s);
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t n) {
  CONTEXT();
  TRY(mem_range(dst, n, "copy to device"));
  return copy("HtoD", (void*)dst, src, n, nullptr, true);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t n, void* s) {
  CONTEXT();
  TRY(mem_range(src, n, "copy from device"));
  return copy("DtoH", dst, (void*)src, n, s, !host_is_pinned(dst) && !stream_of(s)->capture);
}
EXPORT CUresult cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t n) {
  CONTEXT();
  TRY(mem_range(src, n, "copy from device"));
  return copy("DtoH", dst, (void*)src, n, nullptr, true);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, void* s) {
  CONTEXT();
  TRY(mem_range(src, n, "copy within device"));
  TRY(mem_range(dst, n, "copy within device"));
  return copy("DtoD", (void*)dst, (void*)src, n, s, false);
}
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n) {
  return cuMemcpyDtoDAsync_v2(dst, src, n, nullptr);
}
// Either side may be device or host memory.
EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, void* s) {
  CONTEXT();
  bool to = mem_is_device(dst), from = mem_is_device(src);
  if (to && !from) return host_to_device(dst, (void*)src, n, s);
  if (to) TRY(mem_range(dst, n, "copy"));
  if (from) TRY(mem_range(src, n, "copy"));
  return copy("copy", (void*)dst, (void*)src, n, s, !to && !host_is_pinned((void*)dst));
}
EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t n) {
  CONTEXT();
  if (mem_is_device(dst)) TRY(mem_range(dst, n, "copy"));
  if (mem_is_device(src)) TRY(mem_range(src, n, "copy"));
  return copy("copy", (void*)dst, (void*)src, n, nullptr, true);
}
EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr dst, Device* to, CUdeviceptr src, Device* from, size_t n, void* s) {
  CONTEXT();
  TRY(mem_range(src, n, "peer copy"));
  TRY(mem_range(dst, n, "peer copy"));
  int a = from->ordinal, b = to->ordinal;
  return enqueue(stream_of(s), "peer copy", [=] {
    DeviceAccess x(a), y(b);
    memmove((void*)dst, (void*)src, n);
    return CUDA_SUCCESS;
  });
}
template <class T> static CUresult fill(CUdeviceptr p, T v, size_t n, void* s) {
  TRY(mem_range(p, n * sizeof(T), "fill"));
  int dev = current()->ordinal;
  return enqueue(stream_of(s), "fill", [=] {
    DeviceAccess in(dev);
    for (size_t i = 0; i < n; i++) ((T*)p)[i] = v;
    return CUDA_SUCCESS;
  });
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, void* s) { CONTEXT(); return fill(p, v, n, s); }
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char v, size_t n) { CONTEXT(); return fill(p, v, n, nullptr); }
EXPORT CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, void* s) { CONTEXT(); return fill(p, v, n, s); }
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned v, size_t n) { CONTEXT(); return fill(p, v, n, nullptr); }

