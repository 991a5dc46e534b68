// Reads the JSON of requests to the server, and writes its answers and errors in OpenAI's shape.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "serve/http_server.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

using Json = nlohmann::ordered_json;

// A request that cannot be answered. Becomes {"error": {"message", "type", "param", "code"}}.
struct ApiError {
  int status = 400;
  std::string message;
  std::string parameter;  // the field at fault, if one is
};

Json error_json(const ApiError& error);
HttpResponse error_response(const ApiError& error);
// `json` holds text that may be no valid UTF-8, which is replaced.
HttpResponse json_response(const Json& json);

// The fields of a request. Each access names the field in its error; fields that nobody asks for
// are ignored.
class RequestFields {
 public:
  // Throws ApiError for text that is no JSON object, names a field twice or is nested deeply.
  explicit RequestFields(const std::string& body);

  // Null and absent are the same.
  bool has(const char* name) const;
  bool boolean(const char* name, bool otherwise) const;
  int64_t integer(const char* name, int64_t otherwise, int64_t low, int64_t high) const;
  double number(const char* name, double otherwise, double low, double high) const;
  std::string text(const char* name, const std::string& otherwise) const;
  // A string or a list of them.
  std::vector<std::string> texts(const char* name) const;
  const nlohmann::json& value(const char* name) const { return json_.at(name); }
  // By their names.
  const nlohmann::json::object_t& all() const {
    return json_.get_ref<const nlohmann::json::object_t&>();
  }

 private:
  nlohmann::json json_;
};

// The list of token ids `json`. Throws ApiError for what is none, and for ids beyond the tokenizer.
std::vector<int32_t> token_ids(const nlohmann::json& json, const Tokenizer& tokenizer,
                               const char* name);

// What a token is called where tokens are listed: its text, or its name for a special token, or
// "bytes:\xe2\x80" where its bytes are no whole characters. "<id 300>" for a token without any of
// these, such as one of a padded vocabulary that the tokenizer does not have.
std::string token_name(const Tokenizer& tokenizer, int32_t token);
// The content of a special token such as eos; empty if the tokenizer has none (id -1).
std::string special_name(const Tokenizer& tokenizer, int32_t token);

}  // namespace sbtrain
