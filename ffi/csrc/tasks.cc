#include "tasks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "error.h"

namespace jtile {
namespace {

constexpr int64_t kSerialWorkNs = 10'000;   // less work than this is not worth a wake-up
constexpr int kSpins = 2'000;               // looks at an event before a worker lets others have its core
constexpr int64_t kAwakeNs = 2'000'000;     // and how long it looks again before it sleeps: to wake it takes 50 us
constexpr int64_t kStep = 1'024;            // bytes that are fetched ahead between two looks
constexpr int64_t kLine = 64;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The workers of a call write their events in lines of their own.
struct alignas(64) Event {
  std::atomic<uint32_t> arrived{0};
};

struct alignas(64) Head {
  std::atomic<size_t> next{0};
};

}  // namespace

TaskGraph::TaskGraph(const std::vector<Attributes>& kernels, const int64_t* plan, size_t length, int64_t operands,
                     int64_t results, int64_t devices)
    : operands_(operands), devices_(devices) {
  for (const Attributes& kernel : kernels) {
    programs_.push_back(std::make_unique<const Program>(kernel));
    if (!programs_.back()->dimensions().empty())
      fail(Code::kInvalidArgument, "kernel ", programs_.back()->name(), ": one of dynamic sizes is in no execution graph");
    launches_.push_back(programs_.back()->launch(nullptr));
    workspace_ = std::max(workspace_, programs_.back()->workspace());
  }
  read(plan, length, results);
}

TaskGraph::~TaskGraph() = default;

// -- one call ---------------------------------------------------------------------------------------------------------

// What the devices of a call of several share: the call of each. It lives as long as one of them works.
struct TaskGraph::Team {
  std::vector<std::unique_ptr<Call>> calls;
  std::atomic<int64_t> begun{0};    // devices whose arrays are known: operands of others are there before any event
  std::atomic<int64_t> reading{0};  // bands that read memory of other devices just now
};

// The memory of a call. It serves later calls as it is: events count on from call to call. Those of several devices are
// of one call only, so that no device can come to an event of the next call too early.
class TaskGraph::Call {
 public:
  explicit Call(const TaskGraph& graph)
      : graph_(graph),
        events_(graph.needs_.size()),
        heads_(graph.queues_.size()),
        bufs_(graph.tasks_.size()),
        met_(graph.tasks_.size()) {
    for (size_t t = 0; t < graph.tasks_.size(); ++t) {
      const auto kernel = static_cast<size_t>(graph.tasks_[t].kernel);
      bufs_[t].resize(graph.tasks_[t].places.size());
      runs_.push_back(std::make_unique<Run>(*graph.programs_[kernel], graph.launches_[kernel], bufs_[t].data(), 1));
    }
  }

  void begin(void* const* arrays, void* arena, int64_t* trace) {
    for (size_t t = 0; t < bufs_.size(); ++t) {
      for (size_t k = 0; k < bufs_[t].size(); ++k) {
        const Place& place = graph_.tasks_[t].places[k];
        if (place.device < 0) bufs_[t][k] = address(place, arrays, arena);
      }
    }
    arena_ = arena;
    for (Head& head : heads_) head.next.store(0);
    arrays_ = arrays, trace_ = trace;
    ++epoch_;
    next_worker_.store(0);
    done_.store(0);
    start_ = std::chrono::steady_clock::now();
  }

  void work() {
    try {
      Workspace workspace(graph_.workspace_);
      const auto worker = next_worker_.fetch_add(1);
      const size_t queues = heads_.size();
      for (size_t k = 0; k < queues; ++k) drain((static_cast<size_t>(worker) + k) % queues, worker, workspace);
    } catch (const std::exception&) {  // no workspace: nothing was taken, and other workers may do it all
    }
  }

  // Makes this the call of one device of several.
  void join(Team* team, Meeting* meeting, std::string who) {
    team_ = team, meeting_ = meeting, who_ = std::move(who);
  }

