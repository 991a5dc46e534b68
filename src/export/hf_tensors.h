// Where our tensors lie in the weights of other programs that name or store them in other ways:
// GPT-2 has q, k and v in one matrix, and every matrix of a block transposed; GPT-NeoX has the rows
// of q, k and v head by head.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

// Part `part` of the `parts` tensors of ours, all of one shape, that a stored one holds.
struct StoredPlace {
  std::string name;  // of the stored tensor
  int part = 0;
  int parts = 1;
  bool by_head = false;  // the rows of one head of each part follow each other, then the next head
  bool transposed = false;  // [inputs, outputs] in place of ours, [outputs, inputs]
};

// The names of models of that type in config.json. Types that are not listed have ours.
StoredPlace stored_place(std::string_view model_type, const std::string& our_name);
struct OurTensor {
  std::string name;
  StoredPlace place;
};
std::vector<OurTensor> our_tensors(std::string_view model_type, const std::string& stored_name);
// Whether it is no weight, but a mask that older programs stored with them.
bool is_stored_mask(std::string_view model_type, std::string_view stored_name);

// How the elements of the parts lie in the stored matrix (a vector is one of a single column). Row
// r of part p is row (r / block * parts + p) * block + r % block of it, or that column.
struct PartsLayout {
  int64_t rows = 0;  // of each part
  int64_t cols = 1;  // likewise
  int64_t parts = 1;
  int64_t block = 0;  // rows of a part that follow each other; 0: all
  bool transposed = false;
  int64_t block_rows() const { return block > 0 ? block : rows; }
};
// That of parts of shape `our_shape` in a model with heads of `head_dim`, and the stored shape.
PartsLayout parts_layout(const StoredPlace& place, const std::vector<int64_t>& our_shape,
                         int64_t head_dim);
std::vector<int64_t> stored_shape(const StoredPlace& place, std::vector<int64_t> our_shape);

// Reads elements [begin, end) of one part by reading runs of the stored tensor, or of the stored
// tensor by reading runs of its parts; a run is its first element and a number of elements.
using ReadRun = std::function<void(int64_t begin, int64_t count, float* out)>;
void read_part(const PartsLayout& layout, int64_t part, int64_t begin, int64_t end, float* out,
               const ReadRun& read);
using ReadPart = std::function<void(int64_t part, int64_t begin, int64_t count, float* out)>;
void read_stored(const PartsLayout& layout, int64_t begin, int64_t end, float* out,
                 const ReadPart& read);

}  // namespace sbtrain
