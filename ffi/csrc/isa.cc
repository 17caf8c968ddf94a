#include "isa.h"

#include <cstdint>
#include <map>
#include <string>

#include "elf.h"
#include "error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sys/auxv.h>
#endif

namespace jtile {
namespace {

using Features = std::map<std::string, bool, std::less<>>;

#if defined(__x86_64__)

enum Register { EAX, EBX, ECX, EDX };
// What the operating system must save at a context switch for the feature's registers to be usable.
enum Saved { kNone, kYmm, kZmm, kTile, kApx };

struct Bit {
  const char* name;
  uint32_t leaf, subleaf;
  Register reg;
  int bit;
  Saved saved;
};

constexpr Bit kBits[] = {
    {"sse", 1, 0, EDX, 25, kNone},
    {"sse2", 1, 0, EDX, 26, kNone},
    {"mmx", 1, 0, EDX, 23, kNone},
    {"fxsr", 1, 0, EDX, 24, kNone},
    {"cx8", 1, 0, EDX, 8, kNone},
    {"cmov", 1, 0, EDX, 15, kNone},
    {"sse3", 1, 0, ECX, 0, kNone},
    {"pclmul", 1, 0, ECX, 1, kNone},
    {"ssse3", 1, 0, ECX, 9, kNone},
    {"fma", 1, 0, ECX, 12, kYmm},
    {"cx16", 1, 0, ECX, 13, kNone},
    {"sse4.1", 1, 0, ECX, 19, kNone},
    {"sse4.2", 1, 0, ECX, 20, kNone},
    {"movbe", 1, 0, ECX, 22, kNone},
    {"popcnt", 1, 0, ECX, 23, kNone},
    {"aes", 1, 0, ECX, 25, kNone},
    {"xsave", 1, 0, ECX, 26, kNone},
    {"avx", 1, 0, ECX, 28, kYmm},
    {"f16c", 1, 0, ECX, 29, kYmm},
    {"rdrnd", 1, 0, ECX, 30, kNone},
    {"bmi", 7, 0, EBX, 3, kNone},
    {"avx2", 7, 0, EBX, 5, kYmm},
    {"bmi2", 7, 0, EBX, 8, kNone},
    {"avx512f", 7, 0, EBX, 16, kZmm},
    {"avx512dq", 7, 0, EBX, 17, kZmm},
    {"rdseed", 7, 0, EBX, 18, kNone},
    {"adx", 7, 0, EBX, 19, kNone},
    {"avx512ifma", 7, 0, EBX, 21, kZmm},
    {"clflushopt", 7, 0, EBX, 23, kNone},
    {"clwb", 7, 0, EBX, 24, kNone},
    {"avx512cd", 7, 0, EBX, 28, kZmm},
    {"sha", 7, 0, EBX, 29, kNone},
    {"avx512bw", 7, 0, EBX, 30, kZmm},
    {"avx512vl", 7, 0, EBX, 31, kZmm},
    {"avx512vbmi", 7, 0, ECX, 1, kZmm},
    {"avx512vbmi2", 7, 0, ECX, 6, kZmm},
    {"gfni", 7, 0, ECX, 8, kNone},
    {"vaes", 7, 0, ECX, 9, kYmm},
    {"vpclmulqdq", 7, 0, ECX, 10, kYmm},
    {"avx512vnni", 7, 0, ECX, 11, kZmm},
    {"avx512bitalg", 7, 0, ECX, 12, kZmm},
    {"avx512vpopcntdq", 7, 0, ECX, 14, kZmm},
    {"movdiri", 7, 0, ECX, 27, kNone},
    {"movdir64b", 7, 0, ECX, 28, kNone},
    {"avx512vp2intersect", 7, 0, EDX, 8, kZmm},
    {"amx-bf16", 7, 0, EDX, 22, kTile},
    {"avx512fp16", 7, 0, EDX, 23, kZmm},
    {"amx-tile", 7, 0, EDX, 24, kTile},
    {"amx-int8", 7, 0, EDX, 25, kTile},
    {"sha512", 7, 1, EAX, 0, kYmm},
    {"avxvnni", 7, 1, EAX, 4, kYmm},
    {"avx512bf16", 7, 1, EAX, 5, kZmm},
    {"sm3", 7, 1, EAX, 1, kNone},
    {"sm4", 7, 1, EAX, 2, kNone},
    {"avx10.1", 7, 1, EDX, 19, kZmm},
    {"amx-complex", 7, 1, EDX, 8, kTile},
    {"egpr", 7, 1, EDX, 21, kApx},
    {"ndd", 7, 1, EDX, 21, kApx},
    {"ccmp", 7, 1, EDX, 21, kApx},
    {"nf", 7, 1, EDX, 21, kApx},
    {"ppx", 7, 1, EDX, 21, kApx},
    {"push2pop2", 7, 1, EDX, 21, kApx},
    {"zu", 7, 1, EDX, 21, kApx},
    {"cf", 7, 1, EDX, 21, kApx},
    {"cmpccxadd", 7, 1, EAX, 7, kNone},
    {"amx-fp16", 7, 1, EAX, 21, kTile},
    {"avxifma", 7, 1, EAX, 23, kYmm},
    {"avxvnniint8", 7, 1, EDX, 4, kYmm},
    {"avxneconvert", 7, 1, EDX, 5, kYmm},
    {"avxvnniint16", 7, 1, EDX, 10, kYmm},
    {"sahf", 0x80000001, 0, ECX, 0, kNone},
    {"lzcnt", 0x80000001, 0, ECX, 5, kNone},
    {"sse4a", 0x80000001, 0, ECX, 6, kNone},
    {"prfchw", 0x80000001, 0, ECX, 8, kNone},
    {"xop", 0x80000001, 0, ECX, 11, kYmm},
    {"fma4", 0x80000001, 0, ECX, 16, kYmm},
    {"tbm", 0x80000001, 0, ECX, 21, kNone},
    {"64bit", 0x80000001, 0, EDX, 29, kNone},
};

uint64_t saved_state() {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (1u << 27)) == 0) return 0;  // no OSXSAVE: XGETBV would fault
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Asks Linux to save tile registers with this process's threads. It refuses where a filter of system calls does, or where
// a thread's alternate stack for signals has no room for them.
bool tiles_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Features machine_features() {
  uint64_t state = saved_state();
  // Bits of XCR0: XMM and YMM; with opmasks and ZMM; tiles; R16 to R31.
  constexpr uint64_t kNeeds[] = {0, 0x6, 0xe6, 0x60000, 0x80000};
  if ((state & kNeeds[kTile]) == kNeeds[kTile] && !tiles_permitted()) state &= ~kNeeds[kTile];
  Features features;
  for (const Bit& bit : kBits) {
    uint32_t regs[4] = {};
    bool read = __get_cpuid_count(bit.leaf, bit.subleaf, &regs[EAX], &regs[EBX], &regs[ECX], &regs[EDX]) != 0;
    // Leaf 7 gives the number of its last subleaf in EAX; beyond it the registers mean nothing.
    if (read && bit.subleaf != 0) {
      uint32_t last[4] = {};
      __get_cpuid_count(bit.leaf, 0, &last[EAX], &last[EBX], &last[ECX], &last[EDX]);
      read = last[EAX] >= bit.subleaf;
    }
    bool usable = (state & kNeeds[bit.saved]) == kNeeds[bit.saved];
    features[bit.name] = read && usable && (regs[bit.reg] >> bit.bit & 1) != 0;
  }
  return features;
}

#else

struct Bit {
  const char* name;
  unsigned long type;
  int bit;
};

// The bits of the kernel's HWCAP (16) and HWCAP2 (26) words.
constexpr Bit kBits[] = {
    {"fp-armv8", 16, 0}, {"neon", 16, 1},      {"aes", 16, 3},   {"sha2", 16, 6},     {"crc", 16, 7},
    {"lse", 16, 8},      {"fullfp16", 16, 10}, {"rdm", 16, 12},  {"jsconv", 16, 13},  {"complxnum", 16, 14},
    {"rcpc", 16, 15},    {"sha3", 16, 17},     {"sm4", 16, 19},  {"dotprod", 16, 20}, {"sve", 16, 22},
    {"fp16fml", 16, 23}, {"sve2", 26, 1},      {"i8mm", 26, 13}, {"bf16", 26, 14},    {"sme", 26, 23},
    {"sve2p1", 26, 36},  {"sme2", 26, 37},
};

Features machine_features() {
  Features features;
  for (const Bit& bit : kBits) features[bit.name] = (getauxval(bit.type) >> bit.bit & 1) != 0;
  return features;
}

#endif

}  // namespace

void check_isa(std::string_view isa) {
  size_t colon = isa.find(':');
  std::string_view arch = isa.substr(0, colon);
  if (arch != machine_name(kHostMachine)) {
    fail(Code::kFailedPrecondition, "the kernel was compiled for '", arch, "', but this machine is ",
         machine_name(kHostMachine), "; compile it again here");
  }
  static const Features* const features = new Features(machine_features());
  std::string_view rest = colon == std::string_view::npos ? "" : isa.substr(colon + 1);
  std::string missing;
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    std::string_view name = rest.substr(0, comma);
    auto found = features->find(name);
    if (found != features->end() && !found->second) missing += (missing.empty() ? "" : ", ") + std::string(name);
    rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
  }
  if (!missing.empty()) {
    fail(Code::kFailedPrecondition, "the kernel needs CPU features that this machine lacks: ", missing,
         "; compile it again here, or for an older instruction set");
  }
}

}  // namespace jtile
