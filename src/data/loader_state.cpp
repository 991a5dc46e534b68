#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "core/error.h"
#include "data/loader.h"

namespace sbtrain {
namespace {

constexpr int kStateVersion = 1;

// Calls visit(key, field) for each field of a state, both for saving and for reading.
template <class State, class Visit>
void for_each_field(State& s, const Visit& visit) {
  visit("seed", s.seed);
  visit("packing", s.packing);
  visit("predict_across_documents", s.predict_across_documents);
  visit("sequence_length", s.sequence_length);
  visit("batch", s.batch);
  visit("stage", s.stage);
  visit("step", s.step);
  visit("micro", s.micro);
  visit("micro_batch", s.micro_batch);
  visit("world", s.world);
}

// Fields that states of version 1 may lack.
template <class State, class Visit>
void for_each_later_field(State& s, const Visit& visit) {
  visit("tokenizer_hash", s.tokenizer_hash);
  visit("starts_with_bos", s.starts_with_bos);
}

template <class Source, class Visit>
void for_each_source_field(Source& s, const Visit& visit) {
  visit("path", s.path);
  visit("content_hash", s.content_hash);
  visit("documents", s.documents);
  visit("tokens", s.tokens);
  visit("weight", s.weight);
  visit("active", s.active);
  visit("epoch", s.cursor.epoch);
  visit("position", s.cursor.position);
  visit("offset", s.cursor.offset);
  visit("taken", s.taken);
}

auto saver(nlohmann::json& j) {
  return [&j](const char* key, const auto& field) { j[key] = field; };
}

auto reader(const nlohmann::json& j) {
  return [&j](const char* key, auto& field) {
    const nlohmann::json& value = j.at(key);
    // Without this check, a number that does not fit would be converted to any value.
    if (std::is_same_v<std::remove_reference_t<decltype(field)>, int64_t> &&
        !value.is_number_integer()) {
      fail(ExitCode::kData, "data state: {} is {}, not a whole number", key, value.dump());
    }
    value.get_to(field);
  };
}

// Counters up to this one can be added without overflow.
constexpr int64_t kMost = int64_t{1} << 53;

void check_within(const char* key, int64_t value, int64_t lowest, int64_t highest = kMost) {
  if (value >= lowest && value <= highest) return;
  fail(ExitCode::kData, "data state: {} is {}, but lies between {} and {}", key, value, lowest,
       highest);
}

// Refuses values that no loader writes. Cursors within an epoch are checked against the data when
// they are used.
void check_values(const LoaderState& s) {
  check_within("sequence_length", s.sequence_length, 1, INT32_MAX);
  check_within("batch", s.batch, 1, INT32_MAX);
  check_within("micro_batch", s.micro_batch, 1, s.batch);
  check_within("world", s.world, 1, s.batch);
  check_within("stage", s.stage, 0);
  check_within("step", s.step, 0);
  const int64_t micros = s.batch / s.world / s.micro_batch;  // in a step
  check_within("micro", s.micro, 0, std::max<int64_t>(micros - 1, 0));
  for (const LoaderState::Source& source : s.sources) {
    check_within("documents", source.documents, 0);
    check_within("tokens", source.tokens, 0);
    check_within("epoch", source.cursor.epoch, 0);
    check_within("position", source.cursor.position, 0);
    check_within("offset", source.cursor.offset, 0);
    check_within("taken", source.taken, 0);
    if (!(source.weight > 0) || !std::isfinite(source.weight)) {
      fail(ExitCode::kData, "data state: weight is {}, but must be above 0", source.weight);
    }
  }
}

}  // namespace

std::string LoaderState::to_json() const {
  nlohmann::json j = {{"version", kStateVersion}, {"sources", nlohmann::json::array()}};
  for_each_field(*this, saver(j));
  for_each_later_field(*this, saver(j));
  for (const Source& source : sources) {
    for_each_source_field(source, saver(j["sources"].emplace_back()));
  }
  return j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

LoaderState LoaderState::from_json(std::string_view json) {
  LoaderState state;
  try {
    const nlohmann::json j = nlohmann::json::parse(json);
    if (j.at("version").get<int>() != kStateVersion) {
      fail(ExitCode::kData, "the data state has version {}; this sbtrain reads {}",
           j.at("version").dump(), kStateVersion);
    }
    for_each_field(state, reader(j));
    for_each_later_field(state, [&j](const char* key, auto& field) {
      if (j.contains(key)) j.at(key).get_to(field);
    });
    for (const auto& source : j.at("sources")) {
      for_each_source_field(state.sources.emplace_back(), reader(source));
    }
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::kData, "data state: {}", error.what());
  }
  check_values(state);
  return state;
}

}  // namespace sbtrain
