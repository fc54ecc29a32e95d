# Finds an nvcc and proves that it works, before enable_language(CUDA), where a broken toolkit is a
# hard CMake error and "auto" could not fall back to a CPU-only build.
#
# jax_paged_find_nvcc(<auto|on|wheels> <out: ok> <out: reason>)
#   Order: CMAKE_CUDA_COMPILER, $CUDACXX, (wheels only) the nvidia-cuda-nvcc package, PATH,
#   $CUDA_HOME, /usr/local/cuda. Sets CMAKE_CUDA_COMPILER, CMAKE_CUDA_ARCHITECTURES, CUDA_LIB_DIR.
macro(jax_paged_find_nvcc WANTED OK WHY_NOT)
  set(${OK} OFF)
  set(${WHY_NOT} "no nvcc in CUDACXX, PATH, CUDA_HOME or /usr/local/cuda")
  if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
  endif()
  if(NOT CMAKE_CUDA_COMPILER AND "${WANTED}" STREQUAL "wheels")
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u, os; print(next(p + '/bin/nvcc' for p in u.find_spec('nvidia.cu13').submodule_search_locations if os.path.exists(p + '/bin/nvcc')))"
      OUTPUT_VARIABLE CMAKE_CUDA_COMPILER OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(${WHY_NOT} "the Python package nvidia-cuda-nvcc is not installed in the build environment")
  endif()
  if(NOT CMAKE_CUDA_COMPILER AND NOT "${WANTED}" STREQUAL "wheels")
    find_program(NVCC_FOUND nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(NVCC_FOUND)
      set(CMAKE_CUDA_COMPILER "${NVCC_FOUND}")
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER)
    # The Python packages keep libcudart_static.a in lib/; nvcc looks only in lib64/.
    get_filename_component(NVCC_REAL "${CMAKE_CUDA_COMPILER}" REALPATH)
    get_filename_component(NVCC_BIN "${NVCC_REAL}" DIRECTORY)
    get_filename_component(TOOLKIT_ROOT "${NVCC_BIN}" DIRECTORY)
    if(NOT EXISTS "${TOOLKIT_ROOT}/lib64" AND EXISTS "${TOOLKIT_ROOT}/lib/libcudart_static.a")
      set(CUDA_LIB_DIR "${TOOLKIT_ROOT}/lib")
      set(ENV{NVCC_APPEND_FLAGS} "-L${CUDA_LIB_DIR}")
    endif()
    file(WRITE "${CMAKE_BINARY_DIR}/probe.cu"
      "#include <cuda_bf16.h>\n__global__ void k(float* x) { *x = 1; }\nvoid f(float* x) { k<<<1, 1>>>(x); }\n")
    execute_process(
      COMMAND "${CMAKE_CUDA_COMPILER}" -std=c++17 -arch=sm_80 -shared -Xcompiler -fPIC
        "${CMAKE_BINARY_DIR}/probe.cu" -o "${CMAKE_BINARY_DIR}/probe.so"
      RESULT_VARIABLE PROBE_RESULT OUTPUT_VARIABLE PROBE_LOG ERROR_VARIABLE PROBE_LOG)
    if(PROBE_RESULT STREQUAL "0")
      set(${OK} ON)
      if(JAX_PAGED_CUDA_ARCHS)
        set(CMAKE_CUDA_ARCHITECTURES "${JAX_PAGED_CUDA_ARCHS}")
      else()
        set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100-real;120")
      endif()
    else()
      string(STRIP "${PROBE_LOG}" PROBE_LOG)
      set(${WHY_NOT} "${CMAKE_CUDA_COMPILER} cannot build a test kernel: ${PROBE_LOG} (${PROBE_RESULT})")
    endif()
  endif()
endmacro()
