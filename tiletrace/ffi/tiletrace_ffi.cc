// XLA FFI handlers that launch a tiletrace kernel image (image.py describes its fields).
//
// Instantiate parses the attributes once for each call site of an executable. Prepare loads the module into the current
// CUDA context: XLA puts a rendezvous of the local devices after it, so that no load waits for a kernel that waits for
// this device. Execute encodes the tensor maps for the addresses of this call and launches. It allocates nothing on the
// device and never synchronises, so XLA may capture it into a command buffer (CUDA graph). Small kernels are bound by
// what a launch costs on the host: after the first one it takes no lock and no memory.
//
// Every failure is an ffi::Error that names the kernel and its Python line.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace tiletrace {

namespace ffi = ::xla::ffi;
using ffi::ErrorCode;

constexpr int kSchemaVersion = 3;  // of the attributes; library.py checks it
constexpr int kMaxRank = 5;
constexpr int kPortableClusterSize = 8;
constexpr uintptr_t kOperandAlignment = 16;  // TMA's base addresses, and the widest vector access

// The order is that of _PARAM_KINDS in image.py.
enum class ParamKind : int64_t { kOperand = 0, kTensorMap = 1, kScalarI32 = 2, kSize = 3 };

struct Param {
  ParamKind kind;
  int32_t value;
};

// Numbers below 0 are products of sizes: -1 - i is the i-th.
struct TensorMapSpec {
  int64_t operand, offset_bytes;
  int dtype, rank, swizzle, l2_promotion;
  int64_t dims[kMaxRank], strides[kMaxRank];
  uint32_t box[kMaxRank];
};

// A number that each call decides: extent `dim` of `operand`, divided by `factor`, from 1 to `most`.
struct SizeSource {
  int64_t operand, dim, factor, most;
};

struct Product {
  int64_t factor;
  std::vector<int64_t> sizes;
};

// The operands of a call, inputs first.
struct Operands {
  std::vector<void*> addresses;
  std::vector<ffi::Span<const int64_t>> shapes;
  size_t num_inputs;

  void Clear(size_t inputs) {
    addresses.clear();
    shapes.clear();
    num_inputs = inputs;
  }

  void Add(ffi::AnyBuffer buffer, int64_t shift = 0) {
    addresses.push_back(static_cast<char*>(buffer.untyped_data()) + shift);
    shapes.push_back(buffer.dimensions());
  }

  std::string Name(size_t i) const {
    return i < num_inputs ? "input " + std::to_string(i) : "output " + std::to_string(i - num_inputs);
  }
};

// What the numbers of an image are at one call.
struct Numbers {
  std::vector<int32_t> sizes;
  std::vector<int64_t> products;

  int64_t operator()(int64_t n) const { return n < 0 ? products[-1 - n] : n; }
};

// A cubin, loaded into each CUDA context that runs it. Shared by all call sites with the same code.
class Module {
 public:
  struct Loaded {
    CUcontext context;
    CUmodule module;
    CUfunction function;
    int num_sms;
  };

  // Returns the live module with this code, or a new one.
  static std::shared_ptr<Module> Find(std::string_view cubin, std::string_view entry, int smem_bytes,
                                      bool large_cluster) {
    static auto* mutex = new std::mutex;  // leaked: executables may outlive static destructors
    static auto* modules = new std::vector<std::weak_ptr<Module>>;
    std::lock_guard<std::mutex> lock(*mutex);
    modules->erase(std::remove_if(modules->begin(), modules->end(), [](auto& m) { return m.expired(); }),
                   modules->end());
    for (const auto& weak : *modules) {
      auto m = weak.lock();
      if (m && m->smem_bytes_ == smem_bytes && m->large_cluster_ == large_cluster && m->entry_ == entry &&
          m->cubin_ == cubin) {
        return m;
      }
    }
    auto made = std::make_shared<Module>(cubin, entry, smem_bytes, large_cluster);
    modules->push_back(made);
    return made;
  }

  Module(std::string_view cubin, std::string_view entry, int smem_bytes, bool large_cluster)
      : cubin_(cubin), entry_(entry), smem_bytes_(smem_bytes), large_cluster_(large_cluster) {}
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // May run on any thread, without a context, and after the driver has shut down: results are of no use.
  ~Module() {
    const Driver& driver = Driver::Get();
    for (const Loaded& l : loaded_) {
      CUcontext previous;
      if (driver.CtxPushCurrent(l.context) == 0) {
        driver.ModuleUnload(l.module);
        driver.CtxPopCurrent(&previous);
      }
    }
  }

