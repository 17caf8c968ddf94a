// One compiled kernel at one call site, and how its grid is run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "image.h"
#include "sites.h"

namespace jtile {

// The attributes of a call, as they arrive.
struct Attributes {
  std::string_view image, name, isa, sites;
  int64_t programs = 0;
  int64_t workspace = 0;  // bytes a worker
  int64_t cost = 0;       // estimated nanoseconds of one program
};

class Program {
 public:
  // Checks the attributes and loads the image. Throws Error.
  explicit Program(const Attributes& attributes);

  // How many workers are worth waking, the caller included, when `threads` are there.
  int64_t workers(int64_t threads) const;

  // Runs the grid over `bufs` on this thread. Throws Error.
  void run_serial(void* const* bufs) const;

  // Runs the grid on `workers` workers: this thread and workers - 1 others, which `schedule` starts. It is called with
  // a task that any thread may run, at once, late or after this call returned; this call never waits for a task
  // that has not begun. Throws Error.
  void run_parallel(void* const* bufs, int64_t workers,
                    const std::function<void(std::function<void()>)>& schedule) const;

  const std::string& name() const { return name_; }

 private:
  friend class Run;

  std::shared_ptr<const Image> image_;
  std::string name_;
  std::vector<Site> sites_;
  int64_t programs_, workspace_, cost_;
};

}  // namespace jtile
