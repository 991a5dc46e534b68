// Which rank of which job is this process? Launchers say it in environment variables.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "job/control.h"

namespace sbtrain {

// The default is a process that no launcher has started: a job of one rank.
struct Launch {
  std::string launcher{};  // "sbtrain", "torchrun", "mpirun", "srun"; empty: none
  int rank = 0;
  int world = 1;  // ranks of the job
  int local_rank = 0;
  int local_world = 1;  // ranks of this machine
  int node = 0;         // of this machine; ranks of a node follow each other
  int nodes = 1;
  // Where rank 0 listens.
  std::string address = "127.0.0.1";
  int port = 0;
  int listener = -1;    // rank 0: the descriptor of a socket that listens there already, or -1
  std::string token{};  // the same for all ranks of this start of the job, and for no other job
  // What only the ranks of the job know, by which rank 0 admits them. Where the launcher has given
  // them none, it lies in a file that rank 0 writes, and without that the token is all there is:
  // see job/secret.h.
  std::string secret{};
  std::filesystem::path secret_file{};
  // Why the job cannot be done, where only some ranks can see that: they have to tell the others.
  std::string problem{};
};

// What the supervisor (job/supervisor.h) tells its ranks, in addition to torchrun's variables:
// the token, and to rank 0 the descriptor of the listening socket. Names that begin with SBTRAIN_
// are keys of the configuration.
inline constexpr const char* kSupervisorToken = "LAUNCHED_BY_SBTRAIN";
inline constexpr const char* kSupervisorListener = "LAUNCHED_LISTENER";

// A secret that the user gives to all ranks.
inline constexpr const char* kUsersSecret = "LAUNCH_SECRET";

using Environment = std::map<std::string, std::string>;
Environment process_environment();

// The command line of this process without the program's name: what a rank must be given to do the
// same as the process that starts it.
std::vector<std::string> process_arguments();

// Reads what the launcher says:
//
//   sbtrain   its own supervisor (job/supervisor.h)
//   torchrun  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   mpirun    Open MPI's OMPI_COMM_WORLD_*; jobs of several machines set MASTER_ADDR as well
//   srun      SLURM_* of a task of a job step; the shell of sbatch or salloc is no task
//
// MASTER_ADDR and MASTER_PORT take precedence over what mpirun and srun imply. A launcher that
// started one agent on each machine (srun for torchrun or mpirun) agrees with the inner one.
// Throws ExitCode::kUsage for variables that are missing or contradict each other, naming both.
// Ranks of a machine that do not follow each other are Launch::problem, since some of them look
// right.
Launch find_launch(const Environment& environment);

// The hosts of a Slurm list such as "gpu[01-03,7],login": gpu01 gpu02 gpu03 gpu7 login. Throws
// ExitCode::kUsage.
std::vector<std::string> expand_hosts(const std::string& list);

// The device of this rank, of `visible` ones: its local rank, or the only one that it sees, where
// the launcher shows every rank a device of its own. Throws ExitCode::kUsage when there are more
// ranks than devices.
int choose_device(const Launch& launch, int visible);

// The job of this process, as training sees it.
struct Job {
  Launch launch;
  std::shared_ptr<Control> control = make_single_control();
};

}  // namespace sbtrain
