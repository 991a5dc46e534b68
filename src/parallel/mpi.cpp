#include "parallel/mpi.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "parallel/element_sum.h"
#include "parallel/job_communicator.h"
#include "parallel/mpi_library.h"

namespace sbtrain {
namespace {

// What travels between two ranks at once: far below the 2^31 elements that MPI can count.
constexpr int64_t kChunkBytes = int64_t{1} << 20;

void check(int error, std::string_view what) {
  if (error == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  mpi().Error_string(error, text.data(), &length);
  fail(ExitCode::kCommunication, "{} failed in MPI: {}", what,
       std::string(text.data(), static_cast<size_t>(length)));
}

// Without it MPI_Init ends the process, with a long text about how Slurm was built.
void require_pmix() {
  const auto has = [](const char* name) { return std::getenv(name) != nullptr; };
  if (!has("SLURM_PROCID") || has("PMIX_RANK") || has("OMPI_COMM_WORLD_RANK")) return;
  fail(ExitCode::kUsage,
       "ranks on the CPU talk by MPI, which needs PMIx, and srun has not provided it: start them "
       "with srun --mpi=pmix, or with mpirun");
}

// MPI from its start to its end, which a process may have once.
class MpiSession {
 public:
  explicit MpiSession(const Control& control) : control_(control) {
    int started = 0;
    mpi().Initialized(&started);
    require(!started, "MPI is started a second time");
    require_pmix();
    int provided = 0;
    check(mpi().Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "starting");
    mpi().Comm_set_errhandler(mpi().comm_world, mpi().errors_return);
    int rank = 0;
    int world = 0;
    mpi().Comm_rank(mpi().comm_world, &rank);
    mpi().Comm_size(mpi().comm_world, &world);
    if (rank == control.rank() && world == control.world()) return;
    fail(ExitCode::kUsage,
         "this is rank {} of {}, but to MPI it is rank {} of {}: start ranks on the CPU with "
         "mpirun -n {}",
         control.rank(), control.world(), rank, world, control.world());
  }
  // The end waits for all ranks, so it is only for those that all reach it.
  ~MpiSession() {
    if (std::uncaught_exceptions() == 0 && !control_.failure() && !broken) mpi().Finalize();
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  bool broken = false;  // a collective has not ended

 private:
  const Control& control_;
};

// What the ranks of a collective compare before they begin.
struct Call {
  char name[32] = {};
  char tensor[96] = {};
  char topic[96] = {};
  int32_t root = -1;

  Call(Collective collective, const Tensor& whole, const std::string& of_topic, int of_root = -1)
      : root(of_root) {
    write(name, collective_name(collective));
    write(tensor, whole.describe());
    write(topic, of_topic);
  }
  Call() = default;
  std::string text() const {
    return fmt::format("{} of {} in '{}'{}", name, tensor, topic,
                       root < 0 ? std::string() : fmt::format(" by rank {}", root));
  }

 private:
  template <size_t N>
  static void write(char (&to)[N], const std::string& text) {
    std::strncpy(to, text.c_str(), N - 1);
  }
};

// Elements [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  // The part with the given number, of `size` elements; empty after the last.
  Range part(int64_t number, int64_t size) const {
    return {std::min(begin + number * size, end), std::min(begin + (number + 1) * size, end)};
  }
};

std::byte* at(const Tensor& x, int64_t element) {
  return static_cast<std::byte*>(x.data) + element * static_cast<int64_t>(dtype_size(x.dtype));
}

class MpiCommunicator : public JobCommunicator {
 public:
  MpiCommunicator(Control& control, std::vector<int> members, std::string topic,
                  std::shared_ptr<MpiSession> session)
      : JobCommunicator(control, std::move(members), std::move(topic)),
        session_(std::move(session)) {}

 protected:
  std::unique_ptr<Communicator> make_group(int /*color*/, std::vector<int> members,
                                           std::string topic) override {
    return std::make_unique<MpiCommunicator>(control(), std::move(members), std::move(topic),
                                             session_);
  }

  void run_all_gather(Stream& s, const Tensor& full, const Tensor& shard) override {
    collective({Collective::kAllGather, full, topic()}, [&] {
      s.copy_bytes(at(full, shard.numel() * rank()), shard.data, shard.bytes());
      gather_parts(full);
    });
  }
  void run_reduce_scatter(Stream&, const Tensor& shard, const Tensor& full) override {
    collective({Collective::kReduceScatter, full, topic()}, [&] { sum_parts(full, shard); });
  }
  void run_all_to_all(Stream&, const Tensor& to, const Tensor& from) override {
    collective({Collective::kAllToAll, from, topic()}, [&] { exchange_parts(to, from); });
  }
  // The neighbours stand where other collectives have their root: all ranks must agree on the step.
  void run_shift(Stream& s, const Tensor& to, const Tensor& from, Neighbours ring) override {
    const int step = (ring.target - rank() + world()) % world();
    collective({Collective::kShift, from, topic(), step}, [&] {
      if (step == 0) return s.copy_bytes(to.data, from.data, from.bytes());
      for_chunks(from, from.numel(), [&](int64_t number, int64_t elements) {
        const Range chunk = Range{0, from.numel()}.part(number, elements);
        send(ring.target, from, chunk);
        receive(ring.source, at(to, chunk.begin), bytes_of(to, chunk));
        wait("shifting");
      });
    });
  }
  void run_all_reduce(Stream&, const Tensor& x) override {
    collective({Collective::kAllReduce, x, topic()}, [&] {
      const Range mine = part_of(x, rank());
      sum_parts(x, Tensor(at(x, mine.begin), x.dtype, {mine.size()}));
      gather_parts(x);
    });
  }
  void run_broadcast(Stream&, const Tensor& x, int root) override {
    collective({Collective::kBroadcast, x, topic(), root}, [&] { send_to_all(x, root); });
  }

 private:
  // The elements of x that rank r sums: as equal parts as there can be.
  Range part_of(const Tensor& x, int r) const {
    return {x.numel() * r / world(), x.numel() * (r + 1) / world()};
  }
  static int64_t bytes_of(const Tensor& x, const Range& range) {
    return range.size() * static_cast<int64_t>(dtype_size(x.dtype));
  }
  // Calls act(number, elements) for each chunk of `count` elements of x's type.
  template <typename Act>
  static void for_chunks(const Tensor& x, int64_t count, Act act) {
    const int64_t elements = kChunkBytes / static_cast<int64_t>(dtype_size(x.dtype));
    for (int64_t number = 0; number * elements < count; ++number) act(number, elements);
  }
  int64_t largest_part(const Tensor& x) const { return (x.numel() + world() - 1) / world(); }

  template <typename Move>
  void collective(const Call& call, Move move) {
    control().check();
    control().waits_for(call.text());
    agree(call);
    move();
    control().waits_for("");
  }

  void agree(const Call& mine) {
    std::vector<Call> calls(static_cast<size_t>(world()));
    calls[rank()] = mine;
    for (int r = 0; r < world(); ++r) {
      if (r == rank()) continue;
      start(r, [&](int peer, MPI_Request* request) {
        return mpi().Isend(&calls[rank()], sizeof(Call), mpi().byte, peer, 0, mpi().comm_world,
                           request);
      });
      receive(r, &calls[r], sizeof(Call));
    }
    wait(mine.text());
    for (int r = 0; r < world(); ++r) {
      if (calls[r].text() == mine.text()) continue;
      fail(ExitCode::kInternal, "rank {} calls {}, but rank {} calls {}", members()[rank()],
           mine.text(), members()[r], calls[r].text());
    }
  }

  void send_to_all(const Tensor& x, int root) {
    for_chunks(x, x.numel(), [&](int64_t number, int64_t elements) {
      const Range chunk = Range{0, x.numel()}.part(number, elements);
      for (int r = 0; r < world(); ++r) {
        if (r == rank()) continue;
        if (rank() == root) send(r, x, chunk);
        if (r == root) receive(r, at(x, chunk.begin), bytes_of(x, chunk));
      }
      wait("broadcast");
    });
  }

  // Every rank has its own part of `full`; afterwards every rank has all.
  void gather_parts(const Tensor& full) {
    for_chunks(full, largest_part(full), [&](int64_t number, int64_t elements) {
      for (int r = 0; r < world(); ++r) {
        if (r == rank()) continue;
        const Range theirs = part_of(full, r).part(number, elements);
        send(r, full, part_of(full, rank()).part(number, elements));
        receive(r, at(full, theirs.begin), bytes_of(full, theirs));
      }
      wait("gathering");
    });
  }

  // Every part of `from` goes to its rank, and lands in the place of the one that sent it.
  void exchange_parts(const Tensor& to, const Tensor& from) {
    for_chunks(from, largest_part(from), [&](int64_t number, int64_t elements) {
      for (int r = 0; r < world(); ++r) {
        if (r == rank()) continue;
        const Range theirs = part_of(to, r).part(number, elements);
        send(r, from, part_of(from, r).part(number, elements));
        receive(r, at(to, theirs.begin), bytes_of(to, theirs));
      }
      wait("exchanging");
    });
  }

  // `sum` = this rank's part of the sum of all ranks' `full`; it may lie in that part of `full`,
  // since a rank sends the parts of the others only.
  void sum_parts(const Tensor& full, const Tensor& sum) {
    terms_.resize(static_cast<size_t>(kChunkBytes * world()));
    const Range mine = part_of(full, rank());
    for_chunks(full, largest_part(full), [&](int64_t number, int64_t elements) {
      const Range chunk = mine.part(number, elements);
      const int64_t bytes = bytes_of(full, chunk);
      const auto term = [&](int r) { return terms_.data() + kChunkBytes * r; };
      for (int r = 0; r < world(); ++r) {
        if (r == rank()) continue;
        send(r, full, part_of(full, r).part(number, elements));
        receive(r, term(r), bytes);
      }
      if (bytes > 0) std::memcpy(term(rank()), at(full, chunk.begin), static_cast<size_t>(bytes));
      wait("summing");
      for (int r = 1; r < world(); ++r) {
        add_elements(full.dtype, term(0), term(r), chunk.size());
      }
      if (bytes == 0) return;
      std::memcpy(at(sum, chunk.begin - mine.begin), term(0), static_cast<size_t>(bytes));
    });
  }

  // Messages between two ranks arrive in the order in which they were sent, so collectives need no
  // tags: those of two ranks are in the same order on both.
  template <typename Start>
  void start(int r, Start start_request) {
    requests_.emplace_back();
    check(start_request(members()[r], &requests_.back()), "a message");
  }
  void send(int r, const Tensor& x, const Range& range) {
    start(r, [&](int peer, MPI_Request* request) {
      return mpi().Isend(at(x, range.begin), static_cast<int>(bytes_of(x, range)), mpi().byte, peer,
                         0, mpi().comm_world, request);
    });
  }
  void receive(int r, void* to, int64_t bytes) {
    start(r, [&](int peer, MPI_Request* request) {
      return mpi().Irecv(to, static_cast<int>(bytes), mpi().byte, peer, 0, mpi().comm_world,
                         request);
    });
  }

  // Until the messages have arrived. A peer that is gone never sends: the job then has a failure.
  // The requests that it leaves are never touched again, since MPI is not called any more.
  void wait(std::string_view what) {
    session_->broken = true;
    for (int attempt = 0;; ++attempt) {
      int done = 0;
      check(mpi().Testall(static_cast<int>(requests_.size()), requests_.data(), &done,
                          MPI_STATUSES_IGNORE),
            what);
      if (done) break;
      control().check();
      // Ranks may share a core: after a few attempts the core goes to the others.
      attempt < 100 ? std::this_thread::yield()
                    : std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    requests_.clear();
    session_->broken = false;
  }

  std::shared_ptr<MpiSession> session_;
  std::vector<MPI_Request> requests_;
  std::vector<std::byte> terms_;  // a chunk of each rank
};

}  // namespace

std::unique_ptr<Communicator> make_mpi(Control& control) {
  // MPI's start returns once all ranks are in it, and nothing frees a rank that is. So they come
  // together, and one that has failed before ends the others here.
  // The same holds for one that has no library.
  mpi();
  control.exchange("starting MPI", all_ranks(control.world()), "");
  auto session = std::make_shared<MpiSession>(control);
  return std::make_unique<MpiCommunicator>(control, all_ranks(control.world()), "collectives",
                                           std::move(session));
}

}  // namespace sbtrain