  // Loads into the current context unless that was done. One executable runs on several devices at once. What `out`
  // is set to lives as long as the module.
  ffi::Error Load(const std::string& where, std::string_view target, const Loaded** out) {
    const Driver& driver = Driver::Get();
    if (!driver.error.empty()) {
      return ffi::Error(ErrorCode::kFailedPrecondition, where + ": " + driver.error);
    }
    auto fail = [&](CUresult result, const std::string& what) {
      return ffi::Error(result == kErrorOutOfMemory ? ErrorCode::kResourceExhausted : ErrorCode::kInternal,
                        where + ": " + what + ": " + driver.Describe(result));
    };
    CUcontext context = nullptr;
    if (CUresult r = driver.CtxGetCurrent(&context)) return fail(r, "cuCtxGetCurrent");
    *out = latest_.load(std::memory_order_acquire);
    if (*out != nullptr && (*out)->context == context) return ffi::Error::Success();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Loaded& l : loaded_) {
      if (l.context != context) continue;
      latest_.store(*out = &l, std::memory_order_release);
      return ffi::Error::Success();
    }
    Loaded l{context, nullptr, nullptr, 0};
    if (ffi::Error e = CheckDevice(where, target, &l.num_sms); e.failure()) return e;
    if (CUresult r = driver.ModuleLoadData(&l.module, cubin_.data())) return fail(r, "cannot load the cubin");
    CUresult r = driver.ModuleGetFunction(&l.function, l.module, entry_.c_str());
    std::string what = "the cubin has no entry '" + entry_ + "'";
    if (r == 0) {
      r = driver.FuncSetAttribute(l.function, kFuncMaxDynamicSharedSizeBytes, smem_bytes_);
      what = "cannot have " + std::to_string(smem_bytes_) + " bytes of dynamic shared memory";
    }
    if (r == 0 && large_cluster_) {
      r = driver.FuncSetAttribute(l.function, kFuncNonPortableClusterSizeAllowed, 1);
      what = "cannot have clusters of more than " + std::to_string(kPortableClusterSize) + " CTAs";
    }
    if (r != 0) {
      driver.ModuleUnload(l.module);
      return fail(r, what);
    }
    loaded_.push_back(l);
    latest_.store(*out = &loaded_.back(), std::memory_order_release);
    return ffi::Error::Success();
  }

 private:
  // An "a" target runs on exactly its compute capability, a plain one on its major version from its minor on.
  static ffi::Error CheckDevice(const std::string& where, std::string_view target, int* num_sms) {
    const Driver& driver = Driver::Get();
    CUdevice device = 0;
    int major = 0, minor = 0, wanted = 0;
    char suffix = 0, name[256] = "";
    CUresult r = driver.CtxGetDevice(&device);
    if (r == 0) r = driver.DeviceGetAttribute(&major, kDeviceComputeCapabilityMajor, device);
    if (r == 0) r = driver.DeviceGetAttribute(&minor, kDeviceComputeCapabilityMinor, device);
    if (r == 0) r = driver.DeviceGetAttribute(num_sms, kDeviceMultiprocessorCount, device);
    if (r == 0) r = driver.DeviceGetName(name, sizeof name - 1, device);
    if (r != 0) return ffi::Error(ErrorCode::kInternal, where + ": cannot query the device: " + driver.Describe(r));
    if (std::sscanf(std::string(target).c_str(), "sm_%d%c", &wanted, &suffix) < 1) {
      return ffi::Error(ErrorCode::kInvalidArgument, where + ": unknown target '" + std::string(target) + "'");
    }
    bool runs = suffix == 'a' ? major * 10 + minor == wanted : major == wanted / 10 && minor >= wanted % 10;
    if (runs) return ffi::Error::Success();
    return ffi::Error(ErrorCode::kFailedPrecondition,
                      where + " was compiled for " + std::string(target) + ", but device " + std::to_string(device) +
                          ", " + name + ", is sm_" + std::to_string(major * 10 + minor));
  }

  const std::string cubin_, entry_;
  const int smem_bytes_;
  const bool large_cluster_;
  std::mutex mutex_;
  std::list<Loaded> loaded_;  // only ever grows
  std::atomic<const Loaded*> latest_{nullptr};
};

