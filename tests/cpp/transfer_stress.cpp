// The transfer engine on memory, in every kind of system: a forward pass that looks at every byte that it
// computes with, copiers that are slow and fail, host slots and slots of a device that is none
// (transfer_fake_cuda.hpp). Ends with 0 when every invariant held. Usage: transfer_stress [ITERATIONS] [SEED]
#include <cstdio>
#include <cstdlib>

#include "transfer/crc32c.hpp"
#include "transfer/cuda_copier.hpp"
#include "transfer_replay.hpp"
#include "transfer_world.hpp"

namespace finemoe::stress {

namespace {

// A forward pass; ends early where the core gave an expert up.
class Forward {
  public:
    Forward(TransferWorld& world, std::uint64_t seed)
        : world_(world), core_(world.core()), engine_(world.engine()), c_(core_.config()), seed_(seed) {}

    void iterate(std::int64_t iteration) {
        if (c_.predictor == PredictorKind::oracle) {
            tell(core_.foresight(iteration * c_.layers, foreseen(c_, seed_, iteration), engine_.now()));
        }
        const Opening opening = open_iteration(c_, iteration, random_);
        tell(core_.begin_iteration(opening.rows, opening.embeddings, engine_.now()));
        for (int layer = 0; layer < c_.layers; ++layer) {
            const Routing r = route(c_, seed_, iteration, layer, is_prefill(iteration));
            const auto row_counts = c_.row_counts() ? r.row_counts : std::vector<std::int32_t>{};
            dawdle(random_);
            std::uint64_t mask = tell(
                core_.gate(layer, r.probabilities, r.experts, r.token_counts, engine_.now(), row_counts));
            if (c_.predictor == PredictorKind::speculate && layer + 1 < c_.layers) {
                const Routing guess = route(c_, seed_ + 1, 0, layer + 1, false);
                mask = tell(core_.speculation(layer, layer + 1, guess.probabilities, engine_.now()));
            }
            while ((mask & kChunkOpen) != 0) {
                mask = tell(world_.scenario().as_ready ? compute_ready(layer) : compute_chunk());
            }
            if (c_.prefetch_blocks) {
                engine_.wait_prefetches([] {});
            }
        }
        tell(core_.end_iteration(engine_.now(), finished(iteration)));
    }

    std::int64_t computed() const { return computed_; }

  private:
    std::uint64_t tell(std::uint64_t mask) {
        engine_.notify(mask);
        std::vector<Command> commands;
        core_.take_forward(commands);
        for (const Command& command : commands) {
            if (command.kind == RecordKind::wait_search) {
                engine_.wait_search(command.ticket, [] {});
            }
        }
        return mask;
    }

    std::uint64_t compute_chunk() {
        engine_.wait_chunk([] {});
        for (const Placed& placed : core_.chunk_slots()) {
            compute(placed);
        }
        world_.record_compute();
        return core_.computed_chunk(engine_.now());
    }

    std::uint64_t compute_ready(int layer) {
        std::vector<ExpertId> ready = engine_.wait_ready([] {});
        if (random_() % 2 == 0) {
            ready.resize(1 + random_() % ready.size());
        }
        for (const ExpertId e : ready) {
            compute({e, core_.slot(e)});
        }
        world_.record_compute();
        return core_.computed(layer, ready, engine_.now());
    }

    void compute(const Placed& placed) {
        ++computed_;
        world_.compute(placed);
    }

