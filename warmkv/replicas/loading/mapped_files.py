"""Pages of a checkpoint's memory map, let go of as soon as their weights are copied: none is in memory twice."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

MADV_DONTNEED = 4  # of Linux's mman.h; a page of a file that is read again comes from the page cache, as it was
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class MappedFiles:
    """Hold the addresses at which this process has checkpoints mapped."""

    ranges: Sequence[range]

    @classmethod
    def of_process(cls, maps: Path = Path("/proc/self/maps")) -> MappedFiles:
        """Read what is mapped; nothing on systems that do not tell."""
        try:
            lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
        except OSError:
            return cls(())
        found = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].endswith(SUFFIX)]
        return cls([range(int(start, 16), int(stop, 16)) for start, stop in found])

    def pages(self, weight: Tensor) -> range:
        """Return the addresses of the whole pages that only this weight is on; none if it is not in a mapped file."""
        start, size = weight.data_ptr(), mmap.PAGESIZE
        stop = start + (weight.nbytes if weight.is_contiguous() else 0)
        first, last = -(-start // size) * size, stop // size * size
        if first < last and any(start in mapped and stop - 1 in mapped for mapped in self.ranges):
            return range(first, last)
        return range(0)

    def let_go(self, weight: Tensor) -> None:
        """Take the pages of a weight that was copied out of this process's memory; whoever reads it finds it again."""
        if pages := self.pages(weight):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), MADV_DONTNEED)
