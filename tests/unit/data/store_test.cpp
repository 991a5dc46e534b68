#include <hdf5.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "data/document_store.h"
#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

namespace fs = std::filesystem;

class StoreTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  TemporaryFolder folder_;
};

std::vector<int32_t> all_tokens(const DocumentStore& store) {
  std::vector<int32_t> tokens(static_cast<size_t>(store.tokens()));
  store.read(0, tokens);
  return tokens;
}

TEST_F(StoreTest, RoundTrip) {
  for (const int32_t vocab : {4096, 65536, 65537, 1000000}) {
    const Documents documents = random_documents(1, 300, 0, 2000, vocab);
    const std::string file = path(fmt::format("{}.h5", vocab));
    const StoreInfo written = write_store(file, documents, vocab);
    const DocumentStore store(file);
    EXPECT_EQ(store.info().token_bytes(), vocab > 65536 ? 4 : 2);
    EXPECT_EQ(store.documents(), 300);
    EXPECT_EQ(store.info().vocab, vocab);
    EXPECT_EQ(store.info().tokenizer_hash, "t");
    EXPECT_EQ(store.info().bos, 1);
    EXPECT_EQ(store.info().eos, 2);
    EXPECT_TRUE(store.info().ends_with_eos);
    EXPECT_FALSE(store.info().starts_with_bos);
    EXPECT_EQ(store.info().text_bytes, 4);
    EXPECT_EQ(store.info().sources, written.sources);
    EXPECT_EQ(store.info().content_hash, written.content_hash);
    for (size_t i = 0; i < documents.size(); ++i) {
      const auto n = static_cast<int64_t>(i);
      ASSERT_EQ(store.length(n), static_cast<int64_t>(documents[i].size()));
      std::vector<int32_t> tokens(documents[i].size());
      store.read(static_cast<int64_t>(store.offsets()[i]), tokens);
      ASSERT_EQ(tokens, documents[i]);
    }
    store.verify_content();
    EXPECT_FALSE(fs::exists(file + ".tmp"));
    EXPECT_FALSE(fs::exists(file + ".tokens.tmp"));
  }
}

