#include "job/launch.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/philox.h"

namespace sbtrain {
namespace {

// Ports that derive from a job's name lie below those that systems hand out by themselves.
constexpr int kFirstPort = 10000;
constexpr int kPorts = 20000;

int derived_port(const std::string& token) {
  return kFirstPort + static_cast<int>(hash_name(token) % kPorts);
}

std::optional<int64_t> to_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  bool has(const std::string& name) const { return environment_.contains(name); }
  std::string text(const std::string& name, const std::string& otherwise = "") const {
    const auto found = environment_.find(name);
    return found == environment_.end() ? otherwise : found->second;
  }
  // The first of `names` that is set.
  std::string text_of(const std::vector<std::string>& names) const {
    for (const std::string& name : names) {
      if (has(name)) return text(name);
    }
    return "";
  }
  int number(const std::string& name, int least, int most = 1 << 24) const {
    if (!has(name)) fail(ExitCode::kUsage, "the launcher did not set {}", name);
    const std::optional<int64_t> value = to_number(text(name));
    if (!value || *value < least || *value > most) {
      fail(ExitCode::kUsage, "{}={} is no number from {} to {}", name, text(name), least, most);
    }
    return static_cast<int>(*value);
  }
  int number_or(int otherwise, const std::string& name, int least) const {
    return has(name) ? number(name, least) : otherwise;
  }
  int port() const { return number("MASTER_PORT", 1, 65535); }

