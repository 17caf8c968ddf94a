#include "reloc.h"

#include <cstring>

#include "error.h"

// Types that older <elf.h> files do not name.
#ifndef R_X86_64_GOTPCRELX
#define R_X86_64_GOTPCRELX 41
#define R_X86_64_REX_GOTPCRELX 42
#endif
#ifndef R_AARCH64_PLT32
#define R_AARCH64_PLT32 314
#endif

namespace jtile {
namespace {

RelocKind x86_kind(uint32_t type) {
  switch (type) {
    case R_X86_64_64:
    case R_X86_64_PC64:
      return {.width = 8};
    case R_X86_64_PC32:
    case R_X86_64_PLT32:
      return {.width = 4};
    case R_X86_64_32:
    case R_X86_64_32S:
      return {.width = 4, .low = true};
    case R_X86_64_GOTPCREL:
    case R_X86_64_GOTPCRELX:
    case R_X86_64_REX_GOTPCRELX:
      return {.width = 4, .got = true};
    default:
      return {};
  }
}

RelocKind aarch64_kind(uint32_t type) {
  switch (type) {
    case R_AARCH64_ABS64:
    case R_AARCH64_PREL64:
      return {.width = 8};
    case R_AARCH64_PREL32:
    case R_AARCH64_PLT32:
    case R_AARCH64_LD_PREL_LO19:
    case R_AARCH64_ADR_PREL_LO21:
    case R_AARCH64_ADR_PREL_PG_HI21:
    case R_AARCH64_ADR_PREL_PG_HI21_NC:
    case R_AARCH64_ADD_ABS_LO12_NC:
    case R_AARCH64_LDST8_ABS_LO12_NC:
    case R_AARCH64_LDST16_ABS_LO12_NC:
    case R_AARCH64_LDST32_ABS_LO12_NC:
    case R_AARCH64_LDST64_ABS_LO12_NC:
    case R_AARCH64_LDST128_ABS_LO12_NC:
    case R_AARCH64_TSTBR14:
    case R_AARCH64_CONDBR19:
    case R_AARCH64_JUMP26:
    case R_AARCH64_CALL26:
      return {.width = 4};
    case R_AARCH64_ADR_GOT_PAGE:
    case R_AARCH64_LD64_GOT_LO12_NC:
      return {.width = 4, .got = true};
    default:
      return {};
  }
}

template <typename T>
void put(uint8_t* place, T value) {
  std::memcpy(place, &value, sizeof value);
}

// The value as a signed number, checked to fit `bits` bits (two's complement).
int64_t fitting(uint64_t value, int bits, const Reloc& reloc) {
  auto number = static_cast<int64_t>(value);
  int64_t limit = int64_t{1} << (bits - 1);
  if (number < -limit || number >= limit) {
    fail(Code::kInvalidArgument, "a relocation of type ", reloc.type, " is out of range: ", number, " does not fit ",
         bits, " bits");
  }
  return number;
}

void apply_x86(uint8_t* place, const Reloc& reloc) {
  uint64_t absolute = reloc.S + reloc.A;
  switch (reloc.type) {
    case R_X86_64_64:
      return put<uint64_t>(place, absolute);
    case R_X86_64_PC64:
      return put<uint64_t>(place, absolute - reloc.P);
    case R_X86_64_32:
      if (absolute >> 32 != 0) fail(Code::kInvalidArgument, "a 32-bit absolute relocation is out of range");
      return put<uint32_t>(place, static_cast<uint32_t>(absolute));
    case R_X86_64_32S:
      return put<int32_t>(place, static_cast<int32_t>(fitting(absolute, 32, reloc)));
    default:  // PC-relative, 32 bits
      return put<int32_t>(place, static_cast<int32_t>(fitting(absolute - reloc.P, 32, reloc)));
  }
}

// Replaces `bits` bits of an instruction, from bit `low` up.
void put_field(uint8_t* place, uint64_t value, int low, int bits) {
  uint32_t word;
  std::memcpy(&word, place, 4);
  uint32_t mask = ((uint32_t{1} << bits) - 1) << low;
  put<uint32_t>(place, (word & ~mask) | ((static_cast<uint32_t>(value) << low) & mask));
}

// A branch or literal offset in units of 4 bytes.
void put_branch(uint8_t* place, const Reloc& reloc, int low, int bits) {
  uint64_t delta = reloc.S + reloc.A - reloc.P;
  if (delta % 4 != 0) fail(Code::kInvalidArgument, "a branch target is not aligned");
  put_field(place, static_cast<uint64_t>(fitting(delta, bits + 2, reloc) >> 2), low, bits);
}

// ADR and ADRP: 21 bits, the low two in bits 29-30 and the others in bits 5-23.
void put_adr(uint8_t* place, uint64_t value) {
  put_field(place, value & 3, 29, 2);
  put_field(place, value >> 2, 5, 19);
}

// The low 12 bits of an address as the offset of a load or store of 2**scale bytes.
void put_low12(uint8_t* place, const Reloc& reloc, int scale) {
  uint64_t low = (reloc.S + reloc.A) & 0xfff;
  if (low % (uint64_t{1} << scale) != 0)
    fail(Code::kInvalidArgument, "the operand of a load or store relocation is not aligned");
  put_field(place, low >> scale, 10, 12);
}

int64_t page_delta(const Reloc& reloc) {
  uint64_t mask = ~uint64_t{0xfff};
  return static_cast<int64_t>(((reloc.S + reloc.A) & mask) - (reloc.P & mask));
}

void apply_aarch64(uint8_t* place, const Reloc& reloc) {
  uint64_t absolute = reloc.S + reloc.A;
  switch (reloc.type) {
    case R_AARCH64_ABS64:
      return put<uint64_t>(place, absolute);
    case R_AARCH64_PREL64:
      return put<uint64_t>(place, absolute - reloc.P);
    case R_AARCH64_PREL32:
    case R_AARCH64_PLT32:
      return put<int32_t>(place, static_cast<int32_t>(fitting(absolute - reloc.P, 32, reloc)));
    case R_AARCH64_ADR_PREL_LO21:
      return put_adr(place, static_cast<uint64_t>(fitting(absolute - reloc.P, 21, reloc)));
    case R_AARCH64_ADR_PREL_PG_HI21:
    case R_AARCH64_ADR_PREL_PG_HI21_NC:
    case R_AARCH64_ADR_GOT_PAGE:
      return put_adr(place, static_cast<uint64_t>(fitting(static_cast<uint64_t>(page_delta(reloc)), 33, reloc) >> 12));
    case R_AARCH64_LD_PREL_LO19:
    case R_AARCH64_CONDBR19:
      return put_branch(place, reloc, 5, 19);
    case R_AARCH64_TSTBR14:
      return put_branch(place, reloc, 5, 14);
    case R_AARCH64_JUMP26:
    case R_AARCH64_CALL26:
      return put_branch(place, reloc, 0, 26);
    case R_AARCH64_LDST16_ABS_LO12_NC:
      return put_low12(place, reloc, 1);
    case R_AARCH64_LDST32_ABS_LO12_NC:
      return put_low12(place, reloc, 2);
    case R_AARCH64_LDST64_ABS_LO12_NC:
    case R_AARCH64_LD64_GOT_LO12_NC:
      return put_low12(place, reloc, 3);
    case R_AARCH64_LDST128_ABS_LO12_NC:
      return put_low12(place, reloc, 4);
    default:  // ADD_ABS_LO12_NC, LDST8_ABS_LO12_NC
      return put_low12(place, reloc, 0);
  }
}

}  // namespace

RelocKind reloc_kind(Machine machine, uint32_t type) {
  return machine == Machine::kX86_64 ? x86_kind(type) : aarch64_kind(type);
}

void apply_reloc(Machine machine, uint8_t* place, const Reloc& reloc) {
  machine == Machine::kX86_64 ? apply_x86(place, reloc) : apply_aarch64(place, reloc);
}

}  // namespace jtile
