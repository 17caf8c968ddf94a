#include "program.h"

#include <algorithm>
#include <system_error>
#include <thread>

#include "error.h"
#include "helpers.h"
#include "isa.h"
#include "run.h"

namespace jtile {
namespace {

constexpr int64_t kSerialNs = 10'000;  // less work than this is not worth a wake-up
constexpr int64_t kWorkerNs = 5'000;   // work that pays for one more worker
constexpr int64_t kMaxSide = (int64_t{1} << 31) - 1;  // of a grid axis: ids are int32
constexpr int64_t kMaxCounters = 1 << 24;
constexpr int64_t kMaxWorkspace = int64_t{1} << 36;
constexpr int64_t kMostThreads = 256;  // of a call that talks: no larger grid waits, as lowering/cpu/targets.py has it

}  // namespace

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
    if (image_->keeps() && workspace_ < int64_t{sizeof(int64_t)})
      fail(Code::kInvalidArgument, "it keeps values in a workspace of ", workspace_, " bytes");
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

void Program::run_parallel(const Launch& launch, void* const* bufs, int64_t workers,
                           const std::function<void(std::function<void()>)>& schedule) const {
  if (launch.programs == 0) return;
  Run run(*this, launch, bufs, workers);
  with_helpers(workers, schedule, [&run](int64_t worker) { run.drain(worker); });
  run.check();
}

namespace {

// The programs of one device's call, until the last has ended.
struct Job {
  Job(const Program& program, const Launch& launch, std::vector<void*> bufs, std::shared_ptr<Talk> talk)
      : launch(launch), bufs(std::move(bufs)), talk(std::move(talk)), left(std::min(launch.programs, kMostThreads)),
        run(program, this->launch, this->bufs.data(), 1) {}

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
