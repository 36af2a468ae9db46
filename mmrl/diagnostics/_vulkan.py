"""Which Vulkan devices can really be opened on this machine: a tiny client of the Vulkan loader, through ctypes.

Simulators render through Vulkan, and a library that loads proves nothing: Debian 12's own Mesa loads and then offers
no device ManiSkill accepts. This creates an instance and asks every device for its driver and its version.
A broken driver can crash the process that asks, so `mmrl doctor` runs it in a child:

    python -m mmrl.diagnostics._vulkan
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
from typing import Any

__all__ = ["devices", "mesa_version"]

_VK_API_VERSION_1_1 = (1 << 22) | (1 << 12)
_APPLICATION_INFO, _INSTANCE_CREATE_INFO = 0, 1  # values of VkStructureType
_PROPERTIES_2, _DRIVER_PROPERTIES = 1000059001, 1000196000
_DEVICE_TYPES = ("other", "integrated GPU", "discrete GPU", "virtual GPU", "CPU")


class _ApplicationInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    )


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("num_layers", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("num_extensions", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


class _DriverProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("driver_id", ctypes.c_uint32),
        ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    )


class _Properties2(ctypes.Structure):
    # VkPhysicalDeviceProperties is 824 bytes; only its head is read: five uint32, then the device's name.
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("properties", ctypes.c_uint64 * 103),
    )


def mesa_version(driver_info: str) -> tuple[int, ...] | None:
    """'Mesa 25.0.7-2 (LLVM 15.0.6)' -> (25, 0, 7); None when the driver is not Mesa."""
    match = re.search(r"Mesa (\d+)\.(\d+)(?:\.(\d+))?", driver_info)
    return tuple(int(part) for part in match.groups(default="0")) if match else None


def _check(result: int, call: str) -> None:
    if result != 0:
        raise OSError(
            f"{call} returned VkResult {result}" + (" (no driver found)" if result == -9 else "")
        )


def _describe(vulkan: ctypes.CDLL, device: int) -> dict[str, Any]:
    driver = _DriverProperties(type=_DRIVER_PROPERTIES)
    properties = _Properties2(type=_PROPERTIES_2, next=ctypes.addressof(driver))
    vulkan.vkGetPhysicalDeviceProperties2(ctypes.c_void_p(device), ctypes.byref(properties))
    head = bytes(properties.properties)
    device_type = struct.unpack_from("<5I", head)[4]
    return {
        "name": head[20:276].split(b"\0")[0].decode(errors="replace"),
        "type": _DEVICE_TYPES[device_type] if device_type < len(_DEVICE_TYPES) else "other",
        "driver": driver.name.decode(errors="replace"),
        "driver_info": driver.info.decode(errors="replace"),
    }


def devices(library: str = "libvulkan.so.1") -> list[dict[str, Any]]:
    """Every physical device with name, type, driver and driver_info. OSError without the loader or without a driver."""
    vulkan = ctypes.CDLL(library)
    application = _ApplicationInfo(type=_APPLICATION_INFO, api_version=_VK_API_VERSION_1_1)
    create = _InstanceCreateInfo(
        type=_INSTANCE_CREATE_INFO, application=ctypes.pointer(application)
    )
    instance = ctypes.c_void_p()
    _check(
        vulkan.vkCreateInstance(ctypes.byref(create), None, ctypes.byref(instance)),
        "vkCreateInstance",
    )
    try:
        count = ctypes.c_uint32()
        _check(
            vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None),
            "vkEnumeratePhysicalDevices",
        )
        handles = (ctypes.c_void_p * count.value)()
        _check(
            vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles),
            "vkEnumeratePhysicalDevices",
        )
        return [_describe(vulkan, handle) for handle in handles[: count.value] if handle]
    finally:
        vulkan.vkDestroyInstance(instance, None)


if __name__ == "__main__":
    print(json.dumps(devices(), indent=2))
