// The launchers of GPUs without XLA: for tests and tools.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "capi.h"
#include "error.h"
#include "gpu.h"

namespace jtile {
namespace {

DriverSource source_of(std::string_view platform) {
  if (platform == "cuda") return cuda_driver;
  if (platform == "rocm") return hip_driver;
  fail(Code::kInvalidArgument, "there is no platform '", platform, "'; expected cuda or rocm");
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Reads an image and its launch record; *out is a handle for the functions below. `library` is the file of the driver,
// or null for the usual one.
int32_t jtile_gpu_open(const char* platform, const char* library, const char* image, int64_t size, const char* record,
                       void** out, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] {
    *out = new Launcher(source_of(platform), library, {image, static_cast<size_t>(size)}, record);
  });
}

void jtile_gpu_close(void* handle) { delete static_cast<Launcher*>(handle); }

// Which devices the kernel talks to, group by group, and for how many milliseconds it waits for them.
int32_t jtile_gpu_talk(void* handle, const int32_t* devices, int64_t count, int64_t timeout, char* error,
                       int64_t capacity) {
  return to_status(error, capacity, [&] {
    static_cast<Launcher*>(handle)->talk({devices, devices + count}, timeout);
  });
}

// Waits for a call.
int32_t jtile_gpu_finish(void* handle, int32_t device, void* stream, const Array* arrays, const int64_t* sizes,
                         char* error, int64_t capacity) {
  return to_status(error, capacity, [&] { static_cast<Launcher*>(handle)->finish(device, stream, arrays, sizes); });
}

// Loads the image for a device, unless that is done.
int32_t jtile_gpu_initialize(void* handle, int32_t device, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] { static_cast<Launcher*>(handle)->initialize(device); });
}

// Puts one call on a stream: `count` arrays (operands, then results) at addresses of the device, their bytes, and the
// sizes of the record's dynamic dimensions. A kernel that prints or asserts is waited for.
int32_t jtile_gpu_launch(void* handle, int32_t device, void* stream, const Array* arrays, int64_t count,
                         const int64_t* sizes, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] {
    auto& launcher = *static_cast<Launcher*>(handle);
    launcher.launch(device, stream, arrays, static_cast<size_t>(count), sizes);
    if (launcher.record().sites) launcher.finish(device, stream, arrays, sizes);
  });
}

// The call as a node of a graph, as text in `out`: symbol, grid, threads, shared memory, 1 for a kernel that may start
// before the one in front has ended, and the parameters in hexadecimal digits of their bytes. Empty where it is no node.
int32_t jtile_gpu_node(void* handle, int32_t device, void* stream, const Array* arrays, int64_t count,
                       const int64_t* sizes, char* out, int64_t room, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] {
    auto& launcher = *static_cast<Launcher*>(handle);
    std::string text;
    auto put = [&](const Node& node) {
      text = concat(node.symbol, " ", node.grid, " ", node.threads, " ", node.shared, " ", node.programmatic);
      for (size_t k = 0; k < node.count; ++k) {
        text += " ";
        for (size_t b = 0; b < node.values[k].bytes; ++b) {
          auto byte = static_cast<const unsigned char*>(node.values[k].data)[b];
          for (unsigned digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
        }
      }
    };
    if (launcher.is_node()) launcher.record(device, stream, arrays, static_cast<size_t>(count), sizes, put);
    if (static_cast<int64_t>(text.size()) >= room) fail(Code::kInvalidArgument, "no room for ", text.size(), " bytes");
    std::memcpy(out, text.c_str(), text.size() + 1);
  });
}

// Lets kernels on one device access the memory of another, or says why they cannot.
int32_t jtile_gpu_reach(const char* platform, const char* library, int32_t device, int32_t other, char* error,
                        int64_t capacity) {
  return to_status(error, capacity, [&] { source_of(platform)(library).reach(device, other); });
}

int64_t jtile_gpu_modules_alive() { return modules_alive(); }
int64_t jtile_gpu_modules_loaded() { return modules_loaded(); }

}  // extern "C"
#pragma GCC visibility pop

}  // namespace jtile
