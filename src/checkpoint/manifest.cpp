#include "checkpoint/manifest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/layout.h"
#include "checkpoint/storage.h"
#include "checkpoint/strict_json.h"
#include "core/error.h"

namespace sbtrain {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "sbtrain checkpoint";
// The file ends in these bytes around 64 hexadecimal digits.
constexpr std::string_view kTrailerOpen = ",\n\"sha256\": \"";
constexpr std::string_view kTrailerClose = "\"\n}\n";
constexpr size_t kDigits = 64;
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;
constexpr int kManifestDepth = 8;  // more than a manifest has

std::string json_text(const std::string& text) {
  return json(text).dump();
}

// A number that is written as an integer: json would cut others, and beyond the range of the type
// the result is undefined.
int64_t integer(const json& value, const std::string& file) {
  if (!value.is_number_integer()) {
    fail(ExitCode::kNoCheckpoint, "{}: {:.100} is no integer", file, value.dump());
  }
  return value.get<int64_t>();
}

ManifestTensor tensor_from(const std::string& key, const json& value, int64_t version,
                           const std::string& file) {
  ManifestTensor tensor{
      key, {}, integer(value.at("range").at(0), file), integer(value.at("range").at(1), file), {}};
  for (const json& size : value.at("shape")) tensor.shape.push_back(integer(size, file));
  const int64_t numel = checked_numel(tensor.shape);
  if (numel < 0 || tensor.begin < 0 || tensor.end < tensor.begin || tensor.end > numel) {
    fail(ExitCode::kNoCheckpoint, "{}: tensor {}: range [{}, {}) is outside shape [{}]", file, key,
         tensor.begin, tensor.end, fmt::join(tensor.shape, ", "));
  }
  const json& digests = value.at("sha256");
  if (version == 1) {
    tensor.sha256 = {digests.get<std::string>()};
    return tensor;
  }
  tensor.sha256 = digests.get<std::vector<std::string>>();
  const uint64_t bytes = static_cast<uint64_t>(tensor.end - tensor.begin) * sizeof(float);
  if (static_cast<int64_t>(tensor.sha256.size()) != chunk_count(bytes)) {
    fail(ExitCode::kNoCheckpoint, "{}: tensor {}: {} checksums for {} bytes", file, key,
         tensor.sha256.size(), bytes);
  }
  return tensor;
}

ManifestFile file_from(const json& value, int64_t version, const std::string& file) {
  ManifestFile entry;
  entry.name = value.at("name").get<std::string>();
  entry.bytes = static_cast<uint64_t>(integer(value.at("bytes"), file));
  entry.sha256 = value.at("sha256").get<std::string>();
  if (entry.name.empty() || entry.name[0] == '.' || entry.name.find('/') != std::string::npos) {
    fail(ExitCode::kNoCheckpoint, "{}: bad file name {}", file, json_text(entry.name));
  }
  for (const auto& [key, tensor] : value.at("tensors").items()) {
    entry.tensors.push_back(tensor_from(key, tensor, version, file));
  }
  return entry;
}

// Checks the trailer, which finds any changed, missing or added byte.
void check_digest(std::string_view text, const std::string& file) {
  const size_t trailer = kTrailerOpen.size() + kDigits + kTrailerClose.size();
  const bool formed = text.size() > trailer && text.ends_with(kTrailerClose) &&
                      text.substr(text.size() - trailer).starts_with(kTrailerOpen);
  if (!formed) {
    fail(ExitCode::kNoCheckpoint, "{}: cut off or damaged: its checksum is missing ({} bytes)",
         file, text.size());
  }
  const std::string_view body = text.substr(0, text.size() - trailer);
  if (sha256_hex(body) != text.substr(body.size() + kTrailerOpen.size(), kDigits)) {
    fail(ExitCode::kNoCheckpoint, "{}: damaged: it does not match its own checksum", file);
  }
}

// Refuses counters that no save has reached.
void check_counters(const Manifest& manifest, const std::string& file) {
  const auto within = [&](const char* key, int64_t value, int64_t lowest, int64_t highest) {
    if (value >= lowest && value <= highest) return;
    fail(ExitCode::kNoCheckpoint, "{}: {} is {}, but lies between {} and {} in a checkpoint", file,
         key, value, lowest, highest);
  };
  within("step", manifest.step, 0, kMaxSequence);
  within("tokens", manifest.tokens, 0, INT64_MAX);
  within("world", manifest.world, 1, INT32_MAX);
  within("sequence", manifest.sequence, 0, kMaxSequence);
  within("last_good", manifest.last_good, -1, manifest.step);
}

void check_files(const Manifest& manifest, const std::string& file) {
  std::set<std::string_view> names;
  for (const ManifestFile& entry : manifest.files) {
    if (names.insert(entry.name).second) continue;
    fail(ExitCode::kNoCheckpoint, "{}: it lists {} twice", file, entry.name);
  }
}

}  // namespace

