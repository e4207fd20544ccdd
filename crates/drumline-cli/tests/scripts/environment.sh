#!/usr/bin/env bash
# Prints the variables that make a rank, as a script of any other language sees them.
set -euo pipefail
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $GROUP_RANK at $MASTER_ADDR: $*"
