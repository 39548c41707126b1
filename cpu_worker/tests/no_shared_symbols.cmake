# SPDX-License-Identifier: Apache-2.0
#
# A weak symbol outside the namespace of its instruction set could replace the portable copy of the same
# function in the linked binary (see kernels/target.h). Every weak symbol must name the instruction set.
execute_process(COMMAND ${NM} --defined-only ${OBJECT} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(LENGTH ${ISA} length)
string(REPLACE "\n" ";" lines "${symbols}")
set(checked 0)
foreach(line ${lines})
  if(line MATCHES "^[0-9a-f]+ [A-Z] (.*)$")
    set(symbol ${CMAKE_MATCH_1})
    math(EXPR checked "${checked} + 1")
    if(NOT symbol MATCHES "${length}${ISA}" AND NOT symbol MATCHES "^DW\\.ref")
      message(FATAL_ERROR "symbol outside ft::${ISA}: ${symbol}")
    endif()
  endif()
endforeach()
if(checked EQUAL 0)
  message(FATAL_ERROR "no symbols in ${OBJECT}")
endif()
