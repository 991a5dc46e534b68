/*
 * Attention kernels of sbtrain for NVIDIA GPUs, for C and for whatever calls C: stick-breaking
 * attention (arXiv 2410.17980) and softmax attention over packed documents, forward and backward,
 * and one step of decoding. The library is libsbtrain_attention.so; it needs the driver and the C++
 * runtime alone.
 *
 * Every call takes one struct and returns a code, SBTRAIN_OK or what was wrong;
 * sbtrain_last_error() then has the text. A struct begins with its size and the version of this
 * header, which SBTRAIN_INIT fills in, so that later versions can add fields behind: callers that
 * were compiled with an older header go on working.
 *
 *   sbtrain_stickbreaking x = SBTRAIN_INIT(sbtrain_stickbreaking);
 *   x.tokens = 4096, x.sequences = 1, x.max_seqlen = 4096, x.heads = 24, x.head_dim = 64, ...
 *   uint64_t bytes;
 *   if (sbtrain_stickbreaking_workspace(&x, 0, &bytes)) fail(sbtrain_last_error());
 *   x.workspace = allocate(bytes), x.workspace_bytes = bytes;
 *   if (sbtrain_stickbreaking_forward(&x)) fail(sbtrain_last_error());
 *
 * A call puts work on the stream and returns; it never waits, and may be recorded into a CUDA
 * graph. The workspace has to live until that work is done; nothing is kept in it from one call to
 * the next. Results are the same bits on every run.
 *
 * Shapes: T tokens of all documents together, H heads of queries, G heads of keys and values, d
 * channels of a head. G divides H; head h of the queries reads head h / (H / G). A document is a
 * sequence of tokens that sees no other one. Token j sees the keys i < j of its document, and its
 * own with attend_current; in softmax attention always i <= j.
 *
 * All pointers but those of structs are to the device's memory. Matrices are bf16 and begin at
 * multiples of 16 bytes; their rows do so too. d is a multiple of 8 up to 256, on GPUs with less
 * than 163 KiB of shared memory for a block up to 128. GPUs of compute capability 9.0 run kernels
 * of their own for d = 32, 64 and 128; all others from 8.0 on run portable ones.
 */
#ifndef SBTRAIN_ATTENTION_H
#define SBTRAIN_ATTENTION_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SBTRAIN_ATTENTION_VERSION 1
/* All other fields are zero. */
#ifdef __cplusplus
#define SBTRAIN_INIT(type)                       \
  [] {                                           \
    type initial{};                              \
    initial.struct_size = sizeof(type);          \
    initial.version = SBTRAIN_ATTENTION_VERSION; \
    return initial;                              \
  }()
#else
#define SBTRAIN_INIT(type) \
  { .struct_size = sizeof(type), .version = SBTRAIN_ATTENTION_VERSION }
#endif

/* ---- Codes --------------------------------------------------------------------------------- */

enum {
  SBTRAIN_OK = 0,
  SBTRAIN_INVALID = 1,     /* a field has a value that makes no sense; the text names it */
  SBTRAIN_UNSUPPORTED = 2, /* the call makes sense, but no kernel computes it; the text says why */
  SBTRAIN_VERSION = 3,     /* the struct is of a header that this library does not know */
  SBTRAIN_DRIVER = 4,      /* no driver, or one too old; the text names the driver that is needed */
  SBTRAIN_CUDA = 5,        /* CUDA reports an error */
  SBTRAIN_INTERNAL = 6
};

/* "invalid", "unsupported", ... */
const char* sbtrain_code_name(int code);
/* What was wrong in the calling thread's last call that did not return SBTRAIN_OK. It stays valid
 * until the thread's next call. */
const char* sbtrain_last_error(void);

/* The version of this header that the library was built with. */
uint32_t sbtrain_attention_version(void);
/* The release, and the CUDA toolkit and architectures of the build. */
const char* sbtrain_attention_build(void);
/* SBTRAIN_OK if the machine's driver can run the library, else SBTRAIN_DRIVER. The other calls ask
 * it too; this one needs no GPU. */
int sbtrain_check_driver(void);

/* ---- What the structs share ----------------------------------------------------------------- */

/* Rows of a bf16 matrix; `stride` elements lie between two of them, a multiple of 8. Null: absent.
 */
