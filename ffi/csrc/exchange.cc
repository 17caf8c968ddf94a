#include "exchange.h"

#include <algorithm>

#include "error.h"

namespace jtile {
namespace {

constexpr size_t kKeptGroups = 64;  // of executions that some devices never joined
constexpr auto kSpin = std::chrono::microseconds(100);  // devices mostly come at once: to sleep takes longer

// The stream for copies of each device, and events that are not in use. They stay: executables may outlive statics.
class Kept {
 public:
  void* stream(Driver& driver, int ordinal) {
    std::lock_guard lock(mutex_);
    void*& found = streams_[ordinal];
    if (found == nullptr) found = driver.make_stream(ordinal);
    return found;
  }
  void* event(Driver& driver, int ordinal) {
    std::lock_guard lock(mutex_);
    std::vector<void*>& free = events_[ordinal];
    if (free.empty()) return driver.make_event(ordinal);
    void* event = free.back();
    free.pop_back();
    return event;
  }
  void give_back(int ordinal, void* event) {
    if (event == nullptr) return;
    std::lock_guard lock(mutex_);
    events_[ordinal].push_back(event);
  }

 private:
  std::mutex mutex_;
  std::map<int, void*> streams_;
  std::map<int, std::vector<void*>> events_;
};

Kept& kept() {
  static auto* const found = new Kept;
  return *found;
}

// What has begun and is not finished, by device and the array that is written.
struct Pending {
  std::shared_ptr<Round> round;
  const Exchange* exchange;
  size_t device;  // of the round
  const void* from;
  int64_t run;
};
class Begun {
 public:
  void add(int ordinal, const void* into, Pending pending) {
    std::lock_guard lock(mutex_);
    found_[{ordinal, into}].push_back(std::move(pending));
  }
  std::vector<Pending> take(int ordinal, const void* into) {
    std::lock_guard lock(mutex_);
    auto node = found_.extract({ordinal, into});
    return node.empty() ? std::vector<Pending>() : std::move(node.mapped());
  }
  std::vector<Pending> look(int ordinal, const void* into) {
    std::lock_guard lock(mutex_);
    auto found = found_.find({ordinal, into});
    return found == found_.end() ? std::vector<Pending>() : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, std::vector<Pending>> found_;
};

Begun& begun() {
  static auto* const found = new Begun;
  return *found;
}

}  // namespace

// -- one call ---------------------------------------------------------------------------------------------------------

Round::~Round() {
  for (Part& part : parts_) {
    kept().give_back(part.ordinal, part.ready);
    for (void* event : part.copied) kept().give_back(part.ordinal, event);
  }
}

bool Round::meet(size_t device, const Part& part) {
  std::lock_guard lock(mutex_);
  parts_[device] = part;
  if (given_up_)
    fail(Code::kFailedPrecondition, "GPU ", part.ordinal, " came to an exchange that other devices have given up");
  return came_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts_.size();
}

void Round::put(const std::string& error) {
  {
    std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = error;
    put_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_all();
}

void Round::wait(std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  auto done = [&] { return put_.load(std::memory_order_acquire) == parts_.size(); };
  while (!done() && std::chrono::steady_clock::now() - start < kSpin) {
  }
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, timeout, done)) {
    given_up_ = !all_here();
    fail(Code::kFailedPrecondition, "an exchange between GPUs waited ", static_cast<double>(timeout.count()) / 1000,
         " s: ", came_.load(), " of ", parts_.size(), " devices have begun the call");
  }
  if (!error_.empty()) fail(Code::kFailedPrecondition, "an exchange between GPUs failed on ", error_);
}

// -- a call site ------------------------------------------------------------------------------------------------------

Exchange::Exchange(DriverSource source, std::vector<int64_t> ordinals, int64_t devices, int64_t timeout_ms,
                   const Pieces& pieces)
    : source_(source),
      ordinals_(std::move(ordinals)),
      devices_(static_cast<size_t>(devices)),
      timeout_(timeout_ms),
      pieces_(pieces) {
  if (devices < 1 || ordinals_.empty() || ordinals_.size() % devices_ != 0)
    fail(Code::kInvalidArgument, "an exchange names ", ordinals_.size(), " devices, in groups of ", devices);
  std::vector<int64_t> sorted = ordinals_;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0 || sorted.back() >= 64 || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    fail(Code::kInvalidArgument, "an exchange names a device twice, or one that there is not");
  const int64_t numbers[] = {pieces.bytes,   pieces.lanes - 1, pieces.from,      pieces.from_lane, pieces.from_to,
                             pieces.from_me, pieces.into,      pieces.into_lane, pieces.into_me,   timeout_ms};
  if (std::any_of(std::begin(numbers), std::end(numbers), [](int64_t n) { return n < 0 || n >= int64_t{1} << 44; }))
    fail(Code::kInvalidArgument, "the pieces of an exchange lie in no array");
  if (pieces.receivers < 0 || pieces.receivers >= devices)
    fail(Code::kInvalidArgument, "an exchange of ", devices, " devices sends to ", pieces.receivers, " of each");
}

size_t Exchange::find(int ordinal) const {
  auto found = std::find(ordinals_.begin(), ordinals_.end(), ordinal);
  if (found == ordinals_.end())
    fail(Code::kInvalidArgument, "GPU ", ordinal, " is none of the ", ordinals_.size(), " that an exchange names");
  return static_cast<size_t>(found - ordinals_.begin());
}

void Exchange::initialize(int ordinal) {
  const size_t place = find(ordinal), first = place / devices_ * devices_;
  if (reached_.load(std::memory_order_acquire) >> ordinal & 1) return;
  Driver& driver = source_(nullptr);
  for (size_t k = first; k < first + devices_; ++k)
    if (k != place) driver.reach(ordinal, static_cast<int>(ordinals_[k]));
  kept().stream(driver, ordinal);
  reached_.fetch_or(uint64_t{1} << ordinal, std::memory_order_release);
}

// The meeting of a device's call: the devices of one execution come to a site equally often.
std::shared_ptr<Round> Exchange::come(int64_t run, size_t place) {
  const size_t group = place / devices_, device = place % devices_;
  std::lock_guard lock(mutex_);
  if (groups_.size() > kKeptGroups * (ordinals_.size() / devices_)) groups_.erase(groups_.begin());
  Group& found = groups_[{run, group}];
  found.calls.resize(devices_);
  const int64_t call = found.calls[device]++;
  std::shared_ptr<Round>& round = found.open[call];
  if (round == nullptr) round = std::make_shared<Round>(devices_);
  std::shared_ptr<Round> out = round;
  if (std::all_of(found.calls.begin(), found.calls.end(), [&](int64_t n) { return n > call; })) found.open.erase(call);
  if (found.open.empty()) groups_.erase({run, group});  // all have come equally often: they may count from 0 again
  return out;
}

void Exchange::check(const Array& from, const Array& into) const {
  const Pieces& p = pieces_;
  const auto last = static_cast<int64_t>(devices_) - 1;
  const int64_t sent = p.from + (p.lanes - 1) * p.from_lane + last * (p.from_to + p.from_me) + p.bytes;
  const int64_t received = p.into + (p.lanes - 1) * p.into_lane + last * p.into_me + p.bytes;
  if (sent > static_cast<int64_t>(from.bytes) || received > static_cast<int64_t>(into.bytes))
    fail(Code::kInvalidArgument, "the pieces of an exchange end at bytes ", sent, " and ", received, " of ", from.bytes,
         " and ", into.bytes);
}

// Copies the pieces of one device for another.
void Exchange::copy(void* stream, size_t me, size_t to, const Round& round) const {
  const Pieces& p = pieces_;
  const Round::Part& part = round.parts()[me];
  const auto sender = static_cast<int64_t>(me), receiver = static_cast<int64_t>(to);
  const char* piece = part.from + p.from + receiver * p.from_to + sender * p.from_me;
  char* target = round.parts()[to].into + p.into + sender * p.into_me;
  const bool whole = p.from_lane == p.bytes && p.into_lane == p.bytes;
  const int64_t count = whole ? 1 : p.lanes, bytes = whole ? p.lanes * p.bytes : p.bytes;
  for (int64_t k = 0; k < count && bytes > 0; ++k)
    part.driver->copy(part.ordinal, target + k * p.into_lane, piece + k * p.from_lane, static_cast<size_t>(bytes),
                      stream);
}

void Exchange::send(Round& round, size_t me) const {
  if (!round.claim(me)) return;
  const Round::Part& part = round.parts()[me];
  std::string error;
  try {
    for (const Round::Part& other : round.parts()) part.driver->await(part.ordinal, part.side, other.ready);
    for (size_t k = 1; k <= part.copied.size(); ++k) {  // the next first: not all send to one
      copy(part.side, me, (me + k) % devices_, round);
      part.driver->record(part.ordinal, part.copied[k - 1], part.side);
    }
  } catch (const Error& found) {
    error = concat("GPU ", part.ordinal, ": ", found.what());
  }
  round.put(error);
}

void Exchange::begin(int ordinal, int64_t run, void* stream, const Array& from, const Array& into) {
  check(from, into);
  Driver& driver = source_(nullptr);
  const size_t place = find(ordinal), me = place % devices_;
  std::shared_ptr<Round> round = come(run, place);
  std::vector<void*> copied(static_cast<size_t>(pieces_.receivers));
  for (void*& event : copied) event = kept().event(driver, ordinal);
  const Round::Part part{ordinal,
                         &driver,
                         static_cast<const char*>(from.data),
                         static_cast<char*>(into.data),
                         kept().stream(driver, ordinal),
                         kept().event(driver, ordinal),
                         std::move(copied)};
  driver.record(ordinal, part.ready, stream);
  const bool last = round->meet(me, part);
  begun().add(ordinal, into.data, {round, this, me, from.data, run});
  if (last)
    for (size_t k = 0; k < devices_; ++k) send(*round, (me + k) % devices_);
  if (pieces_.own) copy(stream, me, me, *round);  // of all parts it reads its own, which no other thread writes
}

void finish_exchanges(int ordinal, int64_t run, void* stream, const Array* arrays, size_t count, int64_t step,
                      int64_t timeout_ms) {
  const auto is_here = [&](const Pending& p) {
    return std::any_of(arrays, arrays + count, [&](const Array& a) { return a.data == p.from; });
  };
  bool right = true, any = false;
  for (const Pending& pending : step > 0 ? begun().look(ordinal, arrays[0].data) : begun().take(ordinal, arrays[0].data)) {
    if (pending.run != run) continue;  // of an execution that failed in between
    any = true, right = right && is_here(pending);
    if (pending.round->all_here()) pending.exchange->send(*pending.round, pending.device);
    pending.round->wait(std::chrono::milliseconds(timeout_ms));
    const std::vector<Round::Part>& parts = pending.round->parts();
    const Round::Part& own = parts[pending.device];
    for (size_t k = 1; k <= own.copied.size(); ++k) {
      const Round::Part& sender = parts[(pending.device + parts.size() - k) % parts.size()];
      if (step == 0 || static_cast<size_t>(step) == k) own.driver->await(ordinal, stream, sender.copied[k - 1]);
    }
    if (step == 0 && !own.copied.empty()) own.driver->await(ordinal, stream, own.copied.back());  // behind the others
  }
  if (!any || !right)
    fail(Code::kInternal,
         "XLA has moved an array while it was being sent to other GPUs, or received from them: this is a mistake of "
         "jtile; please report it, and use the collectives of jax.lax meanwhile");
}

}  // namespace jtile
