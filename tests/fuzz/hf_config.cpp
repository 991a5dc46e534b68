// config.json of a Hugging Face folder. A configuration that it means must be printed such that it
// reads as the same.
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "checkpoint/strict_json.h"
#include "config/schema.h"
#include "export/hf_folder.h"
#include "fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  const std::string text(reinterpret_cast<const char*>(data), size);
  test::may_refuse([&] {
    const Config config = config_from_hf(parse_strict(text, "config.json", 32), true, "input");
    if (parse_config(config_yaml(config), "printed") != config) std::abort();
  });
  return 0;
}
