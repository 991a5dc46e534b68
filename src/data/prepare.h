// Tokenises text into a document store, on all cores.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/document_store.h"
#include "text/text_input.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

struct PrepareOptions {
  std::vector<std::string> inputs;  // files, folders and "-", see TextInput
  std::string output;
  bool bos = false;  // documents start with the tokenizer's bos
  bool eos = true;   // documents end with its eos
  int threads = 0;   // number of threads that encode; 0: one per core
  InputOptions input{};
  // The share of documents, 0 to 1, that goes to validation_path(output); 0: there is no such file.
  double split = 0;
  int64_t vocab = 0;  // for tokens without a tokenizer; 0: that of llm.c's header
  // Documents of fewer tokens, bos and eos counted, are left out and counted. They wait in memory
  // until they have so many.
  int64_t min_tokens = 0;
  // Lines of JSON that are no documents are left out and counted; otherwise they are errors.
  bool skip_bad_records = false;
};

// OUT.h5 -> OUT.validation.h5
std::string validation_path(const std::string& output);

inline constexpr size_t kBadRecordsNamed = 10;

struct PrepareProgress {
  int64_t bytes = 0;          // of the input files, as they lie there, read so far
  int64_t total_bytes = 0;    // of the input files; 0: unknown
  int64_t content_bytes = 0;  // of what they contain, tokenised and written so far
  int64_t documents = 0;
  int64_t tokens = 0;
  // Places where the text had to be cut before it was tokenised, so that tokens may differ from
  // those of the uncut text (Tokenizer::part).
  int64_t forced_cuts = 0;
  int64_t too_short = 0;                    // documents left out for PrepareOptions::min_tokens
  int64_t bad_records = 0;                  // left out
  std::vector<std::string> first_bad;       // of them, kBadRecordsNamed at most: place and reason
  std::map<std::string, int64_t> taken;     // files of the folders, by extension
  std::map<std::string, int64_t> left_out;  // those that are not read, by extension and reason
  bool done = false;                        // all documents are written
};

// Called on the thread that called prepare_documents: first when the input has been examined,
// before any output exists, then several times a second. Returning false stops the work:
// prepare_documents throws Interrupted and leaves no output.
using PrepareReport = std::function<bool(const PrepareProgress&)>;

struct Interrupted {};

struct PreparedStores {
  StoreInfo store;
  std::optional<StoreInfo> validation;
};

// Tokenises the documents, in order, and writes them to options.output. The same input gives the
// same file for any number of threads. Documents without text are left out. Memory is bounded,
// however long documents are.
//
// Documents that are token ids already are checked against the vocabulary and written as they are,
// with bos and eos as those of text. They need no tokenizer: with none (null), options.vocab or
// llm.c's header gives the vocabulary, and the token between documents is bos and eos.
//
// Which documents are validation (options.split) depends on nothing but their content: those whose
// first 64 KiB of text have a SHA-256 that, as a fraction, is below the share. Equal documents thus
// lie in the same file, wherever they come from. Both files appear or none does; in the instant
// between the two renames an older pair is gone already, so that files of two pairs never meet.
//
// Throws ExitCode::kUsage (also if an output is one of the inputs, if a split leaves one file
// empty, and if all documents are too short), kData (a file that is not text, a line that is not a
// document unless such are left out, an id beyond the vocabulary, each named) and kStorage.
PreparedStores prepare_documents(const PrepareOptions& options, const Tokenizer* tokenizer,
                                 const PrepareReport& report);

}  // namespace sbtrain
