"""What the prose of README.md and of pages in docs/ says against what was measured (docs/results). Each sentence with a
figure stands here with the figure computed from the raw lines, and what it says in words, such as "with every seed", as a
condition. Where the experiment is measured anew, this says which sentences are no longer so, and what is."""

import re
import unittest
from operator import itemgetter
from statistics import mean

from published import best_accuracies, long_contexts, looking_up, page_of, raw_lines, runs_of, times_of

import plot_sweep
import tables

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BEYOND = LENGTHS[1:]
NTK = ", dynamic NTK at evaluation"
SB, WINDOW = "stick-breaking", "RoPE in a window of 256"


def plain(text):
    """A page in one line, without what Markdown adds."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("**", ""))
    return " ".join(text.split())


PAGES = {name: plain(page_of(name)) for name in ("README", "docs/results", "docs/long_context", "docs/experiments")}


def between(values, digits=2):
    """"A to B", of values in any order."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def percents(shares):
    """"A% to B%", of shares in any order."""
    return f"{100 * min(shares):.0f}% to {100 * max(shares):.0f}%"


def scores_in(lines):
    """{(task, model, length): [a score of each seed]}"""
    scores = {}
    for line in lines:
        for task in line.get("tasks", []):
            for row in task["lengths"]:
                if "score" in row:
                    scores.setdefault((task["task"], line["label"], row["length"]), []).append(row["score"])
    return scores


def saved_by_skipping(name):
    """{(part, length): the share of its time} with the default threshold."""
    rows = times_of(name)
    whole = {row["length"]: row for row in rows if row["epsilon"] == 0}
    return {(part, row["length"]): 1 - row[f"{part}_seconds"] / whole[row["length"]][f"{part}_seconds"]
            for row in rows if 0 < row["epsilon"] < 1e-6 for part in ("model_forward", "model_training")}


class Statements(unittest.TestCase):
    maxDiff = None

    def says(self, page, text):
        if text not in PAGES[page]:
            self.fail(f"{page}.md does not say what the raw lines do: {text!r}")


class Losses(Statements):
    """`windows` and `same` have the losses of all seeds, in their order, by model and length; `benefit` what
    `sbtrain eval --benefit` has of them by model and context."""

    @classmethod
    def read(cls, name):
        cls.windows, cls.same, cls.benefit, cls.results = {}, {}, {}, {}
        lines = sorted(raw_lines(name), key=itemgetter("file"))  # seed-1/..., seed-2/...
        for line in lines:
            model = line["label"].removeprefix(SB + ", ")
            if "lengths" in line:
                result = tables.losses_of(model, line)
                cls.results.setdefault((model, bool(line["same_targets"])), []).append(result)
                for length, loss in result.values.items():
                    (cls.same if line["same_targets"] else cls.windows).setdefault((model, length), []).append(loss)
            for row in line.get("benefit", []):
                cls.benefit.setdefault((model, row["context"]), []).append(row)
        return lines

    def ahead(self, table, first, second, lengths):
        """Whether `first` has the lower loss with every seed at every length."""
        return all(a < b for length in lengths for a, b in zip(table[first, length], table[second, length]))

    def gap(self, table, first, second, length):
        return mean(table[first, length]) - mean(table[second, length])

    def rises(self, table, model, begin, end):
        """How much the loss rises, with each seed."""
        return [b - a for a, b in zip(table[model, begin], table[model, end])]

    def lost_without(self, model, context):
        """What the loss is higher by with only so many of the tokens."""
        return -mean(row["difference"] for row in self.benefit[model, context])

    def behind(self, model, base, length):
        """(mean, low, high) over documents, in windows of their own text."""
        sums = tables.difference(self.results[model, False], self.results[base, False], length)
        return (tables.mean_of(sums), *tables.interval(sums, 1000))


