// CUDA's driver, libcuda. No header of CUDA is needed: the few types below are its ABI, the same in CUDA 12 and 13.
#include <atomic>
#include <charconv>
#include <cstring>
#include <map>
#include <mutex>

#include "driver.h"
#include "record.h"

namespace jtile {
namespace {

using Status = int;  // CUresult
using Context = void*;

struct LaunchAttribute {
  uint32_t id;
  uint32_t pad;
  union {
    char whole[64];
    int number;
    uint32_t cluster[3];
  } value;
};
struct LaunchParams {
  uint32_t grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  uint32_t count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchParams) == 56 && sizeof(MapData) == 128);

enum LaunchAttributeId : uint32_t { kCooperative = 2, kClusterDimension = 4, kClusterPolicy = 5, kProgrammatic = 6 };
enum FunctionAttribute { kMaxDynamicShared = 8, kNonPortableCluster = 14 };
enum DeviceAttribute { kMultiprocessors = 16, kMajor = 75, kMinor = 76, kMaxSharedOptin = 97 };
constexpr int kNativeAtomics = 3;     // CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
constexpr Status kReachedBefore = 704;
constexpr unsigned kForAllDevices = 1 | 2;  // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned kOwnOrder = 1;     // CU_STREAM_NON_BLOCKING
constexpr unsigned kWithoutTime = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kSpread = 1;            // CU_CLUSTER_SCHEDULING_POLICY_SPREAD
constexpr int kL2Promotion128 = 2;    // CU_TENSOR_MAP_L2_PROMOTION_L2_128B
constexpr uint32_t kDefaultShared = 48 << 10;  // more is a promise that the function has to make
constexpr uint32_t kPortableCluster = 8;
constexpr int kExactFrom = 90;  // triton compiles for sm_90a, sm_100a ...: code that no other architecture runs

struct Functions {
  Status (*init)(unsigned);
  Status (*error_name)(Status, const char**);
  Status (*error_string)(Status, const char**);
  Status (*device_get)(int*, int);
  Status (*device_name)(char*, int, int);
  Status (*device_attribute)(int*, int, int);
  Status (*retain)(Context*, int);
  Status (*get_current)(Context*);
  Status (*push)(Context);
  Status (*pop)(Context*);
  Status (*module_load)(void**, const void*);
  Status (*module_unload)(void*);
  Status (*module_function)(void**, void*, const char*);
  Status (*function_set)(void*, int, int);
  Status (*function_load)(void*);  // optional: CUDA 12.4
  Status (*launch)(const LaunchParams*, void*, void**, void**);
  Status (*allocate)(uint64_t*, size_t);
  Status (*release)(uint64_t);
  Status (*memset)(uint64_t, unsigned char, size_t, void*);
  Status (*copy)(void*, uint64_t, size_t, void*);
  Status (*synchronize)(void*);
  Status (*capture_mode)(int*);
  Status (*can_reach)(int*, int, int);
  Status (*reach_attribute)(int*, int, int, int);
  Status (*reach)(Context, unsigned);
  Status (*occupancy)(int*, void*, int, size_t);
  Status (*allocate_host)(void**, size_t, unsigned);
  Status (*release_host)(void*);
  Status (*write)(uint64_t, const void*, size_t, void*);
  Status (*idle)();
  Status (*make_stream)(void**, unsigned, int);
  Status (*make_event)(void**, unsigned);
  Status (*record)(void*, void*);
  Status (*await)(void*, void*, unsigned);
  Status (*copy_between)(uint64_t, uint64_t, size_t, void*);
  Status (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                   int, int, int);  // optional: CUDA 12

