#include "driver.h"

#include <dlfcn.h>

namespace jtile {

Library::Library(const std::string& platform, const char* const* files, const char* advice) {
  std::string errors;
  for (; *files != nullptr && handle_ == nullptr; ++files) {
    handle_ = dlopen(*files, RTLD_NOW | RTLD_LOCAL);
    file_ = *files;
    if (handle_ == nullptr) errors += concat(errors.empty() ? "" : "; ", dlerror());
  }
  if (handle_ == nullptr)
    fail(Code::kUnavailable, "the driver of platform ", platform, " cannot be opened (", errors, "): ", advice);
}

void* Library::find(const char* name, bool optional) const {
  void* address = dlsym(handle_, name);
  if (address == nullptr && !optional)
    fail(Code::kUnavailable, file_, " has no function ", name, ": the driver is too old; install a newer one");
  return address;
}

namespace {

[[noreturn]] void refuse_devices(const Driver& driver) {
  fail(Code::kUnavailable, "kernels that talk to other devices do not run on platform ", driver.platform());
}

}  // namespace

void Driver::reach(int, int) { refuse_devices(*this); }
int64_t Driver::resident(int, const Loaded&, const LaunchConfig&) { refuse_devices(*this); }
void* Driver::allocate_host(int, size_t) { refuse_devices(*this); }
void Driver::release_host(int, void*) noexcept {}
void Driver::write(int, void*, const void*, size_t) { refuse_devices(*this); }
void Driver::wait(int, void*) { refuse_devices(*this); }
void Driver::idle(int) { refuse_devices(*this); }
void* Driver::make_stream(int) { refuse_devices(*this); }
void* Driver::make_event(int) { refuse_devices(*this); }
void Driver::record(int, void*, void*) { refuse_devices(*this); }
void Driver::await(int, void*, void*) { refuse_devices(*this); }
void Driver::copy(int, void*, const void*, size_t, void*) { refuse_devices(*this); }

const char* advice_for(int code) {
  switch (code) {
    case 2:
      return "; free device memory, or leave more of it to kernels with XLA_PYTHON_CLIENT_MEM_FRACTION";
    case 100:
    case 101:
      return "; this process sees no such device (nvidia-smi and CUDA_VISIBLE_DEVICES, or rocm-smi and "
             "HIP_VISIBLE_DEVICES, tell which there are)";
    case 200:
    case 209:
    case 218:
    case 222:
      return "; the image was made for another device, or by a newer compiler than this driver knows: compile the "
             "kernel for this device, or update the driver";
    case 700:
    case 716:
    case 719:
      return "; this kernel, or one before it on the stream, failed: run it with interpret=True, which checks every "
             "access";
    case 701:
      return "; a block needs more registers or shared memory than there are: take smaller tiles or more warps";
    case 720:
      return "; a cooperative launch has more blocks than the device holds at once: take a smaller grid";
    case 912:
      return "; the device cannot place clusters of this size: take fewer blocks a cluster";
    default:
      return "";
  }
}

}  // namespace jtile