// The state of one call site. Immutable after Instantiate, so that devices may share it.
struct Kernel {
  static ffi::TypeId id;

  std::string where;  // "tiletrace kernel 'matmul' (file.py:12)"
  std::string target;
  int32_t grid[3], block, cluster[3], smem_bytes;
  bool persistent, overlap;
  std::vector<Param> params;
  std::vector<TensorMapSpec> tensor_maps;
  std::vector<SizeSource> sizes;
  std::vector<Product> products;
  std::shared_ptr<Module> module;

  ffi::Error Fail(ErrorCode code, const std::string& what) const { return ffi::Error(code, where + ": " + what); }

  ffi::Error Load(const Module::Loaded** out) const { return module->Load(where, target, out); }

  ffi::Error Launch(CUstream stream, Operands& operands) const {
    static thread_local Numbers number;      // vectors that keep their memory from call to call
    static thread_local std::vector<CUtensorMap> maps;
    static thread_local std::vector<void*> arguments;
    if (ffi::Error e = Count(operands, &number); e.failure()) return e;
    const int64_t ctas = number(grid[0]);
    if (ctas == 0 || grid[1] == 0 || grid[2] == 0) return ffi::Error::Success();  // CUDA refuses an empty grid
    if (ctas > INT32_MAX) {
      return Fail(ErrorCode::kInvalidArgument, "a grid of " + std::to_string(ctas) + " programs, more than 2**31 - 1");
    }
    const Module::Loaded* loaded = nullptr;
    if (ffi::Error e = Load(&loaded); e.failure()) return e;
    if (ffi::Error e = CheckOperands(operands); e.failure()) return e;
    maps.resize(tensor_maps.size());
    for (size_t i = 0; i < maps.size(); ++i) {
      if (ffi::Error e = Encode(tensor_maps[i], operands, number, &maps[i]); e.failure()) return e;
    }
    arguments.resize(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const Param& p = params[i];
      switch (p.kind) {
        case ParamKind::kOperand: arguments[i] = &operands.addresses[p.value]; break;
        case ParamKind::kSize: arguments[i] = &number.sizes[p.value]; break;
        case ParamKind::kTensorMap: arguments[i] = &maps[p.value]; break;
        case ParamKind::kScalarI32: arguments[i] = const_cast<int32_t*>(&p.value); break;
      }
    }

    CUlaunchAttribute attributes[2]{};
    CUlaunchConfig config{};
    config.attributes = attributes;
    if (cluster[0] > 0) {
      CUlaunchAttribute& attribute = attributes[config.num_attributes++];
      attribute.id = kLaunchClusterDimension;
      attribute.value.cluster = {unsigned(cluster[0]), unsigned(cluster[1]), unsigned(cluster[2])};
    }
    if (overlap) {
      CUlaunchAttribute& attribute = attributes[config.num_attributes++];
      attribute.id = kLaunchProgrammaticStreamSerialization;
      attribute.value.programmatic_stream_serialization_allowed = 1;
    }
    for (int i = 0; i < 3; ++i) config.grid[i] = unsigned(number(grid[i]));
    if (persistent) {  // one CTA an SM, in whole clusters
      int step = std::max(cluster[0], 1);
      config.grid[0] = unsigned(std::min(int(ctas), std::max(step, loaded->num_sms / step * step)));
    }
    config.block[0] = unsigned(block);
    config.block[1] = config.block[2] = 1;
    config.shared_bytes = unsigned(smem_bytes);
    config.stream = stream;
    const Driver& driver = Driver::Get();
    if (CUresult r = driver.LaunchKernelEx(&config, loaded->function, arguments.data(), nullptr)) {
      char shape[160];
      std::snprintf(shape, sizeof shape, "launch of grid (%u, %u, %u) by %u threads, cluster (%d, %d, %d), %u bytes",
                    config.grid[0], config.grid[1], config.grid[2], config.block[0], cluster[0], cluster[1],
                    cluster[2], config.shared_bytes);
      return Fail(ErrorCode::kInternal, std::string(shape) + ": " + driver.Describe(r));
    }
    return ffi::Error::Success();
  }

