#include "sites.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <mutex>

#include <poll.h>
#include <unistd.h>

#include "error.h"
#include "json.h"

namespace jtile {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 32;
constexpr size_t kMaxRank = 32;
constexpr int64_t kMaxAxes = 256;

SiteArg parse_arg(const Json& json) {
  SiteArg arg{&dtype_of(json.at("dtype").text("dtype")), {}};
  int64_t size = 1;
  const JsonList& shape = json.at("shape").list("shape");
  if (shape.size() > kMaxRank) fail(Code::kInvalidArgument, "a printed value has rank ", shape.size());
  for (const Json& side : shape) {
    int64_t n = side.integer("shape");
    if (n < 0 || n > kMaxElements / std::max<int64_t>(1, size))
      fail(Code::kInvalidArgument, "a printed value has a side of ", n);
    size *= n;
    arg.shape.push_back(n);
  }
  return arg;
}

// "2:.3f" -> argument 2 with a specification; "" -> the next argument.
Piece parse_field(std::string_view field, std::string literal, const std::vector<SiteArg>& args, int64_t& next) {
  size_t colon = field.find(':');
  std::string_view name = field.substr(0, colon);
  Piece piece{std::move(literal), next, {}};
  if (name.empty()) {
    ++next;
  } else {
    auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), piece.arg);
    if (error != std::errc() || end != name.data() + name.size())
      fail(Code::kInvalidArgument, "the print field '{", field, "}' is not a number");
  }
  if (piece.arg < 0 || piece.arg >= static_cast<int64_t>(args.size())) {
    fail(Code::kInvalidArgument, "the print field '{", field, "}' names argument ", piece.arg, " of ", args.size());
  }
  if (colon != std::string_view::npos)
    piece.spec = parse_spec(field.substr(colon + 1), *args[static_cast<size_t>(piece.arg)].dtype);
  return piece;
}

std::vector<Piece> parse_format(std::string_view format, const std::vector<SiteArg>& args) {
  std::vector<Piece> pieces;
  std::string literal;
  int64_t next = 0;
  for (size_t at = 0; at < format.size(); ++at) {
    char c = format[at];
    if (c != '{' && c != '}') {
      literal += c;
    } else if (at + 1 < format.size() && format[at + 1] == c) {  // {{ and }} stand for one brace
      literal += c, ++at;
    } else {
      size_t end = format.find('}', at);
      if (c == '}' || end == std::string_view::npos)
        fail(Code::kInvalidArgument, "the print format '", format, "' has a lone '", c, "'");
      pieces.push_back(parse_field(format.substr(at + 1, end - at - 1), std::move(literal), args, next));
      literal.clear();
      at = end;
    }
  }
  pieces.push_back({literal, -1, {}});
  return pieces;
}

// An optional whole number.
size_t parse_count(const Json& json, const char* key, size_t otherwise) {
  const JsonDict* dict = std::get_if<JsonDict>(&json.value);
  if (dict == nullptr || dict->find(key) == dict->end()) return otherwise;
  int64_t count = json.at(key).integer(key);
  if (count < 0 || count > kMaxAxes) fail(Code::kInvalidArgument, "a site has ", count, " ", key);
  return static_cast<size_t>(count);
}

std::string tuple_text(const int64_t* begin, size_t count) {
  std::string text = "(";
  for (size_t k = 0; k < count; ++k) text += concat(k == 0 ? "" : ", ", begin[k]);
  return text + ")";
}

Site parse_site(const Json& json) {
  Site site{};
  const std::string& kind = json.at("kind").text("kind");
  if (kind != "print" && kind != "assert") fail(Code::kInvalidArgument, "a site has the unknown kind '", kind, "'");
  site.is_print = kind == "print";
  site.where = json.at("where").text("where");
  site.axes = parse_count(json, "axes", 3);
  site.lanes = parse_count(json, "lanes", 0);
  if (!site.is_print) {
    site.message = json.at("message").text("message");
    return site;
  }
  for (const Json& arg : json.at("args").list("args")) site.args.push_back(parse_arg(arg));
  site.pieces = parse_format(json.at("format").text("format"), site.args);
  return site;
}

}  // namespace

std::vector<Site> parse_sites(std::string_view json) {
  if (json.empty()) return {};
  return parse_sites(parse_json(json));
}

std::vector<Site> parse_sites(const Json& list) {
  std::vector<Site> sites;
  for (const Json& site : list.list("sites")) sites.push_back(parse_site(site));
  return sites;
}

std::string print_text(const Site& site, void* const* args) {
  std::string text;
  for (const Piece& piece : site.pieces) {
    text += piece.literal;
    if (piece.arg < 0) continue;
    const SiteArg& arg = site.args[static_cast<size_t>(piece.arg)];
    text += array_text(*arg.dtype, arg.shape, args[piece.arg], piece.spec);
  }
  return text;
}

std::string printed_line(const std::string& kernel, const Site& site, const int64_t* pid, void* const* args) {
  return concat("[", kernel, " ", program_text(site, pid), "] ", print_text(site, args), "\n");
}

void write_out(const std::string& text) {
  static std::mutex* const mutex = new std::mutex;
  std::lock_guard lock(*mutex);
  size_t done = 0;
  while (done < text.size()) {
    ssize_t n = write(STDOUT_FILENO, text.data() + done, text.size() - done);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      pollfd wait{STDOUT_FILENO, POLLOUT, 0};
      poll(&wait, 1, 1000);
    } else if (errno != EINTR) {
      return;
    }
  }
}

void fail_assertion(const std::string& kernel, const Site& site, const int64_t* pid) {
  fail(Code::kFailedPrecondition, "kernel ", kernel, ": assertion failed: ", site.message, " (program ",
       program_text(site, pid), ")\n  at ", site.where);
}

std::string program_text(const Site& site, const int64_t* pid) {
  std::string text = tuple_text(pid, site.axes);
  if (site.lanes == 0) return text;
  const int64_t* lanes = pid + site.axes;
  return concat(text, ", lane ", site.lanes == 1 ? concat(*lanes) : tuple_text(lanes, site.lanes));
}

bool program_before(const Site& site, const int64_t* one, const int64_t* other) {
  const int64_t *lanes = one + site.axes, *others = other + site.axes;
  auto [a, b] = std::mismatch(lanes, lanes + site.lanes, others);
  if (a != lanes + site.lanes) return *a < *b;
  return std::lexicographical_compare(one, one + site.axes, other, other + site.axes);
}

}  // namespace jtile
