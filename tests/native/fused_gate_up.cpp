// SPDX-License-Identifier: Apache-2.0
// csrc/kernels/prefill/gate_up.cu on the host's threads behind a C API, one cluster of blocks after the other.
#include "gpu_matrices.h"
#include "kernels/prefill/gate_up.cu"

using namespace blink;

struct Tensors {
  const char *gate_up, *x;
  char* out;
};

template <int kOutputs, int kCluster>
static void run(const Tensors& tensors, int outputs, int rows, int k) {
  using S = GateShape<64, kOutputs, kCluster>;
  GateUpArgs args{};
  args.weight = Boxes{tensors.gate_up, {k, long(outputs) * k}, {kOutputs, 2}, outputs};
  args.x = Boxes{tensors.x, {k}, {S::copied_tokens}, rows};
  args.out = reinterpret_cast<Bf16*>(tensors.out);
  args.outputs = outputs, args.rows = rows, args.boxes = k / kBoxRow;
  for (int first = 0; first < outputs; first += kOutputs * kCluster) {
    phases.clear();
    for (auto& of_block : multiplying) of_block = std::make_unique<std::barrier<>>(kGateThreads);
    run_cluster(kCluster, kGateThreads + 128, sizeof(GateShared<S>), [&] {
      blockIdx = {first / kOutputs + block_rank, 0};
      gate_prompts<64, kOutputs, kCluster>(args);
    });
  }
}

extern "C" void gate(const Tensors* tensors, int tile, int cluster, int outputs, int rows, int k) {
  if (tile == 64 && cluster == 1) return run<64, 1>(*tensors, outputs, rows, k);
  if (tile == 64 && cluster == 2) return run<64, 2>(*tensors, outputs, rows, k);
  if (tile == 128 && cluster == 2) return run<128, 2>(*tensors, outputs, rows, k);
  std::abort();
}
