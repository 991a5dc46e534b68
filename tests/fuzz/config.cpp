// The YAML of configurations. One that is accepted must be printed such that it reads as the same.
#include <cstdlib>

#include "config/schema.h"
#include "fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  const std::string text(reinterpret_cast<const char*>(data), size);
  test::may_refuse([&] {
    const Config config = parse_config(text, "input");
    if (parse_config(config_yaml(config), "printed") != config) std::abort();
  });
  return 0;
}