TEST_F(StoreTest, Hdf5ReadsItToo) {
  const Documents documents = random_documents(2, 50, 1, 500, 4096);
  write_store(path("a.h5"), documents, 4096);
  const DocumentStore store(path("a.h5"));
  const hid_t file = H5Fopen(path("a.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  ASSERT_GE(file, 0);
  const hid_t set = H5Dopen2(file, "tokens", H5P_DEFAULT);
  ASSERT_GE(set, 0);
  std::vector<int32_t> tokens(static_cast<size_t>(store.tokens()));
  ASSERT_GE(H5Dread(set, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, tokens.data()), 0);
  H5Dclose(set);
  H5Fclose(file);
  EXPECT_EQ(tokens, all_tokens(store));
}

TEST_F(StoreTest, SameContentSameBytes) {
  const Documents documents = random_documents(3, 50, 1, 500, 4096);
  write_store(path("a.h5"), documents, 4096);
  write_store(path("b.h5"), documents, 4096);
  EXPECT_TRUE(read_file(path("a.h5")) == read_file(path("b.h5")));
  Documents changed = documents;
  changed[7][0] ^= 1;
  EXPECT_NE(write_store(path("c.h5"), changed, 4096).content_hash,
            DocumentStore(path("a.h5")).info().content_hash);
  // The same tokens with another boundary between documents have another content hash.
  changed = documents;
  changed[8].insert(changed[8].begin(), changed[7].back());
  changed[7].pop_back();
  EXPECT_NE(write_store(path("d.h5"), changed, 4096).content_hash,
            DocumentStore(path("a.h5")).info().content_hash);
}

TEST_F(StoreTest, RefusesTruncation) {
  write_store(path("a.h5"), random_documents(4, 100, 1, 3000, 4096), 4096);
  const std::string whole = read_file(path("a.h5"));
  const size_t size = whole.size();
  for (const size_t keep : {size_t{0}, size_t{1}, size_t{95}, size_t{96}, size / 4, size / 2,
                            size - 97, size - 96, size - 95, size - 1}) {
    write_file(path("cut.h5"), whole.substr(0, keep));
    const Thrown error = thrown_by([&] { DocumentStore store(path("cut.h5")); });
    EXPECT_EQ(error.code, ExitCode::kData) << keep;
    EXPECT_TRUE(error.says("cut.h5") && error.says("truncated")) << error.message;
  }
  write_file(path("long.h5"), whole + "x");
  EXPECT_EQ(thrown_by([&] { DocumentStore store(path("long.h5")); }).code, ExitCode::kData);
  // A piece in the middle is missing.
  write_file(path("hole.h5"), whole.substr(0, size / 2) + whole.substr(size / 2 + 512));
  EXPECT_EQ(thrown_by([&] { DocumentStore store(path("hole.h5")); }).code, ExitCode::kData);
}

TEST_F(StoreTest, RefusesEveryFlippedBit) {
  // The file is so small that one bit of every byte can be tried.
  write_store(path("a.h5"), random_documents(5, 6, 1, 60, 4096), 4096);
  const std::string whole = read_file(path("a.h5"));
  ASSERT_LT(whole.size(), 20000u);
  write_file(path("b.h5"), whole);
  const auto put = [&](size_t at, char byte) {
    std::fstream file(path("b.h5"), std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
  };
  for (size_t i = 0; i < whole.size(); ++i) {
    put(i, static_cast<char>(whole[i] ^ (1 << (i * 5 % 8))));
    const Thrown error = thrown_by([&] {
      const DocumentStore store(path("b.h5"));
      store.verify();
    });
    ASSERT_EQ(error.code, ExitCode::kData) << "byte " << i << ": " << error.message;
    ASSERT_TRUE(error.says("b.h5")) << error.message;
    put(i, whole[i]);
  }
  DocumentStore(path("b.h5")).verify();
}

TEST_F(StoreTest, ChecksEachBlockBeforeItsFirstUse) {
  const Documents documents = random_documents(6, 100, 3000, 4000, 4096);
  write_store(path("a.h5"), documents, 4096);
  std::string bytes = read_file(path("a.h5"));
  // Only the seal follows the tokens in the file.
  const DocumentStore good(path("a.h5"));
  const int64_t blocks = (good.tokens() * 2 + kBlockBytes - 1) / kBlockBytes;
  ASSERT_GE(blocks, 4);
  const size_t tokens_begin = bytes.size() - 96 - static_cast<size_t>(good.tokens()) * 2;
  bytes[tokens_begin + static_cast<size_t>(2 * kBlockBytes) + 5] ^= 1;
  write_file(path("b.h5"), bytes);
  const DocumentStore bad(path("b.h5"));  // opening does not read the tokens
  const int64_t in_block = kBlockBytes / 2;
  std::vector<int32_t> tokens(10);
  bad.read(0, tokens);
  bad.read(2 * in_block - 10, tokens);
  EXPECT_EQ(thrown_by([&] { bad.read(2 * in_block - 9, tokens); }).code, ExitCode::kData);
  EXPECT_EQ(thrown_by([&] { bad.read(3 * in_block - 1, tokens); }).code, ExitCode::kData);
  bad.read(3 * in_block, tokens);
  EXPECT_EQ(thrown_by([&] { bad.verify(); }).code, ExitCode::kData);
  // Still refused on a second try.
  EXPECT_EQ(thrown_by([&] { bad.read(2 * in_block, tokens); }).code, ExitCode::kData);
}

TEST_F(StoreTest, AnUnfinishedFileNeverHasTheName) {
  {
    StoreInfo format;
    format.vocab = 100;
    DocumentWriter writer(path("a.h5"), format);
    const std::vector<int32_t> tokens(200000, 7);
    writer.append(tokens);
    EXPECT_FALSE(fs::exists(path("a.h5")));
    // The file that a crash would leave, under any name.
    fs::copy_file(path("a.h5.tmp"), path("left.h5"));
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()) || !fs::exists(path("a.h5")));
  EXPECT_FALSE(fs::exists(path("a.h5.tmp")));
  EXPECT_FALSE(fs::exists(path("a.h5.tokens.tmp")));
  const Thrown error = thrown_by([&] { DocumentStore store(path("left.h5")); });
  EXPECT_EQ(error.code, ExitCode::kData);
  EXPECT_TRUE(error.says("unfinished")) << error.message;
}

TEST_F(StoreTest, AFinishedFileWithoutItsSealIsUnfinished) {
  write_store(path("a.h5"), random_documents(8, 6, 1, 60, 4096), 4096);
  const std::string whole = read_file(path("a.h5"));
  write_file(path("b.h5"), whole.substr(0, whole.size() - 96));
  EXPECT_TRUE(thrown_by([&] { DocumentStore store(path("b.h5")); }).says("unfinished"));
  write_file(path("c.h5"), whole.substr(0, whole.size() - 96) + std::string(96, '\0'));
  EXPECT_TRUE(thrown_by([&] { DocumentStore store(path("c.h5")); }).says("unfinished"));
}

TEST_F(StoreTest, AChangeInPlaceIsNoticedWhileTheFileIsOpen) {
  const Documents documents = random_documents(9, 50, 1000, 2000, 4096);
  write_store(path("a.h5"), documents, 4096);
  const DocumentStore store(path("a.h5"));
  store.verify();
  std::vector<int32_t> tokens(1000);
  store.read(0, tokens);
  const std::vector<int32_t> before = tokens;
  const std::string bytes = read_file(path("a.h5"));
  // Finds the place of the first document's tokens.
  std::string needle;
  for (size_t i = 0; i < 8; ++i) {
    const auto token = static_cast<uint16_t>(documents[0][i]);
    needle.append(reinterpret_cast<const char*>(&token), sizeof token);
  }
  const size_t at = bytes.find(needle);
  ASSERT_NE(at, std::string::npos);
  const auto overwrite = [&](const std::string& by) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // over a tick of the file's clock
    std::fstream file(path("a.h5"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file << by;
  };
  overwrite(std::string(2, '\0'));
  const Thrown changed = thrown_by([&] { store.read(0, tokens); });
  EXPECT_EQ(changed.code, ExitCode::kData);
  EXPECT_TRUE(changed.says("a.h5")) << changed.message;
  // A file that was only touched, or has been restored, is accepted.
  overwrite(needle);
  store.read(0, tokens);
  EXPECT_EQ(tokens, before);
  fs::last_write_time(path("a.h5"), fs::file_time_type::clock::now());
  store.read(0, tokens);
  EXPECT_EQ(tokens, before);
  // A new file of the same name does not affect the store, which still reads the old file.
  write_file(path("b.h5"), "other");
  fs::rename(path("b.h5"), path("a.h5"));
  store.read(0, tokens);
  EXPECT_EQ(tokens, before);
}

TEST_F(StoreTest, RefusesOtherFiles) {
  EXPECT_EQ(thrown_by([&] { DocumentStore store(path("none.h5")); }).code, ExitCode::kData);
  EXPECT_EQ(thrown_by([&] { DocumentStore store(folder_.path().string()); }).code, ExitCode::kData);
  write_file(path("text.h5"), std::string(5000, 'x'));
  EXPECT_EQ(thrown_by([&] { DocumentStore store(path("text.h5")); }).code, ExitCode::kData);
  EXPECT_EQ(thrown_by([&] { write_store(path("e.h5"), {}, 100); }).code, ExitCode::kData);
  EXPECT_EQ(thrown_by([&] { write_store(path("f.h5"), {{100}}, 100); }).code, ExitCode::kInternal);
  EXPECT_EQ(thrown_by([&] { write_store("/proc/none/f.h5", {{1}}, 100); }).code,
            ExitCode::kStorage);
}

}  // namespace
}  // namespace sbtrain::test
