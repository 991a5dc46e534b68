// Safetensors files. The data of every tensor of an accepted one can be read.
#include "checkpoint/safetensors.h"

#include <vector>

#include "fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  const test::MemoryFile file({reinterpret_cast<const char*>(data), size});
  test::may_refuse([&] {
    const SafetensorsReader reader(file.path());
    for (const SafetensorsEntry& entry : reader.entries()) {
      std::vector<char> bytes(entry.bytes());
      reader.read(reader.at(entry.name), 0, bytes.data(), bytes.size());
    }
  });
  return 0;
}
