#include "job/launch.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace sbtrain {
namespace {

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is missing in: " << text;
  }
}

void expect_refused(const Environment& environment, const std::vector<std::string>& words) {
  try {
    find_launch(environment);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    expect_words(error.what(), words);
  }
}

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more) environment[name] = value;
  return environment;
}

Environment torchrun() {
  return {{"RANK", "9"},
          {"WORLD_SIZE", "16"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "8"},
          {"GROUP_RANK", "1"},
          {"GROUP_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "node0"},
          {"MASTER_PORT", "29500"}};
}

Environment mpirun() {
  return {{"OMPI_COMM_WORLD_RANK", "3"},
          {"OMPI_COMM_WORLD_SIZE", "4"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
          {"PMIX_NAMESPACE", "2871918593"}};
}

Environment srun() {
  return {{"SLURM_JOB_ID", "4711"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_PROCID", "17"},
          {"SLURM_NTASKS", "24"},
          {"SLURM_STEP_NUM_TASKS", "24"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "2"},
          {"SLURM_STEP_TASKS_PER_NODE", "8(x3)"},
          {"SLURM_STEP_NODELIST", "gpu[07-09]"}};
}

TEST(Launch, WithoutLauncherIsOneRank) {
  const Launch launch = find_launch({{"PATH", "/bin"}});
  EXPECT_EQ(launch.launcher, "");
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world, 1);
}

TEST(Launch, Torchrun) {
  const Launch launch = find_launch(torchrun());
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.rank, 9);
  EXPECT_EQ(launch.world, 16);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world, 8);
  EXPECT_EQ(launch.node, 1);
  EXPECT_EQ(launch.nodes, 2);
  EXPECT_EQ(launch.address, "node0");
  EXPECT_EQ(launch.port, 29500);
}

TEST(Launch, AvoidsThePortThatTorchrunItselfUses) {
  EXPECT_EQ(find_launch(with(torchrun(), {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).port, 29501);
}

TEST(Launch, ARestartIsAnotherJob) {
  const Environment first = with(torchrun(), {{"TORCHELASTIC_RESTART_COUNT", "0"}});
  const Environment second = with(torchrun(), {{"TORCHELASTIC_RESTART_COUNT", "1"}});
  EXPECT_NE(find_launch(first).token, find_launch(second).token);
  EXPECT_NE(find_launch(srun()).token,
            find_launch(with(srun(), {{"SLURM_RESTART_COUNT", "1"}})).token);
}

TEST(Launch, OneRankAMachineNeedsNoLocalRank) {
  const Launch launch = find_launch(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "1234"}});
  EXPECT_EQ(launch.local_rank, 0);
  EXPECT_EQ(launch.local_world, 1);
  EXPECT_EQ(launch.node, 1);
  EXPECT_EQ(launch.nodes, 2);
}

TEST(Launch, MpirunOnOneMachine) {
  const Launch launch = find_launch(mpirun());
  EXPECT_EQ(launch.launcher, "mpirun");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world, 4);
  EXPECT_EQ(launch.local_rank, 3);
  EXPECT_EQ(launch.nodes, 1);
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_GE(launch.port, 10000);
  EXPECT_LT(launch.port, 30000);
  Environment other = with(mpirun(), {{"PMIX_NAMESPACE", "2871918594"}});
  EXPECT_NE(find_launch(other).token, launch.token);
  EXPECT_NE(find_launch(other).port, launch.port);
}

TEST(Launch, MpirunOnSeveralMachinesNeedsAnAddress) {
  const Environment two = with(mpirun(), {{"OMPI_COMM_WORLD_SIZE", "8"}});
  expect_refused(two, {"MASTER_ADDR", "8 ranks", "-x"});
  const Launch launch = find_launch(with(two, {{"MASTER_ADDR", "node3"}, {"MASTER_PORT", "5000"}}));
  EXPECT_EQ(launch.address, "node3");
  EXPECT_EQ(launch.port, 5000);
  EXPECT_EQ(launch.nodes, 2);
}