 private:
  // The sizes of this call, in the operands' shapes.
  ffi::Error Count(const Operands& operands, Numbers* out) const {
    out->sizes.clear();
    out->products.clear();
    for (const SizeSource& s : sizes) {
      if (s.operand < 0 || s.operand >= int64_t(operands.shapes.size()) || s.dim < 0 ||
          s.dim >= int64_t(operands.shapes[s.operand].size())) {
        return Fail(ErrorCode::kInvalidArgument, "the image reads a dimension that the call does not have");
      }
      const int64_t extent = operands.shapes[s.operand][s.dim], size = extent / s.factor;
      if (extent % s.factor == 0 && 1 <= size && size <= s.most) {
        out->sizes.push_back(int32_t(size));
        continue;
      }
      std::string text = "dimension " + std::to_string(s.dim) + " of " + operands.Name(s.operand) + " is " +
                         std::to_string(extent);
      text += extent % s.factor ? ", no multiple of " + std::to_string(s.factor)
                                : ", which is not from 1 to " + std::to_string(s.most * s.factor);
      return Fail(ErrorCode::kInvalidArgument, text);
    }
    for (const Product& p : products) {
      int64_t n = p.factor;
      for (int64_t i : p.sizes) n *= out->sizes[i];
      out->products.push_back(n);
    }
    return ffi::Error::Success();
  }

  ffi::Error CheckOperands(const Operands& operands) const {
    const std::vector<void*>& addresses = operands.addresses;
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (reinterpret_cast<uintptr_t>(addresses[i]) % kOperandAlignment == 0) continue;
      char address[32];
      std::snprintf(address, sizeof address, "%p", addresses[i]);
      return Fail(ErrorCode::kInvalidArgument,
                  operands.Name(i) + " starts at " + address + ", which is not a multiple of 16 bytes");
    }
    auto missing = [&](int64_t i) { return i < 0 || i >= int64_t(addresses.size()); };
    bool bad = false;
    for (const Param& p : params) bad |= p.kind == ParamKind::kOperand && missing(p.value);
    for (const TensorMapSpec& spec : tensor_maps) bad |= missing(spec.operand);
    if (!bad) return ffi::Error::Success();
    return Fail(ErrorCode::kInvalidArgument,
                "the image refers to more operands than the " + std::to_string(addresses.size()) + " of the call");
  }

  ffi::Error Encode(const TensorMapSpec& spec, const Operands& operands, const Numbers& number,
                    CUtensorMap* out) const {
    *out = CUtensorMap{};
    uint64_t dims[kMaxRank], strides[kMaxRank];
    for (int i = 0; i < spec.rank; ++i) {
      dims[i] = uint64_t(number(spec.dims[i]));
      strides[i] = uint64_t(number(spec.strides[i]));
      if (dims[i] == 0) return ffi::Error::Success();  // nothing is there to copy, and CUDA refuses such a map
    }
    const uint32_t ones[kMaxRank] = {1, 1, 1, 1, 1};
    const Driver& driver = Driver::Get();
    CUresult r = driver.TensorMapEncodeTiled(
        out, spec.dtype, uint32_t(spec.rank), static_cast<char*>(operands.addresses[spec.operand]) + spec.offset_bytes,
        dims, strides, spec.box, ones, /*interleave=*/0, spec.swizzle, spec.l2_promotion,
        /*oob_fill=zero*/ 0);
    if (r == 0) return ffi::Error::Success();
    std::string text = "tensor map of operand " + std::to_string(spec.operand) + ", dims";
    for (int i = 0; i < spec.rank; ++i) text += " " + std::to_string(dims[i]);
    text += ", strides";
    for (int i = 0; i + 1 < spec.rank; ++i) text += " " + std::to_string(strides[i]);
    text += ", box";
    for (int i = 0; i < spec.rank; ++i) text += " " + std::to_string(spec.box[i]);
    return Fail(ErrorCode::kInternal, text + ": " + driver.Describe(r));
  }
};

ffi::TypeId Kernel::id = {};

namespace {

// Reads attributes until the first failure, which it keeps: XLA's own texts name neither kernel nor cause.
class AttributeReader {
 public:
  explicit AttributeReader(ffi::Dictionary attributes) : attributes_(attributes) {}

  bool Has(const char* name) const { return attributes_.contains(name); }

