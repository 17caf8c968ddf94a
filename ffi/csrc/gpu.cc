#include "gpu.h"

#include <algorithm>
#include <cstring>

#include "gpu_devices.h"
#include "shared_table.h"
#include "sites_log.h"

namespace jtile {
namespace {

constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
constexpr uintptr_t kAlignment = 16;  // what kernels are promised

// An image that is loaded on a device, for all call sites that share it.
class Module {
 public:
  Module(Driver& driver, int device, const std::string& image, const Record& record, const LaunchConfig& config)
      : driver_(driver), device_(device), loaded_(driver.load(device, image, record.symbol, config)) {}
  ~Module() { driver_.unload(device_, loaded_); }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  const Loaded& loaded() const { return loaded_; }

 private:
  Driver& driver_;
  int device_;
  Loaded loaded_;
};

// The counters of a call site on a device: a set for each stream that launches it, so that launches that run at the same
// time have their own. Kernels leave them at zero, so that they are set to it only once: no call has to, and a graph that
// was recorded finds those of the stream that it was recorded on where they are.
class Counters {
 public:
  Counters(Driver& driver, int device, size_t count) : driver_(driver), device_(device), bytes_(count * sizeof(int32_t)) {
    for (int k = 0; k < kReady; ++k) add(unclaimed());
  }
  Counters(const Counters&) = delete;
  Counters& operator=(const Counters&) = delete;

  void* of(void* stream) {
    if (Set* set = find(stream)) return set->data;
    std::lock_guard lock(mutex_);
    Set* set = find(stream);
    if (set == nullptr && (set = find(unclaimed())) != nullptr) set->stream.store(stream, std::memory_order_relaxed);
    return (set != nullptr ? set : add(stream))->data;
  }

 private:
  static constexpr int kReady = 2;  // XLA launches on one stream and records on another; both find theirs made
  struct Set {
    Set(Counters& of, void* stream)
        : driver(of.driver_), device(of.device_), data(driver.allocate_zeros(device, of.bytes_)), stream(stream),
          next(of.first_) {}
    ~Set() { driver.release(device, data); }
    Driver& driver;
    int device;
    void* data;
    std::atomic<void*> stream;
    Set* next;
  };

  // What no stream's handle is.
  static void* unclaimed() {
    static char place;
    return &place;
  }

  Set* find(void* stream) {
    Set* set = first_.load(std::memory_order_acquire);
    while (set != nullptr && set->stream.load(std::memory_order_relaxed) != stream) set = set->next;
    return set;
  }

  Set* add(void* stream) {
    Set* set = sets_.emplace_back(std::make_unique<Set>(*this, stream)).get();
    first_.store(set, std::memory_order_release);  // for those who look without the lock
    return set;
  }

