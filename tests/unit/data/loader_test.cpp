#include "data/loader.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <sstream>
#include <thread>

#include "config/schema.h"
#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

bool same(const PackedBatch& a, const PackedBatch& b) {
  return a.tokens == b.tokens && a.targets == b.targets && a.positions == b.positions &&
         a.cu_seqlens == b.cu_seqlens && a.valid_targets == b.valid_targets;
}

class LoaderTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    write_store(store("a"), random_documents(1, 60, 1, 90, 50000), 50000);
    write_store(store("b"), random_documents(2, 25, 0, 200, 50000), 50000);
    write_store(store("c"), random_documents(3, 40, 5, 20, 50000), 50000);
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static std::string store(const std::string& name) { return *folder_ / (name + ".h5"); }

  static LoaderOptions options(Packing packing = Packing::kConcat, int rank = 0, int world = 1) {
    LoaderOptions o;
    o.sources = {{store("a"), 3}, {store("b"), 1}};
    o.packing = packing;
    o.sequence_length = 32;
    o.micro_batch = 2;
    o.batch = 16;
    o.seed = 5;
    o.rank = rank;
    o.world = world;
    return o;
  }

  static inline std::unique_ptr<TemporaryFolder> folder_;
};

// The rows of `steps` optimizer steps in the global order, put together from all ranks.
std::vector<std::vector<int32_t>> global_rows(LoaderOptions o, int world, int steps) {
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(o.batch * steps));
  o.world = world;
  o.micro_batch = std::min<int64_t>(o.micro_batch, o.batch / world);
  const auto length = static_cast<size_t>(o.sequence_length);
  for (o.rank = 0; o.rank < world; ++o.rank) {
    Loader loader(o);
    for (int step = 0; step < steps; ++step) {
      int64_t row = step * o.batch + o.rank * (o.batch / world);
      for (int64_t m = 0; m < loader.micro_batches_per_step(); ++m) {
        const PackedBatch batch = loader.next();
        for (int64_t i = 0; i < o.micro_batch; ++i, ++row) {
          const auto begin = batch.tokens.begin() + i * o.sequence_length;
          auto& out = rows[static_cast<size_t>(row)];
          out.assign(begin, begin + o.sequence_length);
          const auto targets = batch.targets.begin() + i * o.sequence_length;
          out.insert(out.end(), targets, targets + o.sequence_length);
          EXPECT_EQ(out.size(), 2 * length);
        }
      }
    }
  }
  return rows;
}

TEST_F(LoaderTest, SameOrderForEveryWorldSize) {
  for (const Packing packing : {Packing::kConcat, Packing::kBestFit}) {
    const auto reference = global_rows(options(packing), 1, 12);
    for (const int world : {2, 4, 8}) {
      EXPECT_EQ(global_rows(options(packing), world, 12), reference)
          << name_of(packing) << " " << world;
    }
  }
}

TEST_F(LoaderTest, SeedChangesTheOrder) {
  LoaderOptions other = options();
  other.seed = 6;
  EXPECT_NE(global_rows(options(), 1, 2), global_rows(other, 1, 2));
}

TEST_F(LoaderTest, BatchesAreWellFormed) {
  for (const Packing packing : {Packing::kConcat, Packing::kBestFit}) {
    Loader loader(options(packing));
    EXPECT_EQ(loader.vocab(), 50000);
    EXPECT_EQ(loader.micro_batches_per_step(), 8);
    for (int i = 0; i < 100; ++i) {
      const PackedBatch batch = loader.next();
      ASSERT_EQ(batch.tokens.size(), 64u);
      ASSERT_EQ(batch.targets.size(), 64u);
      ASSERT_EQ(batch.positions.size(), 64u);
      ASSERT_EQ(batch.cu_seqlens.front(), 0);
      ASSERT_EQ(batch.cu_seqlens.back(), 64);
      ASSERT_TRUE(std::find(batch.cu_seqlens.begin(), batch.cu_seqlens.end(), 32) !=
                  batch.cu_seqlens.end());
      ASSERT_EQ(batch.valid_targets, std::count_if(batch.targets.begin(), batch.targets.end(),
                                                   [](int32_t t) { return t >= 0; }));
      for (size_t n = 0; n + 1 < batch.cu_seqlens.size(); ++n) {
        for (int32_t k = batch.cu_seqlens[n]; k < batch.cu_seqlens[n + 1]; ++k) {
          ASSERT_EQ(batch.positions[static_cast<size_t>(k)], k - batch.cu_seqlens[n]);
        }
      }
    }
  }
}

