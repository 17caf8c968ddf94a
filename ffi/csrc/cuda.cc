// The typed XLA FFI handlers `jtile_cuda` and `jtile_cuda_io`, for NVIDIA's GPUs.
#include <mutex>

#include "gpu_handlers.h"

namespace jtile {
namespace {

struct Platform {
  static constexpr const char *kTarget = "jtile_cuda", *kState = "jtile_cuda_state";
  static constexpr DriverSource kDriver = cuda_driver;
};
using Handlers = GpuHandlers<Platform>;

// Python hands on no handler of the record stage. So what Python registers is `jtile_cuda_door`, which nothing calls; when
// XLA asks it for its metadata, it registers `jtile_cuda`.
const HandlerLine door("cuda", "CUDA", "jtile_cuda_door", "execute");
const HandlerLine waiting("cuda", "CUDA", "jtile_cuda_io", "instantiate,initialize,execute");

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_Error* jtile_cuda_instantiate(XLA_FFI_CallFrame* frame) { return Handlers::on_instantiate<false>(frame); }
XLA_FFI_Error* jtile_cuda_initialize(XLA_FFI_CallFrame* frame) { return Handlers::on_initialize<false>(frame); }
XLA_FFI_Error* jtile_cuda_execute(XLA_FFI_CallFrame* frame) { return Handlers::on_execute<false>(frame); }

XLA_FFI_Error* jtile_cuda_record(XLA_FFI_CallFrame* frame) { return Handlers::on_record(frame); }

XLA_FFI_Error* jtile_cuda_door_execute(XLA_FFI_CallFrame* frame) {
  static std::once_flag once;
  XLA_FFI_Error* error = nullptr;
  std::call_once(once, [&] {
    bool known = frame->api->api_version.minor_version <= 5;  // the record stage's version 0.2, which XLA may yet change
    error = ffi::Ffi::RegisterStaticHandler(
        frame->api, "jtile_cuda", "CUDA",
        {jtile_cuda_instantiate, nullptr, jtile_cuda_initialize, jtile_cuda_execute, known ? jtile_cuda_record : nullptr});
  });
  return error != nullptr ? error : jtile_cuda_execute(frame);
}

XLA_FFI_Error* jtile_cuda_io_instantiate(XLA_FFI_CallFrame* frame) { return Handlers::on_instantiate<true>(frame); }
XLA_FFI_Error* jtile_cuda_io_initialize(XLA_FFI_CallFrame* frame) { return Handlers::on_initialize<true>(frame); }
XLA_FFI_Error* jtile_cuda_io_execute(XLA_FFI_CallFrame* frame) { return Handlers::on_execute<true>(frame); }

}  // extern "C"
#pragma GCC visibility pop

}  // namespace jtile
