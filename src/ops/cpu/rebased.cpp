// Polynomial attention on the CPU. Documents are cut into chunks of kTile tokens; within a chunk
// the weights of all pairs are formed, and for keys of earlier chunks stands the state
// S = sum_i psi(k_i) [v_i | 1] as phi(q_j) S, with phi(q).psi(k) = s(scale q.k):
//   psi(k) = (1, k_a, k_a k_b)   phi(q) = (constant, linear q_a, square (2 - [a = b]) q_a q_b)
// where q is scaled. The quadratic form walks over the earlier chunks instead.
#include "ops/rebased.h"

#include <type_traits>

#include "ops/cpu/attention_tile.h"

namespace sbtrain::ops::cpu {
namespace {

// The coefficients of psi (all 1) or phi. Rows a head does not have are left out.
struct Expansion {
  int64_t f;
  bool lower;  // there are rows for the constant and the linear term
  float constant, linear, square, mixed;

  int64_t rows() const { return f * (f + 1) / 2 + (lower ? 1 + f : 0); }

  // y [count, rows] of x [count, f].
  void expand(float* y, const float* x, int64_t count) const {
    for (int64_t t = 0; t < count; ++t, x += f) {
      if (lower) {
        *y++ = constant;
        for (int64_t a = 0; a < f; ++a) *y++ = linear * x[a];
      }
      for (int64_t a = 0; a < f; ++a) {
        y[0] = square * x[a] * x[a];
        const float factor = mixed * x[a];
#pragma omp simd
        for (int64_t b = a + 1; b < f; ++b) y[b - a] = factor * x[b];
        y += f - a;
      }
    }
  }

  // dx [count, f] += the gradient for dy [count, rows].
  void contract(float* dx, const float* dy, const float* x, int64_t count) const {
    for (int64_t t = 0; t < count; ++t, x += f, dx += f) {
      if (lower) {
        ++dy;
        for (int64_t a = 0; a < f; ++a) dx[a] += linear * *dy++;
      }
      for (int64_t a = 0; a < f; ++a) {
        float sum = 2.0f * square * dy[0] * x[a];
        const float factor = mixed * x[a];
#pragma omp simd reduction(+ : sum)
        for (int64_t b = a + 1; b < f; ++b) {
          sum += mixed * dy[b - a] * x[b];
          dx[b] += factor * dy[b - a];
        }
        dx[a] += sum;
        dy += f - a;
      }
    }
  }
};

Expansion make_psi(int64_t f, const RebasedParams& params) {
  return {.f = f,
          .lower = params.constant != 0.0f || params.linear != 0.0f,
          .constant = 1.0f,
          .linear = 1.0f,
          .square = 1.0f,
          .mixed = 1.0f};
}

Expansion make_phi(int64_t f, const RebasedParams& params) {
  Expansion phi = make_psi(f, params);
  phi.constant = params.constant;
  phi.linear = params.linear;
  phi.square = params.square;
  phi.mixed = 2.0f * params.square;
  return phi;
}

// The part of one head in what the ops read and write: matrices [T, f] and [T, e] from its first
// column on.
struct Head {
  template <typename Tensors>
  Head(const Tensors& t, int64_t index)
      : params(t.params),
        f(t.q_THf.cols() / params.heads),
        e(t.v_THe.cols() / params.heads),
        q(Matrix(t.q_THf).from(0, index * f)),
        k(Matrix(t.k_THf).from(0, index * f)),
        v(Matrix(t.v_THe).from(0, index * e)),
        o(Matrix(t.o_THe).from(0, index * e)),
        den(Matrix(t.den_HT).row(index)) {
    if constexpr (std::is_same_v<Tensors, RebasedBackward>) {
      dout = Matrix(t.do_THe).from(0, index * e);
      dq = Matrix(t.dq_THf).from(0, index * f);
      dk = Matrix(t.dk_THf).from(0, index * f);
      dv = Matrix(t.dv_THe).from(0, index * e);
    }
  }

  float weight(float x) const { return params.constant + x * (params.linear + x * params.square); }
  float slope(float x) const { return params.linear + 2.0f * x * params.square; }

