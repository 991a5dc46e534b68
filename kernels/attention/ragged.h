// Describes a pack of documents to libraries that work on padded batches, and converts between the
// layouts of one number for each query.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

inline constexpr int kMaxRaggedTensors = 9;

// A batch of `batch` documents, of which those from `sequences` on are empty.
struct RaggedBatch {
  int batch = 0;
  int sequences = 0;
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  int tensors = 0;
  int64_t stride[kMaxRaggedTensors] = {};  // elements between two tokens of each tensor
};

// offsets[i][n] is the element at which document n of tensor i begins, [tensors][batch + 1];
// lengths[n] is the length of document n.
void ragged_batch(cudaStream_t stream, const RaggedBatch& ragged, int64_t* offsets,
                  int32_t* lengths);

// y[col, row] = x[row, col], x [rows, cols] f32.
void transpose_f32(cudaStream_t stream, float* y, const float* x, int rows, int cols);

}  // namespace sbtrain::kernels
