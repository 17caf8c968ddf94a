#include "run.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "error.h"

namespace jtile {
namespace {

constexpr int64_t kChunkNs = 4'000;                   // the least work of one chunk
constexpr size_t kKeptWorkspace = size_t{64} << 20;  // a thread keeps a buffer of at most this between calls

// XLA's threads treat subnormals as zero and flush results to it; the language does neither. While this lives, the
// thread computes as IEEE 754 says, rounding to nearest.
class IeeeArithmetic {
 public:
#if defined(__x86_64__)
  IeeeArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }  // all exceptions masked, no FTZ, no DAZ
  ~IeeeArithmetic() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  IeeeArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~IeeeArithmetic() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  IeeeArithmetic() {}
#endif
  IeeeArithmetic(const IeeeArithmetic&) = delete;
  IeeeArithmetic& operator=(const IeeeArithmetic&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#elif defined(__aarch64__)
  uint64_t saved_;
#endif
};

}  // namespace

Workspace::Buffer Workspace::allocate(size_t size) {
  Buffer buffer(std::aligned_alloc(64, (size + 63) / 64 * 64));
  if (buffer == nullptr) fail(Code::kResourceExhausted, "a kernel's workspace of ", size, " bytes cannot be had");
  return buffer;
}

Workspace::Workspace(size_t size) {
  if (size == 0) return;
  if (size > kKeptWorkspace) {
    own_ = allocate(size);
    data_ = own_.get();
    return;
  }
  thread_local Buffer kept;
  thread_local size_t kept_size = 0;
  if (kept_size < size) {
    size_t grown = std::min(kKeptWorkspace, std::max(size, 2 * kept_size));
    kept_size = 0;
    kept.reset();
    kept = allocate(grown);
    kept_size = grown;
  }
  data_ = kept.get();
}

// A worker begins with programs that lie side by side, the same ones in every call with as many: what a kernel reads of
// the one in front may then be in this core's cache, and what it writes over as well. Of assertions that fail the
// lowest program is told, so that such kernels have one share, whose chunks are taken in order.
std::vector<Run::Share> Run::parts_of(const Program& program, const Launch& launch, int64_t workers) {
  int64_t count = program.sites_.empty() ? std::max<int64_t>(1, workers) : 1;
  std::vector<Share> shares(static_cast<size_t>(count));
  for (int64_t k = 0; k < count; ++k) {
    int64_t whole = launch.programs / count, rest = launch.programs % count;
    Share& share = shares[static_cast<size_t>(k)];
    share.next = k * whole + std::min(k, rest);
    share.end = share.next + whole + (k < rest ? 1 : 0);
  }
  return shares;
}

bool Run::take(int64_t worker, int64_t& begin, int64_t& end) {
  size_t count = shares_.size();
  for (size_t k = 0; k < count; ++k)
    if (take_of(shares_[(static_cast<size_t>(worker) + k) % count], begin, end)) return true;
  return false;
}

// Large chunks first, and small ones at the end, so that the workers finish together.
bool Run::take_of(Share& share, int64_t& begin, int64_t& end) {
  int64_t least = std::max<int64_t>(1, kChunkNs / std::max<int64_t>(1, program_.cost_));
  int64_t parts = shares_.size() > 1 ? 2 : 2 * workers_;
  begin = share.next.load();
  do {
    int64_t left = share.end - begin;
    if (left <= 0) return false;
    end = begin + std::min(left, std::max(least, left / parts));
  } while (!share.next.compare_exchange_weak(begin, end));
  return true;
}

void Run::take_no_more() {
  for (Share& share : shares_) share.next.store(share.end);
}

void Run::run_range(int64_t begin, int64_t end, const Workspace& workspace) {
  IeeeArithmetic ieee;
  int32_t code = program_.image_->entry()(bufs_, launch_.dims, begin, end, workspace.data(), &host_.callbacks);
  if (code != 0) stop(concat("internal error ", code, " of the compiled code in programs ", begin, " to ", end - 1));
}

void Run::run_first(int64_t begin, int64_t end, const Workspace& workspace) {
  if (program_.image_->keeps()) workspace.forget();
  run_range(begin, end, workspace);
}

void Run::run_all() { run_first(0, launch_.programs, Workspace(static_cast<size_t>(program_.workspace_))); }

namespace {

// No object with a destructor lives in the frames that a program leaves.
bool enter(jtile_entry* entry, void* const* bufs, const int64_t* dims, void* workspace, Host& host, int32_t& code) {
  if (setjmp(host.out) != 0) return false;
  code = entry(bufs, dims, host.program, host.program + 1, workspace, &host.callbacks);
  return true;
}

}  // namespace

bool Run::run_one(int64_t program, Talk& talk) {
  IeeeArithmetic ieee;
  Workspace workspace(static_cast<size_t>(program_.workspace_));
  if (program_.image_->keeps()) workspace.forget();
  Host host{host_.callbacks, this, &talk, program};
  talk.equip(host.callbacks);
  int32_t code = 0;
  if (!enter(program_.image_->entry(), bufs_, launch_.dims, workspace.data(), host, code)) return false;
  if (code != 0) stop(concat("internal error ", code, " of the compiled code in program ", program));
  return true;
}

void Run::drain(int64_t worker) {
  try {
    int64_t begin = 0, end = 0;
    if (!take(worker, begin, end)) return;  // a late helper allocates nothing
    Workspace workspace(static_cast<size_t>(program_.workspace_));
    run_first(begin, end, workspace);
    while (take(worker, begin, end)) run_range(begin, end, workspace);
  } catch (const std::exception& error) {
    stop(error.what());
  }
}

void Run::stop(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (broken_.empty()) broken_ = message;
  bad_.store(true);
  take_no_more();
}

void Run::print(int64_t site, const int64_t* pid, void* const* args) {
  if (site < 0 || site >= static_cast<int64_t>(program_.sites_.size()) ||
      !program_.sites_[static_cast<size_t>(site)].is_print) {
    return stop(concat("the compiled code prints at site ", site, ", which does not exist"));
  }
  try {
    const Site& at = program_.sites_[static_cast<size_t>(site)];
    write_out(printed_line(program_.name_, at, pid, args));
  } catch (const std::exception& error) {  // no exception may cross the kernel's frames
    stop(error.what());
  }
}

// Chunks are taken in order, so all programs before a failing one have begun: taking no more still finds the lowest.
void Run::record(int64_t site, const int64_t* pid) {
  if (site < 0 || site >= static_cast<int64_t>(program_.sites_.size()))
    return stop(concat("an assertion failed at the unknown site ", site));
  const Site& at = program_.sites_[static_cast<size_t>(site)];  // all sites of a kernel have the same axes
  std::lock_guard lock(mutex_);
  if (!failed_ || program_before(at, pid, failed_pid_.data())) {
    failed_ = true;
    failed_site_ = site;
    failed_pid_.assign(pid, pid + at.axes + at.lanes);
  }
  bad_.store(true);
  take_no_more();
}

void Run::check() const {
  if (!bad_.load()) return check_counters();
  std::lock_guard lock(mutex_);
  if (!broken_.empty()) fail(Code::kInternal, "kernel ", program_.name_, ": ", broken_);
  if (!failed_) return;
  fail_assertion(program_.name_, program_.sites_[static_cast<size_t>(failed_site_)], failed_pid_.data());
}

// Whoever arrives last sets its counter back to zero.
void Run::check_counters() const {
  for (size_t k = 0; k < counters_.size(); ++k) {
    if (counters_[k] != 0)
      fail(Code::kFailedPrecondition, "kernel ", program_.name_, ": ", counters_[k], " programs have arrived at counter ",
           k, " when the call ends, fewer than the count they gave: none of them was the last");
  }
}

}  // namespace jtile
