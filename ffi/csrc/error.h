// Errors of the library: thrown inside it, turned into an FFI error or a C status at its edges, never across them.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace jtile {

enum class Code { kInvalidArgument, kFailedPrecondition, kResourceExhausted, kUnavailable, kInternal };

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Throws an `Error` whose message is the parts in sequence.
template <typename... Parts>
[[noreturn]] void fail(Code code, const Parts&... parts) {
  throw Error(code, concat(parts...));
}

}  // namespace jtile
