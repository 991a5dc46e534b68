// sbtrain doctor: what this machine can run, what is missing for the rest, and with which versions.
#include <fmt/format.h>
#include <omp.h>

#include <fstream>

#include "cli/about.h"
#include "cli/cli.h"
#include "core/cpu_level.h"
#include "core/device.h"
#include "core/gpus.h"
#include "core/host_memory.h"
#include "core/installation.h"
#include "core/python.h"
#include "core/shared_library.h"
#include "core/version.h"
#include "ops/libraries.h"
#include "parallel/make_communicator.h"

namespace sbtrain {
namespace {

std::string line(const std::string& name, const std::string& text) {
  return fmt::format("  {:<17} {}\n", name, text);
}

std::string describe(const FoundLibrary& library) {
  if (!library.problem.empty()) return library.problem;
  return fmt::format("{} ({})", library.version, library.path);
}

std::string line(const FoundLibrary& library) {
  return line(library.name, describe(library));
}

std::string level_name(int level) {
  return level > 1 ? fmt::format("x86-64-v{}", level) : "x86-64";
}

std::string compiled_for() {
  std::string text = kCpuLevel == 0 ? "this kind of processor" : level_name(kCpuLevel);
  if (native_build()) text += ", and all else that the processor of the build machine has";
  return text;
}

std::string cuda_backend() {
  return has_cuda() ? cuda_build() : "none: this build has only the CPU backend";
}

// "AMD EPYC 7B13" of /proc/cpuinfo; empty where it does not say.
std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string text; std::getline(file, text);) {
    if (!text.starts_with("model name")) continue;
    const size_t colon = text.find(": ");
    if (colon != std::string::npos) return text.substr(colon + 2);
  }
  return "";
}

std::string processors() {
  const std::string name = processor_name();
  std::string text = fmt::format("{} for this process", omp_get_num_procs());
  if (!name.empty()) text += ", " + name;
  int level = 4;
  while (missing_cpu_feature(level) != nullptr) --level;
  return kCpuLevel == 0 ? text : fmt::format("{}, {}", text, level_name(level));
}

std::string memory() {
  const HostMemory memory = host_memory();
  if (memory.total == SIZE_MAX) return "unknown";
  return fmt::format("{:.1f} of {:.1f} GiB free, by {}", gibibytes(memory.free),
                     gibibytes(memory.total), memory.limit);
}

std::string gpus() {
  const std::string driver = cuda_of_driver();
  if (!has_cuda()) return "not looked for: this build has only the CPU backend";
  if (driver.empty()) return "none: there is no NVIDIA driver";
  std::string text;
  for (int gpu = 0; gpu < visible_gpus(); ++gpu) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", gpu_name(gpu));
  }
  return fmt::format("{}; the driver supports CUDA {}", text.empty() ? "none" : text, driver);
}

struct Libraries {
  FoundLibrary openblas = ops::find_openblas();
  FoundLibrary cublas_lt = ops::find_cublas_lt();
  FoundLibrary cudnn = ops::find_cudnn();
  FoundLibrary nccl = rank_library(Backend::kCuda);
  FoundLibrary mpi = rank_library(Backend::kCpu);
};

std::string answer(const std::string& problem, const std::string& yes = "") {
  return problem.empty() ? "yes" + yes : "no: " + problem;
}

std::string no_gpu(const Libraries& libraries) {
  std::string why;
  if (!has_cuda()) {
    return "this build has only the CPU backend; install the CUDA toolkit (nvcc) and build again";
  }
  if (!cuda_available(&why))
    return why + "; install one from NVIDIA, and see whether nvidia-smi works";
  return libraries.cublas_lt.problem;
}

std::string no_gpus(const Libraries& libraries) {
  const std::string problem = no_gpu(libraries);
  if (!problem.empty()) return problem;
  if (visible_gpus() < 2) return "one GPU is visible";
  return libraries.nccl.problem;
}

std::string what_runs(const Libraries& libraries) {
  const bool gpu = no_gpu(libraries).empty();
  const std::string cudnn = !gpu ? ""
                            : libraries.cudnn.problem.empty()
                                ? ", softmax attention by cuDNN where it is faster"
                                : ", softmax attention by sbtrain's own kernels";
  return line("the CPU",
              answer(libraries.openblas.problem, ", models of up to some ten million parameters")) +
         line("ranks on the CPU", answer(libraries.mpi.problem, ", started by mpirun")) +
         line("one GPU", answer(no_gpu(libraries), cudnn)) +
         line("several GPUs", answer(no_gpus(libraries), fmt::format(", {}", visible_gpus())));
}

ExitCode run_doctor() {
  const Libraries libraries;
  const auto files = program_files();
  fmt::print("sbtrain {} ({})\n", version(), git_revision());
  fmt::print("{}{}{}", line("compiled for", compiled_for()), line("CUDA backend", cuda_backend()),
             line("its files", files.empty() ? "not found" : files.string()));
  fmt::print("\nThis machine\n{}{}{}{}", line("processors", processors()), line("memory", memory()),
             line("GPUs", gpus()), line("Python", python_interpreter()));
  fmt::print("\nLibraries, which are loaded when they are needed\n{}{}{}{}{}",
             line(libraries.openblas), line(libraries.cublas_lt), line(libraries.cudnn),
             line(libraries.nccl), line(libraries.mpi));
  fmt::print("\nWhat it can train on\n{}", what_runs(libraries));
  return ExitCode::kDone;
}

}  // namespace

std::string version_text() {
  std::string text = fmt::format("sbtrain {} ({})\n", version(), git_revision());
  text += line("compiled for", compiled_for()) + line("CUDA backend", cuda_backend());
  if (has_cuda()) text += line(ops::find_cudnn()) + line(rank_library(Backend::kCuda));
  text += line(rank_library(Backend::kCpu));
  text.pop_back();  // the newline, which whoever prints it adds
  return text;
}

void add_doctor(Command app, Action& action) {
  Command command =
      app.add_subcommand("doctor", "Say what this machine can run, and what is missing for more");
  command.callback([&action] { action = run_doctor; });
}

}  // namespace sbtrain