TEST_F(LoaderTest, ResumesExactlyAfterEveryMicroBatch) {
  for (const Packing packing : {Packing::kConcat, Packing::kBestFit}) {
    const int total = 190;  // several epochs of both sources
    std::vector<PackedBatch> batches;
    std::vector<std::string> states;
    {
      Loader loader(options(packing));
      for (int i = 0; i < total; ++i) {
        states.push_back(loader.state().to_json());
        batches.push_back(loader.next());
      }
      EXPECT_GT(loader.state().sources[0].cursor.epoch, 1);
      EXPECT_GT(loader.state().sources[1].cursor.epoch, 0);
    }
    for (int i = 0; i < total; ++i) {
      const LoaderState state = LoaderState::from_json(states[static_cast<size_t>(i)]);
      Loader resumed(options(packing), &state);
      EXPECT_EQ(resumed.state(), state);
      for (int k = i; k < std::min(total, i + 10); ++k) {
        ASSERT_TRUE(same(resumed.next(), batches[static_cast<size_t>(k)]))
            << name_of(packing) << " " << i;
        if (k + 1 < total) {
          ASSERT_EQ(resumed.state().to_json(), states[static_cast<size_t>(k) + 1]);
        }
      }
    }
  }
}

TEST_F(LoaderTest, ResumesBetweenStepsWithAnotherWorldSize) {
  LoaderOptions o = options();
  const auto reference = global_rows(o, 1, 6);
  Loader first(o);
  for (int64_t m = 0; m < 2 * first.micro_batches_per_step(); ++m) first.next();
  const LoaderState state = first.state();
  ASSERT_EQ(state.step, 2);
  ASSERT_EQ(state.micro, 0);
  for (int rank = 0; rank < 4; ++rank) {
    Loader resumed(options(Packing::kConcat, rank, 4), &state);
    const PackedBatch batch = resumed.next();
    const auto& row = reference[static_cast<size_t>(2 * 16 + rank * 4)];
    EXPECT_TRUE(std::equal(batch.tokens.begin(), batch.tokens.begin() + 32, row.begin()));
  }
  // A state inside a step fits one world size only.
  first.next();
  const LoaderState inside = first.state();
  EXPECT_EQ(thrown_by([&] { Loader loader(options(Packing::kConcat, 0, 4), &inside); }).code,
            ExitCode::kConfig);
}

TEST_F(LoaderTest, EveryTokenOfAnEpochOnce) {
  for (const Packing packing : {Packing::kConcat, Packing::kBestFit}) {
    // Every token is its own index, so the batches show which tokens were seen.
    const Documents documents = numbered_documents({40, 3, 77, 1, 32, 64, 31, 33, 500, 2, 9, 8});
    write_store(store("numbered"), documents, 1000);
    LoaderOptions o = options(packing);
    o.sources = {{store("numbered"), 1}};
    o.batch = o.micro_batch;
    Loader loader(o);
    std::map<int32_t, int> times;
    // Up to the end of the first epoch; the last batch may hold rows of the second.
    while (loader.state().sources[0].cursor.epoch == 0) {
      const PackedBatch batch = loader.next();
      for (size_t n = 0; n + 1 < batch.cu_seqlens.size(); ++n) {
        const auto begin = static_cast<size_t>(batch.cu_seqlens[n]);
        const auto end = static_cast<size_t>(batch.cu_seqlens[n + 1]);
        const bool padding = end - begin > 1 && batch.targets[begin] < 0;
        for (size_t k = begin; k < end && !padding; ++k) ++times[batch.tokens[k]];
      }
    }
    ASSERT_EQ(times.size(), 800u) << name_of(packing);
    int repeated = 0;
    for (const auto& [token, count] : times) repeated += count - 1;
    EXPECT_LE(repeated, 2 * 32) << name_of(packing);
  }
}

