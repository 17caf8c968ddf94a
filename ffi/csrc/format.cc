#include "format.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstdio>
#include <functional>

#include "error.h"

namespace jtile {
namespace {

constexpr int64_t kThreshold = 1000, kEdge = 3, kLineWidth = 75;  // NumPy's defaults
constexpr int kPrecision = 8;

using Format = std::function<std::string(uint64_t bits)>;

std::string padded(std::string text, size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}

// "12", "345" for 12.345: the digits before and after the point; no digit after it gives "".
struct Parts {
  std::string whole, fraction;
};

Parts positional(const Decimal& d) {
  std::string digits = d.digits;
  int point = d.exponent + 1;
  if (point <= 0) digits.insert(0, static_cast<size_t>(1 - point), '0'), point = 1;
  if (digits.size() < static_cast<size_t>(point)) digits.append(static_cast<size_t>(point) - digits.size(), '0');
  Parts parts{digits.substr(0, static_cast<size_t>(point)), digits.substr(static_cast<size_t>(point))};
  parts.fraction.erase(parts.fraction.find_last_not_of('0') + 1);
  if (d.negative) parts.whole.insert(0, 1, '-');
  return parts;
}

Parts leading(const Decimal& d) {
  return {(d.negative ? "-" : "") + d.digits.substr(0, 1), d.digits.size() > 1 ? d.digits.substr(1) : ""};
}

std::string exponent_text(int exponent) {
  char text[16];
  std::snprintf(text, sizeof text, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
  return text;
}

std::string special_text(double value) { return std::isnan(value) ? "nan" : value < 0 ? "-inf" : "inf"; }

Decimal limited(const DType& dtype, uint64_t bits, bool scientific) {
  Decimal d = shortest_decimal(dtype, bits);
  size_t places = scientific ? leading(d).fraction.size() : positional(d).fraction.size();
  return places <= kPrecision ? d : rounded_decimal(float_value(dtype, bits), kPrecision, scientific);
}

// Decimal digits that every value of the dtype keeps.
int reliable_digits(const DType& dtype) { return dtype.bits == 64 ? 15 : dtype.bits == 32 ? 6 : 3; }

// -- arrays of floats -------------------------------------------------------------------------------------------------

bool wants_exponent(const DType& dtype, const std::vector<uint64_t>& elements) {
  double largest = 0, smallest = INFINITY;
  for (uint64_t bits : elements) {
    double value = std::fabs(float_value(dtype, bits));
    if (!std::isfinite(value) || value == 0) continue;
    largest = std::max(largest, value), smallest = std::min(smallest, value);
  }
  if (largest == 0) return false;
  // The comparisons happen in the array's own precision, so that an f32 1e-4 is not below 1e-4.
  if (dtype.bits == 32) {
    auto low = static_cast<float>(smallest);
    return largest >= 1e6 || low < 1e-4f || static_cast<float>(largest) / low > 1000.0f;
  }
  double limit = dtype.bits == 16 ? 1000.25 : 1000;  // an f16 quotient up to here rounds to 1000
  return largest >= std::pow(10, std::min(8, reliable_digits(dtype))) || smallest < 1e-4 || largest / smallest > limit;
}

// The width of every part over the finite elements decides how each is padded.
Format float_format(const DType& dtype, const std::vector<uint64_t>& elements) {
  bool scientific = wants_exponent(dtype, elements), finite = false, special = false;
  size_t whole = 0, fraction = 0, exponent = 2, odd = 0;
  for (uint64_t bits : elements) {
    double value = float_value(dtype, bits);
    if (!std::isfinite(value)) {
      special = true, odd = std::max(odd, special_text(value).size());
      continue;
    }
    Decimal d = limited(dtype, bits, scientific);
    Parts parts = scientific ? leading(d) : positional(d);
    whole = std::max(whole, parts.whole.size()), fraction = std::max(fraction, parts.fraction.size());
    exponent = std::max(exponent, exponent_text(d.exponent).size() - 2);
    finite = true;
  }
  size_t right = !finite ? 0 : scientific ? exponent + 2 + fraction : fraction;
  if (special && odd > right + 1) whole = std::max(whole, odd - right - 1);
  return [=, &dtype](uint64_t bits) {
    double value = float_value(dtype, bits);
    if (!std::isfinite(value)) return padded(special_text(value), whole + right + 1);
    if (!scientific) {
      Parts parts = positional(limited(dtype, bits, false));
      return padded(parts.whole, whole) + "." + parts.fraction + std::string(fraction - parts.fraction.size(), ' ');
    }
    // Equal numbers of digits for all: a value with fewer shows its exact expansion.
    Decimal d = shortest_decimal(dtype, bits);
    if (leading(d).fraction.size() != fraction) d = rounded_decimal(value, static_cast<int>(fraction), true);
    Parts parts = leading(d);
    std::string power = exponent_text(d.exponent);
    power.insert(2, exponent + 2 - power.size(), '0');
    return padded(parts.whole, whole) + "." + parts.fraction + std::string(fraction - parts.fraction.size(), '0') +
           power;
  };
}

// -- scalars and integers ---------------------------------------------------------------------------------------------

std::string float_scalar(const DType& dtype, uint64_t bits) {
  double value = float_value(dtype, bits), magnitude = std::fabs(value);
  if (!std::isfinite(value)) return special_text(value);
  Decimal d = shortest_decimal(dtype, bits);
  double high = dtype.bits == 64 ? 1e16 : std::pow(10, reliable_digits(dtype));
  if (magnitude == 0 || (magnitude >= 1e-4 && magnitude < high)) {
    Parts parts = positional(d);
    return parts.whole + "." + (parts.fraction.empty() ? "0" : parts.fraction);
  }
  Parts parts = leading(d);
  return parts.whole + (parts.fraction.empty() ? "" : "." + parts.fraction) + exponent_text(d.exponent);
}

// Six significant digits, as ml_dtypes prints.
std::string plain_text(const DType& dtype, uint64_t bits) {
  char buffer[32];
  double value = float_value(dtype, bits);
  std::snprintf(buffer, sizeof buffer, "%g", value);
  return std::isfinite(value) ? buffer : special_text(value);
}

std::string integer_text(const DType& dtype, uint64_t bits) {
  return dtype.kind == Kind::kSigned ? std::to_string(signed_value(dtype, bits)) : std::to_string(bits);
}

std::string spec_text(const DType& dtype, uint64_t bits, const Spec& spec) {
  std::string text;
  if (dtype.kind == Kind::kFloat) {
    char buffer[512];
    char pattern[] = {'%', '.', '*', spec.type == '%' ? 'f' : spec.type, 0};
    double value = float_value(dtype, bits) * (spec.type == '%' ? 100 : 1);
    std::snprintf(buffer, sizeof buffer, pattern, spec.precision, value);
    text = std::isfinite(value) ? std::string(buffer) + (spec.type == '%' ? "%" : "") : special_text(value);
  } else if (spec.type == 'x' || spec.type == 'o' || spec.type == 'b') {
    bool negative = dtype.kind == Kind::kSigned && signed_value(dtype, bits) < 0;
    uint64_t magnitude = negative ? uint64_t{0} - static_cast<uint64_t>(signed_value(dtype, bits)) : bits;
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, spec.type == 'x' ? "%llx" : "%llo",
                  static_cast<unsigned long long>(magnitude));
    text = buffer;
    if (spec.type == 'b')
      text = std::bitset<64>(magnitude).to_string(), text.erase(0, std::min<size_t>(text.find('1'), 63));
    if (negative) text.insert(0, 1, '-');
  } else {
    text = dtype.kind == Kind::kBool ? std::to_string(bool_value(bits)) : integer_text(dtype, bits);
  }
  if (spec.plus && text.front() != '-') text.insert(0, 1, '+');
  size_t width = static_cast<size_t>(spec.width);
  if (text.size() >= width) return text;
  if (spec.left) return text + std::string(width - text.size(), ' ');
  if (!spec.zero) return padded(text, width);
  size_t sign = text.front() == '-' || text.front() == '+' ? 1 : 0;
  return text.insert(sign, width - text.size(), '0');
}

Format element_format(const DType& dtype, const std::vector<uint64_t>& elements, bool scalar, const Spec& spec) {
  if (spec.given) return [&dtype, spec](uint64_t bits) { return spec_text(dtype, bits, spec); };
  if (dtype.kind == Kind::kBool) {
    return [scalar](uint64_t bits) -> std::string { return !bool_value(bits) ? "False" : scalar ? "True" : " True"; };
  }
  if (dtype.kind == Kind::kFloat && !dtype.is_native())
    return [&dtype](uint64_t bits) { return plain_text(dtype, bits); };
  if (dtype.kind == Kind::kFloat && scalar) return [&dtype](uint64_t bits) { return float_scalar(dtype, bits); };
  if (dtype.kind == Kind::kFloat) return float_format(dtype, elements);
  size_t width = 0;
  for (uint64_t bits : elements) width = !dtype.is_native() ? 0 : std::max(width, integer_text(dtype, bits).size());
  return [&dtype, width](uint64_t bits) { return padded(integer_text(dtype, bits), width); };
}

// -- layout -----------------------------------------------------------------------------------------------------------

struct Layout {
  const DType& dtype;
  const std::vector<int64_t>& shape;
  const void* data;
  bool summary;
  Format format;

