#include "json.h"

#include <charconv>

#include "error.h"

namespace jtile {
namespace {

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Json document() {
    Json value = read(0);
    skip();
    if (at_ != text_.size()) refuse();
    return value;
  }

 private:
  [[noreturn]] void refuse() const {
    fail(Code::kInvalidArgument, "attribute text is not valid JSON at character ", at_);
  }

  void skip() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  void expect(char c) {
    if (peek() != c || at_ == text_.size()) refuse();
    ++at_;
  }

  bool accept(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json read(int depth) {
    if (depth > 32) refuse();
    switch (peek()) {
      case '{':
        return {read_dict(depth)};
      case '[':
        return {read_list(depth)};
      case '"':
        return {read_string()};
      default:
        if (accept("null")) return {};
        if (accept("true")) return {true};
        if (accept("false")) return {false};
        return {read_integer()};
    }
  }

  int64_t read_integer() {
    int64_t number = 0;
    auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), number);
    if (error != std::errc()) refuse();
    at_ = static_cast<size_t>(end - text_.data());
    return number;
  }

  JsonList read_list(int depth) {
    JsonList list;
    expect('[');
    if (peek() != ']') {
      list.push_back(read(depth + 1));
      while (peek() == ',') ++at_, list.push_back(read(depth + 1));
    }
    expect(']');
    return list;
  }

  JsonDict read_dict(int depth) {
    JsonDict dict;
    expect('{');
    if (peek() != '}') {
      read_pair(dict, depth);
      while (peek() == ',') ++at_, read_pair(dict, depth);
    }
    expect('}');
    return dict;
  }

  void read_pair(JsonDict& dict, int depth) {
    if (peek() != '"') refuse();
    std::string key = read_string();
    expect(':');
    dict[std::move(key)] = read(depth + 1);
  }

  std::string read_string() {
    std::string out;
    expect('"');
    while (true) {
      if (at_ == text_.size()) refuse();
      char c = text_[at_++];
      if (c == '"') return out;
      c == '\\' ? read_escape(out) : out.push_back(c);
    }
  }

  void read_escape(std::string& out) {
    if (at_ == text_.size()) refuse();
    char c = text_[at_++];
    constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    size_t simple = kFrom.find(c);
    if (simple != std::string_view::npos) return out.push_back(kTo[simple]);
    if (c != 'u') refuse();
    uint32_t unit = read_hex4();
    if (unit >= 0xd800 && unit < 0xdc00) {  // the first half of a surrogate pair
      if (!accept("\\u")) refuse();
      uint32_t second = read_hex4();
      if (second < 0xdc00 || second > 0xdfff) refuse();
      unit = 0x10000 + ((unit - 0xd800) << 10) + (second - 0xdc00);
    }
    append_utf8(unit, out);
  }

  uint32_t read_hex4() {
    uint32_t unit = 0;
    if (text_.size() - at_ < 4) refuse();
    auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + at_ + 4, unit, 16);
    if (error != std::errc() || end != text_.data() + at_ + 4) refuse();
    at_ += 4;
    return unit;
  }

  static void append_utf8(uint32_t c, std::string& out) {
    auto put = [&out](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
    if (c < 0x80) return put(c);
    if (c < 0x800) {
      put(0xc0 | c >> 6);
    } else {
      if (c < 0x10000) put(0xe0 | c >> 12);
      if (c >= 0x10000) put(0xf0 | c >> 18), put(0x80 | (c >> 12 & 0x3f));
      put(0x80 | (c >> 6 & 0x3f));
    }
    put(0x80 | (c & 0x3f));
  }

  std::string_view text_;
  size_t at_ = 0;
};

template <typename T>
const T& expect_kind(const Json& json, const char* what) {
  if (const T* value = std::get_if<T>(&json.value)) return *value;
  fail(Code::kInvalidArgument, "attribute text: '", what, "' has the wrong kind");
}

}  // namespace

const JsonList& Json::list(const char* what) const { return expect_kind<JsonList>(*this, what); }
const std::string& Json::text(const char* what) const { return expect_kind<std::string>(*this, what); }
int64_t Json::integer(const char* what) const { return expect_kind<int64_t>(*this, what); }
bool Json::boolean(const char* what) const { return expect_kind<bool>(*this, what); }
const JsonDict& Json::dict(const char* what) const { return expect_kind<JsonDict>(*this, what); }

const Json& Json::at(std::string_view key) const {
  const auto& dict = expect_kind<JsonDict>(*this, "an object");
  auto found = dict.find(key);
  if (found == dict.end()) fail(Code::kInvalidArgument, "attribute text: the key '", key, "' is missing");
  return found->second;
}

Json parse_json(std::string_view text) { return Reader(text).document(); }

}  // namespace jtile
