// The print and assert sites of a kernel, read from its `sites` attribute.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "format.h"
#include "json.h"

namespace jtile {

struct SiteArg {
  const DType* dtype;
  std::vector<int64_t> shape;
};

// A piece of a print format: literal text, then the value of one argument (-1: none, the last piece).
struct Piece {
  std::string literal;
  int64_t arg = -1;
  Spec spec;
};

struct Site {
  bool is_print;
  std::string message;  // of an assertion
  std::string where;    // "file:line"
  std::vector<SiteArg> args;
  std::vector<Piece> pieces;  // of a print
  // How many program ids there are: the kernel's own, and behind them those of vmaps, the outer one first.
  size_t axes = 3, lanes = 0;
};

// Reads a JSON list of {"kind": "print"|"assert", "format"|"message": str, "where": str, "args": [{"dtype", "shape"}]}.
// A site may have "axes" and "lanes", too. A format is that of str.format with the fields {}, {k} and {:spec}. Empty
// text stands for no sites. Throws Error.
std::vector<Site> parse_sites(std::string_view json);
std::vector<Site> parse_sites(const Json& list);

// The text of a print site for the values of its arguments.
std::string print_text(const Site& site, void* const* args);

// What one print writes: "[kernel (0, 1, 2)] text\n".
std::string printed_line(const std::string& kernel, const Site& site, const int64_t* pid, void* const* args);

// Writes whole records to standard output, one after another. A closed or full output loses text; it never fails a run.
void write_out(const std::string& text);

// Throws the error of a failed assertion.
[[noreturn]] void fail_assertion(const std::string& kernel, const Site& site, const int64_t* pid);

// "(0, 1, 2)" for the ids of a program; "(0, 1, 2), lane 5" and "(0, 1, 2), lane (3, 5)" under vmap.
std::string program_text(const Site& site, const int64_t* pid);

// Whether one program comes before another in the order of the grid, whose outer axes are those of vmaps.
bool program_before(const Site& site, const int64_t* one, const int64_t* other);

}  // namespace jtile