  RebasedParams params;
  int64_t f, e;
  Matrix q, k, v, o;
  float* den;               // [T]
  Matrix dout, dq, dk, dv;  // backward
};

int64_t scratch_floats(int64_t f, int64_t e, int64_t rows) {
  return kTile * (6 * f + 5 * (e + 1) + 2 * kTile + rows) + rows * (e + 1);
}

// One thread's memory: a tile of queries, a tile of keys, and the state.
struct Work {
  Work(Scratch scratch, const Head& head)
      : head(head),
        f(head.f),
        width(head.e + 1),
        psi(make_psi(f, head.params)),
        phi(make_phi(f, head.params)),
        rows(psi.rows()),
        q(scratch.take(kTile * f)),
        q_t(scratch.take(kTile * f)),
        dq(scratch.take(kTile * f)),
        k(scratch.take(kTile * f)),
        dk(scratch.take(kTile * f)),
        v(scratch.take(kTile * width)),
        g(scratch.take(kTile * width)),
        g_t(scratch.take(kTile * width)),
        y(scratch.take(kTile * width)),
        x(scratch.take(kTile * kTile)),
        ds(scratch.take(kTile * kTile)),
        expanded(scratch.take(kTile * rows)),
        state(scratch.take(rows * width)) {}

  void load_queries(int64_t token, int64_t count) const {
    pack(q, head.q.from(token, 0), count, kTile, f, head.params.scale);
    transpose(q_t, q, f);
  }
  // Loads the keys and [v | 1].
  void load_keys(int64_t token, int64_t count) const {
    pack(k, head.k.from(token, 0), count, count, f, 1.0f);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(head.v.row(token + i), width - 1, v + i * width);
      v[i * width + width - 1] = 1.0f;
    }
  }
  // g_j = (do_j, -do_j.o_j) / den_j: the gradients of the sums of s v and of s.
  void load_gradients(int64_t token, int64_t count) const {
    std::fill(g, g + kTile * width, 0.0f);
    for (int64_t j = 0; j < count; ++j) {
      const float* dout = head.dout.row(token + j);
      const float* o = head.o.row(token + j);
      const float inverse = 1.0f / head.den[token + j];
      float sum = 0.0f;
      for (int64_t c = 0; c + 1 < width; ++c) {
        g[j * width + c] = dout[c] * inverse;
        sum += dout[c] * o[c];
      }
      g[j * width + width - 1] = -sum * inverse;
    }
    transpose(g_t, g, width);
  }
  // state += psi(k)^T [v | 1].
  void add_keys_to_state(int64_t count) const {
    psi.expand(expanded, k, count);
    gemm_serial(Transpose::kYes, Transpose::kNo, rows, width, count, 1.0f, expanded, rows, v, width,
                1.0f, state, width);
  }
  void clear_state() const { std::fill(state, state + rows * width, 0.0f); }

  const Head& head;
  int64_t f, width;
  Expansion psi, phi;
  int64_t rows;
  float *q, *q_t, *dq, *k, *dk;
  float *v, *g, *g_t, *y;  // [kTile, e + 1]
  float *x, *ds;           // [keys, kTile]
  float *expanded, *state;
};

// Queries before the key do not see it: their lanes become 0. `begin` is the first key relative to
// the first query.
void mask(float* row, int64_t begin, int64_t key) {
  std::fill_n(row, std::clamp<int64_t>(begin + key, 0, kTile), 0.0f);
}

// y += s [v | 1] over the loaded keys.
void add_pairs(const Work& m, int64_t begin, int64_t keys) {
  score(m.x, m.k, m.q_t, keys, m.f);
  for (int64_t i = 0; i < keys; ++i) {
    float* row = m.x + i * kTile;
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) row[q] = m.head.weight(row[q]);
    mask(row, begin, i);
  }
  mix(m.y, m.x, m.v, keys, m.width);
}

void forward_document(const Document& document, const Head& head, Scratch scratch) {
  const Work m(scratch, head);
  m.clear_state();
  for (int64_t first = 0; first < document.length; first += kTile) {
    const int64_t count = std::min(kTile, document.length - first);
    const int64_t token = document.begin + first;
    m.load_queries(token, count);
    std::fill(m.y, m.y + kTile * m.width, 0.0f);
    if (head.params.quadratic) {
      for (int64_t begin = 0; begin < first; begin += kTile) {
        m.load_keys(document.begin + begin, kTile);
        add_pairs(m, begin - first, kTile);
      }
    } else if (first > 0) {
      m.phi.expand(m.expanded, m.q, kTile);
      gemm_serial(Transpose::kNo, Transpose::kNo, kTile, m.width, m.rows, 1.0f, m.expanded, m.rows,
                  m.state, m.width, 1.0f, m.y, m.width);
    }
    m.load_keys(token, count);
    add_pairs(m, 0, count);
    if (!head.params.quadratic) m.add_keys_to_state(count);
    for (int64_t j = 0; j < count; ++j) {
      const float* y = m.y + j * m.width;
      const float den = y[head.e] + head.params.eps;
      head.den[token + j] = den;
      float* o = head.o.row(token + j);
      for (int64_t c = 0; c < head.e; ++c) o[c] = y[c] / den;
    }
  }
}

