#include "serve/http_framing.h"

#include <algorithm>
#include <cctype>

namespace sbtrain {
namespace {

constexpr std::string_view kLineEnd = "\r\n";

bool same_word(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// RFC 9110, 5.6.2.
bool is_token(std::string_view name) {
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return !name.empty() && std::ranges::all_of(name, [&](unsigned char c) {
    return (c < 0x80 && std::isalnum(c) != 0) ||
           kOthers.find(static_cast<char>(c)) != std::string_view::npos;
  });
}

// The headers that say where the body ends, and whose server is meant.
struct Framing {
  int hosts = 0, lengths = 0, codings = 0;
  bool chunked = true;  // if there is a coding
};

std::optional<FramingProblem> read_header(Framing& framing, std::string_view line) {
  const size_t colon = line.find(':');
  // A space in front of the colon, or of the line, makes one reader see a header and another none.
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) {
    return FramingProblem{400, "a header has no name, or a space in it or before its colon"};
  }
  const std::string_view name = line.substr(0, colon);
  framing.hosts += same_word(name, "Host");
  framing.lengths += same_word(name, "Content-Length");
  if (same_word(name, "Transfer-Encoding")) {
    ++framing.codings;
    framing.chunked = framing.chunked && same_word(trimmed(line.substr(colon + 1)), "chunked");
  }
  return std::nullopt;
}

std::optional<FramingProblem> problem_of(const Framing& framing, bool old_version) {
  const auto bad = [](const char* message) { return FramingProblem{400, message}; };
  if (framing.hosts > 1) return bad("there is more than one header Host");
  if (framing.hosts == 0 && !old_version) return bad("the header Host is missing");
  if (framing.lengths > 1) return bad("there is more than one header Content-Length");
  if (framing.codings == 0) return std::nullopt;
  if (framing.lengths > 0) return bad("Content-Length and Transfer-Encoding exclude each other");
  if (framing.codings > 1) return bad("there is more than one header Transfer-Encoding");
  if (old_version) return bad("HTTP/1.0 has no Transfer-Encoding");
  if (!framing.chunked) return FramingProblem{501, "the only Transfer-Encoding known is chunked"};
  return std::nullopt;
}

}  // namespace

std::optional<FramingProblem> framing_problem(std::string_view head) {
  bool old_version = false;
  Framing framing;
  for (bool first = true; !head.empty(); first = false) {
    const size_t end = head.find(kLineEnd);
    const std::string_view line = head.substr(0, end);
    if (end == std::string_view::npos ||
        line.find_first_of(std::string_view("\r\n\0", 3)) != std::string_view::npos) {
      return FramingProblem{
          400, "each line of the headers must end with CR and LF, and have neither before"};
    }
    head.remove_prefix(end + kLineEnd.size());
    if (first) {
      old_version = line.ends_with(" HTTP/1.0");
    } else if (line.empty()) {
      break;
    } else if (const auto problem = read_header(framing, line)) {
      return problem;
    }
  }
  return problem_of(framing, old_version);
}

}  // namespace sbtrain
