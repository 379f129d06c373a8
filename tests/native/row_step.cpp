// SPDX-License-Identifier: Apache-2.0
// The step of one row by one kernel, its device code as it is, on emulated threads; beside a plain reference.
// Arguments: tokens of the context, and seeds that draw in which order threads go on. FORM, EXPERT_FORM, HEAD_FORM,
// EXPERTS and HEAD_NORM say what the model is.
#include "row_step.cuh"

#include <cmath>
#include <numeric>

#include "fibers.h"

using namespace blink;

namespace {

constexpr bool kMixture = EXPERTS > 0;
constexpr int kHidden = 512, kHeadDim = 64, kQueries = 4, kKvHeads = 2, kBlockSize = 16, kLayers = 2, kVocab = 96;
constexpr int kWidth = kMixture ? 256 : 1024, kTopK = kMixture ? 4 : 0, kParts = 2, kSlots = 4, kBlocks = 6;
constexpr int kToken = kKvHeads * kHeadDim;
constexpr Form kForm = Form::FORM, kExpertForm = Form::EXPERT_FORM, kHeadForm = Form::HEAD_FORM;
using S = RowStepShape<kForm, kExpertForm, kHeadForm, kHidden, kWidth, EXPERTS, kTopK, kQueries, kKvHeads, kHeadDim,
                       kHeadDim, kBlockSize, kParts, kSlots, HEAD_NORM>;
using Numbers = std::vector<double>;

std::mt19937 draws(7);

double draw() { return std::normal_distribution<double>()(draws); }
double rounded(double value) { return to_float(to_bf16(float(value))); }

// Memory as a GPU's allocator gives it.
template <class T>
T* allocate(size_t count) {
  const size_t bytes = (count * sizeof(T) + 1023) / 1024 * 1024;
  T* memory = static_cast<T*>(std::aligned_alloc(1024, bytes));
  std::memset(static_cast<void*>(memory), 0, bytes);
  return memory;
}

Bf16* draw_vector(int size, double mean, double deviation) {
  Bf16* values = allocate<Bf16>(size);
  for (int i = 0; i < size; i++) values[i] = to_bf16(float(mean + deviation * draw()));
  return values;
}

// A weight as the kernel reads it, and what it stands for.
struct Weight {
  int rows, k;
  Matrix matrix;
  std::vector<float> plain;

