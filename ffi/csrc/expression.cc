#include "expression.h"

#include <algorithm>
#include <charconv>

#include "error.h"

namespace jtile {
namespace {

constexpr size_t kMaxDepth = 32;
constexpr const char* kOperators[] = {"add", "sub", "mul", "floordiv", "cdiv", "mod", "max", "min"};

}  // namespace

Expression::Step Expression::read_word(const std::string& word, size_t symbols) {
  const auto* found = std::find(std::begin(kOperators), std::end(kOperators), word);
  if (found != std::end(kOperators))
    return {static_cast<Kind>(static_cast<int>(Kind::kAdd) + (found - std::begin(kOperators))), 0};
  size_t number = symbols;
  const char* last = word.data() + word.size();
  if (word.size() > 1 && word[0] == 's') {
    auto [end, error] = std::from_chars(word.data() + 1, last, number);
    if (error == std::errc() && end == last && number < symbols) return {Kind::kSymbol, static_cast<int64_t>(number)};
  }
  fail(Code::kInvalidArgument, "an expression with the unknown word '", word, "'");
}

Expression::Expression(const Json& json, size_t symbols) {
  if (!std::holds_alternative<JsonList>(json.value)) {
    number_ = json.integer("an expression");
    return;
  }
  size_t depth = 0;
  bool constant = true;
  for (const Json& item : json.list("an expression")) {
    bool is_word = std::holds_alternative<std::string>(item.value);
    Step step = is_word ? read_word(item.text(""), symbols) : Step{Kind::kNumber, item.integer("an expression")};
    constant = constant && step.kind != Kind::kSymbol;
    if (step.kind >= Kind::kAdd && depth < 2) fail(Code::kInvalidArgument, "an expression lacks a value");
    depth = step.kind >= Kind::kAdd ? depth - 1 : depth + 1;
    if (depth > kMaxDepth) fail(Code::kInvalidArgument, "an expression is nested more than ", kMaxDepth, " deep");
    steps_.push_back(step);
  }
  if (depth != 1) fail(Code::kInvalidArgument, "an expression leaves ", depth, " values, not one");
  if (!constant) return;
  number_ = compute(nullptr);
  steps_.clear();
}

int64_t Expression::apply(Kind kind, int64_t a, int64_t b) {
  int64_t out = 0;
  bool bad = false;
  bool divides = kind == Kind::kFloorDiv || kind == Kind::kCDiv || kind == Kind::kMod;
  if (divides && (b == 0 || (b == -1 && a == INT64_MIN)))
    fail(Code::kInvalidArgument, "a size of its launch is divided by ", b);
  int64_t rest = divides ? a % b : 0;
  bool below = rest != 0 && (rest < 0) != (b < 0);  // the exact quotient is negative: `/` rounded it up
  switch (kind) {
    case Kind::kAdd:
      bad = __builtin_add_overflow(a, b, &out);
      break;
    case Kind::kSub:
      bad = __builtin_sub_overflow(a, b, &out);
      break;
    case Kind::kMul:
      bad = __builtin_mul_overflow(a, b, &out);
      break;
    case Kind::kFloorDiv:
      out = a / b - below;
      break;
    case Kind::kCDiv:
      out = a / b + (rest != 0 && !below);
      break;
    case Kind::kMod:
      out = below ? rest + b : rest;
      break;
    case Kind::kMax:
      out = std::max(a, b);
      break;
    default:
      out = std::min(a, b);
  }
  if (bad) fail(Code::kInvalidArgument, "a size of its launch does not fit into 64 bits");
  return out;
}

int64_t Expression::compute(const int64_t* symbols) const {
  int64_t stack[kMaxDepth + 1];
  size_t top = 0;
  for (const Step& step : steps_) {
    if (step.kind == Kind::kNumber) {
      stack[top++] = step.number;
    } else if (step.kind == Kind::kSymbol) {
      stack[top++] = symbols[step.number];
    } else {
      --top;
      stack[top - 1] = apply(step.kind, stack[top - 1], stack[top]);
    }
  }
  return stack[0];
}

}  // namespace jtile
