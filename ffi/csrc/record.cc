#include "record.h"

#include <algorithm>

#include "error.h"

namespace jtile {
namespace {

constexpr int64_t kMaxArrays = 4096;
constexpr int64_t kMaxThreads = 1024, kMaxShared = 1 << 24, kMaxCluster = 16, kMaxBox = 256;
constexpr int64_t kMaxCounters = 1 << 24;
constexpr int64_t kMaxWorkspace = int64_t{1} << 40;
constexpr int64_t kLeastLog = 32, kMaxLog = int64_t{1} << 32;
constexpr size_t kMaxAxes = 256;
constexpr int64_t kBlockHead = 32;  // bytes of a block in front of the place of its device

// A number of a record that lies in a range.
int64_t number(const Json& json, const char* what, int64_t low, int64_t high) {
  int64_t n = json.integer(what);
  if (n < low || n > high) fail(Code::kInvalidArgument, "its ", what, " is ", n, "; expected ", low, " to ", high);
  return n;
}

class Reader {
 public:
  Record read(const Json& json) {
    record_.name = json.at("name").text("name");
    try {
      read_head(json);
      read_dims(json.at("dims"));
      record_.grid = expression(json.at("grid"));
      for (const Json& param : json.at("params").list("params")) read_param(param);
      for (const Json& k : json.at("zeroed").list("zeroed")) record_.zeroed.push_back(array(k));
      if (!(record_.npu && !has(json, "sites")) && !json.at("sites").is_null()) read_sites(json.at("sites"));
      read_attributes(json.at("attributes"));
      if (has(json, "devices")) read_devices(json.at("devices"));
      if (talks_ != record_.talking.has_value() || (of_devices_ && !talks_))
        fail(Code::kInvalidArgument, "it has to say of what devices its parameter is");
    } catch (const Error& error) {
      fail(error.code(), "kernel ", record_.name, ": the launch record is refused: ", error.what());
    }
    return std::move(record_);
  }

 private:
  void read_head(const Json& json) {
    record_.symbol = json.at("symbol").text("symbol");
    record_.arch = json.at("arch").text("arch");
    if (has(json, "task")) {
      read_npu(json);
      return;
    }
    record_.threads = static_cast<uint32_t>(number(json.at("threads"), "threads", 1, kMaxThreads));
    record_.shared = static_cast<uint32_t>(number(json.at("shared"), "shared", 0, kMaxShared));
    record_.cluster = static_cast<uint32_t>(number(json.at("cluster"), "cluster", 1, kMaxCluster));
  }

  void read_npu(const Json& json) {
    Npu npu;
    npu.task = number(json.at("task"), "task", 10, 49);
    npu.workspace = number(json.at("workspace"), "workspace of a block", 0, kMaxWorkspace);
    npu.lock = number(json.at("lock"), "lock", 0, kMaxWorkspace);
    record_.npu = npu;
  }

  static bool has(const Json& json, const char* key) { return json.dict("launch record").count(key) != 0; }

  void read_dims(const Json& json) {
    std::vector<int64_t> numbers;
    for (const Json& n : json.list("dims")) numbers.push_back(n.integer("dims"));
    record_.dims = read_dimensions(numbers);
    std::vector<bool> known;
    for (const Dimension& d : record_.dims) {
      if (d.operand >= kMaxArrays) fail(Code::kInvalidArgument, "a dimension of operand ", d.operand);
      record_.arrays = std::max(record_.arrays, static_cast<size_t>(d.operand) + 1);
      symbols_ = std::max(symbols_, static_cast<size_t>(d.symbol) + 1);
      known.resize(symbols_);
      known[static_cast<size_t>(d.symbol)] = true;
    }
    if (std::find(known.begin(), known.end(), false) != known.end())
      fail(Code::kInvalidArgument, "a symbol of its ", symbols_, " is the size of no dimension");
  }

  Expression expression(const Json& json) const { return {json, symbols_}; }

  size_t array(const Json& json) {
    auto k = static_cast<size_t>(number(json, "buffer", 0, kMaxArrays - 1));
    record_.arrays = std::max(record_.arrays, k + 1);
    return k;
  }

  void read_param(const Json& json) {
    const std::string& kind = json.at("kind").text("kind");
    if (record_.params.size() == kMaxParams)
      fail(Code::kInvalidArgument, "the kernel has more than ", kMaxParams, " parameters");
    if (kind == "buffer") {
      record_.params.push_back({Param::Kind::kBuffer, array(json.at("buffer")), {}});
    } else if (kind == "tensormap") {
      record_.params.push_back({Param::Kind::kTensorMap, record_.maps.size(), {}});
      read_map(json);
    } else if (kind == "i32") {
      record_.params.push_back({Param::Kind::kI32, 0, expression(json.at("value"))});
    } else if (kind == "i64") {
      record_.params.push_back({Param::Kind::kI64, 0, expression(json.at("value"))});
    } else if (kind == "counters") {
      if (record_.counters != 0) fail(Code::kInvalidArgument, "the kernel has counters in two parameters");
      record_.counters = static_cast<size_t>(number(json.at("count"), "number of counters", 1, kMaxCounters));
      record_.params.push_back({Param::Kind::kCounters, 0, {}});
    } else if (kind == "devices") {
      if (talks_) fail(Code::kInvalidArgument, "the kernel has its devices in two parameters");
      talks_ = true;
      record_.params.push_back({Param::Kind::kDevices, 0, {}});
    } else if (kind == "null") {
      record_.params.push_back({Param::Kind::kNull, 0, {}});
    } else {
      fail(Code::kInvalidArgument, "a parameter has the unknown kind '", kind, "'");
    }
  }