class Lengths(Losses):
    """Models of 23M parameters, three seeds."""

    @classmethod
    def setUpClass(cls):
        cls.bigrams = {}
        for line in cls.read("lengths_23m"):
            for row in line.get("lengths", []):
                if not line["same_targets"]:
                    cls.bigrams.setdefault((line["label"], row["length"]), []).append(row["recall"]["bigram"]["ar"]["loss"])

    OTHERS = ("ALiBi", "RoPE", "RoPE" + NTK, "FIRE", "no position", "CoCA", "CoCA" + NTK, "CoCA, strict",
              "CoCA, strict" + NTK, WINDOW, "ReBased", "ReBased and short convolutions in turns")

    def test_stick_breaking_beyond_the_trained_length(self):
        windows, same = self.windows, self.same
        for other in self.OTHERS:
            self.assertTrue(all(self.gap(windows, SB, other, length) < 0 for length in BEYOND), other)
            self.assertTrue(self.ahead(windows, SB, other, BEYOND[1:]), other)
            self.assertTrue(self.ahead(same, SB, other, BEYOND), other)
        self.says("docs/results", "Stick-breaking has the lowest loss of all from 1024 tokens on, which is two to 32 times the "
                  "trained length; with every seed from 2048 on, and on the same targets from 1024 on.")
        falls = self.rises(same, SB, 4096, 512)
        far = self.lost_without(SB, 512)
        alibi = mean(self.rises(same, "ALiBi", 1024, 512))
        self.says("docs/results", f"on the same targets it gains {mean(falls):.2f} nats from windows of 512 to those of 4096 "
                  f"tokens ({between(falls)} with each seed), {far:.2f} of them from what lies more than 512 tokens "
                  f"back, where ALiBi gains {alibi:.2f}")
        self.says("README", f"the models gain {mean(falls):.2f} nats from windows of 512 to those of 4096 tokens, {far:.2f} of "
                  f"them from what lies beyond the trained length, and no more after that; with ALiBi {alibi:.2f}")
        later = self.rises(same, SB, 4096, 16384)
        self.says("docs/results", f"on the same targets it loses {max(later):.2f} nats with one seed from there to "
                  f"16384 tokens, and {mean(later):.2f} on average")
        self.assertTrue(all(mean(windows[SB, a]) > mean(windows[SB, b]) for a, b in zip(LENGTHS[:4], LENGTHS[1:5])))
        self.assertTrue(min(later) < 0 < max(later))
        self.says("docs/results", f"it falls by {mean(falls):.2f} nats ({between(falls)} by seed) from 512 to 4096 tokens, and on "
                  f"average no further (one seed falls by {-min(later):.2f} more, one rises by {max(later):.2f}), where ALiBi falls by "
                  f"{alibi:.2f} to 1024")
        self.says("docs/results", "stick-breaking has a loss of {:.2f}, {:.2f} and {:.2f}, ALiBi of {:.2f}, {:.2f} and "
                  "{:.2f}.".format(*self.bigrams[SB, 16384], *self.bigrams["ALiBi", 16384]))

    def test_other_positions_beyond_the_trained_length(self):
        windows, same = self.windows, self.same
        for model in ("RoPE", "no position"):
            for a, b in zip(LENGTHS, BEYOND):
                self.assertTrue(min(self.rises(windows, model, a, b)) > 0, (model, b))
        twice = self.rises(windows, "RoPE" + NTK, 512, 1024)
        self.assertTrue(min(twice) > 0)
        self.says("docs/results", f"at twice the length the loss is higher by {mean(twice):.2f} nats in windows of their own "
                  f"text, with every seed though that text is easier, and by "
                  f"{mean(self.rises(same, 'RoPE' + NTK, 512, 1024)):.2f} on the same targets")
        self.says("docs/results", "from {} to {} nats at 32 times the length, and from {} to {} at twice".format(
            *(tables.spread(windows[model, length], 2) for length in (16384, 1024) for model in ("RoPE", "RoPE" + NTK))))
        self.says("docs/results", "at 32 times the length ALiBi has {} nats, FIRE {} and RoPE with dynamic NTK "
                  "{}".format(*(tables.spread(windows[model, 16384], 2) for model in ("ALiBi", "FIRE", "RoPE" + NTK))))
        for fire in ("FIRE", "FIRE, L0 of 128"):
            self.assertTrue(self.ahead(windows, "ALiBi", fire, BEYOND))
        self.says("docs/results", f"at 32 times the length it is ahead by {self.gap(windows, 'FIRE', 'ALiBi', 16384):.1f} nats; "
                  f"with L0 at 128 by {self.gap(windows, 'FIRE, L0 of 128', 'ALiBi', 16384):.1f}")
        self.says("docs/results", f"ALiBi is ahead of FIRE with every seed, at 16384 tokens by "
                  f"{self.gap(windows, 'FIRE', 'ALiBi', 16384):.1f} nats on average")
        ends = windows["no position", 16384]
        self.says("docs/results", f"to between {min(ends):.1f} and {max(ends):.1f} nats")
        for scaled in ("", NTK):
            self.assertTrue(self.ahead(windows, "CoCA" + scaled, "RoPE" + scaled, BEYOND), scaled)
        self.says("docs/results", "at 16384 tokens it has {:.2f} nats (RoPE {:.2f}), with dynamic NTK {:.2f} (RoPE {:.2f})".format(
            *(mean(windows[model + scaled, 16384]) for scaled in ("", NTK) for model in ("CoCA", "RoPE"))))
        self.says("docs/results", "at 32 times the length {} nats against {}, both with dynamic NTK {} against "
                  "{}".format(*(tables.spread(windows[model + scaled, 16384], 2) for scaled in ("", NTK)
                                for model in ("CoCA", "RoPE"))))
        self.assertTrue(self.ahead(windows, "ALiBi", "RoPE" + NTK, BEYOND))
        self.says("docs/results", f"Within the trained length CoCA is {self.gap(windows, 'CoCA', 'RoPE', 512):.2f} nats behind "
                  "RoPE")

    def test_the_trained_length(self):
        behind, low, high = self.behind(SB, "RoPE", 512)
        seeds = [a - b for a, b in zip(self.windows[SB, 512], self.windows["RoPE", 512])]
        self.assertTrue(min(seeds) > 0)
        self.says("docs/results", f"Here RoPE is ahead by {behind:.3f} nats ({low:.3f} to {high:.3f} over documents; {seeds[0]:.3f}, "
                  f"{seeds[1]:.3f} and {seeds[2]:.3f} with the three seeds), and ALiBi by "
                  f"{self.gap(self.windows, SB, 'ALiBi', 512):.3f}.")
        self.says("docs/results", f"RoPE is ahead with every seed, by {behind:.3f} nats ({low:.3f} to {high:.3f} over documents)")
        self.says("README", f"At the trained length rotary positions (RoPE) are ahead, by {behind:.3f} nats.")
        self.says("README", f"where the small ones have it {behind:.3f} ahead")

    def test_windows_and_longer_rows(self):
        windows, same = self.windows, self.same
        for reach in ("128", "256"):
            model = f"RoPE in a window of {reach}"
            spread = [mean(same[model, length]) for length in LENGTHS]
            self.assertLess(max(spread) - min(spread), 0.0015, model)
        model = "RoPE in a window of 512"
        lower = mean(self.rises(same, model, 16384, 512))
        self.says("docs/results", f"It is lower there by {lower:.2f} nats because in windows of 512 tokens the targets see 256 to "
                  f"511 tokens, in longer ones 512; what layers hand on from further back costs "
                  f"{-self.lost_without(model, 512):.3f} nats")
        rope, own = "RoPE, rows of 4096", "rows of 4096"
        self.says("docs/results", f"it is behind by {self.gap(windows, rope, SB, 4096):.2f} nats at 4096 tokens "
                  f"({mean(windows[rope, 4096]):.3f} and {mean(windows[SB, 4096]):.3f}), and at every other length")
        self.assertTrue(all(self.gap(windows, SB, rope, length) < 0 for length in LENGTHS))
        self.assertTrue(self.ahead(windows, own, rope, LENGTHS))
        self.says("docs/results", f"by {self.gap(windows, rope, own, 4096):.2f} nats at 4096 tokens")
        self.says("docs/results", f"they cost stick-breaking {self.gap(windows, own, SB, 4096):.2f} nats too")
        ntk = [mean(self.rises(same, rope + NTK, 4096, length)) for length in (8192, 16384)]
        self.says("docs/results", f"by {ntk[0]:.2f} nats at twice that and {ntk[1]:.2f} at four times")
        self.says("docs/results", "RoPE with rows of eight times the length is {} nats behind stick-breaking with short rows up to "
                  "their length, and {:.1f} and {:.1f} at twice and four times that (with dynamic NTK {:.1f} and {:.1f})".format(
                      between([self.gap(windows, rope, SB, length) for length in LENGTHS[:4]], 1),
                      *(self.gap(windows, rope + scaled, SB, length) for scaled in ("", NTK) for length in (8192, 16384))))

    def test_fires_threshold(self):
        fire, shorter = "FIRE", "FIRE, L0 of 128"
        lower = [a - b for a, b in zip(self.windows[fire, 16384], self.windows[shorter, 16384])]
        self.assertTrue(min(lower) > 0)
        self.says("docs/results", f"on average lower by {mean(lower):.2f} nats at 16384 ({min(lower):.3f} to {max(lower):.2f} by "
                  "seed, less than the seeds differ by), where it has risen by {:.2f} and {:.2f}".format(
                      *(mean(self.rises(self.windows, model, 512, 16384)) for model in (fire, shorter))))

    def test_variants(self):
        windows, same = self.windows, self.same
        vector, own = "remainder to a learned vector", "remainder to the own value"
        self.assertTrue(all(abs(self.gap(table, vector, SB, length)) < 0.0055 for table in (windows, same)
                            for length in LENGTHS[:4]))
        costs = [self.gap(table, own, SB, length) for table in (windows, same) for length in LENGTHS]
        self.says("docs/results", f"The own value costs {between(costs)} at every length.")
        gate = [self.gap(windows, SB, "forget gate", length) for length in LENGTHS[:4]]
        self.says("docs/results", f"A forget gate brings {min(gate):.3f} to {max(gate):.3f} nats on average up to eight times the "
                  "length, with two of three seeds")
        self.says("docs/results", "with a weight of 0.1, costs {:.2f} nats at the trained length".format(
            self.gap(windows, "forget gate and a loss that lowers it", SB, 512)))
        itself = [a - b for a, b in zip(windows[SB, 512], windows["attending the token itself", 512])]
        self.assertTrue(min(itself) > 0)
        self.says("docs/results", f"Attending the token itself brings {mean(itself):.3f} nats at the trained length, with every "
                  "seed")
        norm = [self.gap(table, "head norm", SB, length) for table in (windows, same) for length in LENGTHS]
        both = [self.gap(table, "head norm, remainder to a learned vector", SB, length) for table in (windows, same)
                for length in LENGTHS]
        self.says("docs/results", f"Head norm costs {between(norm)} nats, {between(both)} with a learned vector.")
        heads = [self.gap(windows, "three heads of 128", SB, length) for length in LENGTHS]
        self.says("docs/results", f"Three heads of 128 in place of six of 64 cost {mean(heads):.2f} on average.")