// Some ranks look right, so that the others have to meet them to tell them.
TEST(Launch, MpirunMustKeepTheRanksOfAMachineTogether) {
  const Environment two = with(mpirun(), {{"OMPI_COMM_WORLD_SIZE", "8"}, {"MASTER_ADDR", "node3"}});
  const Launch wrong = find_launch(with(two, {{"OMPI_COMM_WORLD_RANK", "5"}}));
  expect_words(wrong.problem, {"rank 5 of 8", "local rank 3 of 4", "--map-by"});
  const Launch right = find_launch(two);
  EXPECT_EQ(right.problem, "");
  EXPECT_EQ(wrong.token, right.token);
  EXPECT_EQ(wrong.port, right.port);
}

TEST(Launch, Srun) {
  const Launch launch = find_launch(srun());
  EXPECT_EQ(launch.launcher, "srun");
  EXPECT_EQ(launch.rank, 17);
  EXPECT_EQ(launch.world, 24);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world, 8);
  EXPECT_EQ(launch.node, 2);
  EXPECT_EQ(launch.nodes, 3);
  EXPECT_EQ(launch.address, "gpu07");
  EXPECT_EQ(find_launch(with(srun(), {{"MASTER_ADDR", "ib7"}})).address, "ib7");
}

TEST(Launch, MachinesOfSlurmMayDiffer) {
  const Launch launch = find_launch(
      with(srun(), {{"SLURM_STEP_TASKS_PER_NODE", "8(x2),4"}, {"SLURM_STEP_NUM_TASKS", "20"}}));
  EXPECT_EQ(launch.local_world, 4);
  EXPECT_EQ(launch.nodes, 3);
}

TEST(Launch, TheShellOfABatchJobIsNoTask) {
  Environment shell = with(srun(), {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}});
  shell.erase("SLURM_STEP_ID");
  EXPECT_EQ(find_launch(shell).launcher, "");
  for (const char* special : {"4294967291", "4294967290"}) {
    EXPECT_EQ(find_launch(with(shell, {{"SLURM_STEP_ID", special}})).launcher, "");
  }
}

TEST(Launch, ATaskAloneIsNoJobOfManyRanks) {
  EXPECT_EQ(find_launch(with(srun(), {{"SLURM_STEP_NUM_TASKS", "1"}})).launcher, "");
}

TEST(Launch, SrunMustKeepTheRanksOfAMachineTogether) {
  const Launch wrong = find_launch(with(srun(), {{"SLURM_PROCID", "5"}}));
  expect_words(wrong.problem, {"rank 5", "machine 2", "block"});
  const Launch right = find_launch(srun());
  EXPECT_EQ(right.problem, "");
  EXPECT_EQ(wrong.token, right.token);
  EXPECT_EQ(wrong.address, right.address);
}

TEST(Launch, MpirunAndTheUserGiveTheRanksASecret) {
  EXPECT_EQ(find_launch(mpirun()).secret, "");
  const Environment key =
      with(mpirun(), {{"OMPI_MCA_orte_precondition_transports", "24fc922d-168eb83c"}});
  EXPECT_EQ(find_launch(key).secret, "24fc922d-168eb83c");
  EXPECT_NE(find_launch(key).port, find_launch(mpirun()).port);
  for (const Environment& of : {key, torchrun(), srun()}) {
    EXPECT_EQ(find_launch(with(of, {{kUsersSecret, "mine"}})).secret, "mine");
  }
}

TEST(Launch, TheSupervisorOverrulesWhatStartedIt) {
  const Launch launch = find_launch(with(srun(), {{"RANK", "1"},
                                                  {"WORLD_SIZE", "2"},
                                                  {"LOCAL_RANK", "1"},
                                                  {"LOCAL_WORLD_SIZE", "2"},
                                                  {"MASTER_ADDR", "127.0.0.1"},
                                                  {"MASTER_PORT", "40000"},
                                                  {kSupervisorToken, "secret"},
                                                  {kSupervisorListener, "7"}}));
  EXPECT_EQ(launch.launcher, "sbtrain");
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.world, 2);
  EXPECT_EQ(launch.token, "secret");
  EXPECT_EQ(launch.secret, "secret");
  EXPECT_EQ(launch.listener, 7);
}

