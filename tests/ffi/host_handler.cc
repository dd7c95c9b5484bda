// The launcher's handlers with an Execute that runs on XLA:CPU, which has no stream: with the fake driver, the path from
// XLA's attributes to the launch is tested without a GPU.
#include "tiletrace_ffi.cc"

namespace tiletrace {
namespace {

int64_t shift = 0;  // added to every operand's address

ffi::Error ExecuteOnHost(Kernel* kernel, ffi::RemainingArgs inputs, ffi::RemainingRets outputs) {
  Operands operands{{}, {}, inputs.size()};
  for (size_t i = 0; i < inputs.size(); ++i) operands.Add(*inputs.get<ffi::AnyBuffer>(i), shift);
  for (size_t i = 0; i < outputs.size(); ++i) operands.Add(**outputs.get<ffi::AnyBuffer>(i), shift);
  return kernel->Launch(nullptr, operands);
}

XLA_FFI_DEFINE_HANDLER(kExecuteOnHost, ExecuteOnHost,
                       ffi::Ffi::BindExecute().Ctx<ffi::State<Kernel>>().RemainingArgs().RemainingRets());

}  // namespace
}  // namespace tiletrace

TT_EXPORT XLA_FFI_Error* tt_execute_on_host(XLA_FFI_CallFrame* frame) { return (*tiletrace::kExecuteOnHost)(frame); }

TT_EXPORT void tt_shift(int64_t bytes) { tiletrace::shift = bytes; }

// What tt_execute declares to XLA: major * 10000 + minor * 100 + traits.
TT_EXPORT int tt_execute_metadata() {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  if (tt_execute(&frame) != nullptr) return -1;
  return metadata.api_version.major_version * 10000 + metadata.api_version.minor_version * 100 + int(metadata.traits);
}