  // The indices of one axis that are shown; -1 stands for the dots.
  std::vector<int64_t> shown(size_t axis) const {
    std::vector<int64_t> out;
    bool cut = summary && shape[axis] > 2 * kEdge;
    for (int64_t i = 0; i < shape[axis]; ++i) {
      if (cut && i == kEdge) out.push_back(-1), i = shape[axis] - kEdge;
      out.push_back(i);
    }
    return out;
  }

  void collect(size_t axis, int64_t offset, std::vector<uint64_t>& out) const {
    if (axis == shape.size()) return out.push_back(element_bits(dtype, data, offset));
    for (int64_t i : shown(axis)) {
      if (i >= 0) collect(axis + 1, offset * shape[axis] + i, out);
    }
  }

  // One row, broken into lines of at most `width` characters that start with `indent` blanks.
  std::string row(int64_t offset, size_t indent, int64_t width) const {
    std::string text, line(indent, ' ');
    bool first = true;
    for (int64_t i : shown(shape.size() - 1)) {
      if (!first) line += ' ';
      first = false;
      std::string word = i < 0 ? "..." : format(element_bits(dtype, data, offset * shape.back() + i));
      if (static_cast<int64_t>(line.size() + word.size()) > width && line.size() > indent) {
        line.erase(line.find_last_not_of(' ') + 1);
        text += line + "\n";
        line.assign(indent, ' ');
      }
      line += word;
    }
    return (text + line).substr(indent);
  }

