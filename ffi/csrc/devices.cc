#include "devices.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "error.h"
#include "json.h"

namespace jtile {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 36;
constexpr int64_t kMaxSignals = 1 << 24;
constexpr char kNoSignal[] = "there is no such signal";
constexpr size_t kKeptGroups = 64;  // of executions that some devices never joined

std::string index_text(int64_t number, const std::vector<int64_t>& shape) {
  if (shape.empty()) return "";
  std::string text;
  for (size_t k = shape.size(); k-- > 0; number /= shape[k])
    text = concat(number % shape[k], text.empty() ? "" : ", ", text);
  return "[" + text + "]";
}

int64_t size_of(const std::vector<int64_t>& shape) {
  int64_t size = 1;
  for (int64_t n : shape) {
    if (n < 0 || __builtin_mul_overflow(size, n, &size) || size > kMaxSignals)
      fail(Code::kInvalidArgument, "it has more than ", kMaxSignals, " signals");
  }
  return size;
}

}  // namespace

// -- what a call site has in common -----------------------------------------------------------------------------------

Shape::Shape(std::string_view json, int64_t bytes, int64_t timeout_ms) : Shape(parse_json(json), bytes, timeout_ms) {}

Shape::Shape(const Json& facts, int64_t bytes, int64_t timeout_ms) : memory(bytes), timeout(timeout_ms) {
  for (const Json& axis : facts.at("axes").list("axes")) {
    const JsonList& pair = axis.list("an axis");
    if (pair.size() != 2) fail(Code::kInvalidArgument, "an axis is a name and a size");
    axes.emplace_back(pair[0].text("the name of an axis"), pair[1].integer("the size of an axis"));
  }
  for (const Json& signal : facts.at("signals").list("signals")) {
    const JsonList& pair = signal.list("signals");
    if (pair.size() != 2) fail(Code::kInvalidArgument, "signals are a name and a shape");
    std::vector<int64_t> sides;
    for (const Json& n : pair[1].list("the shape of signals")) sides.push_back(n.integer("a side"));
    signals.emplace_back(pair[0].text("the name of signals"), sides);
  }
  int64_t total = 1;
  for (const auto& [name, size] : axes) {
    if (size < 1 || __builtin_mul_overflow(total, size, &total) || total > (1 << 20))
      fail(Code::kInvalidArgument, "axis ", name, " of its mesh has ", size, " devices");
  }
  if (axes.empty() || memory < 0 || memory > kMaxBytes / total || timeout_ms < 0 || count() > kMaxSignals / total)
    fail(Code::kInvalidArgument, "no call of devices has ", memory, " bytes each and ", timeout_ms, " ms to wait");
}

int64_t Shape::devices() const {
  int64_t total = 1;
  for (const auto& [name, size] : axes) total *= size;
  return total;
}

int64_t Shape::count() const {
  int64_t total = 0;
  for (const auto& [name, sides] : signals) total += size_of(sides);
  return total;
}

std::string Shape::device_text(int64_t device) const {
  std::string text;
  for (size_t k = axes.size(); k-- > 0; device /= axes[k].second)
    text = concat(axes[k].first, "=", device % axes[k].second, text.empty() ? "" : ", ", text);
  return "device (" + text + ")";
}

std::string Shape::signal_text(int64_t number) const {
  for (const auto& [name, sides] : signals) {
    int64_t size = size_of(sides);
    if (number < size) return (name.empty() ? "a signal" : name) + index_text(number, sides);
    number -= size;
  }
  return "a signal that is not there";
}

int64_t device_number(const Shape& shape, const std::vector<int32_t>& place) {
  int64_t number = 0;
  for (size_t k = 0; k < shape.axes.size(); ++k) {
    if (k >= place.size() || place[k] < 0 || place[k] >= shape.axes[k].second)
      fail(Code::kInvalidArgument, "its call says of no device where it is");
    number = number * shape.axes[k].second + place[k];
  }
  return number;
}

// -- one call ---------------------------------------------------------------------------------------------------------

Meeting::Meeting(const Shape& shape)
    : shape_(shape),
      counters_(static_cast<size_t>(shape.devices() * shape.count())),
      came_(static_cast<size_t>(shape.devices())) {
  size_t size = static_cast<size_t>(shape.memory), all = size * came_.size();
  if (all > 0) {
    memory_.reset(std::aligned_alloc(64, (all + 63) / 64 * 64));
    if (memory_ == nullptr) jtile::fail(Code::kResourceExhausted, all, " bytes of symmetric memory cannot be had");
    std::memset(memory_.get(), 0xFF, all);  // NaN: nobody may rely on what is there
  }
  for (size_t k = 0; k < came_.size(); ++k) bases_.push_back(static_cast<char*>(memory_.get()) + k * size);
}

