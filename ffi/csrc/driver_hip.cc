// AMD's driver, libamdhip64, by the part of its ABI that ROCm 6 and 7 share.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "driver.h"
#include "record.h"

namespace jtile {
namespace {

using Status = int;  // hipError_t

struct Functions {
  Status (*init)(unsigned);
  const char* (*error_name)(Status);
  const char* (*error_string)(Status);
  Status (*properties)(void*, int);
  Status (*get_device)(int*);
  Status (*set_device)(int);
  Status (*module_load)(void**, const void*);
  Status (*module_unload)(void*);
  Status (*module_function)(void**, void*, const char*);
  Status (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  Status (*launch_cooperative)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                               void**);
  Status (*allocate)(void**, size_t);
  Status (*release)(void*);
  Status (*memset)(void*, unsigned char, size_t, void*);
  Status (*copy)(void*, const void*, size_t, void*);
  Status (*synchronize)(void*);
  Status (*capture_mode)(int*);

  explicit Functions(const Library& library) {
    library.bind(init, "hipInit");
    library.bind(error_name, "hipGetErrorName");
    library.bind(error_string, "hipGetErrorString");
    // The symbol names the version of the structure that it fills: its layout is fixed.
    library.bind(properties, "hipGetDevicePropertiesR0600");
    library.bind(get_device, "hipGetDevice");
    library.bind(set_device, "hipSetDevice");
    library.bind(module_load, "hipModuleLoadData");
    library.bind(module_unload, "hipModuleUnload");
    library.bind(module_function, "hipModuleGetFunction");
    library.bind(launch, "hipModuleLaunchKernel");
    library.bind(launch_cooperative, "hipModuleLaunchCooperativeKernel");
    library.bind(allocate, "hipMalloc");
    library.bind(release, "hipFree");
    library.bind(memset, "hipMemsetD8Async");
    library.bind(copy, "hipMemcpyDtoHAsync");
    library.bind(synchronize, "hipStreamSynchronize");
    library.bind(capture_mode, "hipThreadExchangeStreamCaptureMode");
  }
};

// hipDeviceProp_tR0600: what is read of it.
constexpr size_t kPropertiesBytes = 1472, kSharedAt = 296, kArchAt = 1160, kText = 256;

constexpr const char* kUsual[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", nullptr};
constexpr const char* kAdvice =
    "a machine with an AMD GPU and ROCm has libamdhip64.so; elsewhere run on the CPU (JAX_PLATFORMS=cpu)";

class HipDriver final : public Driver {
 public:
  explicit HipDriver(const char* const* files) : library_("ROCM", files, kAdvice), hip_(library_) {
    check(hip_.init(0), "hipInit");
  }

  const char* platform() const override { return "ROCM"; }

  const Device& device(int ordinal) override {
    std::lock_guard lock(mutex_);
    auto found = open_.find(ordinal);
    if (found == open_.end()) found = open_.emplace(ordinal, make(ordinal)).first;
    return found->second;
  }

  bool runs(const std::string& arch, const Device& device) const override {
    if (arch.rfind("gfx", 0) != 0)
      fail(Code::kInvalidArgument, "its code is for '", arch, "', which is no architecture of AMD");
    return device.arch.empty() || arch == device.arch;
  }

  Loaded load(int ordinal, const std::string& image, const std::string& symbol, const LaunchConfig&) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(hip_.capture_mode);
    Loaded loaded;
    check(hip_.module_load(&loaded.module, image.c_str()), "hipModuleLoadData");
    try {
      check(hip_.module_function(&loaded.function, loaded.module, symbol.c_str()), "hipModuleGetFunction");
    } catch (...) {
      hip_.module_unload(loaded.module);
      throw;
    }
    return loaded;
  }

  void unload(int ordinal, const Loaded& loaded) noexcept override {
    try {
      Current current(*this, ordinal);
      RelaxedCapture relaxed(hip_.capture_mode);  // another thread may be recording a graph
      hip_.module_unload(loaded.module);
    } catch (const Error&) {  // the process ends, and the driver with it
    }
  }

  void encode(const TensorMap&, const MapShape&, MapData*) override {
    fail(Code::kInvalidArgument, "AMD's GPUs have no tensor maps");
  }

  void* allocate_zeros(int ordinal, size_t bytes) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(hip_.capture_mode);
    void* data = nullptr;
    check(hip_.allocate(&data, bytes), "hipMalloc");
    try {
      check(hip_.memset(data, 0, bytes, kThreadStream), "hipMemsetD8Async");
      check(hip_.synchronize(kThreadStream), "hipStreamSynchronize");
    } catch (...) {
      hip_.release(data);
      throw;
    }
    return data;
  }

