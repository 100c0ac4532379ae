# The evaluator: receives OTLP, judges it against the contracts, carries out their escalation policy.
#   docker build -t kc-otel .
#   docker run --read-only --tmpfs /tmp --cap-drop ALL -p 4317:4317 -p 4320:4320 \
#     -v ./contracts:/contracts:ro -v ./access.yaml:/access.yaml:ro kc-otel

ARG PYTHON=python:3.12.14-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

FROM $PYTHON AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# For what is written in C; it stays in this stage.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /src
# The context has no .git to ask: docker build --build-arg VERSION=1.2.3
ARG VERSION=0.1.0
ENV SETUPTOOLS_SCM_PRETEND_VERSION=$VERSION
COPY pyproject.toml README.md LICENSE ./
COPY .ci/locked ./.ci/locked
COPY kc_otel ./kc_otel
# The handbook, which the wheel then carries.
RUN python -m venv /docs \
 && /docs/bin/pip install --require-hashes --only-binary=:all: -r .ci/locked/build.txt \
 && /docs/bin/pip install --no-deps --no-build-isolation --editable . \
 && NO_MKDOCS_2_WARNING=1 /docs/bin/mkdocs build --strict --config-file kc_otel/handbook/mkdocs.yml
RUN /docs/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .
# A virtual environment is one folder, so the image below needs nothing else of this stage.
RUN python -m venv /opt/kc-otel \
 && /opt/kc-otel/bin/pip install --require-hashes --only-binary=:all: -r .ci/locked/serve.txt \
 && /opt/kc-otel/bin/pip install --no-deps --no-index /wheels/*.whl \
 && /opt/kc-otel/bin/python -m compileall -q /opt/kc-otel/lib \
 && /opt/kc-otel/bin/pip uninstall --yes pip

FROM $PYTHON
LABEL org.opencontainers.image.title="kc-otel evaluator" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --home-dir /var/lib/kc-otel --create-home --shell /usr/sbin/nologin kc-otel
COPY --from=build /opt/kc-otel /opt/kc-otel
ENV PATH=/opt/kc-otel/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/kc-otel
# What must survive a restart; a named volume takes over the folder's owner.
VOLUME /var/lib/kc-otel
# OTLP over gRPC, OTLP over HTTP, API with /metrics and /healthz.
EXPOSE 4317 4318 4320
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 CMD ["python", "-m", "kc_otel.client.alive"]
ENTRYPOINT ["kc-otel"]
# Inside a container loopback reaches nobody, and anything else asks for tokens: `kc-otel token` makes them.
CMD ["serve", "/contracts", "--host", "0.0.0.0", "--access", "/access.yaml", "--state", "/var/lib/kc-otel/state.sqlite"]
