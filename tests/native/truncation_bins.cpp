// SPDX-License-Identifier: Apache-2.0
// csrc/gpu/decode/truncation_bins.cu on the host's threads behind a C API, one row at a time.
#include "truncation_bins.cu"

#include "gpu_threads.h"

using namespace blink;

// Return the threshold of a row; best and lowest: of its parts, as the scan leaves them.
extern "C" float find_threshold(const float* logits, uint32_t width, const float* best, const float* lowest,
                                uint32_t num_parts, int top_k, float top_p, float min_p) {
  BatchHeader header{};
  SlotParams params{};
  header.num_rows = 1;
  params.sampling.temperature = 1;
  params.sampling.top_k = top_k;
  params.sampling.top_p = top_p;
  params.sampling.min_p = min_p;
  const int32_t slot = 0;
  float threshold = 0;
  uint32_t arrivals = 7;
  const TruncationArgs args{logits, best, lowest, &header, &slot, &params, &threshold, &arrivals, width, num_parts};
  const size_t bytes = sizeof(BinsShared) + (width / 4 + kTruncationCluster - 1) / kTruncationCluster * sizeof(Quad);
  run_cluster(kTruncationCluster, kTruncationThreads, bytes, [&] { find_thresholds_by_bins(args); });
  return arrivals == 0 ? threshold : __uint_as_float(0x7fc00000u);
}
