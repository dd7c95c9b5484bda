// The part of the CUDA driver API that launches a kernel, bound at run time.
//
// Build machines need neither the CUDA toolkit nor a driver. Types, sizes and values are those of cuda.h (stable since
// CUDA 12.0, which introduced cuLaunchKernelEx and cuTensorMapEncodeTiled).
#ifndef TILETRACE_FFI_CUDA_DRIVER_H_
#define TILETRACE_FFI_CUDA_DRIVER_H_

#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace tiletrace {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

inline constexpr CUresult kErrorOutOfMemory = 2;

inline constexpr int kDeviceMultiprocessorCount = 16;
inline constexpr int kDeviceComputeCapabilityMajor = 75;
inline constexpr int kDeviceComputeCapabilityMinor = 76;
inline constexpr int kFuncMaxDynamicSharedSizeBytes = 8;
inline constexpr int kFuncNonPortableClusterSizeAllowed = 14;
inline constexpr int kLaunchClusterDimension = 4;
inline constexpr int kLaunchProgrammaticStreamSerialization = 6;

struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char raw[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization_allowed;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72);

struct CUlaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(CUlaunchConfig) == 56);

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

struct Driver {
  CUresult (*GetErrorString)(CUresult, const char**);
  CUresult (*CtxGetCurrent)(CUcontext*);
  CUresult (*CtxGetDevice)(CUdevice*);
  CUresult (*CtxPushCurrent)(CUcontext);
  CUresult (*CtxPopCurrent)(CUcontext*);
  CUresult (*DeviceGetAttribute)(int*, int, CUdevice);
  CUresult (*DeviceGetName)(char*, int, CUdevice);
  CUresult (*ModuleLoadData)(CUmodule*, const void*);
  CUresult (*ModuleUnload)(CUmodule);
  CUresult (*ModuleGetFunction)(CUfunction*, CUmodule, const char*);
  CUresult (*FuncSetAttribute)(CUfunction, int, int);
  CUresult (*LaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**);
  CUresult (*TensorMapEncodeTiled)(CUtensorMap*, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                                   const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                   int interleave, int swizzle, int l2_promotion, int oob_fill);
  std::string error;  // why there is no driver; empty when there is

  // Loaded at the first use and never unloaded. The ".1" matters: a bare libcuda.so may be the toolkit's link stub.
  static const Driver& Get() {
    static const Driver* driver = Load();
    return *driver;
  }

  std::string Describe(CUresult result) const {
    const char* text = nullptr;
    GetErrorString(result, &text);
    return std::string(text ? text : "unknown error") + " (CUDA error " + std::to_string(result) + ")";
  }

 private:
  static const Driver* Load() {
    auto* d = new Driver{};
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      d->error = std::string("there is no NVIDIA driver: ") + dlerror();
      return d;
    }
    auto bind = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr && d->error.empty()) {
        d->error = std::string("the NVIDIA driver is too old: it has no ") + name;
      }
    };
    bind(d->GetErrorString, "cuGetErrorString");
    bind(d->CtxGetCurrent, "cuCtxGetCurrent");
    bind(d->CtxGetDevice, "cuCtxGetDevice");
    bind(d->CtxPushCurrent, "cuCtxPushCurrent_v2");
    bind(d->CtxPopCurrent, "cuCtxPopCurrent_v2");
    bind(d->DeviceGetAttribute, "cuDeviceGetAttribute");
    bind(d->DeviceGetName, "cuDeviceGetName");
    bind(d->ModuleLoadData, "cuModuleLoadData");
    bind(d->ModuleUnload, "cuModuleUnload");
    bind(d->ModuleGetFunction, "cuModuleGetFunction");
    bind(d->FuncSetAttribute, "cuFuncSetAttribute");
    bind(d->LaunchKernelEx, "cuLaunchKernelEx");
    bind(d->TensorMapEncodeTiled, "cuTensorMapEncodeTiled");
    return d;
  }
};

}  // namespace tiletrace

#endif  // TILETRACE_FFI_CUDA_DRIVER_H_
