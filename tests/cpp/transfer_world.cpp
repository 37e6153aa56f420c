#include "transfer_world.hpp"

#include <deque>

#include "transfer/cpu_copier.hpp"
#include "transfer/cuda_copier.hpp"

namespace finemoe::stress {

namespace {

constexpr std::int64_t kChunkBytes = 24;  // of 64: the last chunk is shorter

std::byte weight(ExpertId expert, std::int64_t byte) {
    return static_cast<std::byte>(31 * expert + 7 * byte + 1);
}

// Slabs that have to be read, as those in files have.
class ReadSource final : public transfer::Source {
  public:
    explicit ReadSource(const CoreConfig& config) : config_(config) {}

    int experts() const override { return config_.total_experts(); }
    std::int64_t slab_bytes() const override { return config_.expert_bytes; }
    void read(ExpertId expert, std::int64_t offset, std::int64_t bytes, std::byte* to) override {
        for (std::int64_t i = 0; i < bytes; ++i) {
            to[i] = weight(expert, offset + i);
        }
    }
    const std::byte* slab(ExpertId) const override { return nullptr; }

  private:
    const CoreConfig& config_;
};

// Slow at random, and failing at random: before a copy begins, or after it was under way.
class FlakyCopier final : public transfer::Copier {
  public:
    FlakyCopier(std::unique_ptr<transfer::Copier> inner, const Scenario& scenario, std::uint64_t seed,
                std::atomic<std::int64_t>& failures)
        : inner_(std::move(inner)),
          scenario_(scenario),
          random_(seed),
          failed_(static_cast<std::size_t>(scenario.config.total_experts())),
          failures_(failures) {}

    std::size_t depth() const override { return inner_->depth(); }
    void submit(const transfer::Chunk& chunk) override {
        dawdle(random_);
        if (fails(chunk)) {
            refuse(chunk);
        }
        // At most two at once, and of one load: what was asked to pause is over before anything else begins.
        const transfer::Chunk* last = under_way_.empty() ? nullptr : &under_way_.back();
        if (under_way_.size() >= depth() ||
            (last != nullptr &&
             (last->expert != chunk.expert || last->offset + last->bytes != chunk.offset))) {
            fail(scenario_.name,
                 "a chunk is submitted behind one of another load, or too many are under way");
        }
        inner_->submit(chunk);
        under_way_.push_back(chunk);
        broken_ = false;
    }
    void wait_oldest() override {
        dawdle(random_);
        const transfer::Chunk chunk = under_way_.front();
        under_way_.pop_front();
        inner_->wait_oldest();
        if (broken_) {
            return;  // what was under way behind the chunk that failed
        }
        if (fails(chunk)) {
            refuse(chunk);
        }
        if (chunk.offset + chunk.bytes == scenario_.config.expert_bytes) {
            failed_[static_cast<std::size_t>(chunk.expert)] = 0;
        }
    }
    void record_compute(std::span<const int> slots, std::uintptr_t stream) override {
        inner_->record_compute(slots, stream);
    }

  private:
    // Never three times in a row, but for the lost expert.
    bool fails(const transfer::Chunk& chunk) {
        return chunk.expert == scenario_.lost_expert ||
               (failed_[static_cast<std::size_t>(chunk.expert)] < 2 &&
                std::uniform_real_distribution()(random_) < scenario_.failure_rate / 4);
    }
    [[noreturn]] void refuse(const transfer::Chunk& chunk) {
        broken_ = true;
        ++failed_[static_cast<std::size_t>(chunk.expert)];
        failures_.fetch_add(1, std::memory_order_relaxed);
        throw transfer::CopyError("expert " + std::to_string(chunk.expert) +
                                  (chunk.expert == scenario_.lost_expert ? " always fails" : " failed"));
    }

