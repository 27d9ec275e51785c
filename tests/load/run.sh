#!/bin/sh
# Load on both doors of a running system, one after the other. Fails when a single request fails.
#   run.sh BIN        BIN: the folder of the virtual environment's programs
# NEXUSKV_HTTP and NEXUSKV_GRPC say where the system is; LOAD_USERS and LOAD_SECONDS how much.
set -eu

bin=${1:-.venv/bin}
here=$(dirname "$0")
users=${LOAD_USERS:-8}
seconds=${LOAD_SECONDS:-20}
export PYTHONPATH="$here/../..:$here/../../protos${PYTHONPATH:+:$PYTHONPATH}"

run() {
    "$bin/locust" --locustfile "$here/$1" --host "$2" --headless --only-summary \
        --users "$users" --spawn-rate "$users" --run-time "${seconds}s" --stop-timeout 60 --exit-code-on-error 1
}

run http_load.py "${NEXUSKV_HTTP:-http://127.0.0.1:8080}"
run grpc_load.py "${NEXUSKV_GRPC:-127.0.0.1:50051}"