  explicit Functions(const Library& library) {
    library.bind(init, "cuInit");
    library.bind(error_name, "cuGetErrorName");
    library.bind(error_string, "cuGetErrorString");
    library.bind(device_get, "cuDeviceGet");
    library.bind(device_name, "cuDeviceGetName");
    library.bind(device_attribute, "cuDeviceGetAttribute");
    library.bind(retain, "cuDevicePrimaryCtxRetain");
    library.bind(get_current, "cuCtxGetCurrent");
    library.bind(push, "cuCtxPushCurrent_v2");
    library.bind(pop, "cuCtxPopCurrent_v2");
    library.bind(module_load, "cuModuleLoadData");
    library.bind(module_unload, "cuModuleUnload");
    library.bind(module_function, "cuModuleGetFunction");
    library.bind(function_set, "cuFuncSetAttribute");
    library.bind(function_load, "cuFuncLoad", true);
    library.bind(launch, "cuLaunchKernelEx");
    library.bind(allocate, "cuMemAlloc_v2");
    library.bind(release, "cuMemFree_v2");
    library.bind(memset, "cuMemsetD8Async");
    library.bind(copy, "cuMemcpyDtoHAsync_v2");
    library.bind(synchronize, "cuStreamSynchronize");
    library.bind(capture_mode, "cuThreadExchangeStreamCaptureMode");
    library.bind(can_reach, "cuDeviceCanAccessPeer");
    library.bind(reach_attribute, "cuDeviceGetP2PAttribute");
    library.bind(reach, "cuCtxEnablePeerAccess");
    library.bind(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    library.bind(allocate_host, "cuMemHostAlloc");
    library.bind(release_host, "cuMemFreeHost");
    library.bind(write, "cuMemcpyHtoDAsync_v2");
    library.bind(idle, "cuCtxSynchronize");
    library.bind(make_stream, "cuStreamCreateWithPriority");
    library.bind(make_event, "cuEventCreate");
    library.bind(record, "cuEventRecord");
    library.bind(await, "cuStreamWaitEvent");
    library.bind(copy_between, "cuMemcpyAsync");
    library.bind(encode, "cuTensorMapEncodeTiled", true);
  }
};

constexpr const char* kUsual[] = {"libcuda.so.1", nullptr};
constexpr const char* kAdvice =
    "a machine with an NVIDIA GPU and its driver has libcuda.so.1; elsewhere run on the CPU (JAX_PLATFORMS=cpu)";

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(const char* const* files) : library_("CUDA", files, kAdvice), cu_(library_) {
    check(cu_.init(0), "cuInit");
  }

  const char* platform() const override { return "CUDA"; }

  const Device& device(int ordinal) override { return open(ordinal).device; }

  bool runs(const std::string& arch, const Device& device) const override {
    int image = number_of(arch), here = number_of(device.arch);
    if (image >= kExactFrom || here >= kExactFrom) return image == here;
    return image / 10 == here / 10 && image <= here;
  }

  Loaded load(int ordinal, const std::string& image, const std::string& symbol, const LaunchConfig& config) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    Loaded loaded;
    check(cu_.module_load(&loaded.module, image.c_str()), "cuModuleLoadData");
    try {
      check(cu_.module_function(&loaded.function, loaded.module, symbol.c_str()), "cuModuleGetFunction");
      if (config.shared > kDefaultShared) set(loaded.function, kMaxDynamicShared, static_cast<int>(config.shared));
      if (config.cluster > kPortableCluster) set(loaded.function, kNonPortableCluster, 1);
      // Modules load lazily by default; a stream that is being captured is no place for it.
      if (cu_.function_load != nullptr) check(cu_.function_load(loaded.function), "cuFuncLoad");
    } catch (...) {
      cu_.module_unload(loaded.module);
      throw;
    }
    return loaded;
  }

  void unload(int ordinal, const Loaded& loaded) noexcept override {
    try {
      Current current(*this, ordinal);
      RelaxedCapture relaxed(cu_.capture_mode);  // another thread may be recording a graph
      cu_.module_unload(loaded.module);
    } catch (const Error&) {  // the process ends, and the driver with it
    }
  }

  void encode(const TensorMap& map, const MapShape& shape, MapData* out) override {
    if (cu_.encode == nullptr)
      fail(Code::kUnavailable, "this driver knows no tensor maps: install one of CUDA 12 or newer");
    constexpr uint32_t kOnes[] = {1, 1, 1, 1, 1};
    Status status = cu_.encode(out, static_cast<int>(map.dtype), static_cast<uint32_t>(map.rank), shape.address,
                               shape.dims, shape.strides, map.box, kOnes, /*interleave=*/0,
                               static_cast<int>(map.swizzle), kL2Promotion128, map.nan_fill);
    if (status != 0) check(status, concat("cuTensorMapEncodeTiled of ", describe(map, shape)));
  }

