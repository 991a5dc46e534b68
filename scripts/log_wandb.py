#!/usr/bin/env python3
"""Sends the metrics of a run to Weights & Biases, after it or while it trains.

    scripts/log_wandb.py runs/tiny_sb --project sbtrain              # what is there
    scripts/log_wandb.py runs/tiny_sb --project sbtrain --follow &   # and what is to come

It may be stopped and started again at any time, and the run may be resumed: each record is sent once
(follow_metrics.py says how). Charts have `step` as their x axis. WANDB_MODE=offline and the other
variables of wandb work as usual. The script needs wandb (python3 -m venv ~/tools && ~/tools/bin/pip install wandb).
"""

import sys

import follow_metrics


class Wandb:
    def __init__(self, wandb, project, entity):
        self.wandb = wandb
        self.where = {"project": project, "entity": entity}
        self.run = None
        self.sent = 0

    def start(self, name, config):
        self.run = self.wandb.init(name=name, config=config, **self.where)
        self.sent = 0
        # W&B's own step only grows, and drops what comes later for an earlier one. As an axis of its own
        # `step` has no order.
        self.run.define_metric("*", step_metric="step")
        return self.run.id

    def resume(self, run, sent):
        self.run = self.wandb.init(id=run, resume="must", **self.where)
        # Offline, W&B does not know what it has received, and would count from 0 again.
        self.sent = max(sent, self.run.step or 0)

    def send(self, record, metrics):
        self.run.log({"step": record["step"], "tokens": record.get("tokens"), **metrics}, step=self.sent)
        self.sent += 1

    def finish(self, state, superseded):
        if superseded:
            self.run.tags = (self.run.tags or ()) + ("superseded",)
        self.run.finish(exit_code=1 if state == "failed" else 0)


def main():
    parser = follow_metrics.parser(__doc__)
    parser.add_argument("--project", default="sbtrain", help="(default: %(default)s)")
    parser.add_argument("--entity", help="user or team (default: yours)")
    arguments = parser.parse_args()
    wandb = follow_metrics.load("wandb")
    return follow_metrics.run(arguments, Wandb(wandb, arguments.project, arguments.entity), "wandb")


if __name__ == "__main__":
    sys.exit(main())
