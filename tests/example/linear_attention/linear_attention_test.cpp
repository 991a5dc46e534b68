// A module from outside the library, through its public interface alone. Registered, it is known
// to the configuration, its reference of keys and its error messages, it trains, and
// support/attention_suite.cpp, which this program links, tests it as it does every module.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "attention/registry.h"
#include "config/schema.h"
#include "core/error.h"
#include "export/hf_layout.h"
#include "support/attention_suite.h"
#include "support/model.h"
#include "train/plan.h"

namespace sbtrain {

void register_linear_attention(AttentionRegistry& registry);

namespace test {

std::vector<std::string> modules_under_test() {
  return {"linear_attention"};
}

namespace {

const std::string kSource = SBTRAIN_SOURCE;
const std::string kExample = kSource + "/tests/example/linear_attention/";

std::string error_of(const std::function<void()>& call, ExitCode code) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

Config example() {
  return load_config(kExample + "linear_attention.yaml");
}

TEST(LinearAttention, IsConfiguredByItsName) {
  const Config config = example();
  EXPECT_EQ(config.model.attention.at(0), parse_attention("{type: linear_attention}"));
  EXPECT_EQ(parse_config(config_yaml(config), "printed"), config);
  EXPECT_EQ(flatten(config).at("model.attention.logit_scale"), "0");
}

TEST(LinearAttention, IsPartOfTheReferenceOfKeys) {
  EXPECT_NE(field_help("model.attention.type").find("linear_attention"), std::string::npos);
  EXPECT_NE(field_help("model.attention.logit_scale").find("linear_attention"), std::string::npos);
}

TEST(LinearAttention, RefusesOptionsOfOtherModules) {
  EXPECT_EQ(error_of([] { parse_attention("{type: linear_attention, remainder: value}"); },
                     ExitCode::kConfig),
            "attention:1:37: remainder: has a meaning only with type stickbreaking");
  EXPECT_EQ(
      error_of([] { parse_attention("{type: linear_atention}"); }, ExitCode::kConfig).substr(0, 27),
      "attention:1:8: type: expect");
}

TEST(LinearAttention, TrainsAModel) {
  ModelConfig model = example().model;
  model.layers = 2;
  model.vocab = 61;
  const PackedBatch batch = packed_batch({30, 1, 17}, model.vocab);
  ModelRun run(Backend::kCpu, model, batch);
  EXPECT_NEAR(run.backward(), std::log(61.0), 0.3);
  EXPECT_EQ(run.gradients().size(), run.masters().size());
}

// Where a backend lacks the operations, planning says so.
TEST(LinearAttention, IsNotOnCudaYet) {
  EXPECT_EQ(error_of([] { plan_memory(example(), Backend::kCuda); }, ExitCode::kConfig),
            "linear_attention_forward: not on CUDA yet; set device: cpu");
  EXPECT_GT(plan_memory(example(), Backend::kCpu).pool_bytes, 0U);
}

// An exported folder comes with Python code, to which the module has to be added as well.
TEST(LinearAttention, IsNotInThePythonCodeYet) {
  EXPECT_EQ(
      error_of([] { hf_layout(example(), ExportFormat::kHf, FileDType::kF32); }, ExitCode::kConfig),
      "attention of type linear_attention cannot be exported: modeling_sbtrain.py does not "
      "compute it");
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The blocks of ```cpp and ```yaml in a Markdown text.
std::vector<std::string> code_blocks(const std::string& markdown) {
  std::vector<std::string> blocks;
  std::istringstream lines(markdown);
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line == "```cpp" || line == "```yaml" || line == "```cmake") {
      blocks.emplace_back();
      inside = true;
    } else if (line == "```") {
      inside = false;
    } else if (inside) {
      blocks.back() += line + "\n";
    }
  }
  return blocks;
}

TEST(LinearAttention, IsWhatTheDocumentQuotes) {
  std::string files;
  for (const char* name : {"linear_attention.cpp", "linear_attention.yaml",
                           "linear_attention_test.cpp", "CMakeLists.txt"}) {
    files += text_of(kExample + name);
  }
  files += text_of(kSource + "/src/attention/CMakeLists.txt");
  files += text_of(kSource + "/src/attention/softmax.cpp");
  files += text_of(kSource + "/src/attention/stickbreaking.cpp");
  const std::vector<std::string> blocks =
      code_blocks(text_of(kSource + "/docs/adding_a_module.md"));
  EXPECT_GE(blocks.size(), 6U);
  for (const std::string& block : blocks) {
    EXPECT_NE(files.find(block), std::string::npos) << block;
  }
}

}  // namespace
}  // namespace test
}  // namespace sbtrain

int main(int argc, char** argv) {
  sbtrain::register_attention(sbtrain::register_linear_attention);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
