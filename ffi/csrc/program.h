// One compiled kernel at one call site, and how its grid is run.
#pragma once

#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "dims.h"
#include "error.h"
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

// One device's part in a call of a kernel that talks to other devices: see devices.h.
class Talk {
 public:
  virtual ~Talk() = default;
  // Fills in what a program needs of its host.
  virtual void equip(jtile_host& host) = 0;
  // A program found something wrong: nobody shall wait for it.
  virtual void stop(const std::string& why) = 0;
  // The last program has ended, or failed.
  virtual void ended(const Error* error) = 0;
};

class Run;

// What callbacks find behind the table that the kernel sees.
struct Host {
  jtile_host callbacks;
  Run* run;
  Talk* talk = nullptr;
  int64_t program = 0;
  std::jmp_buf out = {};  // of a program that talks: where it goes when it cannot go on
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

  // Runs every program of the grid at once, each on a thread of its own (of large grids several), and returns; `talk`
  // hears of the end. Whoever holds this program keeps it until then.
  void run_at_once(const Launch& launch, std::vector<void*> bufs, std::shared_ptr<Talk> talk) const;

  const std::string& name() const { return name_; }
  size_t workspace() const { return static_cast<size_t>(workspace_); }
  int64_t programs() const { return programs_; }
  int64_t cost() const { return cost_; }
  const std::vector<Site>& sites() const { return sites_; }

 private:
  friend class Run;

  std::shared_ptr<const Image> image_;
  std::string name_;
  std::vector<Site> sites_;
  std::vector<Dimension> dimensions_;
  int64_t programs_, workspace_, cost_;
};

}  // namespace jtile
