"""What the test programs of the server share, which are called with SBTRAIN TEXT.jsonl."""

import atexit
import concurrent.futures
import json
import sys
import unittest
from pathlib import Path

from serving import Folder, Server

PROGRAM, TEXT = (str(Path(path).resolve()) for path in sys.argv[1:3])
ALL = concurrent.futures.ThreadPoolExecutor(max_workers=64)
folder = Folder(PROGRAM, TEXT)  # with the run that servers have unless a test makes one of its own
atexit.register(folder.close)


class Served(unittest.TestCase):
    """One server for all tests of a class."""

    options = ("--max-length", "256", "--slots", "4")

    @classmethod
    def setUpClass(cls):
        cls.server = Server(folder, *cls.options)

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        assert code == 0, (code, cls.server.messages())

    def error(self, expected, method, path, body=None, headers=None):
        status, answer = self.server.call(method, path, body, headers)
        self.assertEqual(status, expected, answer)
        self.assertEqual(set(answer["error"]), {"message", "type", "param", "code"})
        return answer["error"]


def request_bytes(body, close=False):
    data = json.dumps(body).encode()
    end = "Connection: close\r\n" if close else ""
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{end}Content-Length: {len(data)}\r\n\r\n".encode() + data


def run_tests():
    unittest.main("__main__", argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