  // Waits until no other device reads the memory of this one; false: the call has failed.
  bool end() {
    for (int32_t event : graph_.ends_)
      for (int64_t since = now(); !happened(event);)
        if (!patient(since, "the end of the graphs that read its memory")) return false;
    return meeting_->why().empty();
  }

  // Waits, where the call has failed, until no band reads memory of other devices: none begins to any more.
  void settle() const {
    while (team_->reading.load() > 0) std::this_thread::yield();
  }

  // Throws what went wrong, if anything did: then no later call may use this memory.
  void check() const {
    if (done_.load() != graph_.bands())
      fail(Code::kResourceExhausted, "an execution graph: a workspace of ", graph_.workspace_, " bytes cannot be had");
    for (const auto& run : runs_) run->check();
  }

 private:
  void* address(const Place& place, void* const* arrays, void* arena) const {
    return place.space == Place::kArena ? static_cast<char*>(arena) + place.index
                                        : arrays[place.index + (place.space ? graph_.operands_ : 0)];
  }

  // Where arrays of other devices are: all of these have begun when a band that reads them is ready.
  void meet(size_t task) {
    const std::vector<Place>& places = graph_.tasks_[task].places;
    for (size_t k = 0; k < places.size(); ++k) {
      if (places[k].device < 0) continue;
      const Call& other = *team_->calls[static_cast<size_t>(places[k].device)];
      bufs_[task][k] = other.address(places[k], other.arrays_, other.arena_);
    }
  }

  // A look at whether the call of all devices goes on, from somebody who waits since some time; then a pause.
  bool patient(int64_t since, const std::string& what) {
    if (!meeting_->why().empty()) return false;
    const auto most = std::chrono::nanoseconds(meeting_->patience()).count();
    if (now() - since > most) {
      meeting_->fail(concat(who_, ": waited ", static_cast<double>(most) / 1e9, " s for ", what, meeting_->absent()));
      return false;
    }
    if (now() - since > kAwakeNs)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    else
      std::this_thread::yield();
    return true;
  }

  bool happened(int32_t event) const {
    const auto want = epoch_ * static_cast<uint32_t>(graph_.needs_[static_cast<size_t>(event)]);
    return static_cast<int32_t>(events_[static_cast<size_t>(event)].arrived.load(std::memory_order_acquire) - want) >= 0;
  }

  bool ready(const Band& band) const {
    if (team_ != nullptr && team_->begun.load(std::memory_order_acquire) < graph_.devices_ && abroad(band)) return false;
    return std::all_of(band.waits.begin(), band.waits.end(), [this](int32_t event) { return happened(event); });
  }

  // The next band of a queue that nobody took; null: there is none.
  const Band* next(size_t queue, size_t& k) const {
    k = heads_[queue].next.load(std::memory_order_relaxed);
    const std::vector<int32_t>& own = graph_.queues_[queue];
    return k < own.size() ? &graph_.bands_[static_cast<size_t>(own[k])] : nullptr;
  }

  // Runs the next band of a queue if it can start; false: it cannot, or somebody else took it.
  bool take(size_t queue, size_t k, const Band& band, int64_t worker, const Workspace& workspace) {
    if (!ready(band) || !heads_[queue].next.compare_exchange_strong(k, k + 1)) return false;
    execute(graph_.queues_[queue][k], band, worker, workspace);
    return true;
  }

  // Runs the bands of a queue one after another until none is left. A band is taken when it can start, so that a worker
  // which loses its core while it waits holds nobody up; and the first band of all that are not over can always start.
  void drain(size_t queue, int64_t worker, const Workspace& workspace) {
    size_t k = 0;
    while (const Band* band = next(queue, k)) {
      if (take(queue, k, *band, worker, workspace)) continue;
      if (!wait(queue, k, *band, worker, workspace)) return;
    }
  }

