// The relocations of x86-64 and aarch64 objects in the small code model.
#pragma once

#include <cstdint>

#include "elf.h"

namespace jtile {

// What one relocation type does; `width` 0 stands for a type that is not supported.
struct RelocKind {
  uint32_t width = 0;  // bytes that it changes
  bool got = false;    // it names the symbol's slot in the global offset table
  bool low = false;    // it holds a 32-bit absolute address
};

RelocKind reloc_kind(Machine machine, uint32_t type);

// One relocation, its operands named as in the processor supplements of the System V ABI.
struct Reloc {
  uint32_t type;
  uint64_t S;  // address of the symbol, or of its slot in the global offset table
  uint64_t A;  // addend
  uint64_t P;  // address of the place
};

// Patches `place` (reloc_kind(...).width bytes). Throws when the value does not fit its field.
void apply_reloc(Machine machine, uint8_t* place, const Reloc& reloc);

}  // namespace jtile
