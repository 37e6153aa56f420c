// Reading one file, through the page cache or past it.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transfer/file_source.hpp"

namespace finemoe::transfer {

namespace {

// O_DIRECT wants addresses, offsets and lengths in multiples of the device's block; 4 KiB serves all.
constexpr std::int64_t kBlock = 4096;
struct alignas(kBlock) Block {
    std::array<std::byte, kBlock> bytes;
};
constexpr std::size_t kBounceBlocks = 256;

}  // namespace

FileSource::File::File(const std::string& path, bool direct) : path_(path) {
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
    if (descriptor_ < 0) {
        const std::string reason = std::strerror(errno);
        const bool unsupported = direct && errno == EINVAL;
        throw SourceError(path + ": cannot be opened: " + reason + "." +
                          (unsupported ? " Its file system knows no direct reads: leave `direct` out." : ""));
    }
}

FileSource::File::~File() {
    if (descriptor_ >= 0) {
        ::close(descriptor_);
    }
}

FileSource::File::File(File&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

std::int64_t FileSource::File::size() const {
    struct stat found{};
    if (::fstat(descriptor_, &found) != 0) {
        throw SourceError(path_ + ": its size cannot be read: " + std::strerror(errno) + ".");
    }
    return found.st_size;
}

// At least one byte, or CopyError.
std::int64_t FileSource::File::read_some(std::int64_t offset, std::int64_t bytes, std::byte* to,
                                         ExpertId expert) const {
    for (;;) {
        const auto got = ::pread(descriptor_, to, static_cast<std::size_t>(bytes), offset);
        if (got > 0) {
            return got;
        }
        if (got < 0 && errno == EINTR) {
            continue;
        }
        const std::string reason =
            got == 0 ? "the file ends there: it was truncated after it was opened" : std::strerror(errno);
        throw CopyError(path_ + ": byte " + std::to_string(offset) + " of expert " + std::to_string(expert) +
                        " cannot be read: " + reason);
    }
}

void FileSource::File::read(std::int64_t offset, std::int64_t bytes, std::byte* to, bool direct,
                            ExpertId expert) const {
    if (direct) {
        read_direct(offset, bytes, to, expert);
        return;
    }
    while (bytes > 0) {
        const std::int64_t got = read_some(offset, bytes, to, expert);
        offset += got;
        bytes -= got;
        to += got;
    }
}

void FileSource::File::read_direct(std::int64_t offset, std::int64_t bytes, std::byte* to,
                                   ExpertId expert) const {
    thread_local std::vector<Block> bounce(kBounceBlocks);
    const std::int64_t room = static_cast<std::int64_t>(bounce.size()) * kBlock;
    while (bytes > 0) {
        const std::int64_t before = offset % kBlock;
        const std::int64_t wanted = std::min(room, (before + bytes + kBlock - 1) / kBlock * kBlock);
        const std::int64_t got = read_some(offset - before, wanted, bounce.front().bytes.data(), expert);
        if (got <= before) {  // a read that ends within a block has met the end of the file
            throw CopyError(path_ + ": byte " + std::to_string(offset) + " of expert " +
                            std::to_string(expert) +
                            " cannot be read: the file ends there: it was truncated after it was opened");
        }
        const std::int64_t useful = std::min(got - before, bytes);
        std::memcpy(to, bounce.front().bytes.data() + before, static_cast<std::size_t>(useful));
        offset += useful;
        bytes -= useful;
        to += useful;
    }
}

}  // namespace finemoe::transfer
