#!/usr/bin/env bash
# Runs tests/host against real ComfyUI releases on a CPU, for CI or a clean machine.
# usage: tools/host_ci.sh [FOLDER] [pytest arguments]
# FOLDER (default ~/.cache/zerowaste-vae, where tests/host looks by itself) gets the checkouts and their environments;
# what is already there is kept. PYTHON names the interpreter (default python3).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$HOME/.cache/zerowaste-vae}
shift || true
mkdir -p "$folder"

# 0.33.0 has a SeedVR2 VAE of its own to compare with; 0.3.64 is the oldest version pyproject.toml promises.
install() { # TAG CHECKOUT VENV
    local checkout=$folder/$2 venv=$folder/$3
    [ -d "$checkout" ] || git clone --quiet --depth 1 --branch "$1" https://github.com/Comfy-Org/ComfyUI "$checkout"
    if [ ! -x "$venv/bin/python" ]; then
        "${PYTHON:-python3}" -m venv "$venv"
        # The CPU builds first: plain requirements would bring gigabytes of CUDA.
        "$venv/bin/pip" install --quiet torch torchvision torchaudio --index-url https://download.pytorch.org/whl/cpu
        "$venv/bin/pip" install --quiet -r "$checkout/requirements.txt"
    fi
    "$venv/bin/pip" install --quiet -r "$root/requirements.txt"
}
install v0.33.0 ComfyUI venv
install v0.3.64 ComfyUI-0.3.64 venv-0.3.64
"$folder/venv/bin/pip" install --quiet --no-deps comfyui-workflow-templates-json comfyui-subgraph-blueprints
[ -d "$folder/frontend" ] || "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/frontend" comfyui-frontend-package

"$folder/venv/bin/pip" install --quiet pytest
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
ln -s "$root" "$package/zerowaste_vae"
export COMFYUI_DIR=$folder/ComfyUI COMFY_VENV=$folder/venv
export COMFYUI_OLD_DIR=$folder/ComfyUI-0.3.64 COMFY_OLD_VENV=$folder/venv-0.3.64
cd "$root"
PYTHONPATH=$package "$COMFY_VENV/bin/python" -m pytest tests/host "$@"
