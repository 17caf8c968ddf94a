// One compiled GPU kernel at one call site, and how it is launched.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "record.h"

namespace jtile {

// An operand or result of a call, in the memory of a device.
struct Array {
  void* data;
  size_t bytes;
};

// Finds the driver when a kernel is first loaded; a process without a GPU never calls it.
using DriverSource = Driver& (*)(const char* library);

class Launcher {
 public:
  // Checks the record and the image; opens no driver. `library` (may be null) is for the source. Throws Error.
  Launcher(DriverSource source, const char* library, std::string_view image, std::string_view record);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  const Record& record() const { return record_; }

  // Loads the image for a device, and makes its counters, unless that is done. Not while a stream is captured. Throws Error.
  void initialize(int device);

  // Puts one call on a stream. `sizes` are those of the record's dynamic dimensions, in their order. Throws Error.
  void launch(int device, void* stream, const Array* arrays, size_t count, const int64_t* sizes);

  // Waits for the call, writes what it printed, and throws the error of a failed assertion. For records with sites.
  void finish(int device, void* stream, const Array* arrays, const int64_t* sizes);

 private:
  struct OnDevice;
  static constexpr int kMaxDevices = 64;

  OnDevice& on_device(int device);
  std::unique_ptr<OnDevice> load(int device);
  LaunchConfig config(uint32_t grid, void* stream) const;
  void check_arrays(const Array* arrays, size_t count) const;
  void encode_maps(OnDevice& on, const Array* arrays, const int64_t* symbols, MapData* out);
  void run(OnDevice& on, uint32_t grid, void* stream, const Array* arrays, const int64_t* symbols);
  template <typename Body>
  void named(Body body) const;

  DriverSource source_;
  std::string library_;
  std::shared_ptr<const std::string> image_;
  Record record_;
  std::mutex mutex_;
  std::atomic<OnDevice*> devices_[kMaxDevices] = {};
};

// Counters for tests and tools.
int64_t modules_alive();
int64_t modules_loaded();

}  // namespace jtile
