// Experts in files: a slab consists of pieces (a gate, an up and a down projection, say), each read from
// where it lies. With checksums, an expert is checked the first time it has been read in full.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "transfer/source.hpp"

namespace finemoe::transfer {

// Where the pieces are. Piece p of expert e: length[p] bytes at offset[e · P + p] of file file[e · P + p],
// placed at byte place[p] of the slab. Places ascend, pieces do not overlap; bytes between them are left as
// they are.
struct Pieces {
    std::vector<std::string> paths;
    int experts = 0;
    std::vector<std::int32_t> file;           // [E, P], into paths
    std::vector<std::int64_t> offset;         // [E, P]
    std::vector<std::int64_t> length, place;  // [P]
    std::vector<std::uint32_t> checksums;     // [E] CRC-32C of an expert's pieces in order, or empty
    std::int64_t slab_bytes = 0;              // 0: up to the end of the last piece
    bool direct = false;                      // O_DIRECT: past the page cache
};

class FileSource final : public Source {
  public:
    // Opens the files and compares their sizes with what the pieces need. Throws SourceError.
    explicit FileSource(Pieces pieces);

    int experts() const override { return pieces_.experts; }
    std::int64_t slab_bytes() const override { return pieces_.slab_bytes; }
    void read(ExpertId expert, std::int64_t offset, std::int64_t bytes, std::byte* to) override;
    const std::byte* slab(ExpertId) const override { return nullptr; }

    // Experts whose checksum has been compared and was right.
    int verified() const { return verified_count_.load(std::memory_order_relaxed); }

  private:
    // A file that is open for reading.
    class File {
      public:
        File(const std::string& path, bool direct);
        ~File();
        File(File&& other) noexcept;
        File& operator=(File&&) = delete;
        File(const File&) = delete;
        File& operator=(const File&) = delete;

        std::int64_t size() const;
        void read(std::int64_t offset, std::int64_t bytes, std::byte* to, bool direct, ExpertId expert) const;

      private:
        void read_direct(std::int64_t offset, std::int64_t bytes, std::byte* to, ExpertId expert) const;
        std::int64_t read_some(std::int64_t offset, std::int64_t bytes, std::byte* to, ExpertId expert) const;

        std::string path_;
        int descriptor_ = -1;
    };
    // The checksum so far of an expert's slab, and the byte of the slab that has to come next.
    struct Check {
        std::uint32_t crc = 0;
        std::int64_t next = 0;
    };

    void check_layout();
    void check_sizes() const;
    std::size_t cell(ExpertId expert, std::size_t piece) const;
    void verify(ExpertId expert, std::uint32_t found);

    Pieces pieces_;
    std::vector<File> files_;
    std::vector<Check> checks_;
    std::vector<std::atomic<bool>> verified_;
    std::atomic<int> verified_count_{0};
};

}  // namespace finemoe::transfer
