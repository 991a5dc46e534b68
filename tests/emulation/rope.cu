// The rotation of a chain's links, for chain_test.cu.
#include "kernels/rope.cu"
