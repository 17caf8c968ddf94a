#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "error.h"
#include "isa.h"

namespace jtile {
namespace {

constexpr int64_t kSerialNs = 10'000;  // less work than this is not worth a wake-up
constexpr int64_t kWorkerNs = 5'000;   // work that pays for one more worker
constexpr int64_t kChunkNs = 4'000;    // the least work of one chunk
constexpr int64_t kMaxSide = (int64_t{1} << 31) - 1;  // of a grid axis: ids are int32
constexpr int64_t kMaxCounters = 1 << 24;
constexpr int64_t kMaxWorkspace = int64_t{1} << 36;
constexpr int64_t kMostThreads = 256;  // of a call that talks: no larger grid waits, as lowering/cpu/targets.py has it
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

// -- workspaces -------------------------------------------------------------------------------------------------------

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer allocate(size_t size) {
  Buffer buffer(std::aligned_alloc(64, (size + 63) / 64 * 64));
  if (buffer == nullptr) fail(Code::kResourceExhausted, "a kernel's workspace of ", size, " bytes cannot be had");
  return buffer;
}

// A worker's scratch: this thread's own buffer, which lives on between calls, or one for this call when it is large.
class Workspace {
 public:
  explicit Workspace(size_t size) {
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
  void* data() const { return data_; }

 private:
  Buffer own_;
  void* data_ = nullptr;
};

}  // namespace

// -- one run ----------------------------------------------------------------------------------------------------------

// What the workers of one call share. Its first member is what the kernel sees.
class Run {
 public:
  Run(const Program& program, const Launch& launch, void* const* bufs, int64_t workers)
      : program_(program),
        launch_(launch),
        bufs_(bufs),
        workers_(workers),
        counters_(static_cast<size_t>(program.image_->counters())) {
    host_.callbacks.counters = counters_.data();
  }

  // Takes chunks until none is left. Safe on any thread while the caller waits in `finish`.
  void drain();
  void run_all();
  // Runs one program that talks to other devices; false: it could not go on.
  bool run_one(int64_t program, Talk& talk);
  // Throws what went wrong, if anything did.
  void check() const;
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

  bool take(int64_t& begin, int64_t& end);
  void run_range(int64_t begin, int64_t end, const Workspace& workspace);
  void print(int64_t site, const int64_t* pid, void* const* args);
  void record(int64_t site, const int64_t* pid);
  void stop(const std::string& message);
  void check_counters() const;

  const Program& program_;
  const Launch& launch_;
  void* const* bufs_;
  int64_t workers_;
  std::vector<int32_t> counters_;
  Host host_{{on_print, on_fail}, this};
  std::atomic<int64_t> next_{0};

