// Optimizers: what an update keeps of each parameter, and how it changes the weights.
//
// An optimizer is one file: its options with their help and rules, its class, and a function
// register_<file> that adds it to the registry under the name that `train.optimizer` uses. It says
// which state it keeps for which parameter; memory, sharding, checkpoints, resharding, the plan of
// a run and the reference of keys follow from that.
//
// A rank owns a flat range of each unit, and an update sees it in one of two ways:
//   flat    a range of elements, whose update needs nothing but these elements: update()
//   matrix  the update needs the whole matrix, of which ranks hold parts. Three calls: direct()
//           makes of a part's gradient and state what is to travel, transform() sees the whole
//           matrix on the rank that owns it, and apply() gets the part of the result back. Who owns
//           a matrix and how it travels is the business of parallel/matrix_update.h.
// Every call is work of the stream, and reads from `stats` (ops::StepStat) on the device whether
// the step is applied: where kApply is 0, weights and state keep their bits.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fields.h"
#include "core/module_options.h"
#include "core/stream.h"
#include "core/weights.h"
#include "ops/optimizer.h"

namespace sbtrain {

// What a run says of its optimizer.
struct OptimizerConfig {
  std::string type = "adamw";  // the optimizer's name
  ModuleOptions options{};     // its own
  bool operator==(const OptimizerConfig&) const = default;
};

// What all updates of a step have in common.
struct UpdateInputs {
  Tensor stats;            // f64 [ops::kStepStats]
  float lr = 0;            // of this step
  float weight_decay = 0;  // of the elements with decay
};

// A range of n elements of a rank's shard that keep the same state.
struct FlatView {
  Tensor weights;                       // f32 [n]
  Tensor compute{};                     // [n], the copy to be renewed; undefined: there is none
  Tensor gradient;                      // f32 [n], of the sum of the losses: see kGradScale
  std::vector<Tensor> states{};         // f32 [n], in the order of Optimizer::states()
  std::vector<ops::DecayRange> decays;  // the elements with weight decay
  float lr_factor = 1;                  // TensorSpec::lr_factor, see by_rate()
};

// A part of a matrix, with room for what travels to the matrix's owner and back.
struct MatrixView : FlatView {
  const TensorSpec* spec = nullptr;  // of the matrix
  // [n] in the compute type: what direct() writes, and what apply() reads after the transformation.
  // In direct() it may be undefined, where another replica sends the same.
  Tensor travels{};
};

// Calls update(inputs, views) for all views of each factor in turn, with the learning rate that
// they have: an optimizer sees views of one rate.
template <class View, class Update>
void by_rate(const UpdateInputs& in, std::vector<View> views, const Update& update) {
  for (auto begin = views.begin(); begin != views.end();) {
    const float factor = begin->lr_factor;
    const auto end = std::stable_partition(
        begin, views.end(), [&](const View& view) { return view.lr_factor == factor; });
    UpdateInputs inputs = in;
    inputs.lr *= factor;
    update(inputs, std::span<const View>(begin, end));
    begin = end;
  }
}

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // The state that it keeps for a parameter: names of tensors of the parameter's shape, f32, which
  // begin as zeros. With the parameter's name they are what a checkpoint calls them:
  // "adam_m/model.norm.weight". Parameters with the same names are updated together.
  virtual std::vector<std::string> states(const TensorSpec& spec) const = 0;

  // Whether the update needs the parameter as a matrix.
  virtual bool takes_matrix(const TensorSpec& /*spec*/) const { return false; }
  // Floating-point operations of transform(), by which owners share the work.
  virtual double transform_flops(const TensorSpec& /*spec*/) const { return 0; }

  // Decay factors of exponential means whose bias the step corrects (kBias1, kBias2).
  struct Means {
    double first = 0, second = 0;
  };
  virtual Means means() const { return {}; }

  virtual void update(Stream& s, const UpdateInputs& in, std::span<const FlatView> views) const = 0;

  virtual void direct(Stream& s, const UpdateInputs& in, std::span<const MatrixView> parts) const;
  // Replaces x [rows, cols], as stored and in the compute type, which may hold anything where the
  // step is not applied.
  virtual void transform(Stream& s, const TensorSpec& spec, Tensor x_NK) const;
  virtual void apply(Stream& s, const UpdateInputs& in, std::span<const MatrixView> parts) const;
};

struct OptimizerType {
  std::string name;  // the value of train.optimizer
  std::function<void(Fields&, ModuleOptions&)> describe;
  std::function<std::shared_ptr<const Optimizer>(const ModuleOptions&)> make;
};

class OptimizerRegistry {
 public:
  // Adds an optimizer whose constructor takes its options: a struct with defaults, ==, and beside
  // it a function describe(Fields&, Options&).
  template <class Optimizer, class Options>
  void add(std::string name) {
    add({.name = std::move(name),
         .describe = [](Fields& f, ModuleOptions& o) { describe(f, o.as<Options>()); },
         .make =
             [](const ModuleOptions& o) {
               return std::make_shared<const Optimizer>(o.as<Options>());
             }});
  }
  // Throws ExitCode::kInternal when the name is taken.
  void add(OptimizerType type);

  // In the order of registration. A deque, so that its elements stay where they are.
  const std::deque<OptimizerType>& types() const { return types_; }
  std::vector<std::string_view> names() const;
  // Throws ExitCode::kConfig for an unknown name, listing the known ones.
  const OptimizerType& at(std::string_view name) const;

 private:
  std::deque<OptimizerType> types_;
};

// Every optimizer of the program.
const OptimizerRegistry& optimizer_registry();

// Adds optimizers from outside this library. To be called before any configuration is read.
void register_optimizer(void (*registrar)(OptimizerRegistry&));

std::shared_ptr<const Optimizer> make_optimizer(const OptimizerConfig& config = {});

}  // namespace sbtrain
