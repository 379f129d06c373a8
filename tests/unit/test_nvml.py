# SPDX-License-Identifier: Apache-2.0
"""A GPU's energy, clock and name from a library of the test's own, and a clear reason where none can be read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from blink.errors import BlinkError
from blink.host import nvml
from blink.host.nvml import Gpu

Build = Callable[..., None]

# With NVML's signatures (nvml.h): GPU 2 at 0000:41:00.0; every other is not there.
_LIBRARY = """
#include <string.h>
static int gpu, reads;
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &gpu; return index == 2 ? 0 : 6; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  *device = &gpu;
  return strcmp(id, "0000:41:00.0") ? 6 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
  *energy = 5000000000123ull + 1000ull * reads++;
  return device == &gpu ? ENERGY : 2;
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned int *clock) {
  *clock = 1980;
  return device == &gpu && type == 1 ? 0 : 2;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
  strncpy(name, "Test GPU", length);
  return device == &gpu ? 0 : 2;
}
const char *nvmlErrorString(int status) { return status == 3 ? "Not Supported" : "Not Found"; }
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return what builds the library with a status of nvmlInit and of the energy, and puts it in the driver's place."""

    def compile_library(*, init: int = 0, energy: int = 0) -> None:
        source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(_LIBRARY)
        command = ["cc", "-shared", "-fPIC", f"-DINIT={init}", f"-DENERGY={energy}", "-o", library, source]
        subprocess.run(command, check=True)
        monkeypatch.setattr(nvml, "_LIBRARY", str(library))

    return compile_library


def test_a_gpu_is_read_by_its_index_and_by_its_bus_id(build: Build) -> None:
    build()
    for gpu in (Gpu(2), Gpu(bus_id="0000:41:00.0")):
        first = gpu.read_joules()
        assert 5e9 < first < 5e9 + 10 and gpu.read_joules() == pytest.approx(first + 1)
        assert (gpu.read_sm_mhz(), gpu.name) == (1980, "Test GPU")


def test_a_gpu_that_is_not_there_is_a_reason(build: Build) -> None:
    build()
    with pytest.raises(BlinkError, match="NVML: Not Found"):
        Gpu(1)
    with pytest.raises(BlinkError, match="NVML: Not Found"):
        Gpu(bus_id="0000:42:00.0")


@pytest.mark.parametrize("status", [{"init": 3}, {"energy": 3}])
def test_a_driver_that_counts_no_energy_is_a_reason(build: Build, status: dict[str, int]) -> None:
    build(**status)
    with pytest.raises(BlinkError, match="NVML: Not Supported"):
        Gpu(2)


def test_a_machine_without_a_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libnvidia-ml-of-nobody.so.1")
    with pytest.raises(BlinkError, match="there is no NVIDIA driver"):
        Gpu()
