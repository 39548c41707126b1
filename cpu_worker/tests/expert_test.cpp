// SPDX-License-Identifier: Apache-2.0
//
// Every kernel of every instruction set against the double-precision reference, and its invariance: the same
// bits for any number of threads, and (row kernels) for a row alone and among others.
//
// usage: expert_test [ISA]    default: all that this CPU has
#include "executor.h"
#include "isa.h"
#include "reference.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr uint32_t kMaxRows = 300, kTopk = 3, kExperts = 5;
constexpr double kFloatTolerance = 1e-5;
// A rounding of h to bf16 may fall to the other side than in the reference.
constexpr double kBf16Tolerance = 4e-3;

struct Shape {
  uint32_t hidden, intermediate;
};
// Tails of every kind; from the third on AMX tiles take them, but not the last.
constexpr Shape kShapes[] = {{72, 40}, {33, 17}, {128, 64}, {64, 96}, {64, 256}, {40, 200}};

struct Bench {
  TestRing ring{{1, kMaxRows, 4, 256, 4 << 20, 0}};
  ft::Team team1{1, {}, 0}, team3{3, {}, 20'000};
  ft::Executor one{team1}, three{team3};
  std::vector<ft_isa> isas;
  size_t cases = 0;
};

std::vector<float> run(ft::Executor& executor, ft::Team& team, const ft::Layer& layer, TestRing& ring,
                       const JobCase& j, uint32_t first_row = 0) {
  auto [rows, topk, dtype, shared_expert, shared_begin] = j;
  uint32_t hidden = layer.table.hidden, bytes = dtype == FT_DTYPE_FP32 ? 4 : 2;
  std::vector<float> results(size_t(rows) * hidden, NAN);
  ft::JobData job{rows,
                  topk,
                  dtype,
                  ring.routes(1) + first_row * topk,
                  ring.weights(1) + first_row * topk,
                  static_cast<std::byte*>(ring.rows(1)) + size_t(first_row) * hidden * bytes,
                  results.data(),
                  {shared_expert, shared_begin}};
  team.begin();
  ft::Outcome outcome = executor.run(layer, job);
  team.end();
  CHECK(outcome.status == FT_OK, outcome.status);
  return results;
}

std::string describe(const LayerCase& l, const JobCase& j) {
  return text("format ", l.format, " activation ", l.activation, " flags ", l.flags, " biases ", l.biases,
              " limit ", l.limit, " H ", l.hidden, " I ", l.intermediate, " rows ", j.rows, " dtype ",
              j.row_dtype, " shared ", j.shared_expert, " from ", j.shared_begin);
}

void check_isa(Bench& b, Random& random, ft_isa isa, const ReferenceResults& expected, bool bf16_inside,
               const JobCase& j, const std::string& what) {
  ft::Layer layer = ft::attach_layer(b.ring.memory, 0, isa);
  CHECK(layer.status == FT_OK, layer.status, what);
  std::vector<float> got = run(b.one, b.team1, layer, b.ring, j);
  double error = relative_error(got.data(), expected);
  CHECK(error < (bf16_inside ? kBf16Tolerance : kFloatTolerance), error, " ", what);
  std::vector<float> again = run(b.three, b.team3, layer, b.ring, j);
  CHECK(memcmp(got.data(), again.data(), got.size() * 4) == 0, "threads change the bits; ", what);
  b.cases++;
  if (layer.kernels[j.row_dtype].many) return;
  uint32_t row = uint32_t(random() % j.rows), hidden = layer.table.hidden;
  JobCase one = j;
  one.rows = 1;
  std::vector<float> alone = run(b.one, b.team1, layer, b.ring, one, row);
  CHECK(memcmp(alone.data(), &got[size_t(row) * hidden], hidden * 4) == 0, "row ", row, " alone differs; ",
        what);
}

bool multiplies_bf16(TestRing& ring, ft_isa isa, uint32_t row_dtype) {
  return ft::attach_layer(ring.memory, 0, isa).kernels[row_dtype].few->element_bytes == 2;
}

void check_job(Bench& b, Random& random, const LayerCase& l, const ReferenceLayer& reference,
               const JobCase& j) {
  ReferenceJob job = make_job(random, b.ring, 1, 0, l, j);
  ReferenceResults expected[2];
  for (ft_isa isa : b.isas) {
    bool bf16_inside = multiplies_bf16(b.ring, isa, j.row_dtype);
    if (expected[bf16_inside].values.empty())
      expected[bf16_inside] = reference_results(reference, job, bf16_inside);
    check_isa(b, random, isa, expected[bf16_inside], bf16_inside, j,
              text(ft::isa_name(isa), " ", describe(l, j)));
  }
}

// Every other job shares an expert, from any feature that is allowed.
JobCase draw_sharing(Random& random, const LayerCase& l, JobCase j) {
  if (random() % 2) return j;
  j.shared_expert = int32_t(random() % l.experts);
  j.shared_begin = uint32_t(random() % (l.intermediate / FT_SHARED_STEP + 1)) * FT_SHARED_STEP;
  return j;
}

void check_layer(Bench& b, Random& random, const LayerCase& l) {
  b.ring.clear_banks();
  ReferenceLayer reference = make_layer(random, b.ring, 0, l);
  auto check = [&](uint32_t rows, uint32_t dtype) {
    check_job(b, random, l, reference, draw_sharing(random, l, {rows, kTopk, dtype}));
  };
  for (uint32_t rows : {1u, 2u, 7u, 64u}) {
    for (uint32_t dtype : {FT_DTYPE_BF16, FT_DTYPE_FP16, FT_DTYPE_FP32})
      if (rows < 64 || random() % 2) check(rows, dtype);
  }
  if (random() % 4 == 0) check(kMaxRows, uint32_t(1 + random() % 3));
}

// All formats, activations, layouts, biases and places of the router weight; the shape is drawn.
void check_all(Bench& b, Random& random) {
  constexpr uint32_t kGated = FT_LAYER_GATED, kInterleaved = FT_LAYER_GATED | FT_LAYER_INTERLEAVED;
  for (uint32_t format : {FT_FORMAT_BF16, FT_FORMAT_FP16, FT_FORMAT_FP32})
    for (uint32_t activation = FT_ACT_SILU; activation <= FT_ACT_SWIGLU_OAI; activation++)
      for (uint32_t layout : {0u, kGated, kInterleaved})
        for (bool biases : {false, true})
          for (uint32_t on_input : {0u, uint32_t(FT_LAYER_WEIGHT_ON_INPUT)}) {
            if (activation == FT_ACT_SWIGLU_OAI && layout == 0) continue;
            Shape shape = kShapes[random() % std::size(kShapes)];
            float limit = random() % 2 ? 1.5f : 0.0f;
            check_layer(b, random,
                        {format, activation, layout | on_input, biases, kExperts, shape.hidden,
                         shape.intermediate, limit, 1.702f, random() % 2 ? 2.5f : 1.0f});
          }
}

void no_routes_give_zeros(Bench& b, Random& random, ft_isa isa) {
  b.ring.clear_banks();
  LayerCase l{FT_FORMAT_BF16, FT_ACT_SILU, FT_LAYER_GATED, false, kExperts, 64, 32, 0, 0, 1};
  make_layer(random, b.ring, 0, l);
  make_job(random, b.ring, 1, 0, l, {5, kTopk, FT_DTYPE_BF16});
  for (uint32_t i = 0; i < 5 * kTopk; i++) b.ring.routes(1)[i] = -1;
  ft::Layer layer = ft::attach_layer(b.ring.memory, 0, isa);
  for (float x : run(b.three, b.team3, layer, b.ring, {5, kTopk, FT_DTYPE_BF16})) CHECK(x == 0.0f, x);
}

// Every number of rows that decoding has, with an expert shared from every feature that is allowed.
void shared_experts_at_every_number_of_rows(Bench& b, Random& random) {
  constexpr uint32_t kHidden = 64, kIntermediate = 192;
  for (uint32_t format : {FT_FORMAT_BF16, FT_FORMAT_FP16, FT_FORMAT_FP32}) {
    b.ring.clear_banks();
    LayerCase l{format, FT_ACT_SILU, FT_LAYER_GATED, true, kExperts, kHidden, kIntermediate, 0, 0, 1};
    ReferenceLayer reference = make_layer(random, b.ring, 0, l);
    for (uint32_t rows = 1; rows <= 40; rows++)
      for (uint32_t begin = 0; begin <= kIntermediate; begin += FT_SHARED_STEP)
        check_job(b, random, l, reference, {rows, kTopk, format, int32_t(random() % kExperts), begin});
  }
}

// Large inputs must saturate, not overflow to NaN; NaN in a row must stay in that row.
void extremes_stay_where_they_are(Bench& b, Random& random, ft_isa isa) {
  for (uint32_t activation = FT_ACT_SILU; activation <= FT_ACT_SWIGLU_OAI; activation++) {
    b.ring.clear_banks();
    LayerCase l{FT_FORMAT_FP32, activation, FT_LAYER_GATED, false, kExperts, 64, 32, 0, 1.702f, 1};
    make_layer(random, b.ring, 0, l);
    make_job(random, b.ring, 1, 0, l, {3, kTopk, FT_DTYPE_FP32});
    float* rows = static_cast<float*>(b.ring.rows(1));
    for (uint32_t i = 0; i < 64; i++) rows[64 + i] *= 1e4f, rows[128 + i] = NAN;
    for (uint32_t i = 0; i < 3 * kTopk; i++) b.ring.routes(1)[i] = int32_t(i % kExperts);
    ft::Layer layer = ft::attach_layer(b.ring.memory, 0, isa);
    std::vector<float> got = run(b.three, b.team3, layer, b.ring, {3, kTopk, FT_DTYPE_FP32});
    for (uint32_t i = 0; i < 128; i++) CHECK(std::isfinite(got[i]), got[i], " activation ", activation);
    for (uint32_t i = 128; i < 192; i++) CHECK(std::isnan(got[i]), got[i], " activation ", activation);
  }
}

// Enough rows on wide layers that the job is cut into several groups, and one expert into several runs.
void many_groups(ft_isa isa, Random& random) {
  constexpr uint32_t kRows = 3000, kHidden = 512, kIntermediate = 4096;
  TestRing ring({1, kRows, 2, kHidden, 40 << 20, 0});
  LayerCase l{FT_FORMAT_BF16, FT_ACT_SILU, FT_LAYER_GATED, false, 2, kHidden, kIntermediate, 0, 0, 1};
  ReferenceLayer reference = make_layer(random, ring, 0, l);
  ReferenceJob job = make_job(random, ring, 1, 0, l, {kRows, 2, FT_DTYPE_BF16});
  ft::Layer layer = ft::attach_layer(ring.memory, 0, isa);
  ft::Team team(2, {}, 20'000);
  ft::Executor executor(team);
  std::vector<float> got = run(executor, team, layer, ring, {kRows, 2, FT_DTYPE_BF16});
  bool bf16_inside = layer.kernels[FT_DTYPE_BF16].few->element_bytes == 2;
  for (uint32_t row : {0u, 1u, 1499u, kRows - 1}) {
    ReferenceJob one{{1, 2, FT_DTYPE_BF16},
                     {&job.rows[row * kHidden], &job.rows[row * kHidden] + kHidden},
                     {&job.weights[row * 2], &job.weights[row * 2] + 2},
                     {&job.routes[row * 2], &job.routes[row * 2] + 2}};
    double error =
        relative_error(&got[size_t(row) * kHidden], reference_results(reference, one, bf16_inside));
    CHECK(error < (bf16_inside ? kBf16Tolerance : kFloatTolerance), error, " row ", row);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Random random(seed());
  Bench bench;
  for (uint32_t isa = FT_ISA_SCALAR; isa <= uint32_t(ft::detect_isa()); isa++)
    if (argc < 2 || ft::isa_from_name(argv[1]) == ft_isa(isa)) bench.isas.push_back(ft_isa(isa));
  check_all(bench, random);
  shared_experts_at_every_number_of_rows(bench, random);
  for (ft_isa isa : bench.isas) {
    no_routes_give_zeros(bench, random, isa);
    extremes_stay_where_they_are(bench, random, isa);
    if (isa != FT_ISA_SCALAR) many_groups(isa, random);
    printf("%s\n", ft::isa_name(isa));
  }
  return report("experts", bench.cases) || bench.cases == 0;
}
