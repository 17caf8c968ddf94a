#include "handlers.h"

namespace jtile {
namespace {

// Made by the first line, since files are initialised in any order.
std::string& table() {
  static auto* const lines = new std::string;
  return *lines;
}

}  // namespace

HandlerLine::HandlerLine(const char* platform, const char* xla, const char* target, const char* stages) {
  table() += concat(platform, " ", xla, " ", target, " ", stages, "\n");
}

#pragma GCC visibility push(default)

// The lines of all handlers of this library; the text stays.
extern "C" const char* jtile_handlers() { return table().c_str(); }

#pragma GCC visibility pop

}  // namespace jtile
