// The typed XLA FFI handlers of a GPU platform. Two targets: a plain one, which XLA may record into a command buffer
// (CUDA graph), and one for kernels that print or assert, which waits for them. Those that talk to other devices say
// which in the attributes `groups` and `timeout` (milliseconds).
#pragma once

#include <memory>

#include "gpu.h"
#include "graph.h"
#include "handlers.h"

namespace jtile {

// `Platform` gives the names and the driver:
//   static constexpr const char *kTarget, *kState;
//   static constexpr DriverSource kDriver;
template <typename Platform>
struct GpuHandlers {
  // The state of one call site; XLA deletes it with the executable. Each platform has a type of its own, since the
  // plugins that register it keep their own tables.
  struct State {
    static inline ffi::TypeId id = {};
    State(std::string_view image, std::string_view record) : launcher(Platform::kDriver, nullptr, image, record) {}
    Launcher launcher;
  };

  // Runs wherever XLA compiles or loads the program: needs no driver.
  template <bool kWaits>
  static ffi::ErrorOr<std::unique_ptr<State>> instantiate(ffi::RemainingArgs, ffi::RemainingRets,
                                                          ffi::Dictionary attrs) {
    return guarded<ffi::ErrorOr<std::unique_ptr<State>>>([&] {
      auto state = std::make_unique<State>(attribute<std::string_view>(attrs, "image", Platform::kTarget),
                                           attribute<std::string_view>(attrs, "record", Platform::kTarget));
      const Record& record = state->launcher.record();
      if (!kWaits && record.sites)
        fail(Code::kInvalidArgument, "kernel ", record.name, ": it prints or asserts; call the target ",
             Platform::kTarget, "_io");
      if (record.talking) {
        auto devices = attribute<ffi::Span<const int64_t>>(attrs, "groups", Platform::kTarget);
        state->launcher.talk({devices.begin(), devices.end()}, attribute<int64_t>(attrs, "timeout", Platform::kTarget));
      }
      return state;
    });
  }

  // Runs before every execution, and never while a command buffer is recorded: the place to load modules.
  static ffi::Error initialize(State* state, int32_t device, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
    return guarded<ffi::Error>([&] {
      state->launcher.initialize(device);
      return ffi::Error::Success();
    });
  }

  template <bool kWaits>
  static ffi::Error execute(State* state, int32_t device, void* stream, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, ffi::Dictionary) {
    return called(state, args, rets, [&](Launcher& launcher, const Array* arrays, size_t count, const int64_t* sizes) {
      launcher.launch(device, stream, arrays, count, sizes);
      if (kWaits) launcher.finish(device, stream, arrays, sizes);
      return ffi::Error::Success();
    });
  }

  // Runs while a command buffer is recorded, or changed since buffers have moved.
  static ffi::Error record(State* state, int32_t device, void* stream, Graph graph, ffi::RemainingArgs args,
                           ffi::RemainingRets rets, ffi::Dictionary) {
    return called(state, args, rets, [&](Launcher& launcher, const Array* arrays, size_t count, const int64_t* sizes) {
      if (!launcher.is_node()) return graph.trace();
      ffi::Error error = ffi::Error::Success();
      bool none = true;
      launcher.record(device, stream, arrays, count, sizes, [&](const Node& node) {
        none = false;
        error = graph.put(node);
      });
      return none ? graph.trace() : error;
    });
  }

  // Runs `body(launcher, arrays, count, sizes)`; what it throws becomes an error of XLA.
  template <typename Body>
  static ffi::Error called(State* state, ffi::RemainingArgs args, ffi::RemainingRets rets, Body body) {
    size_t count = args.size() + rets.size();
    PerArray<Array> arrays(count);
    ffi::Error bad = each_array(args, rets, [&](size_t k, ffi::AnyBuffer& buffer) {
      arrays[k] = {buffer.untyped_data(), bytes_of(buffer)};
    });
    if (bad.failure()) return bad;
    return guarded<ffi::Error>([&] {
      const Record& record = state->launcher.record();
      PerArray<int64_t> sizes(record.dims.size());
      for (size_t k = 0; k < record.dims.size(); ++k)
        sizes[k] = size_of_axis(args, record.dims[k].operand, record.dims[k].axis, record.name);
      return body(state->launcher, arrays.data(), count, sizes.data());
    });
  }

  template <bool kWaits>
  static XLA_FFI_Error* on_instantiate(XLA_FFI_CallFrame* frame) {
    if (XLA_FFI_Error* error = register_state<State>(frame, Platform::kState)) return error;
    static auto* const handler = ffi::Ffi::BindInstantiate()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs()
                                     .To(instantiate<kWaits>, traits<kWaits>())
                                     .release();
    return handler->Call(frame);
  }

  template <bool kWaits>
  static XLA_FFI_Error* on_initialize(XLA_FFI_CallFrame* frame) {
    if (XLA_FFI_Error* error = register_state<State>(frame, Platform::kState)) return error;
    static auto* const handler = ffi::Ffi::BindInitialize()
                                     .Ctx<ffi::State<State>>()
                                     .template Ctx<ffi::DeviceOrdinal>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs()
                                     .To(initialize, traits<kWaits>())
                                     .release();
    return handler->Call(frame);
  }

  template <bool kWaits>
  static XLA_FFI_Error* on_execute(XLA_FFI_CallFrame* frame) {
    if (XLA_FFI_Error* error = register_state<State>(frame, Platform::kState)) return error;
    static auto* const handler = ffi::Ffi::Bind()
                                     .Ctx<ffi::State<State>>()
                                     .template Ctx<ffi::DeviceOrdinal>()
                                     .template Ctx<ffi::PlatformStream<void*>>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs()
                                     .To(execute<kWaits>, traits<kWaits>())
                                     .release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* on_record(XLA_FFI_CallFrame* frame) {
    static auto* const handler = ffi::Ffi::BindRecord()
                                     .Ctx<ffi::State<State>>()
                                     .template Ctx<ffi::DeviceOrdinal>()
                                     .template Ctx<ffi::PlatformStream<void*>>()
                                     .template Ctx<ffi::Extension<GraphExtension>>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs()
                                     .To(record, traits<false>())
                                     .release();
    return handler->Call(frame);
  }

 private:
  template <bool kWaits>
  static std::initializer_list<ffi::Traits> traits() {
    static constexpr std::initializer_list<ffi::Traits> kNone = {}, kPlain = {ffi::Traits::kCmdBufferCompatible};
    return kWaits ? kNone : kPlain;
  }
};

}  // namespace jtile
