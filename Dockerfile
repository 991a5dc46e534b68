# docker build --target cpu -t sbtrain .           any machine
# docker build --target cuda -t sbtrain:cuda .     with the CUDA backend: docker run --gpus all ...
#
# Both targets install from scripts/dependencies.txt, as scripts/setup.sh does on a bare machine.
# Put runs, corpora and checkpoints in a volume, so that they outlive the container:
#   docker run --rm -it -v "$PWD/runs:/sbtrain/runs" sbtrain --help
# Several GPUs need more shared memory than Docker's 64 MiB:
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/sbtrain/runs" sbtrain:cuda --config configs/1b_sb.yaml
#
# The code is portable by default, since an image may run on another processor than the one that built
# it. For an image that stays on its machine, --build-arg NATIVE=ON compiles for that processor, which is
# faster on the CPU.

FROM debian:12 AS cpu
WORKDIR /sbtrain
COPY scripts/dependencies.txt scripts/setup.sh scripts/
RUN scripts/setup.sh build quickstart && rm -rf /var/lib/apt/lists/*
COPY . .
ARG NATIVE=OFF
RUN cmake --preset release -DSBTRAIN_TESTS=OFF -DSBTRAIN_NATIVE=$NATIVE && \
    cmake --build --preset release && \
    ln -s "$(scripts/find_sbtrain.sh)" /usr/local/bin/sbtrain
ENTRYPOINT ["sbtrain"]

FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS cuda
WORKDIR /sbtrain
COPY scripts/dependencies.txt scripts/setup.sh scripts/
RUN scripts/setup.sh build quickstart && rm -rf /var/lib/apt/lists/*
COPY . .
ARG NATIVE=OFF
RUN cmake --preset release -DSBTRAIN_TESTS=OFF -DSBTRAIN_NATIVE=$NATIVE && \
    cmake --build --preset release && \
    ln -s "$(scripts/find_sbtrain.sh)" /usr/local/bin/sbtrain
ENTRYPOINT ["sbtrain"]
