#include "cli/failure.h"

#include <cstdio>
#include <filesystem>
#include <new>
#include <system_error>

#include "core/standard_streams.h"

namespace sbtrain {
namespace {

// The C++ library throws these for lack of threads, fmt when standard output is broken.
Failure system_failure(const std::system_error& error) {
  std::string reason;
  if (!flush_output(reason)) {
    return {ExitCode::kStorage, "cannot write to standard output: " + reason};
  }
  if (error.code() == std::errc::resource_unavailable_try_again ||
      error.code() == std::errc::not_enough_memory) {
    return {ExitCode::kOutOfMemory,
            fmt::format("cannot start a thread: {}; the limits on processes (ulimit -u) or "
                        "memory (ulimit -v) are too low",
                        error.code().message())};
  }
  return {ExitCode::kInternal, error.what()};
}

}  // namespace

Failure current_failure() {
  try {
    throw;
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::kOutOfMemory,
            "out of memory: the machine, or a limit of this process (ulimit -v), has too little "
            "for this command"};
  } catch (const std::filesystem::filesystem_error& error) {  // a link that leads to itself, say
    return {ExitCode::kStorage,
            fmt::format("{}: {}", error.path1().string(), error.code().message())};
  } catch (const std::system_error& error) {
    return system_failure(error);
  } catch (const std::exception& error) {
    return {ExitCode::kInternal, error.what()};
  } catch (...) {
    return {ExitCode::kInternal, "unknown exception"};
  }
}

int show_failure(const Failure& failure) {
  std::fflush(stdout);
  const char* prefix = failure.code == ExitCode::kInternal ? "internal error" : "error";
  write_error(fmt::format("{}: {}\n", prefix, failure.message));
  return static_cast<int>(failure.code);
}

}  // namespace sbtrain
