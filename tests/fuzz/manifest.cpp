// Manifests, with a seal that fits, since otherwise nothing behind the seal would be reached.
#include "checkpoint/manifest.h"

#include "core/sha256.h"
#include "fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  const std::string body(reinterpret_cast<const char*>(data), size);
  test::may_refuse([&] { parse_manifest(body, "input"); });
  test::may_refuse([&] { parse_manifest_file(body, "input"); });
  test::may_refuse([&] {
    const std::string sealed = body + ",\n\"sha256\": \"" + sha256_hex(body) + "\"\n}\n";
    const Manifest manifest = parse_manifest(sealed, "input");
    parse_manifest(format_manifest(manifest), "printed");
  });
  return 0;
}
