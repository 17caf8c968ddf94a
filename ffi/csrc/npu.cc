#include "npu.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "acl.h"
#include "shared_table.h"

namespace jtile {
namespace {

constexpr uint32_t kVector = 0x41415246, kCube = 0x41494343, kBoth = 0x43554245;  // magic numbers of binaries
constexpr int64_t kMaxBlocks = 65535;  // of a launch

// A file that the loader reads the image from; gone with this object.
class ImageFile {
 public:
  explicit ImageFile(const std::string& image) {
    const char* folder = std::getenv("TMPDIR");
    path_ = concat(folder == nullptr || *folder == '\0' ? "/tmp" : folder, "/jtile_npu_XXXXXX");
    int file = mkstemp(path_.data());
    if (file < 0) fail(Code::kResourceExhausted, "no file for its image at ", path_, ": ", std::strerror(errno));
    size_t done = 0;
    ssize_t n = 0;
    while (done < image.size() && (n = write(file, image.data() + done, image.size() - done)) > 0)
      done += static_cast<size_t>(n);
    close(file);
    if (done < image.size()) {
      unlink(path_.c_str());
      fail(Code::kResourceExhausted, "its image cannot be written to ", path_, ": ", std::strerror(errno));
    }
  }
  ~ImageFile() { unlink(path_.c_str()); }
  ImageFile(const ImageFile&) = delete;
  ImageFile& operator=(const ImageFile&) = delete;
  const char* path() const { return path_.c_str(); }

 private:
  std::string path_;
};

// Memory of the device for the time of a call.
class Memory {
 public:
  explicit Memory(Acl& acl) : acl_(acl) {}
  ~Memory() {
    for (void* data : all_) acl_.release(data);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* add(size_t bytes) { return all_.emplace_back(acl_.allocate(bytes)); }

 private:
  Acl& acl_;
  std::vector<void*> all_;
};

class Stream {
 public:
  explicit Stream(Acl& acl) : acl_(acl), stream_(acl.stream()) {}
  ~Stream() { acl_.destroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return stream_; }

 private:
  Acl& acl_;
  void* stream_;
};

}  // namespace

// An image that is loaded on a device, for all call sites that share it.
class NpuModule {
 public:
  NpuModule(Acl& acl, int32_t device, const std::string& image, const std::string& symbol, uint32_t magic)
      : acl_(acl), device_(device) {
    ImageFile file(image);
    binary_ = acl.load(file.path(), magic);
    try {
      function_ = acl.function(binary_, symbol.c_str());
    } catch (...) {
      acl.unload(binary_);
      throw;
    }
  }
  ~NpuModule() {
    try {
      acl_.use(device_);
      acl_.unload(binary_);
    } catch (const Error&) {  // the device is gone, and the binary with it
    }
  }
  NpuModule(const NpuModule&) = delete;
  NpuModule& operator=(const NpuModule&) = delete;
  void* function() const { return function_; }