TEST_F(LoaderTest, MixtureShares) {
  Loader loader(options());
  for (int i = 0; i < 800; ++i) loader.next();
  const LoaderState state = loader.state();
  const auto a = static_cast<double>(state.sources[0].taken);
  const auto b = static_cast<double>(state.sources[1].taken);
  EXPECT_LE(a + b, 800.0 * 64);  // the last row of an epoch may hold padding
  EXPECT_GE(a + b, 0.99 * 800.0 * 64);
  EXPECT_NEAR(a / (a + b), 0.75, 0.002);
}

TEST_F(LoaderTest, ANewStageGoesOnWithItsSources) {
  Loader first(options());
  for (int i = 0; i < 24; ++i) first.next();
  const LoaderState before = first.state();

  LoaderOptions second = options();
  second.stage = 1;
  second.sources = {{store("c"), 1}, {store("a"), 1}};
  std::string middle;
  std::vector<PackedBatch> rest;
  {
    Loader loader(second, &before);
    LoaderState state = loader.state();
    ASSERT_EQ(state.sources.size(), 3u);
    EXPECT_EQ(state.sources[0].cursor, SourceCursor{});
    EXPECT_EQ(state.sources[1].cursor, before.sources[0].cursor);
    EXPECT_EQ(state.sources[1].taken, 0);
    EXPECT_FALSE(state.sources[2].active);
    EXPECT_EQ(state.step, 3);
    for (int i = 0; i < 16; ++i) loader.next();
    middle = loader.state().to_json();
    for (int i = 0; i < 16; ++i) rest.push_back(loader.next());
  }
  const LoaderState state = LoaderState::from_json(middle);
  Loader resumed(second, &state);
  for (const PackedBatch& batch : rest) ASSERT_TRUE(same(resumed.next(), batch));

  // A third stage continues the source that the second left out, where it stopped.
  LoaderOptions third = options();
  third.stage = 2;
  third.sources = {{store("b"), 1}};
  Loader again(third, &state);
  EXPECT_EQ(again.state().sources[0].cursor, before.sources[1].cursor);
  // A run cannot return to an earlier stage.
  EXPECT_EQ(thrown_by([&] { Loader back(options(), &state); }).code, ExitCode::kConfig);
}

TEST_F(LoaderTest, RefusesAStateOfOtherData) {
  Loader loader(options());
  for (int i = 0; i < 8; ++i) loader.next();
  const LoaderState state = loader.state();
  LoaderOptions other = options();
  other.seed = 77;
  other.batch = 32;
  other.sources[1].path = store("c");
  other.sources[0].weight = 9;
  const Thrown error = thrown_by([&] { Loader refused(other, &state); });
  EXPECT_EQ(error.code, ExitCode::kConfig);
  for (const char* field :
       {"seed: 5 in the checkpoint, 77 now", "train.batch: 16", "data.sources.1.content_hash",
        "data.sources.0.weight", "--checkpoint.allow_changes='[name, ...]'"}) {
    EXPECT_TRUE(error.says(field)) << field << " is missing in: " << error.message;
  }
  EXPECT_FALSE(error.says("packing")) << error.message;
  // Field by field.
  other = options();
  other.batch = 32;
  other.seed = 6;
  other.accept_changes = {"train.batch"};
  EXPECT_TRUE(thrown_by([&] { Loader refused(other, &state); }).says("seed"));
  other.accept_changes = {"train.batch", "seed"};
  Loader accepted(other, &state);
  accepted.next();
  // A file that has moved is still the same data.
  const std::string moved = *folder_ / "moved.h5";
  std::filesystem::copy_file(store("a"), moved, std::filesystem::copy_options::overwrite_existing);
  other = options();
  other.sources[0].path = moved;
  Loader same_data(other, &state);
  EXPECT_TRUE(same(same_data.next(), loader.next()));
}

