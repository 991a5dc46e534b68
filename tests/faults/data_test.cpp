// Inputs that are not text, stores with false contents, and tokenizers of other text.
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/sha256.h"
#include "faults/driver.h"

namespace sbtrain::test {
namespace {

using namespace std::string_literals;
using Data = Faults;
TEST_F(Data, WhatIsNoTextIsRefusedByItsName) {
  std::string utf16;
  for (const char c : "Some text in UTF-16"s) utf16 += {c, '\0'};
  const std::vector<std::tuple<std::string, std::string, std::string>> files = {
      {"a.parquet", "PAR1\x15\x04xx\0\0PAR1"s, "Parquet"},
      {"a.jsonl.gz", "\x1f\x8b\x08\0\0\0\0\0"s, "gzip"},
      {"b.jsonl", "\x1f\x8b\x08\0\0\0\0\0"s, "gzip"},
      {"a.zst", "\x28\xb5\x2f\xfd\x04\x00"s, "zstd"},
      {"a.xz", "\xfd"s + "7zXZ\0"s, "xz"},
      {"a.bz2", "BZh91AY", "bzip2"},
      {"a.zip", "PK\x03\x04rest", "zip"},
      {"bom.txt", "\xff\xfe" + utf16, "UTF-16"},
      {"nobom.txt", utf16, "UTF-16"},
      {"array.json", "[\n  {\"text\": \"a\"},\n  {\"text\": \"b\"}\n]\n", "JSON array"},
      {"array.jsonl", "[{\"text\": \"a\"}]\n", "JSON array"},
      {"array.txt", " [ { \"text\": \"a\"}]\n", "JSON array"},
      {"object.json", "{\n\"text\": \"a\"}\n", "JSON"},
      {"latin.txt", "caf\xe9 au lait", "UTF-8"},
      {"tokens.bin", "\x05\x01\x07\0\x09\x02\0\0"s, "binary"},
      {"store.h5", read_file(store()).substr(0, 9000), "HDF5"},
      {"array.npy", "\x93NUMPY\x01\0v"s, "NumPy"},
  };
  for (const auto& [name, content, format] : files) {
    write_file(path(name), content);
    EXPECT_EQ(run(prepare(path(name), path("o.h5"))), kData) << name << output();
    EXPECT_TRUE(says(name) && says(format)) << name << output();
    EXPECT_EQ(run({"tokenizer", "train", "--input", path(name), "--output", path("t.model")}),
              kData)
        << name << output();
    EXPECT_FALSE(fs::exists(path("o.h5")) || fs::exists(path("t.model"))) << name;
    fs::remove(path(name));
  }
}

TEST_F(Data, FilesOfAFolderThatAreLeftOutAreSaid) {
  fs::create_directory(path("folder"));
  write_file(path("folder/a.txt"), "some text");
  for (const char* name : {"a.csv", "b.csv", "c.gz", "README"}) {
    write_file(path("folder/"s + name), "PAR1");
  }
  EXPECT_EQ(run(prepare(path("folder"), path("o.h5"))), 0) << output();
  EXPECT_TRUE(says("4 file(s)") && says("2 .csv") && says("1 .gz")) << output();
  EXPECT_TRUE(says("taken from the folders: 1 .txt")) << output();
}

TEST_F(Data, StandardInputIsRead) {
  ASSERT_EQ(run(prepare(shared("b.jsonl"), path("file.h5"))), 0) << output();
  const std::string expected = read_file(path("file.h5"));
  EXPECT_EQ(run_in("", prepare("-", path("o.h5")), "< " + shared("b.jsonl")), 0) << output();
  EXPECT_TRUE(read_file(path("o.h5")) == expected);
  for (const std::string& filter : {""s, " | gzip"s}) {
    fs::remove(path("o.h5"));
    const std::string from = "< <(cat " + shared("b.jsonl") + filter + "; sleep 0.3)";
    EXPECT_EQ(run_in("", prepare("-", path("o.h5")), from), 0) << output();
    EXPECT_TRUE(read_file(path("o.h5")) == expected) << filter;
  }
  fs::remove(path("o.h5"));
  EXPECT_EQ(run_in("", prepare("-", path("o.h5")), "< /dev/null"), kUsage) << output();
  EXPECT_EQ(run_in("", prepare("-", path("o.h5")), "<&-"), kUsage) << output();
  EXPECT_EQ(run_in("", prepare("-", path("o.h5"), {"--input", "-"}), "< /dev/null"), kUsage);
  EXPECT_EQ(run_in("", prepare("-", path("o.h5")), "< <(printf 'PAR1')"), kData) << output();
  EXPECT_TRUE(says("standard input")) << output();
  EXPECT_FALSE(fs::exists(path("o.h5")));
}

TEST_F(Data, AnInterruptEndsAWaitForStandardInput) {
  // Before the first byte, and after some documents.
  for (const std::string& bytes : {""s, "cat " + shared("b.jsonl") + "; "}) {
    EXPECT_EQ(run_in("(sleep 1; kill -INT $$) &", prepare("-", path("o.h5")),
                     "< <(" + bytes + "exec sleep 8)", 6),
              128 + SIGINT)
        << bytes << output();
    EXPECT_EQ(left(), std::vector<std::string>{}) << bytes;
  }
}

TEST_F(Data, ABombIsRefusedInBoundedMemory) {
  if (kSanitized) GTEST_SKIP() << "a limit of addresses says nothing under a sanitizer";
  // 1 GiB of one letter, as 64 members.
  const std::string make =
      "import zlib, sys\n"
      "c = zlib.compressobj(9, 8, 31)\n"
      "m = c.compress(b'a' * (16 << 20)) + c.flush()\n"
      "open(sys.argv[1], 'wb').write(m * 64)\n";
  write_file(path("make.py"), make);
  ASSERT_EQ(std::system(("python3 " + path("make.py") + " " + path("bomb.gz")).c_str()), 0);
  for (const char* name : {"bomb.jsonl", "bomb.txt"}) {
    fs::copy_file(path("bomb.gz"), path(name));
    EXPECT_EQ(run_in(address_limit(600), prepare(path(name), path("o.h5"))), kData) << output();
    EXPECT_TRUE(says(name) && says("250 times")) << output();
    EXPECT_FALSE(fs::exists(path("o.h5")));
  }
}

TEST_F(Data, HostileTextComesBackOrIsRefusedInFewWords) {
  const std::vector<std::string> lines = {"{\"text\": \"\\u0000a\\u2581b\\ud83d\\ude00\"}",
                                          "{\"text\": \"\\ud800\"}",
                                          "{\"text\": \"\xff\"}",
                                          "{\"text\": 1e999}",
                                          "{\"text\": null}",
                                          "{\"text\": {}}",
                                          "{\"text\": \"a\", \"source\": 3}",
                                          "\"text\"",
                                          "{\"text\": \"a\"} x",
                                          "nan",
                                          "{\"text\": " + std::string(100000, 'x'),
                                          "{\"text\": \"" + std::string(100000, 'x'),
                                          "{\"" + std::string(100000, 'k') + "\": 1}",
                                          std::string(100000, '{')};
  for (const std::string& line : lines) {
    write_file(path("t.jsonl"), line + "\n");
    const int code = run(prepare(path("t.jsonl"), path("o.h5")));
    EXPECT_EQ(code, &line == &lines[0] ? 0 : kData) << line.substr(0, 50) << output();
    EXPECT_LT(output().size(), 1000U) << line.substr(0, 50);
  }
}

TEST_F(Data, AnyFlippedBitOfAStoreIsFound) {
  const uint64_t bits = 8 * fs::file_size(store());
  for (int i = 0; i < rounds(8); ++i) {
    const uint64_t bit = random_() % bits;
    fs::copy_file(store(), path("s.h5"), fs::copy_options::overwrite_existing);
    flip_bit(path("s.h5"), bit);
    EXPECT_EQ(run({"data", "verify", path("s.h5")}), kData) << "bit " << bit << output();
    EXPECT_TRUE(says("s.h5")) << output();
  }
}

TEST_F(Data, AFlippedBitOfATokenizerIsNoCrash) {
  const uint64_t bits = 8 * fs::file_size(tokenizer());
  for (int i = 0; i < rounds(8); ++i) {
    fs::copy_file(tokenizer(), path("t.model"), fs::copy_options::overwrite_existing);
    const uint64_t bit = random_() % bits;
    flip_bit(path("t.model"), bit);
    // The stores for training identify the tokenizer by its hash.
    const int code = run(train(path("o"), {"--data.tokenizer=" + path("t.model")}));
    EXPECT_TRUE(code == kData || code == kMismatch) << "bit " << bit << ": " << code << output();
    const int prepared =
        run(prepare(shared("b.jsonl"), path("o.h5"), {"--tokenizer", path("t.model")}));
    EXPECT_LT(prepared, 100) << "bit " << bit << output();
  }
}

TEST_F(Data, TokensBeyondTheVocabularyAreFound) {
  fs::copy_file(store(), path("s.h5"));
  craft_tokens(path("s.h5"), "\x90\x01"s, 1000);  // token 400 of a vocabulary of 400
  EXPECT_EQ(run({"data", "verify", path("s.h5")}), kData) << output();
  EXPECT_TRUE(says("token 400 beyond the vocabulary of 400")) << output();
  EXPECT_EQ(run(train(path("o"), {"--data.sources=[{path: " + path("s.h5") + "}]"})), kData)
      << output();
  EXPECT_TRUE(says("s.h5") && says("beyond the vocabulary")) << output();
  EXPECT_EQ(run(train(path("o2"), {"--data.validation=[" + path("s.h5") + "]"})), kData)
      << output();
  EXPECT_EQ(run({"eval", "--checkpoint", trained(), "--data", path("s.h5")}), kData) << output();
}

TEST_F(Data, AMissingStoreIsMissedBeforeAnythingElse) {
  EXPECT_EQ(run(train(path("o"), {"--data.sources=[{path: " + path("none.h5") + "}]"})), kData);
  EXPECT_FALSE(fs::exists(path("o/metrics.jsonl")) && says("validation")) << output();
}

// ---- tokenizers

class OtherTokenizer : public Faults {
 protected:
  void SetUp() override {
    Faults::SetUp();
    ASSERT_EQ(run({"tokenizer", "train", "--input", shared("a.jsonl"), "--vocab", "399", "--output",
                   path("other.model")}),
              0)
        << output();
    ASSERT_EQ(
        run(prepare(shared("b.jsonl"), path("other.h5"), {"--tokenizer", path("other.model")})), 0)
        << output();
  }
  // An option that removes the tokenizer from a configuration.
  static std::string none() { return "--data.tokenizer="; }
};

TEST_F(OtherTokenizer, IsRefusedForValidation) {
  EXPECT_EQ(run(train(path("o"), {none(), "--data.validation=[" + path("other.h5") + "]"})),
            kMismatch)
      << output();
  EXPECT_TRUE(says("another tokenizer")) << output();
  EXPECT_EQ(run({"eval", "--checkpoint", trained(), "--data", path("other.h5")}), kMismatch)
      << output();
  EXPECT_EQ(
      run(train(path("o2"), {"--data.tokenizer=" + path("other.model"), "--data.validation=[]"})),
      kMismatch)
      << output();
}

TEST_F(OtherTokenizer, IsRefusedForGeneration) {
  EXPECT_EQ(run(generate({"--tokenizer", path("other.model")})), kMismatch) << output();
  EXPECT_TRUE(says("other.model") && says("sha256")) << output();
  EXPECT_EQ(run(generate({"--tokenizer", tokenizer()})), 0) << output();
}

TEST_F(OtherTokenizer, TheRunKeepsItsOwn) {
  fs::copy_file(tokenizer(), path("mine.model"));
  ASSERT_EQ(run(train(path("run"), {"--data.tokenizer=" + path("mine.model")})), 0) << output();
  EXPECT_TRUE(read_file(path("run/tokenizer.model")) == read_file(tokenizer()));
  fs::remove(path("mine.model"));
  fs::rename(path("run"), path("moved"));
  EXPECT_EQ(
      run({"generate", "--checkpoint", path("moved"), "--prompt", "The", "--max-tokens", "4"}), 0)
      << output();
  const auto state =
      nlohmann::json::parse(read_file(path("moved/checkpoints/step-00000012/state.json")));
  EXPECT_NE(state.at("loader").get<std::string>().find("tokenizer_hash"), std::string::npos);
}

TEST_F(OtherTokenizer, TheRunKnowsWhetherDocumentsStartWithBos) {
  ASSERT_EQ(run(prepare(shared("a.jsonl"), path("bos.h5"), {"--bos"})), 0) << output();
  ASSERT_EQ(run(train(path("run"),
                      {"--data.sources=[{path: " + path("bos.h5") + "}]", "--train.lr=3e-3"})),
            0)
      << output();
  const auto state =
      nlohmann::json::parse(read_file(path("run/checkpoints/step-00000012/state.json")));
  const auto loader = nlohmann::json::parse(state.at("loader").get<std::string>());
  EXPECT_TRUE(loader.at("starts_with_bos").get<bool>());
  EXPECT_EQ(run({"generate", "--checkpoint", path("run"), "--prompt=", "--max-tokens", "4"}), 0)
      << output();
}

TEST_F(OtherTokenizer, IsRefusedForAttentionMaps) {
  const Arguments maps = {"eval", "--checkpoint",     trained(),    "--text",
                          "The",  "--attention-maps", path("maps"), "--tokenizer"};
  Arguments other = maps;
  other.push_back(path("other.model"));
  EXPECT_EQ(run(other), kMismatch) << output();
  EXPECT_FALSE(fs::exists(path("maps")));
  Arguments own = maps;
  own.push_back(tokenizer());
  EXPECT_EQ(run(own), 0) << output();
}

TEST_F(OtherTokenizer, IsRefusedWhereverItsDataMeetsARun) {
  const std::string other = "{path: " + path("other.h5") + "}";
  const std::string data = "--data.sources=[" + other + "]";
  const std::string alone = "--data.validation=[]";
  EXPECT_EQ(
      run(train(path("o"), {none(), "--data.sources=[{path: " + store() + "}, " + other + "]"})),
      kMismatch)
      << output();
  EXPECT_TRUE(says("different tokenizers")) << output();
  // A run that continues, and weights that go on.
  fs::copy(trained(), path("mine"), fs::copy_options::recursive);
  EXPECT_EQ(run(train(path("mine"), {none(), data, alone, "--stages.0.length=20 steps"})),
            kMismatch)
      << output();
  EXPECT_TRUE(says("tokenizer_hash")) << output();
  EXPECT_EQ(run(train(path("o"), {none(), data, alone, "--init-from", trained()})), kMismatch)
      << output();
  EXPECT_TRUE(says("tokenizer of the weights")) << output();
  EXPECT_EQ(run({"bench", "skip", "--checkpoint", trained(), "--data", path("other.h5")}),
            kMismatch)
      << output();
  write_file(path("sweep.yaml"), "name: s\nvariants: [{name: v, config: " + config() +
                                     "}]\ngrid: {data.tokenizer: [" + path("other.model") + "]}\n");
  EXPECT_EQ(run({"sweep", path("sweep.yaml"), "--out", path("sweep")}), kMismatch) << output();
}

TEST_F(OtherTokenizer, IsRefusedForTasksServingAndExport) {
  EXPECT_EQ(run({"eval", "--checkpoint", trained(), "--tasks", "passkey", "--lengths", "128",
                 "--tokenizer", path("other.model")}),
            kMismatch)
      << output();
  EXPECT_TRUE(says("sha256")) << output();
  EXPECT_EQ(
      run({"serve", "--checkpoint", trained(), "--port", "0", "--tokenizer", path("other.model")}),
      kMismatch)
      << output();
  EXPECT_EQ(run({"export", "--checkpoint", trained(), "--output", path("hf"), "--tokenizer",
                 path("other.model")}),
            kMismatch)
      << output();
  EXPECT_FALSE(fs::exists(path("hf")));
}

TEST_F(OtherTokenizer, AnExportKnowsItsOwn) {
  ASSERT_EQ(run({"export", "--checkpoint", trained(), "--output", path("hf")}), 0) << output();
  const auto hf = nlohmann::json::parse(read_file(path("hf/config.json")));
  EXPECT_EQ(hf.at("sbtrain").at("tokenizer_hash"), sha256_hex(read_file(tokenizer())));
  const std::string other = "--data.sources=[{path: " + path("other.h5") + "}]";
  const Arguments weights = {none(), other, "--data.validation=[]", "--init-from", path("hf")};
  EXPECT_EQ(run(train(path("o"), weights)), kMismatch) << output();
  // Without the tokenizer itself, an import still knows which one it was.
  fs::rename(path("hf/tokenizer.model"), path("kept.model"));
  EXPECT_EQ(run(train(path("o"), weights)), kMismatch) << output();
  ASSERT_EQ(run({"import", "--input", path("hf"), "--output", path("back")}), 0) << output();
  EXPECT_EQ(run({"eval", "--checkpoint", path("back"), "--data", path("other.h5")}), kMismatch)
      << output();
  EXPECT_EQ(run({"eval", "--checkpoint", path("back"), "--data", store()}), 0) << output();
  // With another tokenizer in its place it is refused.
  fs::copy_file(path("other.model"), path("hf/tokenizer.model"));
  EXPECT_EQ(run({"import", "--input", path("hf"), "--output", path("o2")}), kMismatch) << output();
  EXPECT_TRUE(says("tokenizer_hash") && says("tokenizer.model")) << output();
  EXPECT_EQ(run(train(path("o"), {"--init-from", path("hf")})), kMismatch) << output();
  EXPECT_FALSE(fs::exists(path("o/checkpoints")));
}

TEST_F(OtherTokenizer, OfMorePiecesThanTheVocabularyIsRefused) {
  const std::string task = "--data.task={type: mqar, pairs: 4, examples: 64, eval_examples: 4}";
  const Arguments small = {none(),
                           task,
                           "--data.sources=[]",
                           "--data.validation=[]",
                           "--model.vocab=64",
                           "--train.sequence_length=32"};
  ASSERT_EQ(run(train(path("run"), small)), 0) << output();
  EXPECT_EQ(run({"export", "--checkpoint", path("run"), "--output", path("hf"), "--tokenizer",
                 path("other.model")}),
            kMismatch)
      << output();
  EXPECT_TRUE(says("399 pieces")) << output();
  EXPECT_FALSE(fs::exists(path("hf")) || fs::exists(path("hf.tmp")));
  EXPECT_EQ(run({"generate", "--checkpoint", path("run"), "--prompt", "a", "--tokenizer",
                 path("other.model")}),
            kMismatch)
      << output();
  EXPECT_EQ(run({"eval", "--checkpoint", path("run"), "--text", "a", "--attention-maps",
                 path("maps"), "--tokenizer", path("other.model")}),
            kMismatch)
      << output();
  ASSERT_EQ(run({"export", "--checkpoint", path("run"), "--output", path("hf")}), 0) << output();
  fs::copy_file(path("other.model"), path("hf/tokenizer.model"));
  EXPECT_EQ(run({"import", "--input", path("hf"), "--output", path("back")}), kMismatch)
      << output();
  EXPECT_TRUE(says("399 pieces")) << output();
  EXPECT_FALSE(fs::exists(path("back")) || fs::exists(path("back.tmp")));
}

// A byte-level BPE as it comes from elsewhere, with its chat template.
class ForeignTokenizer : public Faults {
 protected:
  void SetUp() override {
    Faults::SetUp();
    const fs::path golden = fs::path(SBTRAIN_TEST_TEXT).parent_path() / "tokenizer";
    fs::create_directory(path("hf"));
    fs::copy_file(golden / "llama3/tokenizer.json", path("hf/tokenizer.json"));
    write_file(path("hf/tokenizer_config.json"),
               R"({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"})");
    write_file(path("hf/chat_template.jinja"), "{{ messages }}");
    write_file(path("text.jsonl"), R"({"text": "The end<|eot_id|>is near"})");
  }
  Arguments prepare_with(const Arguments& more) {
    Arguments all = {"--tokenizer", path("hf/tokenizer.json")};
    all.insert(all.end(), more.begin(), more.end());
    return prepare(shared("a.jsonl"), path("hf.h5"), all);
  }
};

TEST_F(ForeignTokenizer, TheRunKeepsItWithItsChatTemplate) {
  ASSERT_EQ(run(prepare_with({})), 0) << output();
  const Arguments options = {"--model.vocab=1000", "--data.sources=[{path: " + path("hf.h5") + "}]",
                             "--data.tokenizer=" + path("hf/tokenizer.json"),
                             "--data.validation=[" + path("hf.h5") + "]"};
  ASSERT_EQ(run(train(path("run"), options)), 0) << output();
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}) {
    EXPECT_TRUE(read_file(path("run/") + name) == read_file(path("hf/") + name)) << name;
  }
  fs::remove_all(path("hf"));
  fs::rename(path("run"), path("moved"));
  EXPECT_EQ(run({"generate", "--checkpoint", path("moved"), "--prompt", "<|begin_of_text|>The",
                 "--max-tokens", "4"}),
            0)
      << output();
  EXPECT_EQ(run({"eval", "--checkpoint", path("moved"), "--data", path("hf.h5")}), 0) << output();
  // The vocabulary of a model may be padded: no token is drawn that the tokenizer does not have.
  EXPECT_EQ(run({"generate", "--checkpoint", path("moved"), "--prompt=", "--max-tokens", "200",
                 "--temperature", "100", "--top-p", "1"}),
            0)
      << output();
  // Runs and data of different tokenizers.
  EXPECT_EQ(run({"eval", "--checkpoint", path("moved"), "--data", store()}), kMismatch);
  EXPECT_EQ(run(generate({"--tokenizer", path("moved/tokenizer.json")})), kMismatch) << output();
  EXPECT_EQ(run(train(path("o"), {"--data.validation=[" + path("hf.h5") + "]"})), kMismatch)
      << output();
  EXPECT_EQ(run(train(path("o"), {"--data.tokenizer=" + path("moved/tokenizer.json")})), kMismatch)
      << output();
}

