// Dimensions whose sizes a kernel learns when it is called.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jtile {

constexpr size_t kMaxSymbols = 64;

// A dynamic dimension of an operand has `multiple` times the value of symbol `symbol`.
struct Dimension {
  int64_t operand, axis, symbol, multiple;
};

// Reads four numbers for each dimension. Throws Error.
std::vector<Dimension> read_dimensions(const std::vector<int64_t>& numbers);

// The values of the symbols for operands whose dynamic dimensions have these sizes, one for each of `dimensions`;
// writes kMaxSymbols numbers, zero for those that no dimension has. Throws Error, which names the kernel.
void bind_symbols(const std::string& kernel, const std::vector<Dimension>& dimensions, const int64_t* sizes,
                  int64_t* symbols);

}  // namespace jtile
