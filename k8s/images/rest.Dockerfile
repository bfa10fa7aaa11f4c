# Not published. Without Docker scripts/build_rootfs.py carries these instructions out.
# Build from the root of the repository: make wheel && docker build -f k8s/images/rest.Dockerfile .
ARG PYTHON=python:3.12-slim-bookworm
FROM ${PYTHON} AS build
RUN pip install --no-cache-dir uv
WORKDIR /src
COPY dist/ ./
RUN uv venv /opt/weft
RUN uv pip install --python /opt/weft/bin/python --no-deps weft-*.whl

FROM scratch
# For a collector of spans behind HTTPS.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /opt/weft/bin/weft-rest /weft-rest
USER 10001:10001
EXPOSE 8000 9090
ENTRYPOINT ["/weft-rest"]