int64_t checked_numel(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel) || numel > INT64_MAX / 4) return -1;
  }
  return numel;
}

uint64_t Manifest::bytes() const {
  uint64_t sum = 0;
  for (const ManifestFile& file : files) sum += file.bytes;
  return sum;
}

std::string format_manifest_file(const ManifestFile& file) {
  std::string text =
      fmt::format("{{\"name\": {}, \"bytes\": {}, \"sha256\": \"{}\", \"tensors\": {{",
                  json_text(file.name), file.bytes, file.sha256);
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    const ManifestTensor& tensor = file.tensors[i];
    text += fmt::format("{}\n  {}: {{\"shape\": [{}], \"range\": [{}, {}], \"sha256\": {}}}",
                        i == 0 ? "" : ",", json_text(tensor.key), fmt::join(tensor.shape, ", "),
                        tensor.begin, tensor.end, json(tensor.sha256).dump());
  }
  return text + "}}";
}

ManifestFile parse_manifest_file(std::string_view text, const std::string& file) {
  try {
    return file_from(parse_strict(text, file, kManifestDepth), kCheckpointVersion, file);
  } catch (const json::exception& e) {
    fail(ExitCode::kNoCheckpoint, "{}: {}", file, e.what());
  }
}

std::string format_manifest(const Manifest& manifest) {
  std::string text = fmt::format(
      "{{\n\"format\": \"{}\",\n\"version\": {},\n\"step\": {},\n\"tokens\": {},\n\"world\": {},\n"
      "\"sequence\": {},\n\"created\": {},\n\"last_good\": {},\n\"fingerprints\": {},\n\"files\": "
      "[\n",
      kFormat, kCheckpointVersion, manifest.step, manifest.tokens, manifest.world,
      manifest.sequence, manifest.created, manifest.last_good, json(manifest.fingerprints).dump());
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    text += (i == 0 ? "" : ",\n") + format_manifest_file(manifest.files[i]);
  }
  text += "\n]";
  return text + std::string(kTrailerOpen) + sha256_hex(text) + std::string(kTrailerClose);
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  check_digest(text, file);
  try {
    const json value = parse_strict(text, file, kManifestDepth);
    if (value.at("format") != kFormat) {
      fail(ExitCode::kNoCheckpoint, "{}: not an sbtrain checkpoint", file);
    }
    const int64_t version = integer(value.at("version"), file);
    if (version < 1 || version > kCheckpointVersion) {
      fail(ExitCode::kNoCheckpoint, "{}: format version {}; this sbtrain reads versions 1 to {}",
           file, version, kCheckpointVersion);
    }
    Manifest manifest;
    manifest.version = version;
    manifest.step = integer(value.at("step"), file);
    manifest.tokens = integer(value.at("tokens"), file);
    manifest.world = integer(value.at("world"), file);
    manifest.sequence = integer(value.at("sequence"), file);
    manifest.created = integer(value.at("created"), file);
    if (value.contains("last_good")) {  // later than the other fields
      manifest.last_good = integer(value.at("last_good"), file);
    }
    check_counters(manifest, file);
    manifest.fingerprints = value.at("fingerprints").get<std::map<std::string, std::string>>();
    for (const json& entry : value.at("files")) {
      manifest.files.push_back(file_from(entry, version, file));
    }
    check_files(manifest, file);
    return manifest;
  } catch (const json::exception& e) {
    fail(ExitCode::kNoCheckpoint, "{}: {}", file, e.what());
  }
}

Manifest read_manifest(const std::filesystem::path& folder) {
  const InputFile file(folder / kManifestName);
  if (file.size() > kMaxManifestBytes) {
    fail(ExitCode::kNoCheckpoint, "{}: {} bytes is no manifest", file.path().string(), file.size());
  }
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return parse_manifest(text, file.path().string());
}

}  // namespace sbtrain