void Meeting::come(int64_t device) {
  std::lock_guard lock(mutex_);
  came_[static_cast<size_t>(device)] = true;
}

void Meeting::leave(int64_t device) {
  std::lock_guard lock(mutex_);
  (void)device;
  if (++left_ < shape_.devices() || !why_.empty()) return;
  for (size_t k = 0; k < counters_.size(); ++k) {
    const Counter& counter = counters_[k];
    if (counter.value <= counter.waited) continue;
    int64_t count = shape_.count(), at = static_cast<int64_t>(k);
    jtile::fail(Code::kFailedPrecondition, shape_.signal_text(at % count), " of ", shape_.device_text(at / count),
                " stands at ", counter.value, " at the end of the call, and nobody waited for more than ",
                counter.waited, ": what is left is a signal too many");
  }
}

void Meeting::signal(int64_t device, int64_t number, int64_t value, bool set) {
  {
    std::lock_guard lock(mutex_);
    Counter& counter = counters_[static_cast<size_t>(device * shape_.count() + number)];
    counter.value = set ? std::max(counter.value, value) : counter.value + value;
  }
  changed_.notify_all();
}

std::string Meeting::missing() const {
  std::string text;
  for (size_t k = 0; k < came_.size(); ++k) {
    if (!came_[k]) text += concat(text.empty() ? "; " : ", ", shape_.device_text(static_cast<int64_t>(k)));
  }
  return text.empty() ? "" : text + " has not begun the call";
}

template <typename Ready, typename Text>
bool Meeting::stand(std::unique_lock<std::mutex>& lock, Ready ready, Text text, const Tell& tell) {
  auto over = [&] { return ready() || !why_.empty(); };
  if (changed_.wait_for(lock, shape_.timeout, over)) return ready();
  double seconds = static_cast<double>(shape_.timeout.count()) / 1000;
  why_ = tell(concat("waited ", seconds, " s for ", text(), missing()));
  changed_.notify_all();
  return false;
}

bool Meeting::wait(int64_t device, int64_t number, int64_t at_least, const Tell& tell) {
  std::unique_lock lock(mutex_);
  Counter& counter = counters_[static_cast<size_t>(device * shape_.count() + number)];
  counter.waited = std::max(counter.waited, at_least);
  auto text = [&] {
    return concat(shape_.signal_text(number), " to reach ", at_least, ": it stands at ", counter.value);
  };
  return stand(lock, [&] { return counter.value >= at_least; }, text, tell);
}

bool Meeting::barrier(int64_t device, int64_t axis, int64_t program, const Tell& tell) {
  std::unique_lock lock(mutex_);
  std::vector<int64_t> key{axis, program};
  int64_t rest = device, size = shape_.axes[static_cast<size_t>(axis)].second;
  for (size_t k = shape_.axes.size(); k-- > 0; rest /= shape_.axes[k].second)
    if (static_cast<int64_t>(k) != axis) key.push_back(rest % shape_.axes[k].second);
  Barrier& barrier = barriers_[key];
  int64_t round = barrier.round;
  if (++barrier.came == size) {
    barrier.came = 0;
    ++barrier.round;
    changed_.notify_all();
    return why_.empty();
  }
  auto text = [&] {
    return concat("all devices along '", shape_.axes[static_cast<size_t>(axis)].first, "': ", barrier.came, " of ",
                  size, " have come");
  };
  return stand(lock, [&] { return barrier.round != round; }, text, tell);
}

void Meeting::fail(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (why_.empty()) why_ = why;
  }
  changed_.notify_all();
}

std::string Meeting::why() const {
  std::lock_guard lock(mutex_);
  return why_;
}

std::shared_ptr<void> Meeting::share(const std::function<std::shared_ptr<void>()>& make) {
  std::lock_guard lock(mutex_);
  if (shared_ == nullptr) shared_ = make();
  return shared_;
}

std::string Meeting::absent() const {
  std::lock_guard lock(mutex_);
  return missing();
}

// -- a call site ------------------------------------------------------------------------------------------------------