// The configuration knows the names by which the loader's fields are allowed to change.
TEST_F(LoaderTest, TheConfigurationAcceptsEveryNameThatARefusalGives) {
  Loader loader(options());
  LoaderState state = loader.state();
  state.seed = 6;
  state.packing = "another";
  state.predict_across_documents = !state.predict_across_documents;
  state.sequence_length *= 2;
  state.batch *= 2;
  state.tokenizer_hash = "another";
  for (LoaderState::Source& source : state.sources) {
    source.content_hash = "another";
    ++source.documents;
    ++source.tokens;
    source.weight *= 2;
  }
  state.sources.push_back(state.sources.front());
  const std::string refusal = thrown_by([&] { Loader refused(options(), &state); }).message;
  std::string names;
  std::istringstream lines(refusal);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  ")) continue;
    names += (names.empty() ? "" : ", ") + line.substr(2, line.find(':') - 2);
  }
  EXPECT_EQ(std::ranges::count(names, ','), 14) << refusal;
  const std::vector<Override> overrides = {{"stages", "[{length: 1}]", "--stages"},
                                           {"data.sources", "[{path: a.h5}]", "--data.sources"},
                                           {"checkpoint.allow_changes", "[" + names + "]", "it"}};
  EXPECT_NO_THROW(load_config("", overrides)) << names;
}

TEST_F(LoaderTest, RefusesBadOptions) {
  const auto code = [&](const std::function<void(LoaderOptions&)>& change) {
    LoaderOptions o = options();
    change(o);
    return thrown_by([&] { Loader loader(o); }).code;
  };
  EXPECT_EQ(code([](auto& o) { o.batch = 15; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.world = 3; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.sources.clear(); }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.sources.push_back(o.sources[0]); }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.sources[0].weight = 0; }), ExitCode::kConfig);
  EXPECT_EQ(code([](auto& o) { o.sources[0].path += "x"; }), ExitCode::kData);
  const std::string other = *folder_ / "other_tokenizer.h5";
  write_store(other, random_documents(4, 5, 1, 9, 100), 100, "u");
  EXPECT_EQ(code([&](auto& o) { o.sources[0].path = other; }), ExitCode::kConfig);
}

TEST_F(LoaderTest, RefusesDamagedData) {
  std::string bytes = read_file(store("a"));
  bytes[bytes.size() - 96 - 3] ^= 16;  // the last tokens
  const std::string damaged = *folder_ / "damaged.h5";
  write_file(damaged, bytes);
  LoaderOptions o = options();
  o.sources[0].path = damaged;
  const Thrown error = thrown_by([&] { Loader loader(o); });
  EXPECT_EQ(error.code, ExitCode::kData);
  EXPECT_TRUE(error.says("damaged.h5"));
}

TEST_F(LoaderTest, StateIsWhatWasTakenNotWhatWasPrepared) {
  LoaderOptions o = options();
  o.prefetch = 64;
  Loader loader(o);
  const LoaderState at_start = loader.state();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // lets the loader prepare batches
  EXPECT_EQ(loader.state(), at_start);
  loader.next();
  EXPECT_EQ(loader.state().micro, 1);
}

TEST_F(LoaderTest, StartsAndStopsAtAnyMoment) {
  for (int i = 0; i < 60; ++i) {
    LoaderOptions o = options(i % 2 == 0 ? Packing::kConcat : Packing::kBestFit);
    o.prefetch = 1 + i % 5;
    Loader loader(o);
    for (int k = 0; k < i % 7; ++k) loader.next();
  }
}

TEST_F(LoaderTest, StateSurvivesJsonAndBadJsonIsRefused) {
  Loader loader(options(Packing::kBestFit));
  for (int i = 0; i < 11; ++i) loader.next();
  const LoaderState state = loader.state();
  EXPECT_EQ(LoaderState::from_json(state.to_json()), state);
  for (const char* bad : {"", "{", "[]", "{\"version\": 1}", "{\"version\": 2}", "null"}) {
    EXPECT_EQ(thrown_by([&] { LoaderState::from_json(bad); }).code, ExitCode::kData) << bad;
  }
}

