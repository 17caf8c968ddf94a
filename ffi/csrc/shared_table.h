// Loaded things shared by their content: CPU objects here, GPU modules of one device likewise.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "sha256.h"

namespace jtile {

// Counts references: an entry lives as long as somebody holds the pointer that `acquire` gave. Meant to be a leaked
// static, since executables that outlive static destructors may still release entries.
template <typename T>
class SharedTable {
 public:
  // The entry for these bytes: that of an earlier call which is still held, or a new one from `make()`, a unique_ptr.
  // What `make` throws passes through and leaves the table as it was.
  template <typename Make>
  std::shared_ptr<const T> acquire(std::string_view bytes, Make make) {
    Digest key = sha256(bytes);
    std::lock_guard lock(mutex_);
    auto found = entries_.find(key);
    if (found != entries_.end()) {
      if (std::shared_ptr<const T> entry = found->second.lock()) return entry;
    }
    std::unique_ptr<const T> made = make();
    ++loaded_;
    std::weak_ptr<const T>& slot = entries_[key];
    std::shared_ptr<const T> entry(made.release(), [this, key](const T* old) { release(key, old); });
    slot = entry;
    return entry;
  }

  int64_t alive() {
    std::lock_guard lock(mutex_);
    int64_t count = 0;
    for (const auto& [key, entry] : entries_) count += !entry.expired();
    return count;
  }

  // How many entries were ever made.
  int64_t loaded() {
    std::lock_guard lock(mutex_);
    return loaded_;
  }

 private:
  void release(const Digest& key, const T* old) {
    delete old;
    std::lock_guard lock(mutex_);
    auto found = entries_.find(key);
    // Another caller may have made the same entry again since the last holder left.
    if (found != entries_.end() && found->second.expired()) entries_.erase(found);
  }

  std::mutex mutex_;
  std::map<Digest, std::weak_ptr<const T>> entries_;
  int64_t loaded_ = 0;
};

}  // namespace jtile
