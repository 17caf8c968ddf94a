// One call of a program: what its workers share.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program.h"

namespace jtile {

// A worker's scratch: this thread's own buffer, which lives on between calls, or one for this call when it is large.
class Workspace {
 public:
  explicit Workspace(size_t size);  // throws Error
  void* data() const { return data_; }
  // Before programs of another call: what a kernel keeps here is not theirs.
  void forget() const { *static_cast<int64_t*>(data_) = 0; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  using Buffer = std::unique_ptr<void, Free>;
  static Buffer allocate(size_t size);

  Buffer own_;
  void* data_ = nullptr;
};

// What the workers of one call share. Its first member is what the kernel sees.
class Run {
 public:
  Run(const Program& program, const Launch& launch, void* const* bufs, int64_t workers)
      : program_(program),
        launch_(launch),
        bufs_(bufs),
        workers_(workers),
        shares_(parts_of(program, launch, workers)),
        counters_(static_cast<size_t>(program.image_->counters())) {
    host_.callbacks.counters = counters_.data();
  }

  // As worker number `worker`, takes chunks until none is left. Safe on any thread while the caller waits in `finish`.
  void drain(int64_t worker);
  void run_all();
  // Runs the programs [begin, end), as the first ones of a worker.
  void run_first(int64_t begin, int64_t end, const Workspace& workspace);
  // Runs one program that talks to other devices; false: it could not go on.
  bool run_one(int64_t program, Talk& talk);
  // Throws what went wrong, if anything did.
  void check() const;
  bool bad() const { return bad_.load(); }
  void give_up(const std::string& message) { stop(message); }
  // Says what went wrong.
  void tell(Talk& talk) const {
    try {
      check();
    } catch (const std::exception& error) {
      talk.stop(error.what());
    }
  }

 private:
  static void on_print(jtile_host* host, int64_t site, const int64_t* pid, void* const* args) {
    reinterpret_cast<Host*>(host)->run->print(site, pid, args);
  }
  static void on_fail(jtile_host* host, int64_t site, const int64_t* pid) {
    Host* self = reinterpret_cast<Host*>(host);
    self->run->record(site, pid);
    if (self->talk == nullptr) return;
    self->run->tell(*self->talk);
    std::longjmp(self->out, 1);
  }

  // The programs of one worker, which the others take when they are done with theirs.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  static std::vector<Share> parts_of(const Program& program, const Launch& launch, int64_t workers);

  void run_range(int64_t begin, int64_t end, const Workspace& workspace);
  bool take(int64_t worker, int64_t& begin, int64_t& end);
  bool take_of(Share& share, int64_t& begin, int64_t& end);
  void take_no_more();
  void print(int64_t site, const int64_t* pid, void* const* args);
  void record(int64_t site, const int64_t* pid);
  void stop(const std::string& message);
  void check_counters() const;

  const Program& program_;
  const Launch& launch_;
  void* const* bufs_;
  int64_t workers_;
  std::vector<Share> shares_;
  std::vector<int32_t> counters_;
  Host host_{{on_print, on_fail}, this};

  std::atomic<bool> bad_{false};  // whether anything below was written
  mutable std::mutex mutex_;
  bool failed_ = false;
  int64_t failed_site_ = 0;
  std::vector<int64_t> failed_pid_;
  std::string broken_;
};

}  // namespace jtile
