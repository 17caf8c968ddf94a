// One compiled GPU kernel at one call site, and how it is launched.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
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

// A parameter of a kernel: `bytes` at `data`.
struct Value {
  const void* data;
  size_t bytes;
};

// A call as a node of a graph: what is launched, and with which parameters.
struct Node {
  const std::string& image;
  const std::string& symbol;
  uint32_t grid, threads, shared;
  bool programmatic;
  const Value* values;
  size_t count;
};

class Peers;

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

  // Which devices a kernel talks to, by their numbers in this process, group by group, and how long it waits for them;
  // none where it runs on any device, and only its own blocks wait for each other. Before `initialize`. Throws Error.
  void talk(std::vector<int> ordinals, int64_t timeout_ms);

  // Loads the image for a device, and makes its counters, unless that is done; a kernel that talks to other devices
  // waits for these the first time. Not while a stream is captured. Throws Error.
  void initialize(int device);

  // Puts one call on a stream. `sizes` are those of the record's dynamic dimensions, in their order. Throws Error.
  void launch(int device, void* stream, const Array* arrays, size_t count, const int64_t* sizes);

  // Whether a call is one node of a kernel, which asks for nothing but to start before the kernel in front of it is done.
  bool is_node() const;

  // Gives the call as a node to `put`; a grid without programs is none. As `launch` else. Throws Error.
  void record(int device, void* stream, const Array* arrays, size_t count, const int64_t* sizes,
              const std::function<void(const Node&)>& put);

  // Waits for the call, writes what it printed, and throws the error of a failed assertion, or of a wait for another
  // device.
  void finish(int device, void* stream, const Array* arrays, const int64_t* sizes);

 private:
  struct OnDevice;
  static constexpr int kMaxDevices = 64;

  OnDevice& on_device(int device);
  std::unique_ptr<OnDevice> load(int device);
  LaunchConfig config(uint32_t grid, void* stream) const;
  Peers* peers(OnDevice& on) const;  // null where it does not talk
  void check_arrays(const Array* arrays, size_t count) const;
  void encode_maps(OnDevice& on, const Array* arrays, const int64_t* symbols, MapData* out);
  // Binds the sizes and calls `body(on, blocks, symbols)` unless there are no blocks.
  template <typename Body>
  void prepared(int device, const Array* arrays, size_t count, const int64_t* sizes, Body body);
  // Calls `body(params, values)` with the parameters of a call.
  template <typename Body>
  void with_params(OnDevice& on, void* stream, const Array* arrays, const int64_t* symbols, Body body);
  template <typename Body>
  void named(Body body) const;

  DriverSource source_;
  std::string library_;
  std::shared_ptr<const std::string> image_;
  Record record_;
  std::unique_ptr<Peers> peers_;           // null where it does not talk, and where each device is alone
  std::optional<int64_t> timeout_alone_;   // milliseconds, where each device is alone
  std::mutex mutex_;
  std::atomic<OnDevice*> devices_[kMaxDevices] = {};
};

// Counters for tests and tools.
int64_t modules_alive();
int64_t modules_loaded();

}  // namespace jtile
