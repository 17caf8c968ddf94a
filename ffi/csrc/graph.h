// Nodes of the command buffer (CUDA graph) that XLA records, by the record stage of its FFI.
//
// Whatever XLA traces becomes a graph of its own, and its kernels start when everything in front of it is done. A node
// that a handler adds itself stands in XLA's graph, and may start as soon as the kernel in front of it lets it.
#pragma once

#include "gpu.h"
#include "handlers.h"
#include "xla/ffi/api/record_c_api.h"

namespace jtile {

// What XLA gives a handler in that stage.
class Graph {
 public:
  Graph(const XLA_FFI_Api* api, const XLA_FFI_RecordFrame* frame) : api_(api), frame_(frame) {}

  // Adds a node behind all others; of a graph that is recorded again, changes its parameters.
  ffi::Error put(const Node& node) const {
    XLA_FFI_KernelArg args[kMaxParams];
    for (size_t k = 0; k < node.count; ++k)
      args[k] = {node.values[k].data, static_cast<int64_t>(node.values[k].bytes), XLA_FFI_KernelArgType_HostValue};
    XLA_FFI_KernelArgs all{args, static_cast<int64_t>(node.count)};
    if (frame_->action == XLA_FFI_RecordAction_Update)
      return done(frame_->api->update_launch(frame_->record_ctx, frame_->commands[0], &all));
    auto side = [](uint32_t n) { return XLA_FFI_Dim3{static_cast<int32_t>(n), 1, 1}; };
    XLA_FFI_LaunchDims dims{side(node.grid), side(node.threads), {0, 0, 0}};
    const XLA_FFI_Command* made = nullptr;
    ffi::Error error = done(frame_->api->create_launch(
        frame_->record_ctx, node.symbol.c_str(), node.image.data(), static_cast<int64_t>(node.image.size()),
        XLA_FFI_SourceFormat_CUBIN, dims, node.shared, node.programmatic, &all, nullptr, 0, &made));
    if (error.success()) frame_->commands[(*frame_->num_commands)++] = made;
    return error;
  }

  // Has XLA trace the call instead.
  ffi::Error trace() const { return done(frame_->api->request_stream_capture(frame_->record_ctx)); }

 private:
  ffi::Error done(XLA_FFI_Error* error) const {
    if (error == nullptr) return ffi::Error::Success();
    ffi::Error out = ffi::Error::Internal(ffi::internal::GetErrorMessage(api_, error));
    ffi::internal::DestroyError(api_, error);
    return out;
  }

  const XLA_FFI_Api* api_;
  const XLA_FFI_RecordFrame* frame_;
};

struct GraphExtension {
  using Type = Graph;
  using CExtension = XLA_FFI_Record_Extension;
  static constexpr auto kName = "Record";
  static constexpr int32_t kExtensionType = XLA_FFI_Extension_Record;
  static constexpr int32_t kMajorVersion = XLA_FFI_Extension_Record_MajorVersion;
  static constexpr int32_t kMinorVersion = XLA_FFI_Extension_Record_MinorVersion;
  static Graph Create(const XLA_FFI_Api* api, const CExtension* extension) { return {api, extension->record_frame}; }
};

}  // namespace jtile