  // Until a band may start, or somebody takes it: what this worker reads next is fetched, and bands of other queues that
  // come before it are run, since their worker may not have come. False: the call of all devices has failed.
  bool wait(size_t queue, size_t k, const Band& band, int64_t worker, const Workspace& workspace) {
    const std::vector<int32_t>& own = graph_.queues_[queue];
    const size_t likely = std::min(k + (heads_.size() > 1 ? 0 : static_cast<size_t>(worker)), own.size() - 1);
    const std::vector<Ahead>& ahead = graph_.bands_[static_cast<size_t>(own[likely])].ahead;
    size_t part = 0;
    int64_t offset = 0, tired = 0;
    for (int spins = 0; !ready(band) && heads_[queue].next.load(std::memory_order_relaxed) == k; ++spins) {
      if (part < ahead.size()) {
        fetch(ahead[part], offset);
        if ((offset += kStep) >= ahead[part].bytes) ++part, offset = 0;
      } else {
        pause();
      }
      if (heads_.size() > 1 && spins % 16 == 15) take_earlier(own[k], queue, worker, workspace);
      if (spins < kSpins) continue;
      if (tired == 0) tired = now() + kAwakeNs;
      if (meeting_ != nullptr) {
        if (!patient(tired - kAwakeNs, "a band of " + name(band))) return false;
      } else if (heads_.size() > 1 || now() < tired) {
        std::this_thread::yield();
      } else {
        sleep(band);
      }
    }
    return true;
  }

  // Whether a band reads memory of other devices.
  bool abroad(const Band& band) const {
    const std::vector<Place>& places = graph_.tasks_[static_cast<size_t>(band.task)].places;
    return std::any_of(places.begin(), places.end(), [](const Place& place) { return place.device >= 0; });
  }

  const std::string& name(const Band& band) const {
    return graph_.programs_[static_cast<size_t>(graph_.tasks_[static_cast<size_t>(band.task)].kernel)]->name();
  }

  // Sleeps until one more event may have happened. With one queue, all earlier bands are somebody's who runs them.
  void sleep(const Band& band) {
    for (int32_t event : band.waits) {
      std::atomic<uint32_t>& arrived = events_[static_cast<size_t>(event)].arrived;
      sleepers_.fetch_add(1);  // sequentially consistent, as in `signal`: either it sees this, or this sees the arrival
      const uint32_t seen = arrived.load();
      if (!happened(event)) arrived.wait(seen);
      sleepers_.fetch_sub(1);
    }
  }

  void signal(int32_t event) {
    std::atomic<uint32_t>& arrived = events_[static_cast<size_t>(event)].arrived;
    arrived.fetch_add(1);
    if (sleepers_.load() > 0) arrived.notify_all();
  }

  void fetch(const Ahead& part, int64_t offset) const {
    const char* from = static_cast<const char*>(arrays_[part.place.index]) + part.offset;
    const int64_t end = std::min(offset + kStep, part.bytes);
    for (int64_t k = offset; k < end; k += kLine) __builtin_prefetch(from + k, 0, 2);
  }

  void take_earlier(int32_t number, size_t but, int64_t worker, const Workspace& workspace) {
    for (size_t q = 0; q < heads_.size(); ++q) {
      size_t k = 0;
      const Band* band = q == but ? nullptr : next(q, k);
      if (band != nullptr && graph_.queues_[q][k] < number) take(q, k, *band, worker, workspace);
    }
  }

  int64_t now() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
  }

  void execute(int32_t number, const Band& band, int64_t worker, const Workspace& workspace) {
    const int64_t begin = trace_ != nullptr ? now() : 0;
    Run& run = *runs_[static_cast<size_t>(band.task)];
    const bool reads = team_ != nullptr && abroad(band);
    if (reads) {
      team_->reading.fetch_add(1);
      if (!meeting_->why().empty()) {
        team_->reading.fetch_sub(1);
        return;
      }
      std::call_once(met_[static_cast<size_t>(band.task)], [&] { meet(static_cast<size_t>(band.task)); });
    }
    try {
      run.run_first(band.begin, band.end, workspace);
    } catch (const std::exception& error) {
      run.give_up(error.what());
    }
    if (reads) team_->reading.fetch_sub(1);
    if (trace_ != nullptr) {
      int64_t* row = trace_ + kTraced * number;
      row[0] = begin, row[1] = now(), row[2] = worker;
    }
    for (int32_t event : band.signals) signal(event);
    for (int32_t event : band.everywhere)
      for (const auto& call : team_->calls) call->signal(event);
    done_.fetch_add(1, std::memory_order_relaxed);
  }

