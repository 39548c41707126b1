// SPDX-License-Identifier: Apache-2.0
//
// BF16 weights times BF16 rows on AMX tiles, for several rows of one expert.
//
//   A   16 weight rows x 32 k, straight from the pool: no repacking of weights
//   B   32 k x 16 token rows, in pairs of k: packed rows are blocks of 16 rows, [ins / 2][16 rows][2]
//   C   16 features x 16 token rows, float32
//
// Two A and two B tiles make four C tiles. In gate_up the two A tiles are gate and up of the same features,
// so that C is ready for the activation, and h comes out paired by features, as B of the down projection.
#pragma once

#include <immintrin.h>

#include "../kernels/activation.h"
#include "bf16_dot.h"

namespace ft::FT_TARGET {

constexpr uint32_t kTile = 16;                   // rows of any tile
constexpr uint32_t kTileK = 32;                  // k of an A or B tile
constexpr uint32_t kTileFloats = kTile * kTile;  // of a C tile
// From this many rows of one expert on, tiles beat dot products although their last rows are padding.
constexpr uint32_t kAmxRows = 4;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

FT_INLINE void configure_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = kTile;
  _tile_loadconfig(&config);
}

// Up to two blocks of 16 weight rows; rows of a block are `stride` elements apart.
struct WeightTiles {
  const uint16_t* block[2];
  uint32_t count;
  size_t stride;
};

// Asks for columns [k, k + 32) of the blocks: one cache line of each row.
FT_INLINE void prefetch_tiles(const WeightTiles& w, uint32_t k) {
  for (uint32_t b = 0; b < w.count; b++)
    for (uint32_t i = 0; i < kTile; i++) __builtin_prefetch(w.block[b] + i * w.stride + k, 0, 2);
}

// Weights are fetched this many columns ahead: the loads of a tile touch 16 rows, mostly in as many pages,
// more streams than a hardware prefetcher follows.
constexpr uint32_t kFetchAhead = 256;

// While columns [k, k + 32) of w are multiplied, fetches from w and then from the beginning of `next`.
FT_INLINE void fetch_ahead(const WeightTiles& w, const WeightTiles* next, uint32_t k, const Matrix& m) {
  uint32_t ahead = k + kFetchAhead;
  if (ahead < m.ins)
    prefetch_tiles(w, ahead);
  else if (next)
    prefetch_tiles(*next, m.first_in + ahead - m.ins);
}

