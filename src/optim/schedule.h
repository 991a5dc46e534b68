// The learning rate of every optimizer step, over all stages of a run.
//
// A run is one or more stages, one after the other. Each has a length, which is rounded up to
// whole steps, and a schedule; with x = step - first step of the stage, w = warmup, N = length
// and p = (x - w) / (N - w), the progress after the warmup:
//
//   constant     peak
//   linear       peak (1 - p (1 - r))                        r = final_ratio
//   cosine       peak (r + (1 - r) (1 + cos(pi p)) / 2)
//   wsd          peak, then linear to r peak over the last ceil(decay_fraction N) steps
//   power        min(peak, a B n^b)                          arXiv 2408.13359, eq. 3
//   exponential  f e [(1 - d) e/(e - 1) exp(-p) + (d e - 1)/(e - 1)]
//
// peak is train.lr, n = step * tokens_per_step are the tokens seen in the whole run, B is the
// batch in sequences. In `exponential`, e outside the bracket is the lr at which the previous
// stage ended (peak in a first stage), f = scale and d = final_ratio: it ends at f d times that lr.
// During the warmup lr rises linearly, (x + 1) / w of the value at x = w, so that no step is
// spent at 0 and step w - 1 reaches that value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/duration.h"
#include "core/enum_names.h"

namespace sbtrain {

enum class ScheduleKind : uint8_t { kConstant, kLinear, kCosine, kPower, kWsd, kExponential };
template <>
inline constexpr auto kNames<ScheduleKind> =
    enum_names<ScheduleKind>({{ScheduleKind::kConstant, "constant"},
                              {ScheduleKind::kLinear, "linear"},
                              {ScheduleKind::kCosine, "cosine"},
                              {ScheduleKind::kPower, "power"},
                              {ScheduleKind::kWsd, "wsd"},
                              {ScheduleKind::kExponential, "exponential"}});

struct ScheduleConfig {
  ScheduleKind type = ScheduleKind::kCosine;
  Duration warmup{};  // linear, from 0, at the start of the segment
  double final_ratio =
      0.0;  // lr at the end over peak lr (linear, cosine, wsd), delta (exponential)
  double decay_fraction = 0.1;  // wsd: part of the segment that decays
  double power_a = 4.0;         // power: lr = min(train.lr, a B n^b)
  double power_b = -0.51;
  double scale = 1.0;  // exponential: f of f * lr(start)
  bool operator==(const ScheduleConfig&) const = default;
};

// One segment of the schedule.
struct ScheduleStage {
  std::string name = "train";
  Duration length{};
  ScheduleConfig schedule{};
  bool operator==(const ScheduleStage&) const = default;
};

// One line of the schedule preview.
struct SchedulePoint {
  int64_t step = 0;
  int64_t tokens = 0;  // seen before this step
  double lr = 0.0;
  int stage = 0;
  std::string what;  // "start", "warmup done", "decay starts", "cap released", "half", "last step"
  bool operator==(const SchedulePoint&) const = default;
};

// A pure function of the step, so that resuming needs only the step count.
class Schedule {
 public:
  // Throws ExitCode::kConfig, naming the stage and the key, when a stage cannot be scheduled.
  Schedule(const std::vector<ScheduleStage>& stages, double peak_lr, int64_t batch_sequences,
           int64_t tokens_per_step);

  // The learning rate of the step that follows `step` finished ones, step >= 0. From the end of the
  // run on, it is the value at which the last stage ends.
  double lr(int64_t step) const;

  // The stage that `step` belongs to; after the end of the run, the last one.
  int stage(int64_t step) const;
  int stages() const { return static_cast<int>(segments_.size()); }
  int64_t stage_begin(int stage) const;  // its first step; stage == stages(): total_steps()

  int64_t total_steps() const;
  int64_t total_tokens() const { return total_steps() * tokens_per_step_; }
  int64_t tokens_per_step() const { return tokens_per_step_; }

  // The points of every stage where the curve changes, ordered by step.
  std::vector<SchedulePoint> preview() const;

 private:
  struct Segment {
    ScheduleConfig config;
    int64_t begin = 0;
    int64_t length = 0;
    int64_t warmup = 0;
    int64_t decay_begin = 0;  // wsd: steps into the stage
    double start_lr = 0.0;    // exponential: f * lr at the end of the previous stage

    double progress(int64_t x) const;
  };

  Segment make_segment(const ScheduleStage& stage) const;
  double segment_lr(const Segment& segment, int64_t x) const;  // x in [0, length]
  double curve(const Segment& segment, int64_t x) const;       // without the warmup
  double power_lr(const Segment& segment, int64_t step) const;
  int64_t cap_release(const Segment& segment) const;
  void add_stage_points(int stage, std::vector<SchedulePoint>& points) const;

  double peak_lr_;
  int64_t batch_sequences_;
  int64_t tokens_per_step_;
  std::vector<Segment> segments_;
};

}  // namespace sbtrain
