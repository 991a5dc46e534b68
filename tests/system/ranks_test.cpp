// Training by several ranks on the CPU, which mpirun starts: every world and mode trains like one
// process, runs move between worlds, and ranks that fail end the job without harm to what was
// saved.
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>

#include "runs.h"

namespace sbtrain::test {
namespace {

// rank.sh FOLDER NODE_SIZE COMMAND...: one rank, which leaves its process id and exit code in the
// folder. NODE_SIZE above 0 makes machines of so many ranks out of this one. With RANK_FOLDERS a
// rank runs in a folder of its own, that name with .RANK.
constexpr const char* kRankScript = R"(
folder=$1 rank=$OMPI_COMM_WORLD_RANK
if [ "$2" -gt 0 ]; then
  export OMPI_COMM_WORLD_LOCAL_SIZE="$2" OMPI_COMM_WORLD_LOCAL_RANK=$((rank % $2)) MASTER_ADDR=127.0.0.1
fi
shift 2
[ -z "$RANK_FOLDERS" ] || cd "$RANK_FOLDERS.$rank"
"$@" &
echo $! > "$folder/pid.$rank"
wait $!
echo $? > "$folder/code.$rank"
)";

// The order of sums over ranks and micro-batches changes losses by so much, of their size, in 60
// steps.
constexpr double kBound = 1e-5;
// The same with Muon, whose polynomials multiply differences, in 40 steps.
constexpr double kMuonBound = 1e-4;

struct Job {
  fs::path folder{};
  int world = 1;
  std::unique_ptr<Process> mpirun{};
};

class RankedTraining : public SystemTest {
 protected:
  void SetUp() override {
    SystemTest::SetUp();
    for (const auto& [name, value] : rank_environment()) environment_[name] = value;
    write_file(path("rank.sh"), kRankScript);
  }

  // Eight sequences a step in micro-batches of one, and a guard that skips steps; all checkpoints
  // are kept.
  std::vector<std::string> eight(const std::string& out,
                                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--train.batch=8", "--train.micro_batch=1",
                                          "--train.spike_sigma=1.5", "--train.spike_window=10",
                                          "--checkpoint.keep=20"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return training(out, arguments);
  }
  // For as long as nothing ends it, without the guard.
  std::vector<std::string> endless(const std::string& out,
                                   const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--stages.0.length=1000000 steps", "--validation.every=0",
                                          "--train.spike_sigma=0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return eight(out, arguments);
  }

