# quern serve in a container; everything that is installed comes from the package index.
#
#   docker build -t quern .
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/out:/data" quern --run quickstart
#
# The full image, unlike the slim one, has the C++ compiler that PyTorch's compiler needs on a CPU. On x86 Linux the
# package index has torch with CUDA, several gigabytes; --build-arg TORCH=… names another version or the URL of a wheel.
FROM python:3.12
ARG TORCH=torch==2.13.0
WORKDIR /src
RUN pip install --no-cache-dir "$TORCH"
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY quern quern
RUN pip install --no-cache-dir -c constraints.txt ".[serve]" && useradd --create-home quern && mkdir /data && chown quern /data
USER quern
WORKDIR /data
EXPOSE 8000
ENTRYPOINT ["quern", "serve", "--out", "/data", "--host", "0.0.0.0"]
CMD ["--run", "first"]
