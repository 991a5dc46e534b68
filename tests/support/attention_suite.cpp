// Tests of attention modules, for every combination of their options: all values of their
// enumerations and flags, with the numbers once at their defaults and once at the examples that
// the module's own table gives, and those of modules that can rotate a part of each head once more
// so. No module is named here.
#include "support/attention_suite.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "attention/registry.h"
#include "config/fields.h"
#include "config/schema.h"
#include "config/values.h"
#include "support/attention_module.h"
#include "support/tensors.h"

namespace sbtrain::test {
namespace {

// Sets a module's options to one combination of their values. For each enumeration and flag that
// applies it takes the next choice of `path`, and the first value when the path has ended.
class Chooser : public Fields {
 public:
  using Fields::list;
  using Fields::section;
  struct Choice {
    size_t taken, of;
  };

  Chooser(std::vector<Choice> path, bool examples) : path_(std::move(path)), examples_(examples) {
    conditions_.enter();
  }

  void value(std::string_view key, const Member& member, const Rule& rule,
             std::string_view help) override {
    EXPECT_FALSE(help.empty()) << key;
    if (!conditions_.applies(rule)) return;
    if (const auto* word = std::get_if<EnumMember>(&member)) {
      word->set(rule.choices[choose(rule.choices.size())]);
    } else if (auto* const* flag = std::get_if<bool*>(&member)) {
      **flag = choose(2) == 1;
    } else if (examples_ && rule.example) {
      if (auto* const* number = std::get_if<double*>(&member)) **number = *rule.example;
      if (auto* const* count = std::get_if<int64_t*>(&member)) {
        **count = static_cast<int64_t>(*rule.example);
      }
    }
    conditions_.note(key, schema::to_text(member));
  }
  void section(std::string_view key, const Describe&, std::string_view) override {
    ADD_FAILURE() << key;
  }
  void list(std::string_view key, ListMember&, const Rule&, std::string_view) override {
    ADD_FAILURE() << key;
  }

  // The path of the combination after this one; empty after the last.
  std::vector<Choice> next() const {
    std::vector<Choice> path = path_;
    while (!path.empty() && path.back().taken + 1 == path.back().of) path.pop_back();
    if (!path.empty()) ++path.back().taken;
    return path;
  }

 private:
  size_t choose(size_t of) {
    if (step_ == path_.size()) path_.push_back({0, of});
    return path_[step_++].taken;
  }

