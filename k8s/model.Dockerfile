# An image with the weights in it, for nodes that no hub and no shared volume reaches: a node pulls them once, with the
# image. On top of an image of `Dockerfile`; the folder is that of the overlay, whose warmkv.yaml names model and revision:
#   docker build -f k8s/model.Dockerfile --build-arg IMAGE=warmkv:0.1.0-cuda -t warmkv:0.1.0-cuda-model k8s/overlays/production
# For a model that its hub gives to some only: export HF_TOKEN, and add --secret id=hub,env=HF_TOKEN.
ARG IMAGE=warmkv:0.1.0-cuda
# hadolint ignore=DL3006
FROM ${IMAGE} AS model
COPY warmkv.yaml /etc/warmkv/model.yaml
USER 0:0
ENV HF_HUB_CACHE=/opt/models
RUN --mount=type=secret,id=hub \
    if [ -f /run/secrets/hub ]; then HF_TOKEN="$(cat /run/secrets/hub)" && export HF_TOKEN; fi; \
    HF_HOME=/tmp/hub warmkv k8s fetch --config /etc/warmkv/model.yaml && chmod -R a+rX /opt/models && rm -rf /tmp/hub
ENV HF_HUB_OFFLINE=1
USER 1000:1000
