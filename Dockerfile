# autoplan in a container, on CPU or on CUDA. From the root of a clone:
#
#     docker build --target cpu -t autoplan .
#     docker run --rm -v "$PWD:/work" autoplan search --model gpt2
#
#     docker build --target cuda -t autoplan:cuda .
#     docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" autoplan:cuda search --model gpt2
#
# With `--build-arg TORCH_INDEX=URL`, the index of CPU wheels that pytorch.org names, the first is 1.2 GB; without it pip
# takes torch's CUDA build, which runs on CPU too. No builder was at hand: nobody has built these images yet.

FROM python:3.11-slim AS base
# compilers: torch.compile makes C++ on CPU, Triton makes C on CUDA
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
# records of searches and measurements of the machine stay in the mounted folder
ENV XDG_STATE_HOME=/work/.autoplan/state XDG_CACHE_HOME=/work/.autoplan/cache
WORKDIR /work
ENTRYPOINT ["autoplan"]

FROM base AS cuda
# torch's wheels bring CUDA; the host has the driver and NVIDIA's container toolkit
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[cuda,transformers]"

FROM base AS cpu
ARG TORCH_INDEX
RUN pip install --no-cache-dir -c /src/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[transformers]"
