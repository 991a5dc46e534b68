#include "export/python.h"

#include <unistd.h>

#include <cerrno>

#include "core/python.h"

namespace sbtrain {

PythonResult run_python(const PythonFile& script, const std::vector<std::string>& arguments) {
  PythonHelper helper(script.text, arguments, "", std::string(script.name));
  const FileDescriptor output = helper.take_output();
  PythonResult result;
  char buffer[4096];
  for (ssize_t got = 0;
       (got = ::read(output.get(), buffer, sizeof(buffer))) > 0 || (got < 0 && errno == EINTR);) {
    if (got > 0) result.output.append(buffer, static_cast<size_t>(got));
  }
  const PythonHelper::Result end = helper.wait();
  result.code = end.status;
  if (result.code != 0) result.output += end.errors;
  return result;
}

}  // namespace sbtrain