class LengthsAgain(Losses):
    """The same models of stick-breaking and RoPE, trained once more."""

    @classmethod
    def setUpClass(cls):
        cls.read("lengths_23m")
        before = cls.windows, cls.same
        cls.read("lengths_23m_cad232f5")
        cls.of_windows, cls.of_same = cls.pairs = tuple(zip(before, (cls.windows, cls.same)))  # (before, now) of each

    def changes(self, model, *pairs):
        """The largest of the mean over seeds, and of a seed."""
        losses = [(before[model, length], now[model, length]) for before, now in pairs for length in LENGTHS]
        return (max(abs(mean(a) - mean(b)) for a, b in losses), max(abs(x - y) for a, b in losses for x, y in zip(a, b)))

    def test_stick_breaking_is_where_it_was(self):
        self.says("docs/results", f"within {self.changes(SB, self.of_windows)[0]:.3f} nats in windows of their own text and "
                  f"{self.changes(SB, self.of_same)[0]:.3f} on the same targets")
        falls = self.rises(self.same, SB, 4096, 512)
        self.says("docs/results", f"gains {mean(falls):.2f} nats to eight times the length ({between(falls)} with each seed)")
        ahead, low, high = self.behind(SB, "RoPE", 512)
        self.says("docs/results", f"At the trained length RoPE is ahead by {ahead:.3f} nats ({low:.3f} to {high:.3f} over documents)")

    def test_rope_is_not(self):
        (means, seed), (ntk_means, ntk_seed) = (self.changes(model, *self.pairs) for model in ("RoPE", "RoPE" + NTK))
        self.says("docs/results", f"by up to {seed:.2f} nats with one seed and {means:.2f} on average, with dynamic NTK by up to "
                  f"{ntk_seed:.2f} and {ntk_means:.2f}")
        own, fixed = (sorted(self.rises(table, "RoPE" + NTK, 512, 1024)) for table in (self.windows, self.same))
        self.assertEqual([rise < 0 for rise in own], [True, True, False])
        self.says("docs/results", "two of three seeds have a lower loss in windows of twice the trained length than at that length, "
                  f"by {-own[1]:.2f} and {-own[0]:.2f} nats, since their text is easier; on the same targets it is higher by "
                  f"{fixed[0]:.2f} to {fixed[-1]:.2f}")
        for coca in ("CoCA", "CoCA, strict"):
            for before, now in self.pairs:
                for scaled in ("", NTK):
                    for length in BEYOND:
                        ahead = sum(a < b for a, b in zip(now["RoPE" + scaled, length], before[coca + scaled, length]))
                        expected = 2 if now is self.windows and (scaled, length) == (NTK, 1024) else 0
                        self.assertEqual(ahead, expected, (coca, scaled, length))


