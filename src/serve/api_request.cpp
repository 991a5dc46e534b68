#include "serve/api_request.h"

#include <fmt/format.h>

#include "checkpoint/strict_json.h"
#include "core/error.h"
#include "core/utf8.h"

namespace sbtrain {
namespace {

constexpr int kMaxDepth = 8;

[[noreturn]] void wrong(const char* name, const std::string& what) {
  throw ApiError{400, fmt::format("'{}' must be {}", name, what), name};
}

std::string error_type(int status) {
  if (status == 401 || status == 403) return "authentication_error";
  if (status == 429) return "rate_limit_error";
  return status < 500 ? "invalid_request_error" : "server_error";
}

}  // namespace

Json error_json(const ApiError& error) {
  return {{"error",
           {{"message", error.message},
            {"type", error_type(error.status)},
            {"param", error.parameter.empty() ? Json() : Json(error.parameter)},
            {"code", error.status}}}};
}

HttpResponse json_response(const Json& json) {
  HttpResponse response;
  response.body = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return response;
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response = json_response(error_json(error));
  response.status = error.status;
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status == 429 || error.status == 503) response.headers.emplace_back("Retry-After", "1");
  return response;
}

RequestFields::RequestFields(const std::string& body) {
  try {
    json_ = parse_strict(body, "the body", kMaxDepth);
  } catch (const Error& error) {
    throw ApiError{400, error.what(), ""};
  }
  if (!json_.is_object()) throw ApiError{400, "the body is no JSON object", ""};
}

bool RequestFields::has(const char* name) const {
  const auto at = json_.find(name);
  return at != json_.end() && !at->is_null();
}

bool RequestFields::boolean(const char* name, bool otherwise) const {
  if (!has(name)) return otherwise;
  if (!value(name).is_boolean()) wrong(name, "true or false");
  return value(name).get<bool>();
}

int64_t RequestFields::integer(const char* name, int64_t otherwise, int64_t low,
                               int64_t high) const {
  if (!has(name)) return otherwise;
  const nlohmann::json& json = value(name);
  const std::string what = fmt::format("an integer from {} to {}", low, high);
  if (!json.is_number_integer()) wrong(name, what);
  if (json.is_number_unsigned() && json.get<uint64_t>() > static_cast<uint64_t>(high)) {
    wrong(name, what);
  }
  const auto number = json.get<int64_t>();
  if (number < low || number > high) wrong(name, what);
  return number;
}

double RequestFields::number(const char* name, double otherwise, double low, double high) const {
  if (!has(name)) return otherwise;
  const nlohmann::json& json = value(name);
  const double number = json.is_number() ? json.get<double>() : low - 1;
  if (!(number >= low && number <= high)) wrong(name, fmt::format("from {:g} to {:g}", low, high));
  return number;
}

std::string RequestFields::text(const char* name, const std::string& otherwise) const {
  if (!has(name)) return otherwise;
  if (!value(name).is_string()) wrong(name, "a string");
  return value(name).get<std::string>();
}

std::vector<std::string> RequestFields::texts(const char* name) const {
  if (!has(name)) return {};
  const nlohmann::json& json = value(name);
  if (json.is_string()) return {json.get<std::string>()};
  if (!json.is_array()) wrong(name, "a string or a list of strings");
  std::vector<std::string> texts;
  for (const nlohmann::json& text : json) {
    if (!text.is_string()) wrong(name, "a string or a list of strings");
    texts.push_back(text.get<std::string>());
  }
  return texts;
}

std::vector<int32_t> token_ids(const nlohmann::json& json, const Tokenizer& tokenizer,
                               const char* name) {
  const std::string what = fmt::format("a list of token ids below {}", tokenizer.size());
  if (!json.is_array()) wrong(name, what);
  std::vector<int32_t> ids;
  for (const nlohmann::json& id : json) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(tokenizer.size())) {
      wrong(name, what);
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

std::string special_name(const Tokenizer& tokenizer, int32_t token) {
  if (token < 0) return "";
  for (const auto& [content, id] : tokenizer.special()) {
    if (id == token) return content;
  }
  // sentencepiece's own names
  if (token == tokenizer.bos()) return "<s>";
  if (token == tokenizer.eos()) return "</s>";
  if (token == tokenizer.unk()) return "<unk>";
  return "";
}

std::string token_name(const Tokenizer& tokenizer, int32_t token) {
  const std::string_view bytes = token < tokenizer.size() ? tokenizer.bytes(token) : "";
  if (bytes.empty()) {
    const std::string name = special_name(tokenizer, token);
    return name.empty() ? fmt::format("<id {}>", token) : name;
  }
  if (valid_length(bytes) == bytes.size()) return std::string(bytes);
  std::string name = "bytes:";
  for (const char byte : bytes) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return name;
}

}  // namespace sbtrain
