// The committed documents and configurations agree with the schema.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "config/keys.h"
#include "config/schema.h"
#include "core/error.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

const fs::path kSource = SBTRAIN_SOURCE;

TEST(Documents, ReferenceIsUpToDate) {
  std::ifstream file(kSource / "docs/config.md");
  std::stringstream committed;
  committed << file.rdbuf();
  EXPECT_EQ(committed.str(), config_markdown())
      << "run: sbtrain config docs > docs/config.md, and commit it";
}

TEST(Documents, EveryShippedConfigLoadsUnderItsName) {
  int count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(kSource / "configs")) {
    if (entry.path().extension() != ".yaml") continue;
    const Config config = load_config(entry.path());
    EXPECT_EQ(config.name, entry.path().stem()) << entry.path();
    EXPECT_EQ(parse_config(config_yaml(config), "printed"), config) << entry.path();
    ++count;
  }
  EXPECT_GE(count, 12);
}

int64_t parameters(const ModelConfig& m) {
  const int64_t block = 4 * m.width * m.width + 3 * m.width * m.inner + 2 * m.width;
  return m.vocab * m.width * (m.tied ? 1 : 2) + m.layers * block + m.width;
}

TEST(Documents, PaperConfigsHaveThePaperShapes) {
  struct Shape {
    const char* prefix;
    int64_t parameters, heads, head_dim, length;
  };
  for (const Shape& shape :
       {Shape{"350m", 367526912, 32, 32, 2048}, Shape{"1b", 1208083968, 24, 64, 4096},
        Shape{"3b", 3513473280, 36, 64, 4096}}) {
    for (const char* kind : {"sb", "rope"}) {
      const std::string name = std::string(shape.prefix) + "_" + kind + ".yaml";
      const Config config = load_config(kSource / "configs" / name);
      EXPECT_EQ(parameters(config.model), shape.parameters) << name;
      EXPECT_EQ(config.model.heads, shape.heads) << name;
      EXPECT_EQ(config.model.head_width(), shape.head_dim) << name;
      EXPECT_EQ(config.train.sequence_length, shape.length) << name;
      const bool sb = std::string(kind) == "sb";
      EXPECT_EQ(config.model.attention.at(0).type, sb ? "stickbreaking" : "softmax") << name;
    }
  }
  const Config shorter = load_config(kSource / "configs/350m_sb_1024.yaml");
  EXPECT_EQ(shorter.train.sequence_length, 1024);
  EXPECT_EQ(parameters(shorter.model), 367526912);
}

// All configurations of one experiment describe the same run; only attention and length may differ.
TEST(Documents, RunsThatAreComparedDifferInAttentionAlone) {
  const std::map<std::string, int> families = {{"tiny_", 4}, {"350m_", 10}, {"1b_", 2},
                                               {"3b_", 2},   {"maps_", 2},  {"lengths_", 10},
                                               {"neox_", 4}, {"mqrar_", 2}};
  for (const auto& [prefix, members] : families) {
    std::map<std::string, std::string> first;
    int count = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(kSource / "configs")) {
      const std::string name = entry.path().stem();
      const bool other_length =
          name.ends_with("_1024") || name.ends_with("_4096") || name.ends_with("_8192");
      if (!name.starts_with(prefix) || other_length) continue;
      auto keys = flatten(load_config(entry.path()));
      std::erase_if(keys, [](const auto& pair) {
        return pair.first == "name" || pair.first.starts_with("model.attention");
      });
      // Here heads of another size are what differs in attention.
      if (name == "lengths_sb_heads3") keys.at("model.heads") = "6";
      if (count++ == 0) first = keys;
      EXPECT_EQ(keys, first) << name;
    }
    EXPECT_GE(count, members) << prefix;
  }
}

TEST(Documents, HelpNamesEveryKey) {
  const std::string help = config_help();
  for (const schema::Key& key : schema::all_keys()) {
    EXPECT_FALSE(key.help.empty()) << key.path;
    if (key.kind != schema::Key::Kind::kScalar) continue;
    EXPECT_NE(help.find("--" + schema::short_path(key.path) + "  "), std::string::npos) << key.path;
    EXPECT_NE(field_help(key.path).find(schema::short_path(key.path)), std::string::npos);
  }
}

TEST(Documents, HelpOfAnUnknownKeyNamesTheNearest) {
  try {
    field_help("model.attention.typ");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_STREQ(error.what(),
                 "unknown key 'model.attention.typ'; did you mean 'model.attention.type'?");
  }
}

}  // namespace
}  // namespace sbtrain
