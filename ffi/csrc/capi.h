// What the C functions of the library share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>

namespace jtile {

// Runs `body`; 0, or -1 with the message in `error` (cut to fit, always ended).
template <typename Body>
int32_t to_status(char* error, int64_t capacity, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    if (capacity > 0) {
      size_t n = std::min(std::strlen(e.what()), static_cast<size_t>(capacity - 1));
      std::memcpy(error, e.what(), n);
      error[n] = '\0';
    }
    return -1;
  }
}

}  // namespace jtile