// dq, dk and dv += the contribution of all pairs of loaded queries and keys; keys begin at `token`.
void add_pair_gradients(const Work& m, int64_t token, int64_t begin, int64_t keys) {
  const Head& head = m.head;
  score(m.x, m.k, m.q_t, keys, m.f);
  score(m.ds, m.v, m.g_t, keys, m.width);
  for (int64_t i = 0; i < keys; ++i) {
    float* x = m.x + i * kTile;
    float* ds = m.ds + i * kTile;
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) {
      ds[q] *= head.slope(x[q]);
      x[q] = head.weight(x[q]);
    }
    mask(x, begin, i);
    mask(ds, begin, i);
  }
  mix(m.dq, m.ds, m.k, keys, m.f);
  scatter(head.dk.from(token, 0), m.ds, m.q, keys, m.f);
  const Matrix dv = head.dv.from(token, 0);
  gemm_serial(Transpose::kNo, Transpose::kNo, keys, head.e, kTile, 1.0f, m.x, kTile, m.g, m.width,
              1.0f, dv.data, dv.stride);
}

// From left to right: dq, and the part of dk and dv within chunks (quadratic: all of it).
void backward_queries(const Document& document, const Head& head, const Work& m) {
  m.clear_state();
  for (int64_t first = 0; first < document.length; first += kTile) {
    const int64_t count = std::min(kTile, document.length - first);
    const int64_t token = document.begin + first;
    m.load_queries(token, count);
    m.load_gradients(token, count);
    std::fill(m.dq, m.dq + kTile * m.f, 0.0f);
    if (head.params.quadratic) {
      for (int64_t begin = 0; begin < first; begin += kTile) {
        m.load_keys(document.begin + begin, kTile);
        add_pair_gradients(m, document.begin + begin, begin - first, kTile);
      }
    } else if (first > 0) {
      gemm_serial(Transpose::kNo, Transpose::kYes, kTile, m.rows, m.width, 1.0f, m.g, m.width,
                  m.state, m.width, 0.0f, m.expanded, m.rows);
      m.phi.contract(m.dq, m.expanded, m.q, kTile);
    }
    m.load_keys(token, count);
    add_pair_gradients(m, token, 0, count);
    if (!head.params.quadratic) m.add_keys_to_state(count);
    for (int64_t j = 0; j < count; ++j) {
      float* dq = head.dq.row(token + j);
      for (int64_t c = 0; c < m.f; ++c) dq[c] = head.params.scale * m.dq[j * m.f + c];
    }
  }
}

// From right to left with the state's gradient: the part of dk and dv from later chunks.
void backward_keys(const Document& document, const Head& head, const Work& m) {
  m.clear_state();
  const int64_t chunks = (document.length + kTile - 1) / kTile;
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * kTile;
    const int64_t count = std::min(kTile, document.length - first);
    const int64_t token = document.begin + first;
    if (chunk + 1 < chunks) {
      m.load_keys(token, count);
      gemm_serial(Transpose::kNo, Transpose::kYes, count, m.rows, m.width, 1.0f, m.v, m.width,
                  m.state, m.width, 0.0f, m.expanded, m.rows);
      std::fill(m.dk, m.dk + count * m.f, 0.0f);
      m.psi.contract(m.dk, m.expanded, m.k, count);
      for (int64_t i = 0; i < count; ++i) {
        float* dk = head.dk.row(token + i);
        for (int64_t c = 0; c < m.f; ++c) dk[c] += m.dk[i * m.f + c];
      }
      m.psi.expand(m.expanded, m.k, count);
      const Matrix dv = head.dv.from(token, 0);
      gemm_serial(Transpose::kNo, Transpose::kNo, count, head.e, m.rows, 1.0f, m.expanded, m.rows,
                  m.state, m.width, 1.0f, dv.data, dv.stride);
    }
    if (chunk == 0) return;
    m.load_queries(token, count);
    m.load_gradients(token, count);
    m.phi.expand(m.expanded, m.q, count);
    gemm_serial(Transpose::kYes, Transpose::kNo, m.rows, m.width, count, 1.0f, m.expanded, m.rows,
                m.g, m.width, 1.0f, m.state, m.width);
  }
}