class Needles(Statements):
    @classmethod
    def setUpClass(cls):
        cls.scores = scores_in(raw_lines("needles_23m"))
        cls.scores |= {place: scores for place, scores in scores_in(raw_lines("needles_vt_23m")).items() if place[0] == "vt"}

    def score(self, task, model, length):
        return mean(self.scores[task, model, length])

    def percent(self, task, model, length):
        return f"{100 * self.score(task, model, length):.0f}%"

    def test_stick_breaking(self):
        passkeys = [self.scores["passkey", SB, length] for length in (512, 1024, 2048, 4096, 8192)]
        self.assertEqual({len(seeds) for seeds in passkeys}, {5})
        self.assertTrue(all(min(seeds) == 1 for seeds in passkeys[:-1]))
        single = self.scores["niah_single_1", SB, 8192]
        shares = [percents(seeds) for seeds in (passkeys[-1], single)]
        self.says("docs/results", "stick-breaking finds every passkey in texts eight times as long as those of the training and "
                  f"{shares[0]} in 16 times, and there {shares[1]} of the second kind of needle")
        multi = [self.percent("niah_multikey_2", SB, length) for length in (1024, 4096, 8192)]
        self.says("docs/results", f"stick-breaking {multi[0]}, and {multi[1]} in eight times")
        eight = tables.spread([100 * score for score in self.scores["niah_multikey_2", SB, 4096]], 0).replace(" ±", "% ±")
        self.says("docs/results", f"{shares[0]} of the passkeys in texts 16 times as long, and {eight}% among many needles at eight "
                  "times, where RoPE finds none of either at twice the length")
        self.says("README", "with stick-breaking they find it in all texts of 4096 tokens and in at least "
                  f"{100 * min(passkeys[-1]):.0f}% of those of 8192 (five seeds)")
        self.says("README", f"Among many needles stick-breaking finds {multi[0]} at twice the trained length and {multi[2]} at 16 "
                  "times, RoPE none")
        for task in ("passkey", "niah_single_1", "niah_multikey_2"):
            self.assertTrue(all(self.score(task, "RoPE", length) == 0 for length in (1024, 2048, 4096, 8192)), task)

    def test_others(self):
        self.says("docs/results", "RoPE finds none in twice the length, ALiBi {}, stick-breaking".format(
            self.percent("niah_multikey_2", "ALiBi", 1024)))
        self.says("docs/results", f"ALiBi {self.percent('passkey', 'ALiBi', 2048)} in four times")
        self.says("docs/results", "but fewer among many ({:.2f} against {:.2f})".format(
            *(self.score("niah_multikey_2", model, 512) for model in ("CoCA, strict", SB))))
        worst = sorted(self.scores["niah_multikey_2", "CoCA, strict", 512])[:2]
        self.says("docs/results", "two seeds of strict CoCA ({:.2f} and {:.2f})".format(*worst))
        others = (score for model in (SB, "RoPE", "ALiBi", "CoCA") for score in self.scores["niah_multikey_2", model, 512])
        self.assertGreaterEqual(min(others), 0.9)

    def test_an_earlier_revision(self):
        earlier = scores_in(raw_lines("needles_23m_6257f116"))
        changed = max(abs(a - b) for place in earlier if place[:2] == ("niah_multikey_2", SB)
                      for a, b in zip(earlier[place], self.scores[place]))
        self.says("docs/results", f"among many needles a single seed of it changed by up to {changed:.2f}")
        before = {place: f"{100 * mean(scores):.0f}%" for place, scores in earlier.items() if place[0] == "passkey"}
        coca, strict = (before["passkey", model + NTK, 8192] for model in ("CoCA", "CoCA, strict"))
        self.says("docs/results", f"CoCA with dynamic NTK found {coca} of the passkeys at 16 times the length, less than ALiBi, and "
                  f"its strict form {strict}")
        self.assertLess(mean(earlier["passkey", "CoCA" + NTK, 8192]), mean(earlier["passkey", "ALiBi", 8192]))
        self.says("docs/results", f"with an earlier revision {coca} and {strict} at 16 times")
        self.says("docs/results", f"RoPE's one seed with dynamic NTK found {max(earlier['passkey', 'RoPE' + NTK, 1024]):.0%}")
        self.says("docs/results", f"and one of CoCA was at {min(earlier['niah_multikey_2', 'CoCA', 512]):.2f}")
        self.assertEqual({min(earlier["passkey", SB, length]) for length in (512, 1024, 2048, 8192)}, {1})
        self.assertEqual(sorted(earlier["passkey", SB, 4096]), [0.99, 1, 1, 1, 1])
        failed = [sum(score < 0.5 for score in scores["niah_multikey_2", "CoCA, strict", 512]) for scores in (earlier, self.scores)]
        self.assertEqual(failed, [1, 2])

    def test_variable_tracking(self):
        named = [self.score("vt", SB, length) for length in (1024, 2048, 4096, 8192)]
        self.assertTrue(all(0.65 < share < 0.75 for share in (self.score("vt", "RoPE", 1024), *named[:2])))
        self.assertTrue(0.45 < named[3] < 0.55 and self.score("vt", "RoPE", 2048) == 0)
        self.says("docs/results", "Stick-breaking and RoPE name about seven in ten of them at the trained length, stick-breaking as "
                  "many at twice that and half at eight times, RoPE none at twice.")
        apart = max(max(seeds) - min(seeds) for (task, _, _), seeds in self.scores.items() if task == "vt")
        self.says("docs/results", f"Seeds differ by up to {apart:.2f}")
        passkeys = {place[1:]: scores for place, scores in scores_in(raw_lines("needles_vt_23m")).items() if place[0] == "passkey"}
        twice = passkeys["RoPE" + NTK, 2048]
        self.says("docs/results", "RoPE learns to find more passkeys with dynamic NTK, {:.0%}, {:.0%} and {:.0%} at twice their "
                  "length, and {:.0%} at four times with one seed; without it {:.0%} with one seed".format(
                      *twice, max(passkeys["RoPE" + NTK, 4096]), max(passkeys["RoPE", 2048])))
        self.says("docs/results", f"trained in rows of 1024 tokens, {percents(twice)} with every seed")
        self.says("README", f"trained on rows of 1024, {percents(twice)} of those of 2048")
        self.says("docs/results", f"stick-breaking finds {percents(passkeys[SB, 8192])} at eight times.")
        earlier = scores_in(raw_lines("needles_vt_23m_6257f116"))
        before = [earlier["vt", SB, length] for length in (1024, 2048, 4096, 8192)]
        self.says("docs/results", "gave stick-breaking {:.2f}, {:.2f}, {:.2f} and {:.2f}".format(*map(mean, before)))
        changed = max(abs(a - b) for place in earlier if place[0] == "vt" for a, b in zip(earlier[place], self.scores[place]))
        self.says("docs/results", f"single seeds changed by up to {changed:.2f}")

    def test_rope_with_dynamic_ntk(self):
        found = sorted(self.scores["passkey", "RoPE" + NTK, 1024])
        self.assertEqual(found[:2], [0, 0])
        self.assertTrue(all(self.score("passkey", "RoPE" + NTK, length) == 0 for length in (2048, 4096, 8192)))
        self.says("docs/results", f"(with dynamic NTK {found[2]:.0%} of the passkeys with one seed of three, else none;")
        self.says("README", f"but for one seed that finds {found[2]:.0%} of those of 1024 if the positions are scaled")

    def test_coca(self):
        ntk, strict = "CoCA" + NTK, "CoCA, strict" + NTK
        at = {(model, length): self.percent("passkey", model, length) for model in (ntk, strict, "CoCA")
              for length in (1024, 4096, 8192)}
        self.says("docs/results", f"finds {at[ntk, 1024]} of the passkeys in twice the length")
        self.says("docs/results", f"and {at[ntk, 4096]} in eight times, the strict form {at[strict, 4096]}; without scaling "
                  f"{at['CoCA', 1024]} and {at['CoCA', 4096]}")
        self.says("docs/results", f"it is {at[ntk, 8192]} and {at[strict, 8192]}")
        self.says("docs/results", f"{at[ntk, 1024]} at twice the length, {at[ntk, 4096]} at eight and {at[ntk, 8192]} at 16 times "
                  f"(strict: all, {at[strict, 4096]}, {at[strict, 8192]};")


