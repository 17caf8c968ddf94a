// Whole numbers that a launch computes from the sizes of its arrays.
#pragma once

#include <cstdint>
#include <vector>

#include "json.h"

namespace jtile {

// A number, or a postfix list of numbers, "s0" for the value of symbol 0, and operators on the two values before them.
class Expression {
 public:
  Expression() = default;

  // `symbols`: how many of them there are. An expression without symbols is computed here. Throws Error.
  Expression(const Json& json, size_t symbols);

  // Throws Error where the value, or one that it is made of, is no int64.
  int64_t value(const int64_t* symbols) const { return steps_.empty() ? number_ : compute(symbols); }

 private:
  enum class Kind : uint8_t { kNumber, kSymbol, kAdd, kSub, kMul, kFloorDiv, kCDiv, kMod, kMax, kMin };
  struct Step {
    Kind kind;
    int64_t number;
  };

  static Step read_word(const std::string& word, size_t symbols);
  static int64_t apply(Kind kind, int64_t a, int64_t b);
  int64_t compute(const int64_t* symbols) const;

  int64_t number_ = 0;
  std::vector<Step> steps_;
};

}  // namespace jtile
