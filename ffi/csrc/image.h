// Compiled kernels in memory, each loaded once a process however many call sites use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

namespace jtile {

extern "C" {
// The callbacks of a running kernel. All fields are stable ABI.
struct jtile_host {
  // Prints at call site `site`; args[k] is the dense value of the k-th printed argument.
  void (*print)(struct jtile_host*, int64_t site, const int64_t* pid, void* const* args) = nullptr;
  // Records a failed assertion; returns, the kernel goes on.
  void (*fail)(struct jtile_host*, int64_t site, const int64_t* pid) = nullptr;
  // Where the programs of this call arrive: `jtile_counters()` of them, all zero at first.
  int32_t* counters = nullptr;

  // Only of kernels that talk to other devices. Devices of a call are numbered row by row over their axes.
  // The symmetric memory of each device, and the place of this one along each axis.
  void* const* memory = nullptr;
  const int32_t* place = nullptr;
  // Raises signal `number` of a device: by `value` (how = 0), or to it (how = 1).
  void (*signal)(struct jtile_host*, int64_t site, const int64_t* pid, int64_t device, int64_t number, int32_t value,
                 int64_t how) = nullptr;
  // These return when what they wait for has come; where it never does, they leave the kernel.
  void (*wait)(struct jtile_host*, int64_t site, const int64_t* pid, int64_t number, int32_t at_least) = nullptr;
  void (*barrier)(struct jtile_host*, int64_t site, const int64_t* pid, int64_t axis) = nullptr;
  // Leaves the kernel: there is no device `index` along an axis.
  void (*outside)(struct jtile_host*, int64_t site, const int64_t* pid, int64_t axis, int64_t index) = nullptr;
};

// Runs the programs [begin, end) of the grid; 0, or a number that tells of an internal error.
using jtile_entry = int32_t(void* const* bufs, const int64_t* dims, int64_t begin, int64_t end, void* workspace,
                            struct jtile_host* host);

// An entry of the name `jtile_entry_keeping` keeps in the workspace what several programs compute alike, and says in its
// first eight bytes for which ones. These are zero when a worker begins with a call, and stay as they are until it ends.

// Only of kernels with dynamic sizes: writes the number of programs on each axis of the grid (at most 16) to `sides`, and
// gives the number of axes.
using jtile_grid = int64_t(const int64_t* dims, int64_t* sides);

// Only of kernels whose programs arrive: how many counters a call has.
using jtile_counters = int64_t();
}

// A loaded object: its pages are mapped read-only, executable or writable, never both of the latter.
class Image {
 public:
  explicit Image(std::string_view object);  // throws Error
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  jtile_entry* entry() const { return entry_; }
  bool keeps() const { return keeps_; }
  jtile_grid* grid() const { return grid_; }  // null where the image has none
  int64_t counters() const { return counters_; }

 private:
  uint8_t* memory_ = nullptr;
  uint64_t size_ = 0;
  jtile_entry* entry_ = nullptr;
  bool keeps_ = false;
  jtile_grid* grid_ = nullptr;
  int64_t counters_ = 0;
};

// The image of these bytes: a new one, or that of an earlier call with equal bytes that somebody still holds.
std::shared_ptr<const Image> acquire_image(std::string_view object);

// Counters for tests and tools.
int64_t images_alive();
int64_t images_loaded();

}  // namespace jtile
