# Not built in this repository; tests/k8s/test_images.py runs its install steps.
# Build from the root of the repository: docker build -f k8s/images/rest.Dockerfile .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY services/rest services/rest
RUN cd services/rest && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o /opt/weft-rest ./cmd/weft-rest

FROM scratch
# For a collector of spans behind HTTPS.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /opt/weft-rest /weft-rest
USER 10001:10001
EXPOSE 8000 9090
ENTRYPOINT ["/weft-rest"]