  void* allocate_zeros(int ordinal, size_t bytes) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    uint64_t data = 0;
    check(cu_.allocate(&data, bytes), "cuMemAlloc");
    try {
      check(cu_.memset(data, 0, bytes, kThreadStream), "cuMemsetD8Async");
      check(cu_.synchronize(kThreadStream), "cuStreamSynchronize");
    } catch (...) {
      cu_.release(data);
      throw;
    }
    return reinterpret_cast<void*>(data);
  }

  void release(int ordinal, void* data) noexcept override {
    try {
      Current current(*this, ordinal);
      RelaxedCapture relaxed(cu_.capture_mode);
      cu_.release(reinterpret_cast<uint64_t>(data));
    } catch (const Error&) {  // the process ends, and the driver with it
    }
  }

  void zero(int ordinal, void* data, size_t bytes, void* stream) override {
    Current current(*this, ordinal);
    check(cu_.memset(reinterpret_cast<uint64_t>(data), 0, bytes, stream), "cuMemsetD8Async");
  }

  void launch(int ordinal, const Loaded& loaded, const LaunchConfig& config, void** params) override {
    LaunchAttribute attributes[4];
    LaunchParams how{{config.grid, 1, 1}, {config.threads, 1, 1}, config.shared, config.stream, attributes, 0};
    auto add = [&](LaunchAttributeId id) -> LaunchAttribute& {
      LaunchAttribute& attribute = attributes[how.count++];
      attribute.id = id, attribute.pad = 0;
      std::memset(attribute.value.whole, 0, sizeof attribute.value.whole);
      return attribute;
    };
    if (config.programmatic) add(kProgrammatic).value.number = 1;
    if (config.cooperative) add(kCooperative).value.number = 1;
    if (config.cluster > 1) {
      uint32_t* sides = add(kClusterDimension).value.cluster;
      sides[0] = config.cluster, sides[1] = sides[2] = 1;
      add(kClusterPolicy).value.number = kSpread;
    }
    Current current(*this, ordinal);
    check(cu_.launch(&how, loaded.function, params, nullptr), "cuLaunchKernelEx");
  }

  void read(int ordinal, void* host, const void* data, size_t bytes, void* stream) override {
    Current current(*this, ordinal);
    check(cu_.copy(host, reinterpret_cast<uint64_t>(data), bytes, stream), "cuMemcpyDtoHAsync");
    check(cu_.synchronize(stream), "cuStreamSynchronize");
  }

  void reach(int ordinal, int other) override {
    int able = 0, atomic = 0;
    const int from = open(ordinal).handle, to = open(other).handle;
    check(cu_.can_reach(&able, from, to), "cuDeviceCanAccessPeer");
    if (able != 0) check(cu_.reach_attribute(&atomic, kNativeAtomics, from, to), "cuDeviceGetP2PAttribute");
    if (able == 0 || atomic == 0)
      fail(Code::kFailedPrecondition, "device ", ordinal, " (", open(ordinal).device.name, ") cannot ",
           able == 0 ? "reach the memory" : "update atomically what lies in the memory", " of device ", other,
           ": kernels that talk to each other need links such as NVLink between their devices; use the collectives of "
           "jax.lax there");
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    Status status = cu_.reach(open(other).context, 0);
    if (status != kReachedBefore) check(status, "cuCtxEnablePeerAccess");
  }

  int64_t resident(int ordinal, const Loaded& loaded, const LaunchConfig& config) override {
    Current current(*this, ordinal);
    int each = 0, units = 0;
    check(cu_.occupancy(&each, loaded.function, static_cast<int>(config.threads), config.shared),
          "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    check(cu_.device_attribute(&units, kMultiprocessors, open(ordinal).handle), "cuDeviceGetAttribute");
    return int64_t{each} * units;
  }

  void* allocate_host(int ordinal, size_t bytes) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    void* data = nullptr;
    check(cu_.allocate_host(&data, bytes, kForAllDevices), "cuMemHostAlloc");
    return std::memset(data, 0, bytes);
  }

  void release_host(int ordinal, void* data) noexcept override {
    try {
      Current current(*this, ordinal);
      RelaxedCapture relaxed(cu_.capture_mode);
      cu_.release_host(data);
    } catch (const Error&) {  // the process ends, and the driver with it
    }
  }

  void write(int ordinal, void* data, const void* host, size_t bytes) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    check(cu_.write(reinterpret_cast<uint64_t>(data), host, bytes, kThreadStream), "cuMemcpyHtoDAsync");
    check(cu_.synchronize(kThreadStream), "cuStreamSynchronize");
  }

  void wait(int ordinal, void* stream) override {
    Current current(*this, ordinal);
    check(cu_.synchronize(stream), "cuStreamSynchronize");
  }

  void idle(int ordinal) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    check(cu_.idle(), "cuCtxSynchronize");
  }

  void* make_stream(int ordinal) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    void* stream = nullptr;
    check(cu_.make_stream(&stream, kOwnOrder, 0), "cuStreamCreateWithPriority");
    return stream;
  }

  void* make_event(int ordinal) override {
    Current current(*this, ordinal);
    RelaxedCapture relaxed(cu_.capture_mode);
    void* event = nullptr;
    check(cu_.make_event(&event, kWithoutTime), "cuEventCreate");
    return event;
  }

  void record(int ordinal, void* event, void* stream) override {
    Current current(*this, ordinal);
    check(cu_.record(event, stream), "cuEventRecord");
  }

  void await(int ordinal, void* stream, void* event) override {
    Current current(*this, ordinal);
    check(cu_.await(stream, event, 0), "cuStreamWaitEvent");
  }

  void copy(int ordinal, void* to, const void* from, size_t bytes, void* stream) override {
    Current current(*this, ordinal);
    check(cu_.copy_between(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes, stream),
          "cuMemcpyAsync");
  }

 private:
  struct Open {
    Device device;
    Context context;
    int handle;
  };

  // Makes the primary context of a device current while it lives: XLA's own context.
  class Current {
   public:
    Current(CudaDriver& driver, int ordinal) : driver_(driver) {
      Context context = driver.open(ordinal).context, now = nullptr;
      driver.check(driver.cu_.get_current(&now), "cuCtxGetCurrent");
      if (now == context) return;
      driver.check(driver.cu_.push(context), "cuCtxPushCurrent");
      pushed_ = true;
    }
    ~Current() {
      Context old = nullptr;
      if (pushed_) driver_.cu_.pop(&old);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    CudaDriver& driver_;
    bool pushed_ = false;
  };

  void check(Status status, const std::string& what) const {
    if (status != 0) refuse(status, what);
  }
  void check(Status status, const char* what) const {
    if (status != 0) refuse(status, what);
  }

  [[noreturn]] void refuse(Status status, const std::string& what) const {
    const char *name = nullptr, *text = nullptr;
    cu_.error_name(status, &name);
    cu_.error_string(status, &text);
    Code code = status == 2 || status == 701 ? Code::kResourceExhausted
                : status == 100              ? Code::kUnavailable
                                             : Code::kInternal;
    fail(code, what, " failed with ", name == nullptr ? concat("error ", status) : name, " (",
         text == nullptr ? "unknown" : text, ")", advice_for(status));
  }

  void set(void* function, FunctionAttribute attribute, int value) const {
    Status status = cu_.function_set(function, attribute, value);
    if (status != 0) check(status, concat("cuFuncSetAttribute(", static_cast<int>(attribute), ", ", value, ")"));
  }

  // The number in "sm_90" or "sm_90a".
  static int number_of(const std::string& arch) {
    int number = 0;
    const char* first = arch.data() + 3;
    if (arch.rfind("sm_", 0) != 0 || std::from_chars(first, arch.data() + arch.size(), number).ec != std::errc())
      fail(Code::kInvalidArgument, "its code is for '", arch, "', which is no architecture of NVIDIA");
    return number;
  }

  // The device of this number, opened on its first use.
  const Open& open(int ordinal) {
    if (ordinal >= 0 && ordinal < kFast)
      if (const Open* found = fast_[ordinal].load(std::memory_order_acquire)) return *found;
    std::lock_guard lock(mutex_);
    auto found = open_.find(ordinal);
    if (found == open_.end()) found = open_.emplace(ordinal, make(ordinal)).first;
    if (ordinal >= 0 && ordinal < kFast) fast_[ordinal].store(&found->second, std::memory_order_release);
    return found->second;
  }

  Open make(int ordinal) const {
    Open made{{ordinal, "", "", 0}, nullptr, 0};
    int handle = 0, major = 0, minor = 0, shared = 0;
    char name[256] = {};
    check(cu_.device_get(&handle, ordinal), concat("cuDeviceGet(", ordinal, ")"));
    check(cu_.device_name(name, sizeof name - 1, handle), "cuDeviceGetName");
    check(cu_.device_attribute(&major, kMajor, handle), "cuDeviceGetAttribute");
    check(cu_.device_attribute(&minor, kMinor, handle), "cuDeviceGetAttribute");
    check(cu_.device_attribute(&shared, kMaxSharedOptin, handle), "cuDeviceGetAttribute");
    check(cu_.retain(&made.context, handle), "cuDevicePrimaryCtxRetain");
    made.handle = handle;
    made.device.name = name, made.device.arch = concat("sm_", major, minor), made.device.shared = shared;
    return made;
  }

  static std::string describe(const TensorMap& map, const MapShape& shape) {
    std::string text = concat("array ", map.buffer, " with dims");
    for (size_t k = 0; k < map.rank; ++k) text += concat(" ", shape.dims[k]);
    text += ", strides";
    for (size_t k = 0; k + 1 < map.rank; ++k) text += concat(" ", shape.strides[k]);
    text += ", box";
    for (size_t k = 0; k < map.rank; ++k) text += concat(" ", map.box[k]);
    return concat(text, ", dtype ", map.dtype, ", swizzle ", map.swizzle);
  }

  static constexpr int kFast = 64;

  Library library_;
  Functions cu_;
  std::mutex mutex_;
  std::map<int, Open> open_;
  std::atomic<const Open*> fast_[kFast] = {};
};

}  // namespace

Driver& cuda_driver(const char* library) { return driver_of<CudaDriver>(kUsual, library); }

}  // namespace jtile
