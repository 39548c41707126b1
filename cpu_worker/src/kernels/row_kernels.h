// SPDX-License-Identifier: Apache-2.0
//
// Kernels on row-major packed rows, for every format: dot products of a few weight rows with a few token
// rows held in registers.
//
// A `Dot` policy says what is multiplied:
//   Element                         type of packed rows and packed h
//   Row                             a weight row: Row(matrix, out), load(k) -> Weights, load_partial(k, n)
//   kStep                           elements consumed by one multiply_add
//   kRows, kOuts                    register block: token rows x weight rows
//   kWideRows, kWideOuts            the same for at most kWideRows token rows
//   zero, load_rows, multiply_add, sum, sum4
//
// Each output element has one vector accumulator that runs over k from first_in to the end of the row,
// whatever the register block: the same bits for one row and for many.
#pragma once

#include "activation.h"
#include "kernels.h"
#include "target.h"

namespace ft::FT_TARGET {

FT_INLINE void store_element(float* p, float x) { *p = x; }
FT_INLINE void store_element(uint16_t* p, float x) { *p = bf16_from_float(x); }

FT_INLINE float load_element(const void* rows, uint32_t dtype, size_t i) {
  switch (dtype) {
    case FT_DTYPE_BF16:
      return float_from_bf16(static_cast<const uint16_t*>(rows)[i]);
    case FT_DTYPE_FP16:
      return float_from_fp16(static_cast<const uint16_t*>(rows)[i]);
    default:
      return static_cast<const float*>(rows)[i];
  }
}

// Float32 products: any format, any row dtype.
template <class V, class Format>
struct FloatDot {
  using Element = float;
  using Row = typename Format::template Row<V>;
  using Weights = typename V::Reg;
  using Acc = typename V::Reg;
  static constexpr uint32_t kStep = V::kWidth;
  static constexpr uint32_t kRows = V::kRows, kWideRows = V::kWideRows;
  static constexpr int kOuts = V::kOuts, kWideOuts = V::kWideOuts;

