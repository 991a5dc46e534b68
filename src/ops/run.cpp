// Every op of the library, compiled once. Whether a build has the CUDA backend concerns this file
// alone, not those that run ops.
#include "ops/run.h"

#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/average.h"
#include "ops/coca.h"
#include "ops/embedding.h"
#include "ops/far_keys.h"
#include "ops/far_softmax.h"
#include "ops/fp8.h"
#include "ops/initialize.h"
#include "ops/kept_keys.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/memory.h"
#include "ops/muon.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rebased.h"
#include "ops/rope.h"
#include "ops/sampling.h"
#include "ops/scale.h"
#include "ops/short_conv.h"

namespace sbtrain::ops {

template void run(Stream& s, const Swiglu& op);
template void run(Stream& s, const SwigluBackward& op);
template void run(Stream& s, const BiasSigmoid& op);
template void run(Stream& s, const SigmoidBackward& op);
template void run(Stream& s, const BiasGelu& op);
template void run(Stream& s, const BiasGeluBackward& op);

template void run(Stream& s, const StickBreakingForward& op);
template void run(Stream& s, const StickBreakingBackward& op);
template void run(Stream& s, const SoftmaxForward& op);
template void run(Stream& s, const SoftmaxBackward& op);
template void run(Stream& s, const StickBreakingDecode& op);
template void run(Stream& s, const SoftmaxDecode& op);
template void run(Stream& s, const CacheAppend& op);
template void run(Stream& s, const KeepKeys& op);
template void run(Stream& s, const StoreKeys& op);
template void run(Stream& s, const PlaceKeys& op);
template void run(Stream& s, const StickBreakingKeptDecode& op);
template void run(Stream& s, const StickBreakingFarForward& op);
template void run(Stream& s, const StickBreakingFarBackward& op);
template void run(Stream& s, const AddRemainder& op);
template void run(Stream& s, const RemainderGradient& op);
template void run(Stream& s, const AddRemainderBackward& op);
template void run(Stream& s, const SoftmaxFarForward& op);
template void run(Stream& s, const SoftmaxFarBackward& op);

template void run(Stream& s, const CocaQuery& op);
template void run(Stream& s, const CocaQueryBackward& op);
template void run(Stream& s, const CocaKey& op);
template void run(Stream& s, const CocaKeyBackward& op);

template void run(Stream& s, const StartCopyToHost& op);

template void run(Stream& s, const Embedding& op);
template void run(Stream& s, const EmbeddingBackward& op);

template void run(Stream& s, const Initialize& op);

template void run(Stream& s, const Linear& op);
template void run(Stream& s, const DecodeLinear& op);
template void run(Stream& s, const LinearBackward& op);
template void run(Stream& s, const AddBias& op);
template void run(Stream& s, const BiasBackward& op);

template void run(Stream& s, const Amax& op);
template void run(Stream& s, const CastFp8& op);
template void run(Stream& s, const Fp8Scales& op);
template void run(Stream& s, const TransposeFp8& op);
template void run(Stream& s, const Fp8Product& op);

template void run(Stream& s, const CrossEntropy& op);

template void run(Stream& s, const Fill& op);
template void run(Stream& s, const Copy& op);
template void run(Stream& s, const Add& op);
template void run(Stream& s, const SumParts& op);
template void run(Stream& s, const CopyFromHost& op);
template void run(Stream& s, const FetchFromHost& op);
template void run(Stream& s, const CopyToHost& op);
template void run(Stream& s, const Synchronize& op);

template void run(Stream& s, const RmsNorm& op);
template void run(Stream& s, const RmsNormBackward& op);
template void run(Stream& s, const LayerNorm& op);
template void run(Stream& s, const LayerNormBackward& op);
template void run(Stream& s, const HeadNorm& op);
template void run(Stream& s, const HeadNormBackward& op);
template void run(Stream& s, const HeadRmsNorm& op);
template void run(Stream& s, const HeadRmsNormBackward& op);

template void run(Stream& s, const AddSum& op);
template void run(Stream& s, const AddSquaredNorm& op);
template void run(Stream& s, const AddSquaredNorms& op);
template void run(Stream& s, const FinishStep& op);
template void run(Stream& s, const AdamW& op);
template void run(Stream& s, const AdamWs& op);
template void run(Stream& s, const AverageWeights& op);
template void run(Stream& s, const MuonMomentum& op);
template void run(Stream& s, const Normalize& op);
template void run(Stream& s, const Orthogonalize& op);
template void run(Stream& s, const MuonUpdate& op);

template void run(Stream& s, const RebasedForward& op);
template void run(Stream& s, const RebasedBackward& op);
template void run(Stream& s, const RebasedState& op);
template void run(Stream& s, const RebasedDecode& op);

template void run(Stream& s, const Rope& op);

template void run(Stream& s, const Argmax& op);

template void run(Stream& s, const Scale& op);
template void run(Stream& s, const ScaleBackward& op);

template void run(Stream& s, const ShortConvForward& op);
template void run(Stream& s, const ShortConvBackward& op);
template void run(Stream& s, const ShortConvDecode& op);

}  // namespace sbtrain::ops
