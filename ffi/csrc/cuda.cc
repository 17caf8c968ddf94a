// The typed XLA FFI handlers `jtile_cuda` and `jtile_cuda_io`, for NVIDIA's GPUs.
#include "gpu_handlers.h"

namespace jtile {
namespace {

struct Platform {
  static constexpr const char *kTarget = "jtile_cuda", *kState = "jtile_cuda_state";
  static constexpr DriverSource kDriver = cuda_driver;
};
using Handlers = GpuHandlers<Platform>;

const HandlerLine plain("cuda", "CUDA", "jtile_cuda", "instantiate,initialize,execute");
const HandlerLine waiting("cuda", "CUDA", "jtile_cuda_io", "instantiate,initialize,execute");

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_Error* jtile_cuda_instantiate(XLA_FFI_CallFrame* frame) { return Handlers::on_instantiate<false>(frame); }
XLA_FFI_Error* jtile_cuda_initialize(XLA_FFI_CallFrame* frame) { return Handlers::on_initialize<false>(frame); }
XLA_FFI_Error* jtile_cuda_execute(XLA_FFI_CallFrame* frame) { return Handlers::on_execute<false>(frame); }

XLA_FFI_Error* jtile_cuda_io_instantiate(XLA_FFI_CallFrame* frame) { return Handlers::on_instantiate<true>(frame); }
XLA_FFI_Error* jtile_cuda_io_initialize(XLA_FFI_CallFrame* frame) { return Handlers::on_initialize<true>(frame); }
XLA_FFI_Error* jtile_cuda_io_execute(XLA_FFI_CallFrame* frame) { return Handlers::on_execute<true>(frame); }

}  // extern "C"
#pragma GCC visibility pop

}  // namespace jtile