void backward_document(const Document& document, const Head& head, Scratch scratch) {
  const Work m(scratch, head);
  zero(head.dk.from(document.begin, 0), document.length, head.f);
  zero(head.dv.from(document.begin, 0), document.length, head.e);
  backward_queries(document, head, m);
  if (!head.params.quadratic) backward_keys(document, head, m);
}

// Runs body(document, head, scratch) for every head of every document.
template <typename Op, typename Body>
void for_each_head(const Op& op, const Buffer& scratch, Body&& body) {
  const std::vector<Document> documents = documents_by_length(op.sequences, op.q_THf.rows());
  const auto heads = make_heads<Head>(op);
  const int64_t tasks = static_cast<int64_t>(documents.size()) * op.params.heads;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    body(documents[task / op.params.heads], heads[task % op.params.heads], Scratch(scratch));
  }
}

template <typename Op>
Buffer psi_scratch(const Stream& s, const Op& op) {
  const int64_t f = op.k_THf.cols() / op.params.heads;
  const int64_t e = op.v_THe.cols() / op.params.heads;
  return thread_scratch(s, "rebased", scratch_floats(f, e, make_psi(f, op.params).rows()));
}

}  // namespace

Buffer scratch(const Stream& s, const RebasedForward& op) {
  return psi_scratch(s, op);
}
Buffer scratch(const Stream& s, const RebasedBackward& op) {
  return psi_scratch(s, op);
}
Buffer scratch(const Stream& s, const RebasedState& op) {
  return psi_scratch(s, op);
}

void run(Cpu, Stream& /*s*/, const RebasedForward& t, const Buffer& scratch) {
  for_each_head(t, scratch, forward_document);
}

void run(Cpu, Stream& /*s*/, const RebasedBackward& t, const Buffer& scratch) {
  for_each_head(t, scratch, backward_document);
}

void run(Cpu, Stream& /*s*/, const RebasedState& op, const Buffer& scratch) {
  const int64_t tokens = op.k_THf.rows();
  const RebasedForward t = {.o_THe = op.v_THe,
                            .den_HT = op.state_Re,
                            .q_THf = op.k_THf,
                            .k_THf = op.k_THf,
                            .v_THe = op.v_THe,
                            .params = op.params};
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t h = 0; h < op.params.heads; ++h) {
    const Head head(t, h);  // only its keys and values are read
    const Work m(Scratch(scratch), head);
    m.clear_state();
    for (int64_t first = 0; first < tokens; first += kTile) {
      const int64_t count = std::min(kTile, tokens - first);
      m.load_keys(first, count);
      m.add_keys_to_state(count);
    }
    std::copy_n(m.state, m.rows * m.width, op.state_Re.f32() + h * m.rows * m.width);
  }
}

void run(Cpu, Stream& /*s*/, const RebasedDecode& t) {
  const int64_t f = t.q_BHf.cols() / t.params.heads;
  const int64_t e = t.v_BHe.cols() / t.params.heads;
  const Expansion psi = make_psi(f, t.params);
  const Expansion phi = make_phi(f, t.params);
  const int64_t rows = psi.rows();
  const int64_t tasks = t.q_BHf.rows() * t.params.heads;
#pragma omp parallel for
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t b = task / t.params.heads;
    const int64_t h = task % t.params.heads;
    float* state = t.state_BRe.f32() + (b * t.params.heads + h) * rows * (e + 1);
    if (t.positions_B.i32()[b] == 0) std::fill_n(state, rows * (e + 1), 0.0f);
    std::vector<float> q(f), of_k(rows), of_q(rows), y(e + 1);
    pack(q.data(), Matrix(t.q_BHf).from(b, h * f), 1, 1, f, t.params.scale);
    psi.expand(of_k.data(), Matrix(t.k_BHf).from(b, h * f).data, 1);
    phi.expand(of_q.data(), q.data(), 1);
    const float* v = Matrix(t.v_BHe).from(b, h * e).data;
    for (int64_t r = 0; r < rows; ++r, state += e + 1) {
      for (int64_t c = 0; c < e; ++c) state[c] += of_k[r] * v[c];
      state[e] += of_k[r];
      for (int64_t c = 0; c <= e; ++c) y[c] += of_q[r] * state[c];
    }
    float* o = Matrix(t.o_BHe).from(b, h * e).data;
    for (int64_t c = 0; c < e; ++c) o[c] = y[c] / (y[e] + t.params.eps);
  }
}

}  // namespace sbtrain::ops::cpu
