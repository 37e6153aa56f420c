#!/usr/bin/env bash
# Checks and measures the CUDA backend on this machine, in less than six minutes: docs/gpu-check.md.
#
#     scripts/gpu_check.sh            needs one NVIDIA GPU, a CUDA toolkit (nvcc in PATH, /usr/local/cuda, or
#                                     CUDAToolkit_ROOT), a C++ compiler, and PYTHON with what `needs` below lists
#     scripts/gpu_check.sh --dry-run  the same on the CPU at tiny size, without CUDA and without the build
#
# No network. Wheels in .whl/ (scripts/gpu_wheels.sh) are installed for this run only, like FineMoE itself, into WORK,
# where a model of 23 GB is made, too; WORK is removed in the end. PYTHON: python3. OUT: a folder for the table and the
# logs, build/gpu-check if unset. Exit code 1 if a check failed, 2 if something is missing here.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=$(realpath -m "${OUT:-build/gpu-check}")
mkdir -p "$out"
work=$(mktemp -d "${TMPDIR:-/tmp}/finemoe-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
budget_s=350
failed=0

needs="numpy scipy pyarrow msgspec torch transformers accelerate safetensors tqdm hypothesis pytest pytest_timeout"
case "${1:-}" in
"") device=cuda needs="$needs pybind11 scikit_build_core" size=() ;;
--dry-run) device=cpu needs="$needs finemoe" size=(--tiny) ;;
*) echo "gpu_check: unknown option $1; there is --dry-run" >&2 && exit 2 ;;
esac

missing() { # MESSAGE
    echo "gpu_check: $1" >&2
    exit 2
}

# Runs a command with its own time limit, or with what is left of all time. Its output goes into a log, too.
step() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 begin=$SECONDS code
    shift 2
    ((limit > budget_s - SECONDS)) && limit=$((budget_s - SECONDS))
    echo "== $name"
    if ((limit < 1)); then
        code=124
    else
        timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$out/$name.log"
        code=${PIPESTATUS[0]}
    fi
    local verdict=passed
    ((code == 124 || code == 137)) && verdict="FAILED: out of time"
    ((code != 0)) && [[ $verdict == passed ]] && verdict="FAILED (exit code $code)"
    [[ $verdict == passed ]] || failed=1
    echo "| $name | $verdict, $((SECONDS - begin)) s |" >>"$out/steps.md"
    return "$code"
}

summary() {
    {
        echo "# gpu_check, $(date -u +%Y-%m-%d), $device"
        echo
        printf '| step | result |\n| --- | --- |\n'
        cat "$out/steps.md"
        echo
        [[ -f $out/figures.md ]] && cat "$out/figures.md"
    } >"$out/gpu_check.md"
    rm -f "$out/steps.md" "$out/figures.md"
    cat "$out/gpu_check.md"
}

rm -f "$out"/{steps,figures,gpu_check}.md
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if [[ $device == cuda ]]; then
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
    if compgen -G '.whl/*.whl' >/dev/null; then
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl ||
            missing "the wheels in .whl cannot be installed; make them again with scripts/gpu_wheels.sh"
    fi
fi
lacking=$("$python" -c '
import importlib.util
import sys

print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' $needs) ||
    missing "$python does not run; set PYTHON"
[[ -z $lacking ]] ||
    missing "$python lacks: $lacking. Make wheels where pip works (scripts/gpu_wheels.sh $lacking) and bring .whl here"

if [[ $device == cuda ]]; then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        missing "torch sees no CUDA device here; --dry-run runs on the CPU"
    step build 150 "$python" -m pip install --no-index --no-deps --no-build-isolation --no-compile --target "$work/site" \
        --config-settings "build-dir=$work/cmake" --config-settings cmake.define.FINEMOE_WERROR=OFF . || { summary; exit 1; }
    problem=$("$python" -c 'from finemoe._core import cuda_problem; print(cuda_problem(0))') ||
        missing "the built package cannot be imported"
    [[ -z $problem ]] || missing "$problem"
fi

# Warnings of other people's packages on a machine nobody has seen are no failures.
step tests 140 "$python" -m pytest -q -m "not long" -p no:cacheprovider -W default tests/test_cuda_engine.py tests/test_cuda_model.py
step figures 200 "$python" benchmarks/gpu.py "$work" --device "$device" "${size[@]}" --table "$out/figures.md"
summary
exit "$failed"
