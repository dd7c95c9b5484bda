// A libcuda.so.1 that runs nothing and writes down what it is asked, so that both launchers can be tested without a GPU.
// Device memory is host memory. A kernel's parameters are read by the kinds given to fake_reset: "p" a pointer, "t" a
// tensor map (its first word is the address that was encoded), "i" an int32.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include <dlfcn.h>

namespace {

std::mutex mutex;
std::string log_text, param_kinds, failing;
int capability = 90, num_sms = 132;
int context_storage;

template <typename... Args>
void Log(const char* format, Args... args) {
  char line[512];
  std::snprintf(line, sizeof line, format, args...);
  std::lock_guard<std::mutex> lock(mutex);
  log_text += std::string(line) + "\n";
}

int Status(const char* name) { return failing == name ? 1 : 0; }

}  // namespace

extern "C" {

void fake_reset(const char* kinds, int capability_, int num_sms_, const char* failing_) {
  std::lock_guard<std::mutex> lock(mutex);
  log_text.clear();
  param_kinds = kinds;
  capability = capability_;
  num_sms = num_sms_;
  failing = failing_;
}
const char* fake_log() {
  static std::string copy;
  std::lock_guard<std::mutex> lock(mutex);
  copy = log_text;
  return copy.c_str();
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuGetErrorString(int, const char** s) { *s = "fake failure"; return 0; }
int cuGetErrorName(int, const char** s) { *s = "CUDA_ERROR_FAKE"; return 0; }
int cuDeviceGet(int* d, int ordinal) { *d = ordinal; return 0; }
int cuDeviceGetName(char* out, int size, int) { std::snprintf(out, size, "Fake GPU"); return 0; }
int cuDeviceGetAttribute(int* out, int which, int) {
  *out = which == 75 ? capability / 10 : which == 76 ? capability % 10 : which == 16 ? num_sms : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** out, int) { *out = &context_storage; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetCurrent(void** out) { *out = &context_storage; return 0; }
int cuCtxGetDevice(int* out) { *out = 0; return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void** out) { *out = &context_storage; return 0; }
int cuCtxSynchronize() { return 0; }
int cuStreamSynchronize(void*) { return 0; }

int cuModuleLoadData(void** out, const void* image) {
  Log("load %.8s", static_cast<const char*>(image));
  *out = const_cast<void*>(image);
  return Status("cuModuleLoadData");
}
int cuModuleUnload(void* module) { Log("unload %.8s", static_cast<const char*>(module)); return 0; }
int cuModuleGetFunction(void** out, void* module, const char* name) {
  Log("entry %s", name);
  *out = module;
  return Status("cuModuleGetFunction");
}
int cuFuncSetAttribute(void*, int which, int value) { Log("attribute %d = %d", which, value); return 0; }

int cuTensorMapEncodeTiled(uint64_t* map, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* elements, int interleave,
                           int swizzle, int l2, int oob) {
  map[0] = reinterpret_cast<uint64_t>(address);
  std::string text;
  for (uint32_t i = 0; i < rank; ++i) text += " " + std::to_string(dims[i]);
  text += " |";
  for (uint32_t i = 0; i + 1 < rank; ++i) text += " " + std::to_string(strides[i]);
  text += " |";
  for (uint32_t i = 0; i < rank; ++i) text += " " + std::to_string(box[i]) + "/" + std::to_string(elements[i]);
  Log("encode %d %d %d %d %d |%s", dtype, interleave, swizzle, l2, oob, text.c_str());
  return Status("cuTensorMapEncodeTiled");
}

struct Config { unsigned grid[3], block[3], smem; void* stream; char* attributes; unsigned num_attributes; };

int cuLaunchKernelEx(const Config* c, void*, void** params, void**) {
  std::string text;
  for (size_t i = 0; i < param_kinds.size(); ++i) {
    char word[32];
    if (param_kinds[i] == 'c') {       // the counter of a launch: what it holds, and as a kernel would leave it
      int* counter = *static_cast<int**>(params[i]);
      std::snprintf(word, sizeof word, " counter %d", *counter);
      *counter += 7;
    } else if (param_kinds[i] == 'i') std::snprintf(word, sizeof word, " %d", *static_cast<int*>(params[i]));
    else std::snprintf(word, sizeof word, " 0x%llx", static_cast<unsigned long long>(*static_cast<uint64_t*>(params[i])));
    text += word;
  }
  unsigned cluster[3] = {0, 0, 0};
  std::string overlap;
  for (unsigned i = 0; i < c->num_attributes; ++i) {
    const char* attribute = c->attributes + 72 * i;
    const int id = *reinterpret_cast<const int*>(attribute);
    if (id == 4) std::memcpy(cluster, attribute + 8, 12);
    if (id == 6) overlap = " overlap " + std::to_string(*reinterpret_cast<const int*>(attribute + 8));
  }
  Log("launch grid %u %u %u block %u %u %u smem %u cluster %u %u %u%s stream %p params%s", c->grid[0], c->grid[1],
      c->grid[2], c->block[0], c->block[1], c->block[2], c->smem, cluster[0], cluster[1], cluster[2], overlap.c_str(),
      c->stream, text.c_str());
  return Status("cuLaunchKernelEx");
}

int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
  *out = reinterpret_cast<uint64_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return 0;
}
int cuMemAllocAsync(uint64_t* out, size_t bytes, void* stream) {
  Log("allocate %zu on %p", bytes, stream);
  cuMemAlloc_v2(out, bytes);
  std::memset(reinterpret_cast<void*>(*out), 0xFF, bytes);
  return Status("cuMemAllocAsync");
}
int cuMemsetD32Async(uint64_t to, unsigned v, size_t n, void* stream) {
  Log("set %u %zu on %p", v, n, stream);
  for (size_t i = 0; i < n; ++i) reinterpret_cast<unsigned*>(to)[i] = v;
  return 0;
}
int cuMemFreeAsync(uint64_t p, void* stream) {
  Log("free on %p", stream);
  std::free(reinterpret_cast<void*>(p));
  return 0;
}
int cuMemFree_v2(uint64_t p) { std::free(reinterpret_cast<void*>(p)); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t n) { std::memcpy(reinterpret_cast<void*>(to), from, n); return 0; }
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t n) { std::memcpy(to, reinterpret_cast<void*>(from), n); return 0; }
int cuMemsetD8_v2(uint64_t to, unsigned char v, size_t n) { std::memset(reinterpret_cast<void*>(to), v, n); return 0; }
int cuEventCreate(void** out, unsigned) { *out = &context_storage; return 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void*, void*) { *ms = 8.0f; return 0; }
int cuEventElapsedTime_v2(float* ms, void*, void*) { *ms = 8.0f; return 0; }
int cuEventDestroy_v2(void*) { return 0; }

// cuda-python asks for entry points by their unversioned names.
int cuGetProcAddress_v2(const char* name, void** out, int, uint64_t, int* found) {
  std::string versioned = std::string(name) + "_v2";
  *out = dlsym(RTLD_DEFAULT, name);
  if (*out == nullptr) *out = dlsym(RTLD_DEFAULT, versioned.c_str());
  if (found != nullptr) *found = *out ? 0 : 1;
  return 0;
}
int cuGetProcAddress(const char* name, void** out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}

}  // extern "C"