  static FT_INLINE Acc zero() { return V::zero(); }
  static FT_INLINE typename V::Reg load_rows(const float* p) { return V::load(p); }
  static FT_INLINE Acc multiply_add(typename V::Reg w, typename V::Reg x, Acc acc) {
    return V::multiply_add(w, x, acc);
  }
  static FT_INLINE float sum(Acc acc) { return V::sum(acc); }
  static FT_INLINE void sum4(const Acc* acc, float* to) { V::sum4(acc, to); }
};

// Which weight rows: feature i is row first + i * step.
struct RowSlice {
  uint32_t first;
  uint32_t step;  // 0: none
};

// c[r * c_stride + o] = weight row o . token row r, for OUTS x ROWS elements. PREFETCH: asks for the OUTS
// weight rows of `next` meanwhile, because the hardware prefetcher starts anew at every page.
template <class Dot, int OUTS, int ROWS, bool PREFETCH>
__attribute__((noinline)) void dot_block(const Matrix& m, RowSlice slice, RowSlice next,
                                         const typename Dot::Element* x, size_t x_stride, float* c,
                                         size_t c_stride) {
  using Row = typename Dot::Row;
  auto row = [&](int o) FT_LAMBDA { return Row(m, slice.first + uint32_t(o) * slice.step); };
  auto next_row = [&](int o) FT_LAMBDA { return Row(m, next.first + uint32_t(o) * next.step); };
  typename Dot::Acc acc[ROWS][OUTS];
  for (int r = 0; r < ROWS; r++)
    for (int o = 0; o < OUTS; o++) acc[r][o] = Dot::zero();
  auto step = [&](uint32_t k, auto load) FT_LAMBDA {
    typename Dot::Weights w[OUTS];
    for (int o = 0; o < OUTS; o++) w[o] = load(row(o), k);
    for (int r = 0; r < ROWS; r++) {
      auto xs = Dot::load_rows(x + r * x_stride + k);
      for (int o = 0; o < OUTS; o++) acc[r][o] = Dot::multiply_add(w[o], xs, acc[r][o]);
    }
  };
  uint32_t k = m.first_in;
  for (; k + Dot::kStep <= m.ins; k += Dot::kStep) {
    if constexpr (PREFETCH)
      for (int o = 0; o < OUTS; o++) next_row(o).prefetch(k);
    step(k, [](Row w, uint32_t k) FT_LAMBDA { return w.load(k); });
  }
  if (k < m.ins) step(k, [n = m.ins - k](Row w, uint32_t k) FT_LAMBDA { return w.load_partial(k, n); });
  for (int r = 0; r < ROWS; r++) {
    for (int o = 0; o + 4 <= OUTS; o += 4) Dot::sum4(acc[r] + o, c + r * c_stride + o);
    for (int o = OUTS / 4 * 4; o < OUTS; o++) c[r * c_stride + o] = Dot::sum(acc[r][o]);
  }
}

// dot_block for 1 .. ROWS token rows, known at run time.
template <class Dot, int OUTS, uint32_t ROWS, bool PREFETCH>
FT_INLINE void dot_few(const Matrix& m, RowSlice slice, RowSlice next, const typename Dot::Element* x,
                       size_t x_stride, uint32_t rows, float* c, size_t c_stride) {
  if constexpr (ROWS > 1)
    if (rows < ROWS)
      return dot_few<Dot, OUTS, ROWS - 1, PREFETCH>(m, slice, next, x, x_stride, rows, c, c_stride);
  dot_block<Dot, OUTS, ROWS, PREFETCH>(m, slice, next, x, x_stride, c, c_stride);
}

// Features [0, n) of the slice for at most ROWS token rows. PREFETCH as in dot_block; `after`, unless its
// step is 0, are the weight rows that come after the slice.
template <class Dot, int OUTS, uint32_t ROWS, bool PREFETCH>
inline void dot_group(const Matrix& m, RowSlice slice, uint32_t n, RowSlice after,
                      const typename Dot::Element* x, size_t x_stride, uint32_t rows, float* c,
                      size_t c_stride) {
  auto at = [&](uint32_t o) FT_LAMBDA { return RowSlice{slice.first + o * slice.step, slice.step}; };
  uint32_t o = 0;
  for (; o + OUTS <= n; o += OUTS) {
    RowSlice next = o + 2 * OUTS <= n ? at(o + OUTS) : after;
    if (PREFETCH && next.step)
      dot_few<Dot, OUTS, ROWS, true>(m, at(o), next, x, x_stride, rows, c + o, c_stride);
    else
      dot_few<Dot, OUTS, ROWS, false>(m, at(o), next, x, x_stride, rows, c + o, c_stride);
  }
  for (; o < n; o++) dot_few<Dot, 1, ROWS, false>(m, at(o), after, x, x_stride, rows, c + o, c_stride);
}

// The same for any number of token rows. A group of these stays in the L1 cache while the band passes by;
// the first group brings the band from memory into the L2 cache.
template <class Dot, int OUTS, uint32_t ROWS>
FT_INLINE void dot_band(const Matrix& m, RowSlice slice, uint32_t n, RowSlice after,
                        const typename Dot::Element* x, size_t x_stride, uint32_t rows, float* c,
                        size_t c_stride) {
  dot_group<Dot, OUTS, ROWS, true>(m, slice, n, after, x, x_stride, smaller(ROWS, rows), c, c_stride);
  for (uint32_t r = ROWS; r < rows; r += ROWS)
    dot_group<Dot, OUTS, ROWS, false>(m, slice, n, after, x + r * x_stride, x_stride, smaller(ROWS, rows - r),
                                      c + r * c_stride, c_stride);
}

template <class Dot>
FT_INLINE void dot_tile(const Matrix& m, RowSlice slice, uint32_t n, RowSlice after,
                        const typename Dot::Element* x, size_t x_stride, uint32_t rows, float* c,
                        size_t c_stride) {
  if (rows <= Dot::kWideRows)
    dot_band<Dot, Dot::kWideOuts, Dot::kWideRows>(m, slice, n, after, x, x_stride, rows, c, c_stride);
  else
    dot_band<Dot, Dot::kOuts, Dot::kRows>(m, slice, n, after, x, x_stride, rows, c, c_stride);
}

template <class Element>
FT_INLINE void pack_row(const PackArgs& a, uint32_t i, Element* to) {
  size_t from = size_t(a.row_index[i]) * a.hidden;
  float factor = a.factor ? a.factor[i] : 1.0f;
  switch (a.row_dtype) {  // one loop for each dtype, so that each is vectorised
    case FT_DTYPE_BF16:
      for (uint32_t k = 0; k < a.hidden; k++)
        store_element(to + k, factor * load_element(a.rows, FT_DTYPE_BF16, from + k));
      break;
    case FT_DTYPE_FP16:
      for (uint32_t k = 0; k < a.hidden; k++)
        store_element(to + k, factor * load_element(a.rows, FT_DTYPE_FP16, from + k));
      break;
    default:
      for (uint32_t k = 0; k < a.hidden; k++)
        store_element(to + k, factor * load_element(a.rows, FT_DTYPE_FP32, from + k));
  }
  for (uint32_t k = a.hidden; k < round_up(a.hidden, kPackedPadding); k++) store_element(to + k, 0.0f);
}

template <class Dot>
struct RowKernels {
  using Element = typename Dot::Element;

