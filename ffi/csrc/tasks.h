// The execution graph of several kernels: their programs in bands, each of which starts when those that it waits for
// are over. One call runs all of them on one set of workers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "devices.h"
#include "error.h"
#include "program.h"
#include "helpers.h"
#include "run.h"

namespace jtile {

// The array that a Ref of a kernel is.
struct Place {
  enum Space : int64_t { kOperand, kResult, kArena };
  Space space;
  int64_t index;        // of the operand or result; in the arena the byte where the array begins
  int64_t device = -1;  // of which device of the call; -1: of the one that runs the task
};

// A kernel of the graph, with the arrays of its Refs.
struct Task {
  int64_t kernel;
  std::vector<Place> places;
};

// A part of an operand that nothing of the graph writes: fetched into caches by a worker that waits.
struct Ahead {
  Place place;
  int64_t offset, bytes;
};

// The programs [begin, end) of a task. They start when each event of `waits` has happened; each event of `signals` has
// one arrival more when they end.
struct Band {
  int64_t task, begin, end;
  std::vector<int32_t> waits, signals;
  std::vector<int32_t> everywhere;  // events of all devices of the call that have one arrival more then
  std::vector<Ahead> ahead;
};

// What a call writes about itself, for each band: nanoseconds from its start to the begin and to the end of the band,
// and the number of the worker.
constexpr int64_t kTraced = 3;

class TaskGraph {
 public:
  // Reads the plan: see jtile/execution/encode.py. A call has so many operands and results, the arena not counted, and
  // is of so many devices, whose graphs are equal. Throws Error where the plan is not one that ends.
  TaskGraph(const std::vector<Attributes>& kernels, const int64_t* plan, size_t length, int64_t operands,
            int64_t results, int64_t devices = 1);
  ~TaskGraph();
  TaskGraph(const TaskGraph&) = delete;
  TaskGraph& operator=(const TaskGraph&) = delete;

  int64_t bands() const { return static_cast<int64_t>(bands_.size()); }

  // How many workers are worth waking, the caller included, when `threads` are there.
  int64_t workers(int64_t threads) const;

  // Runs all bands over the arrays of a call, operands before results, as Program::run_parallel does a grid; `trace` is
  // null, or has room for kTraced numbers a band. Throws Error.
  void run(void* const* arrays, void* arena, int64_t workers, const Schedule& schedule, int64_t* trace) const;

  // One device's part in a call of several devices: they read each other's memory and count in each other's events. Its
  // workers are threads of their own, since XLA's are few and none of them may wait for another device; `done` is called
  // when no device needs the memory of this one any more. `graph` is this one.
  struct Part {
    std::shared_ptr<Meeting> meeting;
    int64_t device;
    std::vector<void*> arrays;
    void* arena;
    int64_t* trace;
    std::function<void(const Error*)> done;
  };
  static void run_part(const std::shared_ptr<const TaskGraph>& graph, Part part, const std::string& who);

 private:
  class Reader;
  class Call;
  struct Team;

  void read(const int64_t* plan, size_t length, int64_t results);
  void read_tasks(Reader& plan, int64_t results);
  void read_bands(Reader& plan);
  void check_order() const;
  std::unique_ptr<Call> take_call() const;

  std::vector<std::unique_ptr<const Program>> programs_;
  std::vector<Launch> launches_;
  std::vector<Task> tasks_;
  std::vector<Band> bands_;  // each waits for earlier ones only
  std::vector<int64_t> needs_;  // arrivals of each event
  std::vector<int32_t> ends_;  // events after which no other device reads the memory of this one
  std::vector<std::vector<int32_t>> queues_;  // bands, ascending: a worker takes those of one queue before others
  size_t workspace_ = 0;
  int64_t operands_, devices_;

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Call>> free_;  // of earlier calls that are over
};

}  // namespace jtile
