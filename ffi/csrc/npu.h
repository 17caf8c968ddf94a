// A kernel for an Ascend NPU that is called with arrays of the host: copied there, run, waited for, and copied back.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "gpu.h"
#include "record.h"

namespace jtile {

class Acl;
class NpuModule;

// One compiled kernel at one call site.
class NpuKernel {
 public:
  // Checks the record and the image; opens no driver. Throws Error.
  NpuKernel(std::string_view image, std::string_view record, int64_t device);
  ~NpuKernel();
  NpuKernel(const NpuKernel&) = delete;
  NpuKernel& operator=(const NpuKernel&) = delete;

  const Record& record() const { return record_; }

  // Runs one call: `operands` of the `count` arrays are read, the others written; a result may be the array of an
  // operand. `sizes` are those of the record's dynamic dimensions. Throws Error.
  void call(const Array* arrays, size_t operands, size_t count, const int64_t* sizes);

 private:
  void run(Acl& acl, const Array* arrays, size_t operands, size_t count, const int64_t* symbols);
  std::string pack(const std::vector<void*>& data, void* sync, void* workspace, const int64_t* symbols,
                   int32_t blocks) const;
  template <typename Body>
  void named(Body body) const;

  Record record_;
  std::string image_;
  int32_t device_;
  std::shared_ptr<const NpuModule> module_;
  std::mutex mutex_;  // one call at a time: its arrays take memory of the device
};

}  // namespace jtile
