#!/usr/bin/env bash
# Tests and measures everything that needs GPUs, within a time limit, the most telling parts first. Every part has a limit
# of its own and files its rows as they come, so that one failure loses nothing else. Failures are lines that begin with
# FAILED, and are told again at the end.
#   bash benchmarks/gpu_session.sh OUT [SECONDS] [WHEELS]
# OUT: folder for rows.json, costs.json, log.txt, traces.tar.gz. SECONDS: limit for all (540). WHEELS: folder of wheels that
# are installed for this run only: fa3-fwd, diffusers, av. PYTHON chooses the interpreter; PARTS the parts, in order;
# COMMIT what rows say was measured, where there is no git.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(mkdir -p "${1:?where to write}" && cd "$1" && pwd)"
limit="${2:-540}"
wheels="${3:-}"
python="${PYTHON:-python3}"
parts="${PARTS:-tests main jobs tests_compiled large memory fp8 decode large_fp8 tests_async short small}"
commit="${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
libraries="$(mktemp -d)"
traces="$(mktemp -d)"
trap 'rm -rf "$libraries" "$traces"' EXIT
export PYTHONPATH="$libraries:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec > >(tee -a "$out/log.txt") 2>&1

left() { echo $((limit - SECONDS)); }

# guarded NAME SECONDS COMMAND...: runs a command for at most so long, and no longer than the session lasts. It is
# interrupted first, so that it says what it has, and killed ten seconds later.
guarded() {
    local name="$1" most="$2" began=$SECONDS status
    shift 2
    [ "$most" -gt "$(left)" ] && most="$(left)"
    if [ "$most" -lt 15 ]; then
        echo "== $name: no time left"
        return
    fi
    echo "== $name (at most $most s)"
    timeout --signal=INT --kill-after=10 "$most" "$@"
    status=$?
    [ "$status" -eq 124 ] && echo "FAILED $name: not done after $most s"
    [ "$status" -gt 1 ] && [ "$status" -lt 124 ] && echo "FAILED $name: status $status" # 1: it has said what failed
    [ "$status" -gt 124 ] && [ "$status" -ne 130 ] && echo "FAILED $name: ended by signal $((status - 128))"
    echo "== $name: status $status after $((SECONDS - began)) s"
}

tested() { # NAME SECONDS EXPRESSION: the tests whose names fit
    guarded "$1" "$2" "$python" -m pytest -q --tb=line -p no:cacheprovider tests/gpu -k "$3"
}

bench() {
    local name="$1" most="$2"
    shift 2
    guarded "$name" "$most" "$python" -m flashforward_core bench latency --json "$out/rows.json" --traces "$traces" \
        --costs "$out/costs.json" --commit "$commit" "$@"
}

memory() { # NAME SECONDS OPTIONS: peaks beside predictions
    guarded "memory of $1" "$2" "$python" -m flashforward_core bench memory --device cuda:0 --json "$out/rows.json" \
        --commit "$commit" "${@:3}"
}

large_model() { bench "$1" "$2" --model "$3" --resolution 480p --precision "$4" "${@:5}"; } # a later option goes first

order_of() { # MODEL@RESOLUTION: by stage where the banks of all stages that share a device do not fit beside each other
    case "$1,$all" in
    1.3B@* | 14B@480p,*,* | 14B@*,*,*,*,*) echo latency ;;
    *) echo memory ;;
    esac
}

