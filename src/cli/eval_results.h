// How the modes of sbtrain eval write and print what they have found.
#pragma once

#include <optional>
#include <string>

#include "cli/evaluation.h"
#include "eval/bootstrap.h"
#include "eval/perplexity.h"
#include "eval/recall.h"
#include "eval/windows.h"

namespace sbtrain {

// Prints `json`, or writes it to the file of --json.
void write_json(const EvalOptions& options, const Json& json);

// Adds the known values of `result` to `json`.
void add_result(Json& json, const Perplexity& result);
void print_result(const std::string& title, const Perplexity& result);

Json recall_json(const Recall& recall);
void print_recall(const Recall& recall);

// [low, high], or null without an interval.
Json interval_json(const std::optional<Interval>& interval);
std::string interval_text(const std::optional<Interval>& interval);  // or empty

// Adds the interval of the loss, and the sums of each document, by which results of several models
// on the same targets are compared.
void add_documents(Json& json, const EvalOptions& options, const WindowScores& scores);

}  // namespace sbtrain
