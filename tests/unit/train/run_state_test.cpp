// What state.json must hold: everything a run counts, and nothing that no run has.
#include "train/run_state.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "core/error.h"
#include "data/loader.h"

namespace sbtrain {
namespace {

RunState state_after_steps() {
  LoaderState loader;
  loader.packing = "concat";
  loader.sequence_length = 32;
  loader.batch = 4;
  loader.micro_batch = 2;
  loader.world = 1;
  loader.step = 100;
  RunState state;
  state.step = 100;
  state.updates = 93;
  state.tokens = 12800;
  state.lr = 1.0 / 3e3;
  state.guard = {.skipped = 3, .in_a_row = 2, .spikes = 4, .spike = true};
  state.running = {.count = 60, .mean = 10.0 / 3, .variance = 1e-7 / 3};
  state.validation_due = true;
  state.loader = loader.to_json();
  return state;
}

// The error that the state gives after `key` was set to `value`.
std::string refusal(const std::string& key, const nlohmann::json& value) {
  nlohmann::json json = nlohmann::json::parse(format_run_state(state_after_steps()));
  json[key] = value;
  try {
    parse_run_state(json.dump(), "FILE");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kNoCheckpoint) << error.what();
    return error.what();
  }
  ADD_FAILURE() << key << " may be " << value;
  return "";
}

TEST(RunState, SurvivesItsTextBitForBit) {
  const RunState state = state_after_steps();
  const RunState back = parse_run_state(format_run_state(state), "FILE");
  EXPECT_EQ(back.step, state.step);
  EXPECT_EQ(back.updates, state.updates);
  EXPECT_EQ(back.tokens, state.tokens);
  EXPECT_EQ(back.lr, state.lr);
  EXPECT_EQ(back.guard, state.guard);
  EXPECT_EQ(back.running, state.running);
  EXPECT_EQ(back.validation_due, state.validation_due);
  EXPECT_EQ(back.stopped, state.stopped);
  EXPECT_EQ(back.loader, state.loader);
}

TEST(RunState, ReadsStatesWithoutTheLaterFields) {
  nlohmann::json json = nlohmann::json::parse(format_run_state(state_after_steps()));
  for (const char* key : {"lr", "spike_steps", "last_is_spike", "loss_count", "loss_mean",
                          "loss_variance", "validation_due", "stopped"}) {
    json.erase(key);
  }
  const RunState state = parse_run_state(json.dump(), "FILE");
  EXPECT_EQ(state.updates, 93);
  EXPECT_EQ(state.running, RunningLoss{});
}

TEST(RunState, RefusesByName) {
  for (const char* key : {"step", "updates", "tokens", "skipped_steps", "skipped_in_a_row",
                          "spike_steps", "loss_count"}) {
    for (const nlohmann::json& bad :
         {nlohmann::json(-1), nlohmann::json(std::numeric_limits<uint64_t>::max()),
          nlohmann::json(1e300), nlohmann::json(nullptr), nlohmann::json("1")}) {
      const std::string message = refusal(key, bad);
      EXPECT_NE(message.find("FILE"), std::string::npos) << message;
      if (bad.is_number()) {
        EXPECT_NE(message.find(key), std::string::npos) << message;
      }
    }
  }
  EXPECT_NE(refusal("updates", 101).find("updates is 101"), std::string::npos);
  EXPECT_NE(refusal("skipped_in_a_row", 8).find("skipped_in_a_row"), std::string::npos);
  EXPECT_NE(refusal("lr", -1.0).find("lr"), std::string::npos);
  EXPECT_NE(refusal("loss_variance", -1.0).find("loss_variance"), std::string::npos);
  refusal("loss_mean", nullptr);  // how a NaN is written
  refusal("stopped", 1);
}

TEST(RunState, RefusesTheStateOfAnotherStepsData) {
  for (const char* key : {"step", "micro"}) {
    for (const int64_t bad : {-1, 1, 99}) {
      nlohmann::json loader = nlohmann::json::parse(state_after_steps().loader);
      loader[key] = bad;
      const std::string message = refusal("loader", loader.dump());
      EXPECT_NE(message.find("data state"), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace sbtrain