  // mpirun leaves ranks alone when another one fails: each has to end by itself.
  Job start(int world, const std::vector<std::string>& arguments, int node_size = 0) {
    Job job{.folder = path("job-" + std::to_string(jobs_++)), .world = world};
    fs::create_directory(job.folder);
    std::vector<std::string> line = {SBTRAIN_MPIRUN,
                                     "--oversubscribe",
                                     "--allow-run-as-root",
                                     "--enable-recovery",
                                     "-n",
                                     std::to_string(world),
                                     "sh",
                                     path("rank.sh"),
                                     job.folder,
                                     std::to_string(node_size)};
    for (const std::string& word : command(arguments)) line.push_back(word);
    job.mpirun = std::make_unique<Process>(line, job.folder / "log", environment_);
    return job;
  }
  static int number_in(const fs::path& file) {
    std::ifstream in(file);
    int number = -1;
    in >> number;
    return number;
  }
  // Waits until the process is known: kill() takes -1 for every process of the machine, and 0 for
  // those of the caller's group.
  static int pid_of(const Job& job, int rank) {
    int pid = -1;
    while (pid <= 1 && job.mpirun->running()) {
      pid = number_in(job.folder / ("pid." + std::to_string(rank)));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (pid > 1) return pid;
    throw std::runtime_error(fmt::format("rank {} has not started, or the job has ended", rank));
  }
  static int code_of(const Job& job, int rank) {
    return number_in(job.folder / ("code." + std::to_string(rank)));
  }
  void wait_for_step(Job& job, const std::string& out, int step) const {
    while (job.mpirun->running() && last_step(out) < step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // The exit codes of all ranks. After a failure they end by themselves: the log of one that is
  // ended ten seconds later says so, and is not what expect_logged() looks for.
  std::vector<int> finish(Job& job, double seconds = 25) {
    job.mpirun->wait(seconds);
    output_ = job.mpirun->output();
    std::vector<int> codes;
    for (int rank = 0; rank < job.world; ++rank) codes.push_back(code_of(job, rank));
    return codes;
  }
  void expect_done(int world, const std::vector<std::string>& arguments, int node_size = 0) {
    Job job = start(world, arguments, node_size);
    EXPECT_EQ(finish(job, 120), std::vector<int>(static_cast<size_t>(world), 0)) << output_;
  }
  void expect_says(const std::string& part) const {
    EXPECT_NE(output_.find(part), std::string::npos) << part << "\n" << output_;
  }
  void expect_one_error() const {
    const size_t first = output_.find("error: ");
    ASSERT_NE(first, std::string::npos) << output_;
    EXPECT_EQ(output_.find("error: ", first + 1), std::string::npos) << output_;
  }
  // The last line of a rank's log names the exit code and the cause.
  void expect_logged(const std::string& out, int rank, int code, const std::string& cause) const {
    const std::string log = read_file(path(out) + fmt::format("/logs/rank-{:05}.log", rank));
    const size_t end = log.find(fmt::format("this rank ends with exit code {}: ", code));
    ASSERT_NE(end, std::string::npos) << "rank " << rank << ":\n" << log;
    EXPECT_NE(log.find(cause, end), std::string::npos) << log.substr(end);
  }
  // What was saved before is whole.
  void expect_sound(const std::string& out) {
    const std::string said = output_;
    EXPECT_EQ(run({"ckpt", "verify", path(out)}), 0) << output_;
    output_ = said;
  }

  // Both runs took the same steps with the same rows, and skipped the same ones.
  void expect_same_training(const std::string& a, const std::string& b, int steps,
                            double bound = kBound) const {
    const std::vector<std::string> of_a = records(a);
    const std::vector<std::string> of_b = records(b);
    for (int step = 1; step <= steps; ++step) {
      const double loss = loss_at(of_b, step, "train/loss");
      EXPECT_NEAR(loss_at(of_a, step, "train/loss"), loss, bound * loss) << step;
      EXPECT_EQ(loss_at(of_a, step, "train/spike_steps"), loss_at(of_b, step, "train/spike_steps"))
          << step;
    }
    const double validation = loss_at(of_b, steps, "validation/loss");
    EXPECT_NEAR(loss_at(of_a, steps, "validation/loss"), validation, bound * validation);
    EXPECT_EQ(position(a), position(b));
  }
  // Where the loader stands in each source, which does not depend on the number of ranks.
  nlohmann::json position(const std::string& out) const {
    const nlohmann::json state = nlohmann::json::parse(read_file(newest(out) / "state.json"));
    nlohmann::json loader = nlohmann::json::parse(state.at("loader").get<std::string>());
    loader.erase("world");
    return loader;
  }

 private:
  int jobs_ = 0;
};

// ---- Data that makes the numbers of one rank overflow

// Changes the matrices of a Hugging Face folder, which are of f32.
void change_matrices(const fs::path& folder,
                     const std::function<void(const std::string& name, float* x, size_t rows,
                                              size_t width)>& change) {
  std::string bytes = read_file(folder / "model.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__" || tensor.at("shape").size() != 2) continue;
    ASSERT_EQ(tensor.at("dtype"), "F32");
    const size_t begin = 8 + header_bytes + tensor.at("data_offsets")[0].get<size_t>();
    const auto rows = tensor.at("shape")[0].get<size_t>();
    const auto width = tensor.at("shape")[1].get<size_t>();
    std::vector<float> values(rows * width);
    std::memcpy(values.data(), bytes.data() + begin, values.size() * sizeof(float));
    change(name, values.data(), rows, width);
    std::memcpy(bytes.data() + begin, values.data(), values.size() * sizeof(float));
  }
  write_file(folder / "model.safetensors", bytes);
}

// The first channel becomes that of one token, which alone has a 1 there. Nothing else writes to it
// or reads it but the first gate of the first block, where that 1 becomes infinite. So rows with
// the token overflow, and with all other rows the model trains as if it had one channel less.
void make_token_overflow(const fs::path& folder, size_t token) {
  int gates = 0;
  change_matrices(folder, [&](const std::string& name, float* x, size_t rows, size_t width) {
    const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
    if (is("o_proj") || is("down_proj")) {
      std::fill_n(x, width, 0.0f);
      return;
    }
    for (size_t row = 0; row < rows; ++row) x[row * width] = 0;
    if (is("embed_tokens")) x[token * width] = 1;
    if (is("layers.0.") && (is("gate_proj") || is("up_proj"))) {
      std::fill_n(x, width, 0.0f);
      x[0] = 1e25f;
      ++gates;
    }
  });
  EXPECT_EQ(gates, 2);
}

class OverflowingTraining : public RankedTraining {
 protected:
  static constexpr char kRare = '\a';
  static constexpr size_t kRareToken = 3 + kRare;  // unk, bos and eos come before the bytes

  // Weights that overflow at the character.
  void SetUp() override {
    RankedTraining::SetUp();
    const std::vector<std::string> still = {"--stages=[{name: a, length: 1 steps}]", "--train.lr=0",
                                            "--model.tied=false"};
    ASSERT_EQ(run(training("start", still)), 0) << output_;
    ASSERT_EQ(run({"export", "--checkpoint", path("start"), "--output", path("weights")}), 0)
        << output_;
    make_token_overflow(path("weights"), kRareToken);
  }
  // A store whose texts have the character once in so many bytes.
  void make_rare(const std::string& name, size_t spacing) {
    std::istringstream text(read_file(path("a.jsonl")));
    std::string lines;
    for (std::string line; std::getline(text, line);) {
      nlohmann::json document = nlohmann::json::parse(line);
      auto words = document.at("text").get<std::string>();
      for (size_t at = spacing; at < words.size(); at += spacing) {
        const size_t space = words.find(' ', at);  // not within a character of several bytes
        if (space != std::string::npos) words[space] = kRare;
      }
      document["text"] = words;
      lines += document.dump() + "\n";
    }
    write_file(path(name + ".jsonl"), lines);
    ASSERT_EQ(run({"prepare", "--input", path(name + ".jsonl"), "--tokenizer",
                   path("tokenizer.model"), "--output", path(name + ".h5")}),
              0)
        << output_;
  }
  std::vector<std::string> overflowing(const std::string& out, const std::string& store,
                                       const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--init-from",
                                          path("weights"),
                                          "--data.sources=[{path: " + path(store + ".h5") + "}]",
                                          "--stages=[{name: a, length: 60 steps}]",
                                          "--model.tied=false",
                                          "--train.spike_sigma=0",
                                          "--train.max_bad_steps=50"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return eight(out, arguments);
  }
  // How many steps each record says were skipped.
  std::vector<int> skipped(const std::string& out) const {
    std::vector<int> counts;
    for (const std::string& text : records(out)) {
      const nlohmann::json record = nlohmann::json::parse(text);
      if (record.contains("train/skipped_steps")) counts.push_back(record["train/skipped_steps"]);
    }
    return counts;
  }
};

// Now and then one of a step's eight rows has the token, so that one rank overflows.
TEST_F(OverflowingTraining, IsSkippedByAllRanks) {
  make_rare("rare", 2500);
  ASSERT_EQ(run(overflowing("one", "rare")), 0) << output_;
  const std::vector<int> expected = skipped("one");
  ASSERT_EQ(expected.size(), 60U);
  EXPECT_GT(expected.back(), 5);
  EXPECT_LT(expected.back(), 40);
  for (const auto& [world, mode] : {std::pair(2, "full"), {4, "full"}, {4, "grad"}, {2, "none"}}) {
    const std::string out = mode + std::to_string(world);
    SCOPED_TRACE(out);
    expect_done(world, overflowing(out, "rare", {"--train.sharding=" + std::string(mode)}));
    EXPECT_EQ(skipped(out), expected);
    EXPECT_EQ(position(out), position("one"));
    const double loss = loss_at(records("one"), 60, "validation/loss");
    EXPECT_NEAR(loss_at(records(out), 60, "validation/loss"), loss, kBound * loss);
    expect_sound(out);
  }
}

TEST_F(OverflowingTraining, EndsAllRanksAlike) {
  make_rare("rare", 2500);
  make_rare("often", 500);
  for (const auto& [store, steps] : {std::pair("rare", 1), {"often", 3}}) {
    SCOPED_TRACE(store);
    Job job = start(4, overflowing(store, store, {fmt::format("--train.max_bad_steps={}", steps)}));
    EXPECT_EQ(finish(job), std::vector<int>(4, 6)) << output_;
    expect_says(fmt::format("{} bad steps in a row", steps));
    expect_one_error();
    for (int rank = 0; rank < 4; ++rank) expect_logged(store, rank, 6, "bad steps in a row");
  }
}

TEST_F(RankedTraining, EveryWorldAndModeTrainsLikeOneProcess) {
  ASSERT_EQ(run(eight("one")), 0) << output_;
  const double skipped = loss_at(records("one"), 60, "train/spike_steps");
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 20);
  struct Case {
    int world;
    const char* mode;
    int node_size = 0;
  };
  for (const Case& c :
       {Case{1, "full"}, Case{2, "full"}, Case{2, "grad"}, Case{2, "none"}, Case{2, "hybrid", 1},
        Case{4, "full"}, Case{4, "grad"}, Case{4, "none"}, Case{4, "hybrid", 2}}) {
    const std::string out = c.mode + std::to_string(c.world);
    SCOPED_TRACE(out);
    expect_done(c.world,
                eight(out, {"--train.sharding=" + std::string(c.mode), "--train.gather_engine=auto",
                            "--train.reduce_engine=auto"}),
                c.node_size);
    expect_same_training(out, "one", 60);
  }
}

// Rows that two or four ranks share, in either layout.
TEST_F(RankedTraining, RanksThatShareSequencesTrainLikeOneProcess) {
  const auto context = [](int ranks) { return fmt::format("--train.context_parallel={}", ranks); };
  ASSERT_EQ(run(eight("one")), 0) << output_;
  struct Case {
    int world, context;
    const char *mode, *layout;
  };
  for (const Case& c : {Case{2, 2, "full", "folded"}, Case{2, 2, "none", "consecutive"},
                        Case{4, 4, "grad", "folded"}, Case{4, 2, "full", "consecutive"},
                        Case{4, 2, "none", "folded"}}) {
    const std::string out = fmt::format("{}{}-{}", c.mode, c.world, c.context);
    SCOPED_TRACE(out);
    expect_done(c.world, eight(out, {"--train.sharding=" + std::string(c.mode), context(c.context),
                                     "--train.context_layout=" + std::string(c.layout)}));
    expect_same_training(out, "one", 60);
  }
  // From two that share sequences to four, in the other layout, and to one.
  int step = 20;
  for (const int world : {4, 1}) {
    const std::string to = fmt::format("moved{}", world);
    SCOPED_TRACE(to);
    copy_run("full2-2", to, step);
    expect_done(world, eight(to, {context(world), "--train.context_layout=consecutive"}));
    expect_same_training(to, "one", 60);
  }
}

// Gates travel with the keys, and what all keys leave is given away.
TEST_F(RankedTraining, RanksThatShareSequencesShareGatesAndRemainders) {
  const auto gated = [&](const std::string& out, std::vector<std::string> more = {}) {
    more.insert(more.end(),
                {"--model.attention.type=stickbreaking", "--model.attention.forget_gate=true",
                 "--model.attention.remainder=bias"});
    return eight(out, more);
  };
  ASSERT_EQ(run(gated("one")), 0) << output_;
  expect_done(2, gated("two", {"--train.context_parallel=2"}));
  expect_same_training("two", "one", 60);
}

TEST_F(RankedTraining, ARunMovesFromFourRanksToTwoToOneToFour) {
  expect_done(4, eight("four"));
  std::string from = "four";
  int before = 4;
  int step = 10;
  for (const int world : {2, 1, 4}) {
    const std::string to = from + "-" + std::to_string(world);
    SCOPED_TRACE(to);
    copy_run(from, to, step);
    expect_done(world, eight(to));
    expect_says(fmt::format("saved by {} rank{}, now there {} {}:", before, before == 1 ? "" : "s",
                            world == 1 ? "is" : "are", world));
    expect_same_training(to, "four", 60);
    from = to;
    before = world;
    step += 10;
  }
}

// One rank, two from step 20, and one again from step 40. Of the two, one is killed on the way, and
// what they continue from their checkpoint is bit for bit what they did before.
TEST_F(RankedTraining, MuonMovesFromOneRankToTwoToOneAndIsKilledOnTheWay) {
  const auto muon = [&](const std::string& out, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"--train.optimizer=muon"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return eight(out, arguments);
  };
  ASSERT_EQ(run(muon("one")), 0) << output_;
  EXPECT_GT(loss_at(records("one"), 60, "train/spike_steps"), 0);  // momentum stays there
  copy_run("one", "two", 20);
  copy_run("one", "killed", 20);
  expect_done(2, muon("two"));
  expect_same_training("two", "one", 60, kMuonBound);
  Job job = start(2, muon("killed"));
  while (job.mpirun->running() && newest("killed").filename() < "step-00000030") {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ::kill(pid_of(job, 1), SIGKILL);
  EXPECT_EQ(finish(job), (std::vector<int>{7, 128 + SIGKILL})) << output_;
  expect_sound("killed");
  EXPECT_GE(newest("killed").filename(), "step-00000030");
  EXPECT_LT(newest("killed").filename(), "step-00000060");
  expect_done(2, muon("killed"));
  expect_says("resumed from");
  expect_equal_runs("killed", "two");
  copy_run("two", "back", 40);
  ASSERT_EQ(run(muon("back")), 0) << output_;
  expect_same_training("back", "one", 60, kMuonBound);
}

TEST_F(RankedTraining, RepeatedAndContinuedRunsAreEqual) {
  const std::vector<std::string> more = {"--stages.0.length=75 steps"};
  expect_done(2, eight("run", more));
  expect_done(2, eight("again", more));
  expect_equal_runs("again", "run");
  // A signal to one rank is enough, and all save once.
  Job job = start(2, eight("parts", more));
  wait_for_step(job, "parts", 20);
  ::kill(pid_of(job, 1), SIGTERM);
  EXPECT_EQ(finish(job), (std::vector<int>{85, 85})) << output_;
  expect_says("stopped by a signal to another rank");
  const std::string saved = newest("parts").filename().string();
  EXPECT_EQ(output_.find(saved), output_.rfind(saved)) << output_;
  EXPECT_LT(saved, "step-00000100");
  expect_done(2, eight("parts", more));
  expect_says("resumed from");
  expect_equal_runs("parts", "run");
}

// Signals come at any moment of a step of about 0.1 s.
TEST_F(RankedTraining, AStopTakesTheCurrentStepAndOneMoreAtMost) {
  const std::vector<std::string> slow = {"--model.width=128", "--model.inner=352",
                                         "--train.sequence_length=128", "--checkpoint.every=0"};
  int step = 0;
  for (const int rank : {0, 1, 0, 1}) {
    Job job = start(2, endless("run", slow));
    wait_for_step(job, "run", step + 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * step % 90));
    const int done = last_step("run");
    ::kill(pid_of(job, rank), SIGTERM);
    EXPECT_EQ(finish(job), (std::vector<int>{85, 85})) << output_;
    step = last_step("run");
    EXPECT_LE(step, done + 2) << "signal to rank " << rank;
    EXPECT_EQ(newest("run").filename(), fmt::format("step-{:08}", step));
  }
}

// Each of them is the owner of some matrices, so the optimizer takes every one of them time.
TEST_F(RankedTraining, BenchTrainHasThePartsOfEveryRank) {
  expect_done(2, {"bench", "train", "--config", path("config.yaml"), "--json", "--steps=2",
                  "--train.micro_batch=1", "--train.optimizer=muon"});
  const size_t begin = output_.find('{');
  const auto json = nlohmann::json::parse(output_.substr(begin, output_.find('\n', begin) - begin));
  const nlohmann::json& ranks = json.at("parts_of_ranks");
  for (const auto& [name, seconds] : json.at("parts").items()) {
    ASSERT_EQ(ranks.at(name).size(), 2U) << ranks;
    EXPECT_NEAR(ranks.at(name)[0].get<double>(), seconds.get<double>(), 1e-8) << name;
  }
  for (const auto& seconds : ranks.at("optimizer")) EXPECT_GT(seconds.get<double>(), 0) << ranks;
}

// All load the weights that the first one has found, and those that share rows take the same text.
TEST_F(RankedTraining, BenchTrainTakesTheWeightsOfARun) {
  expect_done(2, training("run"));
  for (const char* shared : {"--train.context_parallel=1", "--train.context_parallel=2"}) {
    expect_done(2, {"bench", "train", "--config", path("config.yaml"), "--json", "--steps=2",
                    "--train.micro_batch=1", "--init-from", path("run"), shared});
    expect_says("the weights are those of");
  }
}

TEST_F(RankedTraining, ASecondJobOnTheFolderIsRefused) {
  Job job = start(2, endless("run"));
  wait_for_step(job, "run", 3);
  Job second = start(2, endless("run"));
  EXPECT_EQ(finish(second), (std::vector<int>{2, 2})) << output_;
  expect_says("in use");
  for (const int rank : {0, 1}) expect_logged("run", rank, 2, "in use");
  expect_one_error();
  const int step = last_step("run");
  wait_for_step(job, "run", step + 3);
  ::kill(pid_of(job, 0), SIGTERM);
  EXPECT_EQ(finish(job), (std::vector<int>{85, 85})) << output_;
}

TEST_F(RankedTraining, AKilledRankEndsTheJob) {
  Job job = start(4, endless("run"));
  wait_for_step(job, "run", 25);
  const int pid = pid_of(job, 1);
  ::kill(pid, SIGKILL);
  EXPECT_EQ(finish(job), (std::vector<int>{7, 128 + SIGKILL, 7, 7})) << output_;
  expect_says(fmt::format("error: rank 1 (pid {} on ", pid));
  expect_one_error();
  for (const int rank : {0, 2, 3}) {
    expect_logged("run", rank, 7, fmt::format("rank 1 (pid {} on ", pid));
  }
  expect_sound("run");
}

TEST_F(RankedTraining, AKilledRankEndsThoseThatShareItsSequences) {
  Job job = start(4, endless("run", {"--train.context_parallel=4"}));
  wait_for_step(job, "run", 25);
  const int pid = pid_of(job, 2);
  ::kill(pid, SIGKILL);
  EXPECT_EQ(finish(job), (std::vector<int>{7, 7, 128 + SIGKILL, 7})) << output_;
  expect_says(fmt::format("error: rank 2 (pid {} on ", pid));
  expect_one_error();
  expect_sound("run");
}

// With Muon, whose matrices travel as well.
TEST_F(RankedTraining, AStoppedRankEndsTheJobAtItsDeadline) {
  Job job = start(2, endless("run", {"--train.timeout=3", "--train.optimizer=muon"}));
  wait_for_step(job, "run", 25);
  const int pid = pid_of(job, 1);
  ::kill(pid, SIGSTOP);
  while (job.mpirun->running() && code_of(job, 0) < 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(code_of(job, 0), 7);
  ::kill(pid, SIGKILL);
  finish(job);
  expect_says("error: no answer from rank 1");
  expect_one_error();
  expect_sound("run");
}

TEST_F(RankedTraining, RanksWithDifferentDataAreRefused) {
  environment_["RANK_FOLDERS"] = path("rank");
  for (const auto& [folder, store] : {std::pair("rank.0", "a.h5"), {"rank.1", "b.h5"}}) {
    fs::create_directory(path(folder));
    fs::copy(path(store), path(folder) + "/here.h5");
  }
  Job job = start(2, endless("run", {"--data.sources=[{path: here.h5}]"}));
  EXPECT_EQ(finish(job), (std::vector<int>{3, 3})) << output_;
  expect_says("(data)/sources/0/content_hash: '");
  EXPECT_EQ(output_.find("sequence_length"), std::string::npos) << output_;
  expect_one_error();
}

TEST_F(RankedTraining, ADamagedStoreEndsTheJobWithItsName) {
  Job job = start(2, endless("run"));
  wait_for_step(job, "run", 25);
  std::string bytes = read_file(path("a.h5"));
  std::fstream file(path("a.h5"), std::ios::in | std::ios::out | std::ios::binary);
  // All but the description at the beginning.
  for (size_t at = bytes.size() / 4; at < bytes.size(); at += 64) {
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(bytes[at] ^ 1));
  }
  file.close();
  EXPECT_EQ(finish(job), (std::vector<int>{4, 4})) << output_;
  expect_says("a.h5");
  expect_one_error();
  expect_sound("run");
}

TEST_F(RankedTraining, ADiskThatIsFullForOneRankEndsTheJob) {
  Job job = start(2, endless("run"));
  wait_for_step(job, "run", 25);
  const rlimit limit{.rlim_cur = 4096, .rlim_max = 4096};
  ASSERT_EQ(::prlimit(pid_of(job, 1), RLIMIT_FSIZE, &limit, nullptr), 0);
  EXPECT_EQ(finish(job), (std::vector<int>{9, 9})) << output_;
  expect_says("rank-00001-of-00002.safetensors");
  expect_one_error();
  for (const int rank : {0, 1}) expect_logged("run", rank, 9, "rank-00001-of-00002.safetensors");
  expect_sound("run");
}

}  // namespace
}  // namespace sbtrain::test
