// Parquet, which Python reads.
#include <sys/resource.h>

#include "core/python.h"
#include "unit/text/input.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;

// A Parquet file as far as the program looks at it itself.
std::string parquet_shell() {
  return "PAR1 data \x01\0\0\0PAR1"s;
}

// A program in place of Python, which gives out what a test wants to hear.
class FakePython : public InputTest {
 protected:
  static void run_instead(const std::string& script) {
    write_file(path("python"), "#!/bin/bash\n# -c PROGRAM MODE ...\nmode=$3\n" + script);
    fs::permissions(path("python"), fs::perms::owner_all);
    ::setenv("SBTRAIN_PYTHON", path("python").c_str(), 1);
  }
  void TearDown() override { ::unsetenv("SBTRAIN_PYTHON"); }
};

TEST_F(FakePython, RowsAreDocuments) {
  write_file(path("t.parquet"), parquet_shell());
  run_instead(
      "if [ $mode = check ]; then echo 3; else\n"
      "printf '\\3\\0\\0\\0\\377\\377\\377\\377one\\0\\0\\0\\0\\1\\0\\0\\0s'\n"
      "printf '\\3\\0\\0\\0\\1\\0\\0\\0twos'; fi\n");
  write_file(path("t.jsonl"), "{\"text\":\"one\"}\n{\"text\":\"two\",\"source\":\"s\"}\n");
  EXPECT_TRUE(store_of(path("t.parquet")) == store_of(path("t.jsonl")));
}

TEST_F(FakePython, WhatGoesWrongIsSaid) {
  write_file(path("t.parquet"), parquet_shell());
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"echo No module named pyarrow >&2; exit 3", "needs pyarrow"},
      // What is advised works where the system's Python is "externally managed", too.
      {"exit 3", "python3 -m venv"},
      {"exit 0", "does not answer as Python does"},
      {"echo t.parquet: no column >&2; exit 4", "no column"},
      {"kill -9 $$", "exit code 137"},
      {"if [ $mode = check ]; then echo 2; else printf '\\1\\0\\0\\0\\0\\0\\0\\0x'; fi",
       "1 of its 2"},
      {"if [ $mode = check ]; then echo 2; else printf '\\377\\0\\0\\0\\0\\0\\0\\0x'; fi", "row 1"},
      {"if [ $mode = check ]; then echo 2; else printf '\\1\\0\\0\\200\\0\\0\\0\\0x'; fi", "row 1"},
      {"if [ $mode = check ]; then echo 2; else echo t.parquet: bad page >&2; exit 4; fi",
       "bad page"}};
  for (const auto& [script, says] : cases) {
    run_instead(script + "\n");
    const Thrown error = refusal(path("t.parquet"));
    EXPECT_EQ(error.code, ExitCode::kData) << script;
    EXPECT_TRUE(error.says(says) && error.says("t.parquet")) << script << error.message;
  }
  ::setenv("SBTRAIN_PYTHON", path("none").c_str(), 1);
  EXPECT_TRUE(refusal(path("t.parquet")).says("SBTRAIN_PYTHON"));
}

TEST_F(FakePython, IsNotAskedForAFileThatIsCutShort) {
  run_instead("exit 1\n");
  for (const std::string& content : {"PAR1"s, "PAR1 data"s, "PAR1\xff\0\0\0PAR1"s}) {
    EXPECT_TRUE(refusal_of("cut.parquet", content).says("cut short")) << content;
  }
}

class ParquetTest : public InputTest {
 protected:
  void SetUp() override {
    if (python("import pyarrow").status != 0) {
      GTEST_SKIP() << python_interpreter() << " has no pyarrow (scripts/setup.sh python)";
    }
  }
  static PythonHelper::Result python(const std::string& program) {
    PythonHelper helper("import os, sys\nos.chdir(sys.argv[1])\n" + program, {path("")}, "",
                        "python");
    return helper.wait();
  }
};

