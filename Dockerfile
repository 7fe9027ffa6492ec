# The command line, for audits in a container without a network:
#
#   docker build -t qbi .
#   docker run --rm --network none -v "$PWD":/work qbi audit net.py:Net --data table.npz
#
# With a browser for `--pdf` (several hundred megabytes more): docker build --build-arg BROWSER=chromium -t qbi .
# Guarded sites of a federation have images of their own: examples/flower-guarded and examples/nvflare-guarded.
FROM python:3.12-slim AS build
RUN pip install --no-cache-dir build
COPY pyproject.toml README.md LICENSE CHANGELOG.md CITATION.cff SECURITY.md /source/
COPY src /source/src
RUN python -m build --wheel --outdir /dist /source

FROM python:3.12-slim
ARG BROWSER=""
RUN if [ -n "$BROWSER" ]; then apt-get update -qq && apt-get install -y -qq --no-install-recommends "$BROWSER" && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /dist /dist
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu \
 && pip install --no-cache-dir /dist/*.whl && rm -r /dist
RUN useradd --create-home --uid 10001 qbi && mkdir /work && chown qbi /work
USER qbi
WORKDIR /work
ENTRYPOINT ["qbi"]
CMD ["--help"]
