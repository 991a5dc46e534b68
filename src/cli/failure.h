// What an exception means to the user.
#pragma once

#include <string>

#include "core/error.h"

namespace sbtrain {

struct Failure {
  ExitCode code = ExitCode::kInternal;
  std::string message;
};

// The failure that the exception being handled stands for. To be called in a catch block.
Failure current_failure();

// Writes "error: message" to standard error, after what is printed; returns the exit code.
int show_failure(const Failure& failure);

}  // namespace sbtrain
