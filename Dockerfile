# syntax=docker/dockerfile:1
# One image for the five roles and the command line: `docker build --tag headrace .`
#
# Dependencies are those of requirements.lock, by hash; of the lock only what runs here (no local services, no tests).
# `--build-arg EXTRAS=demo` adds what `headrace train` and `headrace produce flights` need.

ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
RUN pip install "uv>=0.9,<1" && python -m venv /opt/headrace

# Dependencies first: this layer is built again only when they change.
COPY pyproject.toml requirements.lock ./
COPY infra/docker/select_requirements.py ./
ARG EXTRAS=""
RUN uv pip compile pyproject.toml ${EXTRAS:+--extra ${EXTRAS}} --constraints requirements.lock \
        --quiet --no-header --no-annotate --output-file wanted.txt \
    && python select_requirements.py requirements.lock < wanted.txt > image.lock \
    && /opt/headrace/bin/pip install --require-hashes --no-deps --requirement image.lock

COPY README.md LICENSE ./
COPY schemas schemas
COPY streams streams
COPY offline offline
COPY jobs jobs
COPY infra infra
RUN uv build --wheel --quiet --out-dir dist . \
    && /opt/headrace/bin/pip install --no-deps dist/*.whl \
    && /opt/headrace/bin/python -m compileall -q /opt/headrace/lib

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="headrace" org.opencontainers.image.licenses="Apache-2.0"
# LightGBM, of EXTRAS=demo, needs the OpenMP runtime.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --home-dir /data --create-home --shell /usr/sbin/nologin headrace
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HEADRACE_HOME=/data \
    HEADRACE_HTTP_ADDRESS=0.0.0.0 \
    HEADRACE_METRICS_ADDRESS=0.0.0.0
USER 10001:10001
# Delta tables, lineage and logs; mount a volume here to keep them.
WORKDIR /data
VOLUME /data
EXPOSE 8080 9101 9102 9103 9104 9105
ENTRYPOINT ["headrace"]
CMD ["--help"]
