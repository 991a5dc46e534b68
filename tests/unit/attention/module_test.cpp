// Properties of single attention modules; support/attention_suite.cpp tests those that all modules
// share.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/registry.h"
#include "config/schema.h"
#include "core/error.h"
#include "ops/linear.h"
#include "support/attention_module.h"
#include "support/attention_suite.h"
#include "support/tensors.h"

namespace sbtrain::test {

std::vector<std::string> modules_under_test() {
  std::vector<std::string> names;
  for (const AttentionModule& module : attention_registry().modules()) names.push_back(module.name);
  return names;
}

namespace {

// Every module and option.
std::vector<AttentionConfig> configurations() {
  std::vector<AttentionConfig> all;
  const auto add = [&](const std::string& text) {
    all.push_back(parse_attention("{type: " + text + "}"));
  };
  for (const std::string remainder : {"none", "value", "bias"}) {
    for (const std::string head_norm : {"false", "true"}) {
      for (const std::string attend_current : {"false", "true"}) {
        for (const std::string forget_gate : {"false", "true"}) {
          add(fmt::format(
              "stickbreaking, remainder: {}, head_norm: {}, attend_current: {}, forget_gate: {}",
              remainder, head_norm, attend_current, forget_gate));
        }
      }
    }
  }
  for (const std::string position : {"rope", "alibi", "fire", "none"}) {
    add("softmax, logit_scale: 0.7, position: " + position);
    add("softmax, logit_scale: 0.7, window: 3, position: " + position);
  }
  for (const std::string variant : {"official", "strict"}) {
    add("coca, variant: " + variant);
    add("coca, window: 3, rope_scaling: linear, rope_factor: 1.5, variant: " + variant);
  }
  for (const std::string type : {"based", "rebased"}) {
    for (const std::string form : {"chunked", "quadratic"}) {
      add(fmt::format("{}, feature_dim: 4, form: {}", type, form));
    }
  }
  add("softmax, position: fire, fire_length: 5");
  for (const std::string norm : {"true", "false"}) {
    for (const std::string gamma : {"true", "false"}) {
      for (const std::string beta : {"true", "false"}) {
        add(fmt::format(
            "rebased, feature_dim: 4, feature_norm: {}, feature_gamma: {}, feature_beta: {}", norm,
            gamma, beta));
      }
    }
  }
  add("short_conv");
  add("softmax, rope_scaling: linear, rope_factor: 2.5");
  add("softmax, rope_scaling: ntk, rope_factor: 2.5");
  add("softmax, rope_scaling: dynamic_ntk, rope_factor: 2.5, rope_train_length: 1000");
  add("softmax, rope_scaling: yarn, rope_factor: 4, rope_train_length: 40");
  add("coca, rope_scaling: yarn, rope_factor: 4, rope_train_length: 40");
  add("softmax, rope_scaling: llama3, rope_factor: 8, rope_train_length: 60");
  return all;
}

std::string describe(const AttentionConfig& c) {
  std::string text;
  for (const auto& [key, value] : flatten(c)) text += fmt::format("{} {}  ", key, value);
  return text;
}

std::string option(const AttentionConfig& c, const std::string& key) {
  const auto options = flatten(c);
  const auto found = options.find(key);
  return found == options.end() ? "" : found->second;
}

// The output of the last token of a document.
std::vector<double> last_output(const ::sbtrain::Attention& module, Stream& s, const Weights& w,
                                const Owned& x, int64_t max_seqlen) {
  const int64_t tokens = x.tensor().rows();
  const Pack pack({static_cast<int32_t>(tokens)});
  Sequences sequences = pack.sequences();
  sequences.max_seqlen = max_seqlen;
  const Owned mix = poisoned({tokens, x.tensor().cols()});
  const auto saved = module.allocate(s.memory(), tokens);
  module.forward(s, mix, x, w, *saved, sequences);
  return to_f64(mix.tensor().row_range(tokens - 1, 1));
}

// base (f L / L_train - (f - 1))^(d / (d - 2)) where L > L_train, with d = 4; f = 1 is L / L_train.
TEST(AttentionModule, DynamicNtkScalesTheBaseWithTheLength) {
  const Owned x = random_normal("x", {12, 12});
  const auto output = [&](const std::string& options, int64_t length) {
    CpuStream s;
    const auto module =
        make_attention(parse_attention("{type: softmax, " + options + "}"), small_model(3));
    return last_output(*module, s, Parameters(*module, true).weights, x, length);
  };
  const auto with_base = [&](double base) {
    return output("rope_base: " + std::to_string(base), 12);
  };
  const auto with_factor = [](const std::string& factor) {
    return "rope_scaling: dynamic_ntk, rope_train_length: 16, rope_factor: " + factor;
  };
  EXPECT_EQ(output(with_factor("1"), 16), with_base(10000));
  EXPECT_LT(relative_error(output(with_factor("1"), 48), with_base(10000.0 * 9)), 1e-6);
  EXPECT_LT(relative_error(output(with_factor("2"), 48), with_base(10000.0 * 25)), 1e-6);
  EXPECT_GT(relative_error(with_base(10000), with_base(10000.0 * 25)), 1e-4);
  const std::string ntk = "rope_scaling: ntk, rope_factor: 3";
  EXPECT_LT(relative_error(output(ntk, 12), with_base(10000.0 * 9)), 1e-6);
}

// Documents of 37 and 300 tokens: with skip_epsilon 0 every visible key is read; with a large one
// all keys of the first document, which is one tile, and fewer of the second.
TEST(AttentionModule, StickBreakingCountsTheKeysThatItReads) {
  const ModelConfig model = small_model(3);
  const Pack pack({37, 300});
  const Owned x = random_normal("x", {pack.tokens, model.width});
  const Owned mix = poisoned({pack.tokens, model.width});
  const auto count = [&](const std::string& options) {
    CpuStream s;
    const auto module = make_attention(parse_attention("{type: " + options + "}"), model);
    const Parameters w(*module, true);
    const auto saved = module->allocate(s.memory, pack.tokens);
    module->forward(s, mix, x, w.weights, *saved, pack.sequences());
    return module->keys_read(s, *saved, pack.sequences());
  };
  const int64_t visible = model.heads * (37 * 36 / 2 + 300 * 299 / 2);
  const KeysRead all = count("stickbreaking, skip_epsilon: 0");
  EXPECT_EQ(all.visible, visible);
  EXPECT_EQ(all.read, visible);
  const KeysRead with_current = count("stickbreaking, skip_epsilon: 0, attend_current: true");
  EXPECT_EQ(with_current.visible, visible + model.heads * pack.tokens);
  EXPECT_EQ(with_current.read, with_current.visible);
  const KeysRead some = count("stickbreaking, skip_epsilon: 0.99");
  EXPECT_EQ(some.visible, visible);
  EXPECT_LT(some.read, visible);
  EXPECT_GT(some.read, model.heads * 37 * 36 / 2);
  EXPECT_EQ(count("softmax").visible, 0);
}

// gate_penalty adds the gradient of its loss, gate_penalty / H times the sum of all gates, to that
// of the output, and changes nothing else: not the output, nor the gradients of other weights.
TEST(AttentionModule, GatePenaltyAddsTheGradientOfTheMeanGate) {
  constexpr double kPenalty = 0.3;
  const ModelConfig model = small_model(3);
  const Pack pack({7, 20});
  const Owned x = random_normal("x", {pack.tokens, model.width});
  const Owned dmix = random_normal("dmix", {pack.tokens, model.width});
  struct Pass {
    Pass(const std::string& more, const ModelConfig& model, const Pack& pack, const Owned& x,
         const Owned& dmix)
        : mix(poisoned({pack.tokens, model.width})), dx(poisoned({pack.tokens, model.width})) {
      CpuStream s;
      const auto module = make_attention(
          parse_attention("{type: stickbreaking, forget_gate: true" + more + "}"), model);
      const Parameters w(*module, true);
      Parameters dw(*module, false);
      const auto saved = module->allocate(s.memory, pack.tokens);
      module->forward(s, mix, x, w.weights, *saved, pack.sequences());
      module->backward(s, dx, dw.weights, dmix, mix, x, w.weights, *saved, pack.sequences());
      weights = w.on_host();
      gradients = dw.on_host();
    }
    Owned mix, dx;
    HostWeights weights, gradients;
  };
  const Pass without("", model, pack, x, dmix);
  const Pass with(fmt::format(", gate_penalty: {}", kPenalty), model, pack, x, dmix);
  EXPECT_EQ(to_f64(with.mix), to_f64(without.mix));

  // By the formula, in double precision.
  const HostMatrix& w_HD = at(without.weights, "self_attn.forget_gate.weight");
  const HostMatrix& b_H = at(without.weights, "self_attn.forget_gate.bias");
  const std::vector<double> x_TD = to_f64(x);
  std::vector<double> dx = to_f64(without.dx);
  HostWeights expected = without.gradients;
  for (int64_t t = 0; t < pack.tokens; ++t) {
    for (int64_t h = 0; h < model.heads; ++h) {
      double z = b_H.values[static_cast<size_t>(h)];
      for (int64_t i = 0; i < model.width; ++i) z += w_HD.row(h)[i] * x_TD[t * model.width + i];
      const double f = 1 / (1 + std::exp(-z));
      const double dz = kPenalty / static_cast<double>(model.heads) * f * (1 - f);
      expected.at("self_attn.forget_gate.bias").values[static_cast<size_t>(h)] += dz;
      for (int64_t i = 0; i < model.width; ++i) {
        expected.at("self_attn.forget_gate.weight").row(h)[i] += dz * x_TD[t * model.width + i];
        dx[t * model.width + i] += dz * w_HD.row(h)[i];
      }
    }
  }
  EXPECT_LT(relative_error(with.dx, dx), 1e-6);
  for (const auto& [name, gradient] : expected) {
    SCOPED_TRACE(name);
    EXPECT_LT(relative_error(at(with.gradients, name).values, gradient.values), 1e-6);
    const bool gate = name.starts_with("self_attn.forget_gate");
    EXPECT_EQ(at(with.gradients, name).values == at(without.gradients, name).values, !gate);
  }
}

// A module's output is its map times its values, so the map shows the queries and keys that the
// module really uses. Rows of softmax and kernels sum to 1, those of
// stick-breaking to 1 - remainder.
TEST(AttentionModule, MapsGiveTheOutput) {
  const ModelConfig model = small_model(3);
  const int64_t d = model.head_width();
  for (const AttentionConfig& config : configurations()) {
    if (option(config, "head_norm") == "true") continue;  // maps leave it out
    const std::string remainder_to = option(config, "remainder");
    const std::string window_option = option(config, "window");
    const int64_t window = window_option.empty() ? 0 : std::stoll(window_option);
    SCOPED_TRACE(describe(config));
    CpuStream s;
    const auto module = make_attention(config, model);
    const Parameters w(*module, true);
    const Pack pack({37});
    const Owned x = random_normal("x", {pack.tokens, model.width});
    const Owned mix = poisoned({pack.tokens, model.width});
    const auto saved = module->allocate(s.memory, pack.tokens);
    module->forward(s, mix, x, w.weights, *saved, pack.sequences());
    if (config.type == "short_conv") {
      EXPECT_EQ(module->map(s, w.weights, *saved, pack.sequences(), 0).tokens, 0);
      continue;
    }
    const Owned values = poisoned({pack.tokens, model.width});
    ops::run(
        s, ops::Linear{.y_TN = values, .x_TK = x, .w_NK = w.weights.at("self_attn.v_proj.weight")});
    const std::vector<double> v = to_f64(values);
    std::vector<double> output(v.size());
    for (int64_t h = 0; h < model.heads; ++h) {
      const AttentionMap map = module->map(s, w.weights, *saved, pack.sequences(), h);
      ASSERT_EQ(map.tokens, pack.tokens);
      ASSERT_EQ(map.weights_TT.size(), static_cast<size_t>(pack.tokens * pack.tokens));
      ASSERT_EQ(map.remainder_T.empty(), config.type != "stickbreaking");
      for (int64_t j = 0; j < pack.tokens; ++j) {
        const double remainder = map.remainder_T.empty() ? 0.0 : map.remainder_T[j];
        double sum = 0;
        for (int64_t i = 0; i < pack.tokens; ++i) {
          const double weight = map.weights_TT[j * pack.tokens + i];
          const bool seen = i <= j && (window == 0 || i > j - window);
          ASSERT_TRUE(seen || weight == 0) << j << " " << i;
          sum += weight;
          for (int64_t c = 0; c < d; ++c) {
            output[j * model.width + h * d + c] += weight * v[i * model.width + h * d + c];
          }
        }
        EXPECT_NEAR(sum, 1 - remainder, 1e-5);
        for (int64_t c = 0; c < d; ++c) {
          double& out = output[j * model.width + h * d + c];
          if (remainder_to == "value") out += remainder * v[j * model.width + h * d + c];
          if (remainder_to == "bias") {
            out += remainder * w.weights.at("self_attn.remainder_bias").f32()[h * d + c];
          }
        }
      }
    }
    EXPECT_LT(relative_error(mix, output), 2e-5);
  }
}

// A module with groups is the one without whose heads of keys and values are equal in each group;
// the gradients of its weights are the sums of theirs over the group.
TEST(AttentionModule, GroupsShareKeysAndValues) {
  constexpr int64_t kHeads = 8;
  constexpr int64_t kHeadDim = 4;
  ModelConfig whole;
  whole.width = kHeads * kHeadDim;
  whole.heads = kHeads;
  whole.init_std = 0.4;
  const Pack pack({5, 70, 9});
  // Multiples of 1/64, so that the sums of the projections are exact: OpenBLAS may add the channels
  // of a narrower product in another order.
  const auto make_exact = [](const Tensor& values) {
    for (int64_t i = 0; i < values.numel(); ++i) {
      values.f32()[i] = std::round(values.f32()[i] * 64.0f) / 64.0f;
    }
  };
  const Owned x = random_normal("x", {pack.tokens, whole.width});
  make_exact(x.tensor());
  const Owned dmix = random_normal("dmix", {pack.tokens, whole.width});
  struct Pass {
    Pass(const ::sbtrain::Attention& module, const Parameters& w, Parameters& dw, const Pack& pack,
         const Owned& x, const Owned& dmix)
        : mix(poisoned(shape(x))), dx(poisoned(shape(x))) {
      CpuStream s;
      const auto saved = module.allocate(s.memory, pack.tokens);
      module.forward(s, mix, x, w.weights, *saved, pack.sequences());
      module.backward(s, dx, dw.weights, dmix, mix, x, w.weights, *saved, pack.sequences());
    }
    static std::vector<int64_t> shape(const Owned& x) {
      return {x.tensor().rows(), x.tensor().cols()};
    }
    Owned mix, dx;
  };
  for (const std::string type : {"stickbreaking, forget_gate: true, remainder: value", "softmax",
                                 "softmax, position: alibi", "coca"}) {
    for (const int64_t groups : {1, 2, 4, 8}) {
      SCOPED_TRACE(type + ", " + std::to_string(groups));
      const auto config = parse_attention("{qk_norm: true, qkv_bias: true, type: " + type + "}");
      ModelConfig grouped = whole;
      grouped.kv_heads = groups;
      const auto module = make_attention(config, grouped);
      const auto plain = make_attention(config, whole);
      const Parameters w(*module, true);
      for (const TensorSpec& spec : w.specs) make_exact(w.weights.at(spec.name));
      const Parameters expanded(*plain, false);
      // Calls visit(element of the plain module's tensor, element of the other one's).
      const auto for_each_shared = [&](const TensorSpec& spec, const Parameters& few, auto visit) {
        const Tensor& from = few.weights.at(spec.name);
        const int64_t numel = Tensor(nullptr, DType::kF32, spec.shape).numel();
        const int64_t head = kHeadDim * (spec.shape.size() > 1 ? whole.width : 1);
        for (int64_t i = 0; i < numel; ++i) {
          const bool as_it_is = from.numel() == numel;
          visit(i, as_it_is ? i : i / head / (kHeads / groups) * head + i % head);
        }
      };
      for (const TensorSpec& spec : expanded.specs) {
        for_each_shared(spec, w, [&](int64_t to, int64_t from) {
          expanded.weights.at(spec.name).f32()[to] = w.weights.at(spec.name).f32()[from];
        });
      }
      Parameters dw(*module, false);
      Parameters dexpanded(*plain, false);
      const Pass a(*module, w, dw, pack, x, dmix);
      const Pass b(*plain, expanded, dexpanded, pack, x, dmix);
      EXPECT_TRUE(bitwise_equal(a.mix, b.mix));
      EXPECT_LT(relative_error(a.dx, to_f64(b.dx)), 1e-5);
      for (const TensorSpec& spec : expanded.specs) {
        const Tensor& actual = dw.weights.at(spec.name);
        std::vector<double> sums(static_cast<size_t>(actual.numel()));
        for_each_shared(spec, dw, [&](int64_t from, int64_t to) {
          sums[static_cast<size_t>(to)] += dexpanded.weights.at(spec.name).f32()[from];
        });
        EXPECT_LT(relative_error(actual, sums), 1e-5) << spec.name;
      }
    }
  }
}

TEST(AttentionModule, CachesHoldOnlyTheHeadsOfKeys) {
  ModelConfig model = small_model(3);
  model.kv_heads = 1;
  for (const std::string type : {"stickbreaking", "softmax", "coca"}) {
    const auto bytes = [&](const ModelConfig& m) {
      Memory plan = Memory::planning(Backend::kCpu);
      {
        const ProgramScope scope(plan, "decode");
        const auto cache = make_attention({.type = type}, m)->allocate_cache(plan, 2, 1600);
      }
      return plan.report().pool_bytes;
    };
    EXPECT_EQ(bytes(small_model(3)), 3 * bytes(model)) << type;
  }
}

TEST(AttentionModule, DeclaresItsParameters) {
  auto config = parse_attention("{remainder: bias, head_norm: true, forget_gate: true}");
  std::map<std::string, TensorSpec> specs;
  for (const TensorSpec& spec : make_attention(config, small_model(3))->parameters()) {
    specs[spec.name] = spec;
  }
  ASSERT_EQ(specs.size(), 8u);
  EXPECT_FALSE(specs["self_attn.q_proj.weight"].fused);
  EXPECT_TRUE(specs["self_attn.k_proj.weight"].fused);
  EXPECT_TRUE(specs["self_attn.v_proj.weight"].fused);
  EXPECT_TRUE(specs["self_attn.v_proj.weight"].decay);
  EXPECT_EQ(specs["self_attn.remainder_bias"].shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(specs["self_attn.forget_gate.weight"].shape, (std::vector<int64_t>{3, 12}));
  EXPECT_TRUE(specs["self_attn.forget_gate.weight"].decay);
  for (const char* name : {"self_attn.remainder_bias", "self_attn.forget_gate.bias",
                           "self_attn.head_norm.weight", "self_attn.head_norm.bias"}) {
    EXPECT_FALSE(specs[name].decay) << name;
  }
  config = parse_attention("{type: coca, qk_norm: true, qkv_bias: true}");
  ModelConfig grouped = small_model(3);
  grouped.kv_heads = 1;
  specs.clear();
  for (const TensorSpec& spec : make_attention(config, grouped)->parameters()) {
    specs[spec.name] = spec;
  }
  ASSERT_EQ(specs.size(), 8u);
  EXPECT_EQ(specs["self_attn.q_proj.weight"].shape, (std::vector<int64_t>{12, 12}));
  EXPECT_EQ(specs["self_attn.t_proj.weight"].shape, (std::vector<int64_t>{4, 12}));
  EXPECT_EQ(specs["self_attn.v_proj.weight"].shape, (std::vector<int64_t>{4, 12}));
  EXPECT_EQ(specs["self_attn.q_proj.bias"].shape, std::vector<int64_t>{12});
  EXPECT_EQ(specs["self_attn.t_proj.bias"].shape, std::vector<int64_t>{4});
  EXPECT_TRUE(specs["self_attn.v_proj.bias"].fused);
  EXPECT_FALSE(specs["self_attn.v_proj.bias"].decay);
  EXPECT_EQ(specs["self_attn.q_norm.weight"].shape, std::vector<int64_t>{4});
  EXPECT_EQ(specs["self_attn.t_norm.weight"].shape, std::vector<int64_t>{4});
  EXPECT_FALSE(specs["self_attn.t_norm.weight"].decay);
  config = AttentionConfig{};
  EXPECT_EQ(make_attention(config, small_model(3))->parameters().size(), 3u);
  EXPECT_EQ(make_attention(config, small_model(3))->flops_per_token(10), 4.0 * 12 * 10);
}

std::string error_of(const AttentionConfig& config, const ModelConfig& model) {
  try {
    make_attention(config, model);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    return error.what();
  }
  return "no error";
}

TEST(AttentionRegistry, SaysWhatIsWrong) {
  EXPECT_EQ(error_of({.type = "stick"}, small_model(3)),
            "model.attention.type: there is no attention 'stick'; known are stickbreaking, "
            "softmax, coca, based, rebased, short_conv");
  EXPECT_EQ(error_of(parse_attention("{type: softmax, rope_scaling: dynamic_ntk}"), small_model(3)),
            "model.attention.rope_train_length: dynamic_ntk needs the length that the model was "
            "trained with");
  EXPECT_EQ(error_of(parse_attention("{type: coca, position: fire}"), small_model(3)),
            "model.attention.position: coca rotates its keys, so that it takes rope alone");
  ModelConfig model = small_model(3);
  model.heads = 5;
  EXPECT_EQ(error_of(AttentionConfig{}, model),
            "model.heads: width 12 is not divisible by 5 heads");
}

// Modules say whether their heads may have another size than width / heads.
TEST(AttentionRegistry, HeadsOfAnotherSizeAreRefusedByName) {
  AttentionModule module;
  module.name = "fixed";
  ModelConfig model = small_model(3);
  model.head_dim = 4;
  EXPECT_FALSE(heads_problem(module, model));  // as it is without
  model.head_dim = 8;
  const auto problem = heads_problem(module, model);
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->key, "head_dim");
  EXPECT_EQ(problem->message, "fixed has heads of width / heads; leave out head_dim");
  module.own_head_dim = true;
  EXPECT_FALSE(heads_problem(module, model));
  model.heads = 5;
  EXPECT_FALSE(heads_problem(module, model));  // 5 heads of 8 need not divide the width
}

}  // namespace
}  // namespace sbtrain::test
