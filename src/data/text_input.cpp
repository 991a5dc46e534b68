#include "data/text_input.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

bool is_json_lines(const std::string& path) {
  return path.ends_with(".jsonl");
}

bool is_text(const fs::path& path) {
  static const std::set<std::string> kExtensions = {".jsonl", ".txt", ".text", ".md", ".rst"};
  return kExtensions.contains(path.extension().string());
}

std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && is_text(entry.path())) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    fail(ExitCode::kUsage, "{}: no .jsonl, .txt, .text, .md or .rst files in this folder", folder);
  }
  return files;
}

}  // namespace

TextInput::TextInput(const std::vector<std::string>& paths) : buffer_(1 << 20) {
  try {
    for (const std::string& path : paths) {
      if (!fs::exists(path)) fail(ExitCode::kUsage, "{}: no such file or folder", path);
      const auto files =
          fs::is_directory(path) ? files_below(path) : std::vector<std::string>{path};
      files_.insert(files_.end(), files.begin(), files.end());
    }
    for (const std::string& file : files_) {
      total_bytes_ += static_cast<int64_t>(fs::file_size(file));
    }
  } catch (const fs::filesystem_error& error) {
    fail(ExitCode::kUsage, "cannot read the input: {}", error.what());
  }
  if (files_.empty()) fail(ExitCode::kUsage, "no input files are given");
}

bool TextInput::open_next() {
  if (opened_ == files_.size()) return false;
  stream_ = std::ifstream();
  stream_.rdbuf()->pubsetbuf(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
  stream_.open(files_[opened_], std::ios::binary);
  if (!stream_) fail(ExitCode::kData, "{}: cannot open it", files_[opened_]);
  ++opened_;
  line_ = 0;
  return true;
}

bool TextInput::next(RawDocument& document) {
  while (true) {
    if (!stream_.is_open() && !open_next()) return false;
    document.file = &files_[opened_ - 1];
    const bool json = is_json_lines(*document.file);
    bool found = false;
    if (json) {
      found = static_cast<bool>(std::getline(stream_, document.data));
      document.line = ++line_;
    } else {
      document.data.assign(std::istreambuf_iterator<char>(stream_), {});
      document.line = 0;
      found = true;
    }
    if (stream_.bad()) fail(ExitCode::kData, "{}: cannot read it", *document.file);
    if (!json || !found) stream_.close();
    const bool blank = json && document.data.find_first_not_of(" \t\r") == std::string::npos;
    if (found && !blank) return true;
  }
}

Document parse_document(RawDocument raw) {
  Document document{.source = fs::path(*raw.file).stem().string(), .text = {}};
  if (raw.line == 0) {
    document.text = std::move(raw.data);
    return document;
  }
  try {
    const nlohmann::json object = nlohmann::json::parse(raw.data);
    document.text = object.at("text").get<std::string>();
    if (object.contains("source")) document.source = object["source"].get<std::string>();
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::kData, "{}:{}: not a JSON object with a string \"text\": {}", *raw.file,
         raw.line, error.what());
  }
  return document;
}

}  // namespace sbtrain