  std::atomic<bool> bad_{false};  // whether anything below was written
  mutable std::mutex mutex_;
  bool failed_ = false;
  int64_t failed_site_ = 0;
  std::vector<int64_t> failed_pid_;
  std::string broken_;
};

// Large chunks first, for locality, and small ones at the end, so that the workers finish together.
bool Run::take(int64_t& begin, int64_t& end) {
  int64_t least = std::max<int64_t>(1, kChunkNs / std::max<int64_t>(1, program_.cost_));
  begin = next_.load();
  do {
    int64_t left = launch_.programs - begin;
    if (left <= 0) return false;
    end = begin + std::min(left, std::max(least, left / (2 * workers_)));
  } while (!next_.compare_exchange_weak(begin, end));
  return true;
}

void Run::run_range(int64_t begin, int64_t end, const Workspace& workspace) {
  IeeeArithmetic ieee;
  int32_t code = program_.image_->entry()(bufs_, launch_.dims, begin, end, workspace.data(), &host_.callbacks);
  if (code != 0) stop(concat("internal error ", code, " of the compiled code in programs ", begin, " to ", end - 1));
}

void Run::run_all() { run_range(0, launch_.programs, Workspace(static_cast<size_t>(program_.workspace_))); }

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
  Host host{host_.callbacks, this, &talk, program};
  talk.equip(host.callbacks);
  int32_t code = 0;
  if (!enter(program_.image_->entry(), bufs_, launch_.dims, workspace.data(), host, code)) return false;
  if (code != 0) stop(concat("internal error ", code, " of the compiled code in program ", program));
  return true;
}

void Run::drain() {
  try {
    int64_t begin = 0, end = 0;
    if (!take(begin, end)) return;  // a late helper allocates nothing
    Workspace workspace(static_cast<size_t>(program_.workspace_));
    do run_range(begin, end, workspace);
    while (take(begin, end));
  } catch (const std::exception& error) {
    stop(error.what());
  }
}

void Run::stop(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (broken_.empty()) broken_ = message;
  bad_.store(true);
  next_.store(launch_.programs);
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
  next_.store(launch_.programs);
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

// -- program ----------------------------------------------------------------------------------------------------------

Program::Program(const Attributes& attributes)
    : name_(attributes.name),
      programs_(attributes.programs),
      workspace_(attributes.workspace),
      cost_(std::max<int64_t>(0, attributes.cost)) {
  try {
    dimensions_ = read_dimensions(attributes.dims);
    if (programs_ < 0 && dimensions_.empty()) fail(Code::kInvalidArgument, "its grid has ", programs_, " programs");
    if (workspace_ < 0 || workspace_ > kMaxWorkspace)
      fail(Code::kInvalidArgument, "its workspace has ", workspace_, " bytes");
    check_isa(attributes.isa);
    sites_ = parse_sites(attributes.sites);
    image_ = acquire_image(attributes.image);
    if (image_->counters() < 0 || image_->counters() > kMaxCounters)
      fail(Code::kInvalidArgument, "it has ", image_->counters(), " counters; a kernel has at most ", kMaxCounters);
    if (!dimensions_.empty() && image_->grid() == nullptr)
      fail(Code::kInvalidArgument, "its image does not compute a grid from dynamic sizes");
  } catch (const Error& error) {
    fail(error.code(), "kernel ", name_, ": ", error.what());
  }
}

Launch Program::launch(const int64_t* sizes) const {
  Launch launch;
  launch.programs = programs_;
  if (dimensions_.empty()) return launch;
  bind_symbols(name_, dimensions_, sizes, launch.dims);
  int64_t sides[16];
  int64_t rank = image_->grid()(launch.dims, sides);
  launch.programs = 1;
  for (int64_t k = 0; k < rank; ++k) {
    if (sides[k] < 0 || sides[k] > kMaxSide || __builtin_mul_overflow(launch.programs, sides[k], &launch.programs))
      fail(Code::kInvalidArgument, "kernel ", name_, ": axis ", k, " of its grid has ", sides[k], " programs");
  }
  return launch;
}

int64_t Program::workers(const Launch& launch, int64_t threads) const {
  int64_t most = std::min(threads, launch.programs);
  if (most <= 1) return 1;
  // In floating point: programs * cost may overflow an int64.
  double work = static_cast<double>(launch.programs) * static_cast<double>(cost_);
  if (work < kSerialNs) return 1;
  return static_cast<int64_t>(std::min(static_cast<double>(most), std::max(2.0, work / kWorkerNs)));
}

void Program::run_serial(const Launch& launch, void* const* bufs) const {
  if (launch.programs == 0) return;
  Run run(*this, launch, bufs, 1);
  run.run_all();
  run.check();
}

namespace {

// Outlives the call: a helper that starts late finds `open` false and touches nothing else.
struct Gate {
  std::atomic<int64_t> inside{0};
  std::atomic<bool> open{true};
};

}  // namespace

void Program::run_parallel(const Launch& launch, void* const* bufs, int64_t workers,
                           const std::function<void(std::function<void()>)>& schedule) const {
  if (launch.programs == 0) return;
  Run run(*this, launch, bufs, workers);
  auto gate = std::make_shared<Gate>();
  auto help = [gate, &run] {
    gate->inside.fetch_add(1);
    if (gate->open.load()) run.drain();
    if (gate->inside.fetch_sub(1) == 1) gate->inside.notify_all();
  };
  try {
    for (int64_t k = 1; k < workers; ++k) schedule(help);
  } catch (
      const std::exception&) {  // no memory or no thread for more helpers: those that began, and this thread, do it all
  }
  run.drain();
  // Either a helper saw the gate open, and is counted inside, or it sees it closed: both are sequentially consistent.
  gate->open.store(false);
  while (int64_t inside = gate->inside.load()) gate->inside.wait(inside);
  run.check();
}

namespace {

// The programs of one device's call, until the last has ended.
struct Job {
  Job(const Program& program, const Launch& launch, std::vector<void*> bufs, std::shared_ptr<Talk> talk)
      : launch(launch), bufs(std::move(bufs)), talk(std::move(talk)), left(std::min(launch.programs, kMostThreads)),
        run(program, this->launch, this->bufs.data(), launch.programs) {}

  // Runs every `step`-th program from the first on.
  void some(int64_t first, int64_t step) {
    try {
      for (int64_t k = first; k < launch.programs; k += step)
        if (!run.run_one(k, *talk)) break;
    } catch (const std::exception& error) {
      run.give_up(error.what());
    }
    leave(1);
  }

  void leave(int64_t threads) {
    if (left.fetch_sub(threads) != threads) return;
    try {
      run.check();
      talk->ended(nullptr);
    } catch (const Error& error) {
      talk->ended(&error);
    }
  }

  const Launch launch;
  const std::vector<void*> bufs;
  const std::shared_ptr<Talk> talk;
  std::atomic<int64_t> left;  // threads
  Run run;
};

}  // namespace

void Program::run_at_once(const Launch& launch, std::vector<void*> bufs, std::shared_ptr<Talk> talk) const {
  if (launch.programs == 0) return talk->ended(nullptr);
  auto job = std::make_shared<Job>(*this, launch, std::move(bufs), std::move(talk));
  const int64_t threads = job->left.load();
  for (int64_t k = 0; k < threads; ++k) {
    try {
      std::thread([job, k, threads] { job->some(k, threads); }).detach();
    } catch (const std::system_error& error) {
      job->run.give_up(concat("program ", k, " of ", launch.programs, " has no thread: ", error.what()));
      return job->leave(threads - k);
    }
  }
}

}  // namespace jtile
