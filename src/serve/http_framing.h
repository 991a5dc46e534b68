// Where a request ends, read strictly: what two readers, such as a proxy and this server, might
// take for different requests is refused (RFC 9112, sections 2.2, 3.2, 5.1, 5.2 and 6).
#pragma once

#include <optional>
#include <string_view>

namespace sbtrain {

struct FramingProblem {
  int status = 400;
  const char* message = "";
};

// What is wrong with the head of a request: its first line and its headers with their line ends,
// without or with the empty line that ends them. After a problem nobody knows where the next
// request begins, so the connection must be closed.
std::optional<FramingProblem> framing_problem(std::string_view head);

}  // namespace sbtrain
