#include "image.h"

#include <cerrno>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include "elf.h"
#include "error.h"
#include "shared_table.h"

namespace jtile {
namespace {

SharedTable<Image>& table() {
  static auto* const table = new SharedTable<Image>;
  return *table;
}

uint64_t page_size() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

[[noreturn]] void fail_system(const char* what) {
  Code code = errno == ENOMEM ? Code::kResourceExhausted : Code::kInternal;
  fail(code, "cannot load a kernel object: ", what, ": ", std::strerror(errno));
}

uint8_t* map_pages(uint64_t size, bool low) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_32BIT
  if (low) flags |= MAP_32BIT;
#else
  (void)low;
#endif
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) fail_system("mmap");
  return static_cast<uint8_t*>(memory);
}

void protect(const Object& object, uint8_t* memory, Segment segment, int protection) {
  if (object.segment_size(segment) == 0) return;
  if (mprotect(memory + object.segment_offset(segment), object.segment_size(segment), protection) != 0)
    fail_system("mprotect");
}

}  // namespace

Image::Image(std::string_view bytes) {
  Object object(bytes, kHostMachine, page_size());
  size_ = object.size();
  memory_ = map_pages(size_, object.needs_low_address());
  try {
    object.link(memory_, reinterpret_cast<uint64_t>(memory_));
    protect(object, memory_, kRead, PROT_READ);
    protect(object, memory_, kExecute, PROT_READ | PROT_EXEC);
  } catch (...) {
    munmap(memory_, size_);  // a constructor that throws has no destructor call
    throw;
  }
  auto* code = reinterpret_cast<char*>(memory_ + object.segment_offset(kExecute));
  __builtin___clear_cache(code, code + object.segment_size(kExecute));
  entry_ = reinterpret_cast<jtile_entry*>(memory_ + object.entry_offset());
  keeps_ = object.keeps();
  if (object.grid_offset() != Object::kNone) grid_ = reinterpret_cast<jtile_grid*>(memory_ + object.grid_offset());
  if (object.counters_offset() != Object::kNone)
    counters_ = reinterpret_cast<jtile_counters*>(memory_ + object.counters_offset())();
}

Image::~Image() { munmap(memory_, size_); }

std::shared_ptr<const Image> acquire_image(std::string_view object) {
  return table().acquire(object, [object] { return std::make_unique<const Image>(object); });
}

int64_t images_alive() { return table().alive(); }
int64_t images_loaded() { return table().loaded(); }

}  // namespace jtile
