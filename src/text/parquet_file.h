// Documents in Parquet files. pyarrow reads them, in a child process that runs parquet_rows.py; the
// program contains that script.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "text/document.h"

namespace sbtrain {

// The number of rows of each file. Throws ExitCode::kData for a file that is cut short, or has no
// such column of strings, and if pyarrow is missing, with the command that installs it.
std::vector<int64_t> count_parquet_rows(const std::vector<std::string>& files,
                                        const RecordKeys& keys);

// Each of the `rows` rows is a document (kRow); one whose text is null is empty. Reads one row
// group after the other. `stop` and `origin` have to live as long as the reader; the file is
// origin.name. next() throws ExitCode::kData for damaged data, text that is not UTF-8, and a text
// of more than 64 MiB; ReadingStopped after `stop` has been set.
std::unique_ptr<RecordReader> read_parquet(const DocumentOrigin& origin, int64_t rows,
                                           const std::atomic<bool>& stop);

}  // namespace sbtrain
