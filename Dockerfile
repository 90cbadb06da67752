# `stemma serve` in a container; docs/serve/docker.md. `docker build -t stemma .`
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# A GPU's image: --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg EXTRAS=[gpu]
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
# Kernels are compiled once for the CPU that they run on, not for the one that builds the image.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch>=2.11,<2.14"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)${EXTRAS}"
RUN useradd --create-home --uid 1000 stemma \
    && install --directory --owner=stemma --group=stemma /models /home/stemma/.cache
USER stemma
WORKDIR /home/stemma
VOLUME ["/models", "/home/stemma/.cache"]
EXPOSE 8000
# Until the model is loaded it answers 503, which counts as a failure only behind the start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["stemma", "serve", "--host", "0.0.0.0", "--port", "8000"]
