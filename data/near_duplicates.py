"""Near-duplicates of documents: how much of a text stood in another one before.

The method is winnowing's (Schleimer, Wilkerson and Aiken 2003, "Winnowing: local algorithms for document
fingerprinting"), with fingerprints chosen by their value (their section 2.2, "0 mod p"): every run of 32 characters,
white space and case aside, has a hash, and one of 16 hashes is a fingerprint. Equal texts have equal fingerprints
wherever they stand and however they are broken into lines, so that a copy is also found inside a longer file, which
MinHash, an estimate of the similarity of whole documents, does not find.
"""
import sys

try:
    import numpy as np
except ModuleNotFoundError:
    sys.exit("error: NumPy not found: apt-get install python3-numpy, or run this with a Python that has it")

WIDTH = 32  # characters in a run; a power of two
ONE_OF = 16  # hashes
FACTOR = np.uint64(0x9E3779B97F4A7C15)
BYTE_HASHES = (np.arange(1, 257, dtype=np.uint64) * FACTOR) ^ (np.arange(1, 257, dtype=np.uint64) << np.uint64(21))


def fingerprints(data):
    """The hashes (uint64, sorted, each once) that stand for a text of UTF-8 bytes."""
    hashes = BYTE_HASHES[np.frombuffer(data.lower().translate(None, b" \t\n\r"), dtype=np.uint8)]
    factor, width = FACTOR, 1
    with np.errstate(over="ignore"):
        while width < WIDTH:  # of a run of twice the width: hash(left) * factor^width + hash(right)
            hashes = hashes[:-width] * factor + hashes[width:]
            factor, width = factor * factor, 2 * width
        hashes ^= hashes >> np.uint64(31)
        hashes *= FACTOR
        hashes ^= hashes >> np.uint64(29)
        hashes *= FACTOR
    return np.unique(hashes[hashes < np.uint64(2**64 // ONE_OF)])


class SeenText:
    """Which fingerprints have been seen: a table of 2^bits bits, of 512 MiB unless another size is asked for.

    With n fingerprints a share of n / 2^bits of those that are new is taken for seen: 1% for a gigabyte of text.
    """

    def __init__(self, bits=32):
        self.mask = np.uint64(2**bits - 1)
        self.table = np.zeros(2**bits // 8, dtype=np.uint8)

    def take(self, data, most):
        """Whether at most the share `most` of a text has been seen; if so, it counts as seen from now on."""
        hashes = fingerprints(data) & self.mask
        places, bits = hashes >> np.uint64(3), np.uint8(1) << (hashes & np.uint64(7)).astype(np.uint8)
        if len(hashes) and np.count_nonzero(self.table[places] & bits) > most * len(hashes):
            return False
        np.bitwise_or.at(self.table, places, bits)
        return True
