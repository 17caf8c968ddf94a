// SHA-256 (FIPS 180-4), the key of the image table.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace jtile {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view bytes);

}  // namespace jtile