 private:
  Acl& acl_;
  int32_t device_;
  void* binary_ = nullptr;
  void* function_ = nullptr;
};

namespace {

SharedTable<NpuModule>& modules() {
  static auto* const table = new SharedTable<NpuModule>;
  return *table;
}

uint32_t magic_of(int64_t task) {
  switch (task / 10) {
    case 1:
      return kVector;
    case 2:
      return kCube;
    default:
      return kBoth;
  }
}

// Appends a number or an address at the next multiple of its size.
template <typename T>
void append(std::string& out, T value) {
  out.resize((out.size() + sizeof value - 1) / sizeof value * sizeof value);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

// Runs `body`; its errors get the name of the kernel.
template <typename Body>
void NpuKernel::named(Body body) const {
  try {
    body();
  } catch (const Error& error) {
    fail(error.code(), "kernel ", record_.name, ": ", error.what());
  }
}

NpuKernel::NpuKernel(std::string_view image, std::string_view record, int64_t device)
    : record_(parse_record(record)), image_(image), device_(static_cast<int32_t>(device)) {
  named([&] {
    if (!record_.npu)
      fail(Code::kInvalidArgument, "its code is for '", record_.arch, "', and the call is for platform ascend");
    if (!record_.maps.empty() || record_.counters != 0 || record_.sites)
      fail(Code::kInvalidArgument, "tensor maps, counters and logs are those of GPUs");
    if (record_.npu->lock != 0)
      fail(Code::kInvalidArgument, "its blocks take turns, for which this launcher has no memory");
    if (image.substr(0, 4) != std::string_view("\x7f" "ELF", 4))
      fail(Code::kFailedPrecondition, "its image is text and no object: it was compiled where hivmc, a part of CANN, is "
                                      "not; compile it again where it is on PATH");
  });
}

NpuKernel::~NpuKernel() = default;

std::string NpuKernel::pack(const std::vector<void*>& data, void* sync, void* workspace, const int64_t* symbols,
                            int32_t blocks) const {
  std::string out;
  append<void*>(out, sync);
  append<void*>(out, nullptr);  // a lock, which kernels without ordered sections do not take
  append<void*>(out, workspace);
  for (const Param& param : record_.params) {
    switch (param.kind) {
      case Param::Kind::kBuffer:
        append<void*>(out, data[param.index]);
        break;
      case Param::Kind::kI64:
        append<int64_t>(out, param.value.value(symbols));
        break;
      case Param::Kind::kI32: {
        int64_t value = param.value.value(symbols);
        if (value != static_cast<int32_t>(value))
          fail(Code::kInvalidArgument, "a parameter is ", value, ", which does not fit into 32 bits");
        append<int32_t>(out, static_cast<int32_t>(value));
        break;
      }
      default:
        append<void*>(out, nullptr);
    }
  }
  for (int32_t side : {blocks, 1, 1}) append<int32_t>(out, side);
  out.resize((out.size() + 7) / 8 * 8);
  return out;
}

void NpuKernel::run(Acl& acl, const Array* arrays, size_t operands, size_t count, const int64_t* symbols) {
  int64_t blocks = record_.grid.value(symbols);
  if (blocks < 0 || blocks > kMaxBlocks)
    fail(Code::kInvalidArgument, "its grid has ", blocks, " blocks; a launch has at most ", kMaxBlocks);
  acl.use(device_);
  if (module_ == nullptr) {
    const Digest digest = sha256(image_);
    const std::string key = concat(device_, " ", record_.symbol, " ", std::string(digest.begin(), digest.end()));
    module_ = modules().acquire(key, [&] {
      return std::make_unique<const NpuModule>(acl, device_, image_, record_.symbol, magic_of(record_.npu->task));
    });
  }
  Memory memory(acl);
  std::map<void*, void*> places;  // of the host -> of the device: a result may share the array of an operand
  std::vector<void*> data(count);
  std::vector<char> zeros;
  for (size_t k = 0; k < count; ++k) {
    if (arrays[k].bytes == 0) continue;
    auto [place, fresh] = places.try_emplace(arrays[k].data, nullptr);
    if (fresh) place->second = memory.add(arrays[k].bytes);
    data[k] = place->second;
    if (fresh && k < operands) acl.to_device(data[k], arrays[k].data, arrays[k].bytes);
  }
  for (size_t k : record_.zeroed) {
    zeros.assign(arrays[k].bytes, 0);
    if (!zeros.empty()) acl.to_device(data[k], zeros.data(), zeros.size());
  }
  if (blocks != 0) {
    const Npu& npu = *record_.npu;
    void* workspace = npu.workspace == 0 ? nullptr : memory.add(static_cast<size_t>(npu.workspace * blocks));
    void* sync = npu.task / 10 >= 3 ? acl.sync_address() : nullptr;
    std::string args = pack(data, sync, workspace, symbols, static_cast<int32_t>(blocks));
    Stream stream(acl);
    acl.launch(module_->function(), static_cast<uint32_t>(blocks), stream.get(), args.data(), args.size());
    acl.wait(stream.get());
  }
  for (size_t k = operands; k < count; ++k)
    if (arrays[k].bytes != 0) acl.to_host(arrays[k].data, data[k], arrays[k].bytes);
}

void NpuKernel::call(const Array* arrays, size_t operands, size_t count, const int64_t* sizes) {
  int64_t symbols[kMaxSymbols] = {};
  if (!record_.dims.empty()) bind_symbols(record_.name, record_.dims, sizes, symbols);
  named([&] {
    if (count < record_.arrays)
      fail(Code::kInvalidArgument, "its record speaks of ", record_.arrays, " arrays, and the call has ", count);
    std::lock_guard lock(mutex_);
    run(Acl::open(), arrays, operands, count, symbols);
  });
}

}  // namespace jtile