TEST_F(ParquetTest, TablesGiveTheStoreOfTheSameJsonLines) {
  std::string lines;
  for (int i = 0; i < 100; ++i) {
    const std::string text = texts()[static_cast<size_t>(i) % texts().size()];
    lines +=
        nlohmann::json{{"text", std::to_string(i) + text}, {"source", "s" + std::to_string(i % 3)}}
            .dump() +
        "\n";
  }
  write_file(path("t.jsonl"), lines);
  const std::string expected = store_of(path("t.jsonl"));
  const std::string program = R"(
import json, pyarrow as pa, pyarrow.parquet as pq
rows = [json.loads(line) for line in open("t.jsonl", encoding="utf-8")]
texts, sources = [r["text"] for r in rows], [r["source"] for r in rows]
def write(name, text, source, **options):
    pq.write_table(pa.table({"id": list(range(len(rows))), "text": text, "source": source}), name, **options)
write("plain.parquet", texts, sources, compression="none", row_group_size=7)
write("zstd.parquet", texts, sources, compression="zstd", row_group_size=1000)
write("large.parquet", pa.array(texts, pa.large_string()), pa.array(sources).dictionary_encode())
meta = pa.StructArray.from_arrays([pa.array(texts), pa.array(sources)], ["body", "set"])
pq.write_table(pa.table({"meta": meta, "text": list(range(len(rows)))}), "nested.parquet")
write("nulls.parquet", [None, "a", None] + [""] * (len(rows) - 4) + ["b"], [None] * len(rows))
pq.write_table(pa.table({"text": [1, 2]}), "numbers.parquet")
pq.write_table(pa.table({"body": ["a"]}), "other.parquet")
bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"\xff\xfe")])
pq.write_table(pa.table({"text": bad}), "bytes.parquet")
data = bytearray(open("zstd.parquet", "rb").read())
for i in range(200, 3000): data[i] ^= 255
open("damaged.parquet", "wb").write(data)
)";
  const PythonHelper::Result written = python(program);
  ASSERT_EQ(written.status, 0) << written.errors;
  for (const char* name : {"plain.parquet", "zstd.parquet", "large.parquet"}) {
    EXPECT_TRUE(store_of(path(name)) == expected) << name;
  }
  PrepareOptions nested;
  nested.input.keys = {.text = "meta.body", .source = "meta.set"};
  EXPECT_TRUE(store_of(path("nested.parquet"), nested) == expected);
  store_of(path("nulls.parquet"));
  EXPECT_EQ(DocumentStore(path("store.h5")).documents(), 2);
  EXPECT_TRUE(refusal(path("numbers.parquet")).says("'text' holds int64"));
  const Thrown other = refusal(path("other.parquet"));
  EXPECT_TRUE(other.says("no column 'text'") && other.says("body")) << other.message;
  for (const char* name : {"bytes.parquet", "damaged.parquet"}) {
    const Thrown error = refusal(path(name));
    EXPECT_EQ(error.code, ExitCode::kData) << error.message;
    EXPECT_TRUE(error.says(name) && error.says("cannot be read")) << error.message;
  }
}

TEST_F(ParquetTest, BombsAreRefusedInLittleMemory) {
  const PythonHelper::Result written = python(R"(
import pyarrow as pa, pyarrow.parquet as pq
def repeat(name, text, rows):
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    pq.write_table(pa.table({"text": column}), name, compression="zstd")
repeat("long.parquet", "a" * (32 << 20), 10000)
repeat("many.parquet", "a" * 1000, 100000)
pq.write_table(pa.table({"text": pa.nulls(3000000, pa.string())}), "nulls.parquet")
pq.write_table(pa.table({"text": ["a" * (16 << 20)] * 4}), "page.parquet", compression="zstd", use_dictionary=False)
repeat("few.parquet", "a" * 1000, 1000)
)");
  ASSERT_EQ(written.status, 0) << written.errors;
  for (const char* name : {"long.parquet", "many.parquet", "nulls.parquet", "page.parquet"}) {
    EXPECT_LT(fs::file_size(path(name)), size_t{100} << 10);
    const Thrown error = refusal(path(name));
    EXPECT_EQ(error.code, ExitCode::kData) << error.message;
    EXPECT_TRUE(error.says(name) && error.says("250 times")) << error.message;
  }
  rusage children{};
  ::getrusage(RUSAGE_CHILDREN, &children);
  EXPECT_LT(children.ru_maxrss, 800 << 10) << "KiB of the largest child";
  // A megabyte is text that somebody may have, whatever it compresses to.
  EXPECT_FALSE(store_of(path("few.parquet")).empty());
}

}  // namespace
}  // namespace sbtrain::test
