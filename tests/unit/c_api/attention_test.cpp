// The C interface of the attention kernels, as far as it needs no GPU: structs of other versions,
// refusals by name, and workspace, which has to be what the program plans for the same kernels.
#include "sbtrain/attention.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/scratch_sizes.h"
#include "ops/choose.h"

extern "C" int plan_from_c(uint64_t* bytes);

namespace sbtrain {
namespace {

using kernels::align_scratch;

template <typename Call>
Call call_of(int heads, int head_dim, int64_t sequences, int64_t max_seqlen) {
  Call x = SBTRAIN_INIT(Call);
  x.compute_capability = 90;
  x.heads = heads, x.head_dim = head_dim;
  x.tokens = sequences * max_seqlen, x.sequences = sequences, x.max_seqlen = max_seqlen;
  x.scale = 0.125f;
  return x;
}
sbtrain_stickbreaking stick() {
  return call_of<sbtrain_stickbreaking>(8, 64, 2, 1000);
}

uint64_t workspace(const sbtrain_stickbreaking& x, bool backward) {
  uint64_t bytes = 0;
  EXPECT_EQ(sbtrain_stickbreaking_workspace(&x, backward, &bytes), SBTRAIN_OK)
      << sbtrain_last_error();
  return bytes;
}
uint64_t workspace(const sbtrain_softmax& x, bool backward) {
  uint64_t bytes = 0;
  EXPECT_EQ(sbtrain_softmax_workspace(&x, backward, &bytes), SBTRAIN_OK) << sbtrain_last_error();
  return bytes;
}

// The code of planning x, and the text.
int code_of(const sbtrain_stickbreaking& x) {
  uint64_t bytes = 0;
  return sbtrain_stickbreaking_workspace(&x, 1, &bytes);
}
std::string text() {
  return sbtrain_last_error();
}

// Positions and cu_seqlens.
template <typename Call>
uint64_t before_the_kernels(const Call& x) {
  const auto bytes = [](int64_t n) { return align_scratch(static_cast<size_t>(n)); };
  return bytes(x.tokens * 4) + bytes((x.sequences + 1) * 4);
}

TEST(CInterface, TheHeaderIsCAndItsExamplePlans) {
  uint64_t bytes = 0;
  EXPECT_EQ(plan_from_c(&bytes), SBTRAIN_OK) << text();
  EXPECT_GT(bytes, 4096u * 4);
  EXPECT_EQ(sbtrain_attention_version(), static_cast<uint32_t>(SBTRAIN_ATTENTION_VERSION));
  EXPECT_NE(std::string(sbtrain_attention_build()).find("CUDA"), std::string::npos);
  EXPECT_STREQ(sbtrain_code_name(SBTRAIN_DRIVER), "driver");
  EXPECT_STREQ(sbtrain_code_name(99), "unknown");
}

TEST(CInterface, StickBreakingTakesTheScratchThatTheProgramPlans) {
  for (const int capability : {80, 90, 100}) {
    for (const int d : {32, 64, 72, 128}) {
      for (const int64_t length : {60, 1000, 70000}) {
        for (const bool gated : {false, true}) {
          for (const bool backward : {false, true}) {
            auto x = call_of<sbtrain_stickbreaking>(8, d, 2, length);
            x.compute_capability = capability;
            x.kv_heads = d == 64 ? 2 : 0;
            x.remainder = length == 60 ? SBTRAIN_REMAINDER_VECTOR : SBTRAIN_REMAINDER_NONE;
            const float gate = 1.0f;
            if (gated) x.gate = &gate;
            Target target(Backend::kCuda);
            target.sm = capability;
            const auto choice =
                ops::choose(ops::StickBreakingShape{.backward = backward,
                                                    .tokens = x.tokens,
                                                    .heads = 8,
                                                    .head_dim = d,
                                                    .max_seqlen = length,
                                                    .gated = gated,
                                                    .learned_remainder = length == 60,
                                                    .group = d == 64 ? 4 : 1},
                            target);
            EXPECT_EQ(workspace(x, backward), before_the_kernels(x) + align_scratch(choice.bytes))
                << capability << " " << d << " " << length << " " << gated << " " << backward;
          }
        }
      }
    }
  }
}

TEST(CInterface, SoftmaxTakesTheScratchThatTheProgramPlans) {
  for (const int capability : {80, 90}) {
    for (const int bias : {SBTRAIN_BIAS_ALIBI, SBTRAIN_BIAS_FIRE}) {
      for (const int d : {32, 64, 128}) {
        for (const int64_t length : {1000, 2048, 4096}) {
          for (const bool backward : {false, true}) {
            auto x = call_of<sbtrain_softmax>(8, d, 2, length);
            x.compute_capability = capability;
            x.bias = bias;
            Target target(Backend::kCuda);
            target.sm = capability;
            target.cudnn = 0;
            const auto choice =
                ops::choose(ops::SoftmaxShape{.backward = backward,
                                              .bias = static_cast<ops::PositionBias>(bias),
                                              .tokens = x.tokens,
                                              .heads = 8,
                                              .head_dim = d,
                                              .max_seqlen = length},
                            target);
            EXPECT_EQ(workspace(x, backward), before_the_kernels(x) + align_scratch(choice.bytes))
                << capability << " " << bias << " " << d << " " << length << " " << backward;
          }
        }
      }
    }
  }
}

TEST(CInterface, StructsOfOlderAndNewerHeaders) {
  // An older header ends before the workspace; what it lacks is zero.
  auto older = stick();
  older.struct_size = offsetof(sbtrain_stickbreaking, d_remainder_vector);
  older.workspace_bytes = ~uint64_t{0};
  EXPECT_EQ(code_of(older), SBTRAIN_OK) << text();
  // A newer one has fields behind, which do not matter while they are zero.
  struct Newer {
    sbtrain_stickbreaking x;
    uint64_t field;
  } newer{stick(), 0};
  newer.x.struct_size = sizeof newer;
  EXPECT_EQ(code_of(newer.x), SBTRAIN_OK) << text();
  newer.field = 1;
  EXPECT_EQ(code_of(newer.x), SBTRAIN_VERSION);
  EXPECT_NE(text().find("update the library"), std::string::npos) << text();
  auto future = stick();
  future.version = SBTRAIN_ATTENTION_VERSION + 1;
  EXPECT_EQ(code_of(future), SBTRAIN_VERSION);
  auto empty = stick();
  empty.struct_size = 0;
  EXPECT_EQ(code_of(empty), SBTRAIN_INVALID);
  EXPECT_NE(text().find("struct_size"), std::string::npos) << text();
  uint64_t bytes = 0;
  EXPECT_EQ(sbtrain_stickbreaking_workspace(nullptr, 0, &bytes), SBTRAIN_INVALID);
}

// Sets one field of a good struct to a wrong value: the text names the field.
template <typename Change>
void expect_refusal(const char* name, int code, const Change& change) {
  auto x = stick();
  change(x);
  EXPECT_EQ(code_of(x), code) << name << ": " << text();
  EXPECT_NE(text().find(name), std::string::npos) << name << ": " << text();
}

TEST(CInterface, WrongFieldsAreRefusedByName) {
  expect_refusal("heads", SBTRAIN_INVALID, [](auto& x) { x.heads = 0; });
  expect_refusal("kv_heads", SBTRAIN_INVALID, [](auto& x) { x.kv_heads = 3; });
  expect_refusal("head_dim", SBTRAIN_INVALID, [](auto& x) { x.head_dim = 60; });
  expect_refusal("head_dim", SBTRAIN_UNSUPPORTED, [](auto& x) { x.head_dim = 264; });
  expect_refusal("head_dim", SBTRAIN_UNSUPPORTED, [](auto& x) {
    x.head_dim = 136;
    x.compute_capability = 89;
  });
  expect_refusal("7.5", SBTRAIN_UNSUPPORTED, [](auto& x) { x.compute_capability = 75; });
  expect_refusal("tokens", SBTRAIN_INVALID, [](auto& x) { x.tokens = -1; });
  expect_refusal("cu_seqlens", SBTRAIN_INVALID, [](auto& x) { x.tokens = 1999; });
  expect_refusal("key_tokens", SBTRAIN_UNSUPPORTED, [](auto& x) { x.key_tokens = 4000; });
  expect_refusal("sequences", SBTRAIN_INVALID, [](auto& x) { x.sequences = 0; });
  expect_refusal("max_seqlen", SBTRAIN_INVALID, [](auto& x) { x.max_seqlen = 0; });
  expect_refusal("attend_current", SBTRAIN_INVALID, [](auto& x) { x.attend_current = 2; });
  expect_refusal("remainder", SBTRAIN_INVALID, [](auto& x) { x.remainder = 3; });
  expect_refusal("skip_epsilon", SBTRAIN_INVALID, [](auto& x) { x.skip_epsilon = -1; });
}

TEST(CInterface, DecodingPlansWithoutAGpu) {
  sbtrain_decode x = SBTRAIN_INIT(sbtrain_decode);
  x.batch = 3, x.capacity = 2000, x.heads = 8, x.kv_heads = 2, x.head_dim = 64;
  uint64_t bytes = 0;
  EXPECT_EQ(sbtrain_decode_workspace(&x, &bytes), SBTRAIN_OK) << text();
  EXPECT_GE(bytes, kernels::decode_scratch_floats(3, 8, 64, 2000) * 4u);
  x.capacity = 0;
  EXPECT_EQ(sbtrain_decode_workspace(&x, &bytes), SBTRAIN_INVALID);
  EXPECT_NE(text().find("capacity"), std::string::npos) << text();
}

TEST(CInterface, WithoutADriverTheTextNamesTheOneThatIsNeeded) {
  const int code = sbtrain_check_driver();
  if (code == SBTRAIN_OK) GTEST_SKIP() << "this machine has a driver";
  EXPECT_EQ(code, SBTRAIN_DRIVER);
  EXPECT_NE(text().find("driver"), std::string::npos) << text();
  EXPECT_NE(text().find("nvidia-smi"), std::string::npos) << text();
  const auto x = stick();
  EXPECT_EQ(sbtrain_stickbreaking_forward(&x), SBTRAIN_DRIVER);
  EXPECT_EQ(sbtrain_stickbreaking_backward(&x), SBTRAIN_DRIVER);
}

}  // namespace
}  // namespace sbtrain
