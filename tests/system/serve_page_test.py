"""The page of the server in a real browser.

    serve_page_test.py SBTRAIN TEXT.jsonl

Skipped (exit status 77) where Playwright or a Chromium for it is missing: `pip install playwright`, and
`playwright install chromium` or the distribution's package chromium.
"""

import json
import shutil
import sys
import unittest
from pathlib import Path

try:
    from playwright.sync_api import Error, sync_playwright
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

from serving import Folder, Server

PROGRAM, TEXT = (str(Path(path).resolve()) for path in sys.argv[1:3])


def launch(playwright):
    """Playwright's own Chromium, or the system's."""
    options = {"args": ["--no-sandbox", "--disable-dev-shm-usage"]}
    try:
        return playwright.chromium.launch(**options)
    except Error:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        if path is None:
            print("skipped: no Chromium")
            sys.exit(77)
        return playwright.chromium.launch(executable_path=path, **options)


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Folder(PROGRAM, TEXT)

    @classmethod
    def tearDownClass(cls):
        cls.folder.close()

    def open(self, server, scheme="light"):
        page = browser.new_page(color_scheme=scheme)
        self.addCleanup(page.close)
        page.set_default_timeout(30000)
        self.messages = []
        page.on("console", lambda message: message.type == "error" and self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}/")
        return page

    def serve(self, *options, **more):
        server = Server(self.folder, *options, **more)
        self.addCleanup(lambda: self.assertEqual(server.stop(), 0))
        return server

    def test_text_and_attention(self):
        server = self.serve()
        for scheme in ("light", "dark"):
            page = self.open(server, scheme)
            page.wait_for_selector("#model:has-text('served')")
            page.fill("#prompt", "The first")
            page.fill("#tokens", "20")
            page.fill("#temperature", "0")
            page.click("#go")
            page.wait_for_selector("#status:has-text('tokens, prompt included')")
            answer = server.complete(prompt="The first", max_tokens=20, temperature=0, echo=True, logprobs=5)
            logprobs = answer["choices"][0]["logprobs"]
            shown = page.eval_on_selector_all("#text span", "nodes => nodes.map(n => [n.textContent, n.dataset.p])")
            self.assertEqual([text for text, _ in shown], logprobs["tokens"])
            self.assertIsNone(shown[0][1])
            self.assertTrue(all(0 <= float(p) <= 1 for _, p in shown[1:]))
            # The colours of a likely and an unlikely token differ.
            tints = set(page.eval_on_selector_all("#text span", "nodes => nodes.map(n => n.style.backgroundColor)"))
            self.assertGreater(len(tints), 5)
            # Its alternatives, by the pointer and by the keyboard.
            page.hover("#text span:nth-child(3)")
            self.assertGreaterEqual(page.locator("#alternatives tr").count(), 6)
            # The bars stand one below the other, also in the row of the token itself.
            lefts = page.eval_on_selector_all("#alternatives meter",
                                              "nodes => nodes.map(n => n.getBoundingClientRect().left)")
            self.assertIn("this one", page.inner_text("#alternatives"))
            self.assertGreaterEqual(len(lefts), 5)
            self.assertEqual(len(set(lefts)), 1, lefts)
            page.focus("#text")
            page.keyboard.press("ArrowRight")
            self.assertEqual(page.locator("#text span.chosen").count(), 1)
            self.assertEqual(page.eval_on_selector("#text span.chosen", "n => [...n.parentNode.children].indexOf(n)"), 3)
            # A map of each head, with the remainder.
            for layer, head in (("0", "0"), ("1", "1")):
                page.select_option("#layer", layer)
                page.select_option("#head", head)
                page.click("#show")
                page.wait_for_selector("#read tr:nth-child(3)")
                painted = page.evaluate(
                    "() => { const c = document.getElementById('map');"
                    " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
                    " let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; }")
                self.assertGreater(painted, 100)
                self.assertIn("remainder", page.inner_text("#read"))
            page.focus("#map")
            before = page.inner_text("#read")
            page.keyboard.press("ArrowUp")
            self.assertNotEqual(page.inner_text("#read"), before)
            self.assertEqual(self.messages, [])
            if len(sys.argv) > 3:
                page.screenshot(path=f"{sys.argv[3]}/page_{scheme}.png", full_page=True)

    def test_the_number_of_alternatives(self):
        page = self.open(self.serve())
        page.fill("#tokens", "5")
        for count, fewest, most in (("12", 10, 13), ("1", 1, 2), ("0", 1, 1)):
            page.fill("#count", count)
            page.click("#go")
            page.wait_for_selector("#status:has-text('tokens, prompt included')")
            page.hover("#text span:last-child")
            rows = page.locator("#alternatives tr").count() - 1
            self.assertTrue(fewest <= rows <= most, (count, rows))

    def test_stop(self):
        # Others keep the only slot, so that this request is still there when it is stopped.
        server = self.serve("--max-length", "2048", "--slots", "1")
        others = server.connect()
        others.request("POST", "/v1/completions", json.dumps({"prompt": "The", "max_tokens": 2000, "n": 500}))
        page = self.open(server)
        page.click("#go")
        page.wait_for_selector("#status:has-text('writing')")
        page.click("#stop")
        page.wait_for_selector("#status:has-text('stopped')")
        self.assertTrue(page.is_enabled("#go"))
        others.close()
        self.assertGreater(server.wait_until_idle(20)["sbtrain_sequences_left_total"], 1)

    def test_errors_and_tokens(self):
        server = self.serve("--max-length", "64", variables={"SERVE_TOKEN": "secret"})
        page = self.open(server)
        page.wait_for_selector("#token")
        page.fill("#token", "secret")
        page.dispatch_event("#token", "change")
        page.wait_for_selector("#model:has-text('served')")
        page.fill("#tokens", "100")
        page.click("#go")
        page.wait_for_selector("#status:has-text('max_tokens')")
        self.assertIn("bad", page.get_attribute("#status", "class"))


if __name__ == "__main__":
    with sync_playwright() as playwright:
        browser = launch(playwright)
        result = unittest.main(argv=sys.argv[:1], verbosity=2, exit=False).result
        browser.close()
    sys.exit(not result.wasSuccessful())
