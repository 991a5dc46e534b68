// Documents as they are read from files, before and after they are parsed.
#pragma once

#include <cstdint>
#include <string>

namespace sbtrain {

// Which values of a record are a document. A dot leads into an object within the record:
// "meta.redpajama_set_name".
struct RecordKeys {
  std::string text = "text";
  std::string source = "source";  // optional in a record
};

struct Document {
  std::string source;  // the record's own, else the name of its file
  std::string text;
};

// What the readers share with the documents that come from one file.
struct DocumentOrigin {
  std::string name;    // of the file, for messages
  std::string source;  // of documents that name none: the file's name without folder and extensions
  RecordKeys keys;
};

// A document, or a part of one, as it stands in its file, not parsed yet.
struct RawDocument {
  enum class Kind {
    kText,    // a part of a plain text file
    kJson,    // a line of a JSON lines file
    kRow,     // a row of a table: data is the text
    kTokens,  // ids as unsigned little-endian integers of token_bytes bytes
  };
  Kind kind = Kind::kText;
  std::string data;
  std::string source{};  // of a kRow that has one
  const DocumentOrigin* origin = nullptr;
  // Line or row, from 1; kTokens: the index in the file of the first token.
  int64_t position = 0;
  int token_bytes = 0;
  std::string problem{};  // kJson: why the line is no document, whose data is left out then
  bool first = true;      // a document starts here
  bool last = true;       // the document ends here
};

// Documents in one file, in order.
class RecordReader {
 public:
  RecordReader() = default;
  virtual ~RecordReader() = default;
  RecordReader(const RecordReader&) = delete;
  RecordReader& operator=(const RecordReader&) = delete;

  // Returns false at the end of the file.
  virtual bool next(RawDocument& document) = 0;
  // The part of the file that has been read, 0 to 1, where the reader knows it; else -1.
  virtual double progress() const { return -1; }
};

// The text and source of a raw document, which is not kTokens. Throws ExitCode::kData with file and
// line for a line that is not a JSON object with a string of the right name. Thread-safe.
Document parse_document(RawDocument raw);

}  // namespace sbtrain
