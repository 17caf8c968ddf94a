#include "helpers.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jtile {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostThreads = 256;
constexpr auto kAwake = std::chrono::microseconds(250);  // how long a thread waits before it sleeps
constexpr auto kPause = std::chrono::microseconds(40);   // in less between two calls XLA's threads do nothing large
constexpr auto kKeen = kPause;  // before a waiting thread lets others have its core: the scheduler gives them 3 ms of it
constexpr int kFew = 8;                                  // calls that follow each other for each one that does not
constexpr int kMostFollowing = 4 * kFew;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `done` comes true within kAwake: where helpers are there at once, calls follow each other in less.
template <class Done>
bool await(const Done& done) {
  const auto begin = Clock::now();
  for (Clock::duration passed{}; passed < kAwake; passed = Clock::now() - begin) {
    for (int k = 0; k < 16; ++k) {
      if (done()) return true;
      pause();
    }
    if (passed > kKeen) sched_yield();
  }
  return done();
}

// Who is at work on a call: a helper that starts late finds it closed and touches nothing else.
class Gate {
 public:
  void open() { open_.store(true); }

  template <class Work>
  void enter(const Work& work) {
    inside_.fetch_add(1);
    if (open_.load()) work();
    if (inside_.fetch_sub(1) == 1) inside_.notify_all();
  }

  // Either a helper saw the gate open, and is counted inside, or it sees it closed: both are sequentially consistent.
  void close() {
    open_.store(false);
    if (await([this] { return inside_.load() == 0; })) return;
    while (int64_t inside = inside_.load()) inside_.wait(inside);
  }

 private:
  std::atomic<int64_t> inside_{0};
  std::atomic<bool> open_{false};
};

// Helpers of XLA's pool, for one call.
void with_pool(int64_t workers, const Schedule& schedule, const std::function<void(int64_t)>& work) {
  auto gate = std::make_shared<Gate>();  // outlives the call
  gate->open();
  try {
    for (int64_t k = 1; k < workers; ++k)
      schedule([gate, k, &work] { gate->enter([&] { work(k); }); });
  } catch (const std::exception&) {  // those that began, and this thread, do it all
  }
  work(0);
  gate->close();
}

// Threads that help one call at a time, each of them always as the same worker, where calls follow each other at once.
//
// XLA's pool has as many threads as there are cores, besides the one that calls. They look for work for some
// microseconds, and a task that arrives meanwhile wakes another one, which finds nothing and takes the core of the
// caller, or of the one that has the task. A step of a small language model, 150 calls, changed threads 110 times so on
// two cores, and its caller waited for a core for a third of the time. Where other operations of XLA stand between the
// calls, and use the pool, its threads are awake and have what these wrote in their caches: there they help.
class Crew {
 public:
  void help_with(int64_t workers, const Schedule& schedule, const std::function<void(int64_t)>& work) {
    std::unique_lock lock(calls_, std::try_to_lock);
    if (!lock) return with_pool(workers, schedule, work);  // the crew helps another call
    if (follows()) run(workers, work);
    else with_pool(workers, schedule, work);
    ended_ = Clock::now();
  }

 private:
  // Whether calls have followed each other so far, but for one in many: a loop ends, and begins anew.
  bool follows() {
    if (Clock::now() - ended_ < kPause) following_ = std::min(following_ + 1, kMostFollowing);
    else following_ = std::max(following_ - kFew, 0);
    return following_ >= kFew;
  }

  void run(int64_t workers, const std::function<void(int64_t)>& work) {
    work_ = &work;
    workers_.store(workers);
    gate_.open();
    round_.fetch_add(1);
    for (size_t k = 1; k < kMostThreads && static_cast<int64_t>(k) < workers; ++k) {
      if (k < started_) wake(asleep_[k].now);
      else if (!start(k)) break;  // those that are there, and the caller, do it all
    }
    work(0);
    gate_.close();
  }

  bool start(size_t k) {
    try {
      std::thread([this, k] { help(k); }).detach();
    } catch (const std::exception&) {
      return false;
    }
    started_ = k + 1;
    return true;
  }

  static void wake(std::atomic<int>& asleep) {
    if (asleep.load() != 0 && asleep.exchange(0) != 0) asleep.notify_one();
  }

  [[noreturn]] void help(size_t k) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "jtile_helper");
#endif
    const auto worker = static_cast<int64_t>(k);
    std::atomic<int>& asleep = asleep_[k].now;
    for (;;) {
      const int64_t round = round_.load();
      if (worker < workers_.load())
        gate_.enter([&] {
          if (worker < workers_.load()) (*work_)(worker);  // of this round, or of one that has come since
        });
      // Helpers that these calls do not need go to sleep, however many calls follow each other.
      auto called = [&] { return round_.load() != round && worker < workers_.load(); };
      if (await(called)) continue;
      asleep.store(1);
      if (!called()) asleep.wait(1);  // a call raises the round before it looks who sleeps
      asleep.store(0);
    }
  }

  struct alignas(64) Asleep {
    std::atomic<int> now{0};
  };

  std::mutex calls_;
  Clock::time_point ended_{};  // the last call
  int following_ = 0;
  size_t started_ = 1;  // the caller is the first
  const std::function<void(int64_t)>* work_ = nullptr;
  Gate gate_;
  alignas(64) std::atomic<int64_t> round_{0};
  std::atomic<int64_t> workers_{0};
  std::array<Asleep, kMostThreads> asleep_;
};

}  // namespace

void with_helpers(int64_t workers, const Schedule& schedule, const std::function<void(int64_t)>& work) {
  static Crew* const crew = new Crew;  // never deleted: its threads are there when the process ends
  crew->help_with(workers, schedule, work);
}

}  // namespace jtile
