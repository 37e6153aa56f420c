// A transfer engine over memory that the tests can look at.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core.hpp"
#include "stress_scenarios.hpp"
#include "transfer/engine.hpp"
#include "transfer/source.hpp"
#include "transfer_fake_cuda.hpp"

namespace finemoe::stress {

// Where slots are, and how the experts come there.
enum class Place : std::uint8_t { host_read, host_slabs, device_read, device_slabs };
inline constexpr std::array kPlaces{Place::host_read, Place::host_slabs, Place::device_read,
                                    Place::device_slabs};
const char* name_of(Place place);

class TransferWorld {
  public:
    TransferWorld(const Scenario& scenario, Place place, std::uint64_t seed);
    ~TransferWorld() { close(); }
    TransferWorld(const TransferWorld&) = delete;
    TransferWorld& operator=(const TransferWorld&) = delete;

    Core& core() { return core_; }
    transfer::Engine& engine() { return *engine_; }
    const Scenario& scenario() const { return scenario_; }
    void check(bool condition, const std::string& problem) const;

    // Looks at the bytes of a resident expert: at once on the host, in a kernel on a device.
    void compute(const Placed& placed);
    // Behind the kernels launched so far, on every device.
    void record_compute();
    // What the engine says that it moved, against what the core counted.
    void compare_counters();
    void close();
    std::int64_t failures() const { return failures_; }

  private:
    bool on_device() const { return place_ == Place::device_read || place_ == Place::device_slabs; }
    void check_bytes(ExpertId expert, const std::byte* slab) const;
    std::unique_ptr<transfer::Copier> make_copier(int device);

    const Scenario scenario_;
    const Place place_;
    const std::uint64_t seed_;
    std::vector<std::byte> slabs_;
    std::vector<std::vector<std::byte>> arenas_;
    std::atomic<std::int64_t> failures_{0};
    std::shared_ptr<FakeCuda> cuda_;
    std::vector<FakeCuda::Stream> streams_;  // of compute, one per device
    std::shared_ptr<transfer::Source> source_;
    Core core_;
    std::unique_ptr<transfer::Engine> engine_;
};

}  // namespace finemoe::stress
