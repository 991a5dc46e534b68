"""Writes the texts of Parquet files to standard output, for sbtrain, which contains and runs this program.

    check TEXT SOURCE          the names of files, each followed by a NUL, on standard input;
                               writes the number of rows of each on a line
    rows TEXT SOURCE FILE      writes the rows of a file: the lengths of text and source in bytes as
                               little-endian int32 (a source of -1 is none), then their bytes

TEXT and SOURCE name columns; a dot leads into a struct. Exit codes: 3 if pyarrow is missing, 4 for a file
that cannot be read. The reason goes to standard error, in one line.
"""

import os
import resource
import struct
import sys

if sys.path and sys.path[0] == "":  # of `python3 -c`: modules are not looked for in the working folder
    del sys.path[0]

MAX_TEXT = 64 << 20  # bytes
ROWS = 64  # decoded at a time
MEMORY = 4 << 30  # bytes at most; a file whose pages expand to more is refused
# No text is compressed to less than a 250th of its length, so a file holds no more than so many times its own
# length, or 8 MiB. As with gzip and Zstandard, one that holds more is a bomb. Several copies of a text exist
# while it is decoded.
MOST_EXPANSION = 250
UNSUSPECTED = 8 << 20
ROOM = 256 << 20  # beside these copies and what Python and Arrow take for themselves
COPIES = 8
ROW_BYTES = 8  # before each text, in what this writes


def fail(code, message):
    # Messages of Arrow quote the file in places.
    print(" ".join(str(message).split())[:500], file=sys.stderr)
    sys.exit(code)


try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    fail(3, error)


def is_text(kind):
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def field_type(schema, column):
    """The type of a column, or None. A name with a dot may be that of a column or lead into a struct."""
    if column in schema.names:
        return schema.field(column).type
    first, *rest = column.split(".")
    if first not in schema.names:
        return None
    kind = schema.field(first).type
    for name in rest:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def open_file(path, text, source):
    """The file and whether it has the column of sources."""
    file = pq.ParquetFile(path, pre_buffer=False)
    schema = file.schema_arrow
    for column, needed in ((text, True), (source, source != "source")):
        kind = field_type(schema, column)
        if kind is None and needed:
            fail(4, f"{path}: it has no column '{column}'; its columns are {', '.join(schema.names)}")
        if kind is not None and not is_text(kind) and needed:
            fail(4, f"{path}: its column '{column}' holds {kind}, not strings")
    kind = field_type(schema, source)
    return file, kind is not None and is_text(kind)


def values(batch, column):
    if column in batch.schema.names:
        return batch.column(column).to_pylist()
    first, *rest = column.split(".")
    import pyarrow.compute as pc  # takes a while, and few need it

    array = batch.column(first)
    for name in rest:
        array = pc.struct_field(array, name)
    return array.to_pylist()


def most_bytes(path):
    """Of all rows of a file, each with its lengths."""
    return max(UNSUSPECTED, MOST_EXPANSION * os.path.getsize(path))


def fail_as_bomb(path):
    fail(4, f"{path}: a Parquet file that expands to more than {MOST_EXPANSION} times its length, as no text does")


def memory_in_use():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))


def limit_memory(wanted):
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = min(MEMORY, wanted)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def write_rows(path, text, source):
    left = most_bytes(path)
    limit_memory(memory_in_use() + ROOM + COPIES * left)
    file, has_source = open_file(path, text, source)
    out = sys.stdout.buffer
    row = 0
    columns = [text, source] if has_source else [text]
    for batch in file.iter_batches(batch_size=ROWS, columns=columns, use_threads=False):
        texts = values(batch, text)
        sources = values(batch, source) if has_source else [None] * len(texts)
        for value, name in zip(texts, sources):
            row += 1
            data = (value or "").encode()
            if len(data) > MAX_TEXT:
                fail(4, f"{path}: row {row} has more than {MAX_TEXT >> 20} MiB of text")
            label = b"" if name is None else name.encode()[:1024]
            left -= ROW_BYTES + len(data)
            if left < 0:
                fail_as_bomb(path)
            out.write(struct.pack("<ii", len(data), -1 if name is None else len(label)))
            out.write(data)
            out.write(label)
    out.flush()


def check(text, source):
    for path in sys.stdin.buffer.read().split(b"\0")[:-1]:
        guarded(path, lambda: count_rows(path.decode(errors="surrogateescape"), text, source))


def count_rows(path, text, source):
    rows = open_file(path, text, source)[0].metadata.num_rows
    if ROW_BYTES * rows > most_bytes(path):
        fail_as_bomb(path)
    print(rows, flush=True)  # flushed, so that this ends soon after sbtrain has


def guarded(path, body):
    try:
        return body()
    except BrokenPipeError:  # sbtrain has ended
        sys.exit(4)
    except MemoryError:
        if resource.getrlimit(resource.RLIMIT_DATA)[0] < MEMORY:
            fail_as_bomb(name_of(path))
        fail(4, f"{name_of(path)}: its pages need more than {MEMORY >> 30} GiB")
    except (OSError, ValueError, pa.ArrowException) as error:  # UnicodeDecodeError is a ValueError
        fail(4, f"{name_of(path)}: a Parquet file that cannot be read: {error}")


def name_of(path):
    return path.decode(errors="replace") if isinstance(path, bytes) else path


def main():
    limit_memory(MEMORY)
    mode, text, source, *rest = sys.argv[1:]
    if mode == "check":
        check(text, source)
    else:
        guarded(rest[0], lambda: write_rows(rest[0], text, source))


main()
