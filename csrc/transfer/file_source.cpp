#include "transfer/file_source.hpp"

#include <algorithm>
#include <cstdio>

#include "transfer/crc32c.hpp"

namespace finemoe::transfer {

namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;

void need(bool condition, const std::string& problem) {
    if (!condition) {
        throw SourceError("FileSource: " + problem);
    }
}

std::string hexadecimal(std::uint32_t value) {
    char text[16];
    std::snprintf(text, sizeof text, "%08x", value);
    return text;
}

}  // namespace

FileSource::FileSource(Pieces pieces)
    : pieces_(std::move(pieces)),
      checks_(static_cast<std::size_t>(std::max(pieces_.experts, 0))),
      verified_(checks_.size()) {
    check_layout();
    for (const std::string& path : pieces_.paths) {
        files_.emplace_back(path, pieces_.direct);
    }
    check_sizes();
}

void FileSource::check_layout() {
    const Pieces& p = pieces_;
    const std::size_t count = p.length.size(), cells = checks_.size() * count;
    need(p.experts >= 1 && count >= 1, "there are no experts or no pieces.");
    need(p.place.size() == count, "there must be one place per length.");
    need(p.file.size() == cells && p.offset.size() == cells, "file and offset must be [experts, pieces].");
    need(p.checksums.empty() || p.checksums.size() == checks_.size(),
         "there must be one checksum per expert.");
    std::int64_t end = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::string name = "piece " + std::to_string(i);
        need(p.length[i] >= 1 && p.length[i] <= kMostBytes && p.place[i] <= kMostBytes,
             name + " has " + std::to_string(p.length[i]) + " bytes.");
        need(p.place[i] >= end, name + " is placed at byte " + std::to_string(p.place[i]) +
                                    ", before the piece before it ends (" + std::to_string(end) + ").");
        end = p.place[i] + p.length[i];
    }
    need(p.slab_bytes == 0 || p.slab_bytes >= end, "the pieces need a slab of " + std::to_string(end) +
                                                       " bytes, slab_bytes is " +
                                                       std::to_string(p.slab_bytes) + ".");
    for (std::size_t i = 0; i < cells; ++i) {
        need(p.file[i] >= 0 && static_cast<std::size_t>(p.file[i]) < p.paths.size(),
             "there is no file " + std::to_string(p.file[i]) + ".");
        need(p.offset[i] >= 0 && p.offset[i] <= kMostBytes,
             "an offset is " + std::to_string(p.offset[i]) + ".");
    }
    pieces_.slab_bytes = std::max(pieces_.slab_bytes, end);
}

void FileSource::check_sizes() const {
    std::vector<std::int64_t> sizes;
    for (const File& file : files_) {
        sizes.push_back(file.size());
    }
    for (ExpertId e = 0; e < pieces_.experts; ++e) {
        for (std::size_t i = 0; i < pieces_.length.size(); ++i) {
            const auto file = static_cast<std::size_t>(pieces_.file[cell(e, i)]);
            const std::int64_t end = pieces_.offset[cell(e, i)] + pieces_.length[i];
            if (end > sizes[file]) {
                throw SourceError(pieces_.paths[file] + ": expert " + std::to_string(e) + " needs " +
                                  std::to_string(end) + " bytes of the file, it has " +
                                  std::to_string(sizes[file]) + ": it is truncated. Copy it again.");
            }
        }
    }
}

std::size_t FileSource::cell(ExpertId expert, std::size_t piece) const {
    return static_cast<std::size_t>(expert) * pieces_.length.size() + piece;
}

void FileSource::read(ExpertId expert, std::int64_t offset, std::int64_t bytes, std::byte* to) {
    const std::int64_t end = offset + bytes;
    const auto index = static_cast<std::size_t>(expert);
    const bool checks = !pieces_.checksums.empty() && !verified_[index].load(std::memory_order_relaxed);
    Check& check = checks_[index];
    if (checks && offset == 0) {
        check = Check{};
    }
    const bool follows = checks && check.next == offset;
    const auto after = std::upper_bound(pieces_.place.begin(), pieces_.place.end(), offset);
    auto i = static_cast<std::size_t>(std::max<std::ptrdiff_t>(after - pieces_.place.begin() - 1, 0));
    for (; i < pieces_.place.size() && pieces_.place[i] < end; ++i) {
        const std::int64_t from = std::max(offset, pieces_.place[i]);
        const std::int64_t until = std::min(end, pieces_.place[i] + pieces_.length[i]);
        if (from >= until) {
            continue;
        }
        const File& file = files_[static_cast<std::size_t>(pieces_.file[cell(expert, i)])];
        std::byte* const target = to + (from - offset);
        file.read(pieces_.offset[cell(expert, i)] + from - pieces_.place[i], until - from, target,
                  pieces_.direct, expert);
        if (follows) {
            check.crc = crc32c({target, static_cast<std::size_t>(until - from)}, check.crc);
        }
    }
    if (follows) {
        check.next = end;
        if (end == pieces_.slab_bytes) {
            verify(expert, check.crc);
        }
    }
}

void FileSource::verify(ExpertId expert, std::uint32_t found) {
    const auto index = static_cast<std::size_t>(expert);
    if (found != pieces_.checksums[index]) {
        throw CopyError(pieces_.paths[static_cast<std::size_t>(pieces_.file[cell(expert, 0)])] + ": expert " +
                        std::to_string(expert) + " (from byte " +
                        std::to_string(pieces_.offset[cell(expert, 0)]) + " of the file) has the checksum " +
                        hexadecimal(found) + ", not " + hexadecimal(pieces_.checksums[index]) +
                        ": its bytes were altered. Copy the file again");
    }
    verified_[index].store(true, std::memory_order_relaxed);
    verified_count_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace finemoe::transfer
