// The dtypes of printed values, read element by element. Sub-byte dtypes are stored one element a byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace jtile {

enum class Kind { kBool, kSigned, kUnsigned, kFloat };

// What the two largest exponent values of a float format encode.
// kUnsignedZero: numbers, and one NaN in the place of -0.
enum class Special { kIeee, kNanOnly, kNone, kScale, kUnsignedZero };

struct DType {
  std::string_view name;
  Kind kind;
  int bits;  // of the value: 4 for int4
  int exponent_bits = 0, mantissa_bits = 0, bias = 0;
  Special special = Special::kIeee;

  int bytes() const { return bits <= 8 ? 1 : bits / 8; }
  // Whether NumPy itself has it; the others come from ml_dtypes, and print plainly.
  bool is_native() const { return kind == Kind::kFloat ? bits > 8 && name != "bfloat16" : bits >= 8; }
};

// The dtype of this NumPy (ml_dtypes) name; throws Error for an unknown one.
const DType& dtype_of(std::string_view name);

// The bits of element `index` of a dense array, in the low bits of the result.
uint64_t element_bits(const DType& dtype, const void* data, int64_t index);

// The value that the bits stand for.
bool bool_value(uint64_t bits);
int64_t signed_value(const DType& dtype, uint64_t bits);
double float_value(const DType& dtype, uint64_t bits);

// A finite float in decimal: sign, significant digits "d.ddd" without the point, and the exponent of the first of them.
struct Decimal {
  bool negative = false;
  std::string digits;
  int exponent = 0;
};

// The shortest decimal that rounds to this value and to no other of its dtype: float16, float32 or float64. The value
// must be finite.
Decimal shortest_decimal(const DType& dtype, uint64_t bits);

// The value rounded to `places` digits after the point, positional or after the first digit (scientific).
Decimal rounded_decimal(double value, int places, bool scientific);

}  // namespace jtile
