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

#include "dims.h"
#include "image.h"
#include "sites.h"

namespace jtile {

// The attributes of a call, as they arrive.
struct Attributes {
  std::string_view image, name, isa, sites;
  int64_t programs = 0;
  int64_t workspace = 0;  // bytes a worker
  int64_t cost = 0;       // estimated nanoseconds of one program
  // Four numbers for each dynamic dimension: operand, axis, place of its symbol among the dims that the image takes, and
  // what the symbol is multiplied with. With any of them `programs` is not read: the image computes the grid.
  std::vector<int64_t> dims = {};
};

// What one call adds to a program: the values of its symbols, and the number of programs that they make.
struct Launch {
  int64_t programs;
  int64_t dims[kMaxSymbols];  // not set in a launch without dynamic dimensions
};

class Program {
 public:
  // Checks the attributes and loads the image. Throws Error.
  explicit Program(const Attributes& attributes);

  const std::vector<Dimension>& dimensions() const { return dimensions_; }

  // The launch for operands whose dynamic dimensions have these sizes, one for each of `dimensions()`. Throws Error.
  Launch launch(const int64_t* sizes) const;

  // How many workers are worth waking, the caller included, when `threads` are there.
  int64_t workers(const Launch& launch, int64_t threads) const;

  // Runs the grid over `bufs` on this thread. Throws Error.
  void run_serial(const Launch& launch, void* const* bufs) const;

  // Runs the grid on `workers` workers: this thread and workers - 1 others, which `schedule` starts. It is called with
  // a task that any thread may run, at once, late or after this call returned; this call never waits for a task
  // that has not begun. Throws Error.
  void run_parallel(const Launch& launch, void* const* bufs, int64_t workers,
                    const std::function<void(std::function<void()>)>& schedule) const;

  const std::string& name() const { return name_; }

 private:
  friend class Run;

  std::shared_ptr<const Image> image_;
  std::string name_;
  std::vector<Site> sites_;
  std::vector<Dimension> dimensions_;
  int64_t programs_, workspace_, cost_;
};

}  // namespace jtile
