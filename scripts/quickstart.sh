#!/usr/bin/env bash
# Set up, make a corpus, train a tiny Llama with hierarchical context parallelism: scripts/quickstart.sh [key=value ...]
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case " $* " in *" -h "* | *" --help "*) sed -n '2p' "$root/scripts/quickstart.sh" | cut -c3-; exit 0 ;; esac
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m megatron_cp quickstart "$@"
