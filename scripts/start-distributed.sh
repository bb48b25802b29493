#!/usr/bin/env bash
# The same as scripts/start-distributed, under the name that Celery projects often use.
exec "$(dirname "${BASH_SOURCE[0]}")/start-distributed" "$@"