class Pair(Losses):
    """350M parameters, one seed."""

    @classmethod
    def setUpClass(cls):
        cls.scores = {place: score for place, (score,) in scores_in(cls.read("pair_350m")).items()}

    def test_the_trained_length(self):
        behind = self.behind("RoPE", SB, 2048)
        again = self.behind("RoPE, on four GPUs", SB, 2048)
        self.says("docs/results", "by {:.3f} nats ({:.3f} to {:.3f} over documents), of one seed".format(*behind))
        self.says("docs/results", "stick-breaking is ahead by {:.3f} ({:.3f} to {:.3f})".format(*behind))
        self.says("docs/results", f"It ended {behind[0] - again[0]:.3f} nats lower, " +
                  "{:.3f} ({:.3f} to {:.3f}) behind stick-breaking".format(*again))
        self.says("README", f"At the trained length it is {behind[0]:.3f} behind here")

    def test_longer_contexts(self):
        gained, = self.benefit[SB, 2048]
        low, high = (-bound for bound in reversed(gained["difference_interval"]))
        self.says("docs/results", f"On the same targets it falls by {-gained['difference']:.2f} nats ({low:.2f} to {high:.2f} over "
                  "documents), all of it up to eight times the length.")
        self.assertLess(abs(mean(self.rises(self.same, SB, 16384, 32768))), 0.005)
        self.assertTrue(all(max(self.rises(self.windows, SB, a, 2 * a)) < 0 for a in (2048, 4096, 8192, 16384)))
        rises = [mean(self.rises(self.same, model, 2048, 32768)) for model in ("RoPE", "RoPE, rate 5e-4", "RoPE" + NTK)]
        self.says("docs/results", f"on the same targets by {rises[0]:.1f} nats at 16 times instead of {rises[1]:.1f}. Dynamic NTK "
                  f"softens the rise to {rises[2]:.1f} nats")
        self.says("docs/results", f"RoPE's loss rises beyond the trained length, by {rises[0]:.1f} nats to 16 times, with dynamic "
                  f"NTK by {rises[2]:.1f}")
        far = [self.gap(self.windows, model, SB, 32768) for model in ("RoPE", "RoPE" + NTK)]
        self.says("README", f"in those of 32,768 tokens RoPE is {far[0]:.1f} nats behind stick-breaking, or {far[1]:.2f} with "
                  "dynamic NTK")

    def test_needles(self):
        tasks = ("passkey", "niah_single_1")
        self.assertEqual({self.scores[task, SB, length] for task in tasks for length in (2048, 4096, 8192, 16384, 32768)}, {1})
        self.assertEqual({self.scores[task, "RoPE", length] for task in tasks for length in (4096, 8192, 16384, 32768)}, {0})
        ntk = [round(100 * self.scores[task, "RoPE" + NTK, length]) for length in (4096, 8192) for task in tasks]
        self.assertEqual({self.scores[task, "RoPE" + NTK, length] for task in tasks for length in (16384, 32768)}, {0})
        self.says("docs/results", "RoPE finds none in twice the length, with dynamic NTK {} and {} of a hundred, in four times {} "
                  "and {}, and none beyond".format(*ntk))
        again = [round(100 * self.scores[task, "RoPE, on four GPUs" + NTK, length]) for length in (8192, 16384)
                 for task in tasks]
        self.says("docs/results", "and found {} and {} of the needles at four times with dynamic NTK, {} and {} at eight "
                  "times".format(*again))
        self.says("README", f"RoPE in none of 4096, and with dynamic NTK in {ntk[0]}% of these, {ntk[2]}% of 8192 and none beyond")
        alone, *twice = (round(100 * self.scores["passkey", "RoPE, on four GPUs" + scaled, 4096]) for scaled in ("", NTK))
        self.says("README", f"in a repetition RoPE found {alone}% of 4096, and with dynamic NTK {twice[0]}%, {again[0]}% and "
                  f"{again[2]}% up to 16,384")
        self.says("docs/results", f"(in a repetition {alone}%, and {twice[0]}%, {again[0]}% and {again[2]}%)")


