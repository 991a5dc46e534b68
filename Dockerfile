# docker build --target cpu -t sbtrain .           any machine
# docker build --target cuda -t sbtrain:cuda .     with the CUDA backend: docker run --gpus all ...
# scripts/docker.sh builds both with Docker or Podman, and says which revision they are.
#
# A first stage builds the program with the packages of scripts/dependencies.txt, as scripts/setup.sh does on a bare
# machine; the image has the libraries that the program needs to run, and nothing to compile with. With CUDA those are
# cuBLAS, cuDNN and NCCL alone; NVIDIA's own images bring much more. It runs as user 1000 in /work. Corpora,
# configurations of your own and runs come from outside and outlive the container:
#   docker run --rm -it -v "$PWD/corpus:/work/corpus" -v "$PWD/runs:/work/runs" sbtrain --config configs/tiny_sb.yaml
# Several GPUs need more shared memory than Docker's 64 MiB (--ipc=host).
#
# The code is portable by default, since an image may run on another processor than the one that built it. For an image
# that stays on its machine, --build-arg NATIVE=ON compiles for that processor, which is faster on the CPU. CPU=... names
# another level than x86-64-v3, which every processor with AVX2 has; CPU= (empty) runs on all. Likewise
# --build-arg CUDA_ARCHITECTURES=90a-real compiles for Hopper GPUs alone, in less time; unless given, GPUs from the A100
# on run it.

ARG CPU_BASE=docker.io/library/debian:12
ARG CPU_RUN_BASE=docker.io/library/debian:12-slim
ARG CUDA_BASE=docker.io/nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ARG CUDA_RUN_BASE=docker.io/library/ubuntu:24.04

# What compiles comes first and pages last: who edits a page compiles nothing.
FROM ${CPU_BASE} AS cpu-build
WORKDIR /sbtrain
COPY scripts/dependencies.txt scripts/setup.sh scripts/
RUN scripts/setup.sh --without-cuda build && rm -rf /var/lib/apt/lists/*
COPY CMakeLists.txt CMakePresets.json ./
COPY cmake cmake
COPY include include
COPY kernels kernels
COPY src src
ARG NATIVE=OFF
ARG CPU=x86-64-v3
RUN cmake --preset cpu -DSBTRAIN_TESTS=OFF -DSBTRAIN_NATIVE=$NATIVE -DSBTRAIN_CPU=$CPU && cmake --build build/cpu
COPY . .
ARG REVISION=unknown
RUN cmake --preset cpu -DSBTRAIN_REVISION=$REVISION && cmake --build build/cpu && \
    cmake --install build/cpu --prefix /installed --strip && scripts/runtime_packages.sh build/cpu/sbtrain > /packages

FROM ${CUDA_BASE} AS cuda-build
WORKDIR /sbtrain
COPY scripts/dependencies.txt scripts/setup.sh scripts/python.sh scripts/nvidia_libraries.sh scripts/
RUN scripts/setup.sh build && rm -rf /var/lib/apt/lists/* && scripts/nvidia_libraries.sh /nvidia
COPY CMakeLists.txt CMakePresets.json ./
COPY cmake cmake
COPY include include
COPY kernels kernels
COPY src src
ARG NATIVE=OFF
ARG CPU=x86-64-v3
ARG CUDA_ARCHITECTURES=
RUN cmake --preset release -DSBTRAIN_TESTS=OFF -DSBTRAIN_NATIVE=$NATIVE -DSBTRAIN_CPU=$CPU \
      ${CUDA_ARCHITECTURES:+"-DCMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES"} && cmake --build build/release
COPY . .
ARG REVISION=unknown
RUN cmake --preset release -DSBTRAIN_REVISION=$REVISION && cmake --build build/release && \
    cmake --install build/release --prefix /installed --strip && \
    scripts/runtime_packages.sh build/release/sbtrain > /packages

FROM ${CPU_RUN_BASE} AS cpu
LABEL org.opencontainers.image.title=sbtrain org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.description="Pretrains Llama-style language models whose attention can be swapped"
COPY --from=cpu-build /packages /packages
RUN apt-get update && DEBIAN_FRONTEND=noninteractive xargs -a /packages apt-get install -y --no-install-recommends && \
    apt-get clean && rm -rf /var/lib/apt/lists/* && mkdir /work && chown 1000:1000 /work
COPY --from=cpu-build /installed /usr/local
ARG REVISION=unknown
LABEL org.opencontainers.image.revision=$REVISION
USER 1000:1000
WORKDIR /work
ENV HOME=/work
EXPOSE 8000
ENTRYPOINT ["sbtrain"]

FROM ${CUDA_RUN_BASE} AS cuda
LABEL org.opencontainers.image.title=sbtrain org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.description="Pretrains Llama-style language models whose attention can be swapped"
COPY --from=cuda-build /nvidia /opt/nvidia
COPY --from=cuda-build /packages /packages
RUN apt-get update && DEBIAN_FRONTEND=noninteractive xargs -a /packages apt-get install -y --no-install-recommends && \
    apt-get clean && rm -rf /var/lib/apt/lists/* && mkdir /work && chown 1000:1000 /work && \
    echo /opt/nvidia > /etc/ld.so.conf.d/nvidia.conf && ldconfig
COPY --from=cuda-build /installed /usr/local
ARG REVISION=unknown
LABEL org.opencontainers.image.revision=$REVISION
USER 1000:1000
WORKDIR /work
# What `docker run --gpus` brings of the driver.
ENV HOME=/work NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
ENTRYPOINT ["sbtrain"]
