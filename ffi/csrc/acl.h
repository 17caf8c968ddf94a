// The part of libascendcl that jtile calls, opened at run time. Declared from the public documentation of CANN (8.5 and
// newer); no header of it is used, and nothing here was ever run on an NPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "driver.h"

namespace jtile {

class Acl {
 public:
  using Status = int32_t;
  struct LoadOption {
    int32_t type;  // 2: the magic number of the cores that the binary is for
    uint32_t value[4];
  };
  struct LoadOptions {
    LoadOption* options;
    size_t count;
  };

  // Opens the library, once in this process. Throws Error (kUnavailable).
  static Acl& open();

  // Each throws Error with the library's own text of what went wrong. The device is that of the calling thread.
  void use(int32_t device);
  void* stream();
  void destroy(void* stream) noexcept;
  void* allocate(size_t bytes);
  void release(void* data) noexcept;
  void to_device(void* data, const void* host, size_t bytes);
  void to_host(void* host, const void* data, size_t bytes);
  void* load(const char* path, uint32_t magic);
  void unload(void* binary) noexcept;
  void* function(void* binary, const char* name);
  // The address of the flags between cores, which kernels that run on both kinds of cores are given.
  void* sync_address();
  void launch(void* function, uint32_t blocks, void* stream, void* args, size_t bytes);
  void wait(void* stream);

 private:
  Acl();
  void check(Status status, const char* what) const;

  Library library_;
  Status (*init_)(const char*);
  Status (*set_device_)(int32_t);
  Status (*create_stream_)(void**);
  Status (*destroy_stream_)(void*);
  Status (*malloc_)(void**, size_t, int32_t);
  Status (*free_)(void*);
  Status (*memcpy_)(void*, size_t, const void*, size_t, int32_t);
  Status (*load_)(const char*, LoadOptions*, void**);
  Status (*unload_)(void*);
  Status (*function_)(void*, const char*, void**);
  Status (*launch_)(void*, uint32_t, void*, void*, void*, size_t, void*, size_t);
  Status (*wait_)(void*);
  Status (*sync_address_)(void**);
  const char* (*message_)();
};

}  // namespace jtile
