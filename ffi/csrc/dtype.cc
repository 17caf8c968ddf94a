#include "dtype.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "error.h"

namespace jtile {
namespace {

constexpr DType kDTypes[] = {
    {"bool", Kind::kBool, 8},
    {"int2", Kind::kSigned, 2},
    {"int4", Kind::kSigned, 4},
    {"int8", Kind::kSigned, 8},
    {"int16", Kind::kSigned, 16},
    {"int32", Kind::kSigned, 32},
    {"int64", Kind::kSigned, 64},
    {"uint2", Kind::kUnsigned, 2},
    {"uint4", Kind::kUnsigned, 4},
    {"uint8", Kind::kUnsigned, 8},
    {"uint16", Kind::kUnsigned, 16},
    {"uint32", Kind::kUnsigned, 32},
    {"uint64", Kind::kUnsigned, 64},
    {"float16", Kind::kFloat, 16, 5, 10, 15},
    {"bfloat16", Kind::kFloat, 16, 8, 7, 127},
    {"float32", Kind::kFloat, 32, 8, 23, 127},
    {"float64", Kind::kFloat, 64, 11, 52, 1023},
    {"float8_e4m3fn", Kind::kFloat, 8, 4, 3, 7, Special::kNanOnly},
    {"float8_e5m2", Kind::kFloat, 8, 5, 2, 15},
    {"float8_e4m3", Kind::kFloat, 8, 4, 3, 7},
    {"float8_e3m4", Kind::kFloat, 8, 3, 4, 3},
    {"float8_e4m3fnuz", Kind::kFloat, 8, 4, 3, 8, Special::kUnsignedZero},
    {"float8_e5m2fnuz", Kind::kFloat, 8, 5, 2, 16, Special::kUnsignedZero},
    {"float8_e4m3b11fnuz", Kind::kFloat, 8, 4, 3, 11, Special::kUnsignedZero},
    {"float8_e8m0fnu", Kind::kFloat, 8, 8, 0, 127, Special::kScale},
    {"float4_e2m1fn", Kind::kFloat, 4, 2, 1, 1, Special::kNone},
};

// "-1.25e+03" -> {true, "125", 3}, trailing zeros dropped.
Decimal parse_scientific(std::string_view text) {
  Decimal out;
  out.negative = text.front() == '-';
  if (out.negative) text.remove_prefix(1);
  size_t e = text.find('e');
  for (char c : text.substr(0, e)) {
    if (c != '.') out.digits += c;
  }
  std::string_view exponent = text.substr(e + 1);
  if (exponent.front() == '+') exponent.remove_prefix(1);
  std::from_chars(exponent.data(), exponent.data() + exponent.size(), out.exponent);
  while (out.digits.size() > 1 && out.digits.back() == '0') out.digits.pop_back();
  return out;
}

template <typename... Args>
std::string_view to_text(char (&buffer)[512], Args... args) {
  auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, args...);
  (void)error;  // 512 characters hold any double in these formats
  return {buffer, static_cast<size_t>(end - buffer)};
}

// float16, which std::to_chars does not know: the shortest decimal between the midpoints to the neighbouring values.
Decimal shortest_half(const DType& dtype, uint64_t bits) {
  double value = float_value(dtype, bits), magnitude = std::fabs(value);
  uint64_t code = bits & 0x7fff;  // not 0
  double below = float_value(dtype, code - 1), above = float_value(dtype, code + 1);
  if (std::isinf(above)) above = magnitude + (magnitude - below);
  double low = (below + magnitude) / 2, high = (magnitude + above) / 2;
  bool even = (code & 1) == 0;  // ties go to the even code
  char buffer[512];
  for (int places = 0;; ++places) {
    std::string_view text = to_text(buffer, value, std::chars_format::scientific, places);
    double read = 0;
    std::from_chars(text.data(), text.data() + text.size(), read);
    read = std::fabs(read);
    if ((read > low && read < high) || (even && (read == low || read == high)) || places >= 17)
      return parse_scientific(text);
  }
}

}  // namespace

const DType& dtype_of(std::string_view name) {
  for (const DType& dtype : kDTypes) {
    if (dtype.name == name) return dtype;
  }
  fail(Code::kInvalidArgument, "a printed value has the unknown dtype '", name, "'");
}

uint64_t element_bits(const DType& dtype, const void* data, int64_t index) {
  uint64_t bits = 0;  // little-endian, as every machine that this library runs on
  std::memcpy(&bits, static_cast<const char*>(data) + index * dtype.bytes(), static_cast<size_t>(dtype.bytes()));
  return dtype.bits < 8 ? bits & ((uint64_t{1} << dtype.bits) - 1) : bits;
}

bool bool_value(uint64_t bits) { return bits != 0; }

int64_t signed_value(const DType& dtype, uint64_t bits) {
  int shift = 64 - dtype.bits;
  return static_cast<int64_t>(bits << shift) >> shift;
}

double float_value(const DType& dtype, uint64_t bits) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
  if (dtype.special == Special::kScale)
    return bits == 255 ? kNan : std::ldexp(1.0, static_cast<int>(bits) - dtype.bias);
  if (dtype.special == Special::kUnsignedZero && bits == uint64_t{1} << (dtype.bits - 1)) return kNan;
  uint64_t mantissa = bits & ((uint64_t{1} << dtype.mantissa_bits) - 1);
  uint64_t top = (uint64_t{1} << dtype.exponent_bits) - 1;
  uint64_t exponent = bits >> dtype.mantissa_bits & top;
  double sign = (bits >> (dtype.bits - 1) & 1) != 0 ? -1.0 : 1.0;
  if (exponent == top && dtype.special == Special::kIeee) return mantissa != 0 ? kNan : sign * kInf;
  bool ones = mantissa == (uint64_t{1} << dtype.mantissa_bits) - 1;
  if (exponent == top && dtype.special == Special::kNanOnly && ones) return kNan;
  uint64_t whole = exponent == 0 ? mantissa : mantissa | uint64_t{1} << dtype.mantissa_bits;
  int scale = static_cast<int>(exponent == 0 ? 1 : exponent) - dtype.bias - dtype.mantissa_bits;
  return sign * std::ldexp(static_cast<double>(whole), scale);
}

Decimal shortest_decimal(const DType& dtype, uint64_t bits) {
  char buffer[512];
  double value = float_value(dtype, bits);
  if (value == 0) return {std::signbit(value), "0", 0};
  if (dtype.bits == 64) return parse_scientific(to_text(buffer, value, std::chars_format::scientific));
  if (dtype.bits == 32)
    return parse_scientific(to_text(buffer, static_cast<float>(value), std::chars_format::scientific));
  return shortest_half(dtype, bits);
}

Decimal rounded_decimal(double value, int places, bool scientific) {
  char buffer[512];
  if (scientific) return parse_scientific(to_text(buffer, value, std::chars_format::scientific, places));
  // Read back as significant digits: "0.00123" -> 123, exponent -3.
  std::string_view text = to_text(buffer, value, std::chars_format::fixed, places);
  Decimal out;
  out.negative = std::signbit(value);
  if (out.negative) text.remove_prefix(1);
  size_t point = std::min(text.find('.'), text.size());
  std::string digits(text.substr(0, point));
  if (point < text.size()) digits += text.substr(point + 1);
  size_t first = digits.find_first_not_of('0');
  if (first == std::string::npos) return {out.negative, "0", 0};
  out.exponent = static_cast<int>(point) - 1 - static_cast<int>(first);
  out.digits = digits.substr(first, digits.find_last_not_of('0') + 1 - first);
  return out;
}

}  // namespace jtile
