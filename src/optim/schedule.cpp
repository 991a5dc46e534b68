#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "core/number_text.h"

namespace sbtrain {

namespace {

// Falls from 1 at x = 0 to `last` at x = 1 along e^-x, as in the decay phase of
// arXiv 2408.13359.
double exponential_decay(double x, double last) {
  constexpr double e = std::numbers::e;
  return (1.0 - last) * e / (e - 1.0) * std::exp(-x) + (last * e - 1.0) / (e - 1.0);
}

}  // namespace

Schedule::Schedule(const std::vector<ScheduleStage>& stages, double peak_lr,
                   int64_t batch_sequences, int64_t tokens_per_step)
    : peak_lr_(peak_lr), batch_sequences_(batch_sequences), tokens_per_step_(tokens_per_step) {
  require(batch_sequences > 0 && tokens_per_step > 0, "schedule: batch {} and tokens per step {}",
          batch_sequences, tokens_per_step);
  if (stages.empty()) {
    fail(ExitCode::kConfig, "stages is empty: give at least one stage with a length");
  }
  if (!(peak_lr >= 0.0) || !std::isfinite(peak_lr)) {
    fail(ExitCode::kConfig, "train.lr is {}: give a finite learning rate of at least 0", peak_lr);
  }
  for (const ScheduleStage& stage : stages) segments_.push_back(make_segment(stage));
}

Schedule::Segment Schedule::make_segment(const ScheduleStage& stage) const {
  const ScheduleConfig& c = stage.schedule;
  const std::string where = fmt::format("stage '{}'", stage.name);
  Segment s;
  s.config = c;
  s.begin = total_steps();
  s.length = stage.length.steps(tokens_per_step_);
  s.warmup = c.warmup.steps(tokens_per_step_);
  if (s.length <= 0) {
    fail(ExitCode::kConfig, "{}: length is 0; give it in steps or tokens, such as '300 steps'",
         where);
  }
  if (s.warmup < 0 || s.warmup > s.length) {
    fail(ExitCode::kConfig, "{}: schedule.warmup of {} steps does not fit its {} steps", where,
         s.warmup, s.length);
  }
  if (!(c.final_ratio >= 0.0 && c.final_ratio <= 1.0)) {
    fail(ExitCode::kConfig, "{}: schedule.final_ratio is {}, not between 0 and 1", where,
         c.final_ratio);
  }

  if (c.type == ScheduleKind::kPower) {
    if (!(c.power_a > 0.0) || !std::isfinite(c.power_a) || !std::isfinite(c.power_b)) {
      fail(ExitCode::kConfig, "{}: power needs power_a > 0 and a finite power_b, not {} and {}",
           where, c.power_a, c.power_b);
    }
  } else if (c.type == ScheduleKind::kWsd) {
    if (!(c.decay_fraction >= 0.0 && c.decay_fraction <= 1.0)) {
      fail(ExitCode::kConfig, "{}: schedule.decay_fraction is {}, not between 0 and 1", where,
           c.decay_fraction);
    }
    // In binary 0.1 * 30 is slightly above 3, which must not add a fourth step.
    const double decay = c.decay_fraction * static_cast<double>(s.length);
    s.decay_begin = s.length - static_cast<int64_t>(std::ceil(decay * (1.0 - 1e-12)));
    if (s.decay_begin < s.warmup) {
      fail(ExitCode::kConfig,
           "{}: warmup ({} steps) and decay ({} steps) overlap in {} steps; shorten "
           "schedule.warmup or schedule.decay_fraction",
           where, s.warmup, s.length - s.decay_begin, s.length);
    }
  } else if (c.type == ScheduleKind::kExponential) {
    const double before =
        segments_.empty() ? peak_lr_ : segment_lr(segments_.back(), segments_.back().length);
    s.start_lr = c.scale * before;
    if (!(s.start_lr > 0.0) && peak_lr_ > 0.0) {
      fail(ExitCode::kConfig,
           "{}: exponential would start at lr {}, since the stage before ends at {} and scale is "
           "{}; let that stage end above 0",
           where, number_text(s.start_lr), number_text(before), c.scale);
    }
  }
  return s;
}

double Schedule::Segment::progress(int64_t x) const {
  if (length == warmup) return 0.0;  // a stage of only warmup ends at its peak
  return static_cast<double>(x - warmup) / static_cast<double>(length - warmup);
}

double Schedule::power_lr(const Segment& segment, int64_t step) const {
  const double tokens = static_cast<double>(step) * static_cast<double>(tokens_per_step_);
  const ScheduleConfig& c = segment.config;
  // At 0 tokens a negative b gives infinity, which the cap turns into peak.
  return std::min(peak_lr_,
                  c.power_a * static_cast<double>(batch_sequences_) * std::pow(tokens, c.power_b));
}

double Schedule::curve(const Segment& s, int64_t x) const {
  const double ratio = s.config.final_ratio;
  switch (s.config.type) {
    case ScheduleKind::kConstant:
      return peak_lr_;
    case ScheduleKind::kLinear:
      return peak_lr_ * (1.0 - s.progress(x) * (1.0 - ratio));
    case ScheduleKind::kCosine:
      return peak_lr_ *
             (ratio + (1.0 - ratio) * 0.5 * (1.0 + std::cos(std::numbers::pi * s.progress(x))));
    case ScheduleKind::kPower:
      return power_lr(s, s.begin + x);
    case ScheduleKind::kWsd: {
      if (x <= s.decay_begin) return peak_lr_;
      const double p = static_cast<double>(x - s.decay_begin) / (s.length - s.decay_begin);
      return peak_lr_ * (1.0 - p * (1.0 - ratio));
    }
    case ScheduleKind::kExponential:
      return s.start_lr * exponential_decay(s.progress(x), ratio);
  }
  return 0.0;
}

double Schedule::segment_lr(const Segment& s, int64_t x) const {
  if (x >= s.warmup) return curve(s, std::min(x, s.length));
  return curve(s, s.warmup) * static_cast<double>(x + 1) / static_cast<double>(s.warmup);
}

double Schedule::lr(int64_t step) const {
  require(step >= 0, "schedule: step {} is negative", step);
  const Segment& segment = segments_[stage(step)];
  return segment_lr(segment, step - segment.begin);
}

int Schedule::stage(int64_t step) const {
  int index = 0;
  while (index + 1 < stages() && step >= segments_[index + 1].begin) ++index;
  return index;
}

int64_t Schedule::stage_begin(int stage) const {
  require(stage >= 0 && stage <= stages(), "schedule: stage {} of {}", stage, stages());
  return stage == stages() ? total_steps() : segments_[stage].begin;
}

int64_t Schedule::total_steps() const {
  return segments_.empty() ? 0 : segments_.back().begin + segments_.back().length;
}

// The first step, counted from the start of the run, whose power law is below the cap.
int64_t Schedule::cap_release(const Segment& segment) const {
  int64_t low = segment.begin;
  int64_t high = segment.begin + segment.length;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (power_lr(segment, middle) < peak_lr_) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void Schedule::add_stage_points(int stage, std::vector<SchedulePoint>& points) const {
  const Segment& s = segments_[stage];
  const auto first = static_cast<std::ptrdiff_t>(points.size());
  const auto add = [&](int64_t step, const char* what) {
    if (step >= s.begin + s.length) return;
    points.push_back({step, step * tokens_per_step_, lr(step), stage, what});
  };
  add(s.begin, "start");
  if (s.warmup > 0) add(s.begin + s.warmup, "warmup done");
  if (s.config.type == ScheduleKind::kPower && s.config.power_b < 0.0) {
    const int64_t release = cap_release(s);
    if (release > s.begin + s.warmup) add(release, "cap released");
  }
  if (s.config.type == ScheduleKind::kWsd) {
    add(s.begin + s.decay_begin, "decay starts");
  } else if (s.config.type != ScheduleKind::kConstant) {
    add(s.begin + s.warmup + (s.length - s.warmup) / 2, "half");
  }
  add(s.begin + s.length - 1, "last step");
  const auto begin = points.begin() + first;
  std::stable_sort(begin, points.end(),
                   [](const SchedulePoint& a, const SchedulePoint& b) { return a.step < b.step; });
  points.erase(
      std::unique(begin, points.end(),
                  [](const SchedulePoint& a, const SchedulePoint& b) { return a.step == b.step; }),
      points.end());
}

std::vector<SchedulePoint> Schedule::preview() const {
  std::vector<SchedulePoint> points;
  for (int stage = 0; stage < stages(); ++stage) add_stage_points(stage, points);
  return points;
}

}  // namespace sbtrain
