// Parquet files with bytes changed, cut out and put in, anywhere: in pages, their headers, the
// index at the end and its length. Each is read or refused.
#include <array>
#include <cstring>

#include "core/python.h"
#include "faults/driver.h"

namespace sbtrain::test {
namespace {

// Writes NAME.parquet for each way in which the texts may lie in a file.
constexpr const char* kWrite = R"(
import sys, pyarrow as pa, pyarrow.parquet as pq
folder = sys.argv[1]
texts = ["Text %d: %s\n" % (i, "word " * (i % 9)) for i in range(60)]
table = pa.table({"text": texts, "source": ["s%d" % (i % 3) for i in range(60)], "id": list(range(60))})
def write(name, table, **options):
    pq.write_table(table, f"{folder}/{name}.parquet", **options)
write("plain", table, compression="none", use_dictionary=False, row_group_size=17)
write("dictionary", table, compression="snappy", data_page_size=64)
write("zstd", table, compression="zstd", data_page_version="2.0", row_group_size=30)
write("delta", table, compression="gzip", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY",
      "source": "DELTA_LENGTH_BYTE_ARRAY", "id": "DELTA_BINARY_PACKED"}, write_page_index=True)
nested = pa.StructArray.from_arrays([pa.array(texts), pa.array([[i] * (i % 3) for i in range(60)])], ["a", "b"])
write("nested", pa.table({"x": nested, "text": pa.array([None if i % 5 == 0 else t for i, t in enumerate(texts)])}))
)";
constexpr std::array kNames = {"plain", "dictionary", "zstd", "delta", "nested"};

class Parquet : public Faults {
 protected:
  void SetUp() override {
    Faults::SetUp();
    environment_["SBTRAIN_PYTHON"] = python_interpreter();
    PythonHelper writer(kWrite, {path("")}, "", "python");
    const PythonHelper::Result written = writer.wait();
    if (written.errors.find("No module named 'pyarrow'") != std::string::npos) {
      GTEST_SKIP() << python_interpreter() << " has no pyarrow (scripts/setup.sh python)";
    }
    ASSERT_EQ(written.status, 0) << written.errors;
  }

  size_t below(size_t end) { return end == 0 ? 0 : random_() % end; }

  // Where the index begins: before its length and the mark at the end.
  static size_t index_of(const std::string& file) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, file.data() + file.size() - 8, sizeof bytes);
    return file.size() - 8 - bytes;
  }

  std::string mutated(std::string file) {
    const size_t index = index_of(file);
    for (size_t times = below(3) + 1; times > 0 && file.size() > 20; --times) {
      // Half of the faults lie in the index, which is smaller than the pages.
      const size_t begin = below(2) == 0 && index < file.size() - 8 ? index : 4;
      const size_t at = begin + below(file.size() - 8 - begin);
      switch (below(8)) {
        case 0:
        case 1:
          file[at] = static_cast<char>(file[at] ^ (1 << below(8)));
          break;
        case 2:
          file[at] = static_cast<char>(random_());
          break;
        case 3: {  // numbers of Thrift at their limits
          static const std::array<std::string, 5> kNumbers = {
              std::string("\xff\xff\xff\xff\x0f"), std::string("\xfe\xff\xff\xff\x0f"),
              std::string("\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), std::string(4, '\0'),
              std::string("\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80")};
          const std::string& number = kNumbers[below(kNumbers.size())];
          file.replace(at, std::min(number.size(), file.size() - 8 - at), number);
          break;
        }
        case 4:
          file.erase(at, below(file.size() - 8 - at) + 1);
          break;
        case 5:
          file.insert(at, file.substr(4 + below(file.size() - 4), below(100)));
          break;
        case 6: {  // the length of the index
          const auto length = static_cast<uint32_t>(below(2) == 0 ? random_() : below(file.size()));
          std::memcpy(file.data() + file.size() - 8, &length, sizeof length);
          break;
        }
        default:
          file.resize(at);
      }
    }
    return file;
  }
};

TEST_F(Parquet, MutatedFilesAreReadOrRefused) {
  int refused = 0;
  const int tries = rounds(12);
  for (int i = 0; i < tries; ++i) {
    const std::string name = kNames[static_cast<size_t>(i) % kNames.size()];
    write_file(path("m.parquet"), mutated(read_file(path(name + ".parquet"))));
    const int code = run(prepare(path("m.parquet"), path("o.h5")));
    const std::string what = name + " " + std::to_string(i) + ": " + std::to_string(code) + " ";
    ASSERT_TRUE(code == 0 || code == kData) << what << output();
    EXPECT_FALSE(says("Sanitizer") || says("runtime error")) << what << output();
    EXPECT_FALSE(fs::exists(path("o.h5.tmp"))) << what;
    EXPECT_EQ(fs::exists(path("o.h5")), code == 0) << what << output();
    if (code == 0) {
      EXPECT_EQ(run({"data", "verify", path("o.h5")}), 0) << what << output();
      fs::remove(path("o.h5"));
      continue;
    }
    ++refused;
    EXPECT_TRUE(says("m.parquet")) << what << output();
    EXPECT_LT(output().size(), 2000U) << what;
  }
  EXPECT_GT(refused, tries / 2);
  RecordProperty("refused", refused);
}

TEST_F(Parquet, FilesAreRefusedWhereverTheyEnd) {
  const std::string whole = read_file(path("dictionary.parquet"));
  for (int i = 0; i < rounds(3); ++i) {
    write_file(path("m.parquet"), whole.substr(0, below(whole.size())));
    EXPECT_EQ(run(prepare(path("m.parquet"), path("o.h5"))), kData) << output();
    EXPECT_TRUE(says("m.parquet")) << output();
    EXPECT_FALSE(fs::exists(path("o.h5")));
  }
}

}  // namespace
}  // namespace sbtrain::test
