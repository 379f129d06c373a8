// SPDX-License-Identifier: Apache-2.0
// Formats of single numbers, as formats/schemes.py has them: what shares a scale is another matter.
#pragma once

namespace blink {

// Of weights: kFp8 is e4m3, kInt4 whole numbers from 0 to 15, less a zero point. Of activations: kBf16, or hi/lo FP8
// (common/hi_lo.cuh) in the order of the weights of a format.
enum class FormatId { kBf16, kFp8, kInt4 };

}  // namespace blink
