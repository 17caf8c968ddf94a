// The typed XLA FFI handlers `jtile_rocm` and `jtile_rocm_io`, for AMD's GPUs.
#include "gpu_handlers.h"

namespace jtile {
namespace {

struct Platform {
  static constexpr const char *kTarget = "jtile_rocm", *kState = "jtile_rocm_state";
  static constexpr DriverSource kDriver = hip_driver;
};
using Handlers = GpuHandlers<Platform>;

const HandlerLine plain("rocm", "ROCM", "jtile_rocm", "instantiate,initialize,execute");
const HandlerLine waiting("rocm", "ROCM", "jtile_rocm_io", "instantiate,initialize,execute");

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_Error* jtile_rocm_instantiate(XLA_FFI_CallFrame* frame) { return Handlers::on_instantiate<false>(frame); }
XLA_FFI_Error* jtile_rocm_initialize(XLA_FFI_CallFrame* frame) { return Handlers::on_initialize<false>(frame); }
XLA_FFI_Error* jtile_rocm_execute(XLA_FFI_CallFrame* frame) { return Handlers::on_execute<false>(frame); }

XLA_FFI_Error* jtile_rocm_io_instantiate(XLA_FFI_CallFrame* frame) { return Handlers::on_instantiate<true>(frame); }
XLA_FFI_Error* jtile_rocm_io_initialize(XLA_FFI_CallFrame* frame) { return Handlers::on_initialize<true>(frame); }
XLA_FFI_Error* jtile_rocm_io_execute(XLA_FFI_CallFrame* frame) { return Handlers::on_execute<true>(frame); }

}  // extern "C"
#pragma GCC visibility pop

}  // namespace jtile
