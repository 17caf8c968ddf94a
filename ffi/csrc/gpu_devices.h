// Kernels that talk to other devices, on the GPUs of one process: the block of memory that a call site has on each of
// them, and what their programs report. lowering/triton/emit_devices.py describes the block.
//
// The devices meet once, when a site is first executed: each has loaded the kernel, has its block, and reaches the
// others, before any of them starts a program that waits. From then on nothing of a call depends on the host, so that a
// command buffer can hold it. What goes wrong in a call stands in memory of the host, where the next call finds it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "devices.h"
#include "driver.h"
#include "record.h"

namespace jtile {

class Peers {
 public:
  // `ordinals`: the devices by their numbers in this process, group by group: only devices of one group talk to each
  // other. Throws Error.
  Peers(const Record& record, std::vector<int> ordinals, int64_t timeout_ms);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Before each execution on a device, by a thread of its own: meets the others the first time. Throws the Error of an
  // earlier call that failed, on each device once; then the site is as new. `loaded` may run as many `blocks` at once.
  void begin(Driver& driver, int ordinal, const Loaded& loaded, const LaunchConfig& config);
  // Before and behind a launch: throws the Error of a call that failed.
  void check(int ordinal);
  // The address of a device's block; throws Error before `begin`.
  void* block(int ordinal);
  // The address of a byte of the block of device `rank` of an ordinal's group, or of its own (TensorMap::kOwn); throws
  // Error before `begin`.
  void* of(int ordinal, int64_t rank, int64_t offset);

 private:
  static constexpr size_t kWords = 6;  // of a report: fault, site, program, three numbers
  struct Part {
    int ordinal = 0;
    Driver* driver = nullptr;
    void* block = nullptr;
    int32_t* report = nullptr;  // memory of the host
    std::atomic<bool> ready{false};
    bool told = false;  // that the call at hand failed
    std::string owed;   // what this device has yet to be told
  };

  Part& find(int ordinal);
  int32_t* make(Part& part, Driver& driver, const Loaded& loaded, const LaunchConfig& config);
  void meet(std::unique_lock<std::mutex>& lock, Part& part);
  void write_head(Part& part);
  bool failed() const;
  std::string reported() const;
  void heal();
  void owe(const Part* but, const std::string& text);
  void pay(Part& part);
  std::string device_text(const Part& part) const;

  const std::string name_;
  const Talking& facts_;
  const Shape shape_;
  std::vector<Part> parts_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> owing_{0};  // parts that have yet to be told something
};

}  // namespace jtile
