// Kernels that talk to other devices, on host devices of one process: the memory that they share, and their signals.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json.h"
#include "program.h"

namespace jtile {

// What the devices of every call of a call site have in common.
struct Shape {
  std::vector<std::pair<std::string, int64_t>> axes;                   // of the mesh, with their sizes
  std::vector<std::pair<std::string, std::vector<int64_t>>> signals;  // names and shapes
  int64_t memory = 0;                                                  // bytes a device
  std::chrono::milliseconds timeout{0};

  // Reads {"axes": [[name, size], ...], "signals": [[name, shape], ...]}. Throws Error.
  Shape(std::string_view json, int64_t memory, int64_t timeout_ms);
  Shape(const Json& facts, int64_t memory, int64_t timeout_ms);
  int64_t devices() const;
  int64_t count() const;                          // of signals
  std::string device_text(int64_t device) const;  // "device (x=1, y=0)"
  std::string signal_text(int64_t number) const;  // "came[0, 2]"
};

// One call, of all its devices: their memory, signals and barriers. Whoever waits sleeps.
class Meeting {
 public:
  explicit Meeting(const Shape& shape);

  void* const* memory() const { return bases_.data(); }
  void come(int64_t device);
  // A device's programs have all ended; throws Error when it is the last, and signals are left for which nobody waited.
  void leave(int64_t device);

  void signal(int64_t device, int64_t number, int64_t value, bool set);
  // These give false where it does not come: the call has failed, and `why` says it, as `tell` puts it.
  using Tell = std::function<std::string(const std::string&)>;
  bool wait(int64_t device, int64_t number, int64_t at_least, const Tell& tell);
  bool barrier(int64_t device, int64_t axis, int64_t program, const Tell& tell);
  void fail(const std::string& why);
  std::string why() const;
  // What the devices of the call share besides: the first to ask makes it.
  std::shared_ptr<void> share(const std::function<std::shared_ptr<void>()>& make);
  std::chrono::milliseconds patience() const { return shape_.timeout; }
  std::string absent() const;  // says which devices have not come

 private:
  struct Counter {
    int64_t value = 0, waited = 0;
  };
  struct Barrier {
    int64_t came = 0, round = 0;
  };
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  template <typename Ready, typename Text>
  bool stand(std::unique_lock<std::mutex>& lock, Ready ready, Text text, const Tell& tell);
  std::string missing() const;

  const Shape& shape_;
  std::unique_ptr<void, Free> memory_;
  std::vector<void*> bases_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Counter> counters_;
  std::map<std::vector<int64_t>, Barrier> barriers_;
  std::vector<bool> came_;
  int64_t left_ = 0;
  std::string why_;
  std::shared_ptr<void> shared_;
};

// A call site: finds the meeting of a device's call. Devices of one execution come to a site equally often.
class CallSite {
 public:
  explicit CallSite(Shape shape) : shape_(std::move(shape)) {}
  const Shape& shape() const { return shape_; }
  // Args: the number of the execution, that of the group of devices, and that of the device in it.
  std::shared_ptr<Meeting> come(int64_t run, int64_t group, int64_t device);

 private:
  struct Group {
    std::vector<int64_t> calls;                         // of each device, so far
    std::map<int64_t, std::shared_ptr<Meeting>> open;  // calls to which some devices have not come yet
  };
  const Shape shape_;
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, Group> groups_;
};

// One device's part in a call.
class DeviceCall : public Talk {
 public:
  using Done = std::function<void(const Error*)>;
  DeviceCall(std::shared_ptr<const Program> program, std::shared_ptr<CallSite> site,
             std::shared_ptr<Meeting> meeting, std::vector<int32_t> place, Done done);
  void equip(jtile_host& host) override;
  void stop(const std::string& why) override { meeting_->fail(why); }
  void ended(const Error* error) override;

 private:
  static void on_signal(jtile_host*, int64_t site, const int64_t* pid, int64_t device, int64_t number, int32_t value,
                        int64_t how);
  static void on_wait(jtile_host*, int64_t site, const int64_t* pid, int64_t number, int32_t at_least);
  static void on_barrier(jtile_host*, int64_t site, const int64_t* pid, int64_t axis);
  static void on_outside(jtile_host*, int64_t site, const int64_t* pid, int64_t axis, int64_t index);
  std::string told(int64_t site, const int64_t* pid, const std::string& what) const;

  const std::shared_ptr<const Program> program_;
  const std::shared_ptr<CallSite> site_;
  const std::shared_ptr<Meeting> meeting_;
  const std::vector<int32_t> place_;
  const Done done_;
  int64_t device_ = 0;
};

// The number of a device from its place along each axis. Throws Error for one that there is not.
int64_t device_number(const Shape& shape, const std::vector<int32_t>& place);

}  // namespace jtile
