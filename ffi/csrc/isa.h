// The instruction set of this machine, in LLVM's names.
#pragma once

#include <string_view>

namespace jtile {

// Checks an `isa` attribute, "x86_64:avx2,fma,...": throws Error when the architecture is another one, or when a
// feature is known to be absent. Names that this library does not know are let through.
void check_isa(std::string_view isa);

}  // namespace jtile
