#include "cli/eval_results.h"

#include <fmt/format.h>

#include "core/files.h"
#include "train/bits.h"

namespace sbtrain {
namespace {

Json by_document_json(const WindowScores& scores) {
  Json json = {{"store", Json::array()},
               {"document", Json::array()},
               {"tokens", Json::array()},
               {"loss_sum", Json::array()}};
  for (const DocumentScore& document : scores.by_document) {
    json["store"].push_back(document.store);
    json["document"].push_back(document.document);
    json["tokens"].push_back(document.tokens);
    json["loss_sum"].push_back(document.loss_sum);
  }
  return json;
}

}  // namespace

void write_json(const EvalOptions& options, const Json& json) {
  if (options.json_file.empty()) {
    fmt::print("{}\n", json.dump());
    return;
  }
  replace_file(options.json_file, json.dump(1) + "\n");
}

void add_result(Json& json, const Perplexity& result) {
  json["tokens"] = result.tokens;
  json["loss"] = result.loss();
  json["perplexity"] = perplexity(result.loss());
  if (result.bytes > 0) {
    json["bits_per_byte"] = bits_per_byte(result.loss(), result.tokens, result.bytes);
  }
}

Json recall_json(const Recall& recall) {
  const auto split = [](const RecallSplit& parts) {
    Json json;
    add_result(json["ar"], parts.recalled);
    add_result(json["non_ar"], parts.other);
    return json;
  };
  return {{"token", split(recall.token)}, {"bigram", split(recall.bigram)}};
}

void print_recall(const Recall& recall) {
  const auto line = [](const char* name, const Perplexity& part) {
    fmt::print("  {:<14} {:.4f} nats per token, perplexity {:.2f}, {} tokens\n", name, part.loss(),
               perplexity(part.loss()), part.tokens);
  };
  line("AR token", recall.token.recalled);
  line("non-AR token", recall.token.other);
  line("AR bigram", recall.bigram.recalled);
  line("non-AR bigram", recall.bigram.other);
}

void print_result(const std::string& title, const Perplexity& result) {
  fmt::print("{}\n", title);
  fmt::print("  loss           {:.4f} nats per token\n", result.loss());
  fmt::print("  perplexity     {:.2f}\n", perplexity(result.loss()));
  if (result.bytes > 0) {
    fmt::print("  bits per byte  {:.4f}\n",
               bits_per_byte(result.loss(), result.tokens, result.bytes));
  }
}

Json interval_json(const std::optional<Interval>& interval) {
  return interval ? Json{interval->low, interval->high} : Json();
}

std::string interval_text(const std::optional<Interval>& interval) {
  return interval ? fmt::format("{:.4f} .. {:.4f}", interval->low, interval->high) : "";
}

void add_documents(Json& json, const EvalOptions& options, const WindowScores& scores) {
  json["loss_interval"] = interval_json(loss_interval(scores.by_document, options.bootstrap));
  json["by_document"] = by_document_json(scores);
}

}  // namespace sbtrain
