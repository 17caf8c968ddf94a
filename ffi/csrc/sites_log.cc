#include "sites_log.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace jtile {
namespace {

constexpr size_t kHead = 16;  // of a record
constexpr uint64_t kFirst = (uint64_t{1} << 63) - 1;

struct Header {
  uint64_t used, failure, dropped, zero;
};
static_assert(sizeof(Header) == kLogHeader);

struct Entry {
  int32_t site, size;
  int64_t program;
  const char* args;
};

size_t aligned(size_t bytes) { return (bytes + 7) / 8 * 8; }

size_t arg_bytes(const SiteArg& arg) {
  size_t count = 1;
  for (int64_t n : arg.shape) count *= static_cast<size_t>(n);
  return count * static_cast<size_t>(arg.dtype->bytes());
}

const Site& site_of(const SitesLog& log, int64_t site, bool is_print) {
  auto count = static_cast<int64_t>(log.list.size());
  if (site < 0 || site >= count || log.list[static_cast<size_t>(site)].is_print != is_print)
    fail(Code::kInternal, "the log of its sites names site ", site, ", which does not exist");
  return log.list[static_cast<size_t>(site)];
}

// The ids of a program: its own, padded with zeros, and behind them those of vmaps, whose axes are the outer ones.
std::vector<int64_t> ids_of(const SitesLog& log, const int64_t* symbols, const Site& site, int64_t program) {
  std::vector<int64_t> grid(log.grid.size());
  for (size_t k = log.grid.size(); k-- > 0;) {
    int64_t side = std::max<int64_t>(1, log.grid[k].value(symbols));
    grid[k] = program % side;
    program /= side;
  }
  size_t own = grid.size() - site.lanes;
  std::vector<int64_t> ids(site.axes + site.lanes, 0);
  std::copy_n(grid.begin() + static_cast<std::ptrdiff_t>(site.lanes), std::min(own, site.axes), ids.begin());
  std::copy_n(grid.begin(), site.lanes, ids.begin() + static_cast<std::ptrdiff_t>(site.axes));
  return ids;
}

std::vector<Entry> read_entries(const SitesLog& log, const std::vector<char>& bytes) {
  std::vector<Entry> entries;
  size_t at = kLogHeader;
  while (bytes.size() - at >= kHead) {
    Entry entry{};
    std::memcpy(&entry.site, bytes.data() + at, 4);
    std::memcpy(&entry.size, bytes.data() + at + 4, 4);
    std::memcpy(&entry.program, bytes.data() + at + 8, 8);
    if (entry.size == 0) break;
    size_t need = kHead;
    for (const SiteArg& arg : site_of(log, entry.site, true).args) need = aligned(need) + arg_bytes(arg);
    auto size = static_cast<size_t>(entry.size);
    if (entry.size < 0 || size % 8 != 0 || size < need || size > bytes.size() - at || entry.program < 0)
      fail(Code::kInternal, "the log of its sites is damaged at byte ", at);
    entry.args = bytes.data() + at + kHead;
    entries.push_back(entry);
    at += size;
  }
  auto before = [](const Entry& a, const Entry& b) { return a.program < b.program; };
  std::stable_sort(entries.begin(), entries.end(), before);
  return entries;
}

std::string entry_text(const std::string& kernel, const SitesLog& log, const int64_t* symbols, const Entry& entry) {
  const Site& site = site_of(log, entry.site, true);
  std::vector<void*> args;
  size_t at = 0;
  for (const SiteArg& arg : site.args) {
    args.push_back(const_cast<char*>(entry.args + at));
    at = aligned(at + arg_bytes(arg));
  }
  return printed_line(kernel, site, ids_of(log, symbols, site, entry.program).data(), args.data());
}

}  // namespace

size_t log_records(const char* header, int64_t bytes) {
  uint64_t used = 0;
  std::memcpy(&used, header, sizeof used);
  return static_cast<size_t>(std::min<uint64_t>(used, static_cast<uint64_t>(bytes) - kLogHeader));
}

std::string program_of(const SitesLog& log, const int64_t* symbols, const Site& site, int64_t program) {
  return program_text(site, ids_of(log, symbols, site, program).data());
}

void report_sites(const std::string& kernel, const SitesLog& log, const int64_t* symbols,
                  const std::vector<char>& bytes) {
  Header header{};
  std::memcpy(&header, bytes.data(), sizeof header);
  std::string text;
  try {
    for (const Entry& entry : read_entries(log, bytes)) text += entry_text(kernel, log, symbols, entry);
  } catch (const Error& error) {
    fail(error.code(), "kernel ", kernel, ": ", error.what());
  }
  if (header.dropped != 0)
    text += concat("[", kernel, "] ", header.dropped, " more prints were lost: the log of a launch holds ", log.bytes,
                   " bytes\n");
  write_out(text);
  if (header.failure == 0) return;
  uint64_t code = kFirst - header.failure;
  const Site& site = site_of(log, static_cast<int64_t>(code & 0xffff), false);
  fail_assertion(kernel, site, ids_of(log, symbols, site, static_cast<int64_t>(code >> 16)).data());
}

}  // namespace jtile
