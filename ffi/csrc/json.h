// A reader of JSON text (RFC 8259), for the small records that travel in attributes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace jtile {

struct Json;
using JsonList = std::vector<Json>;
using JsonDict = std::map<std::string, Json, std::less<>>;

// Numbers must be integers: nothing that jtile writes here is anything else.
struct Json {
  std::variant<std::nullptr_t, bool, int64_t, std::string, JsonList, JsonDict> value = nullptr;

  // These throw Error when the value is of another kind, or the key is missing; `what` names it in the message.
  const JsonList& list(const char* what) const;
  const std::string& text(const char* what) const;
  int64_t integer(const char* what) const;
  bool boolean(const char* what) const;
  const JsonDict& dict(const char* what) const;
  const Json& at(std::string_view key) const;
  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value); }
};

// Throws Error for text that is not JSON, or nested more than 32 deep.
Json parse_json(std::string_view text);

}  // namespace jtile
