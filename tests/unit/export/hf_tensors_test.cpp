// Where our tensors lie in those of GPT-2 and GPT-NeoX.
#include "export/hf_tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace sbtrain {
namespace {

using Values = std::vector<float>;

// Element (row, col) of a part is 1000 part + 40 row + col.
float element(int64_t part, int64_t row, int64_t col) {
  return static_cast<float>(1000 * part + 40 * row + col);
}

Values part_of(const PartsLayout& layout, int64_t part) {
  Values values;
  for (int64_t r = 0; r < layout.rows; ++r) {
    for (int64_t c = 0; c < layout.cols; ++c) values.push_back(element(part, r, c));
  }
  return values;
}

// Built block by block, as concatenation and transposition of matrices would make it.
Values stored(const PartsLayout& layout) {
  const int64_t block = layout.block > 0 ? layout.block : layout.rows;
  Values rows;
  for (int64_t first = 0; first < layout.rows; first += block) {
    for (int64_t part = 0; part < layout.parts; ++part) {
      for (int64_t r = first; r < first + block; ++r) {
        for (int64_t c = 0; c < layout.cols; ++c) rows.push_back(element(part, r, c));
      }
    }
  }
  if (!layout.transposed) return rows;
  Values transposed(rows.size());
  const int64_t width = layout.parts * layout.rows;
  for (int64_t r = 0; r < width; ++r) {
    for (int64_t c = 0; c < layout.cols; ++c) {
      transposed[static_cast<size_t>(c * width + r)] =
          rows[static_cast<size_t>(r * layout.cols + c)];
    }
  }
  return transposed;
}

const PartsLayout kLayouts[] = {{.rows = 7},
                                {.rows = 4, .cols = 5},
                                {.rows = 4, .cols = 5, .transposed = true},
                                {.rows = 6, .parts = 3},
                                {.rows = 6, .cols = 5, .parts = 3},
                                {.rows = 6, .cols = 5, .parts = 3, .transposed = true},
                                {.rows = 6, .parts = 3, .block = 2},
                                {.rows = 6, .cols = 5, .parts = 3, .block = 3},
                                {.rows = 6, .cols = 4, .parts = 2, .block = 2, .transposed = true}};

TEST(PartsLayout, EveryRangeOfAPartIsReadFromTheStoredTensor) {
  for (const PartsLayout& layout : kLayouts) {
    const Values whole = stored(layout);
    const auto read = [&](int64_t begin, int64_t count, float* out) {
      ASSERT_GE(begin, 0);
      ASSERT_LE(begin + count, static_cast<int64_t>(whole.size()));
      std::copy_n(whole.begin() + begin, count, out);
    };
    for (int64_t part = 0; part < layout.parts; ++part) {
      const Values expected = part_of(layout, part);
      const auto count = static_cast<int64_t>(expected.size());
      for (int64_t begin = 0; begin <= count; ++begin) {
        for (int64_t end = begin; end <= count; ++end) {
          Values values(static_cast<size_t>(end - begin), -1);
          read_part(layout, part, begin, end, values.data(), read);
          ASSERT_TRUE(std::equal(values.begin(), values.end(), expected.begin() + begin))
              << part << " of " << layout.parts << ", [" << begin << ", " << end << ")";
        }
      }
    }
  }
}

TEST(PartsLayout, EveryRangeOfTheStoredTensorIsReadFromItsParts) {
  for (const PartsLayout& layout : kLayouts) {
    const Values expected = stored(layout);
    const auto read = [&](int64_t part, int64_t begin, int64_t count, float* out) {
      const Values values = part_of(layout, part);
      ASSERT_GE(begin, 0);
      ASSERT_LE(begin + count, static_cast<int64_t>(values.size()));
      std::copy_n(values.begin() + begin, count, out);
    };
    const auto count = static_cast<int64_t>(expected.size());
    for (int64_t begin = 0; begin <= count; ++begin) {
      for (int64_t end = begin; end <= count; ++end) {
        Values values(static_cast<size_t>(end - begin), -1);
        read_stored(layout, begin, end, values.data(), read);
        ASSERT_TRUE(std::equal(values.begin(), values.end(), expected.begin() + begin))
            << layout.parts << " parts, [" << begin << ", " << end << ")";
      }
    }
  }
}

TEST(StoredPlace, NamesGoThereAndBack) {
  const StoredPlace k = stored_place("gpt2", "model.layers.11.self_attn.k_proj.weight");
  EXPECT_EQ(k.name, "transformer.h.11.attn.c_attn.weight");
  EXPECT_TRUE(k.part == 1 && k.parts == 3 && k.transposed && !k.by_head);
  EXPECT_FALSE(stored_place("gpt2", "model.layers.11.self_attn.k_proj.bias").transposed);
  EXPECT_FALSE(stored_place("gpt2", "model.embed_tokens.weight").transposed);
  EXPECT_EQ(stored_place("gpt2", "lm_head.weight").name, "lm_head.weight");
  const StoredPlace v = stored_place("gpt_neox", "model.layers.0.self_attn.v_proj.bias");
  EXPECT_EQ(v.name, "gpt_neox.layers.0.attention.query_key_value.bias");
  EXPECT_TRUE(v.part == 2 && v.parts == 3 && !v.transposed && v.by_head);
  EXPECT_EQ(stored_place("gpt_neox", "lm_head.weight").name, "embed_out.weight");
  EXPECT_EQ(stored_place("olmo2", "model.norm.weight").name, "model.norm.weight");
  for (const char* type : {"gpt2", "gpt_neox", "llama"}) {
    for (const char* name :
         {"model.embed_tokens.weight", "model.layers.3.input_layernorm.bias",
          "model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.v_proj.bias",
          "model.layers.3.self_attn.o_proj.weight", "model.layers.30.mlp.up_proj.bias",
          "model.layers.30.mlp.down_proj.weight", "model.norm.bias", "lm_head.weight"}) {
      const StoredPlace place = stored_place(type, name);
      const std::vector<OurTensor> ours = our_tensors(type, place.name);
      ASSERT_EQ(ours.size(), static_cast<size_t>(place.parts)) << type << " " << name;
      EXPECT_EQ(ours[static_cast<size_t>(place.part)].name, name);
    }
  }
}

// The weights of GPT-2 on the hub are those of its body alone, and some have masks beside them.
TEST(StoredPlace, GptOfTheHub) {
  const std::vector<OurTensor> ours = our_tensors("gpt2", "h.7.mlp.c_fc.weight");
  ASSERT_EQ(ours.size(), 1U);
  EXPECT_EQ(ours.front().name, "model.layers.7.mlp.up_proj.weight");
  EXPECT_EQ(our_tensors("gpt2", "wpe.weight").front().name, "model.embed_positions.weight");
  EXPECT_TRUE(is_stored_mask("gpt2", "h.0.attn.bias"));
  EXPECT_TRUE(is_stored_mask("gpt2", "transformer.h.0.attn.masked_bias"));
  EXPECT_FALSE(is_stored_mask("gpt2", "h.0.attn.c_attn.bias"));
  EXPECT_TRUE(is_stored_mask("gpt_neox", "gpt_neox.layers.0.attention.bias"));
  EXPECT_TRUE(is_stored_mask("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"));
  EXPECT_FALSE(is_stored_mask("gpt_neox", "gpt_neox.layers.0.attention.dense.bias"));
  EXPECT_FALSE(is_stored_mask("llama", "model.layers.0.attn.bias"));
  // Names that are none of the family's stay, and are reported as unexpected.
  for (const char* name :
       {"h.x.ln_1.weight", "h..ln_1.weight", "transformer.h.0.crossattention.c_attn.weight"}) {
    EXPECT_EQ(our_tensors("gpt2", name).front().name, name);
  }
}

}  // namespace
}  // namespace sbtrain
