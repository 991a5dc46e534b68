#include "kernels/errors.h"

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace sbtrain::kernels {
namespace {

[[gnu::format(printf, 1, 0)]] std::string text(const char* format, va_list arguments) {
  char line[512];
  std::vsnprintf(line, sizeof line, format, arguments);
  return line;
}

}  // namespace

void throw_cuda_error(const char* name, cudaError_t error) {
  throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

void throw_invalid_argument(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string message = text(format, arguments);
  va_end(arguments);
  throw std::invalid_argument(message);
}

void throw_runtime_error(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string message = text(format, arguments);
  va_end(arguments);
  throw std::runtime_error(message);
}

}  // namespace sbtrain::kernels
