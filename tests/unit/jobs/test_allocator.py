"""Blocks below 4 MB stay in the heap when they are freed, larger ones go back to the system."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import ctypes

    from jobs.allocator import keep_freed_memory

    class Usage(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype, libc.malloc.restype, libc.malloc.argtypes = Usage, ctypes.c_void_p, [ctypes.c_size_t]

    def n_mapped_by_itself(n_bytes):
        before = libc.mallinfo2().hblks
        assert libc.malloc(n_bytes)
        return libc.mallinfo2().hblks - before

    default = n_mapped_by_itself(40 << 20)
    keep_freed_memory()
    print(default, n_mapped_by_itself(3 << 20), n_mapped_by_itself(5 << 20))
"""


def test_small_blocks_are_kept_and_large_ones_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["1", "0", "1"]
