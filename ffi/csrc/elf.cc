#include "elf.h"

#include <cstring>

#include "error.h"
#include "reloc.h"

namespace jtile {
namespace {

constexpr uint64_t kMaxSize = uint64_t{256} << 20;  // of the file and of the linked object
constexpr std::string_view kEntry = "jtile_entry";
constexpr std::string_view kKeeping = "jtile_entry_keeping";
constexpr std::string_view kGrid = "jtile_grid";
constexpr std::string_view kCounters = "jtile_counters";

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail(Code::kInvalidArgument, "the kernel object is refused: ", parts...);
}

// `value` rounded up to a multiple of `alignment`, a power of two; both are at most 2 * kMaxSize.
uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }

// The records of a table whose bytes were checked; the bytes may lie at any alignment.
template <typename T>
T record(std::string_view table, uint64_t index) {
  T value;
  std::memcpy(&value, table.data() + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

const char* machine_name(Machine machine) { return machine == Machine::kX86_64 ? "x86_64" : "aarch64"; }

Object::Object(std::string_view bytes, Machine machine, uint64_t page_size)
    : bytes_(bytes), machine_(machine), page_(page_size) {
  if (bytes.size() > kMaxSize) refuse("it has ", bytes.size(), " bytes, the limit is ", kMaxSize);
  read_header();
  read_sections();
  read_symbols();
  place_sections();
  scan_relocations();
  entry_ = find_function(kEntry);
  keeps_ = entry_ == kNone;
  if (keeps_) entry_ = find_function(kKeeping);
  if (entry_ == kNone) refuse("it does not define the function '", kEntry, "'");
  grid_ = find_function(kGrid);
  counters_ = find_function(kCounters);
}

// -- checked access ---------------------------------------------------------------------------------------------------

std::string_view Object::slice(uint64_t offset, uint64_t size, const char* what) const {
  if (offset > bytes_.size() || size > bytes_.size() - offset) {
    refuse(what, " (", size, " bytes at ", offset, ") lies outside its ", bytes_.size(), " bytes; is it truncated?");
  }
  return bytes_.substr(offset, size);
}

std::string_view Object::contents(const Section& section, const char* what) const {
  return slice(section.header.sh_offset, section.header.sh_size, what);
}

std::string_view Object::string_at(std::string_view table, uint64_t offset, const char* what) const {
  if (offset >= table.size()) refuse("the name of ", what, " lies outside its string table");
  std::string_view rest = table.substr(offset);
  size_t end = rest.find('\0');
  if (end == std::string_view::npos) refuse("the name of ", what, " has no end");
  return rest.substr(0, end);
}

std::string_view Object::section_name(const Section& section) const {
  return string_at(section_names_, section.header.sh_name, "a section");
}

std::string_view Object::symbol_name(const Elf64_Sym& symbol) const {
  return string_at(symbol_names_, symbol.st_name, "a symbol");
}

bool Object::is_loaded_relocation(const Section& section) const {
  const Elf64_Shdr& header = section.header;
  if (header.sh_type != SHT_RELA && header.sh_type != SHT_REL) return false;
  if (header.sh_info >= sections_.size())
    refuse("a relocation section applies to section ", header.sh_info, ", which does not exist");
  return sections_[header.sh_info].place >= 0;
}

// -- parsing ----------------------------------------------------------------------------------------------------------

void Object::read_header() {
  std::memcpy(&header_, slice(0, sizeof header_, "the ELF header").data(), sizeof header_);
  if (std::memcmp(header_.e_ident, ELFMAG, SELFMAG) != 0) refuse("it does not start with the ELF magic number");
  if (header_.e_ident[EI_CLASS] != ELFCLASS64 || header_.e_ident[EI_DATA] != ELFDATA2LSB)
    refuse("it is not a little-endian ELF64 file");
  if (header_.e_ident[EI_VERSION] != EV_CURRENT || header_.e_version != EV_CURRENT)
    refuse("its ELF version is unknown");
  if (header_.e_type != ET_REL) refuse("it is not a relocatable object (ELF type ", header_.e_type, ")");
  if (header_.e_machine != static_cast<uint16_t>(machine_)) {
    const char* name = header_.e_machine == EM_X86_64    ? "x86_64"
                       : header_.e_machine == EM_AARCH64 ? "aarch64"
                                                         : "another processor";
    refuse("it is code for ", name, " (ELF machine ", header_.e_machine, "), but this process runs on ",
           machine_name(machine_));
  }
}

void Object::read_sections() {
  if (header_.e_shentsize != sizeof(Elf64_Shdr))
    refuse("its section headers have ", header_.e_shentsize, " bytes each");
  if (header_.e_shnum == 0) refuse("it has no section headers, or more than the header can count");
  std::string_view table =
      slice(header_.e_shoff, uint64_t{header_.e_shnum} * sizeof(Elf64_Shdr), "the table of sections");
  sections_.resize(header_.e_shnum);
  for (size_t k = 0; k < sections_.size(); ++k) sections_[k].header = record<Elf64_Shdr>(table, k);
  if (header_.e_shstrndx >= sections_.size()) refuse("the index of its section names is out of range");
  const Section& names = sections_[header_.e_shstrndx];
  if (names.header.sh_type != SHT_STRTAB) refuse("its section names are no string table");
  section_names_ = contents(names, "the table of section names");
}

void Object::read_symbols() {
  for (size_t k = 1; k < sections_.size(); ++k) {
    if (sections_[k].header.sh_type != SHT_SYMTAB) continue;
    if (symbol_table_ != 0) refuse("it has two symbol tables");
    symbol_table_ = k;
  }
  if (symbol_table_ == 0) refuse("it has no symbol table");
  const Elf64_Shdr& header = sections_[symbol_table_].header;
  if (header.sh_entsize != sizeof(Elf64_Sym) || header.sh_size % sizeof(Elf64_Sym) != 0)
    refuse("its symbols have a wrong size");
  if (header.sh_link >= sections_.size() || sections_[header.sh_link].header.sh_type != SHT_STRTAB) {
    refuse("its symbol table names no string table");
  }
  symbol_names_ = contents(sections_[header.sh_link], "the table of symbol names");
  std::string_view table = contents(sections_[symbol_table_], "the symbol table");
  symbols_.resize(table.size() / sizeof(Elf64_Sym));
  for (size_t k = 0; k < symbols_.size(); ++k) symbols_[k] = record<Elf64_Sym>(table, k);
  for (size_t k = 1; k < symbols_.size(); ++k) check_defined(symbols_[k]);  // symbol 0 is the null symbol
}

void Object::check_defined(const Elf64_Sym& symbol) const {
  uint16_t index = symbol.st_shndx;
  if (index == SHN_UNDEF)
    refuse("it needs the symbol '", symbol_name(symbol), "', and a kernel object must define all it uses");
  if (index == SHN_ABS) return;
  if (index >= SHN_LORESERVE)
    refuse("the symbol '", symbol_name(symbol), "' lies in a section of a kind that is not supported");
  if (index >= sections_.size())
    refuse("the symbol '", symbol_name(symbol), "' lies in section ", index, ", which does not exist");
  uint64_t size = sections_[index].header.sh_size;
  if (symbol.st_value > size) refuse("the symbol '", symbol_name(symbol), "' lies outside its section");
  if (ELF64_ST_TYPE(symbol.st_info) == STT_TLS || ELF64_ST_TYPE(symbol.st_info) == STT_GNU_IFUNC) {
    refuse("the symbol '", symbol_name(symbol), "' is thread-local or resolved at run time, which is not supported");
  }
}

// -- layout -----------------------------------------------------------------------------------------------------------

namespace {

// Whether a section's bytes are needed to run the code. Unwind tables and notes are not: kernels do not throw.
bool is_needed(const Elf64_Shdr& header, std::string_view name) {
  constexpr uint32_t kUnwind = 0x70000001;  // SHT_X86_64_UNWIND
  if ((header.sh_flags & SHF_ALLOC) == 0 || header.sh_type == SHT_NOTE || header.sh_type == kUnwind ||
      name == ".eh_frame")
    return false;
  // Nobody would run constructors: .init_array has a type of its own, its forerunner .ctors only a name.
  bool constructors = name.starts_with(".ctors") || name.starts_with(".dtors");
  if (constructors || (header.sh_type != SHT_PROGBITS && header.sh_type != SHT_NOBITS)) {
    refuse("section '", name, "' has type ", header.sh_type, " or a use that is not supported");
  }
  if ((header.sh_flags & (SHF_TLS | SHF_COMPRESSED)) != 0) refuse("section '", name, "' is thread-local or compressed");
  if ((header.sh_flags & SHF_WRITE) != 0 && (header.sh_flags & SHF_EXECINSTR) != 0)
    refuse("section '", name, "' is writable code");
  return true;
}

Segment segment_of(const Elf64_Shdr& header) {
  return (header.sh_flags & SHF_EXECINSTR) != 0 ? kExecute : (header.sh_flags & SHF_WRITE) != 0 ? kWrite : kRead;
}

}  // namespace

void Object::place_sections() {
  std::vector<bool> needed(sections_.size());
  for (size_t k = 1; k < sections_.size(); ++k) {
    Section& section = sections_[k];
    needed[k] = is_needed(section.header, section_name(section));
    section.segment = segment_of(section.header);
    if (needed[k] && section.header.sh_type == SHT_PROGBITS) contents(section, "a section");
  }
  // The table of addresses goes first, into the read-only segment: at most one slot a symbol.
  uint64_t at = 0;
  for (size_t k = 1; k < sections_.size(); ++k) {
    const Elf64_Shdr& header = sections_[k].header;
    bool loads = header.sh_type == SHT_RELA && header.sh_info < sections_.size() && needed[header.sh_info];
    if (!loads) continue;
    std::string_view table = contents(sections_[k], "a relocation section");
    for (uint64_t i = 0; i < table.size() / sizeof(Elf64_Rela); ++i) {
      auto rela = record<Elf64_Rela>(table, i);
      if (!reloc_kind(machine_, ELF64_R_TYPE(rela.r_info)).got) continue;
      if (got_.emplace(ELF64_R_SYM(rela.r_info), at).second) at += 8;
    }
  }
  for (Segment segment : {kRead, kExecute, kWrite}) {
    offset_[segment] = at;
    for (size_t k = 1; k < sections_.size(); ++k) {
      if (!needed[k] || sections_[k].segment != segment) continue;
      const Elf64_Shdr& header = sections_[k].header;
      uint64_t alignment = header.sh_addralign == 0 ? 1 : header.sh_addralign;
      if ((alignment & (alignment - 1)) != 0 || alignment > page_) {
        refuse("section '", section_name(sections_[k]), "' wants an alignment of ", alignment, "; powers of two up to ",
               page_, " are supported");
      }
      at = align_up(at, alignment);
      sections_[k].place = static_cast<int64_t>(at);
      if (header.sh_size > kMaxSize - at)
        refuse("section '", section_name(sections_[k]), "' has ", header.sh_size, " bytes, too many");
      at += header.sh_size;
    }
    at = align_up(at, page_);
  }
  offset_[kRead] = 0;  // the table of addresses belongs to it
  offset_[kSegments] = at;
}

void Object::scan_relocations() {
  for (const Section& section : sections_) {
    if (!is_loaded_relocation(section)) continue;
    const Elf64_Shdr& header = section.header;
    const Section& target = sections_[header.sh_info];
    if (header.sh_type == SHT_REL || header.sh_entsize != sizeof(Elf64_Rela) ||
        header.sh_size % sizeof(Elf64_Rela) != 0) {
      refuse("the relocations of section '", section_name(target), "' have a wrong format");
    }
    if (header.sh_link != symbol_table_)
      refuse("the relocations of section '", section_name(target), "' use another symbol table");
    if (target.header.sh_type == SHT_NOBITS) refuse("section '", section_name(target), "' has no bytes to relocate");
    std::string_view table = contents(section, "a relocation section");
    for (uint64_t i = 0; i < table.size() / sizeof(Elf64_Rela); ++i) {
      auto rela = record<Elf64_Rela>(table, i);
      uint32_t type = ELF64_R_TYPE(rela.r_info);
      RelocKind kind = reloc_kind(machine_, type);
      if (type == 0) continue;  // R_*_NONE
      if (kind.width == 0) refuse("relocation type ", type, " is not supported");
      if (ELF64_R_SYM(rela.r_info) >= symbols_.size())
        refuse("a relocation names symbol ", ELF64_R_SYM(rela.r_info), ", which does not exist");
      uint64_t size = target.header.sh_size;
      if (kind.width > size || rela.r_offset > size - kind.width)
        refuse("a relocation lies outside section '", section_name(target), "'");
      if (machine_ == Machine::kAarch64 && kind.got && rela.r_addend != 0)
        refuse("a relocation has an addend that is not supported");
      low_ = low_ || kind.low;
    }
  }
}

// The offset of an exported function in the linked object; kNone where there is none of this name.
uint64_t Object::find_function(std::string_view name) const {
  const Elf64_Sym* entry = nullptr;
  for (size_t k = 1; k < symbols_.size(); ++k) {
    if (ELF64_ST_BIND(symbols_[k].st_info) == STB_LOCAL || symbol_name(symbols_[k]) != name) continue;
    if (entry != nullptr) refuse("it defines '", name, "' twice");
    entry = &symbols_[k];
  }
  if (entry == nullptr) return kNone;
  bool sectioned = entry->st_shndx < sections_.size();
  if (!sectioned || sections_[entry->st_shndx].place < 0 || sections_[entry->st_shndx].segment != kExecute) {
    refuse("'", name, "' is not in a section of code");
  }
  const Section& section = sections_[entry->st_shndx];
  uint64_t align = machine_ == Machine::kAarch64 ? 4 : 1;
  if (section.header.sh_type != SHT_PROGBITS || entry->st_value >= section.header.sh_size ||
      entry->st_value % align != 0) {
    refuse("'", name, "' does not point at code");
  }
  return static_cast<uint64_t>(section.place) + entry->st_value;
}

// -- linking ----------------------------------------------------------------------------------------------------------

uint64_t Object::symbol_address(uint64_t index, uint64_t address) const {
  if (index == 0) return 0;  // the null symbol: the addend is the whole value
  const Elf64_Sym& symbol = symbols_[index];
  if (symbol.st_shndx == SHN_ABS) return symbol.st_value;
  const Section& section = sections_[symbol.st_shndx];
  if (section.place < 0) refuse("its code uses section '", section_name(section), "', which is not loaded");
  return address + static_cast<uint64_t>(section.place) + symbol.st_value;
}

void Object::relocate(const Section& section, uint8_t* memory, uint64_t address) const {
  uint64_t base = static_cast<uint64_t>(sections_[section.header.sh_info].place);
  std::string_view table = contents(section, "a relocation section");
  for (uint64_t i = 0; i < table.size() / sizeof(Elf64_Rela); ++i) {
    auto rela = record<Elf64_Rela>(table, i);
    uint32_t type = ELF64_R_TYPE(rela.r_info);
    if (type == 0) continue;
    uint64_t symbol = ELF64_R_SYM(rela.r_info), at = base + rela.r_offset;
    uint64_t value = symbol_address(symbol, address);
    if (reloc_kind(machine_, type).got) {
      uint64_t slot = got_.at(symbol);
      std::memcpy(memory + slot, &value, sizeof value);
      value = address + slot;
    }
    apply_reloc(machine_, memory + at, {type, value, static_cast<uint64_t>(rela.r_addend), address + at});
  }
}

void Object::link(uint8_t* memory, uint64_t address) const {
  for (const Section& section : sections_) {
    if (section.place < 0 || section.header.sh_type == SHT_NOBITS || section.header.sh_size == 0) continue;
    std::string_view bytes = contents(section, "a section");
    std::memcpy(memory + section.place, bytes.data(), bytes.size());
  }
  for (const Section& section : sections_) {
    if (is_loaded_relocation(section)) relocate(section, memory, address);
  }
}

}  // namespace jtile
