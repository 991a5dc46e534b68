/* The header is C, and its example compiles. */
#include "sbtrain/attention.h"

int plan_from_c(uint64_t* bytes);
int plan_from_c(uint64_t* bytes) {
  sbtrain_stickbreaking x = SBTRAIN_INIT(sbtrain_stickbreaking);
  x.compute_capability = 90;
  x.tokens = 4096, x.sequences = 1, x.max_seqlen = 4096, x.heads = 24, x.head_dim = 64;
  return sbtrain_stickbreaking_workspace(&x, 0, bytes);
}
