#include <nlohmann/json.hpp>

#include "core/error.h"
#include "data/loader.h"

namespace sbtrain {
namespace {

constexpr int kStateVersion = 1;

nlohmann::json source_to_json(const LoaderState::Source& s) {
  return {{"path", s.path},
          {"content_hash", s.content_hash},
          {"documents", s.documents},
          {"tokens", s.tokens},
          {"weight", s.weight},
          {"active", s.active},
          {"epoch", s.cursor.epoch},
          {"position", s.cursor.position},
          {"offset", s.cursor.offset},
          {"taken", s.taken}};
}

LoaderState::Source source_from_json(const nlohmann::json& j) {
  LoaderState::Source s;
  j.at("path").get_to(s.path);
  j.at("content_hash").get_to(s.content_hash);
  j.at("documents").get_to(s.documents);
  j.at("tokens").get_to(s.tokens);
  j.at("weight").get_to(s.weight);
  j.at("active").get_to(s.active);
  j.at("epoch").get_to(s.cursor.epoch);
  j.at("position").get_to(s.cursor.position);
  j.at("offset").get_to(s.cursor.offset);
  j.at("taken").get_to(s.taken);
  return s;
}

}  // namespace

std::string LoaderState::to_json() const {
  nlohmann::json j = {{"version", kStateVersion},
                      {"seed", seed},
                      {"packing", packing},
                      {"predict_across_documents", predict_across_documents},
                      {"sequence_length", sequence_length},
                      {"batch", batch},
                      {"stage", stage},
                      {"step", step},
                      {"micro", micro},
                      {"micro_batch", micro_batch},
                      {"world", world},
                      {"sources", nlohmann::json::array()}};
  for (const Source& source : sources) j["sources"].push_back(source_to_json(source));
  return j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

LoaderState LoaderState::from_json(std::string_view json) {
  LoaderState state;
  try {
    const nlohmann::json j = nlohmann::json::parse(json);
    if (j.at("version").get<int>() != kStateVersion) {
      fail(ExitCode::kData, "data state of version {}, this sbtrain reads {}",
           j.at("version").dump(), kStateVersion);
    }
    j.at("seed").get_to(state.seed);
    j.at("packing").get_to(state.packing);
    j.at("predict_across_documents").get_to(state.predict_across_documents);
    j.at("sequence_length").get_to(state.sequence_length);
    j.at("batch").get_to(state.batch);
    j.at("stage").get_to(state.stage);
    j.at("step").get_to(state.step);
    j.at("micro").get_to(state.micro);
    j.at("micro_batch").get_to(state.micro_batch);
    j.at("world").get_to(state.world);
    for (const auto& source : j.at("sources")) state.sources.push_back(source_from_json(source));
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::kData, "data state: {}", error.what());
  }
  return state;
}

}  // namespace sbtrain
