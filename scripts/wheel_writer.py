"""Writes wheels for package.py and package_kernels.py, which are scripts beside it."""
import base64
import hashlib
import os
import stat
import time
import zipfile


class PackageError(Exception):
    """What keeps a package from being made; its text is for the user."""


def write_wheel(path, files):
    """Zips {name: (bytes, whether it is executable)} with a RECORD beside the METADATA among them, so that the same
    files always give the same bytes: in the order of their names, all of the time $SOURCE_DATE_EPOCH or of one day."""
    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", "1767225600")))[:6]
    (info,) = (name.rsplit("/", 1)[0] for name in files if name.endswith(".dist-info/METADATA"))
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={digest(data)},{len(data)}\n" for name, (data, _) in sorted(files.items()) if name != record]
    files = files | {record: ("".join([*lines, f"{record},,\n"]).encode(), False)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (data, executable) in sorted(files.items()):
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system, entry.compress_type = 3, zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            archive.writestr(entry, data, compresslevel=9)


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
