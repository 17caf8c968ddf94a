// A loader of ELF64 relocatable objects: the compiled kernels that travel inside XLA programs.
//
// The bytes are not trusted. Every offset, size, index, string and relocation is checked before it is followed, in
// arithmetic that cannot overflow; what does not fit throws an Error that says what. (The machine code itself is
// trusted as any code that a process runs is.)
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <elf.h>

namespace jtile {

enum class Machine : uint16_t { kX86_64 = EM_X86_64, kAarch64 = EM_AARCH64 };

#if defined(__x86_64__)
inline constexpr Machine kHostMachine = Machine::kX86_64;
#elif defined(__aarch64__)
inline constexpr Machine kHostMachine = Machine::kAarch64;
#else
#error "jtile runs on x86-64 and aarch64"
#endif

// "x86_64" or "aarch64".
const char* machine_name(Machine machine);

// What a page of the linked object may be used for; one run of pages each, in this order.
enum Segment { kRead = 0, kExecute = 1, kWrite = 2, kSegments = 3 };

// A parsed and checked object. `bytes` must outlive it.
class Object {
 public:
  Object(std::string_view bytes, Machine machine, uint64_t page_size);

  // Bytes of memory that the linked object takes: whole pages, the segments one after another.
  uint64_t size() const { return offset_[kSegments]; }
  uint64_t segment_offset(Segment segment) const { return offset_[segment]; }
  uint64_t segment_size(Segment segment) const { return offset_[segment + 1] - offset_[segment]; }
  // Offset of the function `jtile_entry` in the linked object, or `jtile_entry_keeping`; and whether it is the latter.
  uint64_t entry_offset() const { return entry_; }
  bool keeps() const { return keeps_; }
  // Offset of the function `jtile_grid`, which only kernels with dynamic sizes have; kNone where there is none.
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t grid_offset() const { return grid_; }
  // Likewise of `jtile_counters`, of kernels whose programs arrive.
  uint64_t counters_offset() const { return counters_; }
  // Whether it holds 32-bit absolute addresses, so that it must lie in the lowest 2 GiB.
  bool needs_low_address() const { return low_; }

  // Copies the sections to `memory` (size() bytes, zeroed) and applies the relocations as if it lay at `address`.
  void link(uint8_t* memory, uint64_t address) const;

 private:
  struct Section {
    Elf64_Shdr header;
    int64_t place = -1;  // offset in the linked object; -1: not loaded
    Segment segment = kRead;
  };

  void read_header();
  void read_sections();
  void read_symbols();
  void check_defined(const Elf64_Sym& symbol) const;
  void place_sections();
  void scan_relocations();
  uint64_t find_function(std::string_view name) const;

  std::string_view slice(uint64_t offset, uint64_t size, const char* what) const;
  std::string_view contents(const Section& section, const char* what) const;
  std::string_view string_at(std::string_view table, uint64_t offset, const char* what) const;
  std::string_view section_name(const Section& section) const;
  std::string_view symbol_name(const Elf64_Sym& symbol) const;
  bool is_loaded_relocation(const Section& section) const;
  uint64_t symbol_address(uint64_t index, uint64_t address) const;
  void relocate(const Section& table, uint8_t* memory, uint64_t address) const;

  std::string_view bytes_;
  Machine machine_;
  uint64_t page_;
  Elf64_Ehdr header_;
  std::vector<Section> sections_;
  std::string_view section_names_, symbol_names_;
  std::vector<Elf64_Sym> symbols_;
  uint64_t symbol_table_ = 0;                   // index of the symbol table's section
  std::unordered_map<uint64_t, uint64_t> got_;  // symbol index -> offset of its slot in the linked object
  uint64_t offset_[kSegments + 1] = {};
  uint64_t entry_ = kNone, grid_ = kNone, counters_ = kNone;
  bool keeps_ = false;
  bool low_ = false;
};

}  // namespace jtile
