// Shared by the binding files.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "core.hpp"
#include "f16.hpp"

namespace finemoe::bindings {

namespace py = pybind11;

// f16 values of a float16 or float32 array whose last dimension is `width` (0: any); float32 is rounded to
// nearest even.
std::vector<std::uint16_t> to_halves(const py::object& values, py::ssize_t width = 0);
py::array halves_array(const std::vector<std::uint16_t>& values, std::vector<py::ssize_t> shape);

// The value of that name, or CoreError with the setting's.
template <typename T>
T named(const std::map<std::string, T>& names, const std::string& name, const char* setting) {
    const auto it = names.find(name);
    if (it == names.end()) {
        throw CoreError(std::string(setting) + ": unknown value " + name);
    }
    return it->second;
}

py::dict log_columns(LogColumns columns);
// (maps [n, L, J], unit embeddings [n, h] or None, ages)
py::tuple store_tuple(const StoreContents& contents, const CoreConfig& config);
std::shared_ptr<UserPolicy> make_policy(const py::object& policy);
void bind_config(py::module_& m);
void bind_feed(py::module_& m);
void bind_plugin(py::module_& m);
void bind_search(py::module_& m);
void bind_synthetic(py::module_& m);
void bind_transfer(py::module_& m);

}  // namespace finemoe::bindings