TEST(Launch, LaunchersThatDisagreeAreRefused) {
  expect_refused(with(mpirun(), {{"RANK", "0"},
                                 {"WORLD_SIZE", "2"},
                                 {"LOCAL_RANK", "0"},
                                 {"LOCAL_WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "a"},
                                 {"MASTER_PORT", "1"}}),
                 {"rank 0 of 2", "torchrun", "rank 3 of 4", "mpirun"});
}

TEST(Launch, LaunchersThatAgreeAreFine) {
  const Environment same = with(mpirun(), {{"RANK", "3"},
                                           {"WORLD_SIZE", "4"},
                                           {"LOCAL_RANK", "3"},
                                           {"LOCAL_WORLD_SIZE", "4"},
                                           {"MASTER_ADDR", "a"},
                                           {"MASTER_PORT", "1"}});
  EXPECT_EQ(find_launch(same).rank, 3);
}

// `srun --ntasks-per-node=1 torchrun ...` starts one agent on each machine.
TEST(Launch, SlurmMayStartTorchrunOnEveryMachine) {
  const Environment agents = with(srun(), {{"SLURM_STEP_NUM_TASKS", "2"},
                                           {"SLURM_PROCID", "1"},
                                           {"SLURM_LOCALID", "0"},
                                           {"SLURM_NODEID", "1"},
                                           {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}});
  EXPECT_EQ(find_launch(with(agents, torchrun())).launcher, "torchrun");
  expect_refused(with(srun(), torchrun()), {"rank 9 of 16", "rank 17 of 24"});
}

TEST(Launch, MissingAndImpossibleNumbersAreNamed) {
  Environment half = torchrun();
  half.erase("RANK");
  expect_refused(half, {"WORLD_SIZE is set, but RANK is not"});
  half = torchrun();
  half.erase("MASTER_ADDR");
  expect_refused(half, {"MASTER_ADDR"});
  half = torchrun();
  half.erase("LOCAL_WORLD_SIZE");
  expect_refused(half, {"LOCAL_WORLD_SIZE"});
  expect_refused(with(torchrun(), {{"RANK", "16"}}), {"RANK=16", "WORLD_SIZE=16"});
  expect_refused(with(torchrun(), {{"LOCAL_RANK", "8"}}), {"LOCAL_RANK=8", "LOCAL_WORLD_SIZE=8"});
  expect_refused(with(torchrun(), {{"RANK", "nine"}}), {"RANK=nine"});
  expect_refused(with(torchrun(), {{"RANK", "-1"}}), {"RANK=-1"});
  expect_refused(with(torchrun(), {{"MASTER_PORT", "70000"}}), {"MASTER_PORT=70000"});
  expect_refused(with(srun(), {{"SLURM_STEP_TASKS_PER_NODE", "8(x"}}), {"8(x"});
  expect_refused(with(srun(), {{"SLURM_STEP_NODELIST", "gpu[3-1]"}}), {"3-1"});
}

TEST(Launch, ExpandsHosts) {
  using Hosts = std::vector<std::string>;
  EXPECT_EQ(expand_hosts(""), Hosts());
  EXPECT_EQ(expand_hosts("a"), Hosts({"a"}));
  EXPECT_EQ(expand_hosts("a,b-1"), Hosts({"a", "b-1"}));
  EXPECT_EQ(expand_hosts("gpu[01-03,7],login"),
            Hosts({"gpu01", "gpu02", "gpu03", "gpu7", "login"}));
  EXPECT_EQ(expand_hosts("r[1-2]n[08,10].x"), Hosts({"r1n08.x", "r1n10.x", "r2n08.x", "r2n10.x"}));
  for (const char* bad : {"a[", "a]", "a[]", "a[1-]", "a,,b", "a[x]"}) {
    EXPECT_THROW(expand_hosts(bad), Error) << bad;
  }
}

TEST(Launch, ChoosesTheDevice) {
  Launch launch{.launcher = "srun", .local_rank = 3, .local_world = 4};
  EXPECT_EQ(choose_device(launch, 8), 3);
  EXPECT_EQ(choose_device(launch, 1), 0);  // srun --gpus-per-task=1
  EXPECT_THROW(choose_device(launch, 2), Error);
  launch.launcher = "sbtrain";
  EXPECT_THROW(choose_device(launch, 1), Error);
}

}  // namespace
}  // namespace sbtrain
