// sbtrain data info | verify: describes document stores and checks them for damage.
// sbtrain data tasks is in data_tasks.cpp.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <memory>
#include <vector>

#include "cli/cli.h"
#include "core/standard_streams.h"
#include "data/document_store.h"

namespace sbtrain {
namespace {

struct DataOptions {
  std::vector<std::string> paths;
};

void print_sources(const StoreInfo& info) {
  fmt::print("\n  {:<20} {:>12} {:>15} {:>15} {:>7}\n", "source", "documents", "tokens",
             "text bytes", "share");
  for (const StoreSource& source : info.sources) {
    fmt::print("  {:<20} {:>12} {:>15} {:>15} {:>6.1f}%\n", source.name, source.documents,
               source.tokens, source.text_bytes,
               100.0 * static_cast<double>(source.tokens) / static_cast<double>(info.tokens));
  }
}

// Prints the number of documents by length, in powers of two.
void print_lengths(const DocumentStore& store) {
  struct Bin {
    int64_t documents = 0;
    int64_t tokens = 0;
  };
  std::array<Bin, 64> bins{};
  for (int64_t i = 0; i < store.documents(); ++i) {
    const int64_t length = store.length(i);
    Bin& bin = bins[static_cast<size_t>(std::bit_width(static_cast<uint64_t>(length)))];
    ++bin.documents;
    bin.tokens += length;
  }
  const auto empty = [](const Bin& bin) { return bin.documents == 0; };
  const auto first = std::find_if_not(bins.begin(), bins.end(), empty) - bins.begin();
  const auto last = bins.rend() - std::find_if_not(bins.rbegin(), bins.rend(), empty);
  int64_t most = 1;
  for (const Bin& bin : bins) most = std::max(most, bin.documents);
  fmt::print("\n  {:<20} {:>12} {:>15}\n", "length in tokens", "documents", "tokens");
  for (auto i = first; i < last; ++i) {
    const Bin& bin = bins[static_cast<size_t>(i)];
    const int64_t low = i == 0 ? 0 : int64_t{1} << (i - 1);
    const int64_t high = i == 0 ? 0 : 2 * low - 1;
    fmt::print("  {:<20} {:>12} {:>15}  {}\n", fmt::format("{} to {}", low, high), bin.documents,
               bin.tokens,
               std::string(static_cast<size_t>((40 * bin.documents + most - 1) / most), '#'));
  }
}

ExitCode run_info(const DataOptions& options) {
  for (const std::string& path : options.paths) {
    const DocumentStore store(path);
    const StoreInfo& info = store.info();
    const auto bytes = static_cast<double>(info.text_bytes);
    fmt::print("{}\n", path);
    fmt::print("  documents            {}\n", info.documents);
    fmt::print("  tokens               {}  (uint{})\n", info.tokens, 8 * info.token_bytes());
    fmt::print("  text                 {:.1f} MB, {:.2f} bytes per token\n", bytes / 1e6,
               bytes / static_cast<double>(info.tokens));
    fmt::print("  vocabulary           {} pieces, bos {}, eos {}\n", info.vocab, info.bos,
               info.eos);
    fmt::print("  a document is        {}its tokens{}\n", info.starts_with_bos ? "bos, " : "",
               info.ends_with_eos ? ", eos" : "");
    fmt::print("  tokenizer sha256     {}\n", info.tokenizer_hash);
    fmt::print("  content sha256       {}\n", info.content_hash);
    print_sources(info);
    print_lengths(store);
  }
  return ExitCode::kDone;
}

ExitCode run_verify(const DataOptions& options) {
  ExitCode result = ExitCode::kDone;
  for (const std::string& path : options.paths) {
    try {
      const auto start = std::chrono::steady_clock::now();
      const DocumentStore store(path);
      store.verify_content();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      fmt::print("{}: ok ({} documents, {} tokens, every byte checked in {:.1f} s)\n", path,
                 store.documents(), store.tokens(), seconds.count());
    } catch (const Error& error) {
      print_error("error: {}\n", error.what());
      result = error.code();
    }
  }
  return result;
}

void add_command(Command group, Action& action, const char* name, const char* help,
                 ExitCode (*run)(const DataOptions&)) {
  Command command = group.add_subcommand(name, help);
  auto options = std::make_shared<DataOptions>();
  command.add_option("files", options->paths, "HDF5 files made by sbtrain prepare").required();
  command.callback([options, run, &action] { action = [options, run] { return run(*options); }; });
}

}  // namespace

void add_data(Command app, Action& action) {
  Command group = app.add_subcommand("data", "Look at prepared data, and make some");
  group.require_subcommand(1);
  add_command(group, action, "info", "Counts, sources, hashes and lengths", run_info);
  add_data_tasks(group, action);
  add_command(group, action, "verify", "Check every byte against its checksum", run_verify);
}

}  // namespace sbtrain