typedef struct sbtrain_rows {
  void* data;
  int64_t stride;
} sbtrain_rows;

/* ---- Stick-breaking attention ---------------------------------------------------------------- */
/*
 * For token j and the keys i of its document that it sees (equations 1-4 of the paper):
 *   z_ij = scale q_j.k_i   beta_ij = f_i sigmoid(z_ij)   A_ij = beta_ij prod_{i<k} (1 - beta_kj)
 *   o_j = sum_i A_ij v_i   rem_j = 1 - sum_i A_ij = prod_i (1 - beta_ij)
 * q comes as it is, without the scale. f is the gate, 1 without one.
 */

enum {
  SBTRAIN_REMAINDER_NONE = 0,
  SBTRAIN_REMAINDER_VALUE = 1, /* o_j += rem_j v_j */
  SBTRAIN_REMAINDER_VECTOR = 2 /* o_j += rem_j r_h */
};

typedef struct sbtrain_stickbreaking {
  uint64_t struct_size;
  uint32_t version;
  int32_t device; /* of all pointers; the calling thread's current one does not change */
  void* stream;   /* cudaStream_t */
  /* 10 times the compute capability for which workspace is planned, so that no GPU is needed for
   * that: 90. 0: that of the device. */
  int32_t compute_capability;
  int32_t heads, kv_heads, head_dim; /* kv_heads 0: as many as heads */
  int64_t tokens;                    /* T */
  /* 0: T. Others are SBTRAIN_UNSUPPORTED: put queries of zeros where keys have none
   * (docs/c_interface.md) */
  int64_t key_tokens;
  int64_t sequences;             /* documents */
  int64_t max_seqlen;            /* an upper bound of their lengths: workspace depends on it */
  const int32_t* cu_seqlens;     /* [sequences + 1], from 0 to T, never falling; null: all documents
                                  * have max_seqlen tokens. Others stop the kernel */
  const int32_t* key_cu_seqlens; /* null: cu_seqlens */
  float scale;
  int32_t attend_current; /* 0 or 1 */
  int32_t remainder;      /* SBTRAIN_REMAINDER_... */
  /* Keys left of the point where all queries of a tile have rem < skip_epsilon are skipped, in both
   * directions of the pass. 0 skips none; 2^-24 changes no result by more than bf16 rounds. */
  float skip_epsilon;
  sbtrain_rows q, o; /* [T, H*d] */
  sbtrain_rows k, v; /* [T, G*d] */
  const float* gate; /* f [T, H] in (0, 1]; null: 1 */
  int64_t gate_stride;
  const void* remainder_vector; /* r, bf16 [H, d], with SBTRAIN_REMAINDER_VECTOR */
  /* Written by the forward pass, read by the backward pass: log2 of rem, f32 [H, T], and the first
   * key that each query's tile has read, [H, T]. */
  float* log2_remainder;
  int32_t* stop;
  /* Of the backward pass. Gradients are written, not added to. */
  sbtrain_rows d_o, dq;     /* [T, H*d] */
  sbtrain_rows dk, dv;      /* [T, G*d] */
  const float* d_remainder; /* the gradient of rem, f32 [H, T]; null: zero */
  void* d_gate;             /* bf16 [T, H], with a gate */
  int64_t d_gate_stride;
  float* d_remainder_vector; /* f32 [H, d], with SBTRAIN_REMAINDER_VECTOR */
  void* workspace;           /* aligned to 256 bytes */
  uint64_t workspace_bytes;
} sbtrain_stickbreaking;

/* The bytes of workspace that the forward (backward = 0) or backward pass of x takes. Of
 * the pointers of x only whether gate and cu_seqlens are null matters, and no GPU is needed where
 * x->compute_capability is given. */
int sbtrain_stickbreaking_workspace(const sbtrain_stickbreaking* x, int backward, uint64_t* bytes);
/* Writes o, log2_remainder and stop. */
int sbtrain_stickbreaking_forward(const sbtrain_stickbreaking* x);
/* Writes dq, dk, dv, d_gate and d_remainder_vector. */
int sbtrain_stickbreaking_backward(const sbtrain_stickbreaking* x);

/* ---- Softmax attention ------------------------------------------------------------------------
 */
