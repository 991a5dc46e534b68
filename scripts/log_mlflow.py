#!/usr/bin/env python3
"""Sends the metrics of a run to MLflow, after it or while it trains.

    scripts/log_mlflow.py runs/tiny_sb --experiment sbtrain              # what is there
    scripts/log_mlflow.py runs/tiny_sb --experiment sbtrain --follow &   # and what is to come

It may be stopped and started again at any time, and the run may be resumed: each record is sent once
(follow_metrics.py says how). The server is that of --uri or MLFLOW_TRACKING_URI; without both MLflow keeps a
database here. The script needs mlflow (python3 -m venv ~/tools && ~/tools/bin/pip install mlflow; mlflow-skinny
suffices for a server).
"""

import sys

import follow_metrics


class Mlflow:
    def __init__(self, mlflow, uri, experiment):
        self.mlflow = mlflow
        self.uri = uri
        self.entities = mlflow.entities
        self.experiment = experiment
        self.client = None
        self.run = None

    def connect(self):
        self.client = self.client or self.mlflow.MlflowClient(tracking_uri=self.uri)

    def start(self, name, config):
        self.connect()
        experiment = self.client.get_experiment_by_name(self.experiment)
        number = experiment.experiment_id if experiment else self.client.create_experiment(self.experiment)
        self.run = self.client.create_run(number, run_name=name).info.run_id
        parameters = [self.entities.Param(key, str(value)[:500]) for key, value in config.items()]
        for at in range(0, len(parameters), 100):  # the most that a server takes at once
            self.client.log_batch(self.run, params=parameters[at:at + 100])
        return self.run

    def resume(self, run, sent):
        self.connect()
        self.run = run
        self.client.update_run(run, status="RUNNING")

    def send(self, record, metrics):
        time = follow_metrics.milliseconds(record)
        self.client.log_batch(self.run, metrics=[self.entities.Metric(key, value, time, record["step"])
                                                 for key, value in metrics.items()])

    def finish(self, state, superseded):
        if superseded:
            self.client.set_tag(self.run, "superseded", "true")
        status = {"complete": "FINISHED", "stopped": "KILLED", "running": "RUNNING"}.get(state, "FAILED")
        if status == "RUNNING":
            return  # as it was begun, or resumed
        self.client.set_terminated(self.run, status=status)


def main():
    parser = follow_metrics.parser(__doc__)
    parser.add_argument("--experiment", default="sbtrain", help="(default: %(default)s)")
    parser.add_argument("--uri", help="tracking server, or database such as sqlite:///mlflow.db")
    arguments = parser.parse_args()
    mlflow = follow_metrics.load("mlflow")
    tracker = Mlflow(mlflow, arguments.uri, arguments.experiment)
    return follow_metrics.run(arguments, tracker, "mlflow")


if __name__ == "__main__":
    sys.exit(main())
