// The typed XLA FFI handlers `jtile_cuda_exchange` and `jtile_cuda_exchanged`: copies between GPUs beside their kernels.
// Neither is for a command buffer: they meet the threads of other devices.
#include "exchange.h"
#include "handlers.h"

namespace jtile {
namespace {

constexpr const char* kExchange = "jtile_cuda_exchange";

struct ExchangeState {
  static inline ffi::TypeId id = {};
  ExchangeState(std::vector<int64_t> ordinals, int64_t devices, int64_t timeout_ms, const Pieces& pieces)
      : exchange(cuda_driver, std::move(ordinals), devices, timeout_ms, pieces) {}
  Exchange exchange;
};

const HandlerLine exchange("cuda", "CUDA", "jtile_cuda_exchange", "instantiate,initialize,execute");
const HandlerLine exchanged("cuda", "CUDA", "jtile_cuda_exchanged", "execute");

ffi::ErrorOr<std::unique_ptr<ExchangeState>> instantiate_exchange(ffi::RemainingArgs, ffi::RemainingRets,
                                                                  ffi::Dictionary attrs) {
  return guarded<ffi::ErrorOr<std::unique_ptr<ExchangeState>>>([&] {
    auto numbers = [&](const char* name) { return attribute<ffi::Span<const int64_t>>(attrs, name, kExchange); };
    auto groups = numbers("groups"), p = numbers("pieces");
    if (p.size() != 11) fail(Code::kInvalidArgument, "the attribute 'pieces' of a ", kExchange, " call has ", p.size(), " numbers");
    const Pieces pieces{p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10] != 0};
    return std::make_unique<ExchangeState>(std::vector<int64_t>(groups.begin(), groups.end()),
                                           attribute<int64_t>(attrs, "devices", kExchange),
                                           attribute<int64_t>(attrs, "timeout", kExchange), pieces);
  });
}

ffi::Error initialize_exchange(ExchangeState* state, int32_t device, ffi::RemainingArgs, ffi::RemainingRets,
                               ffi::Dictionary) {
  return guarded<ffi::Error>([&] {
    state->exchange.initialize(device);
    return ffi::Error::Success();
  });
}

// Operands and results as `Array`s.
ffi::Error arrays_of(ffi::RemainingArgs args, ffi::RemainingRets rets, PerArray<Array>& out) {
  return each_array(args, rets, [&](size_t k, ffi::AnyBuffer& buffer) {
    out[k] = {buffer.untyped_data(), bytes_of(buffer)};
  });
}

// The first array is what is sent, the last one what is received.
ffi::Error execute_exchange(ExchangeState* state, ffi::RunId run, int32_t device, void* stream,
                            ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary) {
  const size_t count = args.size() + rets.size();
  PerArray<Array> arrays(count);
  ffi::Error bad = arrays_of(args, rets, arrays);
  if (bad.failure()) return bad;
  return guarded<ffi::Error>([&] {
    if (count < 2) fail(Code::kInvalidArgument, "an exchange has an array that is sent, and one that is received");
    state->exchange.begin(device, run.run_id, stream, arrays[0], arrays[count - 1]);
    return ffi::Error::Success();
  });
}

// The first array is what is received, and the result; between them stand those that were sent.
ffi::Error execute_exchanged(ffi::RunId run, int32_t device, void* stream, ffi::RemainingArgs args,
                             ffi::RemainingRets rets, ffi::Dictionary attrs) {
  const size_t count = args.size() + rets.size();
  PerArray<Array> arrays(count);
  ffi::Error bad = arrays_of(args, rets, arrays);
  if (bad.failure()) return bad;
  return guarded<ffi::Error>([&] {
    auto number = [&](const char* name) { return attribute<int64_t>(attrs, name, "jtile_cuda_exchanged"); };
    finish_exchanges(device, run.run_id, stream, arrays.data(), count, number("step"), number("timeout"));
    return ffi::Error::Success();
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

XLA_FFI_Error* jtile_cuda_exchange_instantiate(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<ExchangeState>(frame, "jtile_cuda_exchange_state")) return error;
  static auto* const handler =
      ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs().To(instantiate_exchange).release();
  return handler->Call(frame);
}

XLA_FFI_Error* jtile_cuda_exchange_initialize(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<ExchangeState>(frame, "jtile_cuda_exchange_state")) return error;
  static auto* const handler = ffi::Ffi::BindInitialize()
                                   .Ctx<ffi::State<ExchangeState>>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs()
                                   .To(initialize_exchange)
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* jtile_cuda_exchange_execute(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<ExchangeState>(frame, "jtile_cuda_exchange_state")) return error;
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::State<ExchangeState>>()
                                   .Ctx<ffi::RunId>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Ctx<ffi::PlatformStream<void*>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs()
                                   .To(execute_exchange)
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* jtile_cuda_exchanged_execute(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::RunId>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Ctx<ffi::PlatformStream<void*>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attrs()
                                   .To(execute_exchanged)
                                   .release();
  return handler->Call(frame);
}

}  // extern "C"
#pragma GCC visibility pop

}  // namespace jtile