part() {
    case "$1" in
    tests) tested "tests" 150 "not compiled" ;;
    tests_compiled) tested "tests of compiled blocks" 120 "compiled" ;;
    tests_async)
        PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync PYTORCH_ALLOC_CONF=backend:cudaMallocAsync \
            tested "tests with cudaMallocAsync" 100 "not compiled"
        ;;
    main) # forwards and whole rollouts with both kernels; every layout, schedule and number of devices
        large_model "1.3B" 330 1.3B bf16 --attention cudnn $fa3 --latents 81 --devices $one $both \
            --metrics forward_ms attention_ms rollout_s lane_scaling forward_error --fit \
            --schedules flashforward self_forcing hiar --layouts auto prelude streaming --predict 2 4
        ;;
    headline) # what the paper claims for four GPUs, on all that there are; SIZES, LATENTS and METRICS make it shorter
        for size in ${SIZES:-1.3B@480p 14B@480p 1.3B@720p 14B@720p}; do
            large_model "headline of $size" "$(left)" "${size%@*}" bf16 --resolution "${size#*@}" --order "$(order_of "$size")" \
                --attention cudnn --latents ${LATENTS:-81 21 141 261} --devices "$all" --metrics ${METRICS:-rollout_s job_s} \
                --layouts auto prelude streaming --schedules flashforward hiar self_forcing last_stage --predict 4 5 --fit
        done
        ;;
    batched) # two forwards as one: where the time goes into launching, and where it does not
        bench "embedded, two as one" 60 --model embedded --precision fp32 --latents 81 --devices $one --metrics batched_ms
        large_model "1.3B, two as one" 100 1.3B bf16 --latents 48 --devices $one --metrics batched_ms --fit
        ;;
    layouts) # launches, captures and first runs apart from later ones: why a layout takes longer than simulated
        large_model "1.3B on two devices" 200 1.3B bf16 --attention cudnn $fa3 --latents 81 --devices $one $both \
            --metrics rollout_s --layouts auto prelude --repeats 2 --fit
        ;;
    short) # 5-second clips
        large_model "1.3B, 5 seconds" 90 1.3B bf16 --latents 21 --devices $one $both --metrics rollout_s \
            --schedules flashforward self_forcing hiar
        ;;
    jobs) # one lane denoises and the other decodes, or both do both
        large_model "1.3B jobs" 120 1.3B bf16 --latents 81 --devices ${both:-$one} --decode own any shared --metrics job_s
        ;;
    decoders) # from three devices on: a decoder on one, on two, or wherever there is time
        large_model "1.3B jobs, decoder on two" 150 1.3B bf16 --latents 81 --devices $all --decode own split any --metrics job_s
        ;;
    decode) # each way to decode
        large_model "1.3B decoding" 120 1.3B bf16 --latents 81 --devices $one --metrics decode_fps --fit
        large_model "1.3B with the tiny decoder" 90 1.3B bf16 --latents 81 --devices ${both:-$one} --decode own shared \
            --decoder tiny --metrics decode_fps job_s
        ;;
    fp8) large_model "1.3B fp8" 80 1.3B fp8 --latents 21 --devices $one --metrics forward_ms ;;
    large) # one stage's bank at a time, so that it fits
        large_model "14B" 150 14B bf16 --attention cudnn $fa3 --order memory --latents 21 --devices $one --metrics forward_ms
        ;;
    large_fp8) large_model "14B fp8" 110 14B fp8 --order memory --latents 21 --devices $one --metrics forward_ms ;;
    memory) # one chunk of each schedule; the largest model within 24 GiB
        memory "1.3B" 60 --models 1.3B --resolutions 480p 720p --latents 3
        memory "14B" 90 --models 14B --resolutions 480p 720p --latents 3
        memory "14B within 24 GiB" 150 --models 14B --latents 21 --schedules flashforward --orders memory --kv fp8 \
            --offload on --cap-gib 24
        ;;
    small) bench embedded 60 --model embedded --precision fp32 --latents 81 --devices $one --metrics rollout_s job_s ;;
    policies) # what KV policies cost in likeness, and what attention reads from their caches
        guarded "policies" 240 "$python" -m flashforward_core bench policies --json "$out/policies.json" --commit "$commit"
        ;;
    sparse) # a chunk over caches of any length
        guarded "sparse" 200 "$python" -m flashforward_core bench sparse --json "$out/sparse.json" --commit "$commit" \
            --densities "$(ls benchmarks/results/*policies.json | tail -n 1)"
        ;;
    sparse_kernels) # the same at one length, kernel by kernel; FlashInfer where it is installed
        for kernel in triton flash flex $("$python" -c 'import flashinfer' 2>/dev/null && echo flashinfer); do
            guarded "sparse with $kernel" 90 "$python" -m flashforward_core bench sparse --frames 1000 --whole 0 \
                --sparse-attention "$kernel" --json "$out/sparse_$kernel.json" --commit "$commit" \
                --densities "$(ls benchmarks/results/*policies.json | tail -n 1)"
        done
        ;;
    *) echo "FAILED $1: no such part" ;;
    esac
}

if [ -n "$wheels" ]; then
    guarded "install wheels" 60 "$python" -m pip install --quiet --no-deps --no-index --target "$libraries" "$wheels"/*.whl
fi
one=cuda:0
all="$("$python" -c 'import torch; print(",".join(f"cuda:{n}" for n in range(torch.cuda.device_count())))')"
both=""
[ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ] && both=cuda:0,cuda:1
fa3=""
"$python" -c 'import fa3_fwd_interface' 2>/dev/null && fa3=fa3
"$python" -c 'import torch; print(torch.__version__, [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())])'
echo "== FlashAttention-3: ${fa3:-no}; two devices: ${both:-no}; commit $commit"
for name in $parts; do part "$name"; done
tar -czf "$out/traces.tar.gz" -C "$traces" .
echo "== done after $SECONDS s of $limit; failures:"
grep '^FAILED' "$out/log.txt" | sort -u || echo none
