// Where no CUDA toolkit was found.
#include "transfer/cuda_runtime_api.hpp"

namespace finemoe::transfer {

std::shared_ptr<CudaRuntime> cuda_runtime() { return nullptr; }

std::string cuda_problem(int) {
    return "this build of FineMoE has no CUDA part: no CUDA toolkit was found when it was built. Install one "
           "and "
           "build again, or run on the CPU.";
}

}  // namespace finemoe::transfer