// Values that no loader writes would be used as indices, or overflow.
TEST_F(LoaderTest, CountersOutOfRangeAreRefusedByName) {
  Loader loader(options());
  loader.next();
  const LoaderState good = loader.state();
  const auto refused = [&](const std::string& key, auto&& change) {
    LoaderState state = good;
    change(state);
    const auto error = thrown_by([&] { LoaderState::from_json(state.to_json()); });
    EXPECT_EQ(error.code, ExitCode::kData) << key;
    EXPECT_NE(error.message.find(key + " is "), std::string::npos) << error.message;
  };
  constexpr int64_t kHuge = INT64_MAX;
  for (const int64_t bad : {int64_t{-1}, kHuge}) {
    refused("micro", [&](LoaderState& s) { s.micro = bad; });
    refused("step", [&](LoaderState& s) { s.step = bad; });
    refused("stage", [&](LoaderState& s) { s.stage = bad; });
    refused("batch", [&](LoaderState& s) { s.batch = bad; });
    refused("micro_batch", [&](LoaderState& s) { s.micro_batch = bad; });
    refused("world", [&](LoaderState& s) { s.world = bad; });
    refused("sequence_length", [&](LoaderState& s) { s.sequence_length = bad; });
    refused("epoch", [&](LoaderState& s) { s.sources[0].cursor.epoch = bad; });
    refused("position", [&](LoaderState& s) { s.sources[0].cursor.position = bad; });
    refused("offset", [&](LoaderState& s) { s.sources[0].cursor.offset = bad; });
    refused("taken", [&](LoaderState& s) { s.sources[0].taken = bad; });
  }
  refused("weight", [](LoaderState& s) { s.sources[0].weight = 0; });
  std::string text = good.to_json();
  const std::string step = "\"step\":" + std::to_string(good.step);
  ASSERT_NE(text.find(step), std::string::npos) << text;
  text.replace(text.find(step), step.size(), "\"step\":1e30");
  EXPECT_EQ(thrown_by([&] { LoaderState::from_json(text); }).code, ExitCode::kData);
}

TEST_F(LoaderTest, Validation) {
  const Documents documents = numbered_documents({40, 0, 3, 77, 1, 32, 64, 31, 33, 10});
  const std::string path = *folder_ / "validation.h5";
  write_store(path, documents, 1000);
  // The whole store: each token once, in order, with targets inside of documents.
  const ValidationReader all(path, 16, 2, 1000);
  EXPECT_EQ(all.rows(), 19);
  int32_t expected = 0;
  int64_t valid = 0;
  for (int64_t i = 0; i < all.batches(); ++i) {
    const PackedBatch batch = all.batch(i);
    ASSERT_EQ(batch.tokens.size(), 32u);
    ASSERT_EQ(batch.cu_seqlens.back(), 32);
    valid += batch.valid_targets;
    for (size_t k = 0; k < 32 && expected < 291; ++k) {
      ASSERT_EQ(batch.tokens[k], expected++);
      if (batch.targets[k] >= 0) {
        ASSERT_EQ(batch.targets[k], expected);
      }
    }
  }
  EXPECT_EQ(expected, 291);
  EXPECT_EQ(valid, 291 - 9);  // all but the last token of each document

  // A part of the store: several ranks together read the same rows as one rank.
  const ValidationReader part(path, 16, 1, 5 * 16 + 3);
  EXPECT_EQ(part.rows(), 5);
  std::set<int32_t> one;
  for (int64_t i = 0; i < part.batches(); ++i) one.insert(part.batch(i).tokens[0]);
  EXPECT_EQ(one.size(), 5u);
  EXPECT_GT(*one.rbegin(), 200) << "the rows are spread over the store";
  std::set<int32_t> four;
  for (int rank = 0; rank < 4; ++rank) {
    const ValidationReader reader(path, 16, 1, 5 * 16 + 3, false, rank, 4);
    EXPECT_EQ(reader.batches(), 2);
    for (int64_t i = 0; i < 2; ++i) {
      const PackedBatch batch = reader.batch(i);
      if (batch.valid_targets > 0) four.insert(batch.tokens[0]);
    }
  }
  EXPECT_EQ(four, one);
}

}  // namespace
}  // namespace sbtrain::test