  const TaskGraph& graph_;
  std::vector<Event> events_;
  std::vector<Head> heads_;
  std::vector<std::vector<void*>> bufs_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<std::once_flag> met_;
  void* const* arrays_ = nullptr;
  void* arena_ = nullptr;
  int64_t* trace_ = nullptr;
  Team* team_ = nullptr;  // of a call of several devices, with its meeting, and the name of this one
  Meeting* meeting_ = nullptr;
  std::string who_;
  uint32_t epoch_ = 0;
  std::chrono::steady_clock::time_point start_;
  std::atomic<int64_t> next_worker_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> sleepers_{0};
};

std::unique_ptr<TaskGraph::Call> TaskGraph::take_call() const {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      std::unique_ptr<Call> call = std::move(free_.back());
      free_.pop_back();
      return call;
    }
  }
  return std::make_unique<Call>(*this);
}

int64_t TaskGraph::workers(int64_t threads) const {
  double work = 0;
  for (const Band& band : bands_) {
    const auto& program = *programs_[static_cast<size_t>(tasks_[static_cast<size_t>(band.task)].kernel)];
    work += static_cast<double>(band.end - band.begin) * static_cast<double>(program.cost());
  }
  return work < kSerialWorkNs ? 1 : std::max<int64_t>(1, std::min(threads, bands()));
}

void TaskGraph::run(void* const* arrays, void* arena, int64_t workers, const Schedule& schedule,
                    int64_t* trace) const {
  std::unique_ptr<Call> call = take_call();
  call->begin(arrays, arena, trace);
  with_helpers(workers, schedule, [&call](int64_t) { call->work(); });
  call->check();
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(call));
}

namespace {

// The threads of one device's part: the last of them ends it.
struct Threads {
  std::atomic<int64_t> left;
};

}  // namespace

void TaskGraph::run_part(const std::shared_ptr<const TaskGraph>& graph, Part given, const std::string& who) {
  auto part = std::make_shared<Part>(std::move(given));
  auto team = std::static_pointer_cast<Team>(part->meeting->share([&] {
    auto made = std::make_shared<Team>();
    for (int64_t k = 0; k < graph->devices_; ++k) made->calls.push_back(std::make_unique<Call>(*graph));
    return std::shared_ptr<void>(made);
  }));
  Call* call = team->calls[static_cast<size_t>(part->device)].get();
  call->join(team.get(), part->meeting.get(), who);
  call->begin(part->arrays.data(), part->arena, part->trace);
  team->begun.fetch_add(1, std::memory_order_release);
  const int64_t most = std::max<int64_t>(1, std::thread::hardware_concurrency() / graph->devices_);
  auto threads = std::make_shared<Threads>();
  threads->left = std::max<int64_t>(1, std::min(most, graph->bands()));
  auto work = [graph, part, team, call, threads] {
    call->work();
    if (threads->left.fetch_sub(1) != 1) return;
    std::string why;
    try {
      if (call->end()) call->check();
    } catch (const std::exception& error) {
      part->meeting->fail(error.what());
    }
    why = part->meeting->why();
    if (why.empty()) return part->done(nullptr);
    call->settle();
    Error failed(Code::kFailedPrecondition, why);
    part->done(&failed);
  };
  for (int64_t k = 0, n = threads->left.load(); k < n; ++k) {
    try {
      std::thread(work).detach();
    } catch (const std::system_error& error) {
      part->meeting->fail(concat(who, ": it has no thread: ", error.what()));
      if (threads->left.fetch_sub(n - k) == n - k) {
        Error failed(Code::kResourceExhausted, part->meeting->why());
        part->done(&failed);
      }
      return;
    }
  }
}

}  // namespace jtile
