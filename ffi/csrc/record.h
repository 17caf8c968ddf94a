// The launch record of a GPU kernel, JSON text that lowering/triton/record.py writes and describes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dims.h"
#include "expression.h"
#include "sites.h"

namespace jtile {

constexpr size_t kMaxParams = 512;   // of a kernel: 4 KiB of pointers, what every CUDA driver takes
constexpr size_t kMaxMaps = 32;      // tensor maps among them: as many bytes
constexpr size_t kMaxMapRank = 5;

// A part of an array as a tensor map describes it; innermost dimension first.
struct TensorMap {
  static constexpr int64_t kArray = -2, kOwn = -1;
  size_t buffer;            // an array; of no meaning where it is of the memory of a device
  int64_t device = kArray;  // of the group of devices that talk, whose block it is of; kOwn: the one that launches
  int64_t offset = 0;       // of the block
  uint32_t dtype;  // a CUtensorMapDataType
  size_t rank;
  Expression dims[kMaxMapRank];
  Expression strides[kMaxMapRank];  // bytes, of the dimensions behind the innermost: rank - 1 of them
  uint32_t box[kMaxMapRank];
  uint32_t swizzle;  // a CUtensorMapSwizzle
  bool nan_fill;
};

struct Param {
  enum class Kind : uint8_t { kBuffer, kTensorMap, kI32, kI64, kCounters, kDevices, kNull };
  Kind kind;
  size_t index = 0;  // of an array, or of a tensor map
  Expression value;
};

// Where print and assert sites leave their log, and what they say.
struct SitesLog {
  size_t buffer;
  int64_t bytes;
  std::vector<Expression> grid;  // sides, the outermost first
  std::vector<Site> list;
};

// What the record of a kernel for an NPU says instead of threads, shared memory and clusters.
struct Npu {
  int64_t task = 10;      // which cores run it: 10 vector cores, 20 cube cores, 31 and 32 both
  int64_t workspace = 0;  // bytes of global memory that the compiler wants for each block
  int64_t lock = 0;       // bytes of global memory that blocks take turns by
};

// What a kernel that talks to other devices says of its block of memory on each of them, in bytes; see
// lowering/triton/emit_devices.py.
struct Talking {
  Json facts;  // the axes and the signals
  size_t table, counters, memory, bytes;
  bool waits;    // programs wait for each other
  SitesLog log;  // no log: the sites that reports name, and the grid of the programs
};

struct Record {
  std::string name, symbol, arch;
  uint32_t threads = 0, shared = 0, cluster = 1;
  bool programmatic = false, cooperative = false;
  bool node = false;  // of XLA's command buffer itself, instead of a graph in it
  Expression grid;
  std::vector<Param> params;
  std::vector<TensorMap> maps;
  std::vector<size_t> zeroed;
  std::optional<SitesLog> sites;
  std::optional<Npu> npu;
  std::optional<Talking> talking;
  std::vector<Dimension> dims;
  size_t arrays = 0;    // how many the call has at least
  size_t counters = 0;  // int32 at which programs arrive; zero before and after every call
};

// Throws Error for text that is no launch record.
Record parse_record(std::string_view text);

}  // namespace jtile
