#include "core/memory_check.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "core/device.h"
#include "core/error.h"
#include "core/host_memory.h"

namespace sbtrain {
namespace {

std::string size_text(size_t bytes) {
  const auto b = static_cast<double>(bytes);
  return b < (1 << 30) ? fmt::format("{:.2f} MiB", b / (1 << 20))
                       : fmt::format("{:.2f} GiB", b / (1 << 30));
}

struct Entry {
  std::string_view name;
  size_t bytes = 0;
};

// The program that the pool is as large as, or null.
const MemoryReport::Program* largest_program(const MemoryReport& report) {
  const auto largest = std::ranges::max_element(report.programs, std::ranges::less(),
                                                &MemoryReport::Program::pool_bytes);
  return largest == report.programs.end() ? nullptr : &*largest;
}

// The classes that a report has bytes of, largest first, then what does not belong to a class.
std::vector<Entry> entries_of(const MemoryReport& report, size_t libraries) {
  const std::array<size_t, kMemoryClasses> bytes = bytes_by_class(report);
  std::vector<Entry> entries;
  for (int c = 0; c < kMemoryClasses; ++c) {
    entries.push_back({memory_class_name(static_cast<MemoryClass>(c)), bytes[c]});
  }
  std::ranges::stable_sort(entries, std::ranges::greater(), &Entry::bytes);
  if (const MemoryReport::Program* largest = largest_program(report)) {
    entries.push_back({"gaps", largest->pool_bytes - largest->peak_bytes});
  }
  entries.push_back({"libraries", libraries});
  std::erase_if(entries, [](const Entry& entry) { return entry.bytes == 0; });
  return entries;
}

}  // namespace

std::array<size_t, kMemoryClasses> bytes_by_class(const MemoryReport& report) {
  std::array<size_t, kMemoryClasses> bytes = report.persistent;
  if (const MemoryReport::Program* largest = largest_program(report)) {
    for (int c = 0; c < kMemoryClasses; ++c) bytes[c] += largest->at_peak[c];
  }
  return bytes;
}

std::string describe_memory(const MemoryReport& report, size_t libraries) {
  std::vector<Entry> entries = entries_of(report, libraries);
  entries.push_back({"total", report.total_bytes() + libraries});
  std::string text;
  for (const Entry& entry : entries) {
    text += fmt::format("  {:<12} {:>13}\n", entry.name, size_text(entry.bytes));
  }
  return text;
}

std::string summarize_memory(const MemoryReport& report, size_t libraries) {
  std::vector<std::string> entries;
  for (const Entry& entry : entries_of(report, libraries)) {
    entries.push_back(fmt::format("{} {}", entry.name, size_text(entry.bytes)));
  }
  return fmt::format("{} ({})", size_text(report.total_bytes() + libraries),
                     fmt::join(entries, ", "));
}

void require_memory(Backend backend, const MemoryReport& plan, std::string_view what,
                    std::string_view advice) {
  if (backend == Backend::kPlan) return;
  const size_t needed = plan.total_bytes();
  const DeviceMemory device = device_memory(backend);
  if (needed <= device.free) return;
  const std::string owner = backend == Backend::kCpu ? host_memory().limit : "the device";
  fail(ExitCode::kOutOfMemory, "out of memory: {} needs {}, and {} has {} of {} free\n{}{}", what,
       size_text(needed), owner, size_text(device.free), size_text(device.total),
       describe_memory(plan), advice);
}

void require_possible(std::string_view name, DType dtype, std::span<const int64_t> shape) {
  constexpr size_t kLargest = size_t{1} << 44;
  size_t bytes = dtype_size(dtype);
  bool possible = true;
  for (const int64_t dim : shape) {
    possible = possible && !__builtin_mul_overflow(bytes, dim, &bytes) && bytes <= kLargest;
  }
  if (possible) return;
  fail(ExitCode::kOutOfMemory,
       "out of memory: '{}' would be a {} tensor of [{}] elements, more than 16 TiB", name,
       dtype_name(dtype), fmt::join(shape, ", "));
}

}  // namespace sbtrain
