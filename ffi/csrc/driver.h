// The drivers of GPUs: shared libraries that are opened when a kernel is first loaded, never linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "error.h"

namespace jtile {

// A GPU of this process.
struct Device {
  int ordinal;
  std::string name;  // "NVIDIA H200"
  std::string arch;  // "sm_90", "gfx942"; empty where the driver does not tell
  int64_t shared;    // bytes of shared memory that a block may have
};

// A loaded image, and its function.
struct Loaded {
  void* module = nullptr;
  void* function = nullptr;
};

struct LaunchConfig {
  uint32_t grid, threads, shared, cluster;
  bool programmatic, cooperative;
  void* stream;
};

// The stream of the calling thread, in CUDA and HIP: it waits for no other, nor another for it.
inline void* const kThreadStream = reinterpret_cast<void*>(2);

// A CUtensorMap, and what it is made from (a TensorMap of the record at the sizes of one call).
struct alignas(128) MapData {
  uint64_t words[16];
};
struct MapShape {
  void* address;
  uint64_t dims[5], strides[5];
};
struct TensorMap;

// All functions throw Error with the driver's own name and text of what went wrong, and a way out where there is one.
// Safe from any thread. Each makes the device's context current while it runs.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual const char* platform() const = 0;

  virtual const Device& device(int ordinal) = 0;
  // Whether code for `arch` runs on the device; Error for an arch of another platform.
  virtual bool runs(const std::string& arch, const Device& device) const = 0;

  // Loads an image and makes its function ready: `config` says with how much shared memory, and in which clusters.
  virtual Loaded load(int ordinal, const std::string& image, const std::string& symbol, const LaunchConfig& config) = 0;
  virtual void unload(int ordinal, const Loaded& loaded) noexcept = 0;

  virtual void encode(const TensorMap& map, const MapShape& shape, MapData* out) = 0;
  // Memory of the device that holds zeros when this returns, on every stream. Fine while another thread records a graph.
  virtual void* allocate_zeros(int ordinal, size_t bytes) = 0;
  virtual void release(int ordinal, void* data) noexcept = 0;
  virtual void zero(int ordinal, void* data, size_t bytes, void* stream) = 0;
  virtual void launch(int ordinal, const Loaded& loaded, const LaunchConfig& config, void** params) = 0;
  // Copies from the device and waits for the stream.
  virtual void read(int ordinal, void* host, const void* data, size_t bytes, void* stream) = 0;

  // For kernels that talk to other devices; a driver that has nothing of it throws.
  // Lets kernels of a device load, store and update what lies in the memory of another.
  virtual void reach(int ordinal, int other);
  // How many blocks of a kernel a device runs at once.
  virtual int64_t resident(int ordinal, const Loaded& loaded, const LaunchConfig& config);
  // Zeros in memory of the host that every device reaches by its address.
  virtual void* allocate_host(int ordinal, size_t bytes);
  virtual void release_host(int ordinal, void* data) noexcept;
  // Copies to the device; done when this returns.
  virtual void write(int ordinal, void* data, const void* host, size_t bytes);
  // Waits for a stream; for all that the device has to do.
  virtual void wait(int ordinal, void* stream);
  virtual void idle(int ordinal);

  // For copies from device to device beside kernels; a driver that has nothing of it throws.
  virtual void* make_stream(int ordinal);
  virtual void* make_event(int ordinal);
  // An event of a device comes to pass when its stream has done what stands there now; the stream of any device waits.
  virtual void record(int ordinal, void* event, void* stream);
  virtual void await(int ordinal, void* stream, void* event);
  virtual void copy(int ordinal, void* to, const void* from, size_t bytes, void* stream);
};

// The driver of a platform, opened once in this process: its usual library, or the file `library`. Throws Error
// (kUnavailable) when it cannot be opened.
Driver& cuda_driver(const char* library = nullptr);
Driver& hip_driver(const char* library = nullptr);

// A shared library that stays open.
class Library {
 public:
  // Opens the first of these files that is there; `advice` is said when there is none.
  Library(const std::string& platform, const char* const* files, const char* advice);

  // The address of a function; Error for a missing one that is not optional.
  void* find(const char* name, bool optional = false) const;

  template <typename Function>
  void bind(Function*& function, const char* name, bool optional = false) const {
    function = reinterpret_cast<Function*>(find(name, optional));
  }

 private:
  void* handle_ = nullptr;
  std::string file_;
};

// The one driver of a class that opens these files, or `library` instead of them. Leaked, since executables that hold
// modules may outlive static destructors.
template <typename T>
Driver& driver_of(const char* const* usual, const char* library) {
  static auto* const mutex = new std::mutex;
  static auto* const drivers = new std::map<std::string, std::unique_ptr<T>>;
  std::lock_guard lock(*mutex);
  std::unique_ptr<T>& driver = (*drivers)[library == nullptr ? "" : library];
  const char* const own[] = {library, nullptr};
  if (driver == nullptr) driver = std::make_unique<T>(library == nullptr ? usual : own);
  return *driver;
}

// While it lives, this thread may do what a stream under capture forbids, such as loading a module. `exchange` may be
// null: an older driver.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(int (*exchange)(int*)) : exchange_(exchange) {
    if (exchange_ != nullptr) exchange_(&mode_);
  }
  ~RelaxedCapture() {
    if (exchange_ != nullptr) exchange_(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int (*exchange_)(int*);
  int mode_ = 2;  // relaxed; then the thread's own
};

// What to do about an error code; CUDA and HIP number those that matter alike. Empty where nothing is known.
const char* advice_for(int code);

}  // namespace jtile