  std::string block(size_t axis, int64_t offset, size_t indent, int64_t width) const {
    if (axis + 1 == shape.size()) return "[" + row(offset, indent, width - 1) + "]";
    std::string text, gap(shape.size() - axis - 1, '\n');
    for (int64_t i : shown(axis)) {
      if (!text.empty()) text += gap + std::string(indent, ' ');
      text += i < 0 ? "..." : block(axis + 1, offset * shape[axis] + i, indent + 1, width - 1);
    }
    return "[" + text + "]";
  }
};

}  // namespace

Spec parse_spec(std::string_view text, const DType& dtype) {
  Spec spec;
  if (text.empty()) return spec;
  spec.given = true;
  size_t at = 0;
  auto take = [&](std::string_view any) {
    return at < text.size() && any.find(text[at]) != std::string_view::npos ? text[at++] : '\0';
  };
  auto number = [&](int fallback) {
    int value = 0;
    size_t start = at;
    while (char digit = take("0123456789")) value = std::min(value * 10 + (digit - '0'), 10000);
    return at == start ? fallback : value;
  };
  char align = take("<>");
  spec.left = align == '<';
  spec.plus = take("+-") == '+';
  spec.zero = take("0") != 0;
  spec.width = number(0);
  if (take(".") != 0) spec.precision = number(10001);
  bool is_float = dtype.kind == Kind::kFloat;
  spec.type = take(is_float ? "efgEFG%" : "dxob");
  bool bad_precision = spec.precision > 60 || (!is_float && spec.precision >= 0);
  if (at != text.size() || bad_precision || spec.width > 200) {
    fail(Code::kInvalidArgument, "the format '{:", text, "}' does not fit a value of dtype ", dtype.name);
  }
  if (is_float && spec.type == 0) spec.type = 'g';
  if (spec.precision < 0) spec.precision = 6;
  return spec;
}

std::string array_text(const DType& dtype, const std::vector<int64_t>& shape, const void* data, const Spec& spec) {
  int64_t size = 1;
  for (int64_t n : shape) size *= n;
  if (size == 0) return "[]";
  Layout layout{dtype, shape, data, size > kThreshold, nullptr};
  std::vector<uint64_t> elements;
  layout.collect(0, 0, elements);
  layout.format = element_format(dtype, elements, shape.empty(), spec);
  if (shape.empty()) return layout.format(elements[0]);
  return layout.block(0, 0, 1, kLineWidth);
}

}  // namespace jtile
