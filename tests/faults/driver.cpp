#include "faults/driver.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "core/sha256.h"

namespace sbtrain::test {
namespace {

constexpr const char* kConfiguration = R"(
name: faults
seed: 3
device: cpu
model: {layers: 1, width: 16, inner: 24, heads: 1, vocab: 400}
train: {sequence_length: 32, micro_batch: 1, batch: 2, lr: 3e-3, optimizer: %o}
data: {sources: [{path: %a}], tokenizer: %t, validation: [%b]}
stages: [{name: only, length: 12 steps, schedule: {type: constant}}]
validation: {every: 6 steps, tokens: 256}
checkpoint: {every: 4 steps, keep: 2}
metrics: {every: 1}
)";

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

}  // namespace

int rounds(int few) {
  const char* text = std::getenv("FAULT_ROUNDS");
  return few * std::max(1, text == nullptr ? 1 : std::atoi(text));
}

Faults::Faults() {
  environment_["OMP_NUM_THREADS"] = "1";
  deadline_ = 60;
}

void Faults::SetUpTestSuite() {
  shared_ = new TemporaryFolder;
  fs::permissions(shared_->path(), fs::perms(0755));
  std::istringstream text(read_file(SBTRAIN_TEST_TEXT));
  std::string lines;
  for (std::string line; lines.size() < 200000 && std::getline(text, line);) lines += line + "\n";
  make_training_files(shared_->path(),
                      {{"a", lines}, {"b", lines.substr(0, lines.find('\n') + 1)}});
  // Muon keeps AdamW's moments for all that is no matrix of a layer: a run has the state of both.
  const char* optimizer = std::getenv("FAULT_OPTIMIZER");
  std::string text_of_config = kConfiguration;
  for (const auto& [place, value] : {std::pair<std::string, std::string>("%a", store()),
                                     {"%b", shared("b.h5")},
                                     {"%t", tokenizer()},
                                     {"%o", optimizer == nullptr ? "muon" : optimizer}}) {
    text_of_config = replaced(text_of_config, place, value);
  }
  write_file(config(), text_of_config);
  must_run({"--config", config(), "--out", trained()}, shared("log"), {{"OMP_NUM_THREADS", "1"}});
}

void Faults::TearDownTestSuite() {
  delete shared_;
  shared_ = nullptr;
}

void Faults::SetUp() {
  fs::permissions(folder_.path(), fs::perms::all);
}

std::vector<std::string> Faults::left() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

int Faults::run_in(const std::string& setup, const Arguments& arguments,
                   const std::string& redirection, double seconds) {
  // Without a pipe, exec replaces the shell, so that the end by a signal is visible as such.
  const bool piped = redirection.find('|') != std::string::npos;
  const std::string script = (setup.empty() ? "" : setup + "\n") + (piped ? "" : "exec ") +
                             "\"$@\" " + redirection + (piped ? "\nexit ${PIPESTATUS[0]}" : "");
  std::vector<std::string> command = {"bash", "-c", script, "bash", program()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run_command(command, seconds);
}

std::string Faults::address_limit(int mebibytes) {
  static int libraries = 0;  // MiB
  for (int tried = 128; libraries == 0; tried += tried / 4) {
    const std::string limit = "ulimit -v " + std::to_string(tried * 1024);
    if (run_in(limit, {"data", "info", store()}) == 0 || tried > (1 << 17)) libraries = tried;
  }
  return "ulimit -v " + std::to_string((libraries + mebibytes) * 1024);
}

std::string Faults::as_another_user(const std::string& setup) {
  if (::getuid() != 0) return setup;
  return setup + "; set -- setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\"";
}

std::string Faults::without_threads(const std::string& setup) {
  return as_another_user("ulimit -u 1; export ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0; " + setup);
}

Faults::Arguments Faults::with_defaults(Arguments arguments, const Arguments& more,
                                        const Arguments& defaults) {
  for (size_t i = 0; i < defaults.size(); i += 2) {
    if (std::find(more.begin(), more.end(), defaults[i]) != more.end()) continue;
    arguments.insert(arguments.end(), {defaults[i], defaults[i + 1]});
  }
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

Faults::Arguments Faults::prepare(const std::string& input, const std::string& output,
                                  const Arguments& more) {
  return with_defaults({"prepare", "--input", input, "--output", output}, more,
                       {"--tokenizer", tokenizer(), "--threads", "2"});
}

Faults::Arguments Faults::train(const std::string& out, const Arguments& more) {
  return with_defaults({"train", "--out", out}, more, {"--config", config()});
}

Faults::Arguments Faults::generate(const Arguments& more) {
  return with_defaults({"generate"}, more,
                       {"--checkpoint", trained(), "--prompt", "The", "--max-tokens", "8"});
}

void flip_bit(const fs::path& file, uint64_t bit) {
  std::string bytes = read_file(file);
  bytes.at(bit / 8) = static_cast<char>(bytes.at(bit / 8) ^ (1 << (bit % 8)));
  write_file(file, bytes);
}

void craft_tokens(const fs::path& store, const std::string& tokens, size_t at_byte) {
  constexpr size_t kBlock = 128 * 1024;
  constexpr size_t kSeal = 96;
  std::string bytes = read_file(store);
  const size_t seal = bytes.size() - kSeal;
  const auto number = [&](size_t at) {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  };
  const auto hash = [](const std::string& text) {
    const Digest digest = sha256(text.data(), text.size());
    return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
  };
  const uint64_t begin = number(seal + 16);
  const uint64_t size = number(seal + 24);
  const size_t block = at_byte / kBlock * kBlock;
  const auto block_bytes = [&] {
    return bytes.substr(begin + block, std::min<uint64_t>(kBlock, size - block));
  };
  const size_t checksum = bytes.find(hash(block_bytes()));
  ASSERT_NE(checksum, std::string::npos);
  bytes.replace(begin + at_byte, tokens.size(), tokens);
  bytes.replace(checksum, 32, hash(block_bytes()));
  bytes.replace(seal + 32, 32,
                hash(bytes.substr(0, begin) + bytes.substr(begin + size, seal - begin - size)));
  bytes.replace(seal + 64, 32, hash(bytes.substr(seal, 64)));
  write_file(store, bytes);
}

}  // namespace sbtrain::test