  schema::Conditions conditions_;
  std::vector<Choice> path_;
  size_t step_ = 0;
  bool examples_;
};

struct Combination {
  AttentionConfig attention;
  ModelConfig model;
  std::string name() const {
    std::string text = std::to_string(model.heads) + " heads";
    if (model.kv_heads > 0) text += ", " + std::to_string(model.kv_heads) + " of keys";
    if (model.head_dim > 0) text += ", of " + std::to_string(model.head_dim);
    for (const auto& [key, value] : flatten(attention)) text += fmt::format(", {} {}", key, value);
    return text;
  }
};

// Two groups of two heads.
ModelConfig grouped_model() {
  ModelConfig model = small_model(4);
  model.width = 16;
  model.kv_heads = 2;
  return model;
}

// Heads that together are narrower or wider than the model.
ModelConfig headed_model(int64_t head_dim) {
  ModelConfig model = small_model(2);
  model.head_dim = head_dim;
  return model;
}

enum class Numbers : uint8_t { kDefaults, kExamples, kPartRotated };

// 2 of 4 channels of a head, or 6 of 10. False where there is no rotation.
bool rotate_a_part(const AttentionModule& module, Combination& c) {
  RotaryOptions* rotary = module.rotary(c.attention.options);
  if (rotary == nullptr) return false;
  rotary->fraction = 0.6;
  return true;
}

std::vector<Combination> combinations(const std::string& type) {
  const AttentionModule& module = attention_registry().at(type);
  std::vector<ModelConfig> models = {small_model(3)};
  if (!module.whole_heads) models.push_back(small_model(5));
  if (module.grouped_heads) models.push_back(grouped_model());
  if (module.own_head_dim) {
    models.push_back(headed_model(4));
    models.push_back(headed_model(10));
  }
  std::vector<Combination> all;
  for (const ModelConfig& model : models) {
    for (const Numbers numbers : {Numbers::kDefaults, Numbers::kExamples, Numbers::kPartRotated}) {
      const bool examples = numbers != Numbers::kDefaults;
      if ((model.kv_heads > 0 || model.head_dim > 0) && !examples) continue;
      std::vector<Chooser::Choice> path;
      do {
        Combination c{.attention = {.type = type}, .model = model};
        Chooser chooser(path, examples);
        module.describe(chooser, c.attention.options);
        path = chooser.next();
        if (numbers == Numbers::kPartRotated && !rotate_a_part(module, c)) continue;
        const auto same = [&](const Combination& o) {
          return o.attention == c.attention && o.model == c.model;
        };
        if (!module.check(c.attention.options, model).empty()) continue;
        if (std::ranges::none_of(all, same)) all.push_back(std::move(c));
      } while (!path.empty());
    }
  }
  return all;
}

// One forward and backward pass of a module.
struct Pass {
  Pass(const Combination& c, const Pack& pack, const Owned& x)
      : module(make_attention(c.attention, c.model)),
        mix_width(module->mix_width(c.model.width)),
        w(*module, true),
        dw(*module, false),
        dmix(random_normal("dmix", {pack.tokens, mix_width})),
        mix(poisoned({pack.tokens, mix_width})),
        dx(poisoned({pack.tokens, c.model.width})) {
    const auto saved = module->allocate(s.memory, pack.tokens);
    module->forward(s, mix, x, w.weights, *saved, pack.sequences());
    module->backward(s, dx, dw.weights, dmix, mix, x, w.weights, *saved, pack.sequences());
  }
  CpuStream s;
  std::unique_ptr<::sbtrain::Attention> module;
  int64_t mix_width;
  Parameters w, dw;
  Owned dmix, mix, dx;
};

// The module's own formula, document by document.
std::vector<double> reference(const ::sbtrain::Attention& module, const Pack& pack,
                              const std::vector<double>& x, const HostWeights& w) {
  const size_t width = x.size() / static_cast<size_t>(pack.tokens);
  std::vector<double> mix;
  auto from = x.begin();
  for (const int32_t length : pack.lengths) {
    HostMatrix document(length, static_cast<int64_t>(width));
    std::copy_n(from, document.values.size(), document.values.begin());
    from += static_cast<int64_t>(document.values.size());
    const HostMatrix part = module.reference(document, w, pack.sequences().max_seqlen);
    EXPECT_EQ(part.rows, length);
    mix.insert(mix.end(), part.values.begin(), part.values.end());
  }
  return mix;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < b.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}
double norm(const std::vector<double>& a) {
  return distance(a, std::vector<double>(a.size()));
}

class AttentionSuite : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Modules, AttentionSuite, testing::ValuesIn(modules_under_test()),
                         [](const auto& info) { return info.param; });

TEST_P(AttentionSuite, OptionsSurviveBeingWritten) {
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    std::string text;
    for (const auto& [key, value] : flatten(c.attention))
      text += fmt::format("{}: {}\n", key, value);
    EXPECT_EQ(parse_attention(text), c.attention);
  }
}

TEST_P(AttentionSuite, ComputesItsReference) {
  const Pack pack({1, 6, 70, 33, 2});
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    const Owned x = random_normal("x", {pack.tokens, c.model.width});
    const Pass pass(c, pack, x);
    EXPECT_LT(relative_error(pass.mix, reference(*pass.module, pack, to_f64(x), pass.w.on_host())),
              1e-5);
  }
}

// The gradients of sum(mix * dmix), and of the module's auxiliary loss, against central differences
// of the reference.
TEST_P(AttentionSuite, GradientsAreFiniteDifferences) {
  constexpr double kBound = 1e-4;
  const Pack pack({1, 6, 3});
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    const Owned x = random_normal("x", {pack.tokens, c.model.width});
    const Pass pass(c, pack, x);
    const std::vector<double> dmix = to_f64(pass.dmix);
    HostWeights w = pass.w.on_host();
    const auto objective = [&](const std::vector<double>& input) {
      const std::vector<double> mix = reference(*pass.module, pack, input, w);
      double sum = 0;
      for (size_t i = 0; i < mix.size(); ++i) sum += mix[i] * dmix[i];
      HostMatrix x_TD(pack.tokens, c.model.width);
      x_TD.values = input;
      return sum + pass.module->auxiliary_loss(x_TD, w);
    };
    const std::vector<double> tokens = to_f64(x);
    const std::vector<double> dx = numeric_gradient(objective, tokens);
    EXPECT_LT(relative_error(pass.dx, dx), kBound) << "dx";
    for (const TensorSpec& spec : pass.w.specs) {
      std::vector<double>& values = w.at(spec.name).values;
      const std::vector<double> before = values;
      const std::vector<double> expected = numeric_gradient(
          [&](const std::vector<double>& changed) {
            values = changed;
            return objective(tokens);
          },
          before);
      values = before;
      // Some gradients cancel to nothing: a constant that is added to all logits of a softmax.
      const std::vector<double> actual = to_f64(pass.dw.weights.at(spec.name));
      EXPECT_LT(distance(actual, expected), kBound * std::max(norm(expected), 1e-2 * norm(dx)))
          << spec.name;
    }
  }
}

