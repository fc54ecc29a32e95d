# SPDX-License-Identifier: Apache-2.0

# Decides whether CUDA kernels are built, for which architectures and with which nvcc, and proves that
# it works: with a broken toolkit enable_language(CUDA) is an error, and "auto" could not go on.

set(ALL_CUDA_ARCHITECTURES "80-real;90-real;100-real;120")

# jax_paged_choose_cuda(<out: why CUDA kernels are not built; empty: they are>)
#   Reads JAX_PAGED_CUDA and JAX_PAGED_CUDA_ARCHS (CMakeLists.txt); sets CMAKE_CUDA_COMPILER,
#   CMAKE_CUDA_ARCHITECTURES and CUDA_LIB_DIR. What was asked for and cannot be is an error.
macro(jax_paged_choose_cuda WHY_NOT)
  string(TOLOWER "${JAX_PAGED_CUDA}" CUDA_WANTED)
  if(NOT CUDA_WANTED MATCHES "^(auto|on|off|wheels)$")
    message(FATAL_ERROR
      "jax_paged: JAX_PAGED_CUDA must be auto, on, off or wheels, got '${JAX_PAGED_CUDA}'")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${ALL_CUDA_ARCHITECTURES}")
  set(${WHY_NOT} "")
  if(CUDA_WANTED STREQUAL "off")
    set(${WHY_NOT} "JAX_PAGED_CUDA=off")
  elseif(JAX_PAGED_CUDA_ARCHS)
    set(CMAKE_CUDA_ARCHITECTURES "${JAX_PAGED_CUDA_ARCHS}")
    if(CUDA_WANTED STREQUAL "auto")
      set(CUDA_WANTED "on")
    endif()
  elseif(CUDA_WANTED STREQUAL "auto")
    execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cuda/gpus.py"
      RESULT_VARIABLE GPUS_RESULT OUTPUT_VARIABLE GPUS OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(GPUS_RESULT STREQUAL "0")
      set(CMAKE_CUDA_ARCHITECTURES "${GPUS}")
    else()
      set(${WHY_NOT} "${GPUS}, and JAX_PAGED_CUDA=auto builds for the GPUs that it finds")
    endif()
  endif()
  if(NOT ${WHY_NOT})
    jax_paged_find_nvcc(${CUDA_WANTED} ${WHY_NOT})
  endif()
  if(NOT ${WHY_NOT})
    list(JOIN CMAKE_CUDA_ARCHITECTURES ", " NAMES)
    message(STATUS "jax_paged: CUDA kernels: built for ${NAMES} by ${CMAKE_CUDA_COMPILER}")
  elseif(CUDA_WANTED MATCHES "^(on|wheels)$")
    message(FATAL_ERROR
      "jax_paged: JAX_PAGED_CUDA=${CUDA_WANTED}, but CUDA kernels cannot be built: ${${WHY_NOT}}")
  else()
    message(STATUS "jax_paged: CUDA kernels: not built (${${WHY_NOT}}); JAX_PAGED_CUDA=on builds "
      "them for every architecture, JAX_PAGED_CUDA_ARCHS=90-real for that one")
  endif()
endmacro()

# jax_paged_find_nvcc(<on|auto|wheels> <out: why there is none that works; empty: there is>)
#   Order: CMAKE_CUDA_COMPILER, $CUDACXX, (wheels only) the nvidia-cuda-nvcc package, PATH,
#   $CUDA_HOME, /usr/local/cuda.
macro(jax_paged_find_nvcc WANTED WHY_NOT)
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
    set(PROBE_TARGETS "")
    foreach(ARCH IN LISTS CMAKE_CUDA_ARCHITECTURES)
      string(REGEX REPLACE "-(real|virtual)$" "" ARCH "${ARCH}")
      list(APPEND PROBE_TARGETS "-gencode=arch=compute_${ARCH},code=sm_${ARCH}")
    endforeach()
    execute_process(
      COMMAND "${CMAKE_CUDA_COMPILER}" -std=c++17 ${PROBE_TARGETS} -shared -Xcompiler -fPIC
        "${CMAKE_BINARY_DIR}/probe.cu" -o "${CMAKE_BINARY_DIR}/probe.so"
      RESULT_VARIABLE PROBE_RESULT OUTPUT_VARIABLE PROBE_LOG ERROR_VARIABLE PROBE_LOG)
    if(PROBE_RESULT STREQUAL "0")
      set(${WHY_NOT} "")
    else()
      string(STRIP "${PROBE_LOG}" PROBE_LOG)
      list(JOIN CMAKE_CUDA_ARCHITECTURES ", " NAMES)
      set(${WHY_NOT} "${CMAKE_CUDA_COMPILER} cannot build a test kernel for ${NAMES}: ${PROBE_LOG} (${PROBE_RESULT})")
    endif()
  endif()
endmacro()
