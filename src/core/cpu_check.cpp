// Compiled for any x86-64 (CMakeLists.txt), so it includes and calls nothing that is not.
#include <unistd.h>

#include <cstring>

#include "core/cpu_level.h"

namespace sbtrain {
namespace {

void write_text(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;  // nobody is left to be told
}

}  // namespace

const char* missing_cpu_feature([[maybe_unused]] int level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#define SBTRAIN_NEEDS(at_level, feature) \
  if (level >= (at_level) && !__builtin_cpu_supports(feature)) return feature;
  SBTRAIN_NEEDS(2, "sse4.2")
  SBTRAIN_NEEDS(2, "popcnt")
  SBTRAIN_NEEDS(3, "avx")
  SBTRAIN_NEEDS(3, "avx2")
  SBTRAIN_NEEDS(3, "fma")
  SBTRAIN_NEEDS(3, "bmi")
  SBTRAIN_NEEDS(3, "bmi2")
  SBTRAIN_NEEDS(4, "avx512f")
  SBTRAIN_NEEDS(4, "avx512bw")
  SBTRAIN_NEEDS(4, "avx512cd")
  SBTRAIN_NEEDS(4, "avx512dq")
  SBTRAIN_NEEDS(4, "avx512vl")
#undef SBTRAIN_NEEDS
#endif
  return nullptr;
}

void require_cpu_level() {
  const char* missing = missing_cpu_feature(kCpuLevel);
  if (missing == nullptr) return;
  const char level[] = {static_cast<char>('0' + kCpuLevel), '\0'};
  write_text("error: this sbtrain is compiled for x86-64-v");
  write_text(level);
  write_text(", and this processor lacks ");
  write_text(missing);
  write_text(": build it from source on this machine, with -DSBTRAIN_NATIVE=ON\n");
  ::_exit(2);
}

}  // namespace sbtrain