    std::unique_ptr<transfer::Copier> inner_;
    const Scenario& scenario_;
    std::mt19937_64 random_;
    std::vector<int> failed_;  // in a row
    bool broken_ = false;      // the last load
    std::deque<transfer::Chunk> under_way_;
    std::atomic<std::int64_t>& failures_;
};

}  // namespace

const char* name_of(Place place) {
    constexpr std::array kNames{"host read", "host slabs", "dev read", "dev slabs"};
    return kNames[static_cast<std::size_t>(place)];
}

TransferWorld::TransferWorld(const Scenario& scenario, Place place, std::uint64_t seed)
    : scenario_(scenario), place_(place), seed_(seed), core_(scenario.config, -1) {
    const CoreConfig& c = scenario_.config;
    for (ExpertId e = 0; e < c.total_experts(); ++e) {
        for (std::int64_t i = 0; i < c.expert_bytes; ++i) {
            slabs_.push_back(weight(e, i));
        }
    }
    if (place == Place::host_slabs || place == Place::device_slabs) {
        source_ = std::make_shared<transfer::HostSource>(slabs_.data(), c.total_experts(), c.expert_bytes,
                                                         c.expert_bytes);
    } else {
        source_ = std::make_shared<ReadSource>(scenario_.config);
    }
    if (on_device()) {
        cuda_ = std::make_shared<FakeCuda>(c.devices, seed);
    }
    std::vector<std::unique_ptr<transfer::Copier>> copiers;
    for (int g = 0; g < c.devices; ++g) {
        arenas_.emplace_back(static_cast<std::size_t>(c.slots_per_device * c.expert_bytes));
        if (on_device()) {
            const transfer::OnDevice here(*cuda_, g);
            streams_.push_back(cuda_->create_stream());
        }
        copiers.push_back(std::make_unique<FlakyCopier>(
            make_copier(g), scenario_, seed + 100 + static_cast<std::uint64_t>(g), failures_));
    }
    transfer::EngineSettings settings;
    settings.chunk_bytes = kChunkBytes;
    engine_ = std::make_unique<transfer::Engine>(core_, std::move(copiers), settings);
    engine_->preload(scenario_.preload, [] {});
    engine_->start();
}

std::unique_ptr<transfer::Copier> TransferWorld::make_copier(int device) {
    const CoreConfig& c = scenario_.config;
    const transfer::Arena arena{arenas_.back().data(), c.slots_per_device, c.expert_bytes};
    if (!on_device()) {
        return std::make_unique<transfer::CpuCopier>(source_, arena);
    }
    return std::make_unique<transfer::CudaCopier>(cuda_, device, source_, arena, kChunkBytes);
}

void TransferWorld::check(bool condition, const std::string& problem) const {
    if (!condition) {
        fail(scenario_.name + " (" + name_of(place_) + ")", problem);
    }
}

void TransferWorld::check_bytes(ExpertId expert, const std::byte* slab) const {
    for (std::int64_t i = 0; i < scenario_.config.expert_bytes; ++i) {
        if (slab[i] != weight(expert, i)) {
            check(false, "expert " + std::to_string(expert) + " is computed with other weights, from byte " +
                             std::to_string(i));
        }
    }
}

void TransferWorld::compute(const Placed& placed) {
    check(placed.slot >= 0, "expert " + std::to_string(placed.expert) + " is computed without a slot");
    const CoreConfig& c = scenario_.config;
    const auto g = static_cast<std::size_t>(c.device_of(placed.expert));
    const std::byte* const slab = arenas_[g].data() + placed.slot * c.expert_bytes;
    if (!on_device()) {
        check_bytes(placed.expert, slab);
        return;
    }
    const transfer::OnDevice here(*cuda_, static_cast<int>(g));
    cuda_->launch(streams_[g], slab, static_cast<std::size_t>(c.expert_bytes),
                  [this, slab, expert = placed.expert] { check_bytes(expert, slab); });
}

void TransferWorld::record_compute() {
    for (std::size_t g = 0; on_device() && g < streams_.size(); ++g) {
        engine_->record_compute(static_cast<int>(g), streams_[g]);
    }
}

void TransferWorld::compare_counters() {
    transfer::DeviceStatistics moved;
    for (const transfer::DeviceStatistics& device : engine_->device_statistics()) {
        moved.loads += device.loads;
        moved.failures += device.failures;
        moved.bytes += device.bytes;
    }
    const Counters n = core_.counters();
    check(moved.loads == n.demand_loads + n.prefetch_loads, "loads counted and done differ");
    check(moved.failures == failures_, "failures counted and met differ");
    const std::int64_t counted = n.demand_bytes + n.prefetch_bytes;
    check(moved.failures > 0 ? moved.bytes >= counted : moved.bytes == counted,
          "bytes counted and moved differ");
    check(n.useful_bytes + n.wasted_bytes + n.unused_bytes == n.prefetch_bytes,
          "prefetched bytes are not all useful, wasted or unused");
}

void TransferWorld::close() {
    engine_->close();
    for (std::size_t g = 0; g < streams_.size(); ++g) {
        cuda_->destroy_stream(streams_[g]);
    }
    streams_.clear();
}

}  // namespace finemoe::stress
