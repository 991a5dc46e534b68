#include "core/host_name.h"

#include <unistd.h>

#include <array>

namespace sbtrain {

std::string host_name() {
  std::array<char, 256> name{};
  const bool named = ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != '\0';
  return named ? name.data() : "unknown";
}

}  // namespace sbtrain
