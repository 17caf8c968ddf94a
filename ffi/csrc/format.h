// Tiles as text, laid out as NumPy prints arrays.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dtype.h"

namespace jtile {

// A format specification of one replacement field, `{:8.3f}`: applied to every element. Empty: NumPy's own layout.
struct Spec {
  bool given = false;
  bool zero = false, plus = false, left = false;
  int width = 0;
  int precision = -1;
  char type = 0;  // one of d x o b e f g % or 0
};

// Reads the text after the colon; throws Error for one that this dtype cannot follow.
Spec parse_spec(std::string_view text, const DType& dtype);

// A dense row-major array of this shape; an empty shape is a scalar.
std::string array_text(const DType& dtype, const std::vector<int64_t>& shape, const void* data, const Spec& spec);

}  // namespace jtile