  void read_map(const Json& json) {
    if (record_.maps.size() == kMaxMaps)
      fail(Code::kInvalidArgument, "the kernel has more than ", kMaxMaps, " tensor maps");
    TensorMap map{};
    if (has(json, "device")) {
      map.device = number(json.at("device"), "device of a tensor map", TensorMap::kOwn, 63);
      map.offset = number(json.at("offset"), "offset of a tensor map", 0, kMaxWorkspace);
      of_devices_ = true;
    } else {
      map.buffer = array(json.at("buffer"));
    }
    map.dtype = static_cast<uint32_t>(number(json.at("dtype"), "dtype of a tensor map", 0, 15));
    map.swizzle = static_cast<uint32_t>(number(json.at("swizzle"), "swizzle", 0, 3));
    const JsonList &dims = json.at("dims").list("dims"), &strides = json.at("strides").list("strides");
    const JsonList& box = json.at("box").list("box");
    map.rank = dims.size();
    if (map.rank < 1 || map.rank > kMaxMapRank || strides.size() != map.rank - 1 || box.size() != map.rank)
      fail(Code::kInvalidArgument, "a tensor map of ", map.rank, " dims, ", strides.size(), " strides and a box of ",
           box.size(), " sides");
    for (size_t k = 0; k < map.rank; ++k) {
      map.dims[k] = expression(dims[k]);
      map.box[k] = static_cast<uint32_t>(number(box[k], "side of a tensor map's box", 1, kMaxBox));
      if (k > 0) map.strides[k - 1] = expression(strides[k - 1]);
    }
    const std::string& fill = json.at("fill").text("fill");
    if (fill != "zero" && fill != "nan") fail(Code::kInvalidArgument, "a tensor map has the unknown fill '", fill, "'");
    map.nan_fill = fill == "nan";
    record_.maps.push_back(std::move(map));
  }

  void read_sites(const Json& json) {
    SitesLog log{array(json.at("buffer")), number(json.at("bytes"), "bytes of a log", kLeastLog, kMaxLog), {}, {}};
    for (const Json& side : json.at("grid").list("grid")) log.grid.push_back(expression(side));
    log.list = parse_sites(json.at("list"));
    for (const Site& site : log.list) {
      if (log.grid.size() > kMaxAxes || site.lanes > log.grid.size())
        fail(Code::kInvalidArgument, "a site has ", site.lanes, " lanes of a grid of ", log.grid.size(), " axes");
    }
    record_.sites = std::move(log);
  }

  void read_devices(const Json& json) {
    auto size = [&](const char* what, int64_t low) {
      return static_cast<size_t>(number(json.at(what), what, low, kMaxWorkspace));
    };
    Talking talking{json, size("table", kBlockHead), 0, 0, 0, false, {0, 0, {}, {}}};
    talking.counters = size("counters", static_cast<int64_t>(talking.table));
    talking.memory = size("memory", static_cast<int64_t>(talking.counters));
    talking.bytes = size("bytes", static_cast<int64_t>(talking.memory));
    talking.waits = json.at("waits").boolean("waits");
    for (const Json& side : json.at("grid").list("grid"))
      talking.log.grid.push_back(Expression(side, 0));
    talking.log.list = parse_sites(json.at("list"));
    if (talking.log.grid.size() > kMaxAxes) fail(Code::kInvalidArgument, "a grid of ", talking.log.grid.size(), " axes");
    for (const Site& site : talking.log.list)
      if (site.lanes > talking.log.grid.size()) fail(Code::kInvalidArgument, "a site has ", site.lanes, " lanes");
    record_.talking = std::move(talking);
  }

  void read_attributes(const Json& json) {
    for (const auto& [key, value] : json.dict("attributes")) {
      bool* known = key == "programmatic"  ? &record_.programmatic
                    : key == "cooperative" ? &record_.cooperative
                    : key == "node"        ? &record_.node
                                           : nullptr;
      if (known == nullptr) fail(Code::kInvalidArgument, "the launch has the unknown attribute '", key, "'");
      *known = value.boolean(key.c_str());
    }
  }

  Record record_;
  bool talks_ = false;
  bool of_devices_ = false;  // tensor maps are of their memory
  size_t symbols_ = 0;
};

}  // namespace

Record parse_record(std::string_view text) { return Reader().read(parse_json(text)); }

}  // namespace jtile
