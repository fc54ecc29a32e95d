"""The way to native code: modules, FFI calls, and their split over devices."""
