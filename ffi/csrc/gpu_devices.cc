#include "gpu_devices.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "sites_log.h"

namespace jtile {
namespace {

// Bytes of a block, as emit_devices.py has them.
constexpr size_t kAlign = 256, kHost = 16, kTimeout = 16, kReport = 24, kPlace = 32;
enum Fault : int32_t { kNone, kWait, kBarrier, kDevice, kSignal, kValue, kPost };

int32_t word(const int32_t* report, size_t k) { return __atomic_load_n(report + k, __ATOMIC_ACQUIRE); }

}  // namespace

Peers::Peers(const Record& record, std::vector<int> ordinals, int64_t timeout_ms)
    : name_(record.name),
      facts_(*record.talking),
      shape_(facts_.facts, static_cast<int64_t>(facts_.bytes), timeout_ms),
      parts_(ordinals.size()) {
  const auto devices = static_cast<size_t>(shape_.devices());
  if (ordinals.empty() || ordinals.size() % devices != 0)
    fail(Code::kInvalidArgument, "its call names ", ordinals.size(), " devices, in groups of ", devices);
  std::vector<int> sorted = ordinals;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    fail(Code::kInvalidArgument, "its call names a device twice");
  if (facts_.table < kPlace + 4 * shape_.axes.size() || facts_.counters < facts_.table + 8 * devices)
    fail(Code::kInvalidArgument, "its block has no room for its table");
  for (size_t k = 0; k < ordinals.size(); ++k) parts_[k].ordinal = ordinals[k];
}

Peers::~Peers() {
  for (Part& part : parts_) {
    if (part.driver == nullptr) continue;
    if (part.block != nullptr) part.driver->release(part.ordinal, part.block);
    if (part.report != nullptr) part.driver->release_host(part.ordinal, part.report);
  }
}

Peers::Part& Peers::find(int ordinal) {
  for (Part& part : parts_)
    if (part.ordinal == ordinal) return part;
  fail(Code::kInvalidArgument, "device ", ordinal, " is none of the ", parts_.size(), " that its call names");
}

void* Peers::block(int ordinal) {
  Part& part = find(ordinal);
  if (!part.ready.load(std::memory_order_acquire))
    fail(Code::kFailedPrecondition, "device ", ordinal, " has not met the others that it talks to");
  return part.block;
}

void* Peers::of(int ordinal, int64_t rank, int64_t offset) {
  block(ordinal);  // all devices have met
  const auto devices = static_cast<size_t>(shape_.devices());
  const auto own = static_cast<size_t>(&find(ordinal) - parts_.data());
  const size_t first = own / devices * devices;
  if (rank == TensorMap::kOwn) rank = static_cast<int64_t>(own - first);
  if (static_cast<size_t>(rank) >= devices || static_cast<size_t>(offset) >= facts_.bytes)
    fail(Code::kInvalidArgument, "a tensor map is of byte ", offset, " of device ", rank, " of ", devices);
  return static_cast<char*>(parts_[first + static_cast<size_t>(rank)].block) + offset;
}

// -- the first call ---------------------------------------------------------------------------------------------------

void Peers::begin(Driver& driver, int ordinal, const Loaded& loaded, const LaunchConfig& config) {
  Part& part = find(ordinal);
  const bool ready = part.ready.load(std::memory_order_acquire);
  if (ready && owing_.load(std::memory_order_acquire) == 0 && !failed()) return;
  std::unique_lock lock(mutex_);
  pay(part);
  if (ready) {
    if (failed()) heal();
    return pay(part);
  }
  if (part.report == nullptr) {
    part.driver = &driver;
    int32_t* report = nullptr;
    lock.unlock();
    try {
      report = make(part, driver, loaded, config);
    } catch (const Error& error) {
      lock.lock();
      owe(&part, concat("kernel ", name_, ", ", device_text(part), ": ", error.what()));
      throw;
    }
    lock.lock();
    part.report = report;
    changed_.notify_all();
  }
  meet(lock, part);
}

// The block of a device, which others find as soon as it has a report; gives that.
int32_t* Peers::make(Part& part, Driver& driver, const Loaded& loaded, const LaunchConfig& config) {
  if (facts_.waits) {
    int64_t room = driver.resident(part.ordinal, loaded, config);
    if (config.grid > room)
      fail(Code::kResourceExhausted, "its ", config.grid, " programs wait for each other, and device ", part.ordinal,
           " has room for ", room, " at once: make the grid smaller, and let each program do several tiles");
  }
  const auto devices = static_cast<size_t>(shape_.devices());
  const size_t first = static_cast<size_t>(&part - parts_.data()) / devices * devices;
  for (size_t k = first; k < first + devices; ++k)
    if (&parts_[k] != &part) driver.reach(part.ordinal, parts_[k].ordinal);
  if (part.block == nullptr) part.block = driver.allocate_zeros(part.ordinal, facts_.bytes);
  if (reinterpret_cast<uintptr_t>(part.block) % kAlign != 0)
    fail(Code::kInternal, "memory of device ", part.ordinal, " begins at no multiple of ", kAlign);
  return static_cast<int32_t*>(driver.allocate_host(part.ordinal, kWords * sizeof(int32_t)));
}

// Waits until every device has come so far, then tells this one where the others are.
void Peers::meet(std::unique_lock<std::mutex>& lock, Part& part) {
  auto all = [&] {
    return std::all_of(parts_.begin(), parts_.end(), [](const Part& p) { return p.report != nullptr; });
  };
  bool came = changed_.wait_for(lock, shape_.timeout, [&] { return all() || !part.owed.empty(); });
  pay(part);
  if (!came) {
    std::string missing;
    for (const Part& p : parts_)
      if (p.report == nullptr) missing += concat(missing.empty() ? "" : ", ", device_text(p));
    fail(Code::kFailedPrecondition, device_text(part), " waited ", static_cast<double>(shape_.timeout.count()) / 1000,
         " s for ", missing, ", which has not begun the call");
  }
  write_head(part);
  part.ready.store(true, std::memory_order_release);
}

// What is the host's in front of a block. What is not may have been written already, by a peer that is faster.
void Peers::write_head(Part& part) {
  std::vector<char> head(facts_.counters);
  auto put = [&](size_t at, auto value) { std::memcpy(head.data() + at, &value, sizeof value); };
  put(kTimeout, static_cast<int64_t>(shape_.timeout.count()) * 1000000);
  put(kReport, reinterpret_cast<int64_t>(part.report));
  const auto devices = static_cast<size_t>(shape_.devices());
  const size_t number = static_cast<size_t>(&part - parts_.data());
  int64_t rest = static_cast<int64_t>(number % devices);
  for (size_t k = shape_.axes.size(); k-- > 0; rest /= shape_.axes[k].second)
    put(kPlace + 4 * k, static_cast<int32_t>(rest % shape_.axes[k].second));
  for (size_t k = 0; k < devices; ++k) {
    auto address = reinterpret_cast<intptr_t>(parts_[number / devices * devices + k].block);
    put(facts_.table + 8 * k, (address - reinterpret_cast<intptr_t>(part.block)) / static_cast<int64_t>(kAlign));
  }
  part.driver->write(part.ordinal, static_cast<char*>(part.block) + kHost, head.data() + kHost, head.size() - kHost);
}

// -- faults -----------------------------------------------------------------------------------------------------------

bool Peers::failed() const {
  for (const Part& part : parts_)
    if (part.ready.load(std::memory_order_acquire) && word(part.report, 0) != kNone) return true;
  return false;
}

std::string Peers::device_text(const Part& part) const {
  auto number = static_cast<int64_t>(&part - parts_.data());
  return concat(shape_.device_text(number % shape_.devices()), ", GPU ", part.ordinal);
}

// What the first device that reports something says, in the words of the CPU's devices.cc.
std::string Peers::reported() const {
  for (const Part& part : parts_) {
    if (!part.ready.load(std::memory_order_acquire) || word(part.report, 0) == kNone) continue;
    int32_t fault = word(part.report, 0), at = word(part.report, 1), program = word(part.report, 2);
    int32_t a = word(part.report, 3), b = word(part.report, 4), c = word(part.report, 5);
    const auto& sites = facts_.log.list;
    if (at < 0 || static_cast<size_t>(at) >= sites.size()) return concat(device_text(part), ": its report is damaged");
    const Site& site = sites[static_cast<size_t>(at)];
    const double seconds = static_cast<double>(shape_.timeout.count()) / 1000;
    auto axis = [&](int32_t k) -> const std::pair<std::string, int64_t>& {
      return shape_.axes[std::min(static_cast<size_t>(std::max(k, 0)), shape_.axes.size() - 1)];
    };
    std::string what;
    if (fault == kWait)
      what = concat("waited ", seconds, " s for ", shape_.signal_text(a), " to reach ", b, ": it stands at ", c);
    else if (fault == kBarrier)
      what = concat("waited ", seconds, " s for all devices along '", axis(a).first, "': ", c, " of ", b, " have come");
    else if (fault == kDevice)
      what = concat("there is no device ", b, " of ", axis(a).second, " along '", axis(a).first, "'");
    else if (fault == kPost)
      what = concat("waited ", seconds, " s for what other programs post");
    else if (fault == kSignal)
      what = "there is no such signal";
    else
      what = concat("it raises ", shape_.signal_text(a), " by ", b, ": it is at least 1");
    return concat(device_text(part), ", program ", program_of(facts_.log, nullptr, site, program), ": ", what, "\n  at ",
                  site.where);
  }
  return "";
}

void Peers::check(int ordinal) {
  if (!failed()) return;
  std::lock_guard lock(mutex_);
  std::string text = reported();
  if (text.empty()) return;  // healed meanwhile
  find(ordinal).told = true;
  fail(Code::kFailedPrecondition, text);
}

// Makes the site as new: programs of the call that failed end, and all devices that have not been told of it are.
void Peers::heal() {
  for (Part& part : parts_)
    if (part.ready.load()) part.driver->idle(part.ordinal);
  const std::string text = concat("in a call before this one, ", reported());
  const bool all_told = std::all_of(parts_.begin(), parts_.end(), [](const Part& p) { return p.told; });
  const std::vector<char> zeros(std::max(kHost, facts_.memory - facts_.counters));
  for (Part& part : parts_) {
    part.told = false;
    if (!part.ready.load()) continue;
    part.driver->write(part.ordinal, part.block, zeros.data(), kHost);
    if (facts_.memory > facts_.counters)
      part.driver->write(part.ordinal, static_cast<char*>(part.block) + facts_.counters, zeros.data(),
                         facts_.memory - facts_.counters);
    for (size_t k = 0; k < kWords; ++k) __atomic_store_n(part.report + k, 0, __ATOMIC_RELEASE);
  }
  if (!all_told) owe(nullptr, text);
}

void Peers::owe(const Part* but, const std::string& text) {
  for (Part& part : parts_) {
    if (&part == but) continue;
    if (part.owed.empty()) owing_.fetch_add(1);
    part.owed = text;
  }
  changed_.notify_all();
}

void Peers::pay(Part& part) {
  if (part.owed.empty()) return;
  std::string text = std::move(part.owed);
  part.owed.clear();
  owing_.fetch_sub(1);
  fail(Code::kFailedPrecondition, text);
}

}  // namespace jtile
