// Slots in host memory: a copy is a read of the source, done by the worker itself.
#pragma once

#include <memory>

#include "transfer/source.hpp"

namespace finemoe::transfer {

class CpuCopier final : public Copier {
  public:
    CpuCopier(std::shared_ptr<Source> source, const Arena& arena)
        : source_(std::move(source)), arena_(arena) {}

    std::size_t depth() const override { return 1; }
    void submit(const Chunk& chunk) override {
        source_->read(chunk.expert, chunk.offset, chunk.bytes, arena_.at(chunk));
    }
    void wait_oldest() override {}
    void record_compute(std::span<const int>, std::uintptr_t) override {}  // computed is over when it is said

  private:
    std::shared_ptr<Source> source_;
    Arena arena_;
};

}  // namespace finemoe::transfer
