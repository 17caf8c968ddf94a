// The library without XLA: what ffi/__init__.py calls through ctypes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#include "capi.h"
#include "elf.h"
#include "error.h"
#include "image.h"
#include "isa.h"
#include "program.h"
#include "sha256.h"

namespace jtile {
namespace {

void run(const Program& program, const Launch& launch, void* const* bufs, int64_t threads) {
  if (threads <= 1) return program.run_serial(launch, bufs);
  std::vector<std::jthread> helpers;
  program.run_parallel(launch, bufs, threads,
                       [&helpers](std::function<void()> task) { helpers.emplace_back(std::move(task)); });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Loads a kernel; *out is its handle for jtile_run and jtile_close.
int32_t jtile_open(const char* image, int64_t size, const char* name, const char* isa, const char* sites,
                   int64_t programs, int64_t workspace, int64_t cost, void** out, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] {
    Attributes attributes{.image = {image, static_cast<size_t>(size)}, .name = name, .isa = isa, .sites = sites};
    attributes.programs = programs, attributes.workspace = workspace, attributes.cost = cost;
    *out = new Program(attributes);
  });
}

void jtile_close(void* handle) { delete static_cast<Program*>(handle); }

// Runs the grid over `bufs` on `threads` threads.
int32_t jtile_run(void* handle, void* const* bufs, int64_t threads, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] {
    const auto& program = *static_cast<const Program*>(handle);
    run(program, program.launch(nullptr), bufs, threads);
  });
}

// jtile_open for a kernel with dynamic sizes: `dims` are 4 * `count` numbers, as the attribute of a call has them.
int32_t jtile_open_sized(const char* image, int64_t size, const char* name, const char* isa, const char* sites,
                         const int64_t* dims, int64_t count, int64_t workspace, int64_t cost, void** out, char* error,
                         int64_t capacity) {
  return to_status(error, capacity, [&] {
    Attributes attributes{.image = {image, static_cast<size_t>(size)}, .name = name, .isa = isa, .sites = sites};
    attributes.programs = -1, attributes.workspace = workspace, attributes.cost = cost;
    attributes.dims.assign(dims, dims + 4 * count);
    *out = new Program(attributes);
  });
}

// jtile_run for such a kernel: `sizes` are those of its dynamic dimensions, in the order of `dims`.
int32_t jtile_run_sized(void* handle, void* const* bufs, const int64_t* sizes, int64_t threads, char* error,
                        int64_t capacity) {
  return to_status(error, capacity, [&] {
    const auto& program = *static_cast<const Program*>(handle);
    run(program, program.launch(sizes), bufs, threads);
  });
}

// Links an object for `machine` (an ELF machine number, perhaps not this one) as if it lay at `address`, without
// running it. *size is the bytes of the linked object, at most `capacity` of which are copied to `out`; *entry is the
// offset of its entry. For tests and tools.
int32_t jtile_link(const char* image, int64_t size, int32_t machine, uint64_t address, char* out, int64_t out_capacity,
                   int64_t* linked, int64_t* entry, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] {
    Object object({image, static_cast<size_t>(size)}, static_cast<Machine>(machine), 4096);
    std::vector<uint8_t> memory(object.size());
    object.link(memory.data(), address);
    *linked = static_cast<int64_t>(memory.size()), *entry = static_cast<int64_t>(object.entry_offset());
    std::memcpy(out, memory.data(), std::min(memory.size(), static_cast<size_t>(out_capacity)));
  });
}

// Whether this machine can run code for `isa`.
int32_t jtile_check_isa(const char* isa, char* error, int64_t capacity) {
  return to_status(error, capacity, [&] { check_isa(isa); });
}

// SHA-256 of `size` bytes: 32 bytes to `out`.
void jtile_sha256(const char* data, int64_t size, uint8_t* out) {
  Digest digest = sha256({data, static_cast<size_t>(size)});
  std::copy(digest.begin(), digest.end(), out);
}

int64_t jtile_images_alive() { return images_alive(); }
int64_t jtile_images_loaded() { return images_loaded(); }

}  // extern "C"
#pragma GCC visibility pop

}  // namespace jtile
