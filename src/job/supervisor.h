// One process for each GPU of this machine, without a launcher: the program runs itself.
//
// The process that the user has started becomes the supervisor. It starts the ranks with the
// variables of job/launch.h, gives rank 0 its terminal, shows what the others write with
// "rank 3: " in front of every line, passes signals on, and ends all when one has failed.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "core/error.h"

namespace sbtrain {

struct SupervisorOptions {
  std::vector<std::string> arguments;  // of every rank, without the program's name
  int ranks = 2;
  // How long ranks may take to end once one has failed, until they are killed. The failing rank
  // tells the others why (job/control.h), and they end by themselves.
  std::chrono::milliseconds grace = std::chrono::seconds(45);
};

// Runs this program once for each rank and returns when all have ended:
//
//   all ranks ended with 0         ExitCode::kDone
//   all with 0 or 85               ExitCode::kPreempted
//   one ended with another code    that code; of several, that of the first
//   one was killed by a signal     ExitCode::kCommunication, and the signal is named
//
// The message of an error is the ranks' own. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 go to every rank,
// once for each that arrives; the ranks have process groups of their own, so that Ctrl-C does not
// reach them twice. If such a signal ends a rank, it ends this process too, and supervise() does
// not return. Ctrl-Z stops the ranks as well. If the supervisor is killed, so are they.
// Not to be called twice at a time.
ExitCode supervise(const SupervisorOptions& options);

}  // namespace sbtrain
