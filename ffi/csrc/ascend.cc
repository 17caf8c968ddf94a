// The typed XLA FFI handler `jtile_ascend` of platform CPU: arrays of the host go to an NPU and come back. XLA itself has
// no platform for Ascend, so that this is how a kernel runs there inside jit: for correctness, not for speed.
#include <memory>

#include "handlers.h"
#include "npu.h"

namespace jtile {
namespace {

constexpr std::string_view kTarget = "jtile_ascend", kState = "jtile_ascend_state";

// The state of one call site; XLA deletes it with the executable.
struct AscendState {
  static ffi::TypeId id;
  AscendState(std::string_view image, std::string_view record, int64_t device) : kernel(image, record, device) {}
  NpuKernel kernel;
};
ffi::TypeId AscendState::id = {};

ffi::ErrorOr<std::unique_ptr<AscendState>> instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs) {
  return guarded<ffi::ErrorOr<std::unique_ptr<AscendState>>>([&] {
    return std::make_unique<AscendState>(attribute<std::string_view>(attrs, "image", kTarget),
                                         attribute<std::string_view>(attrs, "record", kTarget),
                                         attribute<int64_t>(attrs, "device", kTarget));
  });
}

ffi::Error execute(AscendState* state, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  PerArray<Array> arrays(args.size() + rets.size());
  ffi::Error bad = each_array(args, rets, [&](size_t k, ffi::AnyBuffer& buffer) {
    arrays[k] = {buffer.untyped_data(), bytes_of(buffer)};
  });
  if (bad.failure()) return bad;
  return guarded<ffi::Error>([&] {
    const Record& record = state->kernel.record();
    PerArray<int64_t> sizes(record.dims.size());
    for (size_t k = 0; k < record.dims.size(); ++k)
      sizes[k] = size_of_axis(args, record.dims[k].operand, record.dims[k].axis, record.name);
    state->kernel.call(arrays.data(), args.size(), args.size() + rets.size(), sizes.data());
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind().Ctx<ffi::State<AscendState>>().RemainingArgs().RemainingRets().Attrs());

const HandlerLine line("ascend", "cpu", "jtile_ascend", "instantiate,execute");

}  // namespace

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jtile_ascend_instantiate(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<AscendState>(frame, kState)) return error;
  return instantiate_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_ascend_execute(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<AscendState>(frame, kState)) return error;
  return execute_handler(frame);
}

#pragma GCC visibility pop

}  // namespace jtile
