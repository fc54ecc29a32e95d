# SPDX-License-Identifier: Apache-2.0
"""The way to native code: modules, FFI calls, and their split over devices."""
