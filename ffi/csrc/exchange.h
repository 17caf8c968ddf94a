// Copies between the GPUs of one process that engines for copies make while kernels run: no multiprocessor works for them.
//
// Two custom calls. In the first (`Exchange::begin`) each device leaves the address of the array that the others write to,
// and the last one to come puts the copies of all on streams of their own, behind what the compute streams of sender and
// receiver have done so far: no device waits for another there, and those that are at the second call by then help. The
// second (`finish_exchanges`) lets the compute stream go on when all copies into an array have come, and those out of the
// arrays that were sent have left; or when those of one device have come. In between kernels may do anything but touch what is being copied.
//
// Order is the business of events; no kernel waits for another device, so that nothing can hang on a GPU. A device that
// does not come is an error of those that wait for it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"
#include "gpu.h"

namespace jtile {

// Where the piece for a device lies in what is sent, and in what is received. All numbers are bytes.
struct Pieces {
  int64_t bytes;       // of a piece
  int64_t lanes;       // pieces for each device, as many as lanes of `vmap`
  int64_t from;        // of the first lane, in the array that is sent
  int64_t from_lane;   // more for the next lane
  int64_t from_me;     // more for the next sender
  int64_t from_to;     // more for the next receiver
  int64_t into;        // in the array that is received
  int64_t into_lane;
  int64_t into_me;     // more for the next sender
  int64_t receivers;   // so many devices behind the sender
  bool own;            // whether a device sends to itself, too
};

// One call of a group: what its devices tell each other.
class Round {
 public:
  struct Part {
    int ordinal = 0;
    Driver* driver = nullptr;
    const char* from = nullptr;
    char* into = nullptr;
    void* side = nullptr;   // stream for copies
    void* ready = nullptr;  // event: what stands before the call is done
    std::vector<void*> copied;  // events: the copy for the first, second ... device behind this one is done
  };

  explicit Round(size_t devices) : parts_(devices) {}
  ~Round();
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  // Adds a device. Gives whether it was the last one. Throws Error where others have given up waiting for it: what they
  // have sent, and where they receive, may be of others by now.
  bool meet(size_t device, const Part& part);
  bool all_here() const { return came_.load(std::memory_order_acquire) == parts_.size(); }
  // Whether the caller is the first to ask, and so to make the copies of a device. All devices are here.
  bool claim(size_t device) { return !(claimed_.fetch_or(uint64_t{1} << device) >> device & 1); }
  // Those of a device stand on its stream; `error` says why they do not, else it is empty.
  void put(const std::string& error);
  // Waits until those of all do. Throws Error, after `timeout` too.
  void wait(std::chrono::milliseconds timeout);
  const std::vector<Part>& parts() const { return parts_; }  // to be read when all devices are here

 private:
  std::vector<Part> parts_;
  std::atomic<size_t> came_{0}, put_{0};
  std::atomic<uint64_t> claimed_{0};  // devices, bit by bit
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string error_;
  bool given_up_ = false;  // a device has failed before all had come
};

// The call site of the first of the two calls.
class Exchange {
 public:
  // `ordinals`: the devices by their numbers in this process, group by group of `devices`. Throws Error.
  Exchange(DriverSource source, std::vector<int64_t> ordinals, int64_t devices, int64_t timeout_ms, const Pieces& pieces);

  // Opens the driver, and lets a device reach its peers. Not while a stream is captured. Throws Error.
  void initialize(int ordinal);
  // Begins the copies of one device. `run`: the number of the execution. Throws Error.
  void begin(int ordinal, int64_t run, void* stream, const Array& from, const Array& into);
  // Puts the copies of a device on its stream, unless another thread does.
  void send(Round& round, size_t me) const;

 private:
  struct Group {
    std::vector<int64_t> calls;                       // of each device, so far
    std::map<int64_t, std::shared_ptr<Round>> open;  // calls to which some devices have not come yet
  };

  size_t find(int ordinal) const;
  std::shared_ptr<Round> come(int64_t run, size_t place);
  void check(const Array& from, const Array& into) const;
  void copy(void* stream, size_t me, size_t to, const Round& round) const;

  const DriverSource source_;
  const std::vector<int64_t> ordinals_;
  const size_t devices_;
  const std::chrono::milliseconds timeout_;
  const Pieces pieces_;
  std::mutex mutex_;
  std::map<std::pair<int64_t, size_t>, Group> groups_;
  std::atomic<uint64_t> reached_{0};  // devices, bit by bit
};

// The second call: the stream waits for all exchanges that were begun into `arrays[0]` on this device; the others are
// those that were sent, which XLA keeps until then. `run`: as of `begin`. `step`: 0, or wait only for what the device so
// many places before this one sends; a call with 0 follows. Throws Error.
void finish_exchanges(int ordinal, int64_t run, void* stream, const Array* arrays, size_t count, int64_t step,
                      int64_t timeout_ms);

}  // namespace jtile
