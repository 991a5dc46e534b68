#include "export/hf_tensors.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace sbtrain {
namespace {

// Tensors of one kind, without the ".weight" or ".bias" that both sides end with; "*" is the number
// of a layer.
struct Names {
  std::string_view stored;
  std::vector<std::string_view> ours;
  bool transposed = false;  // the weight
};

struct Family {
  std::string_view model_type;
  bool by_head = false;         // how several of ours share one
  std::string_view prefix;      // that a folder may lack before every name but the head's
  std::string_view mask_owner;  // whose ".bias" and ".masked_bias" are masks
  std::vector<Names> names;
};

const std::vector<Family>& families() {
  static const std::vector<Family> kFamilies = {
      {.model_type = "gpt2",
       .prefix = "transformer.",
       .mask_owner = ".attn",
       .names = {{"transformer.wte", {"model.embed_tokens"}},
                 {"transformer.wpe", {"model.embed_positions"}},
                 {"transformer.h.*.ln_1", {"model.layers.*.input_layernorm"}},
                 {"transformer.h.*.attn.c_attn",
                  {"model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj",
                   "model.layers.*.self_attn.v_proj"},
                  true},
                 {"transformer.h.*.attn.c_proj", {"model.layers.*.self_attn.o_proj"}, true},
                 {"transformer.h.*.ln_2", {"model.layers.*.post_attention_layernorm"}},
                 {"transformer.h.*.mlp.c_fc", {"model.layers.*.mlp.up_proj"}, true},
                 {"transformer.h.*.mlp.c_proj", {"model.layers.*.mlp.down_proj"}, true},
                 {"transformer.ln_f", {"model.norm"}}}},
      {.model_type = "gpt_neox",
       .by_head = true,
       .prefix = {},
       .mask_owner = ".attention",
       .names = {{"gpt_neox.embed_in", {"model.embed_tokens"}},
                 {"gpt_neox.layers.*.input_layernorm", {"model.layers.*.input_layernorm"}},
                 {"gpt_neox.layers.*.post_attention_layernorm",
                  {"model.layers.*.post_attention_layernorm"}},
                 {"gpt_neox.layers.*.attention.query_key_value",
                  {"model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj",
                   "model.layers.*.self_attn.v_proj"}},
                 {"gpt_neox.layers.*.attention.dense", {"model.layers.*.self_attn.o_proj"}},
                 {"gpt_neox.layers.*.mlp.dense_h_to_4h", {"model.layers.*.mlp.up_proj"}},
                 {"gpt_neox.layers.*.mlp.dense_4h_to_h", {"model.layers.*.mlp.down_proj"}},
                 {"gpt_neox.final_layer_norm", {"model.norm"}},
                 {"embed_out", {"lm_head"}}}}};
  return kFamilies;
}

const Family* family_of(std::string_view model_type) {
  const auto found = std::ranges::find(families(), model_type, &Family::model_type);
  return found == families().end() ? nullptr : &*found;
}

// What the "*" of the pattern stands for in `name`, empty in a pattern without one; nothing if they
// do not match.
std::optional<std::string_view> match(std::string_view pattern, std::string_view name) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) {
    return pattern == name ? std::optional<std::string_view>("") : std::nullopt;
  }
  const std::string_view before = pattern.substr(0, star);
  const std::string_view after = pattern.substr(star + 1);
  if (name.size() <= before.size() + after.size() || !name.starts_with(before) ||
      !name.ends_with(after)) {
    return std::nullopt;
  }
  const std::string_view number =
      name.substr(before.size(), name.size() - before.size() - after.size());
  const bool digits = number.find_first_not_of("0123456789") == std::string_view::npos;
  return digits ? std::optional(number) : std::nullopt;
}

std::string filled(std::string_view pattern, std::string_view number) {
  std::string name(pattern);
  if (const size_t star = name.find('*'); star != std::string::npos) name.replace(star, 1, number);
  return name;
}

// "a.b.weight" -> "a.b", ".weight".
std::pair<std::string_view, std::string_view> without_end(std::string_view name) {
  const size_t dot = std::min(name.rfind('.'), name.size());
  return {name.substr(0, dot), name.substr(dot)};
}

StoredPlace place_in(const Family& family, const Names& names, size_t part, std::string_view number,
                     std::string_view end) {
  return {.name = filled(names.stored, number).append(end),
          .part = static_cast<int>(part),
          .parts = static_cast<int>(names.ours.size()),
          .by_head = family.by_head,
          .transposed = names.transposed && end == ".weight"};
}

}  // namespace

StoredPlace stored_place(std::string_view model_type, const std::string& our_name) {
  if (const Family* family = family_of(model_type)) {
    const auto [whole, end] = without_end(our_name);
    for (const Names& names : family->names) {
      for (size_t part = 0; part < names.ours.size(); ++part) {
        if (const auto number = match(names.ours[part], whole)) {
          return place_in(*family, names, part, *number, end);
        }
      }
    }
  }
  return {.name = our_name};
}

