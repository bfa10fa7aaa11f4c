# Not published. Without Docker scripts/build_rootfs.py carries these instructions out.
# Build from the root of the repository: make wheel && docker build -f k8s/images/kvstore.Dockerfile .
ARG PYTHON=python:3.12-slim-bookworm
FROM ${PYTHON} AS build
RUN pip install --no-cache-dir uv
# Nobody can write bytecode later: each start would compile all that it imports, for seconds.
ENV UV_COMPILE_BYTECODE=1
WORKDIR /src
COPY pyproject.toml dist/ ./
RUN uv venv /opt/weft
RUN uv pip install --python /opt/weft/bin/python --group kvstore
# The package `nixl` asks for the builds of two CUDA versions and for torch; one build serves.
RUN uv pip install --python /opt/weft/bin/python --no-deps nixl==1.5.1 nixl-cu13==1.5.1
RUN uv pip install --python /opt/weft/bin/python --no-deps weft-*.whl

FROM ${PYTHON}
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home weft
USER 10001:10001
EXPOSE 50060 50059 9090
ENTRYPOINT ["weft", "serve", "kvstore"]
