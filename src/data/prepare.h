// Tokenises text into a document store, on all cores.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "data/document_store.h"
#include "data/tokenizer.h"

namespace sbtrain {

struct PrepareOptions {
  std::vector<std::string> inputs;  // files and folders, see TextInput
  std::string output;
  bool bos = false;  // documents start with the tokenizer's bos
  bool eos = true;   // documents end with its eos
  int threads = 0;   // number of threads that encode; 0: one per core
};

struct PrepareProgress {
  int64_t bytes = 0;        // of the input files, read and written so far
  int64_t total_bytes = 0;  // of the input files
  int64_t documents = 0;
  int64_t tokens = 0;
  // Places where the text had to be cut before it was tokenised, so that tokens may differ from
  // those of the uncut text (Tokenizer::part).
  int64_t forced_cuts = 0;
  std::map<std::string, int64_t> left_out;  // skipped files of the folders, by extension
};

// Called from time to time on the thread that called prepare_documents. Returning false stops the
// work: prepare_documents throws Interrupted and leaves no output.
using PrepareReport = std::function<bool(const PrepareProgress&)>;

struct Interrupted {};

// Tokenises the documents, in order, and writes them to options.output. The same input gives the
// same file for any number of threads. Documents without text are left out. Memory is bounded,
// however long documents are. Throws ExitCode::kUsage (also if the output is one of the inputs),
// kData (a file that is not text, or a line that is not a document, both named) and kStorage.
StoreInfo prepare_documents(const PrepareOptions& options, const Tokenizer& tokenizer,
                            const PrepareReport& report);

}  // namespace sbtrain