// c [A][B][16][16] = weight block a . row block b. Row blocks follow each other in x. FETCH: w is not in the
// cache yet; `next` (may be null) follows it.
template <int A, int B, bool FETCH>
inline void multiply_tiles(const Matrix& m, const WeightTiles& w, const uint16_t* x, const WeightTiles* next,
                           float* c) {
  size_t stride = w.stride * sizeof(uint16_t);
  const uint16_t* x1 = x + size_t(m.ins) * kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (uint32_t k = m.first_in; k < m.ins; k += kTileK) {
    if constexpr (FETCH) fetch_ahead(w, next, k, m);
    _tile_loadd(4, w.block[0] + k, stride);
    _tile_loadd(6, x + size_t(k) * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (B == 2) {
      _tile_loadd(7, x1 + size_t(k) * kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (A == 2) {
      _tile_loadd(5, w.block[1] + k, stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (A == 2 && B == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, 64);
  if constexpr (B == 2) _tile_stored(1, c + kTileFloats, 64);
  if constexpr (A == 2) _tile_stored(2, c + B * kTileFloats, 64);
  if constexpr (A == 2 && B == 2) _tile_stored(3, c + 3 * kTileFloats, 64);
}

template <bool FETCH>
FT_INLINE void multiply_tiles(const Matrix& m, const WeightTiles& w, const uint16_t* x, uint32_t row_blocks,
                              const WeightTiles* next, float* c) {
  if (w.count == 2 && row_blocks == 2) return multiply_tiles<2, 2, FETCH>(m, w, x, next, c);
  if (w.count == 2) return multiply_tiles<2, 1, FETCH>(m, w, x, next, c);
  if (row_blocks == 2) return multiply_tiles<1, 2, FETCH>(m, w, x, next, c);
  multiply_tiles<1, 1, FETCH>(m, w, x, next, c);
}

// The first rows of a piece bring the weights into the cache for the others.
FT_INLINE void multiply_tiles(const Matrix& m, const WeightTiles& w, const WeightTiles* next,
                              const uint16_t* x, uint32_t row, uint32_t row_blocks, float* c) {
  const uint16_t* from = x + size_t(row) * m.ins;
  if (row == 0) return multiply_tiles<true>(m, w, from, row_blocks, next, c);
  multiply_tiles<false>(m, w, from, row_blocks, nullptr, c);
}

// Transposes a 16 x 16 matrix of 32-bit elements held in 16 registers.
FT_INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// 32 elements of a row, times the factor when there is one (rounded to BF16 again).
FT_INLINE __m512i load_packed_row(const PackArgs& a, uint32_t row, uint32_t k) {
  const uint16_t* p = static_cast<const uint16_t*>(a.rows) + size_t(a.row_index[row]) * a.hidden + k;
  if (!a.factor) return _mm512_loadu_si512(p);
  __m512 factor = _mm512_set1_ps(a.factor[row]);
  __m512 low = _mm512_mul_ps(Avx512Vector::load_bf16(p), factor);
  __m512 high = _mm512_mul_ps(Avx512Vector::load_bf16(p + 16), factor);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

struct AmxKernels {
  static void pack(const PackArgs& a) {
    uint16_t* to = static_cast<uint16_t*>(a.packed);
    for (uint32_t first = 0; first < a.count; first += kTile, to += size_t(kTile) * a.hidden) {
      for (uint32_t k = 0; k < a.hidden; k += kTileK) {
        __m512i r[kTile];
        for (uint32_t i = 0; i < kTile; i++)
          r[i] = first + i < a.count ? load_packed_row(a, first + i, k) : _mm512_setzero_si512();
        transpose(r);
        for (uint32_t i = 0; i < kTile; i++) _mm512_storeu_si512(to + size_t(k) * kTile + i * kTileK, r[i]);
      }
    }
  }

  static void gate_up(const GateUpArgs& a) {
    configure_tiles();
    const uint16_t* x = static_cast<const uint16_t*>(a.packed);
    uint16_t* h = static_cast<uint16_t*>(a.h);
    uint32_t step = a.activation.gated ? kTile : 2 * kTile;
    for (uint32_t f = a.begin; f < a.end; f += step) {
      WeightTiles w = gate_up_tiles(a, f), next = gate_up_tiles(a, f + step);
      for (uint32_t r = 0; r < a.rows; r += 2 * kTile) {
        uint32_t blocks = a.rows - r > kTile ? 2 : 1;
        multiply_tiles(a.weights, w, f + step < a.end ? &next : nullptr, x, r, blocks, a.scratch);
        for (uint32_t b = 0; b < blocks; b++)
          finish_h(a, f, a.scratch + b * kTileFloats, blocks * kTileFloats,
                   h + size_t(r + b * kTile) * a.intermediate);
      }
    }
    _tile_release();
  }

  static void down(const DownArgs& a) {
    configure_tiles();
    const uint16_t* h = static_cast<const uint16_t*>(a.h);
    constexpr uint32_t step = 2 * kTile;
    for (uint32_t o = a.begin; o < a.end; o += step) {
      WeightTiles w = down_tiles(a, o), next = down_tiles(a, o + step);
      for (uint32_t r = 0; r < a.rows; r += 2 * kTile) {
        uint32_t blocks = a.rows - r > kTile ? 2 : 1;
        multiply_tiles(a.weights, w, o + step < a.end ? &next : nullptr, h, r, blocks, a.scratch);
        for (uint32_t t = 0; t < w.count; t++)
          for (uint32_t b = 0; b < blocks; b++)
            store_partial(a, o + t * kTile, r + b * kTile, a.scratch + (t * blocks + b) * kTileFloats);
      }
    }
    _tile_release();
  }

 private:
  // Gate and up of features [f, f + 16), or features [f, f + 32) when not gated.
  static FT_INLINE WeightTiles gate_up_tiles(const GateUpArgs& a, uint32_t f) {
    const uint16_t* weights = static_cast<const uint16_t*>(a.weights.weights);
    size_t ins = a.weights.ins;
    if (!a.activation.gated)
      return {{weights + f * ins, weights + (f + kTile) * ins}, f + kTile < a.end ? 2u : 1u, ins};
    if (a.activation.interleaved) return {{weights + 2 * f * ins, weights + (2 * f + 1) * ins}, 2, 2 * ins};
    return {{weights + f * ins, weights + (a.intermediate + f) * ins}, 2, ins};
  }

  static FT_INLINE WeightTiles down_tiles(const DownArgs& a, uint32_t o) {
    const uint16_t* weights = static_cast<const uint16_t*>(a.weights.weights);
    size_t ins = a.weights.ins;
    return {{weights + o * ins, weights + (o + kTile) * ins}, o + kTile < a.end ? 2u : 1u, ins};
  }

  // The C tiles of one row block -> h. `second` floats after the first A tile's lies the second's.
  static FT_INLINE void finish_h(const GateUpArgs& a, uint32_t f, float* c, size_t second, uint16_t* h) {
    if (a.activation.gated) {
      uint32_t step = a.activation.interleaved ? 2 : 1;
      uint32_t up_row = step == 2 ? 2 * f + 1 : a.intermediate + f;
      add_feature_bias(a.weights.bias, f * step, step, c);
      add_feature_bias(a.weights.bias, up_row, step, c + second);
      activate(a.activation, c, c + second, kTileFloats);
      store_h(c, h + size_t(f) * kTile);
      return;
    }
    for (uint32_t t = 0; t < 2 && f + t * kTile < a.end; t++) {
      add_feature_bias(a.weights.bias, f + t * kTile, 1, c + t * second);
      activate(a.activation, c + t * second, nullptr, kTileFloats);
      store_h(c + t * second, h + size_t(f + t * kTile) * kTile);
    }
  }

  static FT_INLINE void add_feature_bias(const float* bias, uint32_t first, uint32_t step, float* c) {
    if (!bias) return;
    for (uint32_t i = 0; i < kTile; i++)
      for (uint32_t r = 0; r < kTile; r++) c[i * kTile + r] += bias[first + i * step];
  }

  // [16 features][16 rows] -> [8 pairs of features][16 rows][2]
  static FT_INLINE void store_h(const float* c, uint16_t* h) {
    for (uint32_t i = 0; i < kTile; i += 2) {
      __m256i even = (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(c + i * kTile));
      __m256i odd = (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(c + (i + 1) * kTile));
      __m512i pairs =
          _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
      _mm512_storeu_si512(h + i * kTile, pairs);
    }
  }

  // [16 features][16 rows] -> partial[row][feature], valid rows only.
  static FT_INLINE void store_partial(const DownArgs& a, uint32_t o, uint32_t row, const float* c) {
    __m512i r[kTile];
    for (uint32_t i = 0; i < kTile; i++) r[i] = _mm512_load_si512(c + i * kTile);
    transpose(r);
    __m512 bias = a.weights.bias ? _mm512_loadu_ps(a.weights.bias + o) : _mm512_setzero_ps();
    for (uint32_t i = 0; i < kTile && row + i < a.rows; i++)
      _mm512_storeu_ps(a.partial + size_t(row + i) * a.weights.outs + o,
                       _mm512_add_ps(_mm512_castsi512_ps(r[i]), bias));
  }
};

inline constexpr KernelSet kAmxKernels{
    "bf16_amx", kTile, sizeof(uint16_t), AmxKernels::pack, AmxKernels::gate_up, AmxKernels::down};

// Tiles take whole steps of k in both projections.
FT_INLINE bool tiles_fit(uint32_t hidden, uint32_t intermediate) {
  return hidden % kTileK == 0 && intermediate % kTileK == 0;
}

}  // namespace ft::FT_TARGET