  Numbers multiply(const Numbers& x, int first, int count) const {
    Numbers result(count);
    for (int row = 0; row < count; row++)
      result[row] = std::inner_product(x.begin(), x.end(), plain.begin() + size_t(first + row) * k, 0.0);
    return result;
  }
  Numbers multiply(const Numbers& x) const { return multiply(x, 0, rows); }
};

// An e4m3 between 1/8 and 2, either sign.
unsigned char draw_e4m3() {
  const unsigned bits = draws();
  return static_cast<unsigned char>((bits & 0x80) | (4 + (bits >> 8 & 3)) << 3 | (bits & 7));
}

// Where a column lies among its unit's, as quantized.cuh says: of e4m3 its byte, of 4 bits its byte and its half.
int place_in_unit(int column) { return column % 8 / 2 * 32 + column / 16 * 4 + column / 8 % 2 * 2 + column % 2; }
int byte_in_unit(int column) { return column % 8 / 2 * 32 + column / 32 * 4 + column % 2 * 2 + column / 16 % 2; }

void put_int4(char* values, const unsigned* groups, size_t row, int k, int column, double value, float& plain) {
  const unsigned word = groups[row * (k / kGroup) + column / kGroup];
  const int zero = int(word >> 16 & 127);
  const double scale = low_half(word);
  const int code = std::clamp(int(std::lround(value / scale)) + zero, 0, 15);
  plain = float((code - zero) * scale);
  values[row * k / 2 + column / 256 * 128 + byte_in_unit(column % 256)] |= char(code << (column / 8 % 2 * 4));
}

Weight draw_weight(Form form, int rows, int k) {
  Weight weight = {rows, k, {}, std::vector<float>(size_t(rows) * k)};
  char* values = allocate<char>(size_t(rows) * k * 2);
  float* scales = allocate<float>(rows);
  unsigned* groups = allocate<unsigned>(size_t(rows) * k / kGroup + 1);
  for (size_t i = 0; form == Form::kInt4 && i < size_t(rows) * k / kGroup; i++)
    groups[i] = to_half_pair(float((1 + i % 5 * 0.1) / std::sqrt(k) / 4), 0) |
                unsigned(to_bf16(-(128.0f + 5 + i % 6)).bits) << 16;
  for (int row = 0; row < rows; row++) {
    scales[row] = float((0.5 + row % 7 * 0.1) / std::sqrt(k));
    for (int column = 0; column < k; column++) {
      const size_t at = size_t(row) * k + column;
      if (form == Form::kBf16) {
        reinterpret_cast<Bf16*>(values)[at] = to_bf16(float(draw() / std::sqrt(k)));
        weight.plain[at] = to_float(reinterpret_cast<Bf16*>(values)[at]);
      } else if (form == Form::kInt4) {
        put_int4(values, groups, row, k, column, draw() / std::sqrt(k), weight.plain[at]);
      } else {
        const unsigned char code = draw_e4m3();
        const int place = form == Form::kFp8 ? column / 128 * 128 + place_in_unit(column % 128) : column;
        values[size_t(row) * k + place] = char(code);
        weight.plain[at] = from_e4m3(code) * scales[row];
      }
    }
  }
  weight.matrix = {values, scales, groups};
  return weight;
}

Numbers normalize(const Numbers& x, const Bf16* norm) {
  const double rate = 1 / std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / double(x.size()) + 1e-5);
  Numbers result(x.size());
  for (size_t i = 0; i < x.size(); i++) result[i] = rounded(x[i] * to_float(norm[i])) * rate;
  return result;
}

struct PlainLayer {
  Weight qkv, output, gate_up, down, router;
  Bf16 *attention_norm, *mlp_norm, *query_norm, *key_norm, *bias, *cache;
};

struct Model {
  int context, blocks;
  int *table, *zero, *length, *position, *slot;
  float* rotary;
  std::vector<PlainLayer> layers;
  LayerArgs* args = allocate<LayerArgs>(kLayers);
  Bf16 *embedding = draw_vector(kHidden, 0, 1), *norm = draw_vector(kHidden, 1, 0.1);
  Weight lm_head = draw_weight(kHeadForm, kVocab, kHidden);