  static void pack(const PackArgs& a) {
    Element* to = static_cast<Element*>(a.packed);
    uint32_t stride = round_up(a.hidden, kPackedPadding);
    for (uint32_t i = 0; i < a.count; i++) pack_row(a, i, to + size_t(i) * stride);
  }

  static void gate_up(const GateUpArgs& a) {
    const Element* x = static_cast<const Element*>(a.packed);
    Element* h = static_cast<Element*>(a.h);
    size_t x_stride = round_up(a.weights.ins, kPackedPadding);
    size_t h_stride = round_up(a.intermediate, kPackedPadding);
    for (uint32_t r = 0; r < a.rows; r += Dot::kRows)
      gate_up_rows(a, x + r * x_stride, x_stride, smaller(Dot::kRows, a.rows - r), h + r * h_stride,
                   h_stride);
  }

  static void down(const DownArgs& a) {
    const Element* h = static_cast<const Element*>(a.h);
    size_t h_stride = round_up(a.weights.ins, kPackedPadding);
    size_t outs = a.weights.outs;
    uint32_t n = a.end - a.begin;
    RowSlice after{a.end, a.goes_on ? 1u : 0u};
    for (uint32_t r = 0; r < a.rows; r += kBlockRows) {
      uint32_t rows = smaller(kBlockRows, a.rows - r);
      float* c = a.partial + r * outs + a.begin;
      dot_tile<Dot>(a.weights, {a.begin, 1}, n, after, h + r * h_stride, h_stride, rows, c, outs);
      if (!a.weights.bias) continue;
      for (uint32_t i = 0; i < rows; i++) add_bias(c + i * outs, a.weights.bias, a.begin, 1, n);
    }
  }

  static constexpr KernelSet set(const char* name) { return {name, 1, sizeof(Element), pack, gate_up, down}; }

 private:
  // Token rows that stay in the L2 cache while a band of weights passes by.
  static constexpr uint32_t kBlockRows = 48;
  static_assert(2 * kBlockRows * kMaxBand <= kScratchFloats);

  // gate and up of the band for at most kBlockRows rows into scratch, then h.
  static void gate_up_rows(const GateUpArgs& a, const Element* x, size_t x_stride, uint32_t rows, Element* h,
                           size_t h_stride) {
    const Matrix& m = a.weights;
    bool gated = a.activation.gated;
    uint32_t n = a.end - a.begin, step = gated && a.activation.interleaved ? 2 : 1;
    RowSlice gate_rows{a.begin * step, step};
    RowSlice up_rows{step == 2 ? gate_rows.first + 1 : a.intermediate + a.begin, step};
    RowSlice after{a.end * step, a.goes_on ? step : 0};
    float *gate = a.scratch, *up = a.scratch + size_t(kBlockRows) * n;
    dot_tile<Dot>(m, gate_rows, n, gated ? up_rows : after, x, x_stride, rows, gate, n);
    if (gated) dot_tile<Dot>(m, up_rows, n, after, x, x_stride, rows, up, n);
    for (uint32_t r = 0; r < rows; r++) {
      if (m.bias) add_bias(gate + r * n, m.bias, gate_rows.first, step, n);
      if (m.bias && gated) add_bias(up + r * n, m.bias, up_rows.first, step, n);
      activate(a.activation, gate + r * n, up + r * n, n);
      store_h(gate + r * n, a.begin, a.end, a.intermediate, h + r * h_stride);
    }
  }

  // The piece that holds the last feature also writes the padding.
  static FT_INLINE void store_h(const float* values, uint32_t begin, uint32_t end, uint32_t intermediate,
                                Element* h) {
    for (uint32_t i = begin; i < end; i++) store_element(h + i, values[i - begin]);
    if (end < intermediate) return;
    for (uint32_t i = end; i < round_up(end, kPackedPadding); i++) store_element(h + i, 0.0f);
  }
};

// Kernels of a format that this instruction set multiplies directly; a format specialises it.
template <class Format>
struct NativeKernels {
  static KernelChoice choose(uint32_t /*row_dtype*/, uint32_t /*hidden*/, uint32_t /*intermediate*/) {
    return {nullptr, nullptr, UINT32_MAX};
  }
};

}  // namespace ft::FT_TARGET