  Driver& driver_;
  int device_;
  size_t bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::atomic<Set*> first_{nullptr};
};

SharedTable<Module>& modules() {
  static auto* const table = new SharedTable<Module>;
  return *table;
}

// The bytes of images: a program of 200 equal calls keeps one copy.
SharedTable<std::string>& images() {
  static auto* const table = new SharedTable<std::string>;
  return *table;
}

// Refuses what a driver would read beyond its end: it is told no size.
void check_image(std::string_view image, bool cuda) {
  uint64_t offsets[2];   // of the segments and of the sections
  uint16_t counts[4];    // size and number of the segments, and of the sections
  uint16_t machine = 0;
  if (image.size() < 64 || image.substr(0, 5) != std::string_view("\x7f" "ELF\2", 5))
    fail(Code::kInvalidArgument, "its image is no ELF object");
  std::memcpy(&machine, image.data() + 18, sizeof machine);
  std::memcpy(offsets, image.data() + 32, sizeof offsets);
  std::memcpy(counts, image.data() + 54, sizeof counts);
  if (machine != (cuda ? 190 : 224))  // EM_CUDA, EM_AMDGPU
    fail(Code::kInvalidArgument, "its image is for machine ", machine, ", not for ", cuda ? "NVIDIA" : "AMD");
  for (int k = 0; k < 2; ++k) {
    uint64_t bytes = uint64_t{counts[2 * k]} * counts[2 * k + 1];
    if (offsets[k] > image.size() || bytes > image.size() - offsets[k])
      fail(Code::kInvalidArgument, "its image is cut off");
  }
}

}  // namespace

struct Launcher::OnDevice {
  struct Map {
    MapShape shape;
    MapData data;
  };
  Driver* driver;
  int device;
  std::shared_ptr<const Module> module;
  std::unique_ptr<Counters> counters;  // null where the kernel has none
  std::unique_ptr<Peers> alone;        // where the kernel's own blocks wait for each other, and for no other device
  // The maps of the last call: XLA keeps buffers in place from run to run. Whoever finds them in use makes its own.
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::vector<Map> maps = {};
};

// Runs `body`; its errors get the name of the kernel.
template <typename Body>
void Launcher::named(Body body) const {
  try {
    body();
  } catch (const Error& error) {
    fail(error.code(), "kernel ", record_.name, ": ", error.what());
  }
}

Launcher::Launcher(DriverSource source, const char* library, std::string_view image, std::string_view record)
    : source_(source), library_(library == nullptr ? "" : library), record_(parse_record(record)) {
  named([&] {
    bool cuda = record_.arch.rfind("sm_", 0) == 0;
    if (cuda != (source == cuda_driver))
      fail(Code::kInvalidArgument, "its code is for '", record_.arch, "', and the call is for platform ",
           cuda ? "ROCM" : "CUDA");
    if (record_.npu) fail(Code::kInvalidArgument, "its code is for '", record_.arch, "', an NPU, and the call is for a GPU");
    if (!cuda && (!record_.maps.empty() || record_.cluster != 1 || record_.programmatic))
      fail(Code::kInvalidArgument, "tensor maps, clusters and programmatic launches are NVIDIA's alone");
    check_image(image, cuda);
    image_ = images().acquire(image, [image] { return std::make_unique<const std::string>(image); });
  });
}

Launcher::~Launcher() {
  for (std::atomic<OnDevice*>& slot : devices_) delete slot.load();
}

LaunchConfig Launcher::config(uint32_t grid, void* stream) const {
  return {grid, record_.threads, record_.shared, record_.cluster, record_.programmatic, record_.cooperative, stream};
}

Launcher::OnDevice& Launcher::on_device(int device) {
  if (device < 0 || device >= kMaxDevices)
    fail(Code::kInvalidArgument, "device ", device, "; expected 0 to ", kMaxDevices - 1);
  std::atomic<OnDevice*>& slot = devices_[device];
  if (OnDevice* on = slot.load(std::memory_order_acquire)) return *on;
  std::lock_guard lock(mutex_);
  if (OnDevice* on = slot.load(std::memory_order_acquire)) return *on;
  OnDevice* on = load(device).release();
  slot.store(on, std::memory_order_release);
  return *on;
}

std::unique_ptr<Launcher::OnDevice> Launcher::load(int device) {
  Driver& driver = source_(library_.empty() ? nullptr : library_.c_str());
  const Device& here = driver.device(device);
  if (!driver.runs(record_.arch, here))
    fail(Code::kFailedPrecondition, "its code is for ", record_.arch, ", and device ", device, " is ", here.arch, " (",
         here.name, "): lower the program again on such a machine, or for the target '",
         source_ == cuda_driver ? "cuda:" : "rocm:", here.arch, "'");
  if (record_.shared > here.shared)
    fail(Code::kResourceExhausted, "a block needs ", record_.shared, " bytes of shared memory, and device ", device,
         " (", here.name, ") has ", here.shared, " for each: take smaller tiles or fewer stages");
  const Digest digest = sha256(*image_);
  const std::string content(digest.begin(), digest.end());
  const std::string key = concat(driver.platform(), " ", library_, " ", device, " ", record_.symbol, " ",
                                 record_.shared, " ", record_.cluster, " ", content);
  auto module = modules().acquire(key, [&] {
    return std::make_unique<const Module>(driver, device, *image_, record_, config(0, nullptr));
  });
  std::unique_ptr<Counters> counters;
  if (record_.counters != 0) counters = std::make_unique<Counters>(driver, device, record_.counters);
  std::unique_ptr<Peers> alone;
  if (timeout_alone_) alone = std::make_unique<Peers>(record_, std::vector<int>{device}, *timeout_alone_);
  return std::unique_ptr<OnDevice>(
      new OnDevice{&driver, device, std::move(module), std::move(counters), std::move(alone)});
}

void Launcher::talk(std::vector<int> ordinals, int64_t timeout_ms) {
  named([&] {
    if (ordinals.empty())
      timeout_alone_ = timeout_ms;
    else
      peers_ = std::make_unique<Peers>(record_, std::move(ordinals), timeout_ms);
  });
}

void Launcher::initialize(int device) {
  named([&] {
    OnDevice& on = on_device(device);
    if (!record_.talking) return;
    peers(on)->begin(*on.driver, device, on.module->loaded(),
                     config(static_cast<uint32_t>(record_.grid.value(nullptr)), nullptr));
  });
}

Peers* Launcher::peers(OnDevice& on) const {
  Peers* found = peers_ != nullptr ? peers_.get() : on.alone.get();
  if (record_.talking && found == nullptr)
    fail(Code::kInvalidArgument, "its call does not say which devices it talks to");
  return found;
}

void Launcher::check_arrays(const Array* arrays, size_t count) const {
  if (count < record_.arrays)
    fail(Code::kInvalidArgument, "its record speaks of ", record_.arrays, " arrays, and the call has ", count);
  for (const Param& param : record_.params) {
    if (param.kind != Param::Kind::kBuffer) continue;
    auto address = reinterpret_cast<uintptr_t>(arrays[param.index].data);
    if (address % kAlignment != 0 && arrays[param.index].bytes != 0)
      fail(Code::kInvalidArgument, "array ", param.index, " (operands, then results) begins at address ", address,
           ", which is no multiple of ", kAlignment, ": copy it first, or pass the whole array and an index");
  }
  if (record_.sites && arrays[record_.sites->buffer].bytes < static_cast<size_t>(record_.sites->bytes))
    fail(Code::kInvalidArgument, "its log has ", arrays[record_.sites->buffer].bytes, " bytes, not ",
         record_.sites->bytes);
}

void Launcher::encode_maps(OnDevice& on, const Array* arrays, const int64_t* symbols, MapData* out) {
  bool mine = !on.busy.test_and_set(std::memory_order_acquire);
  if (mine && on.maps.empty()) on.maps.resize(record_.maps.size());
  try {
    for (size_t k = 0; k < record_.maps.size(); ++k) {
      const TensorMap& map = record_.maps[k];
      void* data = map.device == TensorMap::kArray ? arrays[map.buffer].data : peers(on)->of(on.device, map.device, map.offset);
      MapShape shape{data, {}, {}};
      for (size_t d = 0; d < map.rank; ++d) {
        shape.dims[d] = static_cast<uint64_t>(map.dims[d].value(symbols));
        if (d + 1 < map.rank) shape.strides[d] = static_cast<uint64_t>(map.strides[d].value(symbols));
      }
      OnDevice::Map* kept = mine ? &on.maps[k] : nullptr;
      if (kept == nullptr || std::memcmp(&kept->shape, &shape, sizeof shape) != 0) {
        on.driver->encode(map, shape, &out[k]);
        if (kept != nullptr) *kept = {shape, out[k]};
      } else {
        out[k] = kept->data;
      }
    }
  } catch (...) {
    if (mine) on.busy.clear(std::memory_order_release);
    throw;
  }
  if (mine) on.busy.clear(std::memory_order_release);
}

template <typename Body>
void Launcher::with_params(OnDevice& on, void* stream, const Array* arrays, const int64_t* symbols, Body body) {
  union Word {
    void* pointer;
    int64_t wide;
    int32_t narrow;
  };
  Value values[kMaxParams];
  Word words[kMaxParams];
  MapData maps[kMaxMaps];
  if (!record_.maps.empty()) encode_maps(on, arrays, symbols, maps);
  for (size_t k = 0; k < record_.params.size(); ++k) {
    const Param& param = record_.params[k];
    values[k] = {&words[k], sizeof(void*)};
    switch (param.kind) {
      case Param::Kind::kBuffer:
        words[k].pointer = arrays[param.index].data;
        break;
      case Param::Kind::kTensorMap:
        values[k] = {&maps[param.index], sizeof(MapData)};
        break;
      case Param::Kind::kCounters:
        words[k].pointer = on.counters->of(stream);
        break;
      case Param::Kind::kDevices:
        words[k].pointer = peers(on)->block(on.device);
        break;
      case Param::Kind::kNull:
        words[k].pointer = nullptr;
        break;
      default:
        words[k].wide = param.value.value(symbols);
        if (param.kind == Param::Kind::kI64) break;
        if (words[k].wide != static_cast<int32_t>(words[k].wide))
          fail(Code::kInvalidArgument, "parameter ", k, " is ", words[k].wide, ", which does not fit into 32 bits");
        words[k].narrow = static_cast<int32_t>(words[k].wide);
        values[k].bytes = sizeof(int32_t);
    }
  }
  body(values);
}

template <typename Body>
void Launcher::prepared(int device, const Array* arrays, size_t count, const int64_t* sizes, Body body) {
  int64_t symbols[kMaxSymbols];
  if (!record_.dims.empty()) bind_symbols(record_.name, record_.dims, sizes, symbols);
  named([&] {
    check_arrays(arrays, count);
    int64_t blocks = record_.grid.value(symbols);
    if (blocks < 0 || blocks > kMaxBlocks / record_.cluster)
      fail(Code::kInvalidArgument, "its grid has ", blocks, " programs of ", record_.cluster,
           " blocks; a launch has at most ", kMaxBlocks, " blocks: take larger tiles");
    OnDevice& on = on_device(device);
    if (Peers* of = peers(on)) of->check(device);
    body(on, static_cast<uint32_t>(blocks) * record_.cluster, symbols);
  });
}

void Launcher::launch(int device, void* stream, const Array* arrays, size_t count, const int64_t* sizes) {
  prepared(device, arrays, count, sizes, [&](OnDevice& on, uint32_t blocks, const int64_t* symbols) {
    for (size_t k : record_.zeroed)
      if (arrays[k].bytes != 0) on.driver->zero(device, arrays[k].data, arrays[k].bytes, stream);
    if (blocks == 0) return;
    with_params(on, stream, arrays, symbols, [&](const Value* values) {
      void* params[kMaxParams];
      for (size_t k = 0; k < record_.params.size(); ++k) params[k] = const_cast<void*>(values[k].data);
      on.driver->launch(on.device, on.module->loaded(), config(blocks, stream), params);
    });
  });
}

bool Launcher::is_node() const {
  // A kernel that XLA traces is a graph of its own, in front of which everything ends, and runs 6 to 15 % faster so
  // (rows of an H200): nodes are kernels that start early, and those that let others do so. All that talk to other
  // devices start early, and are nodes only where the kernels around them are: as graphs between nodes they cost 4 us.
  const bool overlaps = record_.node || (record_.programmatic && !record_.talking);
  return overlaps && record_.cluster == 1 && !record_.cooperative && record_.zeroed.empty() && !record_.sites;
}

void Launcher::record(int device, void* stream, const Array* arrays, size_t count, const int64_t* sizes,
                      const std::function<void(const Node&)>& put) {
  prepared(device, arrays, count, sizes, [&](OnDevice& on, uint32_t blocks, const int64_t* symbols) {
    if (blocks == 0) return;
    with_params(on, stream, arrays, symbols, [&](const Value* values) {
      put({*image_, record_.symbol, blocks, record_.threads, record_.shared, record_.programmatic, values,
           record_.params.size()});
    });
  });
}

void Launcher::finish(int device, void* stream, const Array* arrays, const int64_t* sizes) {
  if (record_.talking) {
    named([&] {
      OnDevice& on = on_device(device);
      on.driver->wait(device, stream);
      peers(on)->check(device);
    });
  }
  if (!record_.sites) return;
  int64_t symbols[kMaxSymbols];
  bind_symbols(record_.name, record_.dims, sizes, symbols);
  const SitesLog& log = *record_.sites;
  std::vector<char> bytes(kLogHeader);
  named([&] {
    OnDevice& on = on_device(device);
    const char* data = static_cast<const char*>(arrays[log.buffer].data);
    on.driver->read(device, bytes.data(), data, kLogHeader, stream);
    bytes.resize(kLogHeader + log_records(bytes.data(), log.bytes));
    if (bytes.size() > kLogHeader)
      on.driver->read(device, bytes.data() + kLogHeader, data + kLogHeader, bytes.size() - kLogHeader, stream);
  });
  report_sites(record_.name, log, symbols, bytes);
}

int64_t modules_alive() { return modules().alive(); }
int64_t modules_loaded() { return modules().loaded(); }

}  // namespace jtile
