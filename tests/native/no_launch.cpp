// SPDX-License-Identifier: Apache-2.0
// A pass of the scheduler whose launches fail.
#include "cpu/host_env.h"

namespace {

struct NoLaunchEnv : blink::SoloEnv {
  bool launch(uint32_t, uint32_t) const { return false; }
  bool copy(blink::CopyOrder&) const { return false; }
};

}  // namespace

extern "C" uint32_t no_launch_step(blink::State* state, uint64_t now_ns) {
  NoLaunchEnv env{{now_ns}};
  return uint32_t(blink::step(env, *state));
}
