// The plan of an execution graph: how it is read, and what is checked before anything runs by it.
#include <algorithm>

#include "error.h"
#include "tasks.h"

namespace jtile {
namespace {

constexpr int64_t kVersion = 2;  // of the plan's form, as jtile/execution/encode.py writes it

}  // namespace

class TaskGraph::Reader {
 public:
  Reader(const int64_t* data, size_t length) : at_(data), end_(data + length) {}

  // The next number, which is at least 0 and less than `limit`.
  int64_t next(int64_t limit = INT64_MAX) {
    if (at_ == end_) fail(Code::kInvalidArgument, "the plan of an execution graph ends too early");
    if (*at_ < 0 || *at_ >= limit)
      fail(Code::kInvalidArgument, "the plan of an execution graph has ", *at_, " where a number below ", limit, " belongs");
    return *at_++;
  }

  // How many of something follow, each of which takes at least one number.
  int64_t count() { return next(end_ - at_); }

  std::vector<int32_t> numbers(int64_t limit) {
    std::vector<int32_t> out(static_cast<size_t>(count()));
    for (int32_t& n : out) n = static_cast<int32_t>(next(limit));
    return out;
  }

  bool done() const { return at_ == end_; }

 private:
  const int64_t* at_;
  const int64_t* end_;
};

void TaskGraph::read(const int64_t* plan, size_t length, int64_t results) {
  Reader reader(plan, length);
  if (reader.next() != kVersion)
    fail(Code::kFailedPrecondition, "this execution graph was made by another version of jtile: make it anew");
  read_tasks(reader, results);
  read_bands(reader);
  if (!reader.done()) fail(Code::kInvalidArgument, "the plan of an execution graph goes on behind its end");
  check_order();
}

void TaskGraph::read_tasks(Reader& plan, int64_t results) {
  tasks_.resize(static_cast<size_t>(plan.count()));
  for (Task& task : tasks_) {
    task.kernel = plan.next(static_cast<int64_t>(programs_.size()));
    task.places.resize(static_cast<size_t>(plan.count()));
    for (Place& place : task.places) {
      place.space = static_cast<Place::Space>(plan.next(3));
      place.index = plan.next(place.space == Place::kOperand  ? operands_
                              : place.space == Place::kResult ? results
                                                              : INT64_MAX);
      place.device = plan.next(devices_ + 1) - 1;
    }
  }
}

void TaskGraph::read_bands(Reader& plan) {
  needs_.resize(static_cast<size_t>(plan.count()));
  for (int64_t& need : needs_) need = plan.next();
  const auto events = static_cast<int64_t>(needs_.size());
  bands_.resize(static_cast<size_t>(plan.count()));
  for (Band& band : bands_) {
    band.task = plan.next(static_cast<int64_t>(tasks_.size()));
    const int64_t programs = programs_[static_cast<size_t>(tasks_[static_cast<size_t>(band.task)].kernel)]->programs();
    band.begin = plan.next(programs);
    band.end = plan.next(programs + 1);
    band.waits = plan.numbers(events);
    band.signals = plan.numbers(events);
    band.everywhere = plan.numbers(events);
    band.ahead.resize(static_cast<size_t>(plan.count()));
    for (Ahead& part : band.ahead) {
      part.place = {Place::kOperand, plan.next(operands_), -1};
      part.offset = plan.next();
      part.bytes = plan.next();
    }
  }
  ends_ = plan.numbers(events);
  queues_.resize(static_cast<size_t>(plan.count()));
  for (std::vector<int32_t>& queue : queues_) queue = plan.numbers(bands());
}

// A call ends for any number of workers if every band waits for events of earlier bands only, and if every band is in
// one queue, behind earlier ones.
void TaskGraph::check_order() const {
  std::vector<int64_t> last(needs_.size(), -1), arrivals(needs_.size(), 0);
  for (size_t b = 0; b < bands_.size(); ++b) {
    for (int32_t event : bands_[b].signals) {
      last[static_cast<size_t>(event)] = static_cast<int64_t>(b);
      ++arrivals[static_cast<size_t>(event)];
    }
    for (int32_t event : bands_[b].everywhere) {
      last[static_cast<size_t>(event)] = static_cast<int64_t>(b);
      arrivals[static_cast<size_t>(event)] += devices_;
    }
  }
  if (arrivals != needs_) fail(Code::kInvalidArgument, "an event of an execution graph needs other arrivals than it gets");
  for (size_t b = 0; b < bands_.size(); ++b)
    for (int32_t event : bands_[b].waits)
      if (last[static_cast<size_t>(event)] >= static_cast<int64_t>(b))
        fail(Code::kInvalidArgument, "band ", b, " of an execution graph waits for a later one");
  std::vector<bool> queued(bands_.size(), false);
  size_t count = 0;
  for (const std::vector<int32_t>& queue : queues_) {
    if (!std::is_sorted(queue.begin(), queue.end())) fail(Code::kInvalidArgument, "a queue of bands is out of order");
    for (int32_t b : queue) queued[static_cast<size_t>(b)] = true;
    count += queue.size();
  }
  if (count != bands_.size() || std::find(queued.begin(), queued.end(), false) != queued.end())
    fail(Code::kInvalidArgument, "a band of an execution graph is in no queue, or in two");
}

}  // namespace jtile