  void release(int ordinal, void* data) noexcept override {
    try {
      Current current(*this, ordinal);
      RelaxedCapture relaxed(hip_.capture_mode);
      hip_.release(data);
    } catch (const Error&) {  // the process ends, and the driver with it
    }
  }

  void zero(int ordinal, void* data, size_t bytes, void* stream) override {
    Current current(*this, ordinal);
    check(hip_.memset(data, 0, bytes, stream), "hipMemsetD8Async");
  }

  void launch(int ordinal, const Loaded& loaded, const LaunchConfig& how, void** params) override {
    Current current(*this, ordinal);
    if (how.cooperative) {
      check(hip_.launch_cooperative(loaded.function, how.grid, 1, 1, how.threads, 1, 1, how.shared, how.stream, params),
            "hipModuleLaunchCooperativeKernel");
    } else {
      check(hip_.launch(loaded.function, how.grid, 1, 1, how.threads, 1, 1, how.shared, how.stream, params, nullptr),
            "hipModuleLaunchKernel");
    }
  }

  void read(int ordinal, void* host, const void* data, size_t bytes, void* stream) override {
    Current current(*this, ordinal);
    check(hip_.copy(host, data, bytes, stream), "hipMemcpyDtoHAsync");
    check(hip_.synchronize(stream), "hipStreamSynchronize");
  }

 private:
  // Makes a device current while it lives.
  class Current {
   public:
    Current(const HipDriver& driver, int ordinal) : driver_(driver) {
      driver.check(driver.hip_.get_device(&old_), "hipGetDevice");
      if (old_ == ordinal) return;
      driver.check(driver.hip_.set_device(ordinal), "hipSetDevice");
      changed_ = true;
    }
    ~Current() {
      if (changed_) driver_.hip_.set_device(old_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const HipDriver& driver_;
    int old_ = 0;
    bool changed_ = false;
  };

  void check(Status status, const char* what) const {
    if (status == 0) return;
    Code code = status == 2 || status == 701 ? Code::kResourceExhausted
                : status == 100              ? Code::kUnavailable
                                             : Code::kInternal;
    const char *name = hip_.error_name(status), *text = hip_.error_string(status);
    fail(code, what, " failed with ", name == nullptr ? concat("error ", status) : name, " (",
         text == nullptr ? "unknown" : text, ")", advice_for(status));
  }

  Device make(int ordinal) const {
    alignas(16) char properties[4 * kPropertiesBytes] = {};  // room for what a later driver may append
    check(hip_.properties(properties, ordinal), "hipGetDeviceProperties");
    uint64_t shared = 0;
    std::memcpy(&shared, properties + kSharedAt, sizeof shared);
    std::string arch(properties + kArchAt, strnlen(properties + kArchAt, kText));
    arch = arch.rfind("gfx", 0) == 0 ? arch.substr(0, arch.find(':')) : "";  // "gfx942:sramecc+:xnack-"
    return {ordinal, {properties, strnlen(properties, kText)}, arch, static_cast<int64_t>(shared)};
  }

  Library library_;
  Functions hip_;
  std::mutex mutex_;
  std::map<int, Device> open_;
};

}  // namespace

Driver& hip_driver(const char* library) { return driver_of<HipDriver>(kUsual, library); }

}  // namespace jtile
