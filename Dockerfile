# Two images: `docker build --target cpu .` (the default) and `docker build --target cuda .`.
# The server listens on all interfaces of its container. It does not start there without API keys and TLS, unless
# KAKEYA_INSECURE=true says that nobody else can reach it: docs/guides/install.md.
ARG PYTHON=3.11

# The wheel, with its kernels. The compiler stays behind in this stage.
FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE CHANGELOG.md constraints.txt ./
COPY src ./src
RUN KAKEYA_REQUIRE_NATIVE=1 pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# What both images share: a user without rights, and a cache directory that outlives the container.
FROM python:${PYTHON}-slim-bookworm AS base
RUN useradd --create-home --uid 10001 kakeya \
  && install -d -o kakeya -g kakeya /var/cache/kakeya
ENV KAKEYA_CACHE_DIR=/var/cache/kakeya \
    KAKEYA_BIND=0.0.0.0:50051 \
    KAKEYA_HTTP=0.0.0.0:8000 \
    PYTHONUNBUFFERED=1
VOLUME /var/cache/kakeya
EXPOSE 50051 8000

# Torch's builds on the package registry bring CUDA's libraries; the driver comes from the host.
FROM base AS cuda
# For a cluster: EXTRAS=cuda,cluster,hub,otel and ALSO='ray[default]==2.60.0', whose dashboard answers KubeRay's probes.
ARG EXTRAS=cuda,hub,otel
ARG ALSO=
# Triton compiles a few lines of C when it first launches a kernel.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    --mount=type=bind,from=build,source=/source/constraints.txt,target=/constraints.txt \
    wheel=$(ls /dist/kakeya-*.whl) \
  && pip install --no-cache-dir -c /constraints.txt "${wheel}[${EXTRAS}]" ${ALSO:+"$ALSO"}
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
ENTRYPOINT ["kakeya"]
CMD ["serve"]

FROM base AS cpu
ARG EXTRAS=hub,otel
ARG ALSO=
# Torch without the libraries of CUDA, which take gigabytes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    --mount=type=bind,from=build,source=/source/constraints.txt,target=/constraints.txt \
    wheel=$(ls /dist/kakeya-*.whl) \
  && pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c /constraints.txt "${wheel}[${EXTRAS}]" ${ALSO:+"$ALSO"}
USER 10001
ENTRYPOINT ["kakeya"]
CMD ["serve"]