TEST_P(AttentionSuite, WeightGradientsAreAdded) {
  const Pack pack({1, 6, 3});
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    const Owned x = random_normal("x", {pack.tokens, c.model.width});
    Pass pass(c, pack, x);
    const std::vector<float> once = pass.dw.storage;
    const auto saved = pass.module->allocate(pass.s.memory, pack.tokens);
    pass.module->forward(pass.s, pass.mix, x, pass.w.weights, *saved, pack.sequences());
    pass.module->backward(pass.s, pass.dx, pass.dw.weights, pass.dmix, pass.mix, x, pass.w.weights,
                          *saved, pack.sequences());
    for (size_t i = 0; i < once.size(); ++i) {
      ASSERT_NEAR(pass.dw.storage[i], 2 * once[i], 1e-5 * (1 + std::abs(once[i])));
    }
  }
}

// The presence of another document changes no bit of a document's outputs and gradients.
TEST_P(AttentionSuite, DocumentsDoNotLeak) {
  const Pack pack({5, 40, 9});
  constexpr int64_t kBegin = 5, kEnd = 45;
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    const Owned x = random_normal("x", {pack.tokens, c.model.width});
    Owned changed = x;
    for (int64_t i = kBegin * c.model.width; i < kEnd * c.model.width; ++i) changed.f32()[i] += 1;
    const Pass a(c, pack, x);
    const Pass b(c, pack, changed);
    for (const auto& [one, other] : {std::pair{&a.mix, &b.mix}, std::pair{&a.dx, &b.dx}}) {
      const auto rows = [](const Owned* m, int64_t begin, int64_t count) {
        return m->tensor().row_range(begin, count);
      };
      EXPECT_TRUE(bitwise_equal(rows(one, 0, kBegin), rows(other, 0, kBegin)));
      EXPECT_TRUE(bitwise_equal(rows(one, kEnd, 9), rows(other, kEnd, 9)));
      EXPECT_FALSE(bitwise_equal(rows(one, kBegin, 40), rows(other, kBegin, 40)));
    }
  }
}

TEST_P(AttentionSuite, RepeatsGiveTheSameBits) {
  const Pack pack({5, 70, 9});
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    const Owned x = random_normal("x", {pack.tokens, c.model.width});
    const Pass a(c, pack, x);
    const Pass b(c, pack, x);
    EXPECT_TRUE(bitwise_equal(a.mix, b.mix));
    EXPECT_TRUE(bitwise_equal(a.dx, b.dx));
    EXPECT_EQ(a.dw.storage, b.dw.storage);
  }
}

// Two sequences of different lengths, prefilled from forward passes and continued token by token.
TEST_P(AttentionSuite, DecodeContinuesTheForwardPass) {
  const std::vector<int32_t> prompts = {5, 70};
  constexpr int32_t kNew = 4;
  constexpr int64_t kCapacity = 80;
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    CpuStream s;
    const auto module = make_attention(c.attention, c.model);
    const int64_t width = c.model.width;
    const int64_t mix_width = module->mix_width(width);
    const Parameters w(*module, true);
    const auto cache = module->allocate_cache(s.memory, 2, kCapacity);
    std::vector<Owned> inputs, outputs;
    const auto forward = [&](const Owned& mix, const Tensor& x, int32_t length) {
      const Pack pack({length});
      Sequences sequences = pack.sequences();
      sequences.max_seqlen = kCapacity;  // the same bound for both forms
      auto saved = module->allocate(s.memory, length);
      module->forward(s, mix, x, w.weights, *saved, sequences);
      return saved;
    };
    for (int64_t b = 0; b < 2; ++b) {
      const int32_t length = prompts[b] + kNew;
      inputs.push_back(random_normal(b == 0 ? "x0" : "x1", {length, width}));
      outputs.push_back(poisoned({length, mix_width}));
      forward(outputs[b], inputs[b], length);
      const Owned mix = poisoned({prompts[b], mix_width});
      const auto saved = forward(mix, inputs[b].tensor().row_range(0, prompts[b]), prompts[b]);
      module->prefill(s, *cache, b, *saved);
    }
    for (int32_t step = 0; step < kNew; ++step) {
      const Owned x = poisoned({2, width});
      const Owned mix = poisoned({2, mix_width});
      std::vector<double> expected;
      for (int64_t b = 0; b < 2; ++b) {
        const int64_t token = prompts[b] + step;
        std::copy_n(inputs[b].f32() + token * width, width, x.f32() + b * width);
        const auto row = to_f64(outputs[b].tensor().row_range(token, 1));
        expected.insert(expected.end(), row.begin(), row.end());
      }
      const Owned positions = integers({prompts[0] + step, prompts[1] + step});
      const Owned lengths = integers({prompts[0] + step + 1, prompts[1] + step + 1});
      module->decode(s, mix, x, w.weights, *cache,
                     {.positions_B = positions, .lengths_B = lengths, .norm = {}});
      EXPECT_LT(relative_error(mix, expected), 1e-5) << "step " << step;
    }
  }
}