std::vector<OurTensor> our_tensors(std::string_view model_type, const std::string& stored_name) {
  if (const Family* family = family_of(model_type)) {
    const auto [whole, end] = without_end(stored_name);
    for (const Names& names : family->names) {
      auto number = match(names.stored, whole);
      if (!number && !family->prefix.empty() && names.stored.starts_with(family->prefix)) {
        number = match(names.stored.substr(family->prefix.size()), whole);
      }
      if (!number) continue;
      std::vector<OurTensor> ours;
      for (size_t part = 0; part < names.ours.size(); ++part) {
        ours.push_back({filled(names.ours[part], *number).append(end),
                        place_in(*family, names, part, *number, end)});
      }
      return ours;
    }
  }
  return {{stored_name, {.name = stored_name}}};
}

bool is_stored_mask(std::string_view model_type, std::string_view stored_name) {
  const Family* family = family_of(model_type);
  if (family == nullptr) return false;
  const auto [whole, end] = without_end(stored_name);
  return whole.ends_with(family->mask_owner) && (end == ".bias" || end == ".masked_bias");
}

PartsLayout parts_layout(const StoredPlace& place, const std::vector<int64_t>& our_shape,
                         int64_t head_dim) {
  int64_t cols = 1;
  for (size_t i = 1; i < our_shape.size(); ++i) cols *= our_shape[i];
  return {.rows = our_shape.at(0),
          .cols = cols,
          .parts = place.parts,
          .block = place.by_head && place.parts > 1 ? head_dim : 0,
          .transposed = place.transposed};
}

std::vector<int64_t> stored_shape(const StoredPlace& place, std::vector<int64_t> our_shape) {
  our_shape.at(0) *= place.parts;
  if (place.transposed) std::swap(our_shape.at(0), our_shape.at(1));
  return our_shape;
}

void read_part(const PartsLayout& layout, int64_t part, int64_t begin, int64_t end, float* out,
               const ReadRun& read) {
  const int64_t block = layout.block_rows();
  const auto stored_row = [&](int64_t r) {
    return (r / block * layout.parts + part) * block + r % block;
  };
  if (!layout.transposed) {
    for (int64_t at = begin; at < end;) {
      const int64_t row = at / layout.cols;
      const int64_t stop = std::min(end, (row / block + 1) * block * layout.cols);
      read(stored_row(row) * layout.cols + at % layout.cols, stop - at, out + (at - begin));
      at = stop;
    }
    return;
  }
  // A run of rows of ours is a run of each row of the stored matrix.
  if (begin >= end) return;
  std::vector<float> run;
  const int64_t last = (end - 1) / layout.cols;
  for (int64_t first = begin / layout.cols; first <= last;) {
    const int64_t stop = std::min(last + 1, (first / block + 1) * block);
    run.resize(static_cast<size_t>(stop - first));
    for (int64_t col = 0; col < layout.cols; ++col) {
      read(col * layout.parts * layout.rows + stored_row(first), stop - first, run.data());
      for (int64_t row = first; row < stop; ++row) {
        const int64_t at = row * layout.cols + col;
        if (at >= begin && at < end) out[at - begin] = run[static_cast<size_t>(row - first)];
      }
    }
    first = stop;
  }
}

void read_stored(const PartsLayout& layout, int64_t begin, int64_t end, float* out,
                 const ReadPart& read) {
  const int64_t block = layout.block_rows();
  const auto part_of = [&](int64_t stored_row) { return stored_row / block % layout.parts; };
  const auto our_row = [&](int64_t stored_row) {
    return stored_row / (block * layout.parts) * block + stored_row % block;
  };
  if (!layout.transposed) {
    for (int64_t at = begin; at < end;) {
      const int64_t row = at / layout.cols;
      const int64_t stop = std::min(end, (row / block + 1) * block * layout.cols);
      read(part_of(row), our_row(row) * layout.cols + at % layout.cols, stop - at,
           out + (at - begin));
      at = stop;
    }
    return;
  }
  // A run of stored rows is a run of each row of ours.
  if (begin >= end) return;
  const int64_t width = layout.parts * layout.rows;
  const int64_t first = begin / width;
  const int64_t count = (end - 1) / width + 1 - first;
  std::vector<float> run(static_cast<size_t>(count));
  for (int64_t col = 0; col < width; ++col) {
    read(part_of(col), our_row(col) * layout.cols + first, count, run.data());
    for (int64_t k = 0; k < count; ++k) {
      const int64_t at = (first + k) * width + col;
      if (at >= begin && at < end) out[at - begin] = run[static_cast<size_t>(k)];
    }
  }
}

}  // namespace sbtrain
