# Not published. Without Docker scripts/build_rootfs.py carries these instructions out.
# Build from the root of the repository: make wheel && docker build -f k8s/images/worker.Dockerfile .
# Prefill and decode workers, on CPUs and NVIDIA GPUs (torch brings its CUDA libraries along).
ARG PYTHON=python:3.12-slim-bookworm
FROM ${PYTHON} AS build
RUN pip install --no-cache-dir uv
# Nobody can write bytecode later: each start would compile all that it imports, for seconds.
ENV UV_COMPILE_BYTECODE=1
WORKDIR /src
COPY pyproject.toml dist/ ./
RUN uv venv /opt/weft
RUN uv pip install --python /opt/weft/bin/python --find-links . "$(ls ./weft-*.whl)[demo]"

FROM ${PYTHON}
# Triton needs the compiler on GPUs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home weft
USER 10001:10001
EXPOSE 50052 50053 50059 9090
ENTRYPOINT ["weft", "serve"]