  template <typename T>
  T Get(const char* name) {
    if (!attributes_.contains(name)) {
      Fail(name, "missing");
      return T{};
    }
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    Fail(name, value.error().message());
    return T{};
  }

  template <typename T>
  std::vector<T> Array(const char* name) {
    auto span = Get<ffi::Span<const T>>(name);
    return std::vector<T>(span.begin(), span.end());
  }

  // Three numbers, `least` at least.
  void Dim3(const char* name, int32_t (&out)[3], int32_t least = 0) {
    std::vector<int32_t> values = Array<int32_t>(name);
    if (values.size() == 3 && *std::min_element(values.begin(), values.end()) >= least) {
      std::copy(values.begin(), values.end(), out);
    } else {
      Fail(name, "three extents are expected");
    }
  }

  void Fail(const char* name, const std::string& why) {
    if (error_.empty()) error_ = std::string("attribute '") + name + "': " + why;
  }

  const std::string& error() const { return error_; }

 private:
  ffi::Dictionary attributes_;
  std::string error_;
};

void ReadParams(AttributeReader& reader, Kernel* kernel) {
  std::vector<int64_t> words = reader.Array<int64_t>("params");
  if (words.size() % 2 != 0) return reader.Fail("params", "pairs are expected");
  for (size_t i = 0; i < words.size(); i += 2) {
    auto kind = ParamKind(words[i]);
    const int64_t value = words[i + 1];
    bool ok = kind == ParamKind::kOperand || kind == ParamKind::kScalarI32 ||
              (kind == ParamKind::kSize && value >= 0 && value < int64_t(kernel->sizes.size())) ||
              (kind == ParamKind::kTensorMap && words[i + 1] >= 0 &&
               words[i + 1] < int64_t(kernel->tensor_maps.size()));
    if (!ok) return reader.Fail("params", "unknown kind, or no such tensor map");
    kernel->params.push_back({kind, int32_t(words[i + 1])});
  }
}

// Images of dynamic shapes have these two attributes; KernelImage.attributes in image.py writes them.
void ReadSizes(AttributeReader& reader, Kernel* kernel) {
  if (!reader.Has("sizes")) return;
  std::vector<int64_t> words = reader.Array<int64_t>("sizes"), products = reader.Array<int64_t>("products");
  if (words.size() % 4 != 0) return reader.Fail("sizes", "four numbers each are expected");
  for (size_t i = 0; i < words.size(); i += 4) {
    kernel->sizes.push_back({words[i], words[i + 1], words[i + 2], words[i + 3]});
    if (words[i + 2] < 1) return reader.Fail("sizes", "a factor below 1");
  }
  for (size_t at = 0; at < products.size();) {
    const size_t left = products.size() - at;
    if (left < 2 || products[at + 1] < 0 || left - 2 < size_t(products[at + 1])) {
      return reader.Fail("products", "cut short");
    }
    Product p{products[at], {products.begin() + at + 2, products.begin() + at + 2 + products[at + 1]}};
    for (int64_t i : p.sizes) {
      if (i < 0 || i >= int64_t(kernel->sizes.size())) return reader.Fail("products", "no such size");
    }
    at += 2 + p.sizes.size();
    kernel->products.push_back(std::move(p));
  }
}

// Whether a number is one, or a product that there is.
bool IsNumber(const Kernel& kernel, int64_t n) { return n >= 0 || -1 - n < int64_t(kernel.products.size()); }

// The layout is that of TensorMapSpec.words in image.py.
void ReadTensorMaps(AttributeReader& reader, Kernel* kernel) {
  std::vector<int64_t> words = reader.Array<int64_t>("tensor_maps");
  for (size_t at = 0; at < words.size();) {
    const int64_t* w = words.data() + at;
    const size_t left = words.size() - at;
    if (left < 6 || w[2] < 1 || w[2] > kMaxRank || left < size_t(6 + 3 * w[2] - 1)) {
      return reader.Fail("tensor_maps", "cut short");
    }
    TensorMapSpec spec{};
    spec.operand = w[0];
    spec.dtype = int(w[1]);
    spec.rank = int(w[2]);
    spec.swizzle = int(w[3]);
    spec.l2_promotion = int(w[4]);
    spec.offset_bytes = w[5];
    w += 6;
    for (int i = 0; i < spec.rank; ++i) spec.dims[i] = *w++;
    for (int i = 0; i + 1 < spec.rank; ++i) spec.strides[i] = *w++;
    if (spec.rank == 1) spec.strides[0] = 16;      // there is none, but CUDA refuses that
    for (int i = 0; i < spec.rank; ++i) {
      if (!IsNumber(*kernel, spec.dims[i]) || !IsNumber(*kernel, spec.strides[i])) {
        return reader.Fail("tensor_maps", "no such product");
      }
    }
    for (int i = 0; i < spec.rank; ++i) spec.box[i] = uint32_t(*w++);
    kernel->tensor_maps.push_back(spec);
    at = size_t(w - words.data());
  }
}

ffi::ErrorOr<std::unique_ptr<Kernel>> Instantiate(ffi::Dictionary attributes) {
  AttributeReader reader(attributes);
  auto kernel = std::make_unique<Kernel>();
  auto name = reader.Get<std::string_view>("kernel");
  kernel->where = "tiletrace kernel '" + std::string(name) + "' (" +
                  std::string(reader.Get<std::string_view>("source")) + ")";
  kernel->target = reader.Get<std::string_view>("target");
  ReadSizes(reader, kernel.get());
  reader.Dim3("grid", kernel->grid, -int32_t(kernel->products.size()));
  reader.Dim3("cluster", kernel->cluster);
  kernel->block = reader.Get<int32_t>("block");
  kernel->smem_bytes = reader.Get<int32_t>("smem_bytes");
  kernel->persistent = reader.Get<bool>("persistent");
  kernel->overlap = reader.Has("overlap") && reader.Get<bool>("overlap");
  ReadTensorMaps(reader, kernel.get());
  ReadParams(reader, kernel.get());
  auto cubin = reader.Get<std::string_view>("cubin");
  if (!reader.error().empty()) {
    return ffi::Unexpected(kernel->Fail(ErrorCode::kInvalidArgument, reader.error()));
  }
  int64_t ctas = int64_t(kernel->cluster[0]) * kernel->cluster[1] * kernel->cluster[2];
  kernel->module = Module::Find(cubin, name, kernel->smem_bytes, ctas > kPortableClusterSize);
  return kernel;
}

ffi::Error Prepare(Kernel* kernel) {
  const Module::Loaded* loaded = nullptr;
  return kernel->Load(&loaded);
}

ffi::Error Execute(CUstream stream, Kernel* kernel, ffi::RemainingArgs inputs, ffi::RemainingRets outputs) {
  static thread_local Operands operands;
  operands.Clear(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto buffer = inputs.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return kernel->Fail(ErrorCode::kInvalidArgument, buffer.error().message());
    operands.Add(*buffer);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto buffer = outputs.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return kernel->Fail(ErrorCode::kInvalidArgument, buffer.error().message());
    operands.Add(**buffer);
  }
  return kernel->Launch(stream, operands);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare, ffi::Ffi::BindPrepare().Ctx<ffi::State<Kernel>>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::BindExecute()
                           .Ctx<ffi::PlatformStream<CUstream>>()
                           .Ctx<ffi::State<Kernel>>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace tiletrace

#define TT_EXPORT extern "C" __attribute__((visibility("default")))

TT_EXPORT int tt_schema_version() { return tiletrace::kSchemaVersion; }

// XLA asks for the metadata when it registers the handler. The type of the state is registered then, through XLA's own
// table: registered from Python before the CPU backend exists, it would arrive after the handler and kill the backend.
TT_EXPORT XLA_FFI_Error* tt_instantiate(XLA_FFI_CallFrame* frame) {
  static const xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<tiletrace::Kernel>();
  const bool metadata =
      frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata;
  if (metadata && tiletrace::Kernel::id.type_id == 0) {
    XLA_FFI_Error* error =
        xla::ffi::Ffi::RegisterTypeId(frame->api, "tiletrace_kernel", &tiletrace::Kernel::id, info);
    if (error != nullptr) return error;
  }
  return (*tiletrace::kInstantiate)(frame);
}

TT_EXPORT XLA_FFI_Error* tt_prepare(XLA_FFI_CallFrame* frame) { return (*tiletrace::kPrepare)(frame); }

TT_EXPORT XLA_FFI_Error* tt_execute(XLA_FFI_CallFrame* frame) { return (*tiletrace::kExecute)(frame); }
