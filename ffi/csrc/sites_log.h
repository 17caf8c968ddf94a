// The log that the print and assert sites of a GPU kernel leave; lowering/triton/emit_debug.py describes its layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "record.h"

namespace jtile {

constexpr size_t kLogHeader = 32;

// Bytes of records behind the header of a log of `bytes`, as the header tells.
size_t log_records(const char* header, int64_t bytes);

// Writes the prints of a log, in the order of their programs, and throws the error of a failed assertion. `bytes`: the
// header and the records. Throws Error for a log that no kernel writes, too.
void report_sites(const std::string& kernel, const SitesLog& log, const int64_t* symbols,
                  const std::vector<char>& bytes);

// "(0, 1, 2)" for the program at this place of the grid of a log.
std::string program_of(const SitesLog& log, const int64_t* symbols, const Site& site, int64_t program);

}  // namespace jtile