class Others(Statements):
    def test_skipping(self):
        small, large = map(saved_by_skipping, ("skip_23m", "pair_350m"))
        self.says("docs/results", f"the forward pass of a small model takes {small['model_forward', 16384]:.0%} less time, at 350M "
                  f"{large['model_forward', 16384]:.0%} and at 65,536 tokens {large['model_forward', 65536]:.0%}")
        self.says("docs/results", f"the forward pass of the model takes {small['model_forward', 16384]:.0%} less time at 16384 "
                  "tokens, where the paper's 1B model is 9.3% faster. As the backward pass skips the same keys, forward and "
                  f"backward together take {small['model_training', 16384]:.0%} less.")
        self.says("README", f"which saves {large['model_training', 65536]:.0%} of the time of a forward and backward pass")
        read = [f"{row['keys_read']:.0%}" for row in times_of("pair_350m") if 0 < row["epsilon"] < 1e-6]
        self.says("docs/results", "with its own threshold of 2^-24 {} at 2048 tokens, {} at 16,384 and {} at 65,536".format(*read))

    def test_associative_recall(self):
        epochs = {variant: [round(run["epochs"]) for run in runs_of("mqrar_192") if run["variant"] == variant]
                  for variant in ("stickbreaking", "softmax_rope")}
        self.assertEqual(epochs["stickbreaking"], [2, 2, 2])
        self.says("docs/results", "RoPE does with every seed, after {} to {} epochs, stick-breaking after 2".format(
            min(epochs["softmax_rope"]), max(epochs["softmax_rope"])))
        accuracies = [run["best_accuracy"] for run in runs_of("mqrar_head")]
        self.assertEqual((len(accuracies), sum(a >= 0.99 for a in accuracies), sum(a < 0.01 for a in accuracies)), (16, 11, 3))
        self.says("docs/results", "Of the 16 runs eleven reach 0.99, three stay at a guess")
        longer = best_accuracies("mqar_1024_short")
        self.says("docs/results", f"{longer['rebased']:.3f} against {longer['based']:.3f}. The paper's runs are four times as long")
        accuracies = {}  # {(variant, rate): of each seed}
        for run in sorted(runs_of("mqar_512_short"), key=lambda run: run["grid"]["seed"]):
            accuracies.setdefault((run["variant"], run["grid"]["train.lr"]), []).append(run["best_accuracy"])
        best = {variant: list(map(max, accuracies[variant, "3e-3"], accuracies[variant, "1e-2"])) for variant in ("based", "rebased")}
        self.says("docs/results", "it is behind with every seed, {} against {}".format(
            *(tables.spread(best[variant], 3) for variant in ("rebased", "based"))))
        ahead = [based - rebased for based, rebased in zip(best["based"], best["rebased"])]
        self.says("docs/results", "by {:.2f}, {:.3f} and {:.2f}".format(*ahead))
        apart = max(max(seeds) - min(seeds) for seeds in accuracies.values())
        self.says("docs/results", f"at one rate seeds differ by up to {apart:.2f}")
        earlier = {(revision, run["variant"], run["grid"]["train.lr"]): run["best_accuracy"] for revision in ("1bc81c6e", "cad232f5")
                   for run in runs_of(f"mqar_512_short_{revision}")}
        others = {place: value for place, value in earlier.items() if value != accuracies[place[1:]][0]}
        self.assertEqual([variant for _, variant, _ in others], ["rebased", "rebased", "based"])
        self.says("docs/results", "have the same figures in five of eight runs; in the other three ReBased had {:.3f} and {:.3f}, "
                  "which is ahead, and Based {:.3f}".format(*others.values()))
        lead = earlier["1bc81c6e", "rebased", "1e-2"] - earlier["1bc81c6e", "based", "3e-3"]
        self.says("docs/results", f"but with one of them by {min(ahead):.3f}, and another run, rounded otherwise, was {lead:.3f} ahead")

    def test_attention_maps(self):
        heads = {line["label"]: [head for head in line["heads"] if head["layer"] == 1] for line in raw_lines("attention_maps")}
        top = {label: [head["iou_top"] for head in of_model] for label, of_model in heads.items()}
        _, second, third = top[SB]
        self.says("docs/experiments", f"the largest weight of the third head is on the answer for {third:.1%} of the queries, of the "
                  f"second for {second:.0%}")
        self.says("docs/experiments", "their largest weight is on the answer for {:.0%}, {:.0%} and {:.0%} of the queries; but only "
                  "{:.2f} to {:.2f} of their weight lies there".format(*top["RoPE"], *(
                      bound(head["mass"] for head in heads["RoPE"]) for bound in (min, max))))
        self.says("docs/results", f"for {third:.1%} of the queries, and")
        self.says("docs/results", f"heads do so for {percents(top['RoPE'])}")

    def test_attention_of_based_and_rebased(self):
        heads = {line["label"]: line["heads"] for line in raw_lines("mqar_positions")}
        every = [head for of_model in heads.values() for head in of_model]
        queries = [of_model[0]["queries"] for of_model in heads.values()]
        self.says("docs/results", f"({queries[0]:,} and {queries[2]:,} queries")
        soft = [mean(head["iou_soft"] for head in of_model) for of_model in heads.values()]  # Based, ReBased; 512, 1024
        self.says("docs/results", "has twice as much ({:.3f} against {:.3f}, {:.3f} against {:.3f})".format(*soft))
        self.assertEqual(len(every) - len(looking_up(every)), 2)
        self.says("docs/results", f"and all but two of the {len(every)} do, {sum(head['iou_top'] > 0.99 for head in every)} of them "
                  "for more than 99%")
        masses = {line["label"]: [head["mass"] for head in looking_up(line["heads"])] for line in raw_lines("overlap")}
        times = mean(masses["overlap_rebased"]) / mean(masses["overlap_based"])
        self.says("docs/results", f"the heads of ReBased that look the value up have {times:.1f} times as much of their weight there")

    def test_the_kernel_of_rebased(self):
        points = plot_sweep.best_points(runs_of("rebased_kernel"), "model.width", "accuracy")
        best = {(variant, width): accuracy for variant, of_width in points.items() for width, (accuracy,) in of_width.items()}
        normal = ("rebased", "no_beta", "no_gamma", "no_gamma_beta")
        without = ("no_norm", "no_norm_beta", "no_norm_gamma", "no_norm_gamma_beta")
        reached = {width: [between([best[variant, width] for variant in group]) for group in (normal, without)]
                   for width in (16, 32)}
        self.says("docs/results", f"Without it 32 channels reach {reached[32][1]} instead of {reached[32][0]}, and 16 channels "
                  f"{reached[16][1]} instead of {reached[16][0]}")
        self.says("docs/results", "32 channels reach {:.2f} with both, {:.2f} without β, {:.2f} without γ, and {:.2f} without "
                  "either, the plain square".format(*(best[variant, 32] for variant in without)))
        lost = {width: [best["rebased", width] - best[variant, width] for variant in normal[1:]] for width in (16, 24, 32)}
        self.says("docs/results", f"24 channels lose {between(lost[24])} and 32 channels {between(lost[32])}")
        self.says("docs/results", f"16 channels gain up to {-min(lost[16]):.2f}")

    def test_rebased_beside_attention_without_positions(self):
        points = plot_sweep.best_points(runs_of("rebased_gap_23m"), "train.lr", "loss")
        best = {variant: min(loss for loss, in of_rate.values()) for variant, of_rate in points.items()}
        ahead, behind = best["none"] - best["rebased"], best["rebased_learned"] - best["none_learned"]
        self.says("docs/results", f"is ahead of attention without positions, by {ahead:.2f} nats")
        self.says("docs/results", f"which the sizes of the paper's models point to, it is behind by {behind:.2f}")
        self.says("docs/results", f"it is behind by {behind:.2f} nats, each at the best of four rates; without any it is ahead by "
                  f"{ahead:.2f}")
        at_4e3 = next(run["best_loss"] for run in runs_of("rebased_gap_23m") if run["name"] == "rebased/lr=4e-3")
        self.says("docs/results", "More layers help it by {:.2f}, GPT-2's layout by {:.2f}, the larger rate by {:.2f}.".format(
            best["rebased"] - best["rebased_deep"], best["rebased"] - best["rebased_gpt2"], at_4e3 - best["rebased"]))
        self.says("docs/results", "learned positions help attention by {:.2f} nats and ReBased by {:.2f}".format(
            best["none"] - best["none_learned"], best["rebased"] - best["rebased_learned"]))

    def test_the_warmup_of_1b(self):
        with_mup, without = (line["validation"]["loss"] for line in raw_lines("warmup_1b_sb"))
        self.assertTrue(all(a > b for a, b in zip(with_mup, with_mup[1:])))
        self.says("docs/results", f"the loss falls all the way, to {with_mup[-1]:.2f} nats")
        self.says("docs/results", f"50 steps at the full rate take off another {with_mup[-2] - with_mup[-1]:.1f} nats")
        self.says("docs/results", f"rises beyond that by {without[-2] - min(without):.1f} nats, of which the 50 steps at 0.01 bring "
                  f"back {without[-2] - without[-1]:.2f}")

    def test_long_contexts(self):
        losses, answers, times = long_contexts()
        found = {place: round(row["score"] * row["samples"]) for place, row in answers.items()}
        seconds = {place: rows[-1]["model_training_seconds"] for place, rows in times.items()}  # with skipping, if there is any
        ropes, million = ("RoPE, NTK", "RoPE, YaRN"), 1 << 20
        trained = (16384, 32768, 65536, 131072)
        ahead = [losses[SB, length] - losses[rope, length] for rope in ropes for length in trained]
        self.says("docs/long_context", f"At lengths that all were trained for, RoPE is ahead by {between(ahead)} nats.")
        self.says("docs/results", f"has the lower loss up to 131,072 tokens, by {between(ahead)} nats")
        self.says("README", f"scaled by NTK or YaRN, is ahead by {mean(ahead):.1f} nats")
        self.assertTrue(all(losses[rope, million] - losses[SB, million] > 2 for rope in ropes))  # "two nats and more"
        self.assertEqual({found[rope, million] for rope in ropes}, {0})
        faster = [seconds["RoPE, NTK", length] / seconds[SB, length] for length in (16384, 65536, 131072, million)]
        self.says("docs/long_context", "So skipping makes stick-breaking {:.1f}, {:.1f}, {:.1f} and {:.1f} times as fast as "
                  "RoPE".format(*faster))
        fewer = [found[rope, 131072] for rope in reversed(ropes)]
        self.says("README", f"which finds {found[SB, million]} of 20 passkeys where RoPE finds none (of those in 131,072 tokens "
                  f"{found[SB, 131072]}, and RoPE {fewer[0]} or {fewer[1]}), and runs {faster[-1]:.1f} times as fast")
        interval = percents([answers[SB, million][bound] for bound in ("low", "high")])
        self.says("docs/results", f"it finds {found[SB, million]} of 20 passkeys ({interval}), and {found[SB, 131072]} of 20 at 131,072")
        self.says("docs/results", f"though it finds only {fewer[1]} and {fewer[0]} of 20 there")


if __name__ == "__main__":
    unittest.main()
