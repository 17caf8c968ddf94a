#include "acl.h"

#include <mutex>

namespace jtile {
namespace {

constexpr const char* kFiles[] = {"libascendcl.so", nullptr};
constexpr const char* kAdvice =
    "install CANN and source its set_env.sh, or leave the NPU out of the option arch (JTILE_ARCH), which sends kernels to it";
constexpr Acl::Status kInitialised = 100002;  // by somebody else in this process
constexpr int32_t kHostToDevice = 1, kDeviceToHost = 2, kHugeFirst = 0, kMagic = 2;

}  // namespace

Acl& Acl::open() {
  static auto* const mutex = new std::mutex;
  static Acl* acl = nullptr;  // leaked: executables that hold modules may outlive static destructors
  std::lock_guard lock(*mutex);
  if (acl == nullptr) acl = new Acl;
  return *acl;
}

Acl::Acl() : library_("ascend", kFiles, kAdvice) {
  library_.bind(init_, "aclInit");
  library_.bind(set_device_, "aclrtSetDevice");
  library_.bind(create_stream_, "aclrtCreateStream");
  library_.bind(destroy_stream_, "aclrtDestroyStream");
  library_.bind(malloc_, "aclrtMalloc");
  library_.bind(free_, "aclrtFree");
  library_.bind(memcpy_, "aclrtMemcpy");
  library_.bind(load_, "aclrtBinaryLoadFromFile");
  library_.bind(unload_, "aclrtBinaryUnLoad");
  library_.bind(function_, "aclrtBinaryGetFunction");
  library_.bind(launch_, "aclrtLaunchKernelWithHostArgs");
  library_.bind(wait_, "aclrtSynchronizeStream");
  library_.bind(sync_address_, "aclrtGetHardwareSyncAddr", true);
  library_.bind(message_, "aclGetRecentErrMsg", true);
  Status status = init_(nullptr);
  if (status != kInitialised) check(status, "aclInit");
}

void Acl::check(Status status, const char* what) const {
  if (status == 0) return;
  const char* text = message_ == nullptr ? nullptr : message_();
  fail(Code::kInternal, what, " failed with error ", status, text == nullptr || *text == '\0' ? "" : ": ",
       text == nullptr ? "" : text);
}

void Acl::use(int32_t device) { check(set_device_(device), "aclrtSetDevice"); }

void* Acl::stream() {
  void* out = nullptr;
  check(create_stream_(&out), "aclrtCreateStream");
  return out;
}

void Acl::destroy(void* stream) noexcept { destroy_stream_(stream); }

void* Acl::allocate(size_t bytes) {
  void* out = nullptr;
  Status status = malloc_(&out, bytes, kHugeFirst);
  if (status != 0) fail(Code::kResourceExhausted, "an array of ", bytes, " bytes: aclrtMalloc failed with error ", status);
  return out;
}

void Acl::release(void* data) noexcept { free_(data); }

void Acl::to_device(void* data, const void* host, size_t bytes) {
  check(memcpy_(data, bytes, host, bytes, kHostToDevice), "aclrtMemcpy to the device");
}

void Acl::to_host(void* host, const void* data, size_t bytes) {
  check(memcpy_(host, bytes, data, bytes, kDeviceToHost), "aclrtMemcpy to the host");
}

void* Acl::load(const char* path, uint32_t magic) {
  LoadOption option{kMagic, {magic, 0, 0, 0}};
  LoadOptions options{&option, 1};
  void* out = nullptr;
  check(load_(path, &options, &out), "aclrtBinaryLoadFromFile");
  return out;
}

void Acl::unload(void* binary) noexcept { unload_(binary); }

void* Acl::function(void* binary, const char* name) {
  void* out = nullptr;
  check(function_(binary, name, &out), "aclrtBinaryGetFunction");
  return out;
}

void* Acl::sync_address() {
  if (sync_address_ == nullptr)
    fail(Code::kUnavailable, "libascendcl.so has no function aclrtGetHardwareSyncAddr, and the kernel runs on both "
                             "kinds of cores: install a newer CANN");
  void* out = nullptr;
  check(sync_address_(&out), "aclrtGetHardwareSyncAddr");
  return out;
}

void Acl::launch(void* function, uint32_t blocks, void* stream, void* args, size_t bytes) {
  check(launch_(function, blocks, stream, nullptr, args, bytes, nullptr, 0), "aclrtLaunchKernelWithHostArgs");
}

void Acl::wait(void* stream) { check(wait_(stream), "aclrtSynchronizeStream"); }

}  // namespace jtile