  explicit Model(int tokens) : context(tokens), blocks((tokens + kBlockSize - 1) / kBlockSize + 1) {
    for (int** place : {&zero, &length, &position, &slot}) *place = allocate<int>(1);
    table = allocate<int>(blocks);
    for (int i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
    *length = context, *position = context - 1, *slot = int(cell(context - 1) / kToken);
    rotary = allocate<float>(size_t(context) * kHeadDim);
    for (int i = 0; i < context * kHeadDim; i++) {
      const double angle = i / kHeadDim * std::pow(1e4, -2.0 * (i % (kHeadDim / 2)) / kHeadDim);
      rotary[i] = float(i % kHeadDim < kHeadDim / 2 ? std::cos(angle) : std::sin(angle));
    }
    for (int i = 0; i < kLayers; i++) layers.push_back(draw_layer()), describe(layers[i], args[i]);
  }

  // Where a token's keys begin in the cache.
  long cell(int token) const { return (long(table[token / kBlockSize]) * kBlockSize + token % kBlockSize) * kToken; }
  long values() const { return long(blocks) * kBlockSize * kToken; }

  PlainLayer draw_layer() const {
    const int experts = kMixture ? EXPERTS : 1;
    return {draw_weight(kForm, S::qkv, kHidden),
            draw_weight(kForm, kHidden, S::attended),
            draw_weight(S::mlp_form, 2 * kWidth * experts, kHidden),
            draw_weight(S::mlp_form, kHidden * experts, kWidth),
            draw_weight(Form::kBf16, kMixture ? EXPERTS : 8, kHidden),
            draw_vector(kHidden, 1, 0.1),
            draw_vector(kHidden, 1, 0.1),
            draw_vector(kHeadDim, 1, 0.1),
            draw_vector(kHeadDim, 1, 0.1),
            HEAD_NORM ? nullptr : draw_vector(S::qkv, 0, 0.5),
            draw_vector(int(2 * values()), 0, 1)};
  }

  void describe(const PlainLayer& layer, LayerArgs& to) const {
    to.qkv = layer.qkv.matrix, to.output = layer.output.matrix, to.router = layer.router.matrix;
    to.gate_up = layer.gate_up.matrix, to.down = layer.down.matrix;
    to.attention_norm = layer.attention_norm, to.mlp_norm = layer.mlp_norm, to.qkv_bias = layer.bias;
    AttentionArgs& attention = to.attention;
    attention.cells.cells = {layer.cache, kToken, values(), kHeadDim};
    attention.cache = layer.cache, attention.values = values();
    attention.block_tables = table, attention.table_stride = blocks, attention.row_slots = zero;
    attention.context_lens = length, attention.positions = position, attention.kv_slots = slot;
    attention.rotary = rotary, attention.eps = 1e-6f;
    attention.query_norm = layer.query_norm, attention.key_norm = layer.key_norm;
    attention.scale = float(std::log2(std::exp(1.0)) / std::sqrt(kHeadDim));
    attention.key_rate = attention.value_rate = attention.value_scale = 1;
  }
};

// The step in plain words, rounded where the kernel rounds.
class Reference {
 public:
  explicit Reference(const Model& model) : model_(model) {}

  Numbers compute() const {
    Numbers x(kHidden);
    for (int i = 0; i < kHidden; i++) x[i] = to_float(model_.embedding[i]);
    for (const PlainLayer& layer : model_.layers) {
      add(x, layer.output.multiply(attend(layer, normalize(x, layer.attention_norm))));
      add(x, run_mlp(layer, normalize(x, layer.mlp_norm)));
    }
    return model_.lm_head.multiply(normalize(x, model_.norm));
  }

 private:
  static void add(Numbers& x, const Numbers& update) {
    for (size_t i = 0; i < x.size(); i++) x[i] = rounded(x[i] + update[i]);
  }

  void turn(double* head, const Bf16* norm) const {
    double squares = 0, values[kHeadDim];
    for (int i = 0; i < kHeadDim; i++) squares += head[i] * head[i];
    const double rate = 1 / std::sqrt(squares / kHeadDim + 1e-6);
    for (int i = 0; i < kHeadDim; i++) values[i] = HEAD_NORM ? rounded(head[i] * rate * to_float(norm[i])) : head[i];
    const float* cosines = model_.rotary + *model_.position * kHeadDim;
    constexpr int half = kHeadDim / 2;
    for (int i = 0; i < kHeadDim; i++)
      head[i] = rounded(values[i] * cosines[i % half] +
                        (i < half ? -values[i + half] : values[i - half]) * cosines[half + i % half]);
  }

  Numbers attend(const PlainLayer& layer, const Numbers& x) const {
    Numbers qkv = layer.qkv.multiply(x), result;
    for (int i = 0; i < S::qkv; i++) qkv[i] = rounded(qkv[i] + (layer.bias ? to_float(layer.bias[i]) : 0));
    for (int head = 0; head < (kQueries + 1) * kKvHeads; head++)
      turn(&qkv[head * kHeadDim], head < kQueries * kKvHeads ? layer.query_norm : layer.key_norm);
    for (int head = 0; head < kQueries * kKvHeads; head++) attend_head(layer, qkv, head, result);
    return result;
  }

