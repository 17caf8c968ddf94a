#include "dims.h"

#include <algorithm>

#include "error.h"

namespace jtile {

constexpr int64_t kMaxSide = (int64_t{1} << 31) - 1;  // ids and sizes are int32 in a kernel

std::vector<Dimension> read_dimensions(const std::vector<int64_t>& numbers) {
  if (numbers.size() % 4 != 0) fail(Code::kInvalidArgument, "its dims are ", numbers.size(), " numbers, not fours");
  std::vector<Dimension> dimensions;
  for (size_t k = 0; k < numbers.size(); k += 4) {
    Dimension d{numbers[k], numbers[k + 1], numbers[k + 2], numbers[k + 3]};
    if (d.operand < 0 || d.axis < 0 || d.symbol < 0 || d.symbol >= static_cast<int64_t>(kMaxSymbols) || d.multiple < 1)
      fail(Code::kInvalidArgument, "its dynamic dimension ", k / 4, " is damaged, or it has more than ", kMaxSymbols,
           " symbols");
    dimensions.push_back(d);
  }
  return dimensions;
}

void bind_symbols(const std::string& kernel, const std::vector<Dimension>& dimensions, const int64_t* sizes,
                  int64_t* symbols) {
  std::fill_n(symbols, kMaxSymbols, 0);
  if (dimensions.empty()) return;
  if (sizes == nullptr)
    fail(Code::kInvalidArgument, "kernel ", kernel, ": it has dynamic sizes, and the call gives none");
  for (size_t k = 0; k < dimensions.size(); ++k) {
    const Dimension& d = dimensions[k];
    int64_t& symbol = symbols[d.symbol];
    int64_t value = sizes[k] / d.multiple;
    if (value < 1 || sizes[k] > kMaxSide || sizes[k] % d.multiple != 0 || (symbol != 0 && symbol != value))
      fail(Code::kInvalidArgument, "kernel ", kernel, ": axis ", d.axis, " of operand ", d.operand, " has ", sizes[k],
           " elements; it was compiled for ", d.multiple == 1 ? "" : "a multiple of ",
           d.multiple == 1 ? concat("1 to ", kMaxSide) : concat(d.multiple),
           symbol == 0 ? "" : concat(", the same as another dimension, ", symbol * d.multiple));
    symbol = value;
  }
}

}  // namespace jtile
