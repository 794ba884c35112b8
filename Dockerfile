# An image for every role:
#
#   docker build -t offbeat .
#   docker run --rm offbeat train --steps 20
#
# docs/clusters.md says which torch is in it, and what the arguments are for.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
# where torch is taken from; empty: from where pip takes all else
ARG TORCH_INDEX=""
# of pyproject.toml, as tensorboard,wandb
ARG EXTRAS=""
WORKDIR /src
RUN python -m venv --without-pip /opt/offbeat
COPY constraints.txt ./
# torch alone: what it needs is as pinned as the rest, and need not be there
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip --python /opt/offbeat/bin/python install --no-cache-dir --no-deps \
            --index-url "$TORCH_INDEX" --constraint constraints.txt torch; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY offbeat ./offbeat
RUN pip --python /opt/offbeat/bin/python install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"

FROM python:${PYTHON}-slim
# of the system's, as wget for KubeRay's probes, or g++ for --compile
ARG PACKAGES=""
# hadolint ignore=DL3008
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends $PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --uid 1000 --create-home offbeat && mkdir /runs && chown offbeat: /runs
COPY --from=build /opt/offbeat /opt/offbeat
ENV PATH=/opt/offbeat/bin:$PATH PYTHONUNBUFFERED=1
# what a GPU's container runtime hands in, where there is one
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# by number, or runAsNonRoot could not tell
USER 1000
WORKDIR /home/offbeat
ENTRYPOINT ["offbeat"]
CMD ["--help"]