  void attend_head(const PlainLayer& layer, const Numbers& qkv, int head, Numbers& result) const {
    const int of_cache = head / kQueries, newest = model_.context - 1;
    const auto at = [&](int token, int kind, int dim) {
      const int own = (kQueries * kKvHeads + kind * kKvHeads + of_cache) * kHeadDim + dim;
      const long cell = kind * model_.values() + model_.cell(token) + of_cache * kHeadDim + dim;
      return token == newest ? qkv[own] : to_float(layer.cache[cell]);
    };
    Numbers weights(model_.context);
    double total = 0;
    for (int token = 0; token <= newest; token++) {
      for (int dim = 0; dim < kHeadDim; dim++) weights[token] += qkv[head * kHeadDim + dim] * at(token, 0, dim);
      total += weights[token] = std::exp(weights[token] / std::sqrt(kHeadDim));
    }
    for (int dim = 0; dim < kHeadDim; dim++) {
      double sum = 0;
      for (int token = 0; token <= newest; token++) sum += weights[token] * at(token, 1, dim);
      result.push_back(rounded(sum / total));
    }
  }

  Numbers run_mlp(const PlainLayer& layer, const Numbers& x) const {
    Numbers sum(kHidden);
    if (!kMixture) add_expert(layer, x, 0, 1, sum);
    if (!kMixture) return sum;
    Numbers logits = layer.router.multiply(x);
    for (double& logit : logits) logit = rounded(logit);
    std::vector<int> order(EXPERTS);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    double mass = 0;
    for (int i = 0; i < kTopK; i++) mass += std::exp(logits[order[i]]);
    for (int i = 0; i < kTopK; i++) add_expert(layer, x, order[i], std::exp(logits[order[i]]) / mass, sum);
    return sum;
  }

  static void add_expert(const PlainLayer& layer, const Numbers& x, int expert, double weight, Numbers& sum) {
    const Numbers both = layer.gate_up.multiply(x, expert * 2 * kWidth, 2 * kWidth);
    Numbers inner(kWidth);
    for (int i = 0; i < kWidth; i++) inner[i] = rounded(both[i] / (1 + std::exp(-both[i])) * both[kWidth + i]);
    const Numbers result = layer.down.multiply(inner, expert * kHidden, kHidden);
    for (int i = 0; i < kHidden; i++) sum[i] += weight * result[i];
  }

  const Model& model_;
};

void run_step(const RowStepArgs& args, unsigned seed) {
  std::vector<RowStepShared<S>*> shared(kBlocks);
  for (auto& memory : shared) {
    memory = allocate<RowStepShared<S>>(1);
    std::memset(static_cast<void*>(memory), 0xff, sizeof *memory);
  }
  emulated::run(
      {kBlocks, 1, 1}, kStepThreads + 32 * kCopyWarps, [&] { run_row_step<S>(args, *shared[blockIdx.x]); }, seed);
  for (auto* memory : shared) std::free(memory);
}

}  // namespace

int main(int count, char** arguments) {
  const Model model(std::atoi(arguments[1]));
  RowStepArgs args = {};
  args.layers = model.args, args.residual = model.embedding, args.norm = model.norm;
  args.lm_head = model.lm_head.matrix, args.logits = allocate<Bf16>(kVocab);
  args.words = allocate<Word>(S::words), args.handovers = allocate<Handovers>(1);
  args.eps = 1e-5f, args.num_layers = kLayers, args.vocab = kVocab, args.renormalize = 1;
  const Numbers expected = Reference(model).compute();
  std::vector<Bf16> first;
  int changed = 0;
  double lost = 0, norm = 0;
  for (int i = 2; i < count; i++) {
    run_step(args, unsigned(std::atoi(arguments[i])));
    if (first.empty()) first.assign(args.logits, args.logits + kVocab);
    changed += std::memcmp(first.data(), args.logits, kVocab * sizeof(Bf16)) != 0;
  }
  for (int i = 0; i < kVocab; i++) {
    lost += std::pow(to_float(first[i]) - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  std::printf("error %d changed %d bytes %d words %d\n", int(std::sqrt(lost / norm) * 1e6), changed,
              int(sizeof(RowStepShared<S>)), S::words);
}
