#!/usr/bin/env bash
# Generate the typed stubs of protos/ into services/ (its path there is the import path), or, with
# --check, generate them elsewhere and fail where the committed ones differ.
# Run through `make protos` and `make check`, which put the pinned generator on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

generate() {
  python -m grpc_tools.protoc -I protos \
    --python_out="$1" --mypy_out=quiet:"$1" \
    --grpc_python_out="$1" --mypy_grpc_out=quiet:"$1" \
    protos/outrider/v1/*.proto
}

if [[ "${1:-}" != --check ]]; then
  rm -f services/outrider/v1/*_pb2*.py*
  generate services
  exit
fi

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
if ! diff -r --exclude=__init__.py --exclude=__pycache__ services/outrider/v1 "$fresh/outrider/v1"; then
  echo "The stubs in services/outrider/v1 are not what protos/ generates: run 'make protos'" >&2
  exit 1
fi