TEST_F(ForeignTokenizer, SpecialTokensInTextBecomeIdsOnRequestAlone) {
  // The number of tokens that `prepare` says.
  const auto tokens = [&](const Arguments& more) {
    Arguments arguments = {"--tokenizer", path("hf/tokenizer.json")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(run(prepare(path("text.jsonl"), path("text.h5"), arguments)), 0) << output();
    const size_t at = output().find("documents, ");
    return at == std::string::npos ? -1 : std::atoi(&output()[at + 11]);
  };
  const int as_text = tokens({});
  const int as_ids = tokens({"--special-tokens"});
  EXPECT_GT(as_ids, 0);
  EXPECT_GT(as_text, as_ids + 3) << "<|eot_id|> takes several tokens as text";
}

// ---- prompts

class Prompts : public Faults {
 protected:
  // What `generate` prints on standard output.
  std::string printed(const Arguments& more, const std::string& redirection) {
    Arguments arguments = {"generate", "--checkpoint", trained(), "--max-tokens", "8"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(run_in("", arguments, redirection + " >" + path("out")), 0) << output();
    return read_file(path("out"));
  }
};

TEST_F(Prompts, MayComeFromStandardInput) {
  const std::string the = printed({"--prompt", "The"}, "");
  const std::string word = printed({"--prompt", "a\nword"}, "");
  EXPECT_TRUE(the.starts_with("The") && the.size() > 5) << the;
  write_file(path("the"), "The");
  EXPECT_EQ(printed({"--prompt", "-"}, "<" + path("the")), the);
  write_file(path("word"), "a\nword");
  EXPECT_EQ(printed({"--prompt", "-"}, "<" + path("word")), word);
}

TEST_F(Prompts, LinesAreContinuedOneByOne) {
  std::string separately;
  for (const char* prompt : {"The", "", "a \xe4\xbd\xa0"}) {
    separately += printed({std::string("--prompt=") + prompt}, "");
  }
  write_file(path("lines"), "The\n\na \xe4\xbd\xa0");
  EXPECT_EQ(printed({}, "<" + path("lines")), separately);
  EXPECT_EQ(printed({}, "</dev/null"), "");
  EXPECT_EQ(printed({}, "<&-"), "");
  // A line that is too long is said, and the next one is continued.
  write_file(path("lines"), std::string(100000, '+') + "\nThe\n");
  EXPECT_EQ(printed({}, "<" + path("lines")), printed({"--prompt", "The"}, ""));
}

TEST_F(OtherTokenizer, AdviceFollowsTheReason) {
  std::string text;
  for (int c = 0x4e00; c < 0x4e00 + 900; ++c) {  // 900 different characters
    text += static_cast<char>(0xe0 | (c >> 12));
    text += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    text += static_cast<char>(0x80 | (c & 0x3f));
    text += c % 7 == 0 ? "\n" : "";
  }
  write_file(path("cjk.txt"), text);
  EXPECT_EQ(run({"tokenizer", "train", "--input", path("cjk.txt"), "--vocab", "1000", "--output",
                 path("t.model")}),
            kUsage);
  EXPECT_TRUE(says("larger vocabulary") && !says("smaller vocabulary")) << output();
  write_file(path("few.txt"), "a few words\n");
  EXPECT_EQ(run({"tokenizer", "train", "--input", path("few.txt"), "--vocab", "1000", "--output",
                 path("t.model")}),
            kUsage);
  EXPECT_TRUE(says("smaller vocabulary")) << output();
}

}  // namespace
}  // namespace sbtrain::test