std::shared_ptr<Meeting> CallSite::come(int64_t run, int64_t group, int64_t device) {
  std::lock_guard lock(mutex_);
  while (groups_.size() > kKeptGroups) groups_.erase(groups_.begin());
  auto at = groups_.try_emplace({run, group}).first;
  Group& found = at->second;
  found.calls.resize(static_cast<size_t>(shape_.devices()));
  int64_t call = found.calls[static_cast<size_t>(device)]++;
  std::shared_ptr<Meeting>& open = found.open[call];
  if (open == nullptr) open = std::make_shared<Meeting>(shape_);
  std::shared_ptr<Meeting> meeting = open;
  meeting->come(device);
  if (*std::min_element(found.calls.begin(), found.calls.end()) > call) found.open.erase(call);
  if (found.open.empty()) groups_.erase(at);  // all have come equally often: they may count from 0 again
  return meeting;
}

// -- one device's part ------------------------------------------------------------------------------------------------

DeviceCall::DeviceCall(std::shared_ptr<const Program> program, std::shared_ptr<CallSite> site,
                       std::shared_ptr<Meeting> meeting, std::vector<int32_t> place, Done done)
    : program_(std::move(program)),
      site_(std::move(site)),
      meeting_(std::move(meeting)),
      place_(std::move(place)),
      done_(std::move(done)),
      device_(device_number(site_->shape(), place_)) {}

void DeviceCall::equip(jtile_host& host) {
  host.memory = meeting_->memory();
  host.place = place_.data();
  host.signal = on_signal;
  host.wait = on_wait;
  host.barrier = on_barrier;
  host.outside = on_outside;
}

void DeviceCall::ended(const Error* error) {
  std::string text = error != nullptr ? error->what() : "";
  Code code = error != nullptr ? error->code() : Code::kFailedPrecondition;
  if (!text.empty()) meeting_->fail(text);
  std::string why = meeting_->why();  // what went wrong first, here or on another device
  try {
    meeting_->leave(device_);
  } catch (const Error& left) {
    why = concat("kernel ", program_->name(), ": ", left.what());
  }
  if (why.empty()) return done_(nullptr);
  Error failed(code, why);
  done_(&failed);
}

std::string DeviceCall::told(int64_t site, const int64_t* pid, const std::string& what) const {
  const Site& at = program_->sites()[static_cast<size_t>(site)];
  return concat("kernel ", program_->name(), ", ", site_->shape().device_text(device_), ", program ",
                program_text(at, pid), ": ", what, "\n  at ", at.where);
}

namespace {

DeviceCall& call_of(jtile_host* host) { return *static_cast<DeviceCall*>(reinterpret_cast<Host*>(host)->talk); }
[[noreturn]] void leave_kernel(jtile_host* host) { std::longjmp(reinterpret_cast<Host*>(host)->out, 1); }

}  // namespace

void DeviceCall::on_signal(jtile_host* host, int64_t site, const int64_t* pid, int64_t device, int64_t number,
                           int32_t value, int64_t how) {
  const bool good = number >= 0 && value >= 1;
  {
    DeviceCall& self = call_of(host);
    if (good)
      self.meeting_->signal(device, number, value, how == 1);
    else if (number < 0)
      self.meeting_->fail(self.told(site, pid, kNoSignal));
    else
      self.meeting_->fail(self.told(site, pid, concat("it raises ", self.site_->shape().signal_text(number), " by ",
                                                      value, ": it is at least 1")));
  }
  if (!good) leave_kernel(host);
}

void DeviceCall::on_wait(jtile_host* host, int64_t site, const int64_t* pid, int64_t number, int32_t at_least) {
  bool found = false;
  {
    DeviceCall& self = call_of(host);
    auto tell = [&](const std::string& what) { return self.told(site, pid, what); };
    if (number >= 0)
      found = self.meeting_->wait(self.device_, number, at_least, tell);
    else
      self.meeting_->fail(tell(kNoSignal));
  }
  if (!found) leave_kernel(host);
}

void DeviceCall::on_barrier(jtile_host* host, int64_t site, const int64_t* pid, int64_t axis) {
  bool found = false;
  {
    DeviceCall& self = call_of(host);
    int64_t program = reinterpret_cast<Host*>(host)->program;
    auto tell = [&](const std::string& what) { return self.told(site, pid, what); };
    found = self.meeting_->barrier(self.device_, axis, program, tell);
  }
  if (!found) leave_kernel(host);
}

void DeviceCall::on_outside(jtile_host* host, int64_t site, const int64_t* pid, int64_t axis, int64_t index) {
  {
    DeviceCall& self = call_of(host);
    const auto& [name, size] = self.site_->shape().axes[static_cast<size_t>(axis)];
    self.meeting_->fail(self.told(site, pid, concat("there is no device ", index, " of ", size, " along '", name, "'")));
  }
  leave_kernel(host);
}

}  // namespace jtile
