// Shared by the binding files of the transfer engine.
#pragma once

#include "bindings.hpp"
#include "transfer/copier.hpp"

namespace finemoe::bindings {

// Slots of one device in memory that Python owns.
struct PyArena {
    int device = -1;  // of CUDA; -1: host memory
    transfer::Arena arena;
    py::object keep_alive;
};

void bind_memory(py::module_& m);

}  // namespace finemoe::bindings
