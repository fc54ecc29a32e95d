# SPDX-License-Identifier: Apache-2.0
"""Asks the NVIDIA driver which GPUs are in this machine.

Prints their architectures as CMake names them, e.g. `90-real`, several with `;` between. Exits with
status 1, and the reason on stdout, where there is none that our kernels run on.
"""

import ctypes
import sys

OLDEST = (8, 0)  # mma.sync on bf16, cp.async
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def capabilities() -> list[tuple[int, int]]:
    """The compute capability of each GPU; OSError or RuntimeError where the driver tells none."""
    driver = ctypes.CDLL("libcuda.so.1")

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"the NVIDIA driver answers with error {status}")

    check(driver.cuInit(0))
    count = ctypes.c_int()
    check(driver.cuDeviceGetCount(ctypes.byref(count)))
    found = []
    for ordinal in range(count.value):
        device, version = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        check(driver.cuDeviceGet(ctypes.byref(device), ordinal))
        for attribute, value in zip((_MAJOR, _MINOR), version, strict=True):
            check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        found.append((version[0].value, version[1].value))
    return found


def main() -> None:
    try:
        found = sorted(set(capabilities()))
    except OSError:
        sys.exit(_reason("no NVIDIA driver in this machine"))
    except RuntimeError as error:
        sys.exit(_reason(f"no GPU in this machine can be used ({error})"))
    usable = [f"{major}{minor}-real" for major, minor in found if (major, minor) >= OLDEST]
    if not found:
        sys.exit(_reason("no NVIDIA GPU in this machine"))
    if not usable:
        newest = "{}.{}".format(*found[-1])
        sys.exit(_reason(f"the GPU has compute capability {newest}, the kernels need 8.0"))
    print(";".join(usable))


def _reason(text: str) -> int:
    print(text)
    return 1


if __name__ == "__main__":
    main()