    TransferWorld& world_;
    Core& core_;
    transfer::Engine& engine_;
    const CoreConfig& c_;
    const std::uint64_t seed_;
    std::mt19937_64 random_{seed_};
    std::int64_t computed_ = 0;
};

void run(const Scenario& scenario, Place place, std::int64_t iterations, std::uint64_t seed) {
    TransferWorld world(scenario, place, seed);
    Forward forward(world, seed);
    bool lost = false;
    try {
        for (std::int64_t i = 0; i < iterations; ++i) {
            forward.iterate(i);
        }
        world.engine().drain([] {});
    } catch (const transfer::TransferError& error) {
        lost = std::string(error.what()).find("always fails") != std::string::npos;
        world.check(lost, error.what());
    } catch (const CoreError&) {  // an event after the Abort; what failed is the engine's to say
        try {
            world.engine().check();
        } catch (const transfer::TransferError& error) {
            lost = std::string(error.what()).find("always fails") != std::string::npos;
        }
        world.check(lost, "the core refused an event while the engine ran");
    }
    world.check(lost == (scenario.lost_expert != kNone), "the run ended too early or too late");
    const std::string difference = replay_difference(scenario.config, world.core().take_log());
    world.check(difference.empty(), "replay: " + difference);
    if (!lost) {
        world.compare_counters();
    }
    world.close();
    world.check(forward.computed() > 0, "nothing was computed");
    const Counters n = world.core().counters();
    std::printf("%-44s %-10s demand %6lld  prefetch %6lld  preempted %5lld  failed %4lld\n",
                scenario.name.c_str(), name_of(place), static_cast<long long>(n.demand_loads),
                static_cast<long long>(n.prefetch_loads), static_cast<long long>(n.preemptions),
                static_cast<long long>(world.failures()));
}

// Closed while loads, searches and kernels are under way.
void run_and_close(const Scenario& scenario, Place place, std::uint64_t seed) {
    for (std::int64_t iterations = 1; iterations < 6; ++iterations) {
        TransferWorld world(scenario, place, seed + static_cast<std::uint64_t>(iterations));
        Forward forward(world, seed);
        for (std::int64_t i = 0; i < iterations; ++i) {
            forward.iterate(i);
        }
        world.close();
    }
}

// RFC 3720, B.4, and the instructions against the table.
void check_checksums(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::size_t length = 0; length < 300; ++length) {
        std::vector<std::byte> bytes(length);
        for (std::byte& b : bytes) {
            b = static_cast<std::byte>(random());
        }
        const auto start = static_cast<std::uint32_t>(random());
        if (transfer::crc32c(bytes, start) != transfer::crc32c_table(bytes, start)) {
            fail("CRC-32C", "instructions and table differ");
        }
    }
    const std::vector<std::byte> zeros(32);
    if (transfer::crc32c_table(zeros) != 0x8A9136AA) {
        fail("CRC-32C", "the checksum of 32 zeros is wrong");
    }
}

// CudaCopier::submit promises that nothing is under way when it throws.
void check_failed_record(std::uint64_t seed) {
    constexpr std::int64_t kBytes = 1 << 20;
    const std::vector<std::byte> slab(kBytes, std::byte{1});
    for (int i = 0; i < 20; ++i) {
        std::vector<std::byte> slot(kBytes);
        const auto cuda = std::make_shared<FakeCuda>(1, seed + static_cast<std::uint64_t>(i));
        transfer::CudaCopier copier(cuda, 0,
                                    std::make_shared<transfer::HostSource>(slab.data(), 1, kBytes, kBytes),
                                    {slot.data(), 1, kBytes}, kBytes);
        cuda->fail_next_record();
        try {
            copier.submit({0, 0, 0, kBytes});
            fail("a record that fails", "submit did not say so");
        } catch (const transfer::CudaError&) {
            if (slot != slab) {
                fail("a record that fails", "the copy is still under way");
            }
        }
    }
}

}  // namespace

}  // namespace finemoe::stress

int main(int argc, char** argv) {
    using namespace finemoe::stress;
    const std::int64_t iterations = argc > 1 ? std::atoll(argv[1]) : 60;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    check_checksums(seed);
    check_failed_record(seed);
    const auto all = scenarios();
    for (const Scenario& scenario : all) {
        for (const Place place : kPlaces) {
            run(scenario, place, iterations, seed);
            if (scenario.lost_expert == finemoe::kNone && scenario.failure_rate == 0.0) {
                run_and_close(scenario, place, seed);
            }
        }
    }
    std::printf(
        "transfer_stress: %zu scenarios on %zu kinds of memory, %lld iterations each, all invariants held\n",
        all.size(), kPlaces.size(), static_cast<long long>(iterations));
    return 0;
}