// Decodes without a prompt, from an empty cache.
TEST_P(AttentionSuite, DecodesFromTheFirstToken) {
  constexpr int32_t kTokens = 30;
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    CpuStream s;
    const auto module = make_attention(c.attention, c.model);
    const int64_t mix_width = module->mix_width(c.model.width);
    const Parameters w(*module, true);
    const Owned x = random_normal("x", {kTokens, c.model.width});
    const Owned expected = poisoned({kTokens, mix_width});
    const Pack pack({kTokens});
    const auto saved = module->allocate(s.memory, kTokens);
    module->forward(s, expected, x, w.weights, *saved, pack.sequences());
    const auto cache = module->allocate_cache(s.memory, 1, kTokens);
    const Owned mix = poisoned({kTokens, mix_width});
    for (int32_t t = 0; t < kTokens; ++t) {
      const Owned position = integers({t});
      const Owned length = integers({t + 1});
      module->decode(s, mix.tensor().row_range(t, 1), x.tensor().row_range(t, 1), w.weights, *cache,
                     {.positions_B = position, .lengths_B = length, .norm = {}});
    }
    EXPECT_LT(relative_error(mix, to_f64(expected)), 1e-4);
  }
}

// A step that is planned and then run in the planned memory gives the same bits as one without a
// plan. Memory that a step takes beyond its plan, or in another order, makes it throw.
TEST_P(AttentionSuite, RunsInThePlannedMemory) {
  const Pack pack({5, 70, 9});
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    const Owned x = random_normal("x", {pack.tokens, c.model.width});
    const Pass free(c, pack, x);
    const Parameters dw(*free.module, false);
    const Owned mix = poisoned({pack.tokens, free.mix_width});
    const Owned dx = poisoned({pack.tokens, c.model.width});
    const auto step = [&](Memory& memory) {
      Stream s(memory);
      const ProgramScope scope(memory, "step");
      const auto saved = free.module->allocate(memory, pack.tokens);
      free.module->forward(s, mix, x, free.w.weights, *saved, pack.sequences());
      free.module->backward(s, dx, dw.weights, free.dmix, mix, x, free.w.weights, *saved,
                            pack.sequences());
    };
    Memory plan = Memory::planning(Backend::kCpu);
    step(plan);
    Memory memory(Backend::kCpu);
    memory.adopt_plan(plan);
    step(memory);
    EXPECT_TRUE(bitwise_equal(mix, free.mix));
    EXPECT_TRUE(bitwise_equal(dx, free.dx));
    EXPECT_EQ(dw.storage, free.dw.storage);
  }
}

// A document of twice the length takes at most twice the memory, forward and backward.
TEST_P(AttentionSuite, MemoryIsLinearInTheLength) {
  for (const Combination& c : combinations(GetParam())) {
    SCOPED_TRACE(c.name());
    const auto module = make_attention(c.attention, c.model);
    const auto pool = [&](int64_t tokens) {
      Memory plan = Memory::planning(Backend::kCpu);
      Stream s(plan);
      Weights w;
      for (const auto& specs : {module->parameters(), module->shared_parameters()}) {
        for (const TensorSpec& spec : specs) {
          w.add(spec.name, Tensor(nullptr, DType::kF32, spec.shape));
        }
      }
      const Sequences sequences = {.cu_seqlens = Tensor(nullptr, DType::kI32, {2}),
                                   .positions_T = Tensor(nullptr, DType::kI32, {tokens}),
                                   .count = 1,
                                   .max_seqlen = tokens};
      const Tensor x(nullptr, DType::kF32, {tokens, c.model.width});
      const Tensor mix(nullptr, DType::kF32, {tokens, module->mix_width(c.model.width)});
      {
        const ProgramScope scope(plan, "step");
        const auto saved = module->allocate(plan, tokens);
        module->forward(s, mix, x, w, *saved, sequences);
        module->backward(s, x, w, mix, mix, x, w, *saved, sequences);
      }
      return plan.report().pool_bytes;
    };
    EXPECT_LE(pool(1 << 16), 2 * pool(1 << 15));
  }
}

}  // namespace
}  // namespace sbtrain::test