/*
 * o_j = sum_i softmax_i(scale q_j.k_i + bias_h(i, j)) v_i over i <= j, with i and j counted from 0
 * in each document.
 */

enum {
  SBTRAIN_BIAS_NONE = 0,
  SBTRAIN_BIAS_ALIBI = 1, /* -m_h (j - i)  (arXiv 2108.12409), up to 256 heads */
  /* MLP(psi(j - i) / (psi(max(j, |512 m|)) + 1e-6))_h, psi(x) = log(|c| x + 1); the MLP is 1 -> 32
   * -> H with ReLU  (arXiv 2310.04418) */
  SBTRAIN_BIAS_FIRE = 2
};

/* Of FIRE, bf16: c, m [1], w1, b1 [32], w2 [H, 32], b2 [H]. */
typedef struct sbtrain_fire {
  const void *c, *m, *w1, *b1, *w2, *b2;
} sbtrain_fire;
/* f32. b2 has none: it shifts all logits of a query alike. */
typedef struct sbtrain_fire_gradients {
  float *c, *m, *w1, *b1, *w2;
} sbtrain_fire_gradients;

typedef struct sbtrain_softmax {
  uint64_t struct_size;
  uint32_t version;
  int32_t device; /* this and what follows: as in sbtrain_stickbreaking */
  void* stream;
  int32_t compute_capability;
  int32_t heads, kv_heads, head_dim;
  int64_t tokens, key_tokens, sequences, max_seqlen;
  const int32_t *cu_seqlens, *key_cu_seqlens;
  float scale;
  int32_t bias;   /* SBTRAIN_BIAS_... */
  int64_t window; /* > 0: a token sees so many keys, its own included; 0: all */
  sbtrain_fire fire;
  sbtrain_rows q, o; /* [T, H*d] */
  sbtrain_rows k, v; /* [T, G*d] */
  float* lse;        /* natural logarithm of the softmax denominator, f32 [H, T] */
  /* Of the backward pass, which reads o and lse too. Gradients are written, not added to. */
  sbtrain_rows d_o, dq, dk, dv;
  sbtrain_fire_gradients d_fire;
  void* workspace;
  uint64_t workspace_bytes;
} sbtrain_softmax;

int sbtrain_softmax_workspace(const sbtrain_softmax* x, int backward, uint64_t* bytes);
/* Writes o and lse. */
int sbtrain_softmax_forward(const sbtrain_softmax* x);
/* Writes dq, dk, dv and d_fire. */
int sbtrain_softmax_backward(const sbtrain_softmax* x);

/* ---- Decoding ---------------------------------------------------------------------------------
 */
/*
 * One query for each of B sequences against the cached keys and values of its own. The bits of a
 * sequence do not depend on the others.
 */

typedef struct sbtrain_decode {
  uint64_t struct_size;
  uint32_t version;
  int32_t device;
  void* stream;
  int32_t heads, kv_heads, head_dim;
  float scale;
  int64_t batch;     /* B */
  int64_t capacity;  /* C, of the caches in tokens */
  sbtrain_rows q, o; /* [B, H*d] */
  /* The new token's own key and value [B, G*d], which are written to the caches; null: they are
   * there. */
  sbtrain_rows k, v;
  void *k_cache, *v_cache; /* bf16 [B, C, G*d], contiguous */
  /* i32 [B], in [1, C], the new token included, whose key is the last one. Others stop the kernel.
   */
  const int32_t* lengths;
  /* Of stick-breaking attention. */
  int32_t attend_current, remainder;
  float skip_epsilon;
  const float* gate_cache; /* f [B, C, H], contiguous; null: 1. Here f = 0 hides a key */
  const void* remainder_vector;
  /* Of softmax attention. */
  int32_t bias;
  int64_t window;
  sbtrain_fire fire;
  void* workspace;
  uint64_t workspace_bytes;
} sbtrain_decode;

/* Needs no GPU. */
int sbtrain_decode_workspace(const sbtrain_decode* x, uint64_t* bytes);
/* Write o, and k and v to the caches. */
int sbtrain_stickbreaking_decode(const sbtrain_decode* x);
int sbtrain_softmax_decode(const sbtrain_decode* x);

#ifdef __cplusplus
}
#endif

#endif