 private:
  const Environment& environment_;
};

// `rank_name` and `world_name`: for the message.
void check_ranks(const Launch& launch, const char* rank_name, const char* world_name,
                 const char* local_rank_name, const char* local_world_name) {
  if (launch.rank >= launch.world) {
    fail(ExitCode::kUsage, "{}={}, but {}={}: ranks count from 0", rank_name, launch.rank,
         world_name, launch.world);
  }
  if (launch.local_rank >= launch.local_world) {
    fail(ExitCode::kUsage, "{}={}, but {}={}: ranks count from 0", local_rank_name,
         launch.local_rank, local_world_name, launch.local_world);
  }
  if (launch.local_world > launch.world) {
    fail(ExitCode::kUsage, "{}={}, but {}={}", local_world_name, launch.local_world, world_name,
         launch.world);
  }
}

int nodes_for(int world, int local_world) {
  return (world + local_world - 1) / local_world;
}

// torchrun, sbtrain's supervisor, and everything else that follows torch.distributed: the ranks of
// a machine follow each other. LOCAL_RANK may be missing where every machine has one rank.
std::optional<Launch> from_torchrun(const Variables& v) {
  if (!v.has("RANK") && !v.has("WORLD_SIZE")) return std::nullopt;
  for (const auto& [one, other] : {std::pair("RANK", "WORLD_SIZE"), {"WORLD_SIZE", "RANK"}}) {
    if (!v.has(one)) {
      fail(ExitCode::kUsage, "{} is set, but {} is not: set both, or neither", other, one);
    }
  }
  Launch launch;
  launch.launcher = "torchrun";
  launch.rank = v.number("RANK", 0);
  launch.world = v.number("WORLD_SIZE", 1);
  launch.local_rank = v.number_or(0, "LOCAL_RANK", 0);
  if (v.has("LOCAL_RANK")) launch.local_world = v.number("LOCAL_WORLD_SIZE", 1);
  check_ranks(launch, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  launch.node = v.number_or(launch.rank / launch.local_world, "GROUP_RANK", 0);
  launch.nodes = v.number_or(nodes_for(launch.world, launch.local_world), "GROUP_WORLD_SIZE", 1);
  if (launch.world == 1) return launch;
  launch.address = v.text("MASTER_ADDR");
  if (launch.address.empty()) {
    fail(ExitCode::kUsage,
         "WORLD_SIZE={}, but MASTER_ADDR is not set: it names the machine of rank 0", launch.world);
  }
  launch.port = v.port();
  launch.token = fmt::format("{}:{} {} {}", launch.address, launch.port,
                             v.text("TORCHELASTIC_RUN_ID"), v.text("TORCHELASTIC_RESTART_COUNT"));
  // torchrun itself listens on MASTER_PORT then.
  if (v.text("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    launch.port += launch.port < 65535 ? 1 : -1;
  }
  return launch;
}

std::optional<Launch> from_mpirun(const Variables& v) {
  if (!v.has("OMPI_COMM_WORLD_RANK") && !v.has("OMPI_COMM_WORLD_SIZE")) return std::nullopt;
  Launch launch;
  launch.launcher = "mpirun";
  launch.rank = v.number("OMPI_COMM_WORLD_RANK", 0);
  launch.world = v.number("OMPI_COMM_WORLD_SIZE", 1);
  launch.local_rank = v.number("OMPI_COMM_WORLD_LOCAL_RANK", 0);
  launch.local_world = v.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1);
  check_ranks(launch, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE");
  launch.node = launch.rank / launch.local_world;
  launch.nodes = nodes_for(launch.world, launch.local_world);
  if (launch.world % launch.local_world != 0 ||
      launch.rank % launch.local_world != launch.local_rank) {
    launch.problem = fmt::format(
        "mpirun has made rank {} of {} the local rank {} of {}: every machine needs the same "
        "number of ranks, one after the other (--map-by ppr:N:node)",
        launch.rank, launch.world, launch.local_rank, launch.local_world);
  }
  if (launch.world == 1) return launch;
  launch.token = "mpirun " + v.text_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  // 128 random bits, which mpirun makes for the transports of its job.
  launch.secret = v.text("OMPI_MCA_orte_precondition_transports");
  launch.port = v.has("MASTER_PORT") ? v.port() : derived_port(launch.token + launch.secret);
  if (launch.nodes == 1) return launch;
  launch.address = v.text("MASTER_ADDR");
  if (launch.address.empty()) {
    fail(ExitCode::kUsage,
         "mpirun has started {} ranks on several machines, {} on this one, and does not say where "
         "rank 0 runs: add `-x MASTER_ADDR=HOST` with the name of that machine to mpirun",
         launch.world, launch.local_world);
  }
  return launch;
}

// "8(x2),4" -> 8, 8, 4
std::vector<int> expand_tasks(const std::string& name, const std::string& text) {
  std::vector<int> tasks;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const size_t open = item.find("(x");
    const std::optional<int64_t> count = to_number(item.substr(0, open));
    const std::optional<int64_t> times =
        open == std::string_view::npos ? std::optional<int64_t>(1)
                                       : to_number(item.substr(open + 2, item.size() - open - 3));
    if (!count || !times || *count < 1 || *times < 1 || *times > 1 << 20) {
      fail(ExitCode::kUsage, "{}={} is no list of tasks", name, text);
    }
    tasks.insert(tasks.end(), static_cast<size_t>(*times), static_cast<int>(*count));
  }
  return tasks;
}

// The variables of a job step. The shells of sbatch and salloc have most of them too, but a step id
// from a range of its own, or none.
bool in_job_step(const Variables& v) {
  constexpr int64_t kFirstSpecialStep = 0xfffffff0;
  const std::optional<int64_t> step = to_number(v.text_of({"SLURM_STEP_ID", "SLURM_STEPID"}));
  return step && *step < kFirstSpecialStep && v.has("SLURM_PROCID");
}

std::optional<Launch> from_srun(const Variables& v) {
  if (!in_job_step(v)) return std::nullopt;
  Launch launch;
  launch.launcher = "srun";
  const bool step = v.has("SLURM_STEP_NUM_TASKS");
  const char* world_name = step ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  launch.rank = v.number("SLURM_PROCID", 0);
  launch.world = v.number(world_name, 1);
  if (launch.world == 1) return std::nullopt;  // such as `srun --pty bash`
  launch.local_rank = v.number("SLURM_LOCALID", 0);
  launch.node = v.number("SLURM_NODEID", 0);
  const char* tasks_name =
      v.has("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  const std::vector<int> tasks = expand_tasks(tasks_name, v.text(tasks_name));
  launch.nodes = static_cast<int>(tasks.size());
  if (launch.node >= launch.nodes) {
    fail(ExitCode::kUsage, "SLURM_NODEID={}, but {}={}", launch.node, tasks_name,
         v.text(tasks_name));
  }
  launch.local_world = tasks[launch.node];
  check_ranks(launch, "SLURM_PROCID", world_name, "SLURM_LOCALID", tasks_name);
  int first = 0;
  for (int node = 0; node < launch.node; ++node) first += tasks[node];
  if (launch.rank != first + launch.local_rank) {
    launch.problem = fmt::format(
        "srun has made rank {} the task {} of machine {}, where rank {} belongs: start it with "
        "--distribution=block, so that the ranks of a machine follow each other",
        launch.rank, launch.local_rank, launch.node, first + launch.local_rank);
  }
  launch.token =
      fmt::format("slurm {}.{} {}", v.text_of({"SLURM_JOB_ID", "SLURM_JOBID"}),
                  v.text_of({"SLURM_STEP_ID", "SLURM_STEPID"}), v.text("SLURM_RESTART_COUNT", "0"));
  launch.port = v.has("MASTER_PORT") ? v.port() : derived_port(launch.token);
  if (launch.nodes == 1) return launch;
  launch.address = v.text("MASTER_ADDR");
  if (!launch.address.empty()) return launch;
  const std::string list =
      v.text_of({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  const std::vector<std::string> hosts = expand_hosts(list);
  if (hosts.empty()) {
    fail(ExitCode::kUsage,
         "Slurm has not set SLURM_STEP_NODELIST: set MASTER_ADDR to the machine "
         "of rank 0");
  }
  launch.address = hosts.front();
  return launch;
}

// "01-03" -> 1 to 3, of two digits
struct HostRange {
  int64_t first = 0;
  int64_t last = 0;
  size_t digits = 0;
};

HostRange parse_host_range(std::string_view range) {
  const std::string_view low = range.substr(0, range.find('-'));
  const std::optional<int64_t> first = to_number(low);
  const std::optional<int64_t> last =
      low.size() == range.size() ? first : to_number(range.substr(low.size() + 1));
  constexpr int64_t kMostHosts = 1 << 20;
  if (!first || !last || *first < 0 || *last < *first || *last - *first > kMostHosts) {
    fail(ExitCode::kUsage, "'{}' is no range of a Slurm list of hosts", range);
  }
  return {.first = *first, .last = *last, .digits = low.size()};
}

// Appends the hosts of one item of a list, such as "gpu[01-03,7]". A name may have several
// brackets.
void expand_host(const std::string& item, std::vector<std::string>& hosts) {
  const size_t open = item.find('[');
  if (open == std::string::npos && !item.empty() && item.find(']') == std::string::npos) {
    hosts.push_back(item);
    return;
  }
  const size_t close = item.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    fail(ExitCode::kUsage, "'{}' is no item of a Slurm list of hosts", item);
  }
  std::string_view ranges = std::string_view(item).substr(open + 1, close - open - 1);
  do {
    const std::string_view text = ranges.substr(0, ranges.find(','));
    ranges.remove_prefix(std::min(text.size() + 1, ranges.size()));
    const HostRange range = parse_host_range(text);
    for (int64_t i = range.first; i <= range.last; ++i) {
      expand_host(
          fmt::format("{}{:0{}}{}", item.substr(0, open), i, range.digits, item.substr(close + 1)),
          hosts);
    }
  } while (!ranges.empty());
}

// Both describe the same ranks, or the outer launcher has started the inner one, once on every
// machine at most.
void check_agreement(const Launch& inner, const Launch& outer) {
  const bool same = inner.rank == outer.rank && inner.world == outer.world;
  const bool agents = outer.local_world == 1 && outer.world <= inner.nodes;
  if (same || agents) return;
  fail(ExitCode::kUsage,
       "two launchers disagree: this is rank {} of {} by the variables of {}, and rank {} of {} by "
       "those of {}; use one of them, or unset the variables of the other",
       inner.rank, inner.world, inner.launcher, outer.rank, outer.world, outer.launcher);
}

Launch from_supervisor(const Variables& v) {
  Launch launch = from_torchrun(v).value_or(Launch{});
  launch.launcher = "sbtrain";
  launch.token = v.text(kSupervisorToken);
  launch.secret = launch.token;
  if (v.has(kSupervisorListener)) launch.listener = v.number(kSupervisorListener, 0);
  return launch;
}

}  // namespace

Environment process_environment() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

std::vector<std::string> process_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  if (words.empty()) fail(ExitCode::kInternal, "cannot read /proc/self/cmdline");
  words.erase(words.begin());
  return words;
}

Launch find_launch(const Environment& environment) {
  const Variables v(environment);
  // What has started the supervisor says nothing about its ranks.
  if (v.has(kSupervisorToken)) return from_supervisor(v);
  std::vector<Launch> found;  // the innermost first
  for (const auto& from : {from_torchrun, from_mpirun, from_srun}) {
    if (std::optional<Launch> launch = from(v)) found.push_back(*std::move(launch));
  }
  if (found.empty()) return {};
  for (size_t i = 1; i < found.size(); ++i) check_agreement(found.front(), found[i]);
  if (v.has(kUsersSecret)) found.front().secret = v.text(kUsersSecret);
  return found.front();
}

std::vector<std::string> expand_hosts(const std::string& list) {
  std::vector<std::string> hosts;
  size_t begin = 0;
  bool inside = false;  // of brackets
  for (size_t i = 0; i <= list.size(); ++i) {
    if (i < list.size() && (list[i] == '[' || list[i] == ']')) inside = list[i] == '[';
    if (i < list.size() && (list[i] != ',' || inside)) continue;
    if (!list.empty()) expand_host(list.substr(begin, i - begin), hosts);
    begin = i + 1;
  }
  return hosts;
}

int choose_device(const Launch& launch, int visible) {
  if (launch.local_world <= visible) return launch.local_rank;
  const bool own_device = visible == 1 && !launch.launcher.empty() && launch.launcher != "sbtrain";
  if (own_device) return 0;
  fail(ExitCode::kUsage,
       "{} has started {} ranks on this machine, but rank {} sees {} GPU{}: start one rank for "
       "each GPU (CUDA_VISIBLE_DEVICES may hide some)",
       launch.launcher, launch.local_world, launch.rank, visible, visible == 1 ? "" : "s");
}

}  // namespace sbtrain
